//! What happens to a product's results before they leave the thread's cache: row by row, while the
//! next results are made.

mod qkv;

pub(super) use qkv::{FinishQkv, QkvTarget, heads_are_plain};

use super::functions::silu;
use super::panel_pass::{PanelGroup, RowResults};
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{PANEL, RowsMut, STEP, TILE_ROWS};
use crate::memory::SharedMut;
use glinthawk_flight::TOKEN_NONE;
use half::bf16;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::ptr;

/// What is done with a product's results.
pub(super) trait Epilogue: Sync {
    /// What all rows of a group have in common.
    type Columns;
    /// What the rows of a pair of row blocks have in common besides.
    type Rows: Copy;

    fn columns(&self, group: &PanelGroup) -> Self::Columns;

    /// For the pair that has these rows of the batch.
    fn rows(&self, columns: &Self::Columns, pair: Range<usize>) -> Self::Rows;

    /// Finishes one row of a group. This is woven into products and must be short.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; `columns` and `rows` were made by this epilogue for the group and
    /// the pair; the row is one of the pair; its results are there; no other thread has this row and group.
    unsafe fn finish<S: Simd>(
        &self,
        columns: &Self::Columns,
        rows: Self::Rows,
        results: RowResults,
    );
}

/// Fetches a line that will soon be needed into the second-level cache; the first has no room.
#[inline(always)]
fn fetch<T>(place: *const T) {
    // SAFETY: a prefetch changes nothing, wherever it points.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) };
}

/// slab[row] += result
pub(super) struct AddResidual<'a> {
    /// (slab_rows, stride)
    slab: SharedMut<'a, f32>,
    stride: usize,
    rows: &'a [usize],
}

impl<'a> AddResidual<'a> {
    /// `rows` are the slab rows of the batch, none twice.
    pub(super) fn new(slab: &'a mut [f32], stride: usize, rows: &'a [usize]) -> Self {
        let slab_rows = slab.len() / stride;
        assert!(rows.iter().all(|&row| row < slab_rows), "a row outside the slab");
        Self { slab: SharedMut::new(slab), stride, rows }
    }
}

impl Epilogue for AddResidual<'_> {
    /// Where the first slab row's values begin, and how many there are.
    type Columns = (*mut f32, usize);
    /// Slab rows of the pair, and those to be fetched meanwhile.
    type Rows = [*const usize; 2];

    fn columns(&self, group: &PanelGroup) -> Self::Columns {
        let (start, columns) = (group.panels.start * PANEL, group.panels.len() * PANEL);
        assert!(start + columns <= self.stride, "columns outside the slab");
        assert!(columns <= 2 * PANEL, "groups of two panels");
        (self.slab.place(start, columns), columns)
    }

    fn rows(&self, _: &Self::Columns, pair: Range<usize>) -> Self::Rows {
        // The next pair may be a short one. Then the rows before its end serve as well.
        let last = self.rows.len() - pair.len();
        let next = pair.end.min(last);
        [pair.clone(), next..next + pair.len()].map(|rows| self.rows[rows].as_ptr())
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        &(first, columns): &Self::Columns,
        [rows, next]: Self::Rows,
        results: RowResults,
    ) {
        // SAFETY: rows of the batch lie at both places; every slab row has these columns, sixteen values for each
        // panel, which no other thread touches.
        unsafe {
            let residual = first.add(*rows.add(results.row_of_pair()) * self.stride);
            // The same place in the next pair of row blocks.
            let ahead = first.add(*next.add(results.row_of_pair()) * self.stride);
            fetch(ahead);
            fetch(ahead.wrapping_add(PANEL));
            S::load(residual).add(S::load(results.of(0))).store(residual);
            if columns > PANEL {
                let residual = residual.add(PANEL);
                S::load(residual).add(S::load(results.of(1))).store(residual);
            }
        }
    }
}

/// into = gate · σ(gate) · up, where even panels are gates and odd ones ups.
pub(super) struct Gate<'a> {
    pub(super) into: RowsMut<'a>,
}

impl Epilogue for Gate<'_> {
    /// Where the first row's values go.
    type Columns = *mut bf16;
    /// Where the values of each block's first row go.
    type Rows = [*mut bf16; 2];

    fn columns(&self, group: &PanelGroup) -> Self::Columns {
        let column = group.panels.start / 2 * PANEL;
        self.into.at(0, column / STEP).wrapping_add(column % STEP)
    }

    fn rows(&self, &into: &Self::Columns, pair: Range<usize>) -> Self::Rows {
        let block = self.into.block_values();
        let into = into.wrapping_add(pair.start / TILE_ROWS * block);
        [into, into.wrapping_add(block)]
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, _: &Self::Columns, into: Self::Rows, results: RowResults) {
        // SAFETY: gate and up stay together; the rows' buffer has the row.
        unsafe {
            let (gate, up) = (S::load(results.of(0)), S::load(results.of(1)));
            silu(gate).multiply(up).store_bf16(into[results.block].add(results.row * STEP));
        }
    }
}

/// Copies results into (rows, vocab) logits.
pub(super) struct StoreLogits<'a> {
    pub(super) logits: SharedMut<'a, f32>,
    pub(super) vocab: usize,
}

impl Epilogue for StoreLogits<'_> {
    /// Tokens.
    type Columns = Range<usize>;
    /// The first row.
    type Rows = usize;

    fn columns(&self, group: &PanelGroup) -> Self::Columns {
        group.panels.start * PANEL..(group.panels.end * PANEL).min(self.vocab)
    }

    fn rows(&self, _: &Self::Columns, pair: Range<usize>) -> usize {
        pair.start
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, tokens: &Self::Columns, first: usize, results: RowResults) {
        let row = first + results.row_of_pair();
        let into = self.logits.place(row * self.vocab + tokens.start, tokens.len());
        for start in (0..tokens.len()).step_by(PANEL) {
            let len = PANEL.min(tokens.len() - start);
            // SAFETY: sixteen results lie at the source, and no other thread has these logits.
            unsafe { ptr::copy_nonoverlapping(results.of(start / PANEL), into.add(start), len) };
        }
    }
}

/// The largest logit seen in each lane of a row's panels, and in which panel it was.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Best {
    logits: [f32; SIMD_WIDTH],
    /// As f32, which is exact for the panel numbers of any vocabulary.
    panels: [f32; SIMD_WIDTH],
}

impl Best {
    pub(super) const NONE: Self =
        Self { logits: [f32::NEG_INFINITY; SIMD_WIDTH], panels: [0.0; SIMD_WIDTH] };

    /// The likeliest token and its logit, the lowest token among equals.
    pub(super) fn token(&self) -> (u32, f32) {
        let lanes = (0u32..).zip(self.logits.iter().zip(&self.panels));
        let possible = lanes.filter(|(_, (logit, _))| **logit > f32::NEG_INFINITY);
        let tokens =
            possible.map(|(lane, (&logit, &panel))| (panel as u32 * PANEL as u32 + lane, logit));
        tokens.fold(NOTHING, better)
    }
}

/// Less likely than any token.
pub(super) const NOTHING: (u32, f32) = (TOKEN_NONE, f32::NEG_INFINITY);

/// The likelier of two tokens; of equals, the lower.
pub(super) fn better(one: (u32, f32), other: (u32, f32)) -> (u32, f32) {
    let other_wins = other.1 > one.1 || (other.1 == one.1 && other.0 < one.0);
    if other_wins { other } else { one }
}

/// The likeliest tokens of a block's rows into `bests`, (tasks, rows).
pub(super) struct FindBest<'a> {
    pub(super) bests: SharedMut<'a, Best>,
    pub(super) rows: usize,
    pub(super) vocab: usize,
}

impl Epilogue for FindBest<'_> {
    /// First of the task's places, and panels.
    type Columns = (usize, Range<usize>);
    /// The first row's place.
    type Rows = usize;

    fn columns(&self, group: &PanelGroup) -> Self::Columns {
        (group.task * self.rows, group.panels.clone())
    }

    fn rows(&self, (start, _): &Self::Columns, pair: Range<usize>) -> usize {
        start + pair.start
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        (_, group): &Self::Columns,
        first: usize,
        results: RowResults,
    ) {
        // SAFETY: no other task has this row and number.
        let [best] = (unsafe { self.bests.part(first + results.row_of_pair(), 1) }) else {
            unreachable!("one was asked for")
        };
        // SAFETY: sixteen results at every place, sixteen lanes in the arrays.
        unsafe {
            let (mut logits, mut panels) =
                (S::load(best.logits.as_ptr()), S::load(best.panels.as_ptr()));
            for panel in group.clone() {
                let mut here = S::load(results.of(panel - group.start));
                if (panel + 1) * PANEL > self.vocab {
                    let mut lanes = here.to_array();
                    lanes[self.vocab % PANEL..].fill(f32::NEG_INFINITY);
                    here = S::load(lanes.as_ptr());
                }
                panels = here.if_greater(logits, S::splat(panel as f32), panels);
                logits = here.if_greater(logits, here, logits);
            }
            logits.store(best.logits.as_mut_ptr());
            panels.store(best.panels.as_mut_ptr());
        }
    }
}
