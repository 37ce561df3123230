//! Names of a model's tensors, the same for every source.

/// One tensor of a model. Matrices are (outputs, inputs), row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// (vocab, hidden)
    Embedding,
    /// (hidden)
    FinalNorm,
    /// (vocab, hidden); the embedding where the model ties them
    Classifier,
    /// A tensor of layer `.0`
    Layer(usize, LayerTensor),
}

/// A tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerTensor {
    /// (hidden)
    AttentionNorm,
    /// (query_width, hidden)
    Query,
    /// (kv_width, hidden)
    Key,
    /// (kv_width, hidden)
    Value,
    /// (query_width), with `qkv_bias`
    QueryBias,
    /// (kv_width), with `qkv_bias`
    KeyBias,
    /// (kv_width), with `qkv_bias`
    ValueBias,
    /// (head_dim), with `qk_norm`
    QueryNorm,
    /// (head_dim), with `qk_norm`
    KeyNorm,
    /// (hidden, query_width)
    Output,
    /// (hidden)
    FeedForwardNorm,
    /// (feed_forward, hidden)
    Gate,
    /// (feed_forward, hidden)
    Up,
    /// (hidden, feed_forward)
    Down,
}
