//! Products without tiles: a row's pairs, one at a time, against sixteen outputs or twice sixteen.
//!
//! result[row][output] (+)= Σ over pairs of left[row][pair] · right[pair][output], where each sum is
//! one chain in the order of the pairs. It does not depend on the rows and panels it shares registers
//! with.

use super::panel_pass::PanelPass;
use super::simd::{RowsOfStep, Simd};
use super::tiles::{PANEL, RESULT_TILE, ROWS_OF_PAIR, STEP, TILE, TILE_ROWS};
use half::bf16;
use std::mem::MaybeUninit;

/// Rows that share registers if both row blocks of a pair are multiplied at once: twice twelve, and eight are left.
const ROWS_OF_BOTH: usize = 12;

/// Pairs of half a step, which stand side by side in a right operand.
pub(super) const HALF_PAIRS: usize = STEP / 4;

/// One left row block or two against one or two panels of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct DotRows<R> {
    /// [k / 32][16 rows][32 k], the last step whole.
    pub(super) left: *const bf16,
    /// Values from the first row block to the second.
    pub(super) left_block: usize,
    /// Rows that matter, at most 16 of each block.
    pub(super) rows: usize,
    /// Where half a step of a panel stands: [8][16 outputs][2 k], with `right_pair` values from pair to pair.
    pub(super) right: R,
    pub(super) right_pair: usize,
    /// How many panels there are: one or two.
    pub(super) panels: usize,
    /// Halves of steps.
    pub(super) halves: usize,
    /// [row block][2 panels][16 rows][16 outputs]
    pub(super) result: *mut f32,
    /// Whether sums continue from what `result` holds, or start at zero.
    pub(super) accumulate: bool,
}

/// All rows of one row block and all panels. `right` is asked for half a step and a panel.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd>(dot: &DotRows<impl Fn(usize, usize) -> *const bf16>) {
    // SAFETY: as promised by the caller.
    unsafe { dot_blocks::<S, false>(dot) };
}

/// The same of one row block, or of `BOTH`.
#[inline(always)]
unsafe fn dot_blocks<S: Simd, const BOTH: bool>(
    dot: &DotRows<impl Fn(usize, usize) -> *const bf16>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        if dot.panels == 2 && S::PANELS == 2 {
            return dot_panels::<S, 2, BOTH>(dot, 0);
        }
        for panel in 0..dot.panels {
            dot_panels::<S, 1, BOTH>(dot, panel);
        }
    }
}

/// So many panels from one on.
#[inline(always)]
unsafe fn dot_panels<S: Simd, const PANELS: usize, const BOTH: bool>(
    dot: &DotRows<impl Fn(usize, usize) -> *const bf16>,
    panel: usize,
) {
    let mut row = 0;
    // SAFETY: rows below `dot.rows`, as promised by the caller.
    unsafe {
        while BOTH && row + ROWS_OF_BOTH <= dot.rows {
            dot_some_rows::<S, ROWS_OF_BOTH, PANELS, BOTH>(dot, row, panel);
            row += ROWS_OF_BOTH;
        }
        while row + S::ROWS <= dot.rows {
            match S::ROWS {
                8 => dot_some_rows::<S, 8, PANELS, BOTH>(dot, row, panel),
                _ => dot_some_rows::<S, 6, PANELS, BOTH>(dot, row, panel),
            }
            row += S::ROWS;
        }
        while row + 4 <= dot.rows {
            dot_some_rows::<S, 4, PANELS, BOTH>(dot, row, panel);
            row += 4;
        }
        while row + 2 <= dot.rows {
            dot_some_rows::<S, 2, PANELS, BOTH>(dot, row, panel);
            row += 2;
        }
        if row < dot.rows {
            dot_some_rows::<S, 1, PANELS, BOTH>(dot, row, panel);
        }
    }
}

#[inline(always)]
unsafe fn dot_some_rows<S: Simd, const ROWS: usize, const PANELS: usize, const BOTH: bool>(
    dot: &DotRows<impl Fn(usize, usize) -> *const bf16>,
    first: usize,
    first_panel: usize,
) {
    // SAFETY: all places lie inside the operands that the caller describes.
    unsafe {
        let of_block = |row: usize| match BOTH {
            true => ((first + row) / TILE_ROWS, (first + row) % TILE_ROWS),
            false => (0, first + row),
        };
        let place = |row: usize, panel: usize| {
            let (block, row) = of_block(row);
            dot.result.add((2 * block + first_panel + panel) * RESULT_TILE + row * PANEL)
        };
        let left = |row: usize, step: usize| {
            let (block, row) = of_block(row);
            dot.left.add(block * dot.left_block + step * TILE + row * STEP)
        };
        let mut sums = [[S::splat(0.0); PANELS]; ROWS];
        if dot.accumulate {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(place(row, panel));
                }
            }
        }
        let mut room = RowsOfStep::<ROWS>(MaybeUninit::uninit());
        for step in (0..dot.halves).step_by(2) {
            let inputs = S::rows_of_step(|row| left(row, step / 2), &mut room);
            for half in step..(step + 2).min(dot.halves) {
                // Loops, not closures over vectors: one that is not inlined would lose the instruction set.
                let mut right = [(dot.right)(half, first_panel); PANELS];
                for (panel, right) in right.iter_mut().enumerate().skip(1) {
                    *right = (dot.right)(half, first_panel + panel);
                }
                for pair in (half - step) * HALF_PAIRS..(half - step + 1) * HALF_PAIRS {
                    let mut weights = [S::load_pairs(right[0]); PANELS];
                    for (panel, weights) in weights.iter_mut().enumerate().skip(1) {
                        *weights = S::load_pairs(right[panel]);
                    }
                    // With many rows, all first products before the second ones: it takes fewer registers.
                    let apart = ROWS == ROWS_OF_BOTH;
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let input = S::splat_pair(inputs.add(row * STEP), pair);
                        for (sum, &weights) in sums.iter_mut().zip(&weights) {
                            *sum = sum.dot_first(weights, input);
                            if !apart {
                                *sum = sum.dot_second(weights, input);
                            }
                        }
                    }
                    for (row, sums) in sums.iter_mut().enumerate().filter(|_| apart) {
                        let input = S::splat_pair(inputs.add(row * STEP), pair);
                        for (sum, &weights) in sums.iter_mut().zip(&weights) {
                            *sum = sum.dot_second(weights, input);
                        }
                    }
                    for right in &mut right {
                        *right = right.wrapping_add(dot.right_pair);
                    }
                }
            }
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
    let rows = (pass.rows.len() - pair * ROWS_OF_PAIR).min(ROWS_OF_PAIR);
    // SAFETY: the pass's operands are live, by the caller's promise.
    unsafe {
        let right = |half: usize, panel: usize| {
            pass.right[panel].wrapping_add(half * HALF_PAIRS * 2 * PANEL)
        };
        let both = DotRows {
            left: pass.left.add(2 * pair * pass.left_block),
            left_block: pass.left_block,
            rows,
            right,
            right_pair: 2 * PANEL,
            panels: 1 + usize::from(pass.right[1] != pass.right[0]),
            halves: 2 * pass.steps,
            result: pass.results(pair),
            accumulate: pass.accumulate,
        };
        if S::BOTH_BLOCKS && rows > TILE_ROWS {
            return dot_blocks::<S, true>(&both);
        }
        for block in 0..rows.div_ceil(TILE_ROWS) {
            dot_rows::<S>(&DotRows {
                left: both.left.add(block * pass.left_block),
                rows: (rows - block * TILE_ROWS).min(TILE_ROWS),
                result: both.result.add(2 * block * RESULT_TILE),
                ..both
            });
        }
    }
}
