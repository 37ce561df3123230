//! The part of a plan that the dispatcher needs.

use crate::message::Merge;
#[cfg(doc)]
use glinthawk_flight::TOKEN_PENDING;
use std::ops::Range;

/// How many times longer the longest completions are expected to be than the usual one.
pub const OVERSUBSCRIPTION: f32 = 3.0;

/// How many rows of a lane are in the air.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneShape {
    /// Flights.
    pub flights: u32,
    /// Rows of each.
    pub batch: u32,
}

impl LaneShape {
    /// Context slots: one for each row.
    pub fn slots(self) -> u32 {
        self.flights * self.batch
    }
}

/// The part of a plan that the dispatcher needs.
#[derive(Clone, Debug)]
pub struct DispatcherConfig {
    /// Flights in the air at most. There are fewer while there are too few rows for them.
    pub flights: u32,
    /// Slices of a pipeline: so many flights are used in any case.
    pub slices: u32,
    /// Pipelines, among which the lanes are shared out.
    pub pipelines: u32,
    /// Positions of context that are as many bytes as the weights: attention over so many takes about as long as reading
    /// the weights.
    pub weights_positions: u64,
    /// Rows of a flight on each lane: B.
    pub batch: u32,
    /// Lane 0, if it is much faster than the others: it is filled first, and takes prompts over from them when it would
    /// be idle.
    pub own_lane: Option<LaneShape>,
    /// One of every so many lanes, lane 0 first, is on a Tier-1 node that others share their cores with. Prompts wait for
    /// these; the others are a reserve, used when all of these are lost.
    pub filled_first: Option<u32>,
    /// Rows of one prompt's prefill in one step.
    pub chunk: u32,
    /// Pages of every lane: the fewest that any slice's worker has there.
    pub lane_pages: Vec<u32>,
    /// Positions of a page.
    pub page_positions: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// Until enough completions are seen, the expected length is the longest allowed divided by
    /// this.
    pub oversubscription: f32,
    /// Whether a shard at home waits for the others of its flight.
    pub merge: Merge,
    /// Whether prompts that begin with the same tokens share the pages of those.
    pub sharing: bool,
    /// Whether lanes are on nodes of their own, one of which may be persistently slower than the others.
    pub nodes_apart: bool,
    /// Whether a shard's next step is launched while one is in the air. Its rows then have tokens that only the nodes
    /// know ([`TOKEN_PENDING`]), and steps come home in the order of their launches, each of them.
    pub run_ahead: bool,
    /// How many rows take as long as reading the weights, if tokens that may come next have rows of their own; with
    /// `run_ahead` there are none.
    pub drafts: Option<u32>,
}

impl DispatcherConfig {
    /// The shape of a lane.
    pub fn lane_shape(&self, lane: u32) -> LaneShape {
        let usual = LaneShape { flights: self.flights, batch: self.batch };
        self.own_lane.filter(|_| lane == 0).unwrap_or(usual)
    }

    /// Whether prompts that fit a lane like this wait for it.
    pub fn is_filled_first(&self, lane: u32) -> bool {
        let every = if self.own_lane.is_some() { Some(u32::MAX) } else { self.filled_first };
        every.is_some_and(|every| lane.is_multiple_of(every))
    }

    /// The flights of a lane.
    pub fn flights_of(&self, lane: u32) -> Range<u32> {
        lane_flights(self.flights, self.own_lane, lane)
    }
}

/// The flights of a lane. A much faster lane has flights of its own: nobody in them waits for a slower lane.
pub fn lane_flights(flights: u32, own_lane: Option<LaneShape>, lane: u32) -> Range<u32> {
    match own_lane {
        Some(own) if lane == 0 => flights..flights + own.flights,
        _ => 0..flights,
    }
}
