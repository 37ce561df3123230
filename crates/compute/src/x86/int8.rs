//! Pages of int8: how a position is stored, and how a block becomes bf16 for the products, which are
//! the same as for bf16 pages. The int8 numbers are exact in bf16. Their scales are applied
//! elsewhere.

use super::for_each_isa;
use super::pages::{Fetcher, PAGE};
use super::simd::{SIMD_WIDTH, Simd};
use crate::context_type::quantise;
use crate::source::HEAD_DIM_MAX;
use half::bf16;
use std::arch::x86_64::*;

/// Values that [`Simd::widen`] takes at a time.
const WIDENED: usize = 2 * SIMD_WIDTH;
/// Values widened between two groups of lines that are fetched.
const FETCH_EVERY: usize = 512;

/// The scales of a head's page, after its keys and values.
#[repr(C)]
pub(super) struct Scales {
    pub(super) keys: [f32; PAGE],
    pub(super) values: [f32; PAGE],
}

impl Scales {
    /// The scales of a page.
    #[inline(always)]
    pub(super) fn of(page: *const u8, head_dim: usize) -> *const Self {
        page.wrapping_add(2 * PAGE * head_dim).cast()
    }
}

/// Writes one position's keys and values into a head's page, [d / 2][16 positions][2] and
/// [16 / 2][d][2], and their scales. Other positions of the page may be written at the same time.
#[inline(always)]
unsafe fn store_simd<S: Simd>(keys: &[bf16], values: &[bf16], page: *mut u8, slot: usize) {
    let head_dim = keys.len();
    let mut codes = [0; HEAD_DIM_MAX];
    let codes = &mut codes[..head_dim];
    let into = page.cast::<i8>();
    // SAFETY: every place lies on the page, as promised by the caller.
    unsafe {
        let scales = Scales::of(page, head_dim).cast_mut();
        (&raw mut (*scales).keys[slot]).write(quantise(keys, codes));
        for (pair, codes) in codes.chunks_exact(2).enumerate() {
            let place = into.add(pair * 2 * PAGE + slot * 2);
            place.cast::<[i8; 2]>().write_unaligned([codes[0], codes[1]]);
        }
        (&raw mut (*scales).values[slot]).write(quantise(values, codes));
        let into = into.add(PAGE * head_dim + slot / 2 * 2 * head_dim + slot % 2);
        for (index, &code) in codes.iter().enumerate() {
            into.add(2 * index).write(code);
        }
    }
}

for_each_isa! {
    /// Stores one position of one head.
    fn store = store_simd(keys: &[bf16], values: &[bf16], page: *mut u8, slot: usize)
}

/// Widens `count` values of each page to bf16, page after page, without changing their order. A
/// machine with tiles (`tiles`) has byte permutations too, unless a hypervisor hides them.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd>(
    pages: &[*const i8],
    count: usize,
    into: *mut bf16,
    tiles: bool,
    fetcher: &mut Fetcher<'_>,
) {
    let by_table = tiles && is_x86_feature_detected!("avx512vbmi");
    // SAFETY: `count` is a multiple of 256, and pages and `into` hold that many values, as promised
    // by the caller.
    unsafe {
        for (page, &from) in pages.iter().enumerate() {
            let into = into.add(page * count);
            for start in (0..count).step_by(FETCH_EVERY) {
                fetcher.fetch(1);
                let end = (start + FETCH_EVERY).min(count);
                if by_table {
                    widen_by_table(from.add(start), end - start, into.add(start));
                } else {
                    for start in (start..end).step_by(WIDENED) {
                        S::widen(from.add(start), into.add(start));
                    }
                }
            }
        }
    }
}

/// The low (0) or high (1) byte of 0 to 127 as bf16.
const fn table(which: u32) -> [u8; 128] {
    let mut table = [0; 128];
    let mut value = 0;
    while value < table.len() {
        table[value] = ((value as f32).to_bits() >> (16 + 8 * which)) as u8;
        value += 1;
    }
    table
}

const LOW_BYTES: [u8; 128] = table(0);
const HIGH_BYTES: [u8; 128] = table(1);

/// As `Simd::widen`, `count` values: looks them up, which takes fewer instructions.
///
/// # Safety
/// The machine has AVX-512 VBMI; `count` is a multiple of 64, and `from` and `into` hold
/// that many values.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn widen_by_table(from: *const i8, count: usize, into: *mut bf16) {
    const LINE: usize = 64;
    // SAFETY: as promised by the caller.
    unsafe {
        let halves = |table: &[u8; 128]| {
            [0, LINE].map(|half| _mm512_loadu_si512(table.as_ptr().add(half).cast()))
        };
        let (low_bytes, high_bytes) = (halves(&LOW_BYTES), halves(&HIGH_BYTES));
        let sign = _mm512_set1_epi8(i8::MIN);
        // Unpacking works within quarters of a register, so eighths are first moved to where it
        // will find them.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        for start in (0..count).step_by(LINE) {
            let values = _mm512_loadu_si512(from.add(start).cast());
            let values = _mm512_permutexvar_epi64(order, values);
            let sizes = _mm512_abs_epi8(values);
            let low = _mm512_permutex2var_epi8(low_bytes[0], sizes, low_bytes[1]);
            let high = _mm512_permutex2var_epi8(high_bytes[0], sizes, high_bytes[1]);
            // high | values & sign
            let high = _mm512_ternarylogic_epi32::<0b1111_1000>(high, values, sign);
            _mm512_storeu_si512(into.add(start).cast(), _mm512_unpacklo_epi8(low, high));
            let into = into.add(start + LINE / 2);
            _mm512_storeu_si512(into.cast(), _mm512_unpackhi_epi8(low, high));
        }
    }
}
