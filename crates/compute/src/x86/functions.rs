//! Elementary functions on sixteen lanes.

use super::lanes::Lanes;
use crate::math::{LOG2_E, ROUND_MAGIC};

/// 2^x is taken as 0 below this.
const EXP2_MIN: f32 = -126.0;
/// Coefficients of 2^r on |r| ≤ 1/2, from r^6 down to r^0: (ln 2)^n / n!.
const EXP2_COEFFICIENTS: [f32; 7] =
    [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0];

/// 2^x for x ≤ 127; 0 below [`EXP2_MIN`], -∞ included.
#[inline(always)]
pub(super) unsafe fn exp2<L: Lanes>(x: L) -> L {
    // SAFETY: as promised by the caller: the machine has the instruction set of `L`.
    unsafe {
        let floor = L::splat(EXP2_MIN);
        let clamped = x.max(floor);
        let magic = L::splat(ROUND_MAGIC);
        let shifted = clamped.add(magic);
        let rest = clamped.subtract(shifted.subtract(magic));
        let mut value = L::splat(EXP2_COEFFICIENTS[0]);
        for &coefficient in &EXP2_COEFFICIENTS[1..] {
            value = value.multiply_add(rest, L::splat(coefficient));
        }
        x.if_greater(floor, value.scale_by_power(shifted), L::splat(0.0))
    }
}

/// x · σ(x) = x / (1 + e^-x)
#[inline(always)]
pub(super) unsafe fn silu<L: Lanes>(x: L) -> L {
    // SAFETY: as promised by the caller.
    unsafe {
        // Far below zero the result is 0 to any precision we keep; the bound keeps 1 + e^-x, and
        // the guess at its reciprocal, ordinary numbers.
        let power = x.multiply(L::splat(-LOG2_E)).min(L::splat(80.0));
        let divisor = exp2(power).add(L::splat(1.0));
        let mut reciprocal = divisor.guess_reciprocal();
        for _ in 0..3 {
            let two_minus =
                divisor.multiply(L::splat(-1.0)).multiply_add(reciprocal, L::splat(2.0));
            reciprocal = reciprocal.multiply(two_minus);
        }
        x.multiply(reciprocal)
    }
}
