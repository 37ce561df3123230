//! How the token after a row is picked, and the token.

use serde::{Deserialize, Serialize};

/// How tokens are picked from logits. With the position it determines the token: there is no other randomness.
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
    /// Divides positive (multiplies negative) logits of tokens in the prompt or generated; 1 is off.
    pub repetition_penalty: f32,
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
            repetition_penalty: 1.0,
            logprobs: None,
        }
    }
}

/// How the token after one row is picked. With the logits it determines the token: the draw's only
/// randomness is a hash of seed and position. Complete in itself, so that nodes keep no prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Index of the row in its launch.
    pub row: u32,
    /// Position of the token to be picked.
    pub position: u32,
    /// The prompt's settings.
    pub sampling: Sampling,
    /// Tokens under the repetition penalty, ascending.
    pub repeated: Vec<u32>,
    /// Added to these tokens' logits (bias, presence and frequency penalties together), ascending.
    pub biases: Vec<(u32, f32)>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generated {
    /// The token picked.
    pub token: u32,
    /// Its natural-log probability under the model's own distribution; 0 if not asked for.
    pub logprob: f32,
    /// The likeliest tokens with their log-probabilities, likeliest first; empty if not asked for.
    pub alternatives: Vec<(u32, f32)>,
}
