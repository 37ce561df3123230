//! Tier 1's work on x86-64: packed weights, the residual slab, and the products between them.

use super::epilogue::{
    AddResidual, Best, FindBest, FinishQkv, Gate, NOTHING, QkvTarget, StoreLogits, better,
    heads_are_plain,
};
use super::norm::{NormRow, copy_rows, norm_row};
use super::pack::{Panels, Sources};
use super::product::{Multiplier, share_start};
use super::tiles::{Activations, PANEL, ROWS_OF_PAIR, STEP, TILE_ROWS};
use crate::memory::{Arena, Memory, SharedMut};
use crate::rope::Rope;
use crate::source::{LayerVectors, SliceSpec, WeightSource};
use crate::{ComputeError, Isa, ShardIn, ShardOut, Threads};
use glinthawk_flight::Buffer;
use glinthawk_model::{LayerTensor, ModelConfig, Tensor};
use half::bf16;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// How many rows before it is normed a row is fetched.
const ROWS_AHEAD: usize = 2;

/// Rows of a thread that pass through all products together.
const ROWS_OF_PIECE: usize = 512;

struct Layer {
    vectors: LayerVectors,
    /// Before attention and before the feed-forward, padded like the slab.
    norms: [Memory<f32>; 2],
    qkv: Panels,
    output: Panels,
    /// Panels of gate and up alternate.
    gate_up: Panels,
    down: Panels,
}

/// Where a slice that embeds looks tokens up.
enum Embedding {
    /// (vocab, hidden)
    Rows(Memory<bf16>),
    /// The classifier is the embedding, and in this slice too.
    Classifier,
}

struct Classifier {
    norm: Memory<f32>,
    panels: Panels,
}

/// One slice's weights in panels.
struct Matrices {
    layers: Vec<Layer>,
    embedding: Option<Embedding>,
    classifier: Option<Classifier>,
}

/// One slice's weights, and a residual slab.
pub(crate) struct X86Weights {
    config: ModelConfig,
    threads: Arc<Threads>,
    multiplier: Multiplier,
    matrices: Arc<Matrices>,
    rope: Rope,
    /// (slab_rows, stride): hidden values, padded with zeros to whole steps
    slab: Memory<f32>,
    stride: usize,
    /// Left operand of all products but the last of a layer
    inputs: Activations,
    /// Left operand of the feed-forward's second product
    gated: Activations,
    /// Slab row of each row of the batch at hand.
    rows: Vec<usize>,
    targets: Vec<QkvTarget>,
    bests: Vec<Best>,
}

impl X86Weights {
    pub(crate) fn load(
        source: &dyn WeightSource,
        spec: &SliceSpec,
        isa: Isa,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        let config = source.config().clone();
        let stride = config.hidden.next_multiple_of(STEP);
        let mut arena = Arena::default();
        let mut read = |sources: Sources<'_>, inputs| {
            Panels::read(&mut arena, source, &threads, sources, inputs, progress)
        };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in spec.layers.clone() {
            layers.push(Layer::read(source, layer, stride, &mut read)?);
        }
        let classifier = if spec.classifies {
            let norm = padded(&source.read_vector(Tensor::FinalNorm)?, stride)?;
            let panels =
                read(Sources::Stacked(&[(Tensor::Classifier, config.vocab)]), config.hidden)?;
            Some(Classifier { norm, panels })
        } else {
            None
        };
        let embedding = match (spec.embeds, spec.classifies && config.tied_embeddings) {
            (false, _) => None,
            (true, true) => Some(Embedding::Classifier),
            (true, false) => {
                Some(Embedding::Rows(read_embedding(&mut arena, source, &threads, progress)?))
            }
        };
        let matrices = Arc::new(Matrices { layers, embedding, classifier });
        Self::over(matrices, config, isa, threads, spec.slab_rows)
    }

    /// The same weights, with a slab and threads of its own.
    pub(crate) fn beside(
        &self,
        threads: Arc<Threads>,
        slab_rows: usize,
    ) -> Result<Self, ComputeError> {
        let (matrices, config) = (Arc::clone(&self.matrices), self.config.clone());
        Self::over(matrices, config, self.multiplier.isa, threads, slab_rows)
    }

    fn over(
        matrices: Arc<Matrices>,
        config: ModelConfig,
        isa: Isa,
        threads: Arc<Threads>,
        slab_rows: usize,
    ) -> Result<Self, ComputeError> {
        let stride = config.hidden.next_multiple_of(STEP);
        let width = config.hidden.max(config.query_width());
        let group_max = (config.head_dim / PANEL).max(2);
        let mut arena = Arena::default();
        Ok(Self {
            multiplier: Multiplier::new(&mut arena, isa, threads.count(), group_max)?,
            rope: Rope::new(&config),
            slab: arena.zeroed("the residual slab", slab_rows * stride)?,
            stride,
            inputs: Activations::new(&mut arena, slab_rows, width)?,
            gated: Activations::new(&mut arena, slab_rows, config.feed_forward)?,
            rows: Vec::with_capacity(slab_rows),
            targets: Vec::with_capacity(slab_rows),
            bests: Vec::new(),
            config,
            threads,
            matrices,
        })
    }

    /// Norms the batch's slab rows into `inputs`.
    fn norm_rows(&mut self, which: Norm) {
        let weights = match which {
            Norm::Attention(layer) => &self.matrices.layers[layer].norms[0],
            Norm::FeedForward(layer) => &self.matrices.layers[layer].norms[1],
            Norm::Final => &self.matrices.classifier.as_ref().expect("the slice classifies").norm,
        };
        let into = self.inputs.reshape(self.rows.len(), self.config.hidden);
        let (slab, stride, isa, rows) = (&*self.slab, self.stride, self.multiplier.isa, &self.rows);
        let (width, epsilon) = (self.config.hidden, self.config.norm_eps);
        share_rows(&self.threads, rows.len(), |share| {
            for row in share {
                if let Some(&row) = rows.get(row + ROWS_AHEAD) {
                    fetch::<_MM_HINT_T0>(&slab[row * stride..][..stride]);
                }
                let values = &slab[rows[row] * stride..][..stride];
                let norm = NormRow { values, weights, width, epsilon, into: &into, row };
                // SAFETY: `load` was asked for an instruction set that is there; each row is one thread's.
                unsafe { norm_row(isa, &norm) };
            }
        });
    }

    /// Adds the product of `left` and `weights` to the batch's slab rows.
    fn multiply_into_slab(&mut self, layer: usize, which: IntoSlab) {
        let (left, weights) = match which {
            IntoSlab::Output => (self.inputs.view(), &self.matrices.layers[layer].output),
            IntoSlab::Down => (self.gated.view(), &self.matrices.layers[layer].down),
        };
        let add = AddResidual::new(&mut self.slab, self.stride, &self.rows);
        let blocking = self.multiplier.blocking(self.rows.len(), weights, 2);
        let rows = self.rows.len();
        // SAFETY: `load` was asked for an instruction set that is there; slab rows of a batch are distinct.
        unsafe { self.multiplier.run(&self.threads, left, rows, weights, &blocking, &add) };
    }

    fn multiply_qkv<const PLAIN: bool>(&mut self, layer: usize) {
        let Layer { qkv, vectors, .. } = &self.matrices.layers[layer];
        let finish = FinishQkv::<PLAIN> {
            targets: &self.targets,
            bias: vectors.qkv_bias.as_deref(),
            head_norms: vectors.head_norms.as_ref(),
            epsilon: self.config.norm_eps,
            head_dim: self.config.head_dim,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
        };
        let (left, rows) = (self.inputs.view(), self.rows.len());
        let group = finish.group();
        let blocking = self.multiplier.blocking(rows, qkv, group);
        // SAFETY: as in `multiply_into_slab`; targets point at whole rows of the shards.
        unsafe { self.multiplier.run(&self.threads, left, rows, qkv, &blocking, &finish) };
    }

    fn multiply_gate_up(&mut self, layer: usize) {
        let weights = &self.matrices.layers[layer].gate_up;
        let rows = self.rows.len();
        let into = self.gated.reshape(rows, self.config.feed_forward);
        into.clear_padding();
        let gate = Gate { into };
        let left = self.inputs.view();
        let blocking = self.multiplier.blocking(rows, weights, 2);
        // SAFETY: as in `multiply_into_slab`; `gated` has room for the slab's rows.
        unsafe { self.multiplier.run(&self.threads, left, rows, weights, &blocking, &gate) };
    }

    fn take_rows(&mut self, rows: impl Iterator<Item = usize>) {
        self.rows.clear();
        self.rows.extend(rows);
        let slab_rows = self.slab.len() / self.stride;
        assert!(
            self.rows.len() <= slab_rows,
            "a batch of {} rows with a slab of {slab_rows}",
            self.rows.len()
        );
    }
}

impl Layer {
    fn read(
        source: &dyn WeightSource,
        layer: usize,
        stride: usize,
        read: &mut dyn FnMut(Sources<'_>, usize) -> Result<Panels, ComputeError>,
    ) -> Result<Self, ComputeError> {
        let config = source.config();
        let (hidden, query, kv) = (config.hidden, config.query_width(), config.kv_width());
        let tensor = |tensor| Tensor::Layer(layer, tensor);
        let qkv = [
            (tensor(LayerTensor::Query), query),
            (tensor(LayerTensor::Key), kv),
            (tensor(LayerTensor::Value), kv),
        ];
        let gate_up = [tensor(LayerTensor::Gate), tensor(LayerTensor::Up)];
        let vectors = LayerVectors::read(source, layer)?;
        Ok(Self {
            norms: [
                padded(&vectors.attention_norm, stride)?,
                padded(&vectors.feed_forward_norm, stride)?,
            ],
            vectors,
            qkv: read(Sources::Heads(&qkv, config.head_dim / PANEL), hidden)?,
            output: read(Sources::Stacked(&[(tensor(LayerTensor::Output), hidden)]), query)?,
            gate_up: read(Sources::Interleaved(gate_up, config.feed_forward), hidden)?,
            down: read(
                Sources::Stacked(&[(tensor(LayerTensor::Down), hidden)]),
                config.feed_forward,
            )?,
        })
    }
}

#[derive(Clone, Copy)]
enum Norm {
    Attention(usize),
    FeedForward(usize),
    Final,
}

#[derive(Clone, Copy)]
enum IntoSlab {
    Output,
    Down,
}

/// The kernels; see [`crate::WeightKernels`].
impl X86Weights {
    pub(crate) fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) {
        assert_eq!(slab.len(), tokens.len(), "one token per slab row");
        let hidden = self.config.hidden;
        for (row, &token) in slab.zip(tokens) {
            let token = token as usize;
            let into = slab_row(&mut self.slab, self.stride, row, hidden);
            match self.matrices.embedding.as_ref().expect("the slice embeds") {
                Embedding::Classifier => {
                    self.matrices
                        .classifier
                        .as_ref()
                        .expect("as tied")
                        .panels
                        .unpack_row(token, into);
                }
                Embedding::Rows(table) => {
                    for (into, value) in into.iter_mut().zip(&table[token * hidden..][..hidden]) {
                        *into = value.to_f32();
                    }
                }
            }
        }
    }

    pub(crate) fn put_residual(&mut self, slab: Range<usize>, residual: &[f32]) {
        let hidden = self.config.hidden;
        assert_eq!(residual.len(), slab.len() * hidden, "residual is (rows, hidden)");
        for (row, residual) in slab.zip(residual.chunks_exact(hidden)) {
            slab_row(&mut self.slab, self.stride, row, hidden).copy_from_slice(residual);
        }
    }

    pub(crate) fn get_residual(&mut self, slab: Range<usize>, residual: &mut [f32]) {
        let hidden = self.config.hidden;
        assert_eq!(residual.len(), slab.len() * hidden, "residual is (rows, hidden)");
        for (row, residual) in slab.zip(residual.chunks_exact_mut(hidden)) {
            residual.copy_from_slice(&self.slab[row * self.stride..][..hidden]);
        }
    }

    pub(crate) fn pre_attention(&mut self, layer: usize, shards: &mut [ShardOut<'_, Buffer>]) {
        let targets = self.targets(shards);
        for piece in self.pieces(targets.len()) {
            self.make_qkv(layer, &targets[piece]);
        }
    }

    pub(crate) fn post_attention(&mut self, layer: usize, shards: &[ShardIn<'_, Buffer>]) {
        let sources = self.sources(shards);
        for piece in self.pieces(sources.len()) {
            self.feed_forward(layer, &sources[piece]);
        }
    }

    /// Post-attention of `layer` and pre-attention of the next, piece by piece: what is between them stays in the cache.
    pub(crate) fn middle(
        &mut self,
        layer: usize,
        back: &[ShardIn<'_, Buffer>],
        out: &mut [ShardOut<'_, Buffer>],
    ) {
        let (sources, targets) = (self.sources(back), self.targets(out));
        assert_eq!(sources.len(), targets.len(), "the same rows");
        for piece in self.pieces(sources.len()) {
            self.feed_forward(layer, &sources[piece.clone()]);
            self.make_qkv(layer + 1, &targets[piece]);
        }
    }

    /// A batch is cut into even pieces, whose rows pass through all products together.
    fn pieces(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let most = ROWS_OF_PIECE * self.threads.count();
        let pieces = ((rows + most / 2) / most).max(1);
        let each = rows.div_ceil(pieces).next_multiple_of(ROWS_OF_PAIR).max(1);
        (0..rows).step_by(each).map(move |first| first..(first + each).min(rows))
    }

    /// Slab rows, and where the q, k, v of each go.
    fn targets(&mut self, shards: &mut [ShardOut<'_, Buffer>]) -> Vec<(usize, QkvTarget)> {
        let width = self.config.qkv_width();
        let positions = shards.iter().flat_map(|shard| shard.positions);
        self.rope.reach(positions.copied().max().unwrap_or(0));
        let mut targets = Vec::new();
        for shard in shards {
            assert_eq!(shard.slab.len(), shard.positions.len(), "one position per row");
            let values = &mut shard.qkv.bf16_mut()[..shard.slab.len() * width];
            let values = values.chunks_exact_mut(width);
            for ((row, &position), values) in shard.slab.clone().zip(shard.positions).zip(values) {
                let angles = self.rope.angles(position).as_ptr();
                targets.push((row, QkvTarget { values: values.as_mut_ptr(), angles }));
            }
        }
        targets
    }

    /// Slab rows, and what each has attended.
    fn sources<'a>(&self, shards: &[ShardIn<'a, Buffer>]) -> Vec<(usize, &'a [bf16])> {
        let width = self.config.query_width();
        let sources = shards.iter().flat_map(|shard| {
            let values = &shard.attended.bf16()[shard.first * width..];
            let values = values[..shard.slab.len() * width].chunks_exact(width);
            shard.slab.clone().zip(values)
        });
        sources.collect()
    }

    fn make_qkv(&mut self, layer: usize, targets: &[(usize, QkvTarget)]) {
        self.take_rows(targets.iter().map(|(row, _)| *row));
        self.targets.clear();
        self.targets.extend(targets.iter().map(|(_, target)| *target));
        self.norm_rows(Norm::Attention(layer));
        let vectors = &self.matrices.layers[layer].vectors;
        let (bias, head_norms) = (vectors.qkv_bias.is_some(), vectors.head_norms.is_some());
        if heads_are_plain(self.config.head_dim, bias, head_norms) {
            self.multiply_qkv::<true>(layer);
        } else {
            self.multiply_qkv::<false>(layer);
        }
    }

    fn feed_forward(&mut self, layer: usize, sources: &[(usize, &[bf16])]) {
        self.take_rows(sources.iter().map(|(row, _)| *row));
        let into = self.inputs.reshape(self.rows.len(), self.config.query_width());
        let sources: Vec<&[bf16]> = sources.iter().map(|(_, values)| *values).collect();
        let (slab, stride, isa, rows) = (&*self.slab, self.stride, self.multiplier.isa, &self.rows);
        share_rows(&self.threads, rows.len(), |share| {
            // The product fetches the residual of later pairs itself.
            for &row in &rows[share.start..share.end.min(share.start + ROWS_OF_PAIR)] {
                fetch::<_MM_HINT_T1>(&slab[row * stride..][..stride]);
            }
            let mut first = share.start;
            while first < share.end {
                let end = (first / TILE_ROWS + 1) * TILE_ROWS;
                // SAFETY: the instruction set is there; each thread has rows of its own.
                unsafe { copy_rows(isa, &sources, &into, first..end.min(share.end)) };
                first = end;
            }
        });
        self.multiply_into_slab(layer, IntoSlab::Output);
        self.norm_rows(Norm::FeedForward(layer));
        self.multiply_gate_up(layer);
        self.multiply_into_slab(layer, IntoSlab::Down);
    }

    pub(crate) fn classify(&mut self, rows: &[usize], logits: &mut [f32]) {
        assert_eq!(logits.len(), rows.len() * self.config.vocab, "logits are (rows, vocab)");
        self.take_rows(rows.iter().copied());
        self.norm_rows(Norm::Final);
        let panels = &self.matrices.classifier.as_ref().expect("the slice classifies").panels;
        let blocking = self.multiplier.blocking(rows.len(), panels, 2);
        let store = StoreLogits { logits: SharedMut::new(logits), vocab: self.config.vocab };
        let left = self.inputs.view();
        // SAFETY: as in `multiply_into_slab`; there are logits for all rows.
        unsafe { self.multiplier.run(&self.threads, left, rows.len(), panels, &blocking, &store) };
    }

    pub(crate) fn classify_greedy(&mut self, rows: &[usize], tokens: &mut [u32]) {
        assert_eq!(rows.len(), tokens.len(), "one token per row");
        self.take_rows(rows.iter().copied());
        self.norm_rows(Norm::Final);
        let panels = &self.matrices.classifier.as_ref().expect("the slice classifies").panels;
        let blocking = self.multiplier.blocking(rows.len(), panels, 2);
        self.bests.clear();
        self.bests.resize(blocking.blocks * rows.len(), Best::NONE);
        let find = FindBest {
            bests: SharedMut::new(&mut self.bests),
            rows: rows.len(),
            vocab: self.config.vocab,
        };
        let left = self.inputs.view();
        // SAFETY: as in `multiply_into_slab`; there are places for all rows.
        unsafe { self.multiplier.run(&self.threads, left, rows.len(), panels, &blocking, &find) };
        for (row, token) in tokens.iter_mut().enumerate() {
            let of_tasks = self.bests.iter().skip(row).step_by(rows.len());
            *token = of_tasks.map(Best::token).fold(NOTHING, better).0;
        }
    }
}

/// The values of a slab row that is about to be written. Its padding becomes zeros: what was there may be NaN.
fn slab_row(slab: &mut [f32], stride: usize, row: usize, hidden: usize) -> &mut [f32] {
    let (values, padding) = slab[row * stride..][..stride].split_at_mut(hidden);
    padding.fill(0.0);
    values
}

/// Runs `task` for each thread's share of the rows.
fn share_rows(threads: &Threads, rows: usize, task: impl Fn(Range<usize>) + Sync) {
    threads.run(|thread, count| {
        let start = |thread| share_start(rows, thread, count);
        task(start(thread)..start(thread + 1));
    });
}

/// Prefetches values that will be needed soon, into the level of the hint. A residual has waited in memory while its
/// row was away.
fn fetch<const HINT: i32>(values: &[f32]) {
    const LINE: usize = 64 / size_of::<f32>();
    for line in values.chunks(LINE) {
        // SAFETY: a prefetch changes nothing.
        unsafe { _mm_prefetch::<HINT>(line.as_ptr().cast()) };
    }
}

fn padded(values: &[f32], len: usize) -> Result<Memory<f32>, ComputeError> {
    let mut padded = Memory::zeroed("a norm's weights", len)?;
    padded[..values.len()].copy_from_slice(values);
    Ok(padded)
}

/// Reads the embedding table without packing it.
fn read_embedding(
    arena: &mut Arena,
    source: &dyn WeightSource,
    threads: &Threads,
    progress: &mut dyn FnMut(u64),
) -> Result<Memory<bf16>, ComputeError> {
    const READ_ROWS: usize = 256;
    let (vocab, hidden) = (source.config().vocab, source.config().hidden);
    let mut table = arena.zeroed("the embedding", vocab * hidden)?;
    let failure = Mutex::new(None);
    let shared = SharedMut::new(&mut table);
    threads.for_each(vocab.div_ceil(READ_ROWS), |chunk| {
        let rows = chunk * READ_ROWS..((chunk + 1) * READ_ROWS).min(vocab);
        // SAFETY: chunks do not overlap.
        let into = unsafe { shared.part(rows.start * hidden, rows.len() * hidden) };
        if let Err(error) = source.read_rows(Tensor::Embedding, rows, into) {
            *failure.lock().expect("no panic while held") = Some(error);
        }
    });
    if let Some(error) = failure.into_inner().expect("no panic while held") {
        return Err(error);
    }
    progress((table.len() * size_of::<bf16>()) as u64);
    Ok(table)
}
