//! Which waiting prompt is seated next, and where: the oldest, unless memory is short and a younger one finds more of its
//! beginning there.
//!
//! If contexts do not all fit, prompts of many beginnings in turns would have each beginning dropped and computed again
//! and again. So those whose beginning is there go first, while others wait until that text is no longer wanted.

use super::entry::Entry;
use super::need::{Need, Needs};
use super::stragglers::USUAL;
use super::{Dispatcher, Lane};
use crate::prompt::PromptId;
use glinthawk_flight::{ShardId, pages_for};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How many prompts, from the oldest waiting one on, are looked at. So fewer than this ever pass an older one.
const LOOK_AHEAD: u64 = 256;

/// Rows planned for a shard that is home, in the order they will stand.
#[derive(Default)]
pub(super) struct Manifest {
    pub rows: u32,
    pub prompts: Vec<(PromptId, u32)>,
}

/// What is planned for all shards that are home.
pub(super) type Manifests = BTreeMap<ShardId, Manifest>;

/// A waiting prompt that has found a place.
pub(super) struct Newcomer {
    pub id: PromptId,
    pub shard: ShardId,
    /// What it needs beside the pages that it shares there.
    pub need: Need,
}

impl Dispatcher {
    /// The waiting prompt that is seated next, if there is room for it. `needs` is what those seated need of each lane.
    pub(super) fn newcomer(
        &self,
        flights: u32,
        needs: &[Needs],
        manifests: &Manifests,
    ) -> Option<Newcomer> {
        let &(_, oldest) = self.queue.first()?;
        let place = self.place_for(oldest, flights, needs, manifests);
        let is_home = |lane: &u32| manifests.keys().any(|shard| shard.lane == *lane);
        let lanes: Vec<u32> = self.lanes_used().filter(is_home).collect();
        let wanted = match &place {
            Some(place) => vec![place.shard.lane],
            None => lanes.clone(),
        };
        if wanted.into_iter().any(|lane| self.has_room_beside_kept(oldest, lane, needs)) {
            return place;
        }
        let younger = self.better_placed(oldest, &lanes);
        younger.and_then(|id| self.place_for(id, flights, needs, manifests)).or(place)
    }

    /// Whether a prompt finds room on a lane beside all pages that are kept there.
    fn has_room_beside_kept(&self, id: PromptId, lane: u32, needs: &[Needs]) -> bool {
        let Lane { pages, .. } = &self.lanes[lane as usize];
        let wanted = self.wanted_on(id, &self.lanes[lane as usize]);
        let wanted = u64::from(wanted.pages(self.config.page_positions) + pages.kept());
        needs[lane as usize].pages_in_the_end() + wanted <= u64::from(pages.total())
    }

    /// What a waiting prompt would need of a lane beside the pages that it would share.
    fn wanted_on(&self, id: PromptId, lane: &Lane) -> Need {
        let need = self.need_of(&self.entries[&id]);
        // Those that it would share are of its input.
        let now = need.now - self.pages_shared(id, lane) * self.config.page_positions;
        Need { now, ..need }
    }

    /// The prompt not much younger than the oldest that finds more pages of its beginning than that one, and the most of
    /// all, on one of some lanes. Nobody passes a prompt that has been preempted.
    fn better_placed(&self, oldest: PromptId, lanes: &[u32]) -> Option<PromptId> {
        let (priority, _) = self.entries[&oldest].rank();
        if !self.config.sharing || self.entries[&oldest].reached > 0 {
            return None;
        }
        let found = |id: PromptId| {
            let lanes = lanes.iter().map(|&lane| &self.lanes[lane as usize]);
            lanes.map(|lane| self.pages_shared(id, lane)).max().unwrap_or(0)
        };
        let end = PromptId(oldest.0.saturating_add(LOOK_AHEAD));
        let younger = self.queue.range((priority, oldest)..(priority, end)).skip(1);
        let most = younger.map(|&(_, id)| (found(id), Reverse(id))).max();
        most.filter(|(pages, _)| *pages > found(oldest)).map(|(_, Reverse(id))| id)
    }

    /// Where a waiting prompt would be seated now.
    fn place_for(
        &self,
        id: PromptId,
        flights: u32,
        needs: &[Needs],
        manifests: &Manifests,
    ) -> Option<Newcomer> {
        let shared: Vec<u32> = self.lanes.iter().map(|lane| self.pages_shared(id, lane)).collect();
        let wanted: Vec<Need> = self.lanes.iter().map(|lane| self.wanted_on(id, lane)).collect();
        let shard = self.shard_for(flights, &wanted, &shared, needs, manifests)?;
        Some(Newcomer { id, shard, need: wanted[shard.lane as usize] })
    }

    /// The shard at home that should take a waiting prompt, if one can. Of each lane: `wanted` is what the prompt needs
    /// beside those pages that it would `share`, and `needs` what all others do. A prompt waits for lanes that are filled
    /// first: for a much faster one if it would fit there, for others in any case.
    fn shard_for(
        &self,
        flights: u32,
        wanted: &[Need],
        shared: &[u32],
        needs: &[Needs],
        manifests: &Manifests,
    ) -> Option<ShardId> {
        let page_positions = self.config.page_positions;
        let waits_for_own = (0..).zip(&self.lanes).any(|(number, lane)| {
            let fits = || {
                let (needs, wanted) = (&needs[number as usize], wanted[number as usize]);
                !lane.slots_free.is_empty() && needs.leave_room(wanted, lane.pages.total())
            };
            self.config.is_filled_first(number)
                && lane.is_open()
                && (self.config.filled_first.is_some() || fits())
        });
        let open = manifests.iter().filter(|(shard, manifest)| {
            let lane = shard.lane as usize;
            let expected = wanted[lane].pages(page_positions);
            let worthwhile = || {
                self.config.own_lane.is_none()
                    || self.ends_in_time(shard.lane)
                        && shard.flight < self.flights_worthwhile(shard.lane, expected)
            };
            if !self.config.is_filled_first(shard.lane) && (waits_for_own || !worthwhile()) {
                return false;
            }
            let rows_max = self.config.lane_shape(shard.lane).batch;
            let first_rows = self.config.chunk.min(rows_max);
            let first_pages = expected.min(pages_for(first_rows, page_positions));
            let pages = &self.lanes[lane].pages;
            // An empty lane always admits: no prompt is longer than a lane.
            let admits = needs[lane].pages_in_the_end() == 0
                || (pages.available() >= first_pages
                    && needs[lane].leave_room(wanted[lane], pages.total()));
            admits
                && !self.lanes[lane].leaving
                && self.is_in_time(shard.lane)
                && shard.flight < flights
                // One whose beginning is computed there may wait for that in its seat.
                && (manifest.rows < rows_max || shared[lane] > 0)
                && self.shards[shard].seated.len() < rows_max as usize
        });
        open.min_by_key(|(shard, manifest)| {
            // Beside a GPU's own lane, few and full flights are best.
            let rows = match self.config.own_lane {
                Some(_) => u32::MAX - manifest.rows,
                None => manifest.rows,
            };
            // Pages that are shared are saved. Twice that decides where a prompt goes, so that those which begin alike
            // come together, until their lane is that much fuller than another.
            let lane = shard.lane as usize;
            // A slow lane with fewer pages is as full as another.
            let slowness = self.slowness(shard.lane);
            let pages = needs[lane].pages_in_the_end() * slowness / USUAL;
            (pages as i64 - 2 * i64::from(shared[lane]), rows)
        })
        .map(|(&shard, _)| shard)
    }

    /// Rows of lane 0 in each of its steps, one for each prompt.
    pub(super) fn own_rows(&self) -> usize {
        let own = self.shards.iter().filter(|(shard, _)| shard.lane == 0);
        let seated: usize = own.map(|(_, state)| state.seated.len()).sum();
        seated / self.config.lane_shape(0).flights as usize
    }

    /// Flights that the prompts for a lane beside lane 0 would fill, if each needs so many pages. A GPU reads all weights
    /// for each of them: if they have fewer rows than a step of its own, they cost it more than they bring.
    fn flights_worthwhile(&self, lane: u32, expected: u32) -> u32 {
        let own = self.own_rows();
        let seated = own * self.config.lane_shape(0).flights as usize;
        let held = (self.lanes[lane as usize].pages.total() / expected.max(1)) as usize;
        let prompts = (self.entries.len() - seated).min(held);
        let batch = self.config.lane_shape(lane).batch as usize;
        if prompts < own { 0 } else { prompts.div_ceil(batch).max(1) as u32 }
    }

    /// Whether a lane beside lane 0 would be through with most of another prompt before lane 0 is through with all that wait:
    /// it is slower, but not by much more than those are more than one crowd of lane 0. While prompts keep coming, there is
    /// time. What does not end there is computed again on lane 0, at once and not token by token: so two thirds of the
    /// time are enough.
    fn ends_in_time(&self, lane: u32) -> bool {
        let steps_ns = (self.lanes[lane as usize].step_ns, self.lanes[0].step_ns);
        let (Some(there_ns), Some(own_ns)) = steps_ns else { return true };
        let crowd = self.own_rows() * self.config.lane_shape(0).flights as usize;
        !self.wants_prompts() || 2 * there_ns * crowd as u64 <= 3 * own_ns * self.queue.len() as u64
    }

    /// What a prompt is expected to need. What is published counts for its lane, once.
    pub(super) fn need_of(&self, entry: &Entry) -> Need {
        let published = entry.seat.as_ref().map_or(0, |seat| seat.published);
        let now = entry.len() - published * self.config.page_positions;
        Need { now, more: self.more_expected(entry) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        DispatcherAction, DispatcherConfig, DispatcherEvent, DispatcherStats, page_hashes,
    };
    use super::*;
    use crate::message::{Home, Merge};
    use crate::prompt::Prompt;
    use glinthawk_flight::Generated;
    use std::collections::{BTreeMap, BTreeSet};

    const PAGE: u32 = 16;
    /// Tokens of a beginning, and of a prompt after it.
    const COMMON: u32 = 63 * PAGE;
    const OWN: u32 = 24;
    /// Tokens that each prompt generates.
    const OUTPUT: u32 = 8;

    /// A prompt with the beginning `text`.
    fn prompt(text: u32, number: u32) -> Prompt {
        let common = (0..COMMON).map(|at| 1_000_000 * (text + 1) + at);
        let own = (0..OWN).map(|at| 100 * number + at);
        Prompt { tokens: common.chain(own).collect(), tokens_max: OUTPUT, ..Prompt::default() }
    }

    /// Runs prompts with these beginnings. Gives the dispatcher as it is then, and by how many younger ones each prompt
    /// was passed at most.
    fn run(texts: &[u32], lane_pages: Vec<u32>) -> (Dispatcher, usize) {
        let mut dispatcher = Dispatcher::new(DispatcherConfig {
            flights: 1,
            slices: 1,
            pipelines: 1,
            weights_positions: 1_000_000,
            batch: 256,
            own_lane: None,
            filled_first: None,
            chunk: 256,
            lane_pages,
            page_positions: PAGE,
            context_max: COMMON + OWN + OUTPUT,
            oversubscription: 1.0,
            merge: Merge::Ready,
            sharing: true,
            nodes_apart: false,
            run_ahead: false,
            drafts: None,
        });
        let mut prompts = (0..).zip(texts).map(|(number, &text)| prompt(text, number));
        let (mut passed, mut waiting) = (BTreeMap::new(), BTreeSet::new());
        loop {
            while dispatcher.wants_prompts() {
                let Some(prompt) = prompts.next() else { break };
                waiting.insert(dispatcher.submit(prompt, 0).expect("it fits"));
            }
            if dispatcher.is_idle() {
                break;
            }
            let mut actions = Vec::new();
            dispatcher.fill(&mut actions);
            dispatcher.check();
            let still: BTreeSet<PromptId> = dispatcher.queue.iter().map(|(_, id)| *id).collect();
            for &seated in waiting.difference(&still) {
                still.range(..seated).for_each(|&id| *passed.entry(id).or_insert(0) += 1);
            }
            waiting = still;
            for action in actions {
                let DispatcherAction::Launch(launch) = action else { continue };
                let generated = Generated { token: 1, logprob: 0.0, alternatives: Vec::new() };
                let tokens = vec![generated; launch.samples.len()];
                let home = DispatcherEvent::Home(Home { step: launch.step, tokens });
                dispatcher.on(home, 0, &mut Vec::new());
            }
        }
        (dispatcher, passed.into_values().max().unwrap_or(0))
    }

    /// So many prompts of eight texts, in an order by a seed.
    fn shuffled(prompts: u32, seed: u64) -> Vec<u32> {
        let mut texts: Vec<(u64, u32)> = (0..prompts)
            .map(|number| {
                let mixed = (seed << 32 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9), number % 8)
            })
            .collect();
        texts.sort_unstable();
        texts.into_iter().map(|(_, text)| text).collect()
    }

    /// How often each of the eight beginnings was computed.
    fn beginnings_computed(stats: &DispatcherStats, prompts: u32) -> f64 {
        let own = u64::from(prompts * (OWN + OUTPUT - 1));
        (stats.rows_computed - own) as f64 / f64::from(8 * COMMON)
    }

    #[test]
    fn prompts_whose_beginning_is_there_go_first_if_memory_is_short() {
        for seed in 0..20 {
            // Room for three of eight beginnings.
            let (dispatcher, passed) = run(&shuffled(400, seed), vec![4 * 63]);
            let times = beginnings_computed(dispatcher.stats(), 400);
            println!("seed {seed}: each beginning {times:.2} times, {passed} passed");
            // Oldest first, each is computed 26 times.
            assert!((1.0..2.5).contains(&times), "{times}");
            assert!(passed > 0 && passed < LOOK_AHEAD as usize, "{passed}");
        }
    }

    #[test]
    fn nobody_is_passed_where_there_is_room_for_all() {
        let (dispatcher, passed) = run(&shuffled(400, 1), vec![20_000]);
        let times = beginnings_computed(dispatcher.stats(), 400);
        assert!((1.0..1.1).contains(&times), "{times}");
        assert_eq!(passed, 0);
    }

    #[test]
    fn a_beginning_that_many_want_is_computed_on_several_lanes() {
        let hash = page_hashes(&prompt(0, 0).tokens, PAGE)[(COMMON / PAGE) as usize - 1];
        let lanes = |prompts: usize| {
            let (dispatcher, _) = run(&vec![0; prompts], vec![100; 3]);
            let times = beginnings_computed(dispatcher.stats(), prompts as u32) * 8.0;
            let there = dispatcher.lanes.iter().filter(|lane| lane.pages.has(hash)).count();
            assert_eq!(there as f64, times, "each lane computed it once");
            there
        };
        assert_eq!((lanes(4), lanes(200)), (1, 3));
    }
}
