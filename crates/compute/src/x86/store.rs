//! Keys and values on their way into bf16 pages.

use super::for_each_isa;
use super::pages::{LINE_VALUES, PAGE, PAGE_LINES};
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{STEP, TILE};
use super::weigh::tile_pair;
use half::bf16;

/// Where a page's keys and values go.
#[derive(Clone, Copy)]
pub(super) struct PagePlace {
    /// [d / 2][16 positions][2]
    pub(super) keys: *mut bf16,
    /// The first line of the place's values, values from sixteen columns to the next, and the order of lines.
    pub(super) values: *mut bf16,
    pub(super) column: usize,
    pub(super) order: LineOrder,
}

/// Where the pairs of a page's positions stand among the lines of sixteen columns.
#[derive(Clone, Copy)]
pub(super) enum LineOrder {
    /// In order, from this line on.
    From(usize),
    /// As tiles want those of two pages, of which this is the second, or not.
    Tiles(bool),
}

impl PagePlace {
    /// Where a pair of positions and the first sixteen columns stand.
    #[inline(always)]
    fn line(&self, pair: usize) -> *mut bf16 {
        let line = match self.order {
            LineOrder::From(first) => first + pair,
            LineOrder::Tiles(second) => tile_pair(second, pair),
        };
        self.values.wrapping_add(line * LINE_VALUES)
    }
}

/// Writes one position's keys and values into a head's page. Other positions of the page may be written at the same time.
#[inline(always)]
unsafe fn store_simd<S: Simd>(keys: &[bf16], values: &[bf16], into: PagePlace, slot: usize) {
    // SAFETY: every place lies on the page, as promised by the caller.
    unsafe {
        for (pair, keys) in keys.chunks_exact(2).enumerate() {
            into.keys
                .add(pair * 2 * PAGE + slot * 2)
                .cast::<[bf16; 2]>()
                .write_unaligned([keys[0], keys[1]]);
        }
        let line = into.line(slot / 2).add(slot % 2);
        for (column, values) in values.chunks_exact(SIMD_WIDTH).enumerate() {
            S::spread_bf16(values.as_ptr(), line.add(into.column * column));
        }
    }
}

for_each_isa! {
    /// Stores one position of one head.
    fn store = store_simd(keys: &[bf16], values: &[bf16], into: PagePlace, slot: usize)
}

/// Copies the heads of up to 16 rows into left-tile order, [d / 32][16 rows][32], as products read them.
#[inline(always)]
unsafe fn load_tile_simd<S: Simd>(rows: &[&[bf16]], into: *mut f32) {
    for (row, values) in rows.iter().enumerate() {
        let (steps, rest) = values.as_chunks::<STEP>();
        // SAFETY: every place lies in the tiles, as promised by the caller.
        unsafe {
            let into = into.cast::<S::Value>().add(row * STEP);
            for (step, values) in steps.iter().enumerate() {
                S::copy_step(values.as_ptr(), into.add(step * TILE));
            }
            if !rest.is_empty() {
                let mut values = [bf16::ZERO; STEP];
                values[..rest.len()].copy_from_slice(rest);
                S::copy_step(values.as_ptr(), into.add(steps.len() * TILE));
            }
        }
    }
}

for_each_isa! {
    /// Copies the heads of up to 16 rows into left-tile order.
    fn load_tile = load_tile_simd(rows: &[&[bf16]], into: *mut f32)
}

/// The exponent of infinity and NaN.
const NOT_FINITE: u16 = 0x7f80;

/// Whether all values are numbers.
#[inline(always)]
pub(super) fn are_finite(values: &[bf16]) -> bool {
    values.iter().fold(0, |most, value| (value.to_bits() & !0x8000).max(most)) < NOT_FINITE
}

/// Writes all positions of a head's page at once. Their rows are `row` values apart. Says in `finite` if not all
/// values are numbers.
#[inline(always)]
unsafe fn store_page_simd<S: Simd>(
    keys: *const bf16,
    values: *const bf16,
    row: usize,
    head_dim: usize,
    into: PagePlace,
    finite: &mut bool,
) {
    // SAFETY: every place lies on the page, or in a row, as promised by the caller.
    unsafe {
        for slot in 0..PAGE {
            *finite &= are_finite(std::slice::from_raw_parts(values.add(slot * row), head_dim));
        }
        for step in 0..head_dim / STEP {
            S::transpose_pairs(keys.add(step * STEP), row, into.keys.add(step * TILE));
        }
        for pair in head_dim / STEP * STEP / 2..head_dim / 2 {
            for slot in 0..PAGE {
                let keys = keys.add(slot * row + 2 * pair).cast::<[bf16; 2]>().read_unaligned();
                let place = into.keys.add((pair * PAGE + slot) * 2);
                place.cast::<[bf16; 2]>().write_unaligned(keys);
            }
        }
        for pair in 0..PAGE_LINES {
            let (values, line) = (values.add(2 * pair * row), into.line(pair));
            for column in 0..head_dim / SIMD_WIDTH {
                let values = values.add(column * SIMD_WIDTH);
                S::interleave_bf16([values, values.add(row)], line.add(into.column * column));
            }
        }
    }
}

for_each_isa! {
    /// Stores all positions of one head's page.
    fn store_page = store_page_simd(
        keys: *const bf16,
        values: *const bf16,
        row: usize,
        head_dim: usize,
        into: PagePlace,
        finite: &mut bool,
    )
}
