//! Tier 1's kernels.

use super::model::{Shape, noise};
use super::{assert_close, fast_paths};
use crate::{CpuWeights, Isa, ShardIn, ShardOut, WeightKernels, sample};
use glinthawk_flight::{Buffer, TOKEN_NONE};
use half::bf16;
use std::iter;
use std::ops::Range;

/// Everything a batch of rows leaves behind.
struct Outcome {
    qkv: Vec<bf16>,
    residual: Vec<f32>,
    logits: Vec<f32>,
    tokens: Vec<u32>,
}

/// Sends `shards` of rows (by index) through one layer. A row's token, position and attention
/// output depend on its index alone.
fn run(weights: &mut CpuWeights, shape: &Shape, shards: &[&[u64]]) -> Outcome {
    run_pieces(weights, shape, shards, whole)
}

/// All rows of a shard, in one piece.
fn whole(rows: usize) -> Vec<Range<usize>> {
    iter::once(0..rows).collect()
}

/// The same, where of each shard only some pieces come back from attention.
fn run_pieces(
    weights: &mut CpuWeights,
    shape: &Shape,
    shards: &[&[u64]],
    pieces: fn(usize) -> Vec<Range<usize>>,
) -> Outcome {
    let config = shape.config();
    let rows: Vec<u64> = shards.concat();
    let starts: Vec<usize> = shards
        .iter()
        .scan(0, |sum, shard| {
            *sum += shard.len();
            Some(*sum - shard.len())
        })
        .collect();
    let slab = |shard: usize| starts[shard]..starts[shard] + shards[shard].len();
    for (shard, rows) in shards.iter().enumerate() {
        let tokens: Vec<u32> =
            rows.iter().map(|row| (row * 7 % config.vocab as u64) as u32).collect();
        weights.embed(slab(shard), &tokens).unwrap();
    }
    let positions: Vec<Vec<u32>> = shards
        .iter()
        .map(|rows| rows.iter().map(|row| (row * 13 % 500) as u32).collect())
        .collect();
    let buffer = |rows: usize, width: usize| Buffer::zeroed(rows * width * 2);
    let mut qkv: Vec<Buffer> =
        shards.iter().map(|rows| buffer(rows.len(), config.qkv_width())).collect();
    let mut out: Vec<ShardOut<'_, Buffer>> = (0..shards.len())
        .zip(&mut qkv)
        .map(|(shard, qkv)| ShardOut { slab: slab(shard), positions: &positions[shard], qkv })
        .collect();
    weights.pre_attention(1, &mut out).unwrap();
    let attended: Vec<Buffer> = shards
        .iter()
        .map(|rows| {
            let mut buffer = buffer(rows.len(), config.query_width());
            for (row, values) in
                rows.iter().zip(buffer.bf16_mut().chunks_exact_mut(config.query_width()))
            {
                for (column, value) in values.iter_mut().enumerate() {
                    *value = bf16::from_f32(noise(row + 77, column as u64));
                }
            }
            buffer
        })
        .collect();
    let mut into: Vec<ShardIn<'_, Buffer>> = Vec::new();
    for (shard, attended) in attended.iter().enumerate() {
        let start = slab(shard).start;
        let piece = |piece: Range<usize>| {
            let slab = start + piece.start..start + piece.end;
            ShardIn { slab, attended, first: piece.start }
        };
        into.extend(pieces(shards[shard].len()).into_iter().map(piece));
    }
    weights.post_attention(1, &into).unwrap();
    let mut residual = Buffer::zeroed(rows.len() * config.hidden * 4);
    weights.get_residual(0..rows.len(), &mut residual).unwrap();
    let all: Vec<usize> = (0..rows.len()).collect();
    let mut logits = vec![0.0; rows.len() * config.vocab];
    weights.logits(&all, &mut logits);
    let tokens = weights.likeliest(&all);
    Outcome {
        qkv: qkv.iter().flat_map(|buffer| buffer.bf16().to_vec()).collect(),
        residual: residual.f32().to_vec(),
        logits,
        tokens,
    }
}

fn shapes() -> Vec<Shape> {
    let base = Shape::default();
    vec![
        base.clone(),
        Shape { hidden: 50, feed_forward: 67, vocab: 33, tied: true, ..base.clone() },
        Shape { heads: 3, kv_heads: 3, head_dim: 80, qkv_bias: true, ..base.clone() },
        Shape { heads: 4, kv_heads: 2, head_dim: 64, qkv_bias: true, ..base.clone() },
        Shape { heads: 4, kv_heads: 2, head_dim: 32, qk_norm: true, ..base.clone() },
        Shape { heads: 8, kv_heads: 1, head_dim: 96, qk_norm: true, hidden: 77, ..base.clone() },
        Shape {
            heads: 6,
            kv_heads: 2,
            head_dim: 128,
            qkv_bias: true,
            qk_norm: true,
            ..base.clone()
        },
        Shape {
            heads: 1,
            kv_heads: 1,
            head_dim: 16,
            hidden: 1100,
            feed_forward: 1500,
            vocab: 1000,
            ..base
        },
    ]
}

#[test]
fn paths_agree_with_the_oracle() {
    for shape in shapes() {
        let mut oracle = shape.weights(Isa::Portable, 2, 64);
        let rows: Vec<u64> = (0..37).collect();
        for shards in [vec![&rows[..1]], vec![&rows[..17], &[], &rows[17..]]] {
            let expected = run(&mut oracle, &shape, &shards);
            for isa in fast_paths() {
                let found = run(&mut shape.weights(isa, 2, 64), &shape, &shards);
                let what = |part: &str| format!("{isa}: {part} of {shape:?}");
                let wide =
                    |values: &[bf16]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
                assert_close(&what("q, k, v"), &wide(&found.qkv), &wide(&expected.qkv), 0.012);
                assert_close(&what("residual"), &found.residual, &expected.residual, 0.006);
                assert_close(&what("logits"), &found.logits, &expected.logits, 0.02);
                for (token, logits) in
                    found.tokens.iter().zip(found.logits.chunks_exact(shape.vocab))
                {
                    assert_eq!(*token, sample::argmax(logits), "{}", what("greedy token"));
                }
            }
        }
    }
}

/// The bits of one row's results, wherever it stands.
fn bits_of(outcome: &Outcome, shape: &Shape, place: usize) -> Vec<u32> {
    let config = shape.config();
    let qkv = outcome.qkv[place * config.qkv_width()..][..config.qkv_width()]
        .iter()
        .map(|value| u32::from(value.to_bits()));
    let residual = outcome.residual[place * config.hidden..][..config.hidden]
        .iter()
        .map(|value| value.to_bits());
    let logits =
        outcome.logits[place * config.vocab..][..config.vocab].iter().map(|value| value.to_bits());
    qkv.chain(residual).chain(logits).chain([outcome.tokens[place]]).collect()
}

#[test]
fn rows_that_do_not_come_back_are_left_alone() {
    let shape = Shape { feed_forward: 1700, ..Shape::default() };
    let rows: Vec<u64> = (0..120).collect();
    let shards = [&rows[..50], &[], &rows[50..]];
    for isa in Isa::available() {
        let mut weights = shape.weights(isa, 2, 200);
        let [all, some, none] = [
            whole,
            |rows: usize| if rows > 0 { vec![0..3, rows - 20..rows - 18] } else { vec![] },
            |_| vec![],
        ]
        .map(|pieces| run_pieces(&mut weights, &shape, &shards, pieces));
        for place in 0..rows.len() {
            let came = (0..3).contains(&place) || (30..32).contains(&place);
            let came = came || (50..53).contains(&place) || (100..102).contains(&place);
            let expected = bits_of(if came { &all } else { &none }, &shape, place);
            assert!(bits_of(&some, &shape, place) == expected, "{isa}: row {place}");
        }
    }
}

#[test]
fn bits_depend_on_the_row_alone() {
    let big = Shape {
        hidden: 160,
        heads: 6,
        kv_heads: 2,
        feed_forward: 1100,
        vocab: 700,
        qk_norm: true,
        ..Shape::default()
    };
    bits_are_the_same_in_any_company(&big);
    // Heads that are only rotated, with all of k at once and in pieces.
    let plain = Shape { qk_norm: false, ..big.clone() };
    bits_are_the_same_in_any_company(&plain);
    bits_are_the_same_in_any_company(&Shape { hidden: 1700, feed_forward: 200, ..plain });
    // Enough inputs to cut k into pieces (all panels meet one piece before the next), in units of two panels and
    // of whole heads.
    bits_are_the_same_in_any_company(&Shape { feed_forward: 1700, ..big.clone() });
    bits_are_the_same_in_any_company(&Shape { hidden: 1700, feed_forward: 200, ..big.clone() });
    // Pieces of k, and rows in several ranges whose inputs stay in the cache.
    bits_are_the_same_in_any_company(&Shape { feed_forward: 1500, ..big.clone() });
    // Pieces of k when weights are used once, and as much of it as is not cut then.
    bits_are_the_same_in_any_company(&Shape { feed_forward: 4200, ..big.clone() });
    bits_are_the_same_in_any_company(&Shape { feed_forward: 4096, ..big });
}

fn bits_are_the_same_in_any_company(big: &Shape) {
    for isa in Isa::available() {
        let mut alone = big.weights(isa, 1, 600);
        let expected: Vec<Vec<u32>> =
            [0u64, 5].map(|row| bits_of(&run(&mut alone, big, &[&[row]]), big, 0)).to_vec();
        for threads in [1, 2, 3] {
            let mut weights = big.weights(isa, threads, 600);
            // More rows than one block of rows holds, if the path is fast enough for the test.
            let many = if isa == Isa::Portable { 40 } else { 570 };
            let rest: Vec<u64> = (6..many).collect();
            for shards in [
                vec![&[0u64, 5][..]],
                vec![&[9, 5, 0][..], &[3]],
                // Two groups of rows where registers hold six.
                vec![&[1, 2, 3, 4, 6, 5, 0][..]],
                vec![&[1, 2, 3, 0, 5, 6, 7, 8][..]],
                vec![&rest[..], &[5, 0]],
                vec![&[0][..], &rest[..rest.len() / 2], &[5], &rest[rest.len() / 2..]],
            ] {
                let outcome = run(&mut weights, big, &shards);
                for (place, row) in shards
                    .concat()
                    .into_iter()
                    .enumerate()
                    .filter(|entry| [0, 5].contains(&entry.1))
                {
                    let expected = &expected[usize::from(row == 5)];
                    assert!(
                        bits_of(&outcome, big, place) == *expected,
                        "{isa}: row {row} at {place}, {threads} threads"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_not_a_number_is_forgotten_with_its_rows() {
    for (hidden, feed_forward) in [(72, 144), (96, 160), (50, 100), (72, 1712)] {
        let shape = Shape { hidden, feed_forward, ..Shape::default() };
        let rows: Vec<u64> = (0..9).collect();
        for isa in Isa::available() {
            let expected = run(&mut shape.weights(isa, 1, 64), &shape, &[&rows]);
            let mut weights = shape.weights(isa, 1, 64);
            let mut residual = Buffer::zeroed(40 * hidden * 4);
            residual.f32_mut().fill(f32::NAN);
            weights.put_residual(0..40, &residual).unwrap();
            let attended = Buffer::zeroed(40 * shape.config().query_width() * 2);
            let shard = ShardIn { slab: 0..40, attended: &attended, first: 0 };
            weights.post_attention(1, &[shard]).unwrap();
            assert_eq!(weights.likeliest(&[0, 7, 39]), [TOKEN_NONE; 3], "{isa}");
            let found = run(&mut weights, &shape, &[&rows]);
            for place in 0..rows.len() {
                let same = bits_of(&found, &shape, place) == bits_of(&expected, &shape, place);
                assert!(same, "{isa}, {hidden} and {feed_forward}: row {place}");
            }
        }
    }
}

#[test]
fn residuals_pass_through() {
    let shape = Shape { hidden: 50, ..Shape::default() };
    for isa in Isa::available() {
        let mut weights = shape.weights(isa, 1, 8);
        let mut residual = Buffer::zeroed(100 * 4);
        for (index, value) in residual.f32_mut().iter_mut().enumerate() {
            *value = noise(1, index as u64);
        }
        weights.put_residual(3..5, &residual).unwrap();
        let mut found = Buffer::zeroed(100 * 4);
        weights.get_residual(3..5, &mut found).unwrap();
        assert_eq!(found.f32(), residual.f32());
        weights.middle(0, &[], &mut []).unwrap();
        weights.classify(&[], &[]).unwrap();
        assert!(weights.tokens().unwrap().is_empty());
    }
}
