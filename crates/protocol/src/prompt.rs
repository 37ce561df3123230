//! What goes into the dispatcher and what comes out: a prompt, its biases, its completion.

use glinthawk_flight::{Generated, Sampling};
use serde::{Deserialize, Serialize};

/// Names a prompt; the dispatcher counts the prompts that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PromptId(pub u64);

/// One request as the engine sees it: input tokens and how to continue them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Input tokens, at least one.
    pub tokens: Vec<u32>,
    /// Generated tokens at most, at least one.
    pub tokens_max: u32,
    /// Token ids that end the completion (end of text, and the request's own); the ending token is
    /// the completion's last. Empty if the request ignores the end of text.
    pub stop_ids: Vec<u32>,
    /// How a token is picked from the logits.
    pub sampling: Sampling,
    /// What is added to the logits first.
    pub biases: Biases,
    /// Whether every token is reported as it is generated (stop strings, streaming).
    pub watched: bool,
    /// Lower goes first. Prompts of one priority go in the order of their submission.
    pub priority: i32,
}

/// What is added to logits before a token is picked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Biases {
    /// Subtracted from the logit of every token generated before.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated before.
    pub frequency_penalty: f32,
    /// Added to these tokens' logits; sorted by token, no token twice.
    pub logit_bias: Vec<(u32, f32)>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was generated (it is the last token), or the watcher asked to stop.
    Stop,
    /// `tokens_max` or the context's end was reached.
    Length,
    /// The logits after the last of these tokens allowed none: the model computes no numbers.
    NoToken,
}

/// A finished prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The prompt's id.
    pub id: PromptId,
    /// Every generated token in order.
    pub tokens: Vec<Generated>,
    /// Why it ended.
    pub finish: Finish,
    /// Input tokens that were not computed, because another prompt's pages held them.
    pub shared: u32,
}
