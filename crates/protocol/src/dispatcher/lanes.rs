//! Lanes that come and go while a job runs.

use super::pages::PagePool;
use super::stragglers::USUAL;
use super::{Dispatcher, DispatcherAction, DispatcherConfig, Lane};
use crate::prompt::{Finish, PromptId};
use glinthawk_flight::StepId;
use std::collections::HashMap;

impl Lane {
    /// An empty lane.
    pub(super) fn new(config: &DispatcherConfig, lane: u32, generation: u64) -> Self {
        Self {
            pages: PagePool::new(config.lane_pages[lane as usize]),
            slots_free: (0..config.lane_shape(lane).slots()).rev().collect(),
            generation,
            lost: false,
            leaving: false,
            step_ns: None,
            slowness: USUAL,
            computing: HashMap::new(),
            promised: HashMap::new(),
        }
    }

    /// Whether it takes prompts.
    pub(super) fn is_open(&self) -> bool {
        !self.lost && !self.leaving
    }
}

impl Dispatcher {
    /// Lanes, lost ones included.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Lanes that are not lost.
    pub fn lanes_left(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.lost).count()
    }

    /// Lanes that prompts are seated on: those that are filled first, while there are any.
    pub(super) fn lanes_used(&self) -> impl Iterator<Item = u32> {
        let left = (0..).zip(&self.lanes).filter(|(_, lane)| lane.is_open());
        let left: Vec<u32> = left.map(|(lane, _)| lane).collect();
        let waits =
            |lane: &u32| self.config.own_lane.is_none() && self.config.is_filled_first(*lane);
        let has_own = left.iter().any(waits);
        left.into_iter().filter(move |lane| !has_own || waits(lane))
    }

    /// Lanes that are leaving and have no context left.
    pub fn lanes_drained(&self) -> Vec<u32> {
        let leaving = (0..).zip(&self.lanes).filter(|(_, lane)| lane.leaving && !lane.lost);
        leaving.map(|(lane, _)| lane).filter(|lane| self.seated_on(*lane).is_empty()).collect()
    }

    /// The prompts whose contexts are on a lane.
    fn seated_on(&self, lane: u32) -> Vec<PromptId> {
        let shards = self.shards.iter().filter(|(shard, _)| shard.lane == lane);
        shards.flat_map(|(_, state)| &state.seated).copied().collect()
    }

    /// Gives up everything on a lane. Its steps in the air no longer count: what is left of them finds no shard that
    /// waits for it.
    pub(super) fn lose_lane(
        &mut self,
        lane: u32,
        now_ns: u64,
        actions: &mut Vec<DispatcherAction>,
    ) {
        self.lanes[lane as usize].lost = true;
        let seated = self.seated_on(lane);
        for (_, state) in self.shards.iter_mut().filter(|(shard, _)| shard.lane == lane) {
            state.in_air = false;
            state.aboard.clear();
            state.ahead = None;
        }
        for id in seated {
            let entry = self.entries.get_mut(&id).expect("seated prompts have an entry");
            let seat = entry.seat.as_mut().expect("it is on the lane");
            (seat.rows_in_air, seat.tokens_in_air) = (0, 0);
            let stopped = entry.stop_after.map(|_| (Finish::Stop, now_ns));
            if let Some((finish, over_ns)) = entry.over.or(stopped) {
                self.finish(id, finish, over_ns, actions);
            } else {
                self.stats.prompts_lost += 1;
                self.drop_context(id);
            }
        }
    }

    /// Begins a lane anew, with empty pages: some of its nodes know nothing of those that were filled. Its steps have
    /// epochs of a later generation, by which the nodes that stayed know what is left of the earlier one.
    pub(super) fn open_lane(&mut self, lane: u32) {
        let before = &self.lanes[lane as usize];
        assert!(before.lost, "lane {lane} is opened twice");
        assert_eq!(before.pages.used(), 0, "a lost lane {lane} holds contexts");
        let generation = before.generation + 1;
        self.lanes[lane as usize] = Lane::new(&self.config, lane, generation);
        for (_, state) in self.shards.iter_mut().filter(|(shard, _)| shard.lane == lane) {
            state.epoch = StepId::epoch_before(generation);
        }
    }
}
