//! Tests of sampling.

use super::*;
use glinthawk_flight::Sampling;

/// Draws at temperature 1, with something else.
fn with(change: impl FnOnce(&mut Sampling)) -> Sample {
    let mut sampling = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
    change(&mut sampling);
    Sample { sampling, ..Sample::default() }
}

fn sampler() -> Sample {
    with(|_| {})
}

fn greedy() -> Sample {
    Sample::default()
}

fn token(logits: &[f32], sampler: &Sample) -> u32 {
    sample(&mut logits.to_vec(), sampler).token
}

/// Frequency of each token over many positions.
fn shares(logits: &[f32], sampler: &Sample) -> Vec<f64> {
    let draws = 20_000u32;
    let mut counts = vec![0u32; logits.len()];
    for position in 0..draws {
        counts[token(logits, &Sample { position, ..sampler.clone() }) as usize] += 1;
    }
    counts.iter().map(|&count| f64::from(count) / f64::from(draws)).collect()
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

#[track_caller]
fn check_shares(logits: &[f32], sampler: &Sample, expected: &[f64]) {
    for (share, expected) in shares(logits, sampler).iter().zip(expected) {
        assert!((share - expected).abs() < 0.015, "share {share}, expected {expected}");
        assert_eq!(*share == 0.0, *expected == 0.0);
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    assert_eq!(token(&[1.0, 3.0, 3.0, 2.0], &greedy()), 1);
    assert_eq!(token(&[-0.0, 0.0], &greedy()), 0);
}

#[test]
fn bad_logits_never_panic() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for temperature in [0.0, 0.7, nan] {
        for (top_k, top_p) in [(0, 1.0), (2, 1.0), (0, 0.5), (2, 0.0)] {
            let logprobs = Some(2);
            let sampling = Sampling { temperature, top_k, top_p, logprobs, ..Sampling::default() };
            let sampler = Sample { sampling, ..Sample::default() };
            assert_eq!(token(&[nan, nan], &sampler), TOKEN_NONE);
            assert_eq!(token(&[-inf, -inf, -inf], &sampler), TOKEN_NONE);
            assert_eq!(token(&[nan, 1.0, -inf], &sampler), 1);
            assert_eq!(token(&[0.0, inf, inf], &sampler), 1);
        }
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.3, -1.0, 1.4, 0.0, f32::NEG_INFINITY];
    check_shares(&logits, &sampler(), &softmax(&logits));
    let cold: Vec<f32> = logits.iter().map(|logit| logit / 0.5).collect();
    check_shares(&logits, &with(|sampling| sampling.temperature = 0.5), &softmax(&cold));
    // The ranked path with nothing filtered draws from the same distribution.
    check_shares(&logits, &with(|sampling| sampling.top_p = 0.999_999), &softmax(&logits));
}

#[test]
fn filters_keep_the_likeliest() {
    let logits = [0.0, 2.0, 1.0, 2.0];
    let kept = softmax(&[2.0, 2.0]);
    let two = [0.0, kept[0], 0.0, kept[1]];
    assert_eq!(token(&logits, &with(|sampling| sampling.top_k = 1)), 1);
    check_shares(&logits, &with(|sampling| sampling.top_k = 2), &two);
    check_shares(&logits, &with(|sampling| sampling.top_p = 0.5), &two);
    check_shares(&logits, &with(|sampling| sampling.min_p = 0.5), &two);
    check_shares(&logits, &with(|sampling| (sampling.min_p, sampling.top_k) = (0.5, 3)), &two);
    check_shares(&logits, &with(|sampling| sampling.top_p = 1e-9), &[0.0, 1.0, 0.0, 0.0]);
    let three = softmax(&logits[1..]);
    check_shares(
        &logits,
        &with(|sampling| sampling.top_k = 3),
        &[0.0, three[0], three[1], three[2]],
    );
}

#[test]
fn penalties_and_biases_move_logits() {
    let logits = [2.0, 1.5, -1.0];
    let penalised = |repeated: &[u32], repetition_penalty: f32| {
        let sampling = Sampling { repetition_penalty, ..Sampling::default() };
        Sample { sampling, repeated: repeated.to_vec(), ..Sample::default() }
    };
    assert_eq!(token(&logits, &penalised(&[0, 9], 2.0)), 1);
    assert_eq!(token(&[-1.0, -0.5, -3.0], &penalised(&[0, 1, 2], 0.5)), 1);
    assert_eq!(token(&logits, &Sample { biases: vec![(2, 4.0), (77, 1.0)], ..greedy() }), 2);
    assert_eq!(token(&logits, &Sample { biases: vec![(0, f32::NEG_INFINITY)], ..greedy() }), 1);
}

#[test]
fn logprobs_are_the_models_own() {
    let logits = [2.0, 1.5, -1.0, 1.5];
    let probabilities = softmax(&logits);
    let sampling = Sampling { logprobs: Some(3), ..Sampling::default() };
    let biased = Sample { sampling, biases: vec![(2, 9.0)], ..Sample::default() };
    let sampled = sample(&mut logits.to_vec(), &biased);
    assert_eq!(sampled.token, 2);
    assert!((f64::from(sampled.logprob) - probabilities[2].ln()).abs() < 1e-5);
    let tokens: Vec<u32> = sampled.alternatives.iter().map(|alternative| alternative.0).collect();
    assert_eq!(tokens, [0, 1, 3]);
    assert!((f64::from(sampled.alternatives[1].1) - probabilities[1].ln()).abs() < 1e-5);
}

#[test]
fn only_seed_and_position_decide() {
    let logits: Vec<f32> = (0..1000u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 20) as f32 / 900.0)
        .collect();
    let draw = |seed, position| {
        let sampler = with(|sampling| (sampling.seed, sampling.top_p) = (seed, 0.9));
        token(&logits, &Sample { position, ..sampler })
    };
    let first: Vec<u32> = (0..50).map(|position| draw(7, position)).collect();
    let again: Vec<u32> = (0..50).rev().map(|position| draw(7, position)).collect();
    assert!(first.iter().eq(again.iter().rev()));
    assert_ne!(first, (0..50).map(|position| draw(8, position)).collect::<Vec<_>>());
}

#[test]
fn selection_equals_sorting() {
    let logits: Vec<f32> =
        (0..5000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 22) as f32).collect();
    let mut sorted: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    for count in [1, 2, 17, 500, 5000] {
        let found = likeliest(&logits, count);
        assert!(
            found
                .iter()
                .map(|candidate| candidate.token)
                .eq(sorted[..count].iter().map(|entry| entry.0))
        );
    }
}
