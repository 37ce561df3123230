//! Names and shapes of a model's tensors, the same for every source.

use crate::config::ModelConfig;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One tensor of a model. Matrices are (outputs, inputs), row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tensor {
    /// (vocab, hidden)
    Embedding,
    /// (hidden)
    FinalNorm,
    /// (vocab, hidden); the embedding if the model ties them
    Classifier,
    /// A tensor of layer `.0`
    Layer(usize, LayerTensor),
}

/// A tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

impl Tensor {
    /// Every tensor of a model, layer by layer.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Tensor> {
        let in_layer = |layer| {
            let present = LayerTensor::ALL.iter().filter(|tensor| tensor.is_in(config));
            present.map(move |&tensor| Tensor::Layer(layer, tensor))
        };
        [Tensor::Embedding]
            .into_iter()
            .chain((0..config.layers).flat_map(in_layer))
            .chain([Tensor::FinalNorm, Tensor::Classifier])
    }

    /// (outputs, inputs) of a matrix, (1, length) of a vector.
    pub fn shape(&self, config: &ModelConfig) -> (usize, usize) {
        use LayerTensor::*;
        let hidden = config.hidden;
        match self {
            Tensor::Embedding | Tensor::Classifier => (config.vocab, hidden),
            Tensor::FinalNorm => (1, hidden),
            Tensor::Layer(_, tensor) => match tensor {
                AttentionNorm | FeedForwardNorm => (1, hidden),
                Query => (config.query_width(), hidden),
                Key | Value => (config.kv_width(), hidden),
                QueryBias => (1, config.query_width()),
                KeyBias | ValueBias => (1, config.kv_width()),
                QueryNorm | KeyNorm => (1, config.head_dim),
                Output => (hidden, config.query_width()),
                Gate | Up => (config.feed_forward, hidden),
                Down => (hidden, config.feed_forward),
            },
        }
    }

    /// Whether this is a norm or a bias, stored with one dimension.
    pub fn is_vector(&self) -> bool {
        use LayerTensor::*;
        match self {
            Tensor::Embedding | Tensor::Classifier => false,
            Tensor::FinalNorm => true,
            Tensor::Layer(_, tensor) => {
                !matches!(tensor, Query | Key | Value | Output | Gate | Up | Down)
            }
        }
    }
}

impl ModelConfig {
    /// Weights of the whole model; a table used for embedding and classifier counts once.
    pub fn parameter_count(&self) -> usize {
        Tensor::all(self)
            .filter(|tensor| !(self.tied_embeddings && *tensor == Tensor::Classifier))
            .map(|tensor| {
                let (outputs, inputs) = tensor.shape(self);
                outputs * inputs
            })
            .sum()
    }
}

impl LayerTensor {
    /// All kinds, in the order in which a layer uses them.
    pub(crate) const ALL: [LayerTensor; 14] = [
        LayerTensor::AttentionNorm,
        LayerTensor::Query,
        LayerTensor::Key,
        LayerTensor::Value,
        LayerTensor::QueryBias,
        LayerTensor::KeyBias,
        LayerTensor::ValueBias,
        LayerTensor::QueryNorm,
        LayerTensor::KeyNorm,
        LayerTensor::Output,
        LayerTensor::FeedForwardNorm,
        LayerTensor::Gate,
        LayerTensor::Up,
        LayerTensor::Down,
    ];

    /// Whether a model of this configuration has it.
    fn is_in(&self, config: &ModelConfig) -> bool {
        use LayerTensor::*;
        match self {
            QueryBias | KeyBias | ValueBias => config.qkv_bias,
            QueryNorm | KeyNorm => config.qk_norm,
            _ => true,
        }
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tensor::Layer(layer, tensor) => write!(formatter, "layer {layer} {tensor:?}"),
            other => write!(formatter, "{other:?}"),
        }
    }
}
