//! Rotary frequencies and their scaling:
//! `frequency[i] = theta^(-2i / head_dim)`, then stretched for contexts longer than trained on.

use crate::error::ConfigError;
use std::f64::consts::TAU;

/// How rotary frequencies are stretched.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Scaling {
    /// As trained.
    None,
    /// All frequencies divided by the factor.
    Linear { factor: f64 },
    /// Long wavelengths divided by the factor, short ones kept, a linear blend between.
    Llama3 { factor: f64, low_factor: f64, high_factor: f64, context_original: f64 },
    /// Like Llama3 but blended over the pair's index, and with a factor on sine and cosine.
    Yarn {
        factor: f64,
        /// Rotations over the original context above which a pair is kept as trained.
        beta_fast: f64,
        /// Rotations over the original context below which a pair is fully stretched.
        beta_slow: f64,
        context_original: f64,
        /// Blend limits are rounded outwards to whole pairs.
        truncate: bool,
        magnitude: f64,
    },
    /// Each pair's frequency divided by its own divisor.
    Divisors(Vec<f32>),
}

/// Frequencies of a head's pairs and the factor on sine and cosine.
#[derive(Debug)]
pub(super) struct Rope {
    pub frequencies: Vec<f32>,
    pub magnitude: f32,
}

impl Rope {
    /// Fails if a parameter does not give finite positive frequencies.
    pub(super) fn new(head_dim: usize, theta: f64, scaling: &Scaling) -> Result<Self, ConfigError> {
        let pairs = head_dim / 2;
        let exponent = |pair: usize| -(2.0 * pair as f64) / head_dim as f64;
        let plain = (0..pairs).map(|pair| theta.powf(exponent(pair)));
        let mut magnitude = 1.0;
        let frequencies: Vec<f32> = match scaling {
            Scaling::None => plain.map(|frequency| frequency as f32).collect(),
            Scaling::Linear { factor } => {
                plain.map(|frequency| (frequency / factor) as f32).collect()
            }
            Scaling::Llama3 { factor, low_factor, high_factor, context_original } => {
                let blend = |frequency: f64| {
                    let rotations = context_original * frequency / TAU;
                    let kept = (rotations - low_factor) / (high_factor - low_factor);
                    mix(frequency / factor, frequency, kept)
                };
                plain.map(|frequency| blend(frequency) as f32).collect()
            }
            Scaling::Yarn { factor, magnitude: on_waves, .. } => {
                magnitude = *on_waves;
                let (low, high) = yarn_limits(head_dim, theta, scaling);
                let blend = |(pair, frequency): (usize, f64)| {
                    let stretched = (pair as f64 - low) / (high - low);
                    mix(frequency, frequency / factor, stretched)
                };
                plain.enumerate().map(|pair| blend(pair) as f32).collect()
            }
            Scaling::Divisors(divisors) => {
                assert_eq!(divisors.len(), pairs, "a divisor for each pair");
                let divided = |(frequency, divisor): (f64, &f32)| frequency / f64::from(*divisor);
                plain.zip(divisors).map(|pair| divided(pair) as f32).collect()
            }
        };
        let sane = |value: &f32| value.is_finite() && *value > 0.0;
        let magnitude = magnitude as f32;
        if !frequencies.iter().all(sane) || !sane(&magnitude) {
            let reason = format!("theta {theta} with {scaling:?} gives no usable frequencies");
            return Err(ConfigError::new("rotary embedding", reason));
        }
        Ok(Self { frequencies, magnitude })
    }
}

/// YaRN's factor on sine and cosine for a stretch: `0.1 · multiplier · ln(factor) + 1`.
pub(super) fn yarn_magnitude(factor: f64, multiplier: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * multiplier * factor.ln() + 1.0 }
}

/// First and last pair of YaRN's blend.
fn yarn_limits(head_dim: usize, theta: f64, scaling: &Scaling) -> (f64, f64) {
    let Scaling::Yarn { beta_fast, beta_slow, context_original, truncate, .. } = scaling else {
        unreachable!("only YaRN blends over pairs");
    };
    let pair_with_rotations = |rotations: f64| {
        head_dim as f64 * (context_original / (rotations * TAU)).ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (pair_with_rotations(*beta_fast), pair_with_rotations(*beta_slow));
    if *truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
    // Equal limits make the blend a step.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

/// Blends from `a` at `share` ≤ 0 to `b` at `share` ≥ 1.
fn mix(a: f64, b: f64, share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    a * (1.0 - share) + b * share
}
