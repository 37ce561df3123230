//! Tier-1 nodes: shards wait by stage, a batch is computed, and its shards go on.

use super::{Machine, NOWHERE, event, nanoseconds};
use crate::trace::TraceSpan;
use glinthawk_protocol::{BatchKind, Pace};

#[derive(Clone, Debug, Default)]
pub(super) struct Tier1 {
    pub(super) busy: bool,
    /// Whether it is in the list of nodes to be started.
    pub(super) called: bool,
    pub(super) batch: Vec<u32>,
    /// Until when it waits for the rest of a flight.
    pub(super) patient_until_ns: Option<u64>,
    pub(super) pace: Pace,
    pub(super) busy_ns: u64,
    pub(super) out_free_ns: u64,
    pub(super) out_ns: u64,
    pub(super) back_free_ns: u64,
    pub(super) hop_free_ns: u64,
}

impl Machine<'_> {
    pub(super) fn wait_for_tier1(&mut self, shard: u32) {
        let state = &mut self.shards[shard as usize];
        let node = self.program.stages[state.stage as usize].node;
        (state.node, state.next, state.waits) = (node, state.stage, true);
        let stage = (state.stage - self.first_stages[node as usize]) as usize;
        self.tier1_queues.push(node as usize, stage, shard);
        self.gather(node as usize, shard);
        self.call(node);
    }

    /// Makes a node look for work at the end of the moment.
    pub(super) fn call(&mut self, node: u32) {
        let state = &mut self.tier1[node as usize];
        if !state.busy && !state.called {
            state.called = true;
            self.called.push(node);
        }
    }

    pub(super) fn start_tier1(&mut self, node: u32) {
        self.tier1[node as usize].called = false;
        let Some(local_stage) = self.next_stage(node as usize) else { return };
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        let rows = self.merge(node as usize, local_stage, &mut batch);
        let stage = self.first_stages[node as usize] + local_stage as u32;
        let ns = self.stage_ns(stage, rows);
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier1(node), self.now_ns, batch[0], ns);
        self.tally.tier1_ns += ns * batch.len() as u64;
        if self.lanes > 1 {
            let kind = self.kind(stage);
            let mut pace = std::mem::take(&mut self.tier1[node as usize].pace);
            pace.start(kind, self.now_ns, batch.iter().map(|&shard| self.rows(shard)));
            pace.learn(kind, rows, ns);
            self.tier1[node as usize].pace = pace;
        }
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch, state.patient_until_ns) = (true, batch, None);
        state.busy_ns += ns;
        self.schedule(self.now_ns + ns, event::COMPUTED, node);
    }

    /// The kind of a stage's batches.
    pub(super) fn kind(&self, stage: u32) -> BatchKind {
        let stages = &self.program.stages;
        let node = stages[stage as usize].node;
        if stage == self.first_stages[node as usize] {
            BatchKind::Enter
        } else if stages.get(stage as usize + 1).is_some_and(|next| next.node == node) {
            BatchKind::Middle
        } else {
            BatchKind::Exit
        }
    }

    fn stage_ns(&mut self, stage: u32, rows: usize) -> u64 {
        let time = self.program.stages[stage as usize].time as usize;
        let known = &mut self.times_ns[time * (self.program.rows + 1) + rows];
        if *known == u64::MAX {
            *known = nanoseconds(self.program.times[time].seconds(rows));
        }
        *known
    }

    pub(super) fn computed(&mut self, node: u32) {
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        let mut kept = std::mem::take(&mut self.kept);
        for (index, &shard) in batch.iter().enumerate() {
            self.shards[shard as usize].next += 1;
            if !self.stage(shard).attends {
                self.leave(node, shard);
            } else if self.program.lanes[self.lane(shard)].local {
                kept.push(shard);
            } else {
                self.send(node as usize, shard);
            }
            let flight = |shard: u32| shard as usize / self.lanes;
            if batch.get(index + 1).is_none_or(|&next| flight(next) != flight(shard)) {
                self.gather(node as usize, shard);
            }
        }
        batch.clear();
        if kept.is_empty() {
            let state = &mut self.tier1[node as usize];
            (state.busy, state.batch, self.kept) = (false, batch, kept);
            return self.call(node);
        }
        self.kept = batch;
        let worker = node as usize * self.lanes + self.lane(kept[0]);
        let parts = kept.iter().map(|&shard| self.part(shard, self.ways[worker].attend));
        let ns = parts.sum();
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier1_attention(node), self.now_ns, kept[0], ns);
        self.tally.tier1_ns += ns * kept.len() as u64;
        let state = &mut self.tier1[node as usize];
        state.busy_ns += ns;
        state.batch = kept;
        self.schedule(self.now_ns + ns, event::ATTENDED_LOCALLY, node);
    }

    /// The shard goes on to its next stage without attention, perhaps on another node.
    fn leave(&mut self, node: u32, shard: u32) {
        let next = self.program.stages.get(self.shards[shard as usize].next as usize);
        if next.is_none_or(|next| next.node != node) {
            self.shards[shard as usize].node = NOWHERE;
        }
        self.advance(shard);
    }

    pub(super) fn attended_locally(&mut self, node: u32) {
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        batch.drain(..).for_each(|shard| self.move_on(shard, self.now_ns));
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch) = (false, batch);
        self.call(node);
    }
}
