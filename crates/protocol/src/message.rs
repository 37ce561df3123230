//! What travels between dispatcher and nodes. Payloads (activations) are the driver's business:
//! the state machines only say whose payload goes where.

use crate::prompt::Generated;
use glinthawk_flight::{Row, StepId};
use serde::{Deserialize, Serialize};

/// When shards that wait for Tier 1 are ready to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// As soon as they are there: nobody waits for a straggler.
    Ready,
    /// When all shards of their flight are there: what the first kind is compared with.
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

/// How the token after one row is picked; complete in itself, so that nodes keep no prompts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Index of the row in its launch.
    pub row: u32,
    /// Position of the token to be picked.
    pub position: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// See [`crate::Sampling`].
    pub top_k: u32,
    /// See [`crate::Sampling`].
    pub top_p: f32,
    /// See [`crate::Sampling`].
    pub min_p: f32,
    /// See [`crate::Sampling`].
    pub seed: u64,
    /// Divides positive (multiplies negative) logits of the `repeated` tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Tokens under the repetition penalty, ascending.
    pub repeated: Vec<u32>,
    /// Added to these tokens' logits (bias, presence and frequency penalties together), ascending.
    pub biases: Vec<(u32, f32)>,
    /// Log-probabilities asked for.
    pub logprobs: Option<u8>,
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
    /// The rows; their tokens are of no interest here.
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
