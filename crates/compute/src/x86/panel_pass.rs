//! Parts of a product: a pass of it, the group of panels it belongs to, and the results of one row.

use super::tiles::{RESULT_TILE, ROWS_OF_PAIR, TILE_ROWS};
use half::bf16;
use std::ops::Range;

/// Values of the results of a pair of row blocks and a pair of panels.
pub(super) const RESULTS_OF_PAIR: usize = 4 * RESULT_TILE;

/// All rows of a task against a pair of panels (or the single last panel), for a piece of k.
pub(super) struct PanelPass {
    /// First tile of the left operand, and values from one row block to the next.
    pub(super) left: *const bf16,
    pub(super) left_block: usize,
    /// The left operand widened, if the instruction set's products read it so: [pair of row blocks][k / 32][32 rows][32 k],
    /// and values from one pair to the next.
    pub(super) widened: *const f32,
    pub(super) widened_pair: usize,
    pub(super) rows: Range<usize>,
    /// The same one twice, if there is only one panel.
    pub(super) right: [*const bf16; 2],
    /// Steps of k, at least one.
    pub(super) steps: usize,
    /// Whether sums continue from the results so far, or start at zero.
    pub(super) accumulate: bool,
    /// The panels that the next pass needs. May lie past the weights' end: for prefetches only.
    pub(super) ahead: [*const bf16; 2],
    /// The part of the left operand that this pass should fetch for later passes, likewise.
    pub(super) left_ahead: Range<*const bf16>,
    /// [pair of row blocks][2 row blocks][2 panels][16 rows][16 outputs].
    pub(super) results: *mut f32,
    /// Whether all pairs have the same place for their results, one after the other.
    pub(super) one_pair: bool,
    /// The group that the pass finishes, and its results from the first pair of panels on.
    pub(super) finishes: Option<(PanelGroup, *const f32)>,
}

impl PanelPass {
    /// Pairs of row blocks; the last pair may lack its second block.
    pub(super) fn pairs(&self) -> usize {
        self.rows.len().div_ceil(ROWS_OF_PAIR)
    }

    /// Where the results of a pair of row blocks go.
    pub(super) fn results(&self, pair: usize) -> *mut f32 {
        self.results.wrapping_add(self.place(pair))
    }

    pub(super) fn place(&self, pair: usize) -> usize {
        if self.one_pair { 0 } else { pair * RESULTS_OF_PAIR }
    }
}

/// Panels of the weights that stay together, in one task.
pub(super) struct PanelGroup {
    pub(super) panels: Range<usize>,
    /// The task's number among those with the same rows.
    pub(super) task: usize,
}

/// Finished results of one row and a group.
#[derive(Clone, Copy)]
pub(super) struct RowResults {
    /// Row block of the pair, and row of the block.
    pub(super) block: usize,
    pub(super) row: usize,
    /// Results of the first pair of panels, and values from one to the next.
    pub(super) values: *const f32,
    pub(super) values_pair: usize,
}

impl RowResults {
    /// Row of the pair.
    #[inline(always)]
    pub(super) fn row_of_pair(&self) -> usize {
        self.block * TILE_ROWS + self.row
    }

    /// The sixteen results of one of the group's panels, counted from its first.
    #[inline(always)]
    pub(super) fn of(&self, panel: usize) -> *const f32 {
        self.values.wrapping_add(panel / 2 * self.values_pair + panel % 2 * RESULT_TILE)
    }
}
