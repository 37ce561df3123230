//! Tokens that a GPU picks: as likely as on the host, with the same log-probabilities, and known to the next step before
//! they are known here.

use super::{Prompt, device, load, shapes, step};
use crate::conformance::model::Shape;
use crate::cuda::CudaModel;
use crate::sample::sample;
use glinthawk_flight::{Generated, Row, Sample, Sampling, TOKEN_NONE, TOKEN_PENDING};

/// The likeliest token, but for what is changed.
fn changed(change: &dyn Fn(&mut Sample)) -> Sample {
    let mut sample = Sample::default();
    change(&mut sample);
    sample
}

/// How often each token is picked, of `draws`.
fn shares(tokens: impl Iterator<Item = u32>, vocab: usize, draws: usize) -> Vec<f64> {
    let mut shares = vec![0.0; vocab];
    for token in tokens {
        shares[token as usize] += 1.0 / draws as f64;
    }
    shares
}

fn seeded(sample: &Sample, seed: usize) -> Sample {
    let sampling = Sampling { seed: seed as u64, ..sample.sampling.clone() };
    Sample { sampling, ..sample.clone() }
}

#[test]
fn draws_are_as_likely_as_on_the_host() {
    const DRAWS: usize = 600;
    const HOST_DRAWS: usize = 30_000;
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let row = Prompt::new(&shape, 1, 1).row(0);
    step(&mut model, &shape, &[row], &[]);
    let logits = model.last_logits(1);
    let likeliest = crate::sample::argmax(&logits);
    let (repeated, biases) = (vec![likeliest, 3, 4], vec![(5, 4.0), (likeliest, -2.0)]);
    let with = |change: &dyn Fn(&mut Sample)| {
        changed(&|sample| {
            sample.sampling.temperature = 0.7;
            change(sample);
        })
    };
    let cases = [
        with(&|sample| sample.sampling.temperature = 1.0),
        with(&|sample| sample.sampling.top_p = 0.8),
        with(&|sample| sample.sampling.top_k = 5),
        with(&|sample| (sample.sampling.top_k, sample.sampling.top_p) = (20, 0.5)),
        with(&|sample| sample.sampling.min_p = 0.3),
        with(&|Sample { sampling, .. }| {
            (sampling.top_p, sampling.min_p, sampling.top_k) = (0.9, 0.2, 30)
        }),
        with(&|sample| {
            (sample.sampling.repetition_penalty, sample.repeated) = (1.5, repeated.clone())
        }),
        with(&|sample| sample.biases = biases.clone()),
        Sample { biases: biases.clone(), ..Sample::default() },
        with(&|sample| (sample.sampling.top_p, sample.sampling.logprobs) = (0.8, Some(2))),
    ];
    for case in cases {
        let samples: Vec<Sample> =
            (0..DRAWS).map(|draw| Sample { row: draw as u32, ..seeded(&case, draw) }).collect();
        let mut draw = || {
            model.submit(&[row; DRAWS], &[], &samples).unwrap();
            model.tokens().unwrap().tokens
        };
        let (found, again) = (draw(), draw());
        assert_eq!(found, again, "the same draws again: {case:?}");
        let found = shares(found.iter().map(|sampled| sampled.token), shape.vocab, DRAWS);
        let host = (0..HOST_DRAWS).map(|draw| {
            let sampler = Sample { position: 7, ..seeded(&case, draw) };
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

fn assert_near(what: &str, found: f32, expected: f32) {
    let near = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
    assert!(near || found == expected, "{what}: {found}, not {expected}");
}

#[test]
fn log_probabilities_are_those_of_the_host() {
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let prompt = Prompt::new(&shape, 1, 40);
    let rows: Vec<Row> = (0..40).map(|at| prompt.row(at)).collect();
    step(&mut model, &shape, &rows, &[]);
    let logits = model.last_logits(rows.len());
    let likeliest = crate::sample::argmax(&logits);
    let (repeated, biases) = (vec![3, likeliest, 130], vec![(5, 4.0), (likeliest, -2.0)]);
    let penalised = changed(&|sample| {
        (sample.sampling.repetition_penalty, sample.repeated) = (1.5, repeated.clone())
    });
    let drawn =
        |top_k: u32| Sampling { temperature: 0.8, top_k, top_p: 0.9, ..Sampling::default() };
    let cases = [
        Sample::default(),
        penalised.clone(),
        Sample { biases: biases.clone(), ..penalised },
        Sample { sampling: drawn(0), biases, ..Sample::default() },
        Sample { sampling: drawn(20), ..Sample::default() },
    ];
    for case in cases {
        // Only some ask, each for another number of alternatives.
        let samples: Vec<Sample> = (0..40u8)
            .map(|row| {
                let logprobs = (row % 4 != 3).then_some([0, 1, 20][usize::from(row) % 3]);
                let sampling = Sampling { seed: row.into(), logprobs, ..case.sampling.clone() };
                Sample { row: row.into(), sampling, ..case.clone() }
            })
            .collect();
        model.submit(&rows, &[], &samples).unwrap();
        let found = model.tokens().unwrap().tokens;
        for ((found, logits), asked) in
            found.iter().zip(logits.chunks_exact(shape.vocab)).zip(&samples)
        {
            if asked.sampling.logprobs.is_none() {
                assert!(found.logprob == 0.0 && found.alternatives.is_empty(), "{asked:?}");
                continue;
            }
            // The host says what the device's own token had.
            let only = changed(&|sample| {
                sample.biases = vec![(found.token, 1e9)];
                sample.sampling.logprobs = asked.sampling.logprobs;
            });
            let expected = sample(&mut logits.to_vec(), &only);
            assert_eq!(expected.token, found.token);
            assert_near("its log-probability", found.logprob, expected.logprob);
            assert_eq!(found.alternatives.len(), expected.alternatives.len());
            for (found, expected) in found.alternatives.iter().zip(&expected.alternatives) {
                assert_eq!(found.0, expected.0, "an alternative");
                assert_near("an alternative's", found.1, expected.1);
            }
            if asked.sampling.temperature == 0.0 {
                let host = sample(&mut logits.to_vec(), asked);
                assert_eq!(host.token, found.token, "{asked:?}");
            }
        }
    }
}

#[test]
fn of_equals_the_first_are_kept() {
    const DRAWS: usize = 500;
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let row = Prompt::new(&shape, 1, 1).row(0);
    // Beside such a bias a logit is nothing.
    let biases = (0..136).map(|token| (token, 1e9)).collect();
    let flat = Sample { biases, ..Sample::default() };
    for (temperature, top_k, top_p, kept) in [
        (1.0, 10, 1.0, 10),
        (1.0, 0, 0.25, 34),
        (1.0, 68, 0.5, 34),
        (1.0, 1, 1.0, 1),
        (1.0, 0, 1.0, 136),
        (0.0, 0, 1.0, 1),
    ] {
        let draw = |draw: u32| {
            let seed = draw.into();
            let sampling = Sampling { temperature, top_k, top_p, seed, ..Sampling::default() };
            Sample { row: draw, sampling, ..flat.clone() }
        };
        let samples: Vec<Sample> = (0..DRAWS as u32).map(draw).collect();
        model.submit(&[row; DRAWS], &[], &samples).unwrap();
        let tokens = model.tokens().unwrap().tokens;
        let last = tokens.iter().map(|generated| generated.token).max();
        assert_eq!(last, Some(kept - 1), "temperature {temperature}, top-k {top_k}, top-p {top_p}");
    }
}

/// Samples of three slots after as many rows: the likeliest, drawn, and drawn with log-probabilities.
fn samples(step: usize, ends: &[u32]) -> Vec<Sample> {
    let sample = |(slot, &row): (usize, &u32)| Sample {
        row,
        position: (20 + step) as u32,
        sampling: Sampling {
            temperature: if slot == 1 { 0.0 } else { 0.9 },
            seed: slot as u64,
            logprobs: (slot == 2).then_some(3),
            ..Sampling::default()
        },
        ..Sample::default()
    };
    ends.iter().enumerate().map(sample).collect()
}

#[test]
fn tokens_reach_the_next_step_by_themselves() {
    const STEPS: usize = 12;
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let prompts: Vec<Prompt> = (1..4).map(|slot| Prompt::new(&shape, slot, 100)).collect();
    // So many that those which end in no token are left out of the last layer.
    let first: Vec<Row> =
        prompts.iter().flat_map(|prompt| (0..70).map(|at| prompt.row(at))).collect();
    let rows = |step: usize, tokens: &[u32]| -> Vec<Row> {
        let row = |(prompt, &token): (&Prompt, &u32)| Row { token, ..prompt.row(69 + step) };
        prompts.iter().zip(tokens).map(row).collect()
    };
    let run = |model: &mut CudaModel, ahead: usize| -> Vec<Vec<Generated>> {
        let mut found: Vec<Vec<Generated>> = Vec::new();
        model.submit(&first, &[], &samples(0, &[69, 139, 209])).unwrap();
        for step in 1..=STEPS {
            if step > ahead {
                found.push(model.tokens().unwrap().tokens);
            }
            if step == STEPS {
                break;
            }
            let known = found.get(step - 1);
            let tokens: Vec<u32> = match known {
                Some(known) => known.iter().map(|generated| generated.token).collect(),
                None => vec![TOKEN_PENDING; 3],
            };
            model.submit(&rows(step, &tokens), &[], &samples(step, &[0, 1, 2])).unwrap();
        }
        found.extend((0..ahead).map(|_| model.tokens().unwrap().tokens));
        found
    };
    let expected = run(&mut model, 0);
    assert_eq!(expected.len(), STEPS);
    assert_eq!(run(&mut model, 1), expected);
}

#[test]
fn picks_do_not_depend_on_the_rows_that_end_in_no_token() {
    let Some(device) = device() else { return };
    for shape in shapes() {
        let mut model = load(&shape, &device);
        let prompts: Vec<Prompt> = (1..4).map(|slot| Prompt::new(&shape, slot, 130)).collect();
        let rows: Vec<Row> =
            prompts.iter().flat_map(|prompt| (0..130).map(|at| prompt.row(at))).collect();
        let ends = [129, 259, 389];
        let few = samples(110, &ends);
        let others = (0..390).filter(|row| !ends.contains(row));
        let others = others.map(|row| Sample { row, ..Sample::default() });
        let all: Vec<Sample> = few.iter().cloned().chain(others).collect();
        let mut picked = |samples: &[Sample]| {
            model.submit(&rows, &[], samples).unwrap();
            model.tokens().unwrap().tokens
        };
        assert_eq!(picked(&few), picked(&all)[..3]);
        assert!(picked(&[]).is_empty());
        let next: Vec<Sample> = few.iter().rev().cloned().collect();
        let expected: Vec<Generated> = picked(&all)[..3].iter().rev().cloned().collect();
        assert_eq!(picked(&next), expected);
    }
}

#[test]
fn where_nothing_can_be_computed_no_token_is_picked() {
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let prompts: Vec<Prompt> = (1..4).map(|slot| Prompt::new(&shape, slot, 100)).collect();
    let rows: Vec<Row> =
        prompts.iter().flat_map(|prompt| (0..20).map(|at| prompt.row(at))).collect();
    let mut picked = |rows: &[Row], step: usize, ends: &[u32], poisoned: bool| -> Vec<u32> {
        if poisoned {
            model.poison_pages();
        }
        model.submit(rows, &[], &samples(step, ends)).unwrap();
        model.tokens().unwrap().tokens.iter().map(|generated| generated.token).collect()
    };
    let tokens = picked(&rows, 0, &[19, 39, 59], false);
    assert!(tokens.iter().all(|&token| (token as usize) < shape.vocab), "{tokens:?}");
    for step in 1..3 {
        // The second time, rows ask for the token that there was not.
        let row = |prompt: &Prompt| Row { token: TOKEN_PENDING, ..prompt.row(19 + step) };
        let rows: Vec<Row> = prompts.iter().map(row).collect();
        assert_eq!(picked(&rows, step, &[0, 1, 2], step == 1), [TOKEN_NONE; 3]);
    }
}
