//! A decoder-only model's shape and constants: families are data, not code.

/// Everything the kernels and the planner need to know about a model but its weights.
#[derive(Clone, Debug, PartialEq)]
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
    /// Put in front of a prompt where the tokenizer asks for it.
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
}
