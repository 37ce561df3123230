//! From logits to a token: penalties, biases, temperature, top-k, top-p, min-p, and the draw.
//! Plain scalar code: equal logits give the same token on every instruction set.

use crate::math::exp;
use std::cmp::Ordering;

/// How one row's token is picked. With the logits it determines the token: the draw's only
/// randomness is a hash of seed and position.
#[derive(Clone, Debug)]
pub struct Sampler<'a> {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens whose probabilities reach `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the likeliest; 0 drops none.
    pub min_p: f32,
    /// With the position, the only source of randomness.
    pub seed: u64,
    /// Position of the token to be picked.
    pub position: u32,
    /// Tokens the repetition penalty applies to, none twice.
    pub repeated: &'a [u32],
    /// Divides positive, multiplies negative logits of `repeated`; 1 is off.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits: logit bias, presence and frequency penalties, summed.
    pub biases: &'a [(u32, f32)],
    /// Report the token's log-probability and this many likeliest alternatives.
    pub logprobs: Option<u8>,
}

/// A picked token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its natural-log probability under the model's own distribution; 0 where not asked for.
    pub logprob: f32,
    /// The likeliest tokens with theirs, likeliest first; empty where not asked for.
    pub alternatives: Vec<(u32, f32)>,
}

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

/// Picks a token. NaN logits count as impossible; where nothing is possible, token 0 is picked.
pub fn sample(logits: &mut [f32], sampler: &Sampler<'_>) -> Sampled {
    for logit in logits.iter_mut() {
        // Adding 0 turns -0 into 0, so that the order of bits is the order of values.
        *logit = if logit.is_nan() { f32::NEG_INFINITY } else { *logit + 0.0 };
    }
    let Some(alternatives) = sampler.logprobs else {
        adjust(logits, sampler, |_, _| {});
        return Sampled { token: pick(logits, sampler), logprob: 0.0, alternatives: Vec::new() };
    };
    let log_total = log_sum_exp(logits);
    let alternatives = likeliest(logits, usize::from(alternatives));
    let mut changed = Vec::new();
    adjust(logits, sampler, |token, raw| changed.push((token, raw)));
    let token = pick(logits, sampler);
    let raw = changed
        .iter()
        .find(|change| change.0 == token)
        .map_or_else(|| logits[token as usize], |change| change.1);
    Sampled {
        token,
        logprob: raw - log_total,
        alternatives: alternatives
            .iter()
            .map(|candidate| (candidate.token, candidate.logit - log_total))
            .collect(),
    }
}

/// The likeliest token; the lowest id among equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = Candidate { token: 0, logit: f32::NEG_INFINITY };
    for (token, &logit) in (0u32..).zip(logits) {
        if logit > best.logit {
            best = Candidate { token, logit };
        }
    }
    best.token
}

/// Applies repetition penalty and biases; tells `changed` every value it overwrites.
fn adjust(logits: &mut [f32], sampler: &Sampler<'_>, mut changed: impl FnMut(u32, f32)) {
    let mut change = |token: u32, to: &dyn Fn(f32) -> f32| {
        if let Some(logit) = logits.get_mut(token as usize) {
            changed(token, *logit);
            let value = to(*logit);
            *logit = if value.is_nan() { f32::NEG_INFINITY } else { value + 0.0 };
        }
    };
    let penalty = sampler.repetition_penalty;
    if penalty != 1.0 {
        for &token in sampler.repeated {
            change(token, &|logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
        }
    }
    for &(token, bias) in sampler.biases {
        change(token, &|logit| logit + bias);
    }
}

fn pick(logits: &[f32], sampler: &Sampler<'_>) -> u32 {
    let best = argmax(logits);
    let max = logits.get(best as usize).copied().unwrap_or(f32::NEG_INFINITY);
    // NaN temperatures and infinite logits are greedy too.
    if sampler.temperature.is_nan()
        || sampler.temperature <= 0.0
        || !max.is_finite()
        || sampler.top_k == 1
    {
        return best;
    }
    let weigh = |logit: f32| exp((logit - max) / sampler.temperature);
    let draw = uniform(sampler.seed, sampler.position);
    let everything = sampler.top_k == 0 || sampler.top_k as usize >= logits.len();
    if everything && sampler.top_p >= 1.0 {
        return draw_in_order(logits, sampler.min_p, draw, weigh);
    }
    if everything {
        let goal = f64::from(sampler.top_p) * total(logits, weigh);
        let candidates = nucleus_candidates(logits, max, sampler.temperature, goal, weigh);
        return draw_ranked(&candidates, goal, sampler.min_p, draw, weigh);
    }
    let candidates = likeliest(logits, sampler.top_k as usize);
    let mass: f64 = candidates.iter().map(|candidate| f64::from(weigh(candidate.logit))).sum();
    let goal = if sampler.top_p >= 1.0 { f64::INFINITY } else { f64::from(sampler.top_p) * mass };
    draw_ranked(&candidates, goal, sampler.min_p, draw, weigh)
}

/// Draws among all tokens, in order of id, those below `min_p` of the likeliest left out.
fn draw_in_order(logits: &[f32], min_p: f32, draw: f64, weigh: impl Fn(f32) -> f32) -> u32 {
    let kept = |logit: f32| Some(weigh(logit)).filter(|&weight| weight >= min_p).unwrap_or(0.0);
    let mut left = draw * total(logits, kept);
    let mut last = 0;
    for (token, &logit) in (0u32..).zip(logits) {
        let weight = kept(logit);
        if weight > 0.0 {
            left -= f64::from(weight);
            last = token;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

/// Draws among the first of the ranked candidates whose weights reach `goal` (top-p), those below
/// `min_p` of the likeliest left out.
fn draw_ranked(
    candidates: &[Candidate],
    goal: f64,
    min_p: f32,
    draw: f64,
    weigh: impl Fn(f32) -> f32,
) -> u32 {
    let weights: Vec<f64> =
        candidates.iter().map(|candidate| f64::from(weigh(candidate.logit))).collect();
    let mut kept = 0;
    let mut kept_mass = 0.0;
    for &weight in &weights {
        // The likeliest always stays.
        if kept > 0 && (kept_mass >= goal || weight < f64::from(min_p)) {
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

/// The ranked tokens down to some logit below which top-p keeps nothing. Widens until the mass is
/// there, so that flat distributions cost more and peaked ones, the usual, sort only a few.
fn nucleus_candidates(
    logits: &[f32],
    max: f32,
    temperature: f32,
    goal: f64,
    weigh: impl Fn(f32) -> f32,
) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = Vec::new();
    for depth in [4.0, 8.0, 16.0, f32::INFINITY] {
        let floor = max - depth * temperature;
        candidates.clear();
        let tokens = (0u32..).zip(logits).filter(|&(_, &logit)| logit >= floor);
        candidates.extend(tokens.map(|(token, &logit)| Candidate { token, logit }));
        let mass: f64 = candidates.iter().map(|candidate| f64::from(weigh(candidate.logit))).sum();
        if mass >= goal {
            break;
        }
    }
    candidates.sort_unstable_by(Candidate::rank);
    candidates
}

/// The `count` likeliest tokens, ranked. One pass that skips whatever is no better than the worst
/// kept: ids ascend, so an equal newcomer would rank behind.
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

/// Sum of the weights: eight running sums, so that the loop vectorises, added in one fixed order.
fn total(logits: &[f32], weigh: impl Fn(f32) -> f32) -> f64 {
    let mut sums = [0.0f64; 8];
    let chunks = logits.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|&logit| f64::from(weigh(logit))).sum();
    for chunk in chunks {
        for (sum, &logit) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(weigh(logit));
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// ln Σ e^logit; 0 where nothing is possible.
fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() {
        return 0.0;
    }
    (f64::from(max) + total(logits, |logit| exp(logit - max)).ln()) as f32
}

/// A number in [0, 1) from seed and position alone.
fn uniform(seed: u64, position: u32) -> f64 {
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
