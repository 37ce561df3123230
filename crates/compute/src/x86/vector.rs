//! Products without tiles: a row's pairs, one at a time, against sixteen outputs at once.
//!
//! c[row][output] (+)= Σ over pairs of a[row][pair] · b[pair][output], each sum one chain in the
//! order of the pairs, whatever rows and panels it shares its registers with.

use super::for_each_isa;
use super::lanes::Lanes;
use super::product::Chunk;
use super::tiles::{PANEL, STEP, TILE, TILE_ROWS};
use half::bf16;

/// One left tile row block against panels of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct DotRows {
    /// [k / 32][16 rows][32 k]
    pub(super) left: *const bf16,
    /// Rows that matter, at most 16.
    pub(super) rows: usize,
    /// Values from one step of `left` to the next.
    pub(super) left_step: usize,
    /// [k / 2][16 outputs][2 k], with `right_pair` values from pair to pair.
    pub(super) right: *const bf16,
    pub(super) right_pair: usize,
    /// Pairs of k.
    pub(super) pairs: usize,
    /// [16 rows][16 outputs]
    pub(super) result: *mut f32,
    /// Whether sums go on from what `result` holds, or start at zero.
    pub(super) accumulate: bool,
}

/// One panel for up to 16 rows.
#[inline(always)]
pub(super) unsafe fn dot_rows<L: Lanes>(dot: &DotRows) {
    let mut row = 0;
    // SAFETY: rows below `dot.rows`, as promised by the caller.
    unsafe {
        while row + L::ROWS <= dot.rows {
            match L::ROWS {
                8 => dot_some_rows::<L, 8>(dot, row),
                _ => dot_some_rows::<L, 4>(dot, row),
            }
            row += L::ROWS;
        }
        while row + 2 <= dot.rows {
            dot_some_rows::<L, 2>(dot, row);
            row += 2;
        }
        if row < dot.rows {
            dot_some_rows::<L, 1>(dot, row);
        }
    }
}

#[inline(always)]
unsafe fn dot_some_rows<L: Lanes, const ROWS: usize>(dot: &DotRows, first: usize) {
    const STEP_PAIRS: usize = STEP / 2;
    // SAFETY: all places lie inside the operands that the caller describes.
    unsafe {
        let mut sums = [L::splat(0.0); ROWS];
        if dot.accumulate {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = L::load(dot.result.add((first + index) * PANEL));
            }
        }
        let mut right = dot.right;
        let mut left = dot.left.add(first * STEP);
        let mut pairs = dot.pairs;
        while pairs > 0 {
            let here = pairs.min(STEP_PAIRS);
            for pair in 0..here {
                let weights = L::load_pairs(right);
                for (index, sum) in sums.iter_mut().enumerate() {
                    *sum = sum.dot_pairs(weights, L::splat_pair(left.add(index * STEP + 2 * pair)));
                }
                right = right.add(dot.right_pair);
            }
            left = left.add(dot.left_step);
            pairs -= here;
        }
        for (index, sum) in sums.into_iter().enumerate() {
            sum.store(dot.result.add((first + index) * PANEL));
        }
    }
}

#[inline(always)]
unsafe fn multiply_lanes<L: Lanes>(chunk: &Chunk) {
    for panel in 0..chunk.panels {
        for block in 0..chunk.rows.div_ceil(TILE_ROWS) {
            // SAFETY: blocks and panels inside the chunk that the caller describes.
            unsafe {
                dot_rows::<L>(&DotRows {
                    left: chunk.left.add(block * chunk.left_block),
                    rows: (chunk.rows - block * TILE_ROWS).min(TILE_ROWS),
                    left_step: TILE,
                    right: chunk.right.add(panel * chunk.right_panel),
                    right_pair: 2 * PANEL,
                    pairs: chunk.steps * STEP / 2,
                    result: chunk.result.add(chunk.result_tile(block, panel)),
                    accumulate: chunk.accumulate,
                });
            }
        }
    }
}

for_each_isa! {
    /// Multiplies one chunk of a product.
    fn multiply = multiply_lanes(chunk: &Chunk)
}
