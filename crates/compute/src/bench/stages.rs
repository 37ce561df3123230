//! Single stages of a layer, timed as the engine meets them: every repetition turns to other layers
//! or other pages, so that no cache holds what a real run would have to load again.

use super::filled_pages;
use crate::sample::sample;
use crate::{
    AttendRow, ComputeError, ContextKernels, ContextType, CpuContext, CpuWeights, Isa, ShardIn,
    ShardOut, SliceSpec, Threads, WeightKernels,
};
use glinthawk_flight::{Buffer, PAGE_POSITIONS, Pool, Sample};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Rows whose logits are held at once, as on a Tier-1 node.
const LOGIT_ROWS_MAX: usize = 64;

/// A part of Tier 1's work in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Norm, q/k/v projection, rotary embedding.
    Pre,
    /// Output projection, feed-forward.
    Post,
    /// A layer's post, then the next layer's pre: one call after the other, as Tier 1 makes them.
    Fused,
}

/// Some layers of a model and its classifier, for the seconds of Tier 1's stages.
pub struct StageBench {
    config: ModelConfig,
    layers: usize,
    layer_next: usize,
    weights: CpuWeights,
    threads: Arc<Threads>,
    qkv: Buffer,
    attended: Buffer,
    positions: Vec<u32>,
    logits: Vec<f32>,
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
        let spec = SliceSpec { layers, embeds: false, classifies: true, slab_rows: rows_max };
        let weights = CpuWeights::load(model, spec, isa, Arc::clone(&threads), progress)?;
        Ok(Self::over(weights, model.config().clone(), count, rows_max, threads))
    }

    /// The same weights on other threads, as lanes share them.
    pub fn beside(&self, threads: Arc<Threads>) -> Result<Self, ComputeError> {
        let rows_max = self.positions.len();
        let weights = self.weights.beside(Arc::clone(&threads), rows_max)?;
        Ok(Self::over(weights, self.config.clone(), self.layers, rows_max, threads))
    }

    fn over(
        mut weights: CpuWeights,
        config: ModelConfig,
        layers: usize,
        rows_max: usize,
        threads: Arc<Threads>,
    ) -> Self {
        let residual: Vec<f32> =
            (0..rows_max * config.hidden).map(|index| (index % 13) as f32 - 6.0).collect();
        weights.put_residual(0..rows_max, &residual);
        let buffer = |width: usize| Buffer::zeroed(rows_max * width * size_of::<bf16>());
        let mut attended = buffer(config.query_width());
        for (index, value) in attended.bf16_mut().iter_mut().enumerate() {
            *value = bf16::from_f32((index % 13) as f32 / 8.0 - 0.75);
        }
        Self {
            layers,
            layer_next: 0,
            qkv: buffer(config.qkv_width()),
            attended,
            positions: (0..rows_max as u32).collect(),
            logits: vec![0.0; LOGIT_ROWS_MAX.min(rows_max) * config.vocab],
            weights,
            threads,
            config,
        }
    }

    /// Mean seconds per layer of a stage for `rows` rows, over the next `layers` layers.
    pub fn stage(&mut self, stage: Stage, rows: usize, layers: usize) -> f64 {
        let started = Instant::now();
        for _ in 0..layers {
            let layer = self.layer_next;
            self.layer_next = (layer + 1) % self.layers;
            match stage {
                Stage::Pre => self.pre(layer, rows),
                Stage::Post => self.post(layer, rows),
                Stage::Fused => {
                    self.post(layer, rows);
                    self.pre(self.layer_next, rows);
                }
            }
        }
        started.elapsed().as_secs_f64() / layers as f64
    }

    fn pre(&mut self, layer: usize, rows: usize) {
        let positions = &self.positions[..rows];
        let shard = ShardOut { slab: 0..rows, positions, qkv: &mut self.qkv };
        self.weights.pre_attention(layer, &mut [shard]);
    }

    fn post(&mut self, layer: usize, rows: usize) {
        self.weights.post_attention(layer, &[ShardIn { slab: 0..rows, attended: &self.attended }]);
    }

    /// Seconds of the classifier and the likeliest token of `rows` rows.
    pub fn classify_greedy(&mut self, rows: usize) -> f64 {
        let slab_rows: Vec<usize> = (0..rows).collect();
        let mut tokens = vec![0; rows];
        let started = Instant::now();
        self.weights.classify_greedy(&slab_rows, &mut tokens);
        started.elapsed().as_secs_f64()
    }

    /// Seconds of the classifier, all logits and a token drawn at temperature 1 for `rows` rows.
    pub fn classify_sampled(&mut self, rows: usize) -> f64 {
        let slab_rows: Vec<usize> = (0..rows).collect();
        let started = Instant::now();
        for rows in slab_rows.chunks(LOGIT_ROWS_MAX) {
            let logits = &mut self.logits[..rows.len() * self.config.vocab];
            self.weights.classify(rows, logits);
            let slots: Vec<_> =
                logits.chunks_exact_mut(self.config.vocab).map(Mutex::new).collect();
            self.threads.for_each(slots.len(), |index| {
                let mut logits = slots[index].lock().expect("no panic while sampling");
                std::hint::black_box(sample(&mut logits, &sampler(rows[index] as u64)));
            });
        }
        started.elapsed().as_secs_f64()
    }
}

fn sampler(seed: u64) -> Sample {
    Sample {
        row: 0,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed,
        position: 0,
        repeated: Vec::new(),
        repetition_penalty: 1.0,
        biases: Vec::new(),
        logprobs: None,
    }
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
        let tables: Vec<Vec<u32>> = (0..prompts)
            .map(|prompt| (0..pages_each).map(|index| page(prompt, index)).collect())
            .collect();
        let batch: Vec<AttendRow<'_>> = tables
            .iter()
            .flat_map(|pages| {
                let row = |position: usize| AttendRow {
                    position: position as u32,
                    pages: &pages[..=position / PAGE_POSITIONS as usize],
                };
                (positions - rows..positions).map(row)
            })
            .collect();
        let buffer = |width: usize| self.pool.take(batch.len() * width * size_of::<bf16>());
        let qkv = buffer(self.config.qkv_width());
        let mut attended = buffer(self.config.query_width());
        let started = Instant::now();
        self.context.attend(0, &batch, &qkv, &mut attended);
        let seconds = started.elapsed().as_secs_f64();
        self.pool.give(qkv);
        self.pool.give(attended);
        seconds
    }
}
