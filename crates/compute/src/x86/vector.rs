//! Products without tiles: a row's pairs, one at a time, against sixteen outputs or twice sixteen.
//!
//! result[row][output] (+)= Σ over pairs of left[row][pair] · right[pair][output], where each sum is
//! one chain in the order of the pairs. It does not depend on the rows and panels it shares registers
//! with.

use super::panel_pass::PanelPass;
use super::simd::Simd;
use super::tiles::{PANEL, RESULT_TILE, ROWS_OF_PAIR, STEP, TILE, TILE_ROWS};
use half::bf16;

/// One left row block against one or two panels of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct DotRows {
    /// [k / 32][16 rows][32 k]
    pub(super) left: *const bf16,
    /// Rows that matter, at most 16.
    pub(super) rows: usize,
    /// [k / 2][16 outputs][2 k], with `right_pair` values from pair to pair.
    pub(super) right: *const bf16,
    pub(super) right_pair: usize,
    /// Values from one panel to the next, and how many panels there are: one or two.
    pub(super) right_panel: usize,
    pub(super) panels: usize,
    /// Pairs of k.
    pub(super) pairs: usize,
    /// [panel][16 rows][16 outputs]
    pub(super) result: *mut f32,
    /// Whether sums continue from what `result` holds, or start at zero.
    pub(super) accumulate: bool,
}

/// All rows and panels.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd>(dot: &DotRows) {
    // SAFETY: as promised by the caller.
    unsafe {
        if dot.panels == 2 && S::PANELS == 2 {
            return dot_panels::<S, 2>(dot);
        }
        for panel in 0..dot.panels {
            let right = dot.right.add(panel * dot.right_panel);
            let result = dot.result.add(panel * RESULT_TILE);
            dot_panels::<S, 1>(&DotRows { right, result, ..*dot });
        }
    }
}

#[inline(always)]
unsafe fn dot_panels<S: Simd, const PANELS: usize>(dot: &DotRows) {
    let mut row = 0;
    // SAFETY: rows below `dot.rows`, as promised by the caller.
    unsafe {
        while row + S::ROWS <= dot.rows {
            match S::ROWS {
                8 => dot_some_rows::<S, 8, PANELS>(dot, row),
                _ => dot_some_rows::<S, 4, PANELS>(dot, row),
            }
            row += S::ROWS;
        }
        while row + 2 <= dot.rows {
            dot_some_rows::<S, 2, PANELS>(dot, row);
            row += 2;
        }
        if row < dot.rows {
            dot_some_rows::<S, 1, PANELS>(dot, row);
        }
    }
}

#[inline(always)]
unsafe fn dot_some_rows<S: Simd, const ROWS: usize, const PANELS: usize>(
    dot: &DotRows,
    first: usize,
) {
    const STEP_PAIRS: usize = STEP / 2;
    // SAFETY: all places lie inside the operands that the caller describes.
    unsafe {
        let place =
            |row: usize, panel: usize| dot.result.add(panel * RESULT_TILE + (first + row) * PANEL);
        let mut sums = [[S::splat(0.0); PANELS]; ROWS];
        if dot.accumulate {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(place(row, panel));
                }
            }
        }
        let mut right = dot.right;
        let mut left = dot.left.add(first * STEP);
        let mut pairs = dot.pairs;
        while pairs > 0 {
            let here = pairs.min(STEP_PAIRS);
            for pair in 0..here {
                let mut weights = [S::load_pairs(right); PANELS];
                for (panel, weights) in weights.iter_mut().enumerate().skip(1) {
                    *weights = S::load_pairs(right.add(panel * dot.right_panel));
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let input = S::splat_pair(left.add(row * STEP + 2 * pair));
                    for (sum, &weights) in sums.iter_mut().zip(&weights) {
                        *sum = sum.dot_pairs(weights, input);
                    }
                }
                right = right.add(dot.right_pair);
            }
            left = left.add(TILE);
            pairs -= here;
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (panel, sum) in sums.into_iter().enumerate() {
                sum.store(place(row, panel));
            }
        }
    }
}

/// One pair of row blocks of a pass.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd>(pass: &PanelPass, pair: usize) {
    let rows = pass.rows.len() - pair * ROWS_OF_PAIR;
    for block in 0..rows.div_ceil(TILE_ROWS).min(2) {
        // SAFETY: the pass's operands are live, by the caller's promise; the results of a row block and
        // a pair of panels stand side by side.
        unsafe {
            dot_rows::<S>(&DotRows {
                left: pass.left.add((2 * pair + block) * pass.left_block),
                rows: (rows - block * TILE_ROWS).min(TILE_ROWS),
                right: pass.right[0],
                right_pair: 2 * PANEL,
                right_panel: pass.right[1].offset_from_unsigned(pass.right[0]),
                panels: 1 + usize::from(pass.right[1] != pass.right[0]),
                pairs: pass.steps * STEP / 2,
                result: pass.results(pair).add(2 * block * RESULT_TILE),
                accumulate: pass.accumulate,
            });
        }
    }
}
