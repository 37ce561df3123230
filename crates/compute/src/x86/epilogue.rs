//! What happens to a product's results before they leave the thread's cache: row by row, while the
//! next results are made.

use super::functions::silu;
use super::pack::head_order;
use super::panel_pass::{PanelGroup, RowResults};
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{PANEL, ROWS_OF_PAIR, RowsMut, STEP, TILE_ROWS};
use crate::memory::SharedMut;
use crate::rope::rotate;
use crate::source::HEAD_DIM_MAX;
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

    /// For the pair that begins with this row of the batch.
    fn rows(&self, columns: &Self::Columns, first: usize) -> Self::Rows;

    /// Finishes one row of a group. This is woven into products and must be short.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; the results are there; no other thread has this
    /// row and group.
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
    /// Slab rows of the pair, and of the next one, or of this one if the next one is not whole.
    type Rows = [*const usize; 2];

    fn columns(&self, group: &PanelGroup) -> Self::Columns {
        let (start, columns) = (group.panels.start * PANEL, group.panels.len() * PANEL);
        assert!(start + columns <= self.stride, "columns outside the slab");
        assert!(columns <= 2 * PANEL, "groups of two panels");
        (self.slab.place(start, columns), columns)
    }

    fn rows(&self, _: &Self::Columns, first: usize) -> Self::Rows {
        let next = if first + 2 * ROWS_OF_PAIR <= self.rows.len() { ROWS_OF_PAIR } else { 0 };
        [first, first + next].map(|row| self.rows[row..].as_ptr())
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        &(first, columns): &Self::Columns,
        [rows, next]: Self::Rows,
        results: RowResults,
    ) {
        // SAFETY: rows of the batch lie at both places; every slab row has these columns, sixteen values for each panel,
        // which no other thread touches.
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

    fn rows(&self, &into: &Self::Columns, first: usize) -> Self::Rows {
        let block = self.into.block_values();
        let into = into.wrapping_add(first / TILE_ROWS * block);
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

/// Where a row's q, k, v go, and the cosines, then the sines, of its position.
#[derive(Clone, Copy)]
pub(super) struct QkvTarget {
    pub(super) values: *mut bf16,
    pub(super) angles: *const f32,
}

// SAFETY: only the thread that has a panel writes the panel's values in a target.
unsafe impl Send for QkvTarget {}
// SAFETY: as above.
unsafe impl Sync for QkvTarget {}

/// Bias, head norms, rotary embedding and rounding of q, k, v. Panels of a head come in the order of [`head_order`].
/// Heads are `PLAIN` if there is neither bias nor norm and half a head is a whole number of panels. Most models'
/// heads are, and code that is woven into a product must be short.
pub(super) struct FinishQkv<'a, const PLAIN: bool> {
    pub(super) targets: &'a [QkvTarget],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) head_norms: Option<&'a [Vec<f32>; 2]>,
    pub(super) epsilon: f32,
    pub(super) head_dim: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

/// Whether a model's heads are plain.
pub(super) fn heads_are_plain(head_dim: usize, bias: bool, head_norms: bool) -> bool {
    (head_dim / 2).is_multiple_of(PANEL) && !bias && !head_norms
}

impl<const PLAIN: bool> FinishQkv<'_, PLAIN> {
    /// Panels that must stay together because they are rotated or normed together.
    pub(super) fn group(&self) -> usize {
        let panels = self.head_dim / PANEL;
        if panels.is_multiple_of(2) && self.head_norms.is_none() { 2 } else { panels }
    }

    /// Results of one panel, bias added; `place` is the panel's in q, k, v.
    #[inline(always)]
    unsafe fn biased<S: Simd>(&self, results: RowResults, panel: usize, place: usize) -> S {
        // SAFETY: sixteen results, sixteen biases.
        unsafe {
            let value = S::load(results.of(panel));
            match self.bias {
                Some(bias) if !PLAIN => value.add(S::load(bias[place..][..PANEL].as_ptr())),
                _ => value,
            }
        }
    }

    /// What a complete head is multiplied by: 1 / √(mean x² + ε), and the norm's weights.
    #[inline(always)]
    unsafe fn head_norm<S: Simd>(&self, columns: &QkvColumns, results: RowResults) -> HeadNorm<S> {
        let norms = self.head_norms.filter(|_| columns.rotates && !PLAIN)?;
        let panels = self.head_dim / PANEL;
        // SAFETY: as promised by the caller.
        unsafe {
            let mut sum = S::splat(0.0);
            for panel in 0..panels {
                let at = columns.head_start + panel * PANEL;
                let value = self.biased::<S>(results, head_order(panel, panels), at);
                sum = value.multiply_add(value, sum);
            }
            let scale = S::splat(1.0 / (sum.sum() / self.head_dim as f32 + self.epsilon).sqrt());
            Some((scale, norms[usize::from(columns.of_kv)].as_ptr()))
        }
    }

    /// Normed results of the group's panel at place `at` in its head. (Not a closure, because a closure might not
    /// be compiled for the instruction set of `S`.)
    #[inline(always)]
    unsafe fn value<S: Simd>(
        &self,
        columns: &QkvColumns,
        results: RowResults,
        norm: HeadNorm<S>,
        panel: usize,
        at: usize,
    ) -> S {
        // SAFETY: as promised by the caller.
        unsafe {
            let value = self.biased::<S>(results, panel, columns.head_start + at);
            match norm {
                Some((scale, weights)) => value.multiply(scale).multiply(S::load(weights.add(at))),
                None => value,
            }
        }
    }

    /// A panel of the first half of a head, and the panel it is rotated with.
    #[inline(always)]
    unsafe fn finish_pair<S: Simd>(
        &self,
        columns: &QkvColumns,
        targets: *const QkvTarget,
        results: RowResults,
        norm: HeadNorm<S>,
        pair: usize,
    ) {
        let low = columns.low + pair * PANEL;
        let high = self.head_dim / 2 + low;
        // SAFETY: as promised by the caller.
        unsafe {
            let target = *targets.add(results.row_of_pair());
            let into = target.values.add(columns.head_start);
            // The same place in the next head.
            fetch(into.wrapping_add(self.head_dim + low));
            fetch(into.wrapping_add(self.head_dim + high));
            let a: S = self.value(columns, results, norm, 2 * pair, low);
            let b: S = self.value(columns, results, norm, 2 * pair + 1, high);
            if !columns.rotates {
                a.store_bf16(into.add(low));
                b.store_bf16(into.add(high));
                return;
            }
            let cosine = S::load(target.angles.add(low));
            let sine = S::load(target.angles.add(high));
            a.multiply(cosine).subtract(b.multiply(sine)).store_bf16(into.add(low));
            b.multiply(cosine).add(a.multiply(sine)).store_bf16(into.add(high));
        }
    }

    /// A head whose half is not a whole number of vectors, so that values rotated together straddle
    /// vectors.
    #[inline(always)]
    unsafe fn finish_odd<S: Simd>(
        &self,
        columns: &QkvColumns,
        targets: *const QkvTarget,
        results: RowResults,
        norm: HeadNorm<S>,
    ) {
        let mut values = [0.0; HEAD_DIM_MAX];
        let values = &mut values[..self.head_dim];
        // SAFETY: as promised by the caller.
        unsafe {
            let target = *targets.add(results.row_of_pair());
            for (panel, values) in values.chunks_exact_mut(PANEL).enumerate() {
                let value: S = self.value(columns, results, norm, panel, panel * PANEL);
                value.store(values.as_mut_ptr());
            }
            if columns.rotates {
                let angles = std::slice::from_raw_parts(target.angles, self.head_dim);
                rotate(values, angles);
            }
            for (panel, values) in values.chunks_exact(PANEL).enumerate() {
                let into = target.values.add(columns.head_start + panel * PANEL);
                S::load(values.as_ptr()).store_bf16(into);
            }
        }
    }
}

/// What a head's values are multiplied by, if it has a norm: a number, and the norm's weights.
type HeadNorm<S> = Option<(S, *const f32)>;

/// What a group is.
pub(super) struct QkvColumns {
    /// Where its head begins in q, k, v.
    head_start: usize,
    /// Place of its first panel in the first half of the head, and how many pairs it forms with the second half.
    low: usize,
    pairs: usize,
    /// Whether the head is one of q or k.
    rotates: bool,
    /// Whether the head is one of k or v.
    of_kv: bool,
}

impl<const PLAIN: bool> Epilogue for FinishQkv<'_, PLAIN> {
    type Columns = QkvColumns;
    /// Targets of the pair's rows.
    type Rows = *const QkvTarget;

    fn columns(&self, group: &PanelGroup) -> QkvColumns {
        let panels = self.head_dim / PANEL;
        let (head, first) = (group.panels.start / panels, group.panels.start % panels);
        QkvColumns {
            head_start: head * self.head_dim,
            low: first / 2 * PANEL,
            pairs: group.panels.len() / 2,
            rotates: head < self.heads + self.kv_heads,
            of_kv: head >= self.heads,
        }
    }

    fn rows(&self, _: &QkvColumns, first: usize) -> Self::Rows {
        self.targets[first..].as_ptr()
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        columns: &QkvColumns,
        targets: Self::Rows,
        results: RowResults,
    ) {
        // SAFETY: as promised by the caller: sixteen results in every panel, targets for the rows, room for all heads in
        // a target, and as many angles as a head has values.
        unsafe {
            if PLAIN {
                return self.finish_pair::<S>(columns, targets, results, None, 0);
            }
            let norm = self.head_norm::<S>(columns, results);
            if !(self.head_dim / 2).is_multiple_of(PANEL) {
                return self.finish_odd(columns, targets, results, norm);
            }
            for pair in 0..columns.pairs {
                self.finish_pair(columns, targets, results, norm, pair);
            }
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

    fn rows(&self, _: &Self::Columns, first: usize) -> usize {
        first
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
        let tokens =
            lanes.map(|(lane, (&logit, &panel))| (panel as u32 * PANEL as u32 + lane, logit));
        tokens.fold((0, f32::NEG_INFINITY), better)
    }
}

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

    fn rows(&self, (start, _): &Self::Columns, first: usize) -> usize {
        start + first
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
