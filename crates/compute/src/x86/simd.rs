//! Sixteen f32 at a time: one small vocabulary for AVX2 (two registers), AVX-512 and AVX512-BF16,
//! with which everything around the matrix tiles is written once.
//!
//! Every function is `#[inline(always)]` into a caller compiled for the instruction set, and unsafe
//! because only that caller can know that the machine has it.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all: intrinsics of an instruction set, and pointers, that the caller vouches for"
)]

use super::tiles::{STEP, TILE_ROWS};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;

/// Values in one [`Simd`].
pub(super) const SIMD_WIDTH: usize = 16;

/// Sixteen f32, and how pairs of bf16 are multiplied into them.
pub(super) trait Simd: Copy {
    /// Sixteen pairs of neighbouring bf16, in the form that suits `dot_first`.
    type Pairs: Copy;
    /// What rows of a product's left operand are made of: bf16, or f32 where there are no instructions for bf16. Rows are
    /// then widened once, before they meet all panels.
    type Value: Copy;

    /// Whether they are widened.
    const WIDENS: bool;
    /// Rows and panels that a product keeps in registers at a time.
    const ROWS: usize;
    const PANELS: usize;
    /// Up to so many rows have two panels in registers, where more rows have one.
    const ROWS_FEW: usize = 0;
    /// The rows in registers are of one such span of all rows.
    const SPAN: usize = TILE_ROWS;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, into: *mut f32);
    /// Rounds to nearest, ties to even.
    unsafe fn store_bf16(self, into: *mut bf16);
    /// Two vectors, one after the other, as `store_bf16`.
    #[inline(always)]
    unsafe fn store_bf16_both(both: [Self; 2], into: *mut bf16) {
        unsafe {
            both[0].store_bf16(into);
            both[1].store_bf16(into.add(SIMD_WIDTH));
        }
    }
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn subtract(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    unsafe fn divide(self, divisor: Self) -> Self;
    /// self · factor + addend
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    /// In each lane, `then` if self > other, else `otherwise`.
    unsafe fn if_greater(self, other: Self, then: Self, otherwise: Self) -> Self;
    /// Whether any lane is greater.
    unsafe fn any_greater(self, other: Self) -> bool;
    /// self · 2^n, where `shifted` is n + 1.5 · 2^23.
    unsafe fn scale_by_power(self, shifted: Self) -> Self;
    /// self less the integer at or below it; for less than -127, -∞ too, any number from 0 to 1.
    unsafe fn fraction(self) -> Self;
    /// self · 2^n, where n is the integer at or below `exponent`; 0 for -∞, and ∞ from 128 on.
    unsafe fn scale_by_floor(self, exponent: Self) -> Self;

    /// Sixteen pairs, 64 bytes.
    unsafe fn load_pairs(from: *const bf16) -> Self::Pairs;
    /// The same pairs, before their second products. Where registers are few they are loaded again, not kept.
    #[inline(always)]
    unsafe fn load_again(pairs: Self::Pairs, _from: *const bf16) -> Self::Pairs {
        pairs
    }
    /// Thirty-two values of a row, as products read them.
    unsafe fn copy_step(from: *const bf16, into: *mut Self::Value);
    /// Two vectors, one after the other, rounded to bf16, likewise.
    unsafe fn store_step(both: [Self; 2], into: *mut Self::Value);
    /// One pair of a row, sixteen times.
    unsafe fn splat_pair(row: *const Self::Value, pair: usize) -> Self::Pairs;
    /// self + a.0 · b.0, lane by lane; both products, if the instruction set adds them at once.
    unsafe fn dot_first(self, a: Self::Pairs, b: Self::Pairs) -> Self;
    /// What is left of self + a.0 · b.0 + a.1 · b.1.
    #[inline(always)]
    unsafe fn dot_second(self, _: Self::Pairs, _: Self::Pairs) -> Self {
        self
    }

    /// Thirty-two i8 as bf16, which are exact.
    unsafe fn widen(from: *const i8, into: *mut bf16);

    /// Puts sixteen bf16 at every second place from `into`, and touches nothing between them.
    #[inline(always)]
    unsafe fn spread_bf16(from: *const bf16, into: *mut bf16) {
        unsafe {
            for index in 0..SIMD_WIDTH {
                into.add(2 * index).write(from.add(index).read());
            }
        }
    }

    /// Writes sixteen values of each of two rows, one row and the other in turn.
    #[inline(always)]
    unsafe fn interleave_bf16(rows: [*const bf16; 2], into: *mut bf16) {
        unsafe {
            for index in 0..SIMD_WIDTH {
                into.add(2 * index).write(rows[0].add(index).read());
                into.add(2 * index + 1).write(rows[1].add(index).read());
            }
        }
    }

    /// Transposes sixteen rows of sixteen pairs of values. Rows are `row` values apart.
    #[inline(always)]
    unsafe fn transpose_pairs(from: *const bf16, row: usize, into: *mut bf16) {
        unsafe {
            for index in 0..SIMD_WIDTH {
                for pair in 0..SIMD_WIDTH {
                    let from = from.add(index * row + 2 * pair).cast::<[bf16; 2]>();
                    let into = into.add((pair * SIMD_WIDTH + index) * 2).cast::<[bf16; 2]>();
                    into.write_unaligned(from.read_unaligned());
                }
            }
        }
    }

    /// Simd in order, as an array.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; SIMD_WIDTH] {
        let mut array = [0.0; SIMD_WIDTH];
        unsafe { self.store(array.as_mut_ptr()) };
        array
    }

    /// Eight sums of lanes eight apart.
    unsafe fn fold_sum(self) -> __m256;
    /// Eight maxima of lanes eight apart.
    unsafe fn fold_max(self) -> __m256;

    /// Sum of all lanes, in one fixed order.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let eight = self.fold_sum();
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    /// Largest of all lanes.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let eight = self.fold_max();
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

/// AVX-512: bf16 pairs are split by shift and mask.
#[derive(Clone, Copy)]
pub(super) struct Zmm(__m512);

/// AVX-512 with bf16 dot products.
#[derive(Clone, Copy)]
pub(super) struct ZmmBf16(pub(super) __m512);

macro_rules! zmm_common {
    () => {
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Self(_mm512_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Self(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, into: *mut f32) {
            unsafe { _mm512_storeu_ps(into, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Self(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn subtract(self, other: Self) -> Self {
            unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply(self, other: Self) -> Self {
            unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn divide(self, divisor: Self) -> Self {
            unsafe { Self(_mm512_div_ps(self.0, divisor.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
            unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            unsafe { Self(_mm512_max_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn if_greater(self, other: Self, then: Self, otherwise: Self) -> Self {
            unsafe {
                let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, other.0);
                Self(_mm512_mask_blend_ps(greater, otherwise.0, then.0))
            }
        }
        #[inline(always)]
        unsafe fn any_greater(self, other: Self) -> bool {
            unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, other.0) != 0 }
        }
        #[inline(always)]
        unsafe fn fraction(self) -> Self {
            unsafe { Self(_mm512_reduce_ps::<_MM_FROUND_TO_NEG_INF>(self.0)) }
        }
        #[inline(always)]
        unsafe fn scale_by_floor(self, exponent: Self) -> Self {
            unsafe { Self(_mm512_scalef_ps(self.0, exponent.0)) }
        }
        #[inline(always)]
        unsafe fn scale_by_power(self, shifted: Self) -> Self {
            unsafe {
                let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted.0));
                Self(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), power)))
            }
        }
        #[inline(always)]
        unsafe fn spread_bf16(from: *const bf16, into: *mut bf16) {
            unsafe {
                let spread = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_mask_storeu_epi16(into.cast(), 0x5555_5555, spread);
            }
        }
        #[inline(always)]
        unsafe fn interleave_bf16(rows: [*const bf16; 2], into: *mut bf16) {
            unsafe {
                let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows[0].cast()));
                let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows[1].cast()));
                let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                _mm512_storeu_si512(into.cast(), pairs);
            }
        }
        #[inline(always)]
        unsafe fn transpose_pairs(from: *const bf16, row: usize, into: *mut bf16) {
            unsafe { transpose(from.cast(), row * size_of::<bf16>(), into.cast()) };
        }
        #[inline(always)]
        unsafe fn fold_sum(self) -> __m256 {
            unsafe {
                _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))
            }
        }
        #[inline(always)]
        unsafe fn fold_max(self) -> __m256 {
            unsafe {
                _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))
            }
        }
    };
}

const HIGH_HALF: i32 = 0xffff_0000_u32 as i32;
/// Every second of 32 places.
const ODD: u32 = 0xaaaa_aaaa;

impl Simd for Zmm {
    type Pairs = (__m512, __m512);
    type Value = f32;
    const WIDENS: bool = true;
    const ROWS: usize = 12;
    const PANELS: usize = 2;
    const SPAN: usize = 2 * TILE_ROWS;
    zmm_common!();

    #[inline(always)]
    unsafe fn store_bf16(self, into: *mut bf16) {
        unsafe {
            let rounded = _mm512_srli_epi32::<16>(round_high_halves(self.0));
            _mm256_storeu_si256(into.cast(), _mm512_cvtepi32_epi16(rounded));
        }
    }
    #[inline(always)]
    unsafe fn copy_step(from: *const bf16, into: *mut f32) {
        unsafe {
            for half in [0, SIMD_WIDTH] {
                let values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(half).cast()));
                let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values));
                _mm512_storeu_ps(into.add(half), wide);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_step(both: [Self; 2], into: *mut f32) {
        unsafe {
            let high = _mm512_set1_epi32(HIGH_HALF);
            for (index, values) in both.into_iter().enumerate() {
                let rounded = _mm512_and_si512(round_high_halves(values.0), high);
                _mm512_storeu_si512(into.add(index * SIMD_WIDTH).cast(), rounded);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> Self::Pairs {
        unsafe { apart(_mm512_loadu_si512(from.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_pair(row: *const f32, pair: usize) -> Self::Pairs {
        unsafe { (_mm512_set1_ps(*row.add(2 * pair)), _mm512_set1_ps(*row.add(2 * pair + 1))) }
    }
    #[inline(always)]
    unsafe fn widen(from: *const i8, into: *mut bf16) {
        unsafe {
            let pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(from.cast()));
            let first = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(pairs));
            let first = _mm512_castps_si512(_mm512_cvtepi32_ps(first));
            let second = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<8>(pairs)));
            let both = _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32::<16>(first), second);
            _mm512_storeu_si512(into.cast(), both);
        }
    }
    #[inline(always)]
    unsafe fn dot_first(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe { Self(_mm512_fmadd_ps(a.0, b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn dot_second(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe { Self(_mm512_fmadd_ps(a.1, b.1, self.0)) }
    }
}

/// Rounded to bf16, in the high half of each lane; anything in the low one.
#[inline(always)]
unsafe fn round_high_halves(values: __m512) -> __m512i {
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // NaN keeps its high bits, made quiet, so that rounding cannot carry it into infinity.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

#[inline(always)]
unsafe fn apart(pairs: __m512i) -> (__m512, __m512) {
    unsafe {
        let first = _mm512_slli_epi32::<16>(pairs);
        let second = _mm512_and_si512(pairs, _mm512_set1_epi32(HIGH_HALF));
        (_mm512_castsi512_ps(first), _mm512_castsi512_ps(second))
    }
}

impl Simd for ZmmBf16 {
    type Pairs = __m512i;
    type Value = bf16;
    const WIDENS: bool = false;
    const ROWS: usize = 8;
    const PANELS: usize = 2;
    zmm_common!();

    #[inline(always)]
    unsafe fn store_bf16(self, into: *mut bf16) {
        unsafe {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0));
            _mm256_storeu_si256(into.cast(), rounded);
        }
    }
    #[inline(always)]
    unsafe fn store_bf16_both(both: [Self; 2], into: *mut bf16) {
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(both[1].0, both[0].0);
            _mm512_storeu_si512(into.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> Self::Pairs {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn copy_step(from: *const bf16, into: *mut bf16) {
        unsafe { _mm512_storeu_si512(into.cast(), _mm512_loadu_si512(from.cast())) };
    }
    #[inline(always)]
    unsafe fn store_step(both: [Self; 2], into: *mut bf16) {
        unsafe { Self::store_bf16_both(both, into) };
    }
    #[inline(always)]
    unsafe fn splat_pair(row: *const bf16, pair: usize) -> Self::Pairs {
        unsafe { _mm512_set1_epi32(row.cast::<i32>().add(pair).read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn widen(from: *const i8, into: *mut bf16) {
        unsafe {
            let wide = |from: *const i8| {
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
            };
            let both = _mm512_cvtne2ps_pbh(wide(from.add(SIMD_WIDTH)), wide(from));
            _mm512_storeu_si512(into.cast(), std::mem::transmute::<__m512bh, __m512i>(both));
        }
    }
    #[inline(always)]
    unsafe fn dot_first(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe {
            let bf16 = |pairs| std::mem::transmute::<__m512i, __m512bh>(pairs);
            Self(_mm512_dpbf16_ps(self.0, bf16(a), bf16(b)))
        }
    }
}

/// AVX2 and FMA: two registers of eight.
#[derive(Clone, Copy)]
pub(super) struct Ymm2(__m256, __m256);

impl Ymm2 {
    #[inline(always)]
    unsafe fn each(self, other: Self, of: impl Fn(__m256, __m256) -> __m256) -> Self {
        Self(of(self.0, other.0), of(self.1, other.1))
    }
}

/// Eight values rounded to bf16, in the high half of each lane; anything in the low one.
#[inline(always)]
unsafe fn round_eight(values: __m256) -> __m256i {
    unsafe {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

impl Simd for Ymm2 {
    type Pairs = [__m256; 4];
    type Value = f32;
    const WIDENS: bool = true;
    const ROWS: usize = 6;
    const PANELS: usize = 1;
    const ROWS_FEW: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, into: *mut f32) {
        unsafe {
            _mm256_storeu_ps(into, self.0);
            _mm256_storeu_ps(into.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, into: *mut bf16) {
        unsafe {
            // Packing works within halves of a register: put the quarters back in order.
            let low = _mm256_srli_epi32::<16>(round_eight(self.0));
            let high = _mm256_srli_epi32::<16>(round_eight(self.1));
            let packed = _mm256_packus_epi32(low, high);
            _mm256_storeu_si256(into.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { self.each(other, |a, b| _mm256_add_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn subtract(self, other: Self) -> Self {
        unsafe { self.each(other, |a, b| _mm256_sub_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        unsafe { self.each(other, |a, b| _mm256_mul_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn divide(self, divisor: Self) -> Self {
        unsafe { self.each(divisor, |a, b| _mm256_div_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, factor.0, addend.0),
                _mm256_fmadd_ps(self.1, factor.1, addend.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { self.each(other, |a, b| _mm256_max_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn if_greater(self, other: Self, then: Self, otherwise: Self) -> Self {
        unsafe {
            let greater = self.each(other, |a, b| _mm256_cmp_ps::<_CMP_GT_OQ>(a, b));
            Self(
                _mm256_blendv_ps(otherwise.0, then.0, greater.0),
                _mm256_blendv_ps(otherwise.1, then.1, greater.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn any_greater(self, other: Self) -> bool {
        unsafe {
            let greater = self.each(other, |a, b| _mm256_cmp_ps::<_CMP_GT_OQ>(a, b));
            _mm256_movemask_ps(_mm256_or_ps(greater.0, greater.1)) != 0
        }
    }
    #[inline(always)]
    unsafe fn fraction(self) -> Self {
        unsafe {
            self.each(self, |value, _| {
                let value = _mm256_max_ps(value, _mm256_set1_ps(-127.0));
                _mm256_sub_ps(value, _mm256_floor_ps(value))
            })
        }
    }
    #[inline(always)]
    unsafe fn scale_by_floor(self, exponent: Self) -> Self {
        unsafe {
            self.each(exponent, |value, exponent| {
                let power = _mm256_cvtps_epi32(_mm256_floor_ps(exponent));
                // -127 becomes the bits of 0, and 128 those of infinity.
                let power = _mm256_max_epi32(power, _mm256_set1_epi32(-127));
                let power = _mm256_min_epi32(power, _mm256_set1_epi32(128));
                let power =
                    _mm256_slli_epi32::<23>(_mm256_add_epi32(power, _mm256_set1_epi32(127)));
                _mm256_mul_ps(value, _mm256_castsi256_ps(power))
            })
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, shifted: Self) -> Self {
        unsafe {
            self.each(shifted, |value, shifted| {
                let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), power))
            })
        }
    }
    #[inline(always)]
    unsafe fn fold_sum(self) -> __m256 {
        unsafe { _mm256_add_ps(self.0, self.1) }
    }
    #[inline(always)]
    unsafe fn fold_max(self) -> __m256 {
        unsafe { _mm256_max_ps(self.0, self.1) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> Self::Pairs {
        unsafe {
            let (low, high) =
                (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(16).cast()));
            let mask = _mm256_set1_epi32(HIGH_HALF);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
            ]
        }
    }
    #[expect(clippy::pointers_in_nomem_asm_block, reason = "no instruction, so nothing is read")]
    #[inline(always)]
    unsafe fn load_again(_pairs: Self::Pairs, mut from: *const bf16) -> Self::Pairs {
        // The compiler may not know that it is the same place: it would keep what it loaded before, and have no
        // registers left for sums.
        unsafe {
            asm!("/* {0} */", inout(reg) from, options(pure, nomem, nostack, preserves_flags));
            Self::load_pairs(from)
        }
    }
    #[inline(always)]
    unsafe fn copy_step(from: *const bf16, into: *mut f32) {
        unsafe {
            for part in (0..STEP).step_by(8) {
                let values = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(part).cast()));
                let wide = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(values));
                _mm256_storeu_ps(into.add(part), wide);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_step(both: [Self; 2], into: *mut f32) {
        unsafe {
            let high = _mm256_set1_epi32(HIGH_HALF);
            for (index, values) in [both[0].0, both[0].1, both[1].0, both[1].1].iter().enumerate() {
                let rounded = _mm256_and_si256(round_eight(*values), high);
                _mm256_storeu_si256(into.add(8 * index).cast(), rounded);
            }
        }
    }
    #[inline(always)]
    unsafe fn splat_pair(row: *const f32, pair: usize) -> Self::Pairs {
        unsafe {
            let first = _mm256_set1_ps(*row.add(2 * pair));
            let second = _mm256_set1_ps(*row.add(2 * pair + 1));
            [first, first, second, second]
        }
    }
    #[inline(always)]
    unsafe fn widen(from: *const i8, into: *mut bf16) {
        unsafe {
            for half in [0, SIMD_WIDTH] {
                let pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128(from.add(half).cast()));
                let first = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(pairs));
                let first = _mm256_castps_si256(_mm256_cvtepi32_ps(first));
                let second = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32::<8>(pairs)));
                let first = _mm256_srli_epi32::<16>(first);
                let both = _mm256_blend_epi16::<0b1010_1010>(first, second);
                _mm256_storeu_si256(into.add(half).cast(), both);
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_first(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe { Self(_mm256_fmadd_ps(a[0], b[0], self.0), _mm256_fmadd_ps(a[1], b[1], self.1)) }
    }
    #[inline(always)]
    unsafe fn dot_second(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe { Self(_mm256_fmadd_ps(a[2], b[2], self.0), _mm256_fmadd_ps(a[3], b[3], self.1)) }
    }
}

/// Transposes sixteen rows of sixteen words. Rows are `row_bytes` apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn transpose(from: *const u8, row_bytes: usize, into: *mut u8) {
    // SAFETY: as promised by the caller: sixteen words in each row, room for as many.
    unsafe {
        let rows: [__m512i; 16] =
            std::array::from_fn(|row| _mm512_loadu_si512(from.add(row * row_bytes).cast()));
        // First within quarters of a register, by pairs of rows and then by pairs of pairs.
        let mut pairs = rows;
        for row in (0..16).step_by(2) {
            pairs[row] = _mm512_unpacklo_epi32(rows[row], rows[row + 1]);
            pairs[row + 1] = _mm512_unpackhi_epi32(rows[row], rows[row + 1]);
        }
        let mut fours = pairs;
        for row in (0..16).step_by(4) {
            fours[row] = _mm512_unpacklo_epi64(pairs[row], pairs[row + 2]);
            fours[row + 1] = _mm512_unpackhi_epi64(pairs[row], pairs[row + 2]);
            fours[row + 2] = _mm512_unpacklo_epi64(pairs[row + 1], pairs[row + 3]);
            fours[row + 3] = _mm512_unpackhi_epi64(pairs[row + 1], pairs[row + 3]);
        }
        // `fours[4 · group + column]` has columns column, column + 4, … of four rows, a column in each quarter. The
        // quarters of four groups are put together.
        for column in 0..4 {
            let [a, b, c, d] = [0, 4, 8, 12].map(|group| fours[group + column]);
            let (low, high) =
                (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
            let (low_after, high_after) =
                (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
            let lines = [
                _mm512_shuffle_i32x4::<0x88>(low, low_after),
                _mm512_shuffle_i32x4::<0x88>(high, high_after),
                _mm512_shuffle_i32x4::<0xdd>(low, low_after),
                _mm512_shuffle_i32x4::<0xdd>(high, high_after),
            ];
            for (quarter, line) in lines.into_iter().enumerate() {
                _mm512_storeu_si512(into.add((4 * quarter + column) * 64).cast(), line);
            }
        }
    }
}
