//! Shapes of well-known models, for experiments with random weights.

use super::ModelConfig;
use super::rope::{Rope, Scaling};

/// What sets one shape apart from the others; all are of the llama family.
struct Shape {
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    feed_forward: usize,
    vocab: usize,
    context_max: usize,
    theta: f64,
    tied_embeddings: bool,
}

#[rustfmt::skip]
const SHAPES: [Shape; 8] = [
    Shape { name: "tiny", layers: 3, hidden: 64, heads: 4, kv_heads: 2, feed_forward: 160, vocab: 512, context_max: 1024, theta: 1e4, tied_embeddings: false },
    Shape { name: "smollm2-135m", layers: 30, hidden: 576, heads: 9, kv_heads: 3, feed_forward: 1536, vocab: 49_152, context_max: 8192, theta: 1e5, tied_embeddings: true },
    Shape { name: "llama2-7b", layers: 32, hidden: 4096, heads: 32, kv_heads: 32, feed_forward: 11_008, vocab: 32_000, context_max: 4096, theta: 1e4, tied_embeddings: false },
    Shape { name: "llama2-13b", layers: 40, hidden: 5120, heads: 40, kv_heads: 40, feed_forward: 13_824, vocab: 32_000, context_max: 4096, theta: 1e4, tied_embeddings: false },
    Shape { name: "llama2-70b", layers: 80, hidden: 8192, heads: 64, kv_heads: 8, feed_forward: 28_672, vocab: 32_000, context_max: 4096, theta: 1e4, tied_embeddings: false },
    Shape { name: "llama3-8b", layers: 32, hidden: 4096, heads: 32, kv_heads: 8, feed_forward: 14_336, vocab: 128_256, context_max: 8192, theta: 5e5, tied_embeddings: false },
    Shape { name: "llama3-70b", layers: 80, hidden: 8192, heads: 64, kv_heads: 8, feed_forward: 28_672, vocab: 128_256, context_max: 8192, theta: 5e5, tied_embeddings: false },
    Shape { name: "llama3-405b", layers: 126, hidden: 16_384, heads: 128, kv_heads: 8, feed_forward: 53_248, vocab: 128_256, context_max: 131_072, theta: 5e5, tied_embeddings: false },
];

impl ModelConfig {
    /// The configuration of a well-known shape.
    pub fn shape(name: &str) -> Option<Self> {
        let shape = SHAPES.iter().find(|shape| shape.name == name)?;
        let head_dim = shape.hidden / shape.heads;
        // Llama 3.1 stretches its rotary embedding; a dummy's text means nothing either way.
        let rope = Rope::new(head_dim, shape.theta, &Scaling::None);
        let rope = rope.expect("a plain rotary embedding of a sane theta");
        let config = ModelConfig {
            family: "llama".to_owned(),
            layers: shape.layers,
            hidden: shape.hidden,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim,
            feed_forward: shape.feed_forward,
            vocab: shape.vocab,
            context_max: shape.context_max,
            norm_eps: 1e-5,
            rope_frequencies: rope.frequencies,
            rope_magnitude: rope.magnitude,
            qkv_bias: false,
            qk_norm: false,
            tied_embeddings: shape.tied_embeddings,
            sliding_window: None,
            bos_token: Some(1),
            eos_tokens: vec![2],
        };
        Some(config.checked().expect("the table holds sane shapes"))
    }

    /// Names of all well-known shapes.
    pub fn shape_names() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|shape| shape.name)
    }
}
