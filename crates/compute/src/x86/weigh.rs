//! Scores become softmax weights, 2^(score - base), rounded to bf16 and added up.

use super::functions::weight;
use super::simd::{Simd, Ymm2, Zmm, ZmmBf16};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;

/// How a path turns scores into weights. A weight is 2^x. The path counts x in parts of its own, so that a score becomes
/// x with one multiply-add: score · scale · [`Self::PARTS`] + offset.
pub(super) trait Weigh: Simd {
    /// Parts of a doubling.
    const PARTS: f32 = 1.0;
    /// x of a weight of 1.
    const ONE: f32 = 0.0;
    /// Whether its products may run on AMX tiles.
    const MAY_HAVE_TILES: bool = false;
    /// x of two pages, as the path compares it and makes weights of it: rounded, if weights are made of integers.
    type Line: Copy;

    /// # Safety
    /// The machine has the instruction set, here and in all that follows.
    unsafe fn line(x: [Self; 2]) -> Self::Line;

    /// The larger x, place by place.
    unsafe fn larger(line: Self::Line, other: Self::Line) -> Self::Line;

    /// Whether any weight exceeds 2^`power`.
    unsafe fn exceeds(line: Self::Line, power: f32) -> bool;

    /// Writes the weights of two pages: 0 for -∞. Returns `sum` with all of them added. In what order positions stand
    /// is for the path to say if they are for `TILES`, whose values are stored or copied in that order: see [`tile_pair`].
    ///
    /// # Safety
    /// 32 weights fit at `into`.
    unsafe fn weigh<const TILES: bool>(line: Self::Line, sum: Self, into: *mut Self::Value)
    -> Self;
}

/// Where a pair of a page's positions stands among the sixteen of two pages, if weights are for tiles: by fours, one page
/// and the other in turn, as a register is packed.
pub(super) fn tile_pair(second_page: bool, pair: usize) -> usize {
    pair / 2 * 4 + usize::from(second_page) * 2 + pair % 2
}

/// Weights that stay f32 until they are written.
macro_rules! weigh_in_f32 {
    ($simd:ty) => {
        impl Weigh for $simd {
            type Line = [Self; 2];

            #[inline(always)]
            unsafe fn line(x: [Self; 2]) -> Self::Line {
                x
            }

            #[inline(always)]
            unsafe fn larger([a, b]: Self::Line, [c, d]: Self::Line) -> Self::Line {
                // SAFETY: as promised by the caller.
                unsafe { [a.max(c), b.max(d)] }
            }

            #[inline(always)]
            unsafe fn exceeds([a, b]: Self::Line, power: f32) -> bool {
                // SAFETY: as promised by the caller.
                unsafe { a.max(b).any_greater(Self::splat(power)) }
            }

            #[inline(always)]
            unsafe fn weigh<const TILES: bool>(
                [a, b]: Self::Line,
                sum: Self,
                into: *mut Self::Value,
            ) -> Self {
                // SAFETY: as promised by the caller.
                unsafe {
                    let (first, second) = (weight(a), weight(b));
                    Self::store_step([first, second], into);
                    sum.add(first.add(second))
                }
            }
        }
    };
}

weigh_in_f32!(Ymm2);
weigh_in_f32!(Zmm);

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

/// `from` less every second byte of `what`. With a mask that the compiler knows, it would take two instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn subtract_low_bytes(from: __m512i, what: __m512i) -> __m512i {
    let mut low = LOW_BYTES;
    // SAFETY: works on registers alone.
    unsafe { asm!("/* {low} */", low = inout(reg) low, options(pure, nomem, nostack)) };
    _mm512_mask_sub_epi8(from, low, from, what)
}

/// The bits of 2^x in bf16 are nearly a linear function of x: exponent and mantissa follow each other. So x is counted in
/// steps from the bits of 0, rounded and packed as integers, 32 at a time, and what the line is too high by is looked up.
/// The sum is of the rounded weights, the same that the values are multiplied by.
impl Weigh for ZmmBf16 {
    const PARTS: f32 = STEPS;
    const ONE: f32 = EXPONENT_OF_ONE * STEPS;
    const MAY_HAVE_TILES: bool = true;
    type Line = __m512i;

    #[inline(always)]
    unsafe fn line(x: [Self; 2]) -> Self::Line {
        // SAFETY: as promised by the caller.
        unsafe {
            let [first, second] = [_mm512_cvtps_epi32(x[0].0), _mm512_cvtps_epi32(x[1].0)];
            // Below 0 is 0. Packing works within quarters of a register.
            _mm512_packus_epi32(first, second)
        }
    }

    #[inline(always)]
    unsafe fn larger(line: Self::Line, other: Self::Line) -> Self::Line {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_max_epu16(line, other) }
    }

    #[inline(always)]
    unsafe fn exceeds(line: Self::Line, power: f32) -> bool {
        // SAFETY: as promised by the caller.
        unsafe {
            let most = _mm512_set1_epi16(power.mul_add(Self::PARTS, Self::ONE) as i16);
            _mm512_cmpgt_epu16_mask(line, most) != 0
        }
    }

    #[inline(always)]
    unsafe fn weigh<const TILES: bool>(mut line: Self::Line, sum: Self, into: *mut bf16) -> Self {
        // SAFETY: as promised by the caller.
        unsafe {
            if !TILES {
                let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
                line = _mm512_permutexvar_epi64(order, line);
            }
            let above = _mm512_loadu_si512(ABOVE.as_ptr().cast());
            let above = _mm512_permutexvar_epi8(_mm512_srli_epi16::<1>(line), above);
            // Never more than the low bytes hold, because 2^f is never below 1.
            let weights = subtract_low_bytes(line, above);
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
            let (scale, offset) = (S::splat(0.5 * S::PARTS), S::splat(S::ONE - 3.0 * S::PARTS));
            let x = [0, SIMD_WIDTH]
                .map(|first| S::load(scores.as_ptr().add(first)).multiply_add(scale, offset));
            let mut weights = [0.0_f32; 2 * SIMD_WIDTH];
            let place = weights.as_mut_ptr().cast();
            *sum = S::weigh::<false>(S::line(x), S::splat(0.0), place).sum();
            let narrow = weights.as_ptr().cast::<bf16>();
            for (index, into) in into.iter_mut().enumerate() {
                let narrow = || narrow.add(index).read();
                *into = if S::WIDENS { bf16::from_f32(weights[index]) } else { narrow() };
            }
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
