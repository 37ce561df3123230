//! Models for the suite: any shape, weights from a hash.

use crate::source::WeightSource;
use crate::{
    ComputeError, ContextSpec, ContextType, CpuContext, CpuWeights, Isa, SliceSpec, Threads,
};
use glinthawk_model::{LayerTensor, ModelConfig, Tensor};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// The few numbers in which cases differ.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) feed_forward: usize,
    pub(super) vocab: usize,
    pub(super) qkv_bias: bool,
    pub(super) qk_norm: bool,
    pub(super) tied: bool,
    pub(super) window: Option<usize>,
    pub(super) context_type: ContextType,
    pub(super) page_positions: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            hidden: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            feed_forward: 160,
            vocab: 131,
            qkv_bias: false,
            qk_norm: false,
            tied: false,
            window: None,
            context_type: ContextType::Bf16,
            page_positions: 16,
        }
    }
}

impl Shape {
    pub(super) fn config(&self) -> ModelConfig {
        let frequency = |pair: usize| 10_000f32.powf(-2.0 * pair as f32 / self.head_dim as f32);
        ModelConfig {
            family: "test".to_owned(),
            layers: 2,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            feed_forward: self.feed_forward,
            vocab: self.vocab,
            context_max: 4096,
            norm_eps: 1e-5,
            rope_frequencies: (0..self.head_dim / 2).map(frequency).collect(),
            rope_magnitude: 1.0,
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
            tied_embeddings: self.tied,
            sliding_window: self.window,
            bos_token: None,
            eos_tokens: Vec::new(),
        }
    }

    pub(super) fn source(&self) -> Hashed {
        Hashed(self.config())
    }

    pub(super) fn weights(&self, isa: Isa, threads: usize, slab_rows: usize) -> CpuWeights {
        let spec = SliceSpec::whole(&self.config(), slab_rows);
        let threads = Arc::new(Threads::new(threads).unwrap());
        let mut last = (0, 0);
        let source = self.source();
        let weights =
            CpuWeights::load(&source, &spec, isa, threads, &mut |done, total| last = (done, total));
        assert_eq!(last.0, last.1, "progress reaches the end");
        weights.unwrap()
    }

    pub(super) fn context(&self, isa: Isa, threads: usize, pages: usize) -> CpuContext {
        self.try_context(isa, threads, pages).unwrap()
    }

    pub(super) fn try_context(
        &self,
        isa: Isa,
        threads: usize,
        pages: usize,
    ) -> Result<CpuContext, ComputeError> {
        let threads = Arc::new(Threads::new(threads).unwrap());
        let spec = ContextSpec {
            layers: 2,
            pages,
            page_positions: self.page_positions,
            context_type: self.context_type,
            slots: 0,
            context_max: 0,
            batch_rows: 0,
        };
        CpuContext::new(&self.config(), &spec, isa, threads)
    }
}

/// A number in [-1, 1) from a hash.
pub(super) fn noise(seed: u64, index: u64) -> f32 {
    let mut bits =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index.wrapping_mul(0xd1b5_4a32_d192_ed03);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Weights from a hash of tensor, row and column; as large as keeps activations near 1.
pub(super) struct Hashed(ModelConfig);

fn seed(tensor: Tensor) -> u64 {
    match tensor {
        Tensor::Embedding => 1,
        Tensor::FinalNorm => 2,
        Tensor::Classifier => 3,
        Tensor::Layer(layer, tensor) => 100 + 20 * layer as u64 + tensor as u64,
    }
}

impl WeightSource for Hashed {
    fn config(&self) -> &ModelConfig {
        &self.0
    }

    fn read_rows(
        &self,
        tensor: Tensor,
        rows: Range<usize>,
        into: &mut [bf16],
    ) -> Result<(), ComputeError> {
        let width = into.len() / rows.len();
        let tensor = if self.0.tied_embeddings && tensor == Tensor::Classifier {
            Tensor::Embedding
        } else {
            tensor
        };
        let scale = if tensor == Tensor::Embedding { 1.0 } else { 1.7 / (width as f32).sqrt() };
        let first = rows.start * width;
        for (index, value) in into.iter_mut().enumerate() {
            *value = bf16::from_f32(scale * noise(seed(tensor), (first + index) as u64));
        }
        Ok(())
    }

    fn read_vector(&self, tensor: Tensor) -> Result<Vec<f32>, ComputeError> {
        let width = match tensor {
            Tensor::Layer(_, LayerTensor::QueryBias) => self.0.query_width(),
            Tensor::Layer(_, LayerTensor::KeyBias | LayerTensor::ValueBias) => self.0.kv_width(),
            Tensor::Layer(_, LayerTensor::QueryNorm | LayerTensor::KeyNorm) => self.0.head_dim,
            _ => self.0.hidden,
        };
        Ok((0..width).map(|index| 1.0 + 0.5 * noise(seed(tensor), index as u64)).collect())
    }
}
