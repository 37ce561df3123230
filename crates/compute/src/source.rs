//! Where weights come from, as the backends see it: rows of matrices and whole vectors.

use crate::{ComputeError, ContextType};
use glinthawk_model::{LayerTensor, Model, ModelConfig, Tensor};
use half::bf16;
use std::ops::Range;

/// A model's weights, readable from several threads.
pub(crate) trait WeightSource: Sync {
    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// Rows of a matrix, row-major.
    fn read_rows(
        &self,
        tensor: Tensor,
        rows: Range<usize>,
        into: &mut [bf16],
    ) -> Result<(), ComputeError>;

    /// A whole vector.
    fn read_vector(&self, tensor: Tensor) -> Result<Vec<f32>, ComputeError>;
}

impl WeightSource for Model {
    fn config(&self) -> &ModelConfig {
        Model::config(self)
    }

    fn read_rows(
        &self,
        tensor: Tensor,
        rows: Range<usize>,
        into: &mut [bf16],
    ) -> Result<(), ComputeError> {
        Ok(Model::read_rows(self, tensor, rows, into)?)
    }

    fn read_vector(&self, tensor: Tensor) -> Result<Vec<f32>, ComputeError> {
        Ok(Model::read_vector(self, tensor)?)
    }
}

/// Which part of a model one backend holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceSpec {
    /// The slice's layers.
    pub layers: Range<usize>,
    /// Whether the slice embeds tokens (the first one).
    pub embeds: bool,
    /// Whether the slice classifies (the last one).
    pub classifies: bool,
    /// Rows of the residual slab.
    pub slab_rows: usize,
    /// Rows of one batch at most.
    pub batch_rows: usize,
}

/// The contexts that one backend holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextSpec {
    /// Layers of the slice.
    pub layers: usize,
    /// Pages of every layer.
    pub pages: usize,
    /// Positions of a page.
    pub page_positions: u32,
    /// How keys and values are stored.
    pub context_type: ContextType,
    /// Page tables.
    pub slots: usize,
    /// Positions of a context at most.
    pub context_max: usize,
    /// Rows of one batch at most.
    pub batch_rows: usize,
}

impl ContextSpec {
    /// Fails if pages of this size are none of those that a device's kernels can use.
    pub(crate) fn check_pages(&self, usable: &[u32], device: &str) -> Result<(), ComputeError> {
        if usable.contains(&self.page_positions) {
            return Ok(());
        }
        let what = format!("pages of {} positions on {device}", self.page_positions);
        Err(ComputeError::Shape { what })
    }
}

impl SliceSpec {
    /// All of a model, in one slice.
    pub fn whole(config: &ModelConfig, rows: usize) -> Self {
        let layers = 0..config.layers;
        Self { layers, embeds: true, classifies: true, slab_rows: rows, batch_rows: rows }
    }

    /// No part of a model.
    pub fn nothing() -> Self {
        Self { layers: 0..0, embeds: false, classifies: false, slab_rows: 0, batch_rows: 0 }
    }

    /// Matrices of vocabulary by hidden that the slice holds.
    pub(crate) fn tables(&self, config: &ModelConfig) -> usize {
        match config.tied_embeddings {
            true => usize::from(self.embeds || self.classifies),
            false => usize::from(self.embeds) + usize::from(self.classifies),
        }
    }

    /// Bytes of matrices that the slice reads.
    pub(crate) fn bytes(&self, config: &ModelConfig) -> usize {
        let tables = config.hidden * config.vocab * self.tables(config);
        (config.layer_parameters() * self.layers.len() + tables) * size_of::<bf16>()
    }

    /// Turns bytes that were read into bytes done, and the total.
    pub(crate) fn progress(
        &self,
        config: &ModelConfig,
        tell: &mut dyn FnMut(u64, u64),
    ) -> impl FnMut(u64) {
        let (mut done, total) = (0, self.bytes(config) as u64);
        move |bytes| {
            done += bytes;
            tell(done, total);
        }
    }
}

/// The vectors of one layer; small, the same for every backend.
pub(crate) struct LayerVectors {
    /// (hidden)
    pub(crate) attention_norm: Vec<f32>,
    /// (hidden)
    pub(crate) feed_forward_norm: Vec<f32>,
    /// (qkv_width), with `qkv_bias`
    pub(crate) qkv_bias: Option<Vec<f32>>,
    /// (head_dim) of q and of k, with `qk_norm`
    pub(crate) head_norms: Option<[Vec<f32>; 2]>,
}

impl LayerVectors {
    pub(crate) fn read(source: &dyn WeightSource, layer: usize) -> Result<Self, ComputeError> {
        let config = source.config();
        let vector = |tensor| source.read_vector(Tensor::Layer(layer, tensor));
        let qkv_bias = if config.qkv_bias {
            let parts = [LayerTensor::QueryBias, LayerTensor::KeyBias, LayerTensor::ValueBias];
            let parts: Result<Vec<_>, _> = parts.into_iter().map(vector).collect();
            Some(parts?.concat())
        } else {
            None
        };
        let head_norms = if config.qk_norm {
            Some([vector(LayerTensor::QueryNorm)?, vector(LayerTensor::KeyNorm)?])
        } else {
            None
        };
        Ok(Self {
            attention_norm: vector(LayerTensor::AttentionNorm)?,
            feed_forward_norm: vector(LayerTensor::FeedForwardNorm)?,
            qkv_bias,
            head_norms,
        })
    }
}

/// Widest head the kernels cover.
pub(crate) const HEAD_DIM_MAX: usize = 512;

/// Fails for shapes that no backend covers.
pub(crate) fn check_shape(config: &ModelConfig) -> Result<(), ComputeError> {
    let refuse = |what: String| Err(ComputeError::Shape { what });
    if config.head_dim == 0 || !config.head_dim.is_multiple_of(16) {
        return refuse(format!("head_dim {} is not a multiple of 16", config.head_dim));
    }
    if config.head_dim > HEAD_DIM_MAX {
        return refuse(format!("head_dim {} exceeds {HEAD_DIM_MAX}", config.head_dim));
    }
    if config.kv_heads == 0 || !config.heads.is_multiple_of(config.kv_heads) {
        return refuse(format!(
            "heads {} is not a multiple of kv_heads {}",
            config.heads, config.kv_heads
        ));
    }
    if config.rope_frequencies.len() * 2 != config.head_dim {
        return refuse(format!(
            "{} rotary frequencies for head_dim {}",
            config.rope_frequencies.len(),
            config.head_dim
        ));
    }
    if config.hidden == 0 || config.feed_forward == 0 || config.vocab == 0 {
        return refuse(format!(
            "hidden {}, feed_forward {}, vocab {}: none may be 0",
            config.hidden, config.feed_forward, config.vocab
        ));
    }
    Ok(())
}
