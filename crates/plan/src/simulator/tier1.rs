//! Tier-1 nodes: shards wait by stage and class, the deepest stage is computed first.

use super::{Machine, event, nanoseconds};
use crate::trace::TraceSpan;

#[derive(Clone, Debug, Default)]
pub(super) struct Tier1 {
    pub(super) busy: bool,
    /// Whether it is in the list of nodes to be started.
    pub(super) called: bool,
    pub(super) batch: Vec<u32>,
    pub(super) busy_ns: u64,
    pub(super) out_free_ns: u64,
    pub(super) out_ns: u64,
    pub(super) back_free_ns: u64,
    pub(super) hop_free_ns: u64,
}

impl Machine<'_> {
    pub(super) fn wait_for_tier1(&mut self, shard: u32) {
        self.tickets = self.tickets.wrapping_add(1);
        let state = &mut self.shards[shard as usize];
        state.ticket = self.tickets;
        let node = self.program.stages[state.stage as usize].node;
        let stage = (state.stage - self.first_stages[node as usize]) as usize;
        let queue = node as usize * self.class_rows.len() + self.class(shard);
        self.tier1_queues.push(queue, stage, shard);
        self.call(node);
    }

    /// Makes a node look for work at the end of the moment.
    fn call(&mut self, node: u32) {
        let state = &mut self.tier1[node as usize];
        if !state.busy && !state.called {
            state.called = true;
            self.called.push(node);
        }
    }

    pub(super) fn start_tier1(&mut self, node: u32) {
        self.tier1[node as usize].called = false;
        let Some(deepest) = self.deepest(node as usize) else { return };
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        let rows = self.merge(node as usize, deepest, &mut batch);
        let stage = self.first_stages[node as usize] + deepest as u32;
        let ns = self.stage_ns(stage, rows);
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier1(node), self.now_ns, batch[0], ns);
        self.tally.tier1_ns += ns * batch.len() as u64;
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch) = (true, batch);
        state.busy_ns += ns;
        self.schedule(self.now_ns + ns, event::COMPUTED, node);
    }

    /// The deepest stage of a node that shards wait for.
    fn deepest(&self, node: usize) -> Option<usize> {
        let classes = self.class_rows.len();
        (node * classes..(node + 1) * classes)
            .filter_map(|queue| self.tier1_queues.deepest(queue))
            .max()
    }

    /// Moves shards that wait for a stage into `batch`, oldest first, as long as their rows fit; returns the rows.
    fn merge(&mut self, node: usize, stage: usize, batch: &mut Vec<u32>) -> usize {
        let mut rows = 0;
        let first_queue = node * self.class_rows.len();
        loop {
            let room = self.program.rows - rows;
            let mut oldest: Option<(u32, usize)> = None;
            for (class, &own) in self.class_rows.iter().enumerate() {
                if own > room {
                    continue;
                }
                let Some(shard) = self.tier1_queues.first(first_queue + class, stage) else {
                    continue;
                };
                let ticket = self.shards[shard as usize].ticket;
                if oldest.is_none_or(|(other, _)| ticket < other) {
                    oldest = Some((ticket, class));
                }
            }
            let Some((_, class)) = oldest else { return rows };
            batch.extend(self.tier1_queues.pop(first_queue + class, stage));
            rows += self.class_rows[class];
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
        for &shard in &batch {
            if !self.stage(shard).attends {
                self.advance(shard);
            } else if self.program.lanes[self.lane(shard)].local {
                kept.push(shard);
            } else {
                self.send(node as usize, shard);
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

    pub(super) fn attended_locally(&mut self, node: u32) {
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        batch.drain(..).for_each(|shard| self.move_on(shard, self.now_ns));
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch) = (false, batch);
        self.call(node);
    }
}
