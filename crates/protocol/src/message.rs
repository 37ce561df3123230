//! What travels between dispatcher and nodes. Payloads (activations) are the driver's business:
//! the state machines only say whose payload goes where.

use glinthawk_flight::{Generated, Row, Sample, StepId};

/// When shards that wait for Tier 1 are ready to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// As soon as they arrive: nothing waits for a straggler.
    Ready,
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
}

/// Rows on their way back: Tier 2 → Tier 1. The attention output travels beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attended {
    /// The step.
    pub step: StepId,
    /// Layer, counted from the slice's first.
    pub layer: u32,
}
