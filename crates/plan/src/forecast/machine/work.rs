//! What processes compute: when they look for work, how long it takes, and what it sends.

use super::{After, Deployment, Event, Machine, Shard};
use crate::trace::TraceSpan;
use glinthawk_protocol::{ShardId, Stage, Started, Tier1Work};

impl Machine<'_> {
    /// Has a process with a machine to itself look for work, if it is not computing or about to.
    pub(super) fn call(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if state.work.is_none() && !state.called {
            state.called = true;
            self.schedule(self.now_seconds, Event::Looks(process));
        }
    }

    pub(super) fn look(&mut self, process: usize) {
        self.processes[process].called = false;
        if let Some((work, seconds)) = self.next_work(process) {
            self.processes[process].work = Some((work, self.now_seconds));
            self.schedule(self.now_seconds + seconds, Event::Computed(process));
        }
    }

    /// Wakes a process that has something to do.
    pub(super) fn wake(&mut self, process: usize) {
        if self.apart {
            return self.call(process);
        }
        let core = self.processes[process].core;
        if self.cores[core].wake(self.now_seconds, process) {
            self.foresee(core);
        }
    }

    /// Gives a process that has its core its next work, or lets it sleep.
    pub(super) fn start(&mut self, process: usize) {
        let core = self.processes[process].core;
        let Some((work, seconds)) = self.next_work(process) else {
            return self.cores[core].sleep();
        };
        self.processes[process].work = Some((work, self.now_seconds));
        self.cores[core].compute(seconds, After::Computed(process));
    }

    /// The next work of a process and its seconds.
    fn next_work(&mut self, process: usize) -> Option<(Started<()>, f64)> {
        let now_ns = self.now_ns();
        let nodes = &mut self.processes[process].nodes;
        let slice = nodes.slice;
        let Ok(work) = nodes.start(now_ns);
        if let (None, Some(at_ns)) = (&work, nodes.patient_until_ns()) {
            self.schedule(at_ns as f64 * 1e-9, Event::Wakes { process, at_ns });
        }
        let work = work?;
        let seconds = match &work {
            Started::Tier1(work) => {
                for task in &work.tasks {
                    self.forecast.queueing_seconds +=
                        self.now_seconds - self.shard(task.launch.step.shard).ready_seconds[0];
                }
                let rows = work.rows();
                self.forecast.tier1_batches += 1;
                self.forecast.tier1_rows += rows as u64;
                self.deployment.crowding[0] * self.tier1_seconds(slice, work, rows)
            }
            Started::Tier2(work) => {
                let Shard { attention_seconds, ready_seconds, .. } =
                    *self.shard(work.attend.step.shard);
                self.forecast.queueing_seconds += self.now_seconds - ready_seconds[1];
                self.grains[slice] * (attention_seconds + self.handing_seconds(process))
            }
        };
        Some((work, seconds))
    }

    /// Seconds in which a process on cores wakes the thread that sends what it computed, if that has a core of its own.
    fn handing_seconds(&self, process: usize) -> f64 {
        let Deployment { tier1, tier2_kernels, slices, .. } = self.deployment;
        let on_device = match process < slices.len() {
            true => tier1.on_device(),
            false => tier2_kernels.on_device(),
        };
        let is_woken = self.sending_core(process) != self.processes[process].core && !on_device;
        if is_woken { tier1.overheads().wake_seconds } else { 0.0 }
    }

    fn tier1_seconds(&self, slice: usize, work: &Tier1Work<()>, rows: usize) -> f64 {
        let kernels = &self.deployment.tier1;
        let fused = match self.in_one_process() {
            true => kernels.fused_at_once_seconds(rows),
            false => kernels.fused_seconds(rows),
        };
        // Layers that this one also stands for lie half before its attention and half after.
        let grain = self.grains[slice];
        let more = if grain > 1.0 { (grain - 1.0) / 2.0 * fused } else { 0.0 };
        match work.stage {
            Stage::Enter => kernels.pre_seconds(rows) + more,
            Stage::Middle(_) => grain * fused,
            Stage::Exit if slice + 1 < self.deployment.slices.len() => {
                kernels.post_seconds(rows) + more
            }
            Stage::Exit => {
                let classify = match self.deployment.greedy {
                    true => kernels.classify_seconds(work.samples()),
                    false => kernels.logits_seconds(work.samples()),
                };
                kernels.post_seconds(rows) + more + classify
            }
        }
    }

    pub(super) fn computed(&mut self, process: usize) {
        let (work, started) = self.processes[process].work.take().expect("it was computing");
        let slice = self.processes[process].nodes.slice;
        let seconds = self.now_seconds - started;
        match &work {
            Started::Tier1(work) => {
                self.forecast.tier1_seconds[slice] += seconds;
                self.forecast.tier1_shard_seconds += seconds * work.tasks.len() as f64;
                let shard = work.tasks[0].launch.step.shard;
                self.record(TraceSpan::tier1(slice as u32), started, seconds, shard);
            }
            Started::Tier2(work) => {
                let shard = work.attend.step.shard;
                let worker = slice * self.deployment.lanes() + shard.lane as usize;
                self.forecast.tier2_seconds[worker] += seconds;
                self.record(TraceSpan::tier2(worker as u32), started, seconds, shard);
            }
        }
        let mut outbox = Vec::new();
        let now_ns = self.now_ns();
        let Ok(()) = self.processes[process].nodes.finish(work, now_ns, &mut outbox);
        for outgoing in outbox {
            self.send(Some(process), outgoing.to, outgoing.parcel);
        }
    }

    fn record(&mut self, span: TraceSpan, started_seconds: f64, seconds: f64, shard: ShardId) {
        if let Some(trace) = &mut self.trace {
            trace.push(span, started_seconds, seconds, shard.flight, shard.lane);
        }
    }
}
