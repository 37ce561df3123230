//! A GPU's whole steps: agreement with the oracle, and bits that depend on a prompt alone. Without a GPU these tests
//! say so and pass; `scripts/gpu` runs them where there is one.

use super::assert_close;
use super::model::Shape;
use crate::cuda::{CudaDevice, CudaModel, StepLimits};
use crate::sample::sample;
use crate::{
    AttendRow, ContextKernels, CpuContext, CpuWeights, Isa, ShardIn, ShardOut, Threads,
    WeightKernels,
};
use glinthawk_flight::{Buffer, PAGE_POSITIONS, Row, Sample};
use std::sync::Arc;

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

/// The likeliest token.
fn greedy() -> Sample {
    Sample {
        row: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        position: 0,
        repeated: Vec::new(),
        repetition_penalty: 1.0,
        biases: Vec::new(),
        logprobs: None,
    }
}

/// Logits of all rows of one step.
fn step(model: &mut CudaModel, shape: &Shape, rows: &[Row]) -> Vec<Vec<f32>> {
    let samples: Vec<Sample> =
        (0..rows.len() as u32).map(|row| Sample { row, ..greedy() }).collect();
    model.submit(rows, &samples).unwrap();
    let tokens = model.tokens().unwrap();
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
        let rows: Vec<AttendRow> =
            positions.iter().map(|&position| AttendRow { slot: 0, position }).collect();
        let mut attended = Buffer::zeroed(count * config.query_width() * 2);
        context.attend(layer, &rows, &qkv, &mut attended).unwrap();
        let back = ShardIn { slab: 0..count, attended: &attended };
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
    for shape in shapes() {
        let prompt = Prompt::new(&shape, 1, 150);
        let rows: Vec<Row> = (0..150).map(|at| prompt.row(at)).collect();
        let found = step(&mut load(&shape, &device), &shape, &rows).concat();
        assert_close(&format!("logits of {shape:?}"), &found, &oracle(&shape, &prompt), 0.03);
    }
}

#[test]
fn bits_depend_on_the_prompt_alone() {
    let Some(device) = device() else { return };
    let base = Shape {
        hidden: 256,
        heads: 8,
        kv_heads: 2,
        feed_forward: 1024,
        vocab: 520,
        ..Shape::default()
    };
    for shape in [base.clone(), Shape { head_dim: 128, window: Some(1200), ..base }] {
        let mut model = load(&shape, &device);
        let (prompt, other) = (Prompt::new(&shape, 1, 2300), Prompt::new(&shape, 2, 2300));
        let run = |model: &mut CudaModel, chunk: usize, beside: bool, from: usize| {
            let mut found = Vec::new();
            for start in (from..2300).step_by(chunk) {
                let positions = start..(start + chunk).min(2300);
                let mut rows: Vec<Row> = Vec::new();
                if beside {
                    rows.push(other.row(start / chunk % 40));
                }
                rows.extend(positions.map(|at| prompt.row(at)));
                let logits = step(model, &shape, &rows);
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
        (0..40).flat_map(|at| step(model, &shape, &[prompt.row(at)])).collect()
    };
    let expected = run(&mut model);
    model.poison_pages();
    assert_eq!(run(&mut model), expected);
}

/// How often each token is picked, of `draws`.
fn shares(tokens: impl Iterator<Item = u32>, vocab: usize, draws: usize) -> Vec<f64> {
    let mut shares = vec![0.0; vocab];
    for token in tokens {
        shares[token as usize] += 1.0 / draws as f64;
    }
    shares
}

#[test]
fn draws_are_as_likely_as_on_the_host() {
    const DRAWS: usize = 600;
    const HOST_DRAWS: usize = 30_000;
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let row = Prompt::new(&shape, 1, 1).row(0);
    step(&mut model, &shape, &[row]);
    let logits = model.last_logits(1);
    let likeliest = crate::sample::argmax(&logits);
    let (repeated, biases) = (vec![likeliest, 3, 4], vec![(5, 4.0), (likeliest, -2.0)]);
    let warm = Sample { temperature: 0.7, ..greedy() };
    let cases = [
        Sample { temperature: 1.0, ..warm.clone() },
        Sample { top_p: 0.8, ..warm.clone() },
        Sample { top_k: 5, ..warm.clone() },
        Sample { top_k: 20, top_p: 0.5, ..warm.clone() },
        Sample { min_p: 0.3, ..warm.clone() },
        Sample { top_p: 0.9, min_p: 0.2, top_k: 30, ..warm.clone() },
        Sample { repetition_penalty: 1.5, repeated: repeated.clone(), ..warm.clone() },
        Sample { biases: biases.clone(), ..warm.clone() },
        Sample { biases: biases.clone(), ..greedy() },
        Sample { top_p: 0.8, logprobs: Some(2), ..warm },
    ];
    for case in cases {
        let samples: Vec<Sample> = (0..DRAWS)
            .map(|draw| Sample { row: draw as u32, seed: draw as u64, ..case.clone() })
            .collect();
        let mut draw = || {
            model.submit(&[row; DRAWS], &samples).unwrap();
            model.tokens().unwrap()
        };
        let (found, again) = (draw(), draw());
        assert_eq!(found, again, "the same draws again: {case:?}");
        let found = shares(found.iter().map(|sampled| sampled.token), shape.vocab, DRAWS);
        let host = (0..HOST_DRAWS).map(|draw| {
            let sampler = Sample { seed: draw as u64, position: 7, ..case.clone() };
            sample(&mut logits.clone(), &sampler).token
        });
        let expected = shares(host, shape.vocab, HOST_DRAWS);
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let spread = 5.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt() + 0.004;
            let near = (found - expected).abs() <= spread;
            let possible = *expected > 0.0 || *found == 0.0 || *found < 0.004;
            assert!(near && possible, "token {token}: {found} of {expected} ({case:?})");
        }
    }
}
