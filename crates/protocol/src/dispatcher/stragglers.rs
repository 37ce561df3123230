//! Lanes that are persistently slower than the others, because one of their nodes or links is. While there are prompts for
//! all lanes, a slow one does what it can. Otherwise it gets fewer contexts than the others, and none that would be the
//! last to end.

use super::{Dispatcher, Lane};

/// Steps over which it is found out how slow a lane is.
const STEPS: u64 = 32;

/// The slowness of a lane that keeps up with the others, in thousandths.
pub(super) const USUAL: u64 = 1000;

/// The least slowness that anything follows from.
const SLOW: u64 = 2 * USUAL;

impl Lane {
    fn contexts(&self, slots: u32) -> u64 {
        u64::from(slots) - self.slots_free.len() as u64
    }

    fn is_slow(&self) -> bool {
        !self.lost && self.slowness >= SLOW
    }
}

impl Dispatcher {
    /// What a step takes on the usual one of the other lanes, and how many contexts those have on average. Lanes that
    /// prompts wait for are not compared with others.
    fn usual(&self, lane: u32) -> Option<(u64, u64)> {
        let is_compared = |number: u32, other: &Lane| {
            number != lane && !other.lost && !self.config.is_filled_first(number)
        };
        let others = (0..).zip(&self.lanes).filter(|(number, other)| is_compared(*number, other));
        let (mut steps_ns, mut contexts) = (Vec::new(), 0);
        for (number, other) in others {
            steps_ns.extend(other.step_ns);
            contexts += other.contexts(self.config.lane_shape(number).slots());
        }
        steps_ns.sort_unstable();
        let usual_ns = *steps_ns.get(steps_ns.len() / 2)?;
        Some((usual_ns.max(1), contexts.div_ceil(steps_ns.len() as u64)))
    }

    /// A step of a lane came home: how slow is it? A node attends for as long as it has contexts, and a link is as slow
    /// for few as for many. So a lane with fewer contexts is at least as slow as its steps, and at most as slow as its
    /// contexts.
    pub(super) fn weigh(&mut self, lane: u32) {
        let is_compared = self.config.nodes_apart && !self.config.is_filled_first(lane);
        let usual = self.usual(lane).filter(|_| is_compared);
        let slots = self.config.lane_shape(lane).slots();
        let state = &mut self.lanes[lane as usize];
        let (Some((usual_ns, contexts)), Some(own_ns)) = (usual, state.step_ns) else { return };
        let by_steps = own_ns * USUAL / usual_ns;
        let by_contexts = by_steps * contexts / state.contexts(slots).max(1);
        let (least, most) = (by_steps.min(by_contexts), by_steps.max(by_contexts));
        let target = state.slowness.clamp(least, most);
        state.slowness = (state.slowness * (STEPS - 1) + target) / STEPS;
    }

    /// How slow a lane is, if anything follows from it.
    pub(super) fn slowness(&self, lane: u32) -> u64 {
        let lane = &self.lanes[lane as usize];
        if lane.is_slow() { lane.slowness } else { USUAL }
    }

    /// Whether a lane would be through with another prompt before the others are through with all that wait: if it is
    /// slow, it is not slower than those are more than one crowd of the others. While prompts keep coming, there is
    /// time.
    pub(super) fn is_in_time(&self, lane: u32) -> bool {
        let slowness = self.slowness(lane);
        if slowness == USUAL || !self.wants_prompts() {
            return true;
        }
        let others = self.shards.iter().filter(|(shard, _)| shard.lane != lane);
        let crowd: u64 = others.map(|(_, state)| state.seated.len() as u64).sum();
        slowness * crowd <= USUAL * (crowd + self.queue.len() as u64)
    }

    /// The share of contexts of each lane: 1 if it keeps up with the others.
    pub fn lane_shares(&self) -> Vec<f64> {
        let lanes = 0..self.lanes.len() as u32;
        lanes.map(|lane| USUAL as f64 / self.slowness(lane) as f64).collect()
    }

    /// The lanes that are slow.
    pub fn lanes_slow(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.lanes).filter(|(_, lane)| lane.is_slow()).map(|(lane, _)| lane)
    }
}
