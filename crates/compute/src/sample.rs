//! From logits to a token: penalties, biases, temperature, top-k, top-p, min-p, and the draw.
//! Plain scalar code: equal logits give the same token on every instruction set.

use crate::math::exp;
use glinthawk_flight::{Generated, Sample, TOKEN_NONE};
use std::cmp::Ordering;

/// Values handled at once; the compiler chooses the vectors.
const LANES: usize = 16;
/// Tokens whose weights are summed before the sum is added to the others'.
const BLOCK: usize = 256;

/// A token that may still be drawn, with its logit.
#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
}

impl Candidate {
    /// Likeliest first, the lower id first among equals.
    fn rank(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

/// Picks a token. NaN logits count as impossible; if nothing is possible, [`TOKEN_NONE`] is picked.
pub fn sample(logits: &mut [f32], sampler: &Sample) -> Generated {
    for logit in logits.iter_mut() {
        // Adding 0 turns -0 into 0, so that the order of bits is the order of values.
        *logit = if logit.is_nan() { f32::NEG_INFINITY } else { *logit + 0.0 };
    }
    let Some(alternatives) = sampler.sampling.logprobs else {
        adjust(logits, sampler, |_, _| {});
        return Generated { token: pick(logits, sampler), logprob: 0.0, alternatives: Vec::new() };
    };
    let log_total = log_sum_exp(logits);
    let alternatives = likeliest(logits, usize::from(alternatives));
    let mut changed = Vec::new();
    adjust(logits, sampler, |token, raw| changed.push((token, raw)));
    let raw = logits.to_vec();
    let token = pick(logits, sampler);
    let before = changed.iter().find(|change| change.0 == token).map(|change| change.1);
    let raw = before.or_else(|| raw.get(token as usize).copied()).unwrap_or(f32::NEG_INFINITY);
    Generated {
        token,
        logprob: raw - log_total,
        alternatives: alternatives
            .iter()
            .map(|candidate| (candidate.token, candidate.logit - log_total))
            .collect(),
    }
}

/// The likeliest token; the lowest id among equals, and [`TOKEN_NONE`] if nothing is possible.
pub fn argmax(logits: &[f32]) -> u32 {
    // Two loops that vectorise are faster than one that remembers where it was.
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for chunk in logits.chunks(LANES) {
        for (max, &logit) in maxima.iter_mut().zip(chunk) {
            *max = if logit > *max { logit } else { *max };
        }
    }
    let max = maxima.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return TOKEN_NONE;
    }
    logits.iter().position(|&logit| logit == max).map_or(TOKEN_NONE, |token| token as u32)
}

/// Applies repetition penalty and biases; tells `changed` every value it overwrites.
fn adjust(logits: &mut [f32], sampler: &Sample, mut changed: impl FnMut(u32, f32)) {
    let mut change = |token: u32, to: &dyn Fn(f32) -> f32| {
        if let Some(logit) = logits.get_mut(token as usize) {
            changed(token, *logit);
            let value = to(*logit);
            *logit = if value.is_nan() { f32::NEG_INFINITY } else { value + 0.0 };
        }
    };
    let penalty = sampler.sampling.repetition_penalty;
    if penalty != 1.0 {
        for &token in &sampler.repeated {
            change(token, &|logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
        }
    }
    for &(token, bias) in &sampler.biases {
        change(token, &|logit| logit + bias);
    }
}

/// Picks a token and overwrites the logits.
fn pick(logits: &mut [f32], sampler: &Sample) -> u32 {
    let best = argmax(logits);
    let max = logits.get(best as usize).copied().unwrap_or(f32::NEG_INFINITY);
    // NaN temperatures and infinite logits are greedy too.
    if sampler.sampling.temperature.is_nan()
        || sampler.sampling.temperature <= 0.0
        || !max.is_finite()
        || sampler.sampling.top_k == 1
    {
        return best;
    }
    let scale = 1.0 / sampler.sampling.temperature;
    let weigh = |logit: f32| exp((logit - max) * scale);
    let draw = uniform(sampler.sampling.seed, sampler.position);
    if sampler.sampling.top_k > 0 && (sampler.sampling.top_k as usize) < logits.len() {
        return draw_ranked(
            &likeliest(logits, sampler.sampling.top_k as usize),
            sampler,
            draw,
            weigh,
        );
    }
    let weights = logits;
    for weight in weights.iter_mut() {
        *weight = weigh(*weight);
    }
    if sampler.sampling.top_p < 1.0 {
        keep_nucleus(weights, sampler.sampling.top_p);
    }
    if sampler.sampling.min_p > 0.0 {
        for weight in weights.iter_mut() {
            *weight = if *weight >= sampler.sampling.min_p { *weight } else { 0.0 };
        }
    }
    draw_in_order(weights, draw)
}

/// Draws a token with probability proportional to its weight, tokens in order of id.
fn draw_in_order(weights: &[f32], draw: f64) -> u32 {
    let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
    let mut left = draw * sums.iter().sum::<f64>();
    // The last block with any weight, in case rounding carries the draw past the end.
    let mut block = sums.iter().rposition(|&sum| sum > 0.0).unwrap_or(0);
    for (index, &sum) in sums.iter().enumerate() {
        if left < sum {
            block = index;
            break;
        }
        left -= sum;
    }
    let first = block * BLOCK;
    let mut token = first;
    for (index, &weight) in weights[first..].iter().take(BLOCK).enumerate() {
        if weight > 0.0 {
            token = first + index;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
    }
    token as u32
}

/// Keeps the largest weights that together reach `top_p` of the sum, and zeroes the rest. Among
/// equal weights at the edge, the lower ids are kept.
fn keep_nucleus(weights: &mut [f32], top_p: f32) {
    let goal = f64::from(top_p) * weights.chunks(BLOCK).map(sum).sum::<f64>();
    // Looks only as far below the largest weight, which is 1, as necessary. That is far for flat
    // distributions, but the usual ones are peaked.
    let mut kept: Vec<f32> = Vec::new();
    for floor in [0.1, 0.01, 1e-4, f32::MIN_POSITIVE] {
        kept.clear();
        kept.extend(weights.iter().copied().filter(|&weight| weight >= floor));
        if sum(&kept) >= goal {
            break;
        }
    }
    // Splits the weights into a larger and a smaller half, and continues in the half in which the
    // sum reaches the goal.
    let mut rest = &mut kept[..];
    let mut above = 0.0;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        // Weights are positive, so their bits compare as the values do.
        rest.select_nth_unstable_by_key(middle, |weight| std::cmp::Reverse(weight.to_bits()));
        let (larger, smaller) = rest.split_at_mut(middle);
        let mass = sum(larger);
        if above + mass >= goal {
            rest = larger;
        } else {
            above += mass;
            rest = smaller;
        }
    }
    let last = rest.first().copied().unwrap_or(1.0);
    let larger = |weight: &f32| f64::from(if *weight > last { *weight } else { 0.0 });
    let mut missing = goal - weights.iter().map(larger).sum::<f64>();
    let mut any = false;
    for weight in weights.iter_mut() {
        if *weight == last && (missing > 0.0 || !any) {
            missing -= f64::from(last);
            any = true;
        } else if *weight <= last {
            *weight = 0.0;
        }
    }
}

/// Draws among ranked candidates after top-p and min-p, in order of rank.
fn draw_ranked(
    candidates: &[Candidate],
    sampler: &Sample,
    draw: f64,
    weigh: impl Fn(f32) -> f32,
) -> u32 {
    let weights: Vec<f64> =
        candidates.iter().map(|candidate| f64::from(weigh(candidate.logit))).collect();
    let goal = if sampler.sampling.top_p >= 1.0 {
        f64::INFINITY
    } else {
        f64::from(sampler.sampling.top_p) * weights.iter().sum::<f64>()
    };
    let mut kept = 0;
    let mut kept_mass = 0.0;
    for &weight in &weights {
        // The likeliest always stays.
        if kept > 0 && (kept_mass >= goal || weight < f64::from(sampler.sampling.min_p)) {
            break;
        }
        kept += 1;
        kept_mass += weight;
    }
    let mut left = draw * kept_mass;
    for (candidate, weight) in candidates[..kept].iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return candidate.token;
        }
    }
    candidates[kept - 1].token
}

/// The `count` likeliest tokens, ranked. One pass that skips every token no better than the worst
/// kept. Ids ascend, so an equal newcomer would rank behind.
fn likeliest(logits: &[f32], count: usize) -> Vec<Candidate> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let capacity = 2 * count + 64;
    let mut kept: Vec<Candidate> = Vec::with_capacity(capacity);
    let mut floor = None;
    for (token, &logit) in (0u32..).zip(logits) {
        if floor.is_some_and(|floor| logit <= floor) {
            continue;
        }
        kept.push(Candidate { token, logit });
        if kept.len() == capacity {
            kept.select_nth_unstable_by(count - 1, Candidate::rank);
            kept.truncate(count);
            floor = Some(kept[count - 1].logit);
        }
    }
    kept.sort_unstable_by(Candidate::rank);
    kept.truncate(count);
    kept
}

/// Sum of weights: several running sums, so that the loop vectorises, added in one fixed order.
fn sum(weights: &[f32]) -> f64 {
    let mut total = 0.0;
    for block in weights.chunks(BLOCK) {
        let mut sums = [0.0f32; LANES];
        let chunks = block.chunks_exact(LANES);
        let rest: f32 = chunks.remainder().iter().sum();
        for chunk in chunks {
            for (sum, &weight) in sums.iter_mut().zip(chunk) {
                *sum += weight;
            }
        }
        total += f64::from(sums.iter().sum::<f32>() + rest);
    }
    total
}

/// ln Σ e^logit; 0 if nothing is possible.
fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() {
        return 0.0;
    }
    let mut weights = [0.0; BLOCK];
    let mut total = 0.0;
    for block in logits.chunks(BLOCK) {
        for (weight, &logit) in weights.iter_mut().zip(block) {
            *weight = exp(logit - max);
        }
        total += sum(&weights[..block.len()]);
    }
    (f64::from(max) + total.ln()) as f32
}

/// A number in [0, 1) from seed and position alone.
pub(crate) fn uniform(seed: u64, position: u32) -> f64 {
    /// The finaliser of splitmix64: every input bit reaches every output bit.
    fn mix(mut value: u64) -> u64 {
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let bits = mix(mix(seed.wrapping_add(GOLDEN))
        ^ mix(u64::from(position).wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
