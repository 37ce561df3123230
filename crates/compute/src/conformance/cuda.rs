//! A GPU's whole steps: agreement with the oracle, and bits that depend on a prompt alone. Without a GPU these tests
//! say so and pass; `scripts/gpu` runs them where there is one.

mod failures;
mod picks;
mod shared;

use super::assert_close;
use super::model::Shape;
use crate::cuda::{
    CudaBackend, CudaBuffer, CudaContext, CudaDevice, CudaModel, CudaWeights, StepLimits,
    pinned_pool,
};
use crate::{
    AttendRow, Backend, ContextKernels, ContextSpec, ContextType, CpuContext, CpuWeights, Isa,
    ShardIn, ShardOut, SliceSpec, Threads, WeightKernels,
};
use glinthawk_flight::{Buffer, Generated, Row, Sample, Sampling};
use std::ops::Range;
use std::sync::Arc;

const PAGE_POSITIONS: u32 = CudaModel::PAGE_POSITIONS;

/// The first GPU; `None`, with a word about it, where there is none.
fn device() -> Option<CudaDevice> {
    match CudaDevice::open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("GLINTHAWK_REQUIRE_GPU").is_none(), "no GPU: {error}");
            println!("skipped: no GPU: {error}");
            None
        }
    }
}

/// A prompt in a slot, its pages scattered.
struct Prompt {
    slot: u32,
    tokens: Vec<u32>,
}

impl Prompt {
    fn new(shape: &Shape, slot: u32, len: usize) -> Self {
        let token = |at: usize| (at * at * 7 + at * 13 + slot as usize * 5) % shape.vocab;
        Self { slot, tokens: (0..len).map(|at| token(at) as u32).collect() }
    }

    fn row(&self, position: usize) -> Row {
        let page = position as u32 / PAGE_POSITIONS;
        // Prompts take every fourth page, backwards.
        let page = 4 * (255 - page) + self.slot;
        Row { slot: self.slot, position: position as u32, page, token: self.tokens[position] }
    }
}

fn limits() -> StepLimits {
    StepLimits { rows: 600, slots: 4, pages: 1024, context: 4096 }
}

fn load(shape: &Shape, device: &CudaDevice) -> CudaModel {
    let threads = Arc::new(Threads::new(2).unwrap());
    CudaModel::load_from(&shape.source(), device, limits(), &threads, &mut |_, _| {}).unwrap()
}

/// Logits of all rows of one step. Tables begin with the pages of `bound`.
fn step(model: &mut CudaModel, shape: &Shape, rows: &[Row], bound: &[Row]) -> Vec<Vec<f32>> {
    let samples: Vec<Sample> =
        (0..rows.len() as u32).map(|row| Sample { row, ..Sample::default() }).collect();
    model.submit(rows, bound, &samples).unwrap();
    let tokens = model.tokens().unwrap().tokens;
    let logits = model.last_logits(rows.len());
    for (sampled, logits) in tokens.into_iter().zip(logits.chunks_exact(shape.vocab)) {
        assert_eq!(sampled.token, crate::sample::argmax(logits), "the likeliest token");
    }
    logits.chunks_exact(shape.vocab).map(<[f32]>::to_vec).collect()
}

/// Logits of every position of a prompt by the oracle.
fn oracle(shape: &Shape, prompt: &Prompt) -> Vec<f32> {
    let config = shape.config();
    let count = prompt.tokens.len();
    let mut weights: CpuWeights = shape.weights(Isa::Portable, 2, count);
    let mut context: CpuContext = shape.context(Isa::Portable, 2, 300);
    let positions: Vec<u32> = (0..count as u32).collect();
    let pages: Vec<u32> = (0..300).collect();
    context.bind(0, 0, &pages).unwrap();
    weights.embed(0..count, &prompt.tokens).unwrap();
    for layer in 0..config.layers {
        let mut qkv = Buffer::zeroed(count * config.qkv_width() * 2);
        let out = ShardOut { slab: 0..count, positions: &positions, qkv: &mut qkv };
        weights.pre_attention(layer, &mut [out]).unwrap();
        let rows: Vec<AttendRow> = positions
            .iter()
            .map(|&position| AttendRow { slot: 0, position, asked: true })
            .collect();
        let mut attended = Buffer::zeroed(count * config.query_width() * 2);
        context.attend(layer, &rows, &qkv, &mut attended).unwrap();
        let back = ShardIn { slab: 0..count, attended: &attended, first: 0 };
        weights.post_attention(layer, &[back]).unwrap();
    }
    let mut logits = vec![0.0; count * config.vocab];
    weights.logits(&(0..count).collect::<Vec<_>>(), &mut logits);
    logits
}

fn shapes() -> Vec<Shape> {
    let base = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    vec![
        base.clone(),
        Shape { tied: true, heads: 3, kv_heads: 3, head_dim: 80, qkv_bias: true, ..base.clone() },
        Shape { heads: 8, kv_heads: 1, head_dim: 96, qk_norm: true, ..base.clone() },
        Shape { heads: 9, kv_heads: 3, head_dim: 64, ..base.clone() },
        Shape { heads: 20, kv_heads: 1, head_dim: 16, ..base.clone() },
        Shape { heads: 8, kv_heads: 2, head_dim: 128, window: Some(37), ..base.clone() },
        Shape { heads: 2, kv_heads: 1, head_dim: 256, hidden: 256, feed_forward: 512, ..base },
    ]
}

#[test]
fn steps_agree_with_the_oracle() {
    let Some(device) = device() else { return };
    // The second as one of compute capability 7.5 is used, with its instructions.
    for device in [device.clone(), device.in_f16()] {
        for shape in shapes() {
            let prompt = Prompt::new(&shape, 1, 150);
            let rows: Vec<Row> = (0..150).map(|at| prompt.row(at)).collect();
            let found = step(&mut load(&shape, &device), &shape, &rows, &[]).concat();
            assert_close(&format!("logits of {shape:?}"), &found, &oracle(&shape, &prompt), 0.03);
        }
    }
}

/// Wide enough for several tiles of a product.
fn wide() -> Shape {
    let base = Shape { hidden: 256, heads: 8, kv_heads: 2, ..Shape::default() };
    Shape { feed_forward: 1024, vocab: 520, ..base }
}

#[test]
fn bits_depend_on_the_prompt_alone() {
    let Some(device) = device() else { return };
    let base = wide();
    let windowed = Shape { head_dim: 128, window: Some(1200), ..base.clone() };
    let f16 = device.clone().in_f16();
    for (shape, device) in [(&base, &device), (&windowed, &device), (&windowed, &f16)] {
        let mut model = load(shape, device);
        let (prompt, other) = (Prompt::new(shape, 1, 2300), Prompt::new(shape, 2, 2300));
        let run = |model: &mut CudaModel, chunk: usize, beside: bool, from: usize| {
            let mut found = Vec::new();
            for start in (from..2300).step_by(chunk) {
                let positions = start..(start + chunk).min(2300);
                let mut rows: Vec<Row> = Vec::new();
                if beside {
                    rows.push(other.row(start / chunk % 40));
                }
                rows.extend(positions.map(|at| prompt.row(at)));
                let logits = step(model, shape, &rows, &[]);
                found.extend(logits.into_iter().skip(usize::from(beside)));
            }
            found
        };
        let expected = run(&mut model, 500, false, 0);
        for (chunk, beside, from) in
            [(599, true, 0), (64, true, 0), (7, false, 1000), (1, true, 2200)]
        {
            let found = run(&mut model, chunk, beside, from);
            for (at, (found, expected)) in found.iter().zip(&expected[from..]).enumerate() {
                let same = found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "position {} in chunks of {chunk}", from + at);
            }
        }
    }
}

#[test]
fn leftovers_of_another_prompt_do_no_harm() {
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let prompt = Prompt::new(&shape, 1, 40);
    let run = |model: &mut CudaModel| -> Vec<Vec<f32>> {
        (0..40).flat_map(|at| step(model, &shape, &[prompt.row(at)], &[])).collect()
    };
    let expected = run(&mut model);
    model.poison_pages();
    assert_eq!(run(&mut model), expected);
}

/// A model in slices, each with its contexts, whose work is done layer by layer.
struct Layered {
    backend: CudaBackend,
    slices: Vec<(CudaWeights, CudaContext)>,
    /// Whether activations between the tiers visit the host.
    apart: bool,
}

/// Rows of the slab between the starts of two shards.
const SHARD_ROWS: usize = 610;

impl Layered {
    fn new(shape: &Shape, device: &CudaDevice, slices: &[Range<usize>], apart: bool) -> Self {
        let threads = Arc::new(Threads::new(2).unwrap());
        let backend = CudaBackend::new(device.clone(), threads, Arc::new(pinned_pool(device, 16)));
        let (config, limits) = (shape.config(), limits());
        let slice = |layers: &Range<usize>| {
            let spec = SliceSpec {
                layers: layers.clone(),
                embeds: layers.start == 0,
                classifies: layers.end == config.layers,
                slab_rows: 3 * SHARD_ROWS,
                batch_rows: limits.rows,
            };
            let contexts = ContextSpec {
                layers: layers.len(),
                pages: limits.pages,
                page_positions: PAGE_POSITIONS,
                context_type: ContextType::Bf16,
                slots: limits.slots,
                context_max: limits.context,
                batch_rows: limits.rows,
            };
            let weights = backend.load(&shape.source(), &spec, &mut |_, _| {}).unwrap();
            (weights, backend.context(&config, &contexts).unwrap())
        };
        Self { slices: slices.iter().map(slice).collect(), backend: backend.clone(), apart }
    }

    /// Activations as they arrive on the other tier.
    fn travel(&self, buffer: CudaBuffer, always: bool) -> CudaBuffer {
        if !self.apart && !always {
            return buffer;
        }
        let sent = self.backend.to_host(buffer).unwrap();
        let sent_at = self.backend.mark().unwrap();
        while !self.backend.is_done(&sent_at).unwrap() {}
        self.backend.to_device(sent).unwrap()
    }

    /// A step of shards of rows: the logits of all, and a token for each sample (whose row counts all shards').
    fn step(
        &mut self,
        shape: &Shape,
        shards: &[&[Row]],
        samples: &[Sample],
    ) -> (Vec<f32>, Vec<Generated>) {
        let slab = |shard: usize| shard * SHARD_ROWS..shard * SHARD_ROWS + shards[shard].len();
        let mut residuals: Vec<CudaBuffer> = Vec::new();
        for index in 0..self.slices.len() {
            residuals = self.slice(shape, index, shards, residuals);
        }
        residuals.into_iter().for_each(|residual| self.backend.give(residual));
        let rows: Vec<u32> = (0..shards.len()).flat_map(slab).map(|row| row as u32).collect();
        let picked: Vec<usize> =
            samples.iter().map(|sample| rows[sample.row as usize] as usize).collect();
        let (weights, _) = self.slices.last_mut().unwrap();
        weights.classify(&picked, samples).unwrap();
        let tokens = weights.tokens().unwrap();
        (weights.logits(&rows), tokens)
    }

    /// A slice's part of a step; residuals go in and come out, from the second slice on and up to the last.
    fn slice(
        &mut self,
        shape: &Shape,
        index: usize,
        shards: &[&[Row]],
        residuals: Vec<CudaBuffer>,
    ) -> Vec<CudaBuffer> {
        let config = shape.config();
        let slab = |shard: usize| shard * SHARD_ROWS..shard * SHARD_ROWS + shards[shard].len();
        let positions: Vec<Vec<u32>> =
            shards.iter().map(|rows| rows.iter().map(|row| row.position).collect()).collect();
        let take = |backend: &CudaBackend, bytes: usize| -> Vec<CudaBuffer> {
            shards.iter().map(|rows| backend.take(rows.len() * bytes).unwrap()).collect()
        };
        for (shard, rows) in shards.iter().enumerate() {
            let weights = &mut self.slices[index].0;
            match residuals.get(shard) {
                None => {
                    let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
                    weights.embed(slab(shard), &tokens).unwrap();
                }
                Some(residual) => weights.put_residual(slab(shard), residual).unwrap(),
            }
        }
        residuals.into_iter().for_each(|residual| self.backend.give(residual));
        let layers = config.layers / self.slices.len();
        let mut attended: Vec<CudaBuffer> = Vec::new();
        for layer in 0..=layers {
            let backend = self.backend.clone();
            let back: Vec<ShardIn<'_, CudaBuffer>> = attended
                .iter()
                .enumerate()
                .map(|(shard, attended)| ShardIn { slab: slab(shard), attended, first: 0 })
                .collect();
            if layer == layers {
                self.slices[index].0.post_attention(layer - 1, &back).unwrap();
                break;
            }
            let mut qkv = take(&backend, config.qkv_width() * 2);
            let mut out: Vec<ShardOut<'_, CudaBuffer>> = qkv
                .iter_mut()
                .enumerate()
                .map(|(shard, qkv)| ShardOut {
                    slab: slab(shard),
                    positions: &positions[shard],
                    qkv,
                })
                .collect();
            match layer {
                0 => self.slices[index].0.pre_attention(0, &mut out).unwrap(),
                _ => self.slices[index].0.middle(layer - 1, &back, &mut out).unwrap(),
            }
            drop(out);
            attended.into_iter().for_each(|buffer| backend.give(buffer));
            attended = self.attend(shape, index, layer, shards, qkv);
        }
        attended.into_iter().for_each(|buffer| self.backend.give(buffer));
        if index + 1 == self.slices.len() {
            return Vec::new();
        }
        let mut residuals = take(&self.backend, config.hidden * 4);
        for (shard, residual) in residuals.iter_mut().enumerate() {
            self.slices[index].0.get_residual(slab(shard), residual).unwrap();
        }
        residuals.into_iter().map(|residual| self.travel(residual, true)).collect()
    }

    fn attend(
        &mut self,
        shape: &Shape,
        index: usize,
        layer: usize,
        shards: &[&[Row]],
        qkv: Vec<CudaBuffer>,
    ) -> Vec<CudaBuffer> {
        let mut all = Vec::new();
        for (rows, qkv) in shards.iter().zip(qkv) {
            let qkv = self.travel(qkv, false);
            let context = &mut self.slices[index].1;
            for row in *rows {
                context
                    .bind(row.slot, (row.position / PAGE_POSITIONS) as usize, &[row.page])
                    .unwrap();
            }
            let to_attend: Vec<AttendRow> = rows
                .iter()
                .map(|row| AttendRow { slot: row.slot, position: row.position, asked: true })
                .collect();
            let bytes = rows.len() * shape.config().query_width() * 2;
            let mut attended = self.backend.take(bytes).unwrap();
            context.attend(layer, &to_attend, &qkv, &mut attended).unwrap();
            self.backend.give(qkv);
            all.push(self.travel(attended, false));
        }
        all
    }
}

#[test]
fn layers_give_the_bits_of_whole_steps() {
    let Some(device) = device() else { return };
    let mut cases = shapes();
    cases.push(wide());
    for shape in cases {
        let mut model = load(&shape, &device);
        let prompts: Vec<Prompt> = (1..4).map(|slot| Prompt::new(&shape, slot, 1400)).collect();
        let (two, whole) = ([0..1, 1..2], std::slice::from_ref(&(0..2)));
        let mut topologies = [
            Layered::new(&shape, &device, whole, false),
            Layered::new(&shape, &device, whole, true),
            Layered::new(&shape, &device, &two, true),
        ];
        // Prefill that grows, then decoding beside prefill.
        let steps = [
            [0..150, 0..1, 0..40],
            [150..700, 1..2, 40..45],
            [700..1200, 2..3, 45..100],
            [1200..1201, 3..4, 100..101],
        ];
        for ranges in steps {
            let shards: Vec<Vec<Row>> = prompts
                .iter()
                .zip(ranges)
                .map(|(prompt, range)| range.map(|at| prompt.row(at)).collect())
                .collect();
            let rows = shards.concat();
            let samples: Vec<Sample> = (0..rows.len() as u32)
                .map(|row| Sample {
                    row,
                    sampling: Sampling {
                        seed: u64::from(row),
                        temperature: if row % 3 == 0 { 0.0 } else { 0.8 },
                        top_p: 0.9,
                        logprobs: (row % 7 == 0).then_some(2),
                        ..Sampling::default()
                    },
                    ..Sample::default()
                })
                .collect();
            model.submit(&rows, &[], &samples).unwrap();
            let tokens = model.tokens().unwrap().tokens;
            let logits = model.last_logits(rows.len());
            for (number, layered) in topologies.iter_mut().enumerate() {
                let all: Vec<&[Row]> = shards.iter().map(Vec::as_slice).collect();
                // As three shards of one batch, or as one.
                let all = if number == 0 { vec![&rows[..]] } else { all };
                let (found, picked) = layered.step(&shape, &all, &samples);
                let same = found.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && found.len() == logits.len(), "logits, {number}: {shape:?}");
                assert_eq!(picked, tokens, "tokens, {number}: {shape:?}");
            }
        }
    }
}
