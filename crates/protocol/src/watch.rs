//! Finds nodes that are there and do nothing: their process lives and says so, but a step that passes through them never
//! comes home. The dispatcher's process asks the nodes on the step's way where it is. A node that does not answer hangs.
//! One that leaves a Tier-1 node without attention, asked twice, keeps it back. A step that nobody has is launched again.
//!
//! How long is too long follows from how long steps take, within bounds. Nothing but speed depends on it.

use crate::roster::Place;
use glinthawk_flight::{ShardId, StepId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// A step may take so many times as long as the slowest of late.
const PATIENCE: u64 = 20;

/// The slowest step of late is forgotten by this part with every step.
const FORGOTTEN_PART: u64 = 16;

/// A step that a Tier-1 node has, and the layer of the slice that it attends in, if it does.
pub type Held = (StepId, Option<u32>);

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Finding {
    /// The nodes on a step's way should be asked where it is: [`Watch::ask`].
    Overdue(StepId),
    /// These nodes do not answer, for so many nanoseconds.
    Silent(Vec<Place>, u64),
    /// This Tier-1 node has waited for the attention of its node on a lane, for so many nanoseconds.
    Withheld(Place, u32, u64),
    /// Nobody has a step.
    Astray(StepId),
}

/// See the module's head.
pub struct Watch {
    /// How long a step may take at least, and at most, in nanoseconds.
    bounds_ns: RangeInclusive<u64>,
    /// The slowest step of late.
    slowest_ns: Option<u64>,
    /// The newest step of each shard in the air, and since when.
    in_air: BTreeMap<ShardId, (StepId, u64)>,
    inquiry: Option<Inquiry>,
}

struct Inquiry {
    step: StepId,
    since_ns: u64,
    /// Who has not answered.
    asked: BTreeSet<Place>,
    /// Who has the step, and the layer that it attends in.
    found: Vec<(Place, Option<u32>)>,
    /// What was found when the same was asked before.
    before: Option<Vec<(Place, Option<u32>)>>,
}

impl Watch {
    /// A watch over nothing, with the least and the most nanoseconds that a step may take.
    pub fn new(bounds_ns: RangeInclusive<u64>) -> Self {
        Self { bounds_ns, slowest_ns: None, in_air: BTreeMap::new(), inquiry: None }
    }

    /// A step is launched. It takes the place of an earlier one of its shard.
    pub fn launch(&mut self, step: StepId, now_ns: u64) {
        self.in_air.insert(step.shard, (step, now_ns));
    }

    /// A step is home.
    pub fn home(&mut self, step: StepId, now_ns: u64) {
        if self.in_air.get(&step.shard).is_some_and(|(newest, _)| *newest == step)
            && let Some((_, since_ns)) = self.in_air.remove(&step.shard)
        {
            let took_ns = now_ns.saturating_sub(since_ns);
            let before_ns = self.slowest_ns.unwrap_or(0);
            self.slowest_ns = Some(took_ns.max(before_ns - before_ns / FORGOTTEN_PART));
        }
    }

    /// A lane is lost: its steps do not come home.
    pub fn forget(&mut self, lane: u32) {
        self.in_air.retain(|shard, _| shard.lane != lane);
    }

    fn patience_ns(&self) -> u64 {
        let (least, most) = (*self.bounds_ns.start(), *self.bounds_ns.end());
        self.slowest_ns.map_or(most, |slowest| (PATIENCE * slowest).clamp(least, most))
    }

    /// Looks at everything that is under way on the lanes that are open. Call it now and then, after everything that
    /// came was taken in.
    pub fn look(&mut self, now_ns: u64, is_open: impl Fn(u32) -> bool) -> Option<Finding> {
        let patience_ns = self.patience_ns();
        let in_air = &self.in_air;
        let is_waited_for = |step: StepId| {
            in_air.get(&step.shard).is_some_and(|(newest, _)| *newest == step)
                && is_open(step.shard.lane)
        };
        if self.inquiry.as_ref().is_some_and(|inquiry| !is_waited_for(inquiry.step)) {
            self.inquiry = None;
        }
        if let Some(inquiry) = &self.inquiry {
            let is_over = now_ns.saturating_sub(inquiry.since_ns) >= patience_ns;
            return if is_over { self.conclude(now_ns) } else { None };
        }
        let overdue = self.in_air.values().filter(|(step, since_ns)| {
            is_waited_for(*step) && now_ns.saturating_sub(*since_ns) >= patience_ns
        });
        overdue.min_by_key(|(_, since_ns)| *since_ns).map(|(step, _)| Finding::Overdue(*step))
    }

    /// The nodes on a step's way have been asked.
    pub fn ask(&mut self, step: StepId, asked: impl Iterator<Item = Place>, now_ns: u64) {
        let before = self.inquiry.take().filter(|inquiry| inquiry.step == step);
        let before = before.map(|inquiry| inquiry.found);
        let asked = asked.collect();
        self.inquiry = Some(Inquiry { step, since_ns: now_ns, asked, found: Vec::new(), before });
    }

    /// A node has answered, with the steps of the lane that it has.
    pub fn answered(&mut self, place: Place, held: &[Held]) {
        if let Some(inquiry) = &mut self.inquiry
            && inquiry.asked.remove(&place)
        {
            let own = held.iter().filter(|(step, _)| *step == inquiry.step);
            inquiry.found.extend(own.map(|(_, layer)| (place, *layer)));
        }
    }

    fn conclude(&mut self, now_ns: u64) -> Option<Finding> {
        let Inquiry { step, since_ns, asked, mut found, before } = self.inquiry.take()?;
        let waited_ns = now_ns.saturating_sub(since_ns);
        if !asked.is_empty() {
            // A Tier-2 node may only wait for its Tier-1 node.
            let (tier1, tier2): (Vec<Place>, Vec<Place>) =
                asked.into_iter().partition(|place| place.lane.is_none());
            return Some(Finding::Silent(if tier1.is_empty() { tier2 } else { tier1 }, waited_ns));
        }
        found.sort_unstable();
        let waits_for_tier1 = matches!(found.last(), Some((_, None)));
        let has_moved = before.as_ref().is_some_and(|before| *before != found);
        if waits_for_tier1 || has_moved {
            // It may wait for another one, whose turn it is to be asked for.
            self.in_air.insert(step.shard, (step, now_ns));
            return None;
        }
        Some(match (before, found.last()) {
            (None, _) => {
                let asked = BTreeSet::new();
                self.inquiry = Some(Inquiry { step, since_ns, asked, found, before: None });
                Finding::Overdue(step)
            }
            (_, None) => Finding::Astray(step),
            (_, Some((tier1, _))) => Finding::Withheld(*tier1, step.shard.lane, waited_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIER1: Place = Place { pipeline: 0, slice: 0, lane: None };
    const TIER2: Place = Place { lane: Some(3), ..TIER1 };

    fn step(epoch: u64) -> StepId {
        StepId { shard: ShardId { flight: 1, lane: 3 }, epoch }
    }

    /// A watch whose steps took 10, with one in the air since 100 that is overdue.
    fn overdue() -> Watch {
        let mut watch = Watch::new(50..=1_000);
        watch.launch(step(1), 0);
        assert_eq!(watch.look(999, |_| true), None, "nothing is known of steps yet");
        watch.home(step(1), 10);
        watch.launch(step(2), 100);
        assert_eq!(watch.look(299, |_| true), None);
        assert_eq!(watch.look(300, |_| false), None, "the lane rests");
        assert_eq!(watch.look(300, |_| true), Some(Finding::Overdue(step(2))));
        watch.ask(step(2), [TIER1, TIER2].into_iter(), 300);
        assert_eq!(watch.look(499, |_| true), None, "they have time to answer");
        watch
    }

    #[test]
    fn who_does_not_answer_hangs() {
        let mut watch = overdue();
        watch.answered(TIER1, &[(step(2), Some(0))]);
        assert_eq!(watch.look(500, |_| true), Some(Finding::Silent(vec![TIER2], 200)));
        let mut watch = overdue();
        let silent = Finding::Silent(vec![TIER1], 200);
        assert_eq!(watch.look(500, |_| true), Some(silent), "the other may wait for it");
    }

    #[test]
    fn who_keeps_a_layer_back_is_found_the_second_time() {
        let mut watch = overdue();
        for (time, layer, finding) in [
            (500, 0, Some(Finding::Overdue(step(2)))),
            (700, 1, None), // it has moved
            (900, 1, Some(Finding::Overdue(step(2)))),
            (1100, 1, Some(Finding::Overdue(step(2)))),
            (1300, 1, Some(Finding::Withheld(TIER1, 3, 200))),
        ] {
            watch.answered(TIER1, &[(step(2), Some(layer))]);
            watch.answered(TIER2, &[]);
            let found = watch.look(time, |_| true);
            assert_eq!(found, finding, "at {time}");
            if let Some(Finding::Overdue(step)) = found {
                watch.ask(step, [TIER1, TIER2].into_iter(), time);
            }
        }
    }

    #[test]
    fn what_nobody_has_is_astray_and_what_waits_is_not() {
        let mut watch = overdue();
        for (time, finding) in [(500, Finding::Overdue(step(2))), (700, Finding::Astray(step(2)))] {
            watch.answered(TIER1, &[]);
            watch.answered(TIER2, &[]);
            assert_eq!(watch.look(time, |_| true), Some(finding));
            watch.ask(step(2), [TIER1, TIER2].into_iter(), time);
        }
        let mut watch = overdue();
        let other = StepId { shard: ShardId { flight: 7, lane: 3 }, epoch: 1 };
        watch.launch(other, 200);
        watch.answered(TIER1, &[(step(2), None)]);
        watch.answered(TIER2, &[]);
        assert_eq!(watch.look(500, |_| true), None, "it waits for its turn");
        assert_eq!(watch.look(500, |_| true), Some(Finding::Overdue(other)), "perhaps for this");
    }

    #[test]
    fn what_came_home_is_not_asked_for() {
        let mut watch = overdue();
        watch.home(step(2), 450);
        assert_eq!(watch.look(500, |_| true), None);
        watch.launch(step(3), 500);
        watch.forget(3);
        assert_eq!(watch.look(50_000, |_| true), None, "its lane is lost");
    }
}
