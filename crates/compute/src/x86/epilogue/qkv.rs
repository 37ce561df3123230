//! The epilogue of q, k, v.

use super::{Epilogue, fetch};
use crate::rope::rotate;
use crate::source::HEAD_DIM_MAX;
use crate::x86::pack::head_order;
use crate::x86::panel_pass::{PanelGroup, RowResults};
use crate::x86::simd::Simd;
use crate::x86::tiles::PANEL;
use half::bf16;
use std::ops::Range;

/// Where a row's q, k, v go, and the cosines, then the sines, of its position.
#[derive(Clone, Copy)]
pub(in crate::x86) struct QkvTarget {
    pub(in crate::x86) values: *mut bf16,
    pub(in crate::x86) angles: *const f32,
}

// SAFETY: only the thread that has a panel writes the panel's values in a target.
unsafe impl Send for QkvTarget {}
// SAFETY: as above.
unsafe impl Sync for QkvTarget {}

/// Bias, head norms, rotary embedding and rounding of q, k, v. Panels of a head come in the order of [`head_order`].
/// Heads are `PLAIN` if there is neither bias nor norm and half a head is a whole number of panels. Most models'
/// heads are, and code that is woven into a product must be short.
pub(in crate::x86) struct FinishQkv<'a, const PLAIN: bool> {
    pub(in crate::x86) targets: &'a [QkvTarget],
    pub(in crate::x86) bias: Option<&'a [f32]>,
    pub(in crate::x86) head_norms: Option<&'a [Vec<f32>; 2]>,
    pub(in crate::x86) epsilon: f32,
    pub(in crate::x86) head_dim: usize,
    pub(in crate::x86) heads: usize,
    pub(in crate::x86) kv_heads: usize,
}

/// Whether a model's heads are plain.
pub(in crate::x86) fn heads_are_plain(head_dim: usize, bias: bool, head_norms: bool) -> bool {
    (head_dim / 2).is_multiple_of(PANEL) && !bias && !head_norms
}

impl<const PLAIN: bool> FinishQkv<'_, PLAIN> {
    /// Panels that must stay together because they are rotated or normed together.
    pub(in crate::x86) fn group(&self) -> usize {
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
pub(in crate::x86) struct QkvColumns {
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

    fn rows(&self, _: &QkvColumns, pair: Range<usize>) -> Self::Rows {
        self.targets[pair].as_ptr()
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        columns: &QkvColumns,
        targets: Self::Rows,
        results: RowResults,
    ) {
        // SAFETY: as promised by the caller: sixteen results in every panel, targets for the rows, room for all
        // heads in a target, and as many angles as a head has values.
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
