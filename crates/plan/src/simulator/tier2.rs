//! Tier-2 nodes and the links between the tiers.

use super::{Machine, event, nanoseconds};
use crate::random::mix;
use crate::trace::TraceSpan;

#[derive(Clone, Debug, Default)]
pub(super) struct Tier2 {
    pub(super) shard: u32,
    pub(super) free_ns: u64,
    /// Whether an event will come once it is free.
    pub(super) wakes: bool,
    /// Shards on their way whose arrival is an event.
    pub(super) in_transit: u32,
    pub(super) waiting: u32,
    pub(super) busy_ns: u64,
    pub(super) in_free_ns: u64,
    pub(super) out_free_ns: u64,
}

/// A lane's route in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct WayNs {
    pub(super) send: u64,
    pub(super) send_far: u64,
    pub(super) attend: u64,
    pub(super) reply: u64,
    pub(super) reply_far: u64,
}

impl Machine<'_> {
    pub(super) fn send(&mut self, node: usize, shard: u32) {
        let worker = node * self.lanes + self.lane(shard);
        let way = self.ways[worker];
        let (send, send_far) = (self.part(shard, way.send), self.part(shard, way.send_far));
        let state = &mut self.tier1[node];
        let start = state.out_free_ns.max(self.now_ns);
        state.out_free_ns = start + send;
        state.out_ns += send;
        let near = state.out_free_ns;
        let far = &mut self.tier2[worker];
        far.in_free_ns = far.in_free_ns.max(start) + send_far;
        let arrival = near.max(far.in_free_ns) + self.delay_ns;
        // Later messages arrive later, so a node that will be idle then starts this shard at once.
        if far.in_transit == 0 && far.waiting == 0 && !far.wakes && far.free_ns <= arrival {
            self.attend(worker, shard, arrival);
        } else {
            far.in_transit += 1;
            self.schedule(arrival, event::ARRIVED, shard);
        }
    }

    pub(super) fn arrived(&mut self, shard: u32) {
        let stage = self.shards[shard as usize].stage;
        let node = self.program.stages[stage as usize].node as usize;
        let worker = node * self.lanes + self.lane(shard);
        let state = &mut self.tier2[worker];
        state.in_transit -= 1;
        if state.waiting == 0 && !state.wakes && state.free_ns <= self.now_ns {
            return self.attend(worker, shard, self.now_ns);
        }
        state.waiting += 1;
        self.tier2_queues.push(worker, (stage - self.first_stages[node]) as usize, shard);
        self.wake_when_free(worker);
    }

    fn wake_when_free(&mut self, worker: usize) {
        let state = &mut self.tier2[worker];
        if !state.wakes {
            state.wakes = true;
            let at = state.free_ns;
            self.schedule(at, event::ATTENDED, worker as u32);
        }
    }

    fn attend(&mut self, worker: usize, shard: u32, start_ns: u64) {
        let ns = self.attention_ns(worker, shard);
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier2(worker as u32), start_ns, shard, ns);
        self.tally.tier2_ns += ns;
        let state = &mut self.tier2[worker];
        state.shard = shard;
        state.free_ns = start_ns + ns;
        state.busy_ns += ns;
        if self.foreseen {
            let at = self.reply(worker, shard, start_ns + ns);
            self.move_on(shard, at);
        } else {
            self.wake_when_free(worker);
        }
    }

    fn attention_ns(&self, worker: usize, shard: u32) -> u64 {
        let samples = &self.program.ways[worker].attend_samples_seconds;
        if samples.is_empty() {
            return self.part(shard, self.ways[worker].attend);
        }
        // The same rows all through a step: the draw depends on flight, step and node alone.
        let flight = u64::from(shard) / self.lanes as u64;
        let step = u64::from(self.shards[shard as usize].step);
        let draw = mix(self.program.seed ^ (flight << 32) ^ step) ^ worker as u64;
        nanoseconds(samples[(mix(draw) % samples.len() as u64) as usize])
    }

    /// A worker is free. It answers, unless the answer was foreseen, and turns to the deepest waiting
    /// shard.
    pub(super) fn attended(&mut self, worker: usize) {
        self.tier2[worker].wakes = false;
        if !self.foreseen {
            let shard = self.tier2[worker].shard;
            let at = self.reply(worker, shard, self.now_ns);
            self.move_on(shard, at);
        }
        let Some(stage) = self.tier2_queues.deepest(worker) else { return };
        let shard = self.tier2_queues.pop(worker, stage).expect("the stage has a shard");
        self.tier2[worker].waiting -= 1;
        self.attend(worker, shard, self.now_ns);
        if self.tier2[worker].waiting > 0 {
            self.wake_when_free(worker);
        }
    }

    /// When an answer that leaves a worker at `from_ns` is back.
    fn reply(&mut self, worker: usize, shard: u32, from_ns: u64) -> u64 {
        let way = self.ways[worker];
        let (reply, reply_far) = (self.part(shard, way.reply), self.part(shard, way.reply_far));
        let start = self.tier2[worker].out_free_ns.max(from_ns);
        self.tier2[worker].out_free_ns = start + reply_far;
        let free = &mut self.tier1[worker / self.lanes].back_free_ns;
        *free = (*free).max(start) + reply;
        (*free).max(start + reply_far) + self.delay_ns
    }
}
