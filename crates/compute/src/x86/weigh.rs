//! Scores become softmax weights, 2^(score - base), rounded to bf16 and added up.

use super::functions::weight;
use super::simd::{Simd, Ymm2, Zmm, ZmmBf16};
use half::bf16;
use std::arch::x86_64::*;

/// How a path turns scores into weights.
pub(super) trait Weigh: Simd {
    /// Writes the weights of two pages, 2^(score · scale - base) for scores that exceed the base by little, 0 for -∞.
    /// Returns `sum` with all of them added, lane by lane.
    ///
    /// # Safety
    /// The machine has the instruction set; 32 weights fit at `into`.
    #[inline(always)]
    unsafe fn weigh(scores: [Self; 2], scale: f32, base: Self, sum: Self, into: *mut bf16) -> Self {
        // SAFETY: as promised by the caller.
        unsafe {
            let (scale, base) = (Self::splat(scale), Self::splat(0.0).subtract(base));
            let first = weight(scores[0].multiply_add(scale, base));
            let second = weight(scores[1].multiply_add(scale, base));
            Self::store_bf16_both([first, second], into);
            sum.add(first.add(second))
        }
    }
}

impl Weigh for Ymm2 {}
impl Weigh for Zmm {}

/// One step of bf16: a number's bits count up by this while it doubles.
const STEPS: f32 = 128.0;
/// The exponent of 1 in a number's bits.
const EXPONENT_OF_ONE: f32 = 127.0;
/// How far 1 + f is above 2^f, in steps, for f from 0 to 1 in 64 parts. With f itself in 128 parts, that makes
/// 2^x to 0.72%, and to 0.23% on average (root mean square), where rounding alone makes it to 0.39 and 0.17%.
const ABOVE: [u8; 64] = [
    0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9, 9, 9, 8, 8, 8, 7, 7, 6,
    6, 5, 5, 4, 3, 3, 2, 1, 1,
];
/// Every second byte.
const LOW_BYTES: u64 = 0x5555_5555_5555_5555;
/// In each word, where the bits begin that count in 64ths: the word's second.
const SECOND_BITS: i64 = 0x3131_2121_1111_0101;

/// The bits of 2^x in bf16 are nearly a linear function of x: exponent and mantissa follow each other. So x is scaled,
/// rounded and packed as integers, 32 at a time, and what the line is too high by is looked up. The sum is of the
/// rounded weights, the same that the values are multiplied by.
impl Weigh for ZmmBf16 {
    #[inline(always)]
    unsafe fn weigh(scores: [Self; 2], scale: f32, base: Self, sum: Self, into: *mut bf16) -> Self {
        // SAFETY: as promised by the caller.
        unsafe {
            let scale = _mm512_set1_ps(scale * STEPS);
            let one = _mm512_set1_ps(EXPONENT_OF_ONE * STEPS);
            let one = _mm512_fnmadd_ps(base.0, _mm512_set1_ps(STEPS), one);
            let first = _mm512_cvtps_epi32(_mm512_fmadd_ps(scores[0].0, scale, one));
            let second = _mm512_cvtps_epi32(_mm512_fmadd_ps(scores[1].0, scale, one));
            // Below 0 is 0. Packing works within quarters of a register: put the eighths back in order.
            let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
            let line = _mm512_permutexvar_epi64(order, _mm512_packus_epi32(first, second));
            let parts = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(SECOND_BITS), line);
            let above = _mm512_loadu_si512(ABOVE.as_ptr().cast());
            let above = _mm512_permutexvar_epi8(parts, above);
            // Never more than the low bytes hold, because 2^f is never below 1.
            let weights = _mm512_mask_sub_epi8(line, LOW_BYTES, line, above);
            _mm512_storeu_si512(into.cast(), weights);
            let ones = _mm512_set1_epi32(0x3f80_3f80);
            let bf16 = |pairs| std::mem::transmute::<__m512i, __m512bh>(pairs);
            Self(_mm512_dpbf16_ps(sum.0, bf16(weights), bf16(ones)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::for_each_isa;
    use super::super::simd::SIMD_WIDTH;
    use super::*;
    use crate::Isa;

    #[inline(always)]
    unsafe fn weigh_simd<S: Weigh>(
        scores: &[f32; 2 * SIMD_WIDTH],
        into: &mut [bf16; 2 * SIMD_WIDTH],
        sum: &mut f32,
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            let both = [S::load(scores.as_ptr()), S::load(scores.as_ptr().add(SIMD_WIDTH))];
            *sum = S::weigh(both, 0.5, S::splat(3.0), S::splat(0.0), into.as_mut_ptr()).sum();
        }
    }

    for_each_isa! {
        /// Weights and their sum.
        fn weigh = weigh_simd(scores: &[f32; 2 * SIMD_WIDTH], into: &mut [bf16; 2 * SIMD_WIDTH], sum: &mut f32)
    }

    #[test]
    fn weights_are_powers_of_two_in_order_on_every_path() {
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Portable) {
            for start in -500..10 {
                let mut scores: [f32; 2 * SIMD_WIDTH] =
                    std::array::from_fn(|index| start as f32 * 0.37 + index as f32 * 0.61);
                scores[5] = f32::NEG_INFINITY;
                scores[30] = -1e9;
                let (mut weights, mut sum) = ([bf16::ONE; 2 * SIMD_WIDTH], 0.0);
                // SAFETY: the path is available.
                unsafe { weigh(isa, &scores, &mut weights, &mut sum) };
                let mut added = 0.0;
                for (score, weight) in scores.into_iter().zip(weights) {
                    let (expected, found) = ((0.5 * score - 3.0).exp2(), weight.to_f32());
                    added += found;
                    let close = (found - expected).abs() <= 0.0075 * expected + 1e-37;
                    assert!(close, "{isa}: the weight of {score} is {found}, not {expected}");
                }
                assert!((sum - added).abs() <= 0.005 * added, "{isa}: {sum} for {added}");
            }
        }
    }
}
