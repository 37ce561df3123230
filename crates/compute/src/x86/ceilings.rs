//! What the instruction sets can do at best: products from registers, and reading memory.

use super::amx::{self, Tiles};
use super::for_each_isa;
use super::simd::{SIMD_WIDTH, Simd};
use crate::Isa;
use half::bf16;
use std::hint::black_box;

/// Chains of sums kept going at once: more than latency times throughput of a multiply-add.
const CHAINS: usize = 12;

/// Operations of one round of [`peak`].
pub(crate) fn peak_operations(isa: Isa) -> usize {
    match isa {
        Isa::Amx => amx::PEAK_OPERATIONS,
        _ => CHAINS * SIMD_WIDTH * 2 * 2,
    }
}

/// Arbitrary numbers between -1 and 1. Zeros would not do: a core that multiplies only zeros runs at a higher clock,
/// by a quarter where it was measured.
fn operands<const N: usize>() -> [bf16; N] {
    let mut state = 1_u32;
    std::array::from_fn(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32(state as i32 as f32 / 2_f32.powi(31))
    })
}

/// Multiplies registers for `rounds` rounds.
///
/// # Safety
/// The machine has `isa`.
pub(crate) unsafe fn peak(isa: Isa, rounds: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        if isa == Isa::Amx {
            let _tiles = Tiles::whole();
            return amx::peak(rounds, &operands());
        }
        peak_vector(isa, rounds);
    }
}

#[inline(always)]
unsafe fn peak_simd<S: Simd>(rounds: usize) {
    // AVX2 has room for fewer chains of two registers each, and needs fewer.
    let chains = if S::ROWS < 8 { CHAINS / 2 } else { CHAINS };
    let values = operands::<{ 2 * SIMD_WIDTH }>();
    // SAFETY: as promised by the caller; sixteen pairs lie in the array.
    unsafe {
        let pairs = S::load_pairs(black_box(&values).as_ptr());
        for _ in 0..CHAINS / chains {
            let mut sums = [S::splat(0.0); CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums[..chains] {
                    *sum = sum.dot_first(pairs, pairs);
                }
                for sum in &mut sums[..chains] {
                    *sum = sum.dot_second(pairs, pairs);
                }
            }
            for sum in sums {
                black_box(sum.to_array());
            }
        }
    }
}

for_each_isa! {
    /// Multiplies vector registers.
    fn peak_vector = peak_simd(rounds: usize)
}

#[inline(always)]
unsafe fn read_simd<S: Simd>(values: &[u64], sum: &mut u64) {
    const READ: usize = 4;
    // SAFETY: whole vectors inside the slice.
    unsafe {
        let mut sums = [S::splat(0.0); READ];
        for chunk in values.chunks_exact(READ * SIMD_WIDTH / 2) {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = sum.max(S::load(chunk.as_ptr().cast::<f32>().add(index * SIMD_WIDTH)));
            }
        }
        *sum = sums.into_iter().map(|sum| u64::from(sum.sum().to_bits())).sum();
    }
}

for_each_isa! {
    /// Reads memory in order.
    fn read_vector = read_simd(values: &[u64], sum: &mut u64)
}

/// Reads memory in order; the result only proves that it did.
///
/// # Safety
/// The machine has `isa`.
pub(crate) unsafe fn read(isa: Isa, values: &[u64]) -> u64 {
    let mut sum = 0;
    // SAFETY: as promised by the caller.
    unsafe { read_vector(isa, values, &mut sum) };
    sum
}
