//! What happens to a product's results before they leave the thread's cache.

use super::for_each_isa;
use super::functions::silu;
use super::lanes::{LANES, Lanes};
use super::norm::sum_of_squares;
use super::product::Block;
use super::tiles::{PANEL, RowsMut};
use crate::memory::SharedMut;
use crate::rope::{Rope, rotate};
use half::bf16;
use std::mem::MaybeUninit;

/// Widest head the kernels cover.
pub(crate) const HEAD_DIM_MAX: usize = 512;

/// slab[row] += result
pub(super) struct AddResidual<'a> {
    /// (slab_rows, stride)
    pub(super) slab: SharedMut<'a, f32>,
    pub(super) stride: usize,
    /// Slab row of each row of the batch, none twice.
    pub(super) rows: &'a [usize],
}

#[inline(always)]
unsafe fn add_residual_lanes<L: Lanes>(block: &Block<'_>, add: &AddResidual<'_>) {
    for row in block.rows.clone() {
        let start = add.rows[row] * add.stride + block.panels.start * PANEL;
        // SAFETY: no other block has these rows and outputs.
        let residual = unsafe { add.slab.part(start, block.panels.len() * PANEL) };
        for (panel, residual) in block.panels.clone().zip(residual.chunks_exact_mut(PANEL)) {
            // SAFETY: sixteen results, sixteen values of the residual.
            unsafe {
                let residual = residual.as_mut_ptr();
                L::load(residual).add(L::load(block.at(row, panel))).store(residual);
            }
        }
    }
}

for_each_isa! {
    /// Adds results to the residual slab.
    fn add_residual = add_residual_lanes(block: &Block<'_>, add: &AddResidual<'_>)
}

/// into = gate · σ(gate) · up, where even panels are gates and odd ones ups.
#[inline(always)]
unsafe fn gate_lanes<L: Lanes>(block: &Block<'_>, into: &RowsMut<'_>) {
    for row in block.rows.clone() {
        for panel in block.panels.clone().step_by(2) {
            // SAFETY: units of two panels keep gate and up together; no other block has this place.
            unsafe {
                let (gate, up) = (L::load(block.at(row, panel)), L::load(block.at(row, panel + 1)));
                silu(gate).multiply(up).store_bf16(into.at(row, panel / 2 * PANEL));
            }
        }
    }
}

for_each_isa! {
    /// Gates the feed-forward's inner activations.
    fn gate = gate_lanes(block: &Block<'_>, into: &RowsMut<'_>)
}

/// Where a row's q, k, v go, and its position.
#[derive(Clone, Copy)]
pub(super) struct QkvTarget {
    pub(super) values: *mut bf16,
    pub(super) position: u32,
}

// SAFETY: every target is written by whoever has its heads, and nobody else.
unsafe impl Send for QkvTarget {}
// SAFETY: as above.
unsafe impl Sync for QkvTarget {}

/// Bias, head norms, rotary embedding and rounding of q, k, v.
pub(super) struct FinishQkv<'a> {
    pub(super) targets: &'a [QkvTarget],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) head_norms: Option<&'a [Vec<f32>; 2]>,
    pub(super) epsilon: f32,
    pub(super) rope: &'a Rope,
    pub(super) head_dim: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

#[inline(always)]
unsafe fn finish_qkv_lanes<L: Lanes>(block: &Block<'_>, finish: &FinishQkv<'_>) {
    let head_panels = finish.head_dim / PANEL;
    assert!(block.panels.start.is_multiple_of(head_panels), "heads stay together");
    let mut head_values = MaybeUninit::<[f32; HEAD_DIM_MAX]>::uninit();
    for row in block.rows.clone() {
        let target = finish.targets[row];
        for first_panel in block.panels.clone().step_by(head_panels) {
            // SAFETY: `head_dim` values are written before they are read; the target row has room
            // for all heads, and no other block has this one.
            unsafe {
                let values = head_values.as_mut_ptr().cast::<f32>();
                for index in 0..head_panels {
                    let mut value = L::load(block.at(row, first_panel + index));
                    if let Some(bias) = finish.bias {
                        value = value
                            .add(L::load(bias[(first_panel + index) * PANEL..][..PANEL].as_ptr()));
                    }
                    value.store(values.add(index * PANEL));
                }
                let values = std::slice::from_raw_parts_mut(values, finish.head_dim);
                finish_head::<L>(values, first_panel / head_panels, target.position, finish);
                for index in 0..head_panels {
                    let into = target.values.add((first_panel + index) * PANEL);
                    L::load(values[index * PANEL..].as_ptr()).store_bf16(into);
                }
            }
        }
    }
}

/// Norm and rotation of one head; values pass as they are.
#[inline(always)]
unsafe fn finish_head<L: Lanes>(
    values: &mut [f32],
    head: usize,
    position: u32,
    finish: &FinishQkv<'_>,
) {
    if head >= finish.heads + finish.kv_heads {
        return;
    }
    // SAFETY: `head_dim` values, a multiple of 16; weights and angles as wide as the head.
    unsafe {
        if let Some(norms) = finish.head_norms {
            let weights = &norms[usize::from(head >= finish.heads)];
            let mean = sum_of_squares::<L>(values.as_ptr(), values.len()) / values.len() as f32;
            let scale = L::splat(1.0 / (mean + finish.epsilon).sqrt());
            for (values, weights) in values.chunks_exact_mut(LANES).zip(weights.chunks_exact(LANES))
            {
                let normed =
                    L::load(values.as_ptr()).multiply(scale).multiply(L::load(weights.as_ptr()));
                normed.store(values.as_mut_ptr());
            }
        }
        let angles = finish.rope.at(position);
        if !angles.0.len().is_multiple_of(LANES) {
            return rotate(values, angles);
        }
        let (low, high) = values.split_at_mut(angles.0.len());
        for start in (0..low.len()).step_by(LANES) {
            let (cosine, sine) =
                (L::load(angles.0[start..].as_ptr()), L::load(angles.1[start..].as_ptr()));
            let (a, b) = (L::load(low[start..].as_ptr()), L::load(high[start..].as_ptr()));
            a.multiply(cosine).subtract(b.multiply(sine)).store(low[start..].as_mut_ptr());
            b.multiply(cosine).add(a.multiply(sine)).store(high[start..].as_mut_ptr());
        }
    }
}

for_each_isa! {
    /// Finishes q, k, v.
    fn finish_qkv = finish_qkv_lanes(block: &Block<'_>, finish: &FinishQkv<'_>)
}

/// Copies results into (rows, vocab) logits.
pub(super) fn store_logits(block: &Block<'_>, logits: &SharedMut<'_, f32>, vocab: usize) {
    for row in block.rows.clone() {
        for panel in block.panels.clone() {
            let len = PANEL.min(vocab - panel * PANEL);
            // SAFETY: sixteen results lie at the source; no other block has these logits.
            unsafe {
                let into = logits.part(row * vocab + panel * PANEL, len);
                std::ptr::copy_nonoverlapping(block.at(row, panel), into.as_mut_ptr(), len);
            }
        }
    }
}

/// A block's likeliest token of one row.
#[derive(Clone, Copy)]
pub(super) struct Best {
    pub(super) logit: f32,
    pub(super) token: u32,
}

impl Best {
    pub(super) const NONE: Self = Self { logit: f32::NEG_INFINITY, token: 0 };

    /// The better of the two; of equals, the lower token.
    pub(super) fn or(self, other: Self) -> Self {
        let other_wins =
            other.logit > self.logit || (other.logit == self.logit && other.token < self.token);
        if other_wins { other } else { self }
    }
}

/// The likeliest tokens of a block's rows into `bests`, (blocks, rows).
pub(super) struct FindBest<'a> {
    pub(super) bests: SharedMut<'a, Best>,
    pub(super) rows: usize,
    pub(super) vocab: usize,
}

#[inline(always)]
unsafe fn find_best_lanes<L: Lanes>(block: &Block<'_>, find: &FindBest<'_>) {
    for row in block.rows.clone() {
        let mut best = Best::NONE;
        let whole = (find.vocab / PANEL).min(block.panels.end);
        // SAFETY: sixteen results at every place; no other block has this row and number.
        unsafe {
            let mut logits = L::splat(f32::NEG_INFINITY);
            // Panels counted as f32, which is exact for any vocabulary.
            let mut panels = L::splat(block.panels.start as f32);
            for panel in block.panels.start..whole {
                let here = L::load(block.at(row, panel));
                panels = here.if_greater(logits, L::splat(panel as f32), panels);
                logits = here.if_greater(logits, here, logits);
            }
            for (lane, (logit, panel)) in
                logits.to_array().into_iter().zip(panels.to_array()).enumerate()
            {
                best = best.or(Best { logit, token: panel as u32 * PANEL as u32 + lane as u32 });
            }
            for panel in whole.max(block.panels.start)..block.panels.end {
                let logits =
                    std::slice::from_raw_parts(block.at(row, panel), find.vocab - panel * PANEL);
                for (token, &logit) in (panel as u32 * PANEL as u32..).zip(logits) {
                    best = best.or(Best { logit, token });
                }
            }
            find.bests.part(block.index * find.rows + row, 1)[0] = best;
        }
    }
}

for_each_isa! {
    /// Finds each row's likeliest token of a block.
    fn find_best = find_best_lanes(block: &Block<'_>, find: &FindBest<'_>)
}
