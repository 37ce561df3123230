//! What happens to a product's results before they leave the thread's cache.

use super::for_each_isa;
use super::functions::silu;
use super::lanes::{LANES, Lanes};
use super::product::Block;
use super::tiles::{PANEL, RowsMut, STEP, TILE_ROWS};
use crate::memory::SharedMut;
use crate::rope::{Rope, rotate};
use crate::source::HEAD_DIM_MAX;
use half::bf16;

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
    for first_row in block.rows.clone().step_by(TILE_ROWS) {
        let last_row = (first_row + TILE_ROWS).min(block.rows.end);
        for panel in block.panels.clone() {
            let results = block.tile(first_row, panel);
            for (index, &row) in add.rows[first_row..last_row].iter().enumerate() {
                // SAFETY: no other block has these rows and outputs; sixteen values each.
                unsafe {
                    let residual = add.slab.place(row * add.stride + panel * PANEL, PANEL);
                    L::load(residual).add(L::load(results.add(index * PANEL))).store(residual);
                }
                block.fetch();
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
    for first_row in block.rows.clone().step_by(TILE_ROWS) {
        for panel in block.panels.clone().step_by(2) {
            let (gates, ups) = (block.tile(first_row, panel), block.tile(first_row, panel + 1));
            // SAFETY: units of two panels keep gate and up together; no other block has these
            // places; the rows' buffer holds whole row blocks, in which rows are a step apart.
            unsafe {
                let into = into.at(first_row, panel / 2 * PANEL);
                for row in 0..TILE_ROWS {
                    let (gate, up) =
                        (L::load(gates.add(row * PANEL)), L::load(ups.add(row * PANEL)));
                    silu(gate).multiply(up).store_bf16(into.add(row * STEP));
                    block.fetch();
                }
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
    for row in block.rows.clone() {
        for first in block.panels.clone().step_by(head_panels) {
            let head = Head { block, row, first, finish };
            // SAFETY: sixteen results lie in every panel; the target row has room for all heads,
            // and no other block has this one.
            unsafe { head.finish::<L>(first / head_panels) };
            block.fetch();
        }
    }
}

/// One head of one row.
struct Head<'a> {
    block: &'a Block<'a>,
    row: usize,
    /// Its first panel.
    first: usize,
    finish: &'a FinishQkv<'a>,
}

impl Head<'_> {
    #[inline(always)]
    unsafe fn finish<L: Lanes>(&self, head: usize) {
        let finish = self.finish;
        let panels = finish.head_dim / PANEL;
        let target = finish.targets[self.row];
        // SAFETY: as promised by the caller.
        unsafe {
            let into = |panel: usize| target.values.add((self.first + panel) * PANEL);
            if head >= finish.heads + finish.kv_heads {
                for panel in 0..panels {
                    self.biased::<L>(panel).store_bf16(into(panel));
                }
                return;
            }
            let norm = finish
                .head_norms
                .map(|norms| (&norms[usize::from(head >= finish.heads)], self.scale::<L>()));
            let value = |panel: usize| {
                let value = self.biased::<L>(panel);
                norm.map_or(value, |(weights, scale)| {
                    value
                        .multiply(scale)
                        .multiply(L::load(weights[panel * PANEL..][..PANEL].as_ptr()))
                })
            };
            let (cosines, sines) = finish.rope.at(target.position);
            if panels.is_multiple_of(2) {
                let half = panels / 2;
                for panel in 0..half {
                    let (a, b) = (value(panel), value(half + panel));
                    let cosine = L::load(cosines[panel * PANEL..][..PANEL].as_ptr());
                    let sine = L::load(sines[panel * PANEL..][..PANEL].as_ptr());
                    a.multiply(cosine).subtract(b.multiply(sine)).store_bf16(into(panel));
                    b.multiply(cosine).add(a.multiply(sine)).store_bf16(into(half + panel));
                }
                return;
            }
            // Pairs straddle vectors where half a head is not a whole number of them.
            let mut values = [0.0; HEAD_DIM_MAX];
            for (panel, values) in values.chunks_exact_mut(PANEL).enumerate().take(panels) {
                value(panel).store(values.as_mut_ptr());
            }
            rotate(&mut values[..finish.head_dim], (cosines, sines));
            for (panel, values) in values.chunks_exact(PANEL).enumerate().take(panels) {
                L::load(values.as_ptr()).store_bf16(into(panel));
            }
        }
    }

    /// Results of one panel, bias added.
    #[inline(always)]
    unsafe fn biased<L: Lanes>(&self, panel: usize) -> L {
        let panel = self.first + panel;
        // SAFETY: sixteen results, sixteen biases.
        unsafe {
            let value = L::load(self.block.at(self.row, panel));
            self.finish
                .bias
                .map_or(value, |bias| value.add(L::load(bias[panel * PANEL..][..PANEL].as_ptr())))
        }
    }

    /// 1 / √(mean x² + ε) over the head.
    #[inline(always)]
    unsafe fn scale<L: Lanes>(&self) -> L {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut sum = L::splat(0.0);
            for panel in 0..self.finish.head_dim / PANEL {
                let value = self.biased::<L>(panel);
                sum = value.multiply_add(value, sum);
            }
            L::splat(1.0 / (sum.sum() / self.finish.head_dim as f32 + self.finish.epsilon).sqrt())
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

/// The largest logit seen in each lane of a row's panels, and in which panel it was.
#[derive(Clone, Copy)]
pub(super) struct Best {
    logits: [f32; LANES],
    /// As f32, which counts exactly the panels of any vocabulary.
    panels: [f32; LANES],
}

impl Best {
    pub(super) const NONE: Self = Self { logits: [f32::NEG_INFINITY; LANES], panels: [0.0; LANES] };

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

#[inline(always)]
unsafe fn find_best_lanes<L: Lanes>(block: &Block<'_>, find: &FindBest<'_>) {
    for row in block.rows.clone() {
        block.fetch();
        // SAFETY: no other task has this row and number.
        let [best] = (unsafe { find.bests.part(block.index * find.rows + row, 1) }) else {
            unreachable!("one was asked for")
        };
        // SAFETY: sixteen results at every place, sixteen lanes in the arrays.
        unsafe {
            let (mut logits, mut panels) =
                (L::load(best.logits.as_ptr()), L::load(best.panels.as_ptr()));
            for panel in block.panels.clone() {
                let mut here = L::load(block.at(row, panel));
                if (panel + 1) * PANEL > find.vocab {
                    let mut lanes = here.to_array();
                    lanes[find.vocab % PANEL..].fill(f32::NEG_INFINITY);
                    here = L::load(lanes.as_ptr());
                }
                panels = here.if_greater(logits, L::splat(panel as f32), panels);
                logits = here.if_greater(logits, here, logits);
            }
            logits.store(best.logits.as_mut_ptr());
            panels.store(best.panels.as_mut_ptr());
        }
    }
}

for_each_isa! {
    /// Finds each row's likeliest token of a block.
    fn find_best = find_best_lanes(block: &Block<'_>, find: &FindBest<'_>)
}
