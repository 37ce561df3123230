//! What a Tier-1 node computes next, by the same rule as `Tier1Node` of the protocol: whole flights first, the deepest
//! stage first, and a bounded wait for the rest of a flight.

use super::{Machine, NOWHERE, Shard, event};
use std::ops::Range;

impl Machine<'_> {
    /// The shards of a shard's flight.
    fn flight(&self, shard: u32) -> Range<usize> {
        let first = shard as usize / self.lanes * self.lanes;
        first..first + self.lanes
    }

    /// A flight's part on a node.
    fn part_of(&self, node: usize, shard: u32) -> usize {
        node * self.program.flights + shard as usize / self.lanes
    }

    /// A shard that begins a step is in step with the first of its flight, or is the first.
    pub(super) fn count_lap(&mut self, shard: u32) {
        let laps = self.shards[self.flight(shard)].iter().map(|mate| mate.lap);
        let first = laps.max().expect("the shard itself");
        let own = &mut self.shards[shard as usize].lap;
        *own = if first > *own { first } else { *own + 1 };
    }

    /// Finds out whether the hindmost of a shard's flight on a node all wait: then no other can join them.
    pub(super) fn gather(&mut self, node: usize, shard: u32) {
        let (mut hindmost, mut all_wait) = ((u32::MAX, u32::MAX), false);
        for mate in &self.shards[self.flight(shard)] {
            let at = (mate.lap, mate.next);
            if mate.node == node as u32 && at <= hindmost {
                all_wait = mate.waits && (all_wait || at < hindmost);
                hindmost = at;
            }
        }
        let stage = if all_wait { hindmost.1 - self.first_stages[node] } else { NOWHERE };
        let part = self.part_of(node, shard);
        let known = std::mem::replace(&mut self.whole_at[part], stage);
        if known == stage {
            return;
        }
        if known != NOWHERE {
            self.whole.remove(node, known as usize, part as u32);
        }
        if stage != NOWHERE {
            self.whole.push(node, stage as usize, part as u32);
        }
    }

    /// The stage that a node should compute now.
    pub(super) fn next_stage(&mut self, node: usize) -> Option<usize> {
        if let Some(stage) = self.whole.deepest(node) {
            return Some(stage);
        }
        let stage = self.tier1_queues.deepest(node)?;
        if self.tier1[node].patient_until_ns.is_none()
            && !self.tier1[node].pace.has_time_to_spare(self.now_ns)
        {
            let saved_ns = self.saved_ns(node, stage);
            if saved_ns > 0 {
                let until_ns = self.now_ns + saved_ns;
                self.tier1[node].patient_until_ns = Some(until_ns);
                self.schedule(until_ns, event::WAKES, node as u32);
            }
        }
        let waits =
            self.tier1[node].patient_until_ns.is_some_and(|until_ns| self.now_ns < until_ns);
        (!waits).then_some(stage)
    }

    /// The most that the node would save if one of the flights at a stage were whole. Those who are to come there next
    /// are awaited, others of the flight are not.
    fn saved_ns(&self, node: usize, stage: usize) -> u64 {
        let at = self.first_stages[node] + stage as u32;
        let mut most_ns = 0;
        let mut next = self.tier1_queues.first(node, stage);
        while let Some(shard) = next {
            next = self.tier1_queues.next(shard);
            let lap = self.shards[shard as usize].lap;
            let (mut here, mut awaited) = (0, 0);
            for mate in self.flight(shard) {
                let (rows, mate) = (self.rows(mate as u32), &self.shards[mate]);
                if (mate.node, mate.lap, mate.next) == (node as u32, lap, at) {
                    *(if mate.waits { &mut here } else { &mut awaited }) += rows;
                }
            }
            if awaited > 0 {
                let saved_ns = self.tier1[node].pace.saved_ns(self.kind(at), here, awaited);
                most_ns = most_ns.max(saved_ns);
            }
        }
        most_ns
    }

    /// Moves shards that wait for a stage into `batch` as long as their rows fit, whole flights first; returns the rows.
    pub(super) fn merge(&mut self, node: usize, stage: usize, batch: &mut Vec<u32>) -> usize {
        let rows_max = self.program.rows;
        let mut rows = 0;
        let mut next = self.whole.first(node, stage);
        while let Some(part) = next
            && rows < rows_max
        {
            next = self.whole.next(part);
            rows += self.take_whole(node, stage, part, rows_max - rows, batch);
        }
        let mut next = self.tier1_queues.first(node, stage);
        while let Some(shard) = next
            && rows < rows_max
        {
            next = self.tier1_queues.next(shard);
            let own = self.rows(shard);
            if self.whole_at[self.part_of(node, shard)] != stage as u32 && rows + own <= rows_max {
                rows += own;
                self.take(node, stage, shard, batch);
            }
        }
        rows
    }

    /// Moves a whole flight into `batch` if its rows fit; returns them.
    fn take_whole(
        &mut self,
        node: usize,
        stage: usize,
        part: u32,
        room: usize,
        batch: &mut Vec<u32>,
    ) -> usize {
        let place = (node as u32, self.first_stages[node] + stage as u32, true);
        let flight = self.flight((part as usize % self.program.flights * self.lanes) as u32);
        let here = |shard: &Shard| (shard.node, shard.next, shard.waits) == place;
        let rows_of = |shard| if here(&self.shards[shard]) { self.rows(shard as u32) } else { 0 };
        let rows = flight.clone().map(rows_of).sum();
        if rows > room {
            return 0;
        }
        self.whole.remove(node, stage, part);
        self.whole_at[part as usize] = NOWHERE;
        for shard in flight {
            if here(&self.shards[shard]) {
                self.take(node, stage, shard as u32, batch);
            }
        }
        rows
    }

    fn take(&mut self, node: usize, stage: usize, shard: u32, batch: &mut Vec<u32>) {
        self.tier1_queues.remove(node, stage, shard);
        self.shards[shard as usize].waits = false;
        batch.push(shard);
    }
}
