//! A decoder-only model's shape and constants: families are data, not code.
//! Reading it from a source lives in the submodules.

use serde::{Deserialize, Serialize};
mod fields;
mod gguf;
mod hugging_face;
mod rope;
mod shapes;

pub(crate) use gguf::{FromTensors, ROPE_DIVISORS, has_adjacent_pairs};

use crate::error::ConfigError;

/// Everything the kernels and the planner need to know about a model, except its weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Family name as the source spells it (`llama`, `mistral`, `qwen2`, `qwen3`).
    pub family: String,
    /// Transformer layers (N).
    pub layers: usize,
    /// Activation width (D).
    pub hidden: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Key/value heads (H_kv); divides `heads`.
    pub kv_heads: usize,
    /// Width of one head. `heads * head_dim` need not equal `hidden`.
    pub head_dim: usize,
    /// Feed-forward width (D_h).
    pub feed_forward: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub context_max: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Rotary frequencies, one per pair of a head's dimensions (`head_dim / 2`), scaling applied.
    /// Pairs are (i, i + head_dim/2): loaders reorder weights stored for adjacent pairs.
    pub rope_frequencies: Vec<f32>,
    /// Factor on the rotary sine and cosine (YaRN's attention factor); 1 for all others.
    pub rope_magnitude: f32,
    /// Biases on the q, k and v projections.
    pub qkv_bias: bool,
    /// RMS norm over each head of q and k before the rotary embedding.
    pub qk_norm: bool,
    /// The classifier is the embedding table.
    pub tied_embeddings: bool,
    /// A row attends to at most this many latest positions, itself included.
    pub sliding_window: Option<usize>,
    /// Put in front of a prompt if the tokenizer asks for it.
    pub bos_token: Option<u32>,
    /// Tokens that end a completion.
    pub eos_tokens: Vec<u32>,
}

impl ModelConfig {
    /// Width of the queries and of the attention output: `heads * head_dim`.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the keys, and of the values (D_kv): `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a row's q, k, v side by side.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }

    /// Parameters of one layer's matrices.
    pub fn layer_parameters(&self) -> usize {
        self.hidden * (self.qkv_width() + self.query_width() + 3 * self.feed_forward)
    }

    /// Bytes of keys and values that one token adds to its context, over all layers, in bf16.
    pub fn context_bytes_per_token(&self) -> usize {
        self.layers * 2 * self.kv_width() * 2
    }

    /// Checks every size against a limit and the others, so that no product of them overflows.
    fn checked(self) -> Result<Self, ConfigError> {
        for (field, size, size_max) in [
            ("layers", self.layers, 1 << 12),
            ("hidden size", self.hidden, 1 << 20),
            ("attention heads", self.heads, 1 << 16),
            ("key-value heads", self.kv_heads, 1 << 16),
            ("head size", self.head_dim, 1 << 12),
            ("feed-forward size", self.feed_forward, 1 << 22),
            ("vocabulary size", self.vocab, 1 << 24),
            ("context length", self.context_max, 1 << 30),
        ] {
            if size == 0 || size > size_max {
                let reason = format!("must be between 1 and {size_max}, is {size}");
                return Err(ConfigError::new(field, reason));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("{} do not divide {} attention heads", self.kv_heads, self.heads);
            return Err(ConfigError::new("key-value heads", reason));
        }
        if !self.head_dim.is_multiple_of(2) {
            let reason = format!("{} is odd, so it has no rotary pairs", self.head_dim);
            return Err(ConfigError::new("head size", reason));
        }
        assert_eq!(self.rope_frequencies.len(), self.head_dim / 2, "a frequency for each pair");
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            let reason = format!("{} is not a small positive number", self.norm_eps);
            return Err(ConfigError::new("norm epsilon", reason));
        }
        if self.sliding_window == Some(0) {
            return Err(ConfigError::new("sliding window", "must be at least 1"));
        }
        for token in self.bos_token.iter().chain(&self.eos_tokens) {
            if *token as usize >= self.vocab {
                let reason = format!("{token} is outside the vocabulary of {}", self.vocab);
                return Err(ConfigError::new("special token", reason));
            }
        }
        Ok(self)
    }
}

/// Layers of the consecutive slices on `nodes` nodes, as even as possible; longer slices first, because the last slice
/// also classifies.
pub fn even_slices(layers: usize, nodes: usize) -> Vec<usize> {
    assert!(nodes > 0 && nodes <= layers, "a slice holds at least one layer");
    let (each, extra) = (layers / nodes, layers % nodes);
    (0..nodes).map(|index| each + usize::from(index < extra)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_layers_and_favour_the_last() {
        for (layers, nodes, expected) in
            [(80, 9, vec![9, 9, 9, 9, 9, 9, 9, 9, 8]), (4, 4, vec![1; 4]), (7, 2, vec![4, 3])]
        {
            assert_eq!(even_slices(layers, nodes), expected);
        }
    }
}
