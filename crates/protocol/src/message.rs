//! What travels between dispatcher and nodes. Payloads (activations) are the kernels' business: the
//! protocol only says whose payload goes where.

use glinthawk_flight::{Generated, Row, Sample, StepId};

/// When shards that wait for Tier 1 are ready to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Whole flights first. A part of one waits for the rest no longer than a full batch saves, so not for a straggler.
    Ready,
    /// Whole flights first, on a core that all nodes share. While a part of a flight waits, the core works for the rest of it.
    /// So it waits longer, but not longer than the flight is in the slice.
    SharedCore,
    /// When all shards of their flight have arrived. Exists for comparison with `Ready`.
    WholeFlights,
}

/// Starts a step of a shard: dispatcher → slice 0, then from slice to slice with the residual.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The step.
    pub step: StepId,
    /// The rows; a prompt's rows stand together, in order of position.
    pub rows: Vec<Row>,
    /// Pages that other prompts computed and that contexts of these rows begin with, each named by the row of its first
    /// position. They are entered into tables; nothing is computed for them.
    pub shared: Vec<Row>,
    /// The rows that end in a token, in order of row.
    pub samples: Vec<Sample>,
}

/// Ends a step of a shard: last slice → dispatcher.
#[derive(Clone, Debug, PartialEq)]
pub struct Home {
    /// The step.
    pub step: StepId,
    /// One token for each of the launch's samples, in order.
    pub tokens: Vec<Generated>,
}

/// Rows on their way to attention: Tier 1 → Tier 2. The q, k, v payload travels beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// The step.
    pub step: StepId,
    /// Layer, counted from the slice's first.
    pub layer: u32,
    /// The rows; their tokens are not used here.
    pub rows: Vec<Row>,
    /// Pages to enter into tables before the rows', as in the launch.
    pub shared: Vec<Row>,
}

/// Rows on their way back: Tier 2 → Tier 1. The attention output travels beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attended {
    /// The step.
    pub step: StepId,
    /// Layer, counted from the slice's first.
    pub layer: u32,
}

/// A message with the payload that travels beside it.
#[derive(Clone, Debug)]
pub enum Parcel<P> {
    /// Into a slice, with the residual; from the dispatcher it has none.
    Launch(Launch, P),
    /// To attention, with q, k, v.
    Attend(Attend, P),
    /// Back from it, with its output.
    Attended(Attended, P),
    /// To the dispatcher.
    Home(Home),
}

impl<P> Parcel<P> {
    /// The step it belongs to.
    pub fn step(&self) -> StepId {
        match self {
            Self::Launch(launch, _) => launch.step,
            Self::Attend(attend, _) => attend.step,
            Self::Attended(attended, _) => attended.step,
            Self::Home(home) => home.step,
        }
    }
}

/// Whom a parcel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeAddress {
    /// The dispatcher.
    Dispatcher,
    /// The Tier-1 node of a slice.
    Tier1(usize),
    /// The Tier-2 node of a slice and lane.
    Tier2(usize, u32),
}
