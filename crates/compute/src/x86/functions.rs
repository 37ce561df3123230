//! Elementary functions on sixteen values.

use super::simd::Simd;
use crate::math::{LOG2_E, ROUND_MAGIC};

/// Below this, 2^x is taken as 0.
const EXP2_MIN: f32 = -126.0;
/// Coefficients of 2^r on |r| ≤ 1/2, from r^6 down to r^0: (ln 2)^n / n!.
const EXP2_COEFFICIENTS: [f32; 7] =
    [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0];

/// 2^x for x ≤ 127; 0 below [`EXP2_MIN`], -∞ included.
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(x: S) -> S {
    // SAFETY: as promised by the caller: the machine has the instruction set of `S`.
    unsafe {
        let floor = S::splat(EXP2_MIN);
        let clamped = x.max(floor);
        let magic = S::splat(ROUND_MAGIC);
        let shifted = clamped.add(magic);
        let rest = clamped.subtract(shifted.subtract(magic));
        let mut value = S::splat(EXP2_COEFFICIENTS[0]);
        for &coefficient in &EXP2_COEFFICIENTS[1..] {
            value = value.multiply_add(rest, S::splat(coefficient));
        }
        x.if_greater(floor, value.scale_by_power(shifted), S::splat(0.0))
    }
}

/// Coefficients of 2^r on 0 ≤ r < 1, from r^3 down, to eight parts in a hundred thousand: a twenty-fifth of what
/// rounding to bf16 adds.
const WEIGHT_COEFFICIENTS: [f32; 4] = [7.802_452e-2, 2.260_671_6e-1, 6.958_335_4e-1, 9.999_252e-1];
/// About 2^x, for what is rounded to bf16 soon: next to 0 below -126, 0 for -∞, and ∞ from 128 on.
#[inline(always)]
pub(super) unsafe fn weight<S: Simd>(x: S) -> S {
    // SAFETY: as promised by the caller: the machine has the instruction set of `S`.
    unsafe {
        let rest = x.fraction();
        let mut value = S::splat(WEIGHT_COEFFICIENTS[0]);
        for &coefficient in &WEIGHT_COEFFICIENTS[1..] {
            value = value.multiply_add(rest, S::splat(coefficient));
        }
        value.scale_by_floor(x)
    }
}

/// x · σ(x) = x / (1 + e^-x), to a tenth of a thousandth: a twentieth of what rounding to bf16 adds. Beside tiles that
/// multiply, a core runs few vector operations, so there are as few as can be.
#[inline(always)]
pub(super) unsafe fn silu<S: Simd>(x: S) -> S {
    // SAFETY: as promised by the caller.
    unsafe { x.divide(weight(x.multiply(S::splat(-LOG2_E))).add(S::splat(1.0))) }
}

#[cfg(test)]
mod tests {
    use super::super::for_each_isa;
    use super::super::simd::SIMD_WIDTH;
    use super::*;
    use crate::Isa;

    #[inline(always)]
    unsafe fn both_simd<S: Simd>(
        x: &[f32; SIMD_WIDTH],
        exp2_of: &mut [f32; SIMD_WIDTH],
        silu_of: &mut [f32; SIMD_WIDTH],
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            exp2(S::load(x.as_ptr())).store(exp2_of.as_mut_ptr());
            silu(S::load(x.as_ptr())).store(silu_of.as_mut_ptr());
        }
    }

    for_each_isa! {
        /// Both functions.
        fn both = both_simd(x: &[f32; SIMD_WIDTH], exp2_of: &mut [f32; SIMD_WIDTH], silu_of: &mut [f32; SIMD_WIDTH])
    }

    #[test]
    fn functions_are_accurate_on_every_path() {
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Portable) {
            let mut x = [-f32::INFINITY; SIMD_WIDTH];
            for start in -4000..4000 {
                let (mut exp2_of, mut silu_of) = ([0.0; SIMD_WIDTH], [0.0; SIMD_WIDTH]);
                // SAFETY: the path is available.
                unsafe { both(isa, &x, &mut exp2_of, &mut silu_of) };
                for ((x, power), gated) in x.into_iter().zip(exp2_of).zip(silu_of) {
                    let wide = f64::from(x);
                    let expected = if x <= EXP2_MIN { 0.0 } else { wide.exp2() };
                    let exact = x > 120.0 || (f64::from(power) - expected).abs() <= 3e-7 * expected;
                    assert!(exact, "{isa}: 2^{x} is {power}");
                    let expected =
                        if x.is_finite() { wide / (1.0 + (-wide).exp()) } else { continue };
                    let close =
                        (f64::from(gated) - expected).abs() <= 1e-4 * expected.abs() + 1e-20;
                    assert!(close, "{isa}: silu({x}) is {gated}, not {expected}");
                }
                x = std::array::from_fn(|lane| start as f32 * 0.05 + lane as f32 * 0.003);
            }
        }
    }
}
