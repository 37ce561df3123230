//! Products without tiles: a row's pairs, one at a time, against sixteen outputs or twice sixteen.
//!
//! result[row][output] (+)= Σ over pairs of left[row][pair] · right[pair][output], where each sum is
//! one chain in the order of the pairs. It does not depend on the rows and panels it shares registers
//! with.

use super::for_each_isa;
use super::panel_pass::PanelPass;
use super::simd::Simd;
use super::tiles::{PANEL, RESULT_TILE, ROWS_OF_PAIR, Rows, STEP, TILE, TILE_ROWS};
use half::bf16;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;

/// Pairs of half a step, which stand side by side in a right operand.
pub(super) const HALF_PAIRS: usize = STEP / 4;
/// Values of a cache line of widened rows.
const LINE_WIDENED: usize = 16;
/// Weights are fetched so many values ahead: two steps of a panel.
const AHEAD: usize = 2 * STEP * PANEL;
/// Values of a pair of row blocks and a step.
pub(super) const STEP_OF_PAIR: usize = 2 * TILE;

/// Some rows against one or two panels of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct DotRows<V, R> {
    /// [k / 32][rows][32 k], the last step whole.
    pub(super) left: *const V,
    /// Values from step to step.
    pub(super) left_step: usize,
    /// Rows that matter, at most a pair of row blocks.
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
    /// Whether these rows are the first of their task that meet the panels, which may come from memory then.
    pub(super) first: bool,
}

/// All rows and all panels. `right` is asked for half a step and a panel. With `FETCH`, a step fetches what the next one
/// reads of widened rows, and the first rows fetch what follows in their panels.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd, const FETCH: bool>(
    dot: &DotRows<S::Value, impl Fn(usize, usize) -> *const bf16>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        if dot.panels == 2 && (S::PANELS == 2 || dot.rows <= S::ROWS_FEW) {
            return dot_panels::<S, FETCH, 2>(dot, 0);
        }
        for panel in 0..dot.panels {
            dot_panels::<S, FETCH, 1>(dot, panel);
        }
    }
}

/// Groups of rows that share registers: the first row of each, and how many there are.
#[inline(always)]
fn groups<S: Simd>(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let left = rows.min((first / S::SPAN + 1) * S::SPAN) - first;
        let count = match left {
            // Twice eight, rather than twelve and four; four and three or four, rather than six and one or two.
            TILE_ROWS if S::ROWS > 8 => 8,
            7..=8 if S::ROWS < 8 => 4,
            _ if left >= S::ROWS => S::ROWS,
            _ if left >= 8 => 8,
            _ if left >= 4 => 4,
            _ => left,
        };
        first += count;
        (count > 0).then_some((first - count, count))
    })
}

/// So many panels from one on.
#[inline(always)]
unsafe fn dot_panels<S: Simd, const FETCH: bool, const PANELS: usize>(
    dot: &DotRows<S::Value, impl Fn(usize, usize) -> *const bf16>,
    panel: usize,
) {
    for (first, count) in groups::<S>(dot.rows) {
        // SAFETY: rows below `dot.rows`, as promised by the caller.
        unsafe {
            match count {
                12 if S::ROWS == 12 => dot_group::<S, FETCH, 12, PANELS>(dot, first, panel),
                8 if S::ROWS >= 8 => dot_group::<S, FETCH, 8, PANELS>(dot, first, panel),
                6 if S::ROWS == 6 => dot_group::<S, FETCH, 6, PANELS>(dot, first, panel),
                4 => dot_group::<S, FETCH, 4, PANELS>(dot, first, panel),
                3 => dot_group::<S, FETCH, 3, PANELS>(dot, first, panel),
                2 => dot_group::<S, FETCH, 2, PANELS>(dot, first, panel),
                _ => dot_group::<S, FETCH, 1, PANELS>(dot, first, panel),
            }
        }
    }
}

#[inline(always)]
unsafe fn dot_group<S: Simd, const FETCH: bool, const ROWS: usize, const PANELS: usize>(
    dot: &DotRows<S::Value, impl Fn(usize, usize) -> *const bf16>,
    first: usize,
    first_panel: usize,
) {
    // SAFETY: all places lie inside the operands that the caller describes.
    unsafe {
        let place = |row: usize, panel: usize| {
            let (block, row) = ((first + row) / TILE_ROWS, (first + row) % TILE_ROWS);
            dot.result.add((2 * block + first_panel + panel) * RESULT_TILE + row * PANEL)
        };
        let fetches_weights = dot.first && first == 0;
        let mut sums = [[S::splat(0.0); PANELS]; ROWS];
        if dot.accumulate {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(place(row, panel));
                }
            }
        }
        for half in 0..dot.halves {
            let step = dot.left.wrapping_add(half / 2 * dot.left_step + first * STEP);
            let inputs = step.wrapping_add(half % 2 * 2 * HALF_PAIRS);
            // Loops, not closures over vectors: one that is not inlined would lose the instruction set.
            let mut right = [(dot.right)(half, first_panel); PANELS];
            for (panel, right) in right.iter_mut().enumerate().skip(1) {
                *right = (dot.right)(half, first_panel + panel);
            }
            for pair in 0..HALF_PAIRS {
                let row = half % 2 * HALF_PAIRS + pair;
                if FETCH && fetches_weights {
                    for right in right {
                        _mm_prefetch::<_MM_HINT_T0>(right.wrapping_add(AHEAD).cast());
                    }
                }
                if FETCH && S::WIDENS && row < ROWS {
                    let next = step.wrapping_add(dot.left_step + row * STEP);
                    _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(LINE_WIDENED).cast());
                }
                let mut weights = [S::load_pairs(right[0]); PANELS];
                for (panel, weights) in weights.iter_mut().enumerate().skip(1) {
                    *weights = S::load_pairs(right[panel]);
                }
                // All first products before the second ones: it takes fewer registers.
                for (row, sums) in sums.iter_mut().enumerate() {
                    let input = S::splat_pair(inputs.add(row * STEP), pair);
                    for (sum, &weights) in sums.iter_mut().zip(&weights) {
                        *sum = sum.dot_first(weights, input);
                    }
                }
                // With few rows, there are registers left for what was loaded.
                if S::WIDENS && ROWS > 4 {
                    for (panel, weights) in weights.iter_mut().enumerate() {
                        *weights = S::load_again(*weights, right[panel]);
                    }
                }
                for (row, sums) in sums.iter_mut().enumerate().filter(|_| S::WIDENS) {
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
        for (row, sums) in sums.into_iter().enumerate() {
            for (panel, sum) in sums.into_iter().enumerate() {
                sum.store(place(row, panel));
            }
        }
    }
}

#[inline(always)]
unsafe fn multiply_simd<S: Simd>(pass: &PanelPass, pair: usize) {
    let rows = (pass.rows.len() - pair * ROWS_OF_PAIR).min(ROWS_OF_PAIR);
    let right =
        |half: usize, panel: usize| pass.right[panel].wrapping_add(half * HALF_PAIRS * 2 * PANEL);
    let both = DotRows {
        left: pass.widened.wrapping_add(pair * pass.widened_pair).cast::<S::Value>(),
        left_step: STEP_OF_PAIR,
        rows,
        right,
        right_pair: 2 * PANEL,
        panels: 1 + usize::from(pass.right[1] != pass.right[0]),
        halves: 2 * pass.steps,
        result: pass.results(pair),
        accumulate: pass.accumulate,
        first: pair == 0,
    };
    // SAFETY: the pass's operands are live, by the caller's promise.
    unsafe {
        if S::WIDENS {
            return dot_rows::<S, true>(&both);
        }
        for block in 0..rows.div_ceil(TILE_ROWS) {
            dot_rows::<S, true>(&DotRows {
                left: pass.left.add((2 * pair + block) * pass.left_block).cast(),
                left_step: TILE,
                rows: (rows - block * TILE_ROWS).min(TILE_ROWS),
                result: both.result.add(2 * block * RESULT_TILE),
                first: both.first && block == 0,
                ..both
            });
        }
    }
}

for_each_isa! {
    /// Multiplies one pair of row blocks of a pass.
    fn multiply = multiply_simd(pass: &PanelPass, pair: usize)
}

#[inline(always)]
unsafe fn widen_simd<S: Simd>(
    left: Rows,
    rows: &Range<usize>,
    steps: &Range<usize>,
    into: *mut f32,
) {
    let first = rows.start / TILE_ROWS;
    for block in 0..rows.len().div_ceil(TILE_ROWS) {
        let pair = block / 2 * steps.len() * STEP_OF_PAIR;
        for (index, step) in steps.clone().enumerate() {
            let into = into.wrapping_add(pair + index * STEP_OF_PAIR + block % 2 * TILE);
            let tile = left.tile(first + block, step);
            for row in 0..(rows.len() - block * TILE_ROWS).min(TILE_ROWS) {
                // SAFETY: a row of a tile, and room for it, as promised by the caller.
                unsafe { S::copy_step(tile.add(row * STEP), into.add(row * STEP).cast()) };
            }
        }
    }
}

for_each_isa! {
    /// Widens some steps of some rows, which begin with a row block: [pair of row blocks][step][32 rows][32 k]. There is
    /// room for whole pairs. Only for instruction sets whose products read such rows.
    fn widen = widen_simd(left: Rows, rows: &Range<usize>, steps: &Range<usize>, into: *mut f32)
}
