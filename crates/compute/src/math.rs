//! Elementary functions shared by the backends: the same polynomial everywhere, so that a scalar
//! tail and a vector agree.

/// 1.5 · 2^23: adding it rounds a small f32 to the nearest integer, and leaves it in the low bits.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;
/// Below this, e^x is less than the smallest normal f32 and taken as 0.
pub(crate) const EXP_MIN: f32 = -87.336_54;
/// Above this, e^x exceeds f32.
pub(crate) const EXP_MAX: f32 = 88.722_84;
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the first has few enough bits that its product with an exponent is exact.
pub(crate) const LN_2_HIGH: f32 = 0.693_359_4;
pub(crate) const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of e^r on |r| ≤ ln 2 / 2, from r^6 down to r^0: the Taylor series, slightly bent.
pub(crate) const EXP_COEFFICIENTS: [f32; 7] =
    [1.393_348e-3, 8.333_338e-3, 4.166_624e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0];

/// e^x without branches, so that loops over it vectorise; 0 for x below [`EXP_MIN`] and for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Written so that NaN takes the lower bound.
    let clamped = if x > EXP_MIN { x } else { EXP_MIN };
    let clamped = if clamped < EXP_MAX { clamped } else { EXP_MAX };
    let shifted = clamped * LOG2_E + ROUND_MAGIC;
    let exponent = shifted - ROUND_MAGIC;
    let rest = (clamped - exponent * LN_2_HIGH) - exponent * LN_2_LOW;
    let mut value = EXP_COEFFICIENTS[0];
    for coefficient in &EXP_COEFFICIENTS[1..] {
        value = value * rest + coefficient;
    }
    // 2^exponent in two halves, because 2^128 has no f32 of its own but e^88.7 does.
    let bits = shifted.to_bits() as i32 - ROUND_MAGIC.to_bits() as i32;
    let half = bits >> 1;
    let scale = |power: i32| f32::from_bits(((power + 127) << 23) as u32);
    let result = value * scale(half) * scale(bits - half);
    if x > EXP_MIN { result } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut x = -87.3f32;
        while x < 88.7 {
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}) is off by {error}");
            x += 0.0137;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::NAN), 0.0);
        assert!(exp(f32::INFINITY) > 3.0e38);
    }
}
