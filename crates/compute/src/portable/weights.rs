//! Tier 1's work in plain loops.

use super::product::{Matrix, dot};
use crate::math::exp;
use crate::memory::Memory;
use crate::rope::{Rope, rotate};
use crate::source::{LayerVectors, SliceSpec, WeightSource};
use crate::{ComputeError, ShardIn, ShardOut, Threads, sample};
use glinthawk_flight::Buffer;
use glinthawk_model::{LayerTensor, ModelConfig, Tensor};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

struct Layer {
    vectors: LayerVectors,
    qkv: Matrix,
    output: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// One slice's weights, row-major.
struct Matrices {
    layers: Vec<Layer>,
    embedding: Option<Matrix>,
    /// Final norm, and the classifier if it is not the embedding.
    classifier: Option<(Vec<f32>, Option<Matrix>)>,
}

/// One slice's weights, and a residual slab.
pub(crate) struct PortableWeights {
    config: ModelConfig,
    threads: Arc<Threads>,
    matrices: Arc<Matrices>,
    rope: Rope,
    /// (slab_rows, hidden)
    slab: Memory<f32>,
    /// (rows, inputs) of the product at hand
    inputs: Vec<f32>,
    /// (outputs, rows) of products; gate and up are alive at the same time
    outputs: [Vec<f32>; 2],
}

impl PortableWeights {
    pub(crate) fn load(
        source: &dyn WeightSource,
        spec: &SliceSpec,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        let config = source.config().clone();
        let (hidden, vocab) = (config.hidden, config.vocab);
        let mut read = |tensors: &[(Tensor, usize)], inputs| {
            Matrix::read(source, &threads, tensors, inputs, progress)
        };
        let embedding =
            if spec.embeds { Some(read(&[(Tensor::Embedding, vocab)], hidden)?) } else { None };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in spec.layers.clone() {
            let tensor = |tensor| Tensor::Layer(layer, tensor);
            let (query, kv, feed_forward) =
                (config.query_width(), config.kv_width(), config.feed_forward);
            let qkv = [
                (tensor(LayerTensor::Query), query),
                (tensor(LayerTensor::Key), kv),
                (tensor(LayerTensor::Value), kv),
            ];
            layers.push(Layer {
                vectors: LayerVectors::read(source, layer)?,
                qkv: read(&qkv, hidden)?,
                output: read(&[(tensor(LayerTensor::Output), hidden)], query)?,
                gate: read(&[(tensor(LayerTensor::Gate), feed_forward)], hidden)?,
                up: read(&[(tensor(LayerTensor::Up), feed_forward)], hidden)?,
                down: read(&[(tensor(LayerTensor::Down), hidden)], feed_forward)?,
            });
        }
        let classifier = if spec.classifies {
            let shared = config.tied_embeddings && spec.embeds;
            let own =
                if shared { None } else { Some(read(&[(Tensor::Classifier, vocab)], hidden)?) };
            Some((source.read_vector(Tensor::FinalNorm)?, own))
        } else {
            None
        };
        let matrices = Arc::new(Matrices { layers, embedding, classifier });
        Self::over(matrices, config, threads, spec.slab_rows)
    }

    /// The same weights, with a slab and threads of its own.
    pub(crate) fn beside(
        &self,
        threads: Arc<Threads>,
        slab_rows: usize,
    ) -> Result<Self, ComputeError> {
        Self::over(Arc::clone(&self.matrices), self.config.clone(), threads, slab_rows)
    }

    fn over(
        matrices: Arc<Matrices>,
        config: ModelConfig,
        threads: Arc<Threads>,
        slab_rows: usize,
    ) -> Result<Self, ComputeError> {
        Ok(Self {
            rope: Rope::new(&config),
            slab: Memory::zeroed("the residual slab", slab_rows * config.hidden)?,
            config,
            threads,
            matrices,
            inputs: Vec::new(),
            outputs: [Vec::new(), Vec::new()],
        })
    }

    fn slab_row(slab: &[f32], hidden: usize, row: usize) -> &[f32] {
        &slab[row * hidden..][..hidden]
    }

    /// Appends the norm of each slab row to `inputs`.
    fn norm_rows(&mut self, rows: impl Iterator<Item = usize>, weights: NormWeights) {
        let hidden = self.config.hidden;
        let weights = match weights {
            NormWeights::Attention(layer) => &self.matrices.layers[layer].vectors.attention_norm,
            NormWeights::FeedForward(layer) => {
                &self.matrices.layers[layer].vectors.feed_forward_norm
            }
            NormWeights::Final => {
                &self.matrices.classifier.as_ref().expect("the slice classifies").0
            }
        };
        self.inputs.clear();
        for row in rows {
            let start = self.inputs.len();
            self.inputs.extend_from_slice(Self::slab_row(&self.slab, hidden, row));
            norm(&mut self.inputs[start..], weights, self.config.norm_eps);
            round(&mut self.inputs[start..]);
        }
    }

    fn add_to_slab(&mut self, rows: impl Iterator<Item = usize>, count: usize) {
        let hidden = self.config.hidden;
        for (index, row) in rows.enumerate() {
            for (column, value) in self.slab[row * hidden..][..hidden].iter_mut().enumerate() {
                *value += self.outputs[0][column * count + index];
            }
        }
    }
}

#[derive(Clone, Copy)]
enum NormWeights {
    Attention(usize),
    FeedForward(usize),
    Final,
}

/// The kernels; see [`crate::WeightKernels`].
impl PortableWeights {
    pub(crate) fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) {
        assert_eq!(slab.len(), tokens.len(), "one token per slab row");
        let embedding = self.matrices.embedding.as_ref().expect("the slice embeds");
        let hidden = self.config.hidden;
        for (row, &token) in slab.zip(tokens) {
            for (value, weight) in
                self.slab[row * hidden..][..hidden].iter_mut().zip(embedding.row(token as usize))
            {
                *value = weight.to_f32();
            }
        }
    }

    pub(crate) fn put_residual(&mut self, slab: Range<usize>, residual: &[f32]) {
        let hidden = self.config.hidden;
        self.slab[slab.start * hidden..slab.end * hidden].copy_from_slice(residual);
    }

    pub(crate) fn get_residual(&mut self, slab: Range<usize>, residual: &mut [f32]) {
        let hidden = self.config.hidden;
        residual.copy_from_slice(&self.slab[slab.start * hidden..slab.end * hidden]);
    }

    pub(crate) fn pre_attention(&mut self, layer: usize, shards: &mut [ShardOut<'_, Buffer>]) {
        let rows: usize = shards.iter().map(|shard| shard.slab.len()).sum();
        self.norm_rows(
            shards.iter().flat_map(|shard| shard.slab.clone()),
            NormWeights::Attention(layer),
        );
        let Layer { qkv, vectors, .. } = &self.matrices.layers[layer];
        qkv.multiply(&self.threads, &self.inputs, rows, &mut self.outputs[0]);
        let (width, head_dim) = (self.config.qkv_width(), self.config.head_dim);
        let (heads, kv_heads) = (self.config.heads, self.config.kv_heads);
        let mut values = vec![0.0f32; width];
        let mut index = 0;
        for shard in shards {
            assert_eq!(shard.slab.len(), shard.positions.len(), "one position per row");
            for (&position, out) in
                shard.positions.iter().zip(shard.qkv.bf16_mut().chunks_exact_mut(width))
            {
                self.rope.reach(position);
                for (column, value) in values.iter_mut().enumerate() {
                    let bias = vectors.qkv_bias.as_ref().map_or(0.0, |bias| bias[column]);
                    *value = self.outputs[0][column * rows + index] + bias;
                }
                for (head, values) in
                    values.chunks_exact_mut(head_dim).take(heads + kv_heads).enumerate()
                {
                    if let Some(norms) = &vectors.head_norms {
                        norm(values, &norms[usize::from(head >= heads)], self.config.norm_eps);
                    }
                    rotate(values, self.rope.angles(position));
                }
                for (out, &value) in out.iter_mut().zip(&values) {
                    *out = bf16::from_f32(value);
                }
                index += 1;
            }
        }
        assert_eq!(index, rows, "every row has its place in a q/k/v buffer");
    }

    pub(crate) fn post_attention(&mut self, layer: usize, shards: &[ShardIn<'_, Buffer>]) {
        let rows = || shards.iter().flat_map(|shard| shard.slab.clone());
        let count: usize = shards.iter().map(|shard| shard.slab.len()).sum();
        self.inputs.clear();
        let width = self.config.query_width();
        for shard in shards {
            let values = &shard.attended.bf16()[shard.first * width..][..shard.slab.len() * width];
            self.inputs.extend(values.iter().map(|value| value.to_f32()));
        }
        self.matrices.layers[layer].output.multiply(
            &self.threads,
            &self.inputs,
            count,
            &mut self.outputs[0],
        );
        self.add_to_slab(rows(), count);

        self.norm_rows(rows(), NormWeights::FeedForward(layer));
        let Layer { gate, up, down, .. } = &self.matrices.layers[layer];
        let [gated, lifted] = &mut self.outputs;
        gate.multiply(&self.threads, &self.inputs, count, gated);
        up.multiply(&self.threads, &self.inputs, count, lifted);
        self.inputs.clear();
        for row in 0..count {
            for column in 0..gate.outputs {
                let (gated, lifted) = (gated[column * count + row], lifted[column * count + row]);
                self.inputs.push(gated / (1.0 + exp(-gated)) * lifted);
            }
        }
        round(&mut self.inputs);
        down.multiply(&self.threads, &self.inputs, count, gated);
        self.add_to_slab(rows(), count);
    }

    pub(crate) fn classify(&mut self, rows: &[usize], logits: &mut [f32]) {
        assert_eq!(logits.len(), rows.len() * self.config.vocab, "logits are (rows, vocab)");
        self.norm_rows(rows.iter().copied(), NormWeights::Final);
        let own = &self.matrices.classifier.as_ref().expect("the slice classifies").1;
        let matrix = own
            .as_ref()
            .or(self.matrices.embedding.as_ref())
            .expect("a classifier of its own, or the embedding");
        matrix.multiply(&self.threads, &self.inputs, rows.len(), &mut self.outputs[0]);
        for (row, logits) in logits.chunks_exact_mut(self.config.vocab).enumerate() {
            for (column, logit) in logits.iter_mut().enumerate() {
                *logit = self.outputs[0][column * rows.len() + row];
            }
        }
    }

    pub(crate) fn classify_greedy(&mut self, rows: &[usize], tokens: &mut [u32]) {
        let mut logits = vec![0.0; rows.len() * self.config.vocab];
        self.classify(rows, &mut logits);
        for (token, logits) in tokens.iter_mut().zip(logits.chunks_exact(self.config.vocab)) {
            *token = sample::argmax(logits);
        }
    }
}

/// x · weight / √(mean x² + ε)
fn norm(values: &mut [f32], weights: &[f32], epsilon: f32) {
    let mean = dot(values, values) / values.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    for (value, weight) in values.iter_mut().zip(weights) {
        *value = *value * scale * weight;
    }
}

/// Rounds to bf16, in place.
fn round(values: &mut [f32]) {
    for value in values {
        *value = bf16::from_f32(*value).to_f32();
    }
}
