//! Single stages of a layer, timed as the engine meets them: every repetition turns to other layers
//! or other pages, so that no cache holds what a real run would have to load again.

use super::{CPU, filled_pages, residual};
use crate::{
    AttendRow, ComputeError, ContextKernels, ContextType, CpuContext, CpuWeights, Isa, ShardIn,
    ShardOut, SliceSpec, Threads, WeightKernels,
};
use glinthawk_flight::{Buffer, PAGE_POSITIONS, Pool, Sample, Sampling};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A part of Tier 1's work in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedStage {
    /// Norm, q/k/v projection, rotary embedding.
    Pre,
    /// Output projection, feed-forward.
    Post,
    /// A layer's post and the next layer's pre in one call, as Tier 1 makes it.
    Fused,
}

/// Some layers of a model and its classifier, for the seconds of Tier 1's stages.
pub struct StageBench {
    config: ModelConfig,
    layers: usize,
    layer_next: usize,
    weights: CpuWeights,
    qkv: Buffer,
    attended: Buffer,
    positions: Vec<u32>,
}

impl StageBench {
    /// Loads layers of a model and its classifier, for batches of up to `rows_max` rows.
    pub fn new(
        model: &Model,
        layers: Range<usize>,
        rows_max: usize,
        isa: Isa,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        let count = layers.len();
        let whole = SliceSpec::whole(model.config(), rows_max);
        let spec = SliceSpec { layers, embeds: false, ..whole };
        let weights = CpuWeights::load(model, &spec, isa, threads, progress)?;
        Self::over(weights, model.config().clone(), count, rows_max)
    }

    /// The same weights on other threads, as lanes share them.
    pub fn beside(&self, threads: Arc<Threads>) -> Result<Self, ComputeError> {
        let rows_max = self.positions.len();
        let weights = self.weights.beside(threads, rows_max)?;
        Self::over(weights, self.config.clone(), self.layers, rows_max)
    }

    fn over(
        mut weights: CpuWeights,
        config: ModelConfig,
        layers: usize,
        rows_max: usize,
    ) -> Result<Self, ComputeError> {
        weights.put_residual(0..rows_max, &residual(rows_max, config.hidden))?;
        let buffer = |width: usize| Buffer::zeroed(rows_max * width * size_of::<bf16>());
        let mut attended = buffer(config.query_width());
        for (index, value) in attended.bf16_mut().iter_mut().enumerate() {
            *value = bf16::from_f32((index % 13) as f32 / 8.0 - 0.75);
        }
        Ok(Self {
            layers,
            layer_next: 0,
            qkv: buffer(config.qkv_width()),
            attended,
            positions: (0..rows_max as u32).collect(),
            weights,
            config,
        })
    }

    /// Mean seconds per layer of a stage for `rows` rows, over the next `layers` layers.
    pub fn stage(&mut self, stage: TimedStage, rows: usize, layers: usize) -> f64 {
        let started = Instant::now();
        for _ in 0..layers {
            let layer = self.layer_next;
            self.layer_next = (layer + 1) % self.layers;
            let positions = &self.positions[..rows];
            let out = &mut [ShardOut { slab: 0..rows, positions, qkv: &mut self.qkv }];
            let back = &[ShardIn { slab: 0..rows, attended: &self.attended }];
            let weights = &mut self.weights;
            let done = match stage {
                TimedStage::Pre => weights.pre_attention(layer, out),
                TimedStage::Post => weights.post_attention(layer, back),
                TimedStage::Fused if self.layer_next > 0 => weights.middle(layer, back, out),
                TimedStage::Fused => {
                    weights.post_attention(layer, back).and_then(|()| weights.pre_attention(0, out))
                }
            };
            done.expect(CPU);
        }
        started.elapsed().as_secs_f64() / layers as f64
    }

    /// Seconds of the classifier and the likeliest token of `rows` rows.
    pub fn classify_greedy(&mut self, rows: usize) -> f64 {
        let slab_rows: Vec<usize> = (0..rows).collect();
        let started = Instant::now();
        self.weights.likeliest(&slab_rows);
        started.elapsed().as_secs_f64()
    }

    /// Seconds of the classifier, all logits and a token drawn at temperature 1 for `rows` rows.
    pub fn classify_sampled(&mut self, rows: usize) -> f64 {
        let slab_rows: Vec<usize> = (0..rows).collect();
        let samples: Vec<Sample> = (0..rows as u64).map(sampler).collect();
        let started = Instant::now();
        self.weights.classify(&slab_rows, &samples).expect(CPU);
        started.elapsed().as_secs_f64()
    }
}

fn sampler(seed: u64) -> Sample {
    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
    Sample { sampling, ..Sample::default() }
}

/// One layer's pages, for the seconds of attention.
pub struct AttentionBench {
    config: ModelConfig,
    context: CpuContext,
    pages: usize,
    /// After how many calls the same pages are used again. Until then each call uses other pages,
    /// as another layer would.
    layers: usize,
    calls: usize,
    /// Kept between calls, as in the engine: the system would have to map a fresh buffer's pages
    /// first.
    pool: Pool,
}

impl AttentionBench {
    /// Fills pages of `bytes` bytes in all, used as if they belonged to `layers` layers.
    pub fn new(
        config: &ModelConfig,
        layers: usize,
        bytes: usize,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let (context, pages) = filled_pages(config, bytes, ContextType::Bf16, isa, threads)?;
        Ok(Self { config: config.clone(), context, pages, layers, calls: 0, pool: Pool::new(2) })
    }

    /// Whether this many contexts of this many positions fit.
    pub fn holds(&self, prompts: usize, positions: usize) -> bool {
        prompts * positions.div_ceil(PAGE_POSITIONS as usize) <= self.pages
    }

    /// Seconds of one layer's attention: the last `rows` positions of each of `prompts` contexts of
    /// `positions` positions. One row each is decoding, many rows of one prompt are its prefill.
    /// Their pages are scattered, as they are after contexts have grown side by side.
    pub fn attend(&mut self, prompts: usize, rows: usize, positions: usize) -> f64 {
        let pages_each = positions.div_ceil(PAGE_POSITIONS as usize);
        let needed = prompts * pages_each;
        let places = (self.pages / needed).clamp(1, self.layers);
        let start = self.calls % places * needed;
        self.calls += 1;
        let page = |prompt: usize, page: usize| (start + page * prompts + prompt) as u32;
        for prompt in 0..prompts {
            let pages: Vec<u32> = (0..pages_each).map(|index| page(prompt, index)).collect();
            self.context.bind(prompt as u32, 0, &pages).expect(CPU);
        }
        let seen = positions as u32 - rows as u32..positions as u32;
        let row = |slot| seen.clone().map(move |position| AttendRow { slot, position });
        let batch: Vec<AttendRow> = (0..prompts as u32).flat_map(row).collect();
        let buffer = |width: usize| self.pool.take(batch.len() * width * size_of::<bf16>());
        let qkv = buffer(self.config.qkv_width());
        let mut attended = buffer(self.config.query_width());
        let started = Instant::now();
        self.context.attend(0, &batch, &qkv, &mut attended).expect(CPU);
        let seconds = started.elapsed().as_secs_f64();
        self.pool.give(qkv);
        self.pool.give(attended);
        seconds
    }
}
