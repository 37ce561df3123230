//! Single stages of a layer on any backend, as the engine meets them: every repetition turns to other layers or other
//! pages, so that no cache holds what a real run would have to load again. Nothing here is timed: see [`super::timed`].

use super::{residual, timed};
use crate::{
    AttendRow, Backend, ComputeError, ContextKernels, ContextSpec, ContextType, CpuBackend,
    CpuContext, ShardIn, ShardOut, SliceSpec, WeightKernels,
};
use glinthawk_flight::{Buffer, Sample, Sampling};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;

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
pub struct StageBench<B: Backend> {
    config: ModelConfig,
    layers: usize,
    layer_next: usize,
    weights: B::Weights,
    qkv: B::Buffer,
    attended: B::Buffer,
    positions: Vec<u32>,
    slab_rows: Vec<usize>,
    /// For each row: the likeliest token, and one that is drawn.
    samples: [Vec<Sample>; 2],
}

impl<B: Backend> StageBench<B> {
    /// Loads layers of a model and its classifier, for batches of up to `rows_max` rows.
    pub fn new(
        backend: &B,
        model: &Model,
        layers: Range<usize>,
        rows_max: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        let count = layers.len();
        let whole = SliceSpec::whole(model.config(), rows_max);
        let spec = SliceSpec { layers, embeds: false, ..whole };
        let weights = backend.weights(model, &spec, progress)?;
        Self::over(backend, weights, model.config().clone(), count, rows_max)
    }

    fn over(
        backend: &B,
        mut weights: B::Weights,
        config: ModelConfig,
        layers: usize,
        rows_max: usize,
    ) -> Result<Self, ComputeError> {
        let start = backend.to_device(residual(rows_max, config.hidden))?;
        weights.put_residual(0..rows_max, &start)?;
        backend.give(start);
        let mut attended = Buffer::zeroed(rows_max * config.query_width() * size_of::<bf16>());
        for (index, value) in attended.bf16_mut().iter_mut().enumerate() {
            *value = bf16::from_f32((index % 13) as f32 / 8.0 - 0.75);
        }
        let samples = |temperature| {
            let seeds = 0..rows_max as u64;
            seeds.map(move |seed| sampler(seed, temperature)).collect::<Vec<Sample>>()
        };
        Ok(Self {
            layers,
            layer_next: 0,
            qkv: backend.take(rows_max * config.qkv_width() * size_of::<bf16>())?,
            attended: backend.to_device(attended)?,
            positions: (0..rows_max).map(|row| (row % config.context_max) as u32).collect(),
            slab_rows: (0..rows_max).collect(),
            samples: [0.0, 1.0].map(samples),
            weights,
            config,
        })
    }

    /// A stage of the next layer for `rows` rows.
    pub fn stage(&mut self, stage: TimedStage, rows: usize) -> Result<(), ComputeError> {
        let layer = self.layer_next;
        self.layer_next = (layer + 1) % self.layers;
        let positions = &self.positions[..rows];
        let out = &mut [ShardOut { slab: 0..rows, positions, qkv: &mut self.qkv }];
        let back = &[ShardIn { slab: 0..rows, attended: &self.attended, first: 0 }];
        let weights = &mut self.weights;
        match stage {
            TimedStage::Pre => weights.pre_attention(layer, out),
            TimedStage::Post => weights.post_attention(layer, back),
            TimedStage::Fused if self.layer_next > 0 => weights.middle(layer, back, out),
            TimedStage::Fused => {
                weights.post_attention(layer, back).and_then(|()| weights.pre_attention(0, out))
            }
        }
    }

    /// The classifier and a token of each of `rows` rows: the likeliest, or one drawn from all logits at temperature 1.
    pub fn classify(&mut self, rows: usize, drawn: bool) -> Result<(), ComputeError> {
        let samples = &self.samples[usize::from(drawn)][..rows];
        self.weights.classify(&self.slab_rows[..rows], samples)?;
        self.weights.tokens().map(drop)
    }
}

impl StageBench<CpuBackend> {
    /// The same weights on other threads, as lanes share them.
    pub fn beside(&self, backend: &CpuBackend) -> Result<Self, ComputeError> {
        let rows_max = self.positions.len();
        let weights = self.weights.beside(backend.threads.clone(), rows_max)?;
        Self::over(backend, weights, self.config.clone(), self.layers, rows_max)
    }
}

fn sampler(seed: u64, temperature: f32) -> Sample {
    let sampling = Sampling { temperature, seed, ..Sampling::default() };
    Sample { sampling, ..Sample::default() }
}

/// Page tables at most: on a device, each has room for a longest context.
const SLOTS_MAX: usize = 1 << 16;

/// One layer's pages, for the seconds of attention.
pub struct AttentionBench<B: Backend> {
    backend: B,
    config: ModelConfig,
    context: B::Context,
    pages: usize,
    page_positions: usize,
    slots: usize,
    /// After how many calls the same pages are used again. Until then each call uses other pages,
    /// as another layer would.
    layers: usize,
    calls: usize,
    bound: Option<Bound<B>>,
}

/// Rows that attend, and their activations.
struct Bound<B: Backend> {
    /// Prompts, rows of each, and positions of each.
    case: (usize, usize, usize),
    /// The same rows in different places.
    batches: Vec<Vec<AttendRow>>,
    qkv: B::Buffer,
    attended: B::Buffer,
}

impl<B: Backend> AttentionBench<B> {
    /// Fills pages of `bytes` bytes in all, used as if they belonged to all layers, for contexts of up to `context_max`
    /// positions and batches of up to `rows_max` rows.
    pub fn new(
        backend: &B,
        config: &ModelConfig,
        bytes: usize,
        context_max: usize,
        rows_max: usize,
    ) -> Result<Self, ComputeError> {
        let (context_type, page_positions) = (ContextType::Bf16, backend.page_positions()[0]);
        let pages = bytes / CpuContext::bytes(config, 1, context_type, page_positions);
        let pages = pages.max(1);
        let slots = pages.min(SLOTS_MAX);
        let spec = ContextSpec {
            layers: 1,
            pages,
            page_positions,
            context_type,
            slots,
            context_max,
            batch_rows: rows_max,
        };
        let mut context = backend.context(config, &spec)?;
        context.fill();
        Ok(Self {
            backend: backend.clone(),
            config: config.clone(),
            context,
            pages,
            page_positions: page_positions as usize,
            slots,
            layers: config.layers,
            calls: 0,
            bound: None,
        })
    }

    /// Contexts of this many positions that fit.
    pub fn prompts_held(&self, positions: usize) -> usize {
        (self.pages / positions.div_ceil(self.page_positions)).min(self.slots)
    }

    /// Chooses what [`Self::attend`] attends: the last `rows` positions of each of `prompts` contexts of `positions`
    /// positions. One row each is decoding, many rows of one prompt are its prefill. Their pages are scattered, as they
    /// are after contexts have grown side by side.
    pub fn turn_to(
        &mut self,
        prompts: usize,
        rows: usize,
        positions: usize,
    ) -> Result<(), ComputeError> {
        let case = (prompts, rows, positions);
        if self.bound.as_ref().is_some_and(|bound| bound.case == case) {
            return Ok(());
        }
        let pages_each = positions.div_ceil(self.page_positions);
        let needed = prompts * pages_each;
        let places = (self.pages / needed).min(self.slots / prompts).clamp(1, self.layers);
        let seen = positions as u32 - rows as u32..positions as u32;
        let mut batches = Vec::new();
        for place in 0..places {
            let mut batch = Vec::with_capacity(prompts * rows);
            for prompt in 0..prompts {
                let slot = (place * prompts + prompt) as u32;
                let page = |page: usize| (place * needed + page * prompts + prompt) as u32;
                let pages: Vec<u32> = (0..pages_each).map(page).collect();
                self.context.bind(slot, 0, &pages)?;
                batch.extend(seen.clone().map(|position| AttendRow {
                    slot,
                    position,
                    asked: true,
                }));
            }
            batches.push(batch);
        }
        if let Some(Bound { qkv, attended, .. }) = self.bound.take() {
            [qkv, attended].into_iter().for_each(|buffer| self.backend.give(buffer));
        }
        let buffer = |width: usize| self.backend.take(prompts * rows * width * size_of::<bf16>());
        let (qkv, attended) =
            (buffer(self.config.qkv_width())?, buffer(self.config.query_width())?);
        self.bound = Some(Bound { case, batches, qkv, attended });
        Ok(())
    }

    /// One layer's attention of the rows that were chosen.
    pub fn attend(&mut self) -> Result<(), ComputeError> {
        let Bound { batches, qkv, attended, .. } = self.bound.as_mut().expect("rows were chosen");
        self.calls += 1;
        self.context.attend(0, &batches[self.calls % batches.len()], qkv, attended)
    }
}

/// Seconds until activations of `len_bytes` bytes are on the host.
pub fn copy_to_host<B: Backend>(backend: &B, len_bytes: usize) -> Result<f64, ComputeError> {
    let there = backend.take(len_bytes)?;
    let (seconds, here) = timed(backend, || backend.to_host(there))?;
    // On its way back the host's buffer is kept for the next copy, as a node keeps it.
    let (_, there) = timed(backend, || backend.to_device(here))?;
    backend.give(there);
    Ok(seconds)
}

/// Seconds until activations of `len_bytes` bytes are on the device.
pub fn copy_to_device<B: Backend>(backend: &B, len_bytes: usize) -> Result<f64, ComputeError> {
    let there = backend.take(len_bytes)?;
    let (_, here) = timed(backend, || backend.to_host(there))?;
    let (seconds, there) = timed(backend, || backend.to_device(here))?;
    backend.give(there);
    Ok(seconds)
}
