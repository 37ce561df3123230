//! Rows on their way into a product: RMS norm of the residual, or a plain copy, as bf16 tiles.

use super::for_each_isa;
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{RowsMut, STEP, TILE_ROWS};
use half::bf16;
use std::ops::Range;

/// Sums of squares kept apart, so that additions overlap; added in one fixed order.
const SUMS: usize = 4;

/// Σ x², for a width that is a multiple of 16.
#[inline(always)]
unsafe fn sum_of_squares<S: Simd>(values: *const f32, width: usize) -> f32 {
    // SAFETY: `width` values lie there, as promised by the caller.
    unsafe {
        // All sums in turn: a sum that was chosen by its number would not stay in a register.
        let mut sums = [S::splat(0.0); SUMS];
        for start in (0..width).step_by(SUMS * SIMD_WIDTH) {
            for (index, sum) in sums.iter_mut().enumerate() {
                let start = start + index * SIMD_WIDTH;
                if start < width {
                    let value = S::load(values.add(start));
                    *sum = value.multiply_add(value, *sum);
                }
            }
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
    }
}

/// into[row] = x · weight / √(mean x² + ε), rounded to bf16.
pub(super) struct NormRow<'a> {
    /// The residual, padded with zeros to whole steps.
    pub(super) values: &'a [f32],
    /// The norm's weights, padded likewise.
    pub(super) weights: &'a [f32],
    /// Values that count for the mean.
    pub(super) width: usize,
    pub(super) epsilon: f32,
    pub(super) into: &'a RowsMut<'a>,
    pub(super) row: usize,
}

#[inline(always)]
unsafe fn norm_row_simd<S: Simd>(norm: &NormRow<'_>) {
    let (values, weights) = (norm.values, norm.weights);
    assert!(
        values.len() == weights.len() && values.len() == norm.into.steps() * STEP,
        "padded widths of a norm"
    );
    // SAFETY: the lengths were checked; `row` is in the buffer by the caller's promise.
    unsafe {
        let mean = sum_of_squares::<S>(values.as_ptr(), values.len()) / norm.width as f32;
        let scale = S::splat(1.0 / (mean + norm.epsilon).sqrt());
        for (step, into) in norm.into.places(norm.row).enumerate() {
            let mut both = [scale; STEP / SIMD_WIDTH];
            for (half, normed) in both.iter_mut().enumerate() {
                let start = step * STEP + half * SIMD_WIDTH;
                let value = S::load(values.as_ptr().add(start)).multiply(scale);
                *normed = value.multiply(S::load(weights.as_ptr().add(start)));
            }
            S::store_bf16_both(both, into);
        }
    }
}

for_each_isa! {
    /// Norms one row.
    fn norm_row = norm_row_simd(norm: &NormRow<'_>)
}

#[inline(always)]
unsafe fn copy_rows_simd<S: Simd>(sources: &[&[bf16]], into: &RowsMut<'_>, rows: Range<usize>) {
    assert!(rows.start / TILE_ROWS == (rows.end - 1) / TILE_ROWS, "rows of one block");
    let sources = &sources[rows.clone()];
    assert!(sources.iter().all(|values| values.len() == into.width), "width of a copied row");
    for (step, place) in into.places(rows.start).enumerate() {
        for (row, values) in sources.iter().enumerate() {
            let (values, mut padded) = (&values[step * STEP..], [bf16::ZERO; STEP]);
            let from = if values.len() >= STEP {
                values.as_ptr()
            } else {
                padded[..values.len()].copy_from_slice(values);
                padded.as_ptr()
            };
            // SAFETY: a step of a row, which is as long as a vector; its place is the caller's.
            unsafe { S::load(from.cast()).store(place.add(row * STEP).cast()) };
        }
    }
}

for_each_isa! {
    /// Copies some rows of a row block, tile by tile.
    fn copy_rows = copy_rows_simd(sources: &[&[bf16]], into: &RowsMut<'_>, rows: Range<usize>)
}
