//! What goes into the dispatcher and what comes out: a prompt, its sampling, its completion.

use glinthawk_flight::Generated;
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
    /// Whether every token is reported as it is generated (stop strings, streaming).
    pub watched: bool,
    /// Lower goes first. Prompts of one priority go in the order of their submission.
    pub priority: i32,
}

/// How a token is picked. With the position it determines the token: there is no other randomness.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens whose probabilities reach `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the likeliest; 0 drops none.
    pub min_p: f32,
    /// With the position, the only source of randomness.
    pub seed: u64,
    /// Subtracted from the logit of every token generated before.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated before.
    pub frequency_penalty: f32,
    /// Divides positive (multiplies negative) logits of tokens in the prompt or generated; 1 is off.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits; sorted by token, no token twice.
    pub logit_bias: Vec<(u32, f32)>,
    /// Report each token's log-probability and this many likeliest alternatives.
    pub logprobs: Option<u8>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was generated (it is the last token), or the watcher asked to stop.
    Stop,
    /// `tokens_max` or the context's end was reached.
    Length,
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
}
