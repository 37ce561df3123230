//! The two layouts that every product shares, named for the AMX tiles they are made of.
//!
//! Left operands (activations, queries, softmax weights) are [row block][k / 32][16 rows][32 k].
//! Right operands (weights, keys, values) are panels of 16 outputs, [panel][k / 2][16 outputs][2 k].
//! Results are tiles of [16 rows][16 outputs] in f32.

use crate::ComputeError;
use crate::memory::{Arena, Memory};
use half::bf16;

/// Rows of a left tile and of a result tile.
pub(super) const TILE_ROWS: usize = 16;
/// Outputs of a panel.
pub(super) const PANEL: usize = 16;
/// k of one step: the depth of a tile.
pub(super) const STEP: usize = 32;
/// Values of one left tile, and of one step of a panel.
pub(super) const TILE: usize = TILE_ROWS * STEP;
/// Values of one result tile.
pub(super) const RESULT_TILE: usize = TILE_ROWS * PANEL;

/// The left operand of a product: rows of bf16, padded to whole tiles.
pub(super) struct Activations {
    steps: usize,
    values: Memory<bf16>,
}

impl Activations {
    /// Room for `rows` rows of up to `width` values.
    pub(super) fn new(arena: &mut Arena, rows: usize, width: usize) -> Result<Self, ComputeError> {
        let steps = width.div_ceil(STEP);
        let values = arena.zeroed("activations", rows.div_ceil(TILE_ROWS) * steps * TILE)?;
        Ok(Self { steps, values })
    }

    /// Says how wide the rows are from now on. The content is unspecified until every row, padding
    /// included, is written.
    pub(super) fn reshape(&mut self, width: usize) -> RowsMut<'_> {
        let steps = width.div_ceil(STEP);
        assert!(steps <= self.steps, "rows of {width} in a buffer of {} steps", self.steps);
        RowsMut {
            width,
            steps,
            pointer: self.values.as_mut_ptr(),
            borrow: std::marker::PhantomData,
        }
    }

    /// The rows as last written, `width` wide.
    pub(super) fn view(&self, width: usize) -> Rows {
        Rows { steps: width.div_ceil(STEP), pointer: self.values.as_ptr() }
    }
}

/// Rows of [`Activations`] being read.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) steps: usize,
    pub(super) pointer: *const bf16,
}

// SAFETY: only read.
unsafe impl Send for Rows {}
// SAFETY: only read.
unsafe impl Sync for Rows {}

/// Rows of [`Activations`] being written by several threads, each its own rows or columns.
pub(super) struct RowsMut<'a> {
    pub(super) width: usize,
    pub(super) steps: usize,
    pointer: *mut bf16,
    borrow: std::marker::PhantomData<&'a mut [bf16]>,
}

// SAFETY: writers promise to keep to disjoint places.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

impl RowsMut<'_> {
    /// Where column `column` (a multiple of 16) of a row stands; 16 values lie there together.
    #[inline(always)]
    pub(super) unsafe fn at(&self, row: usize, column: usize) -> *mut bf16 {
        debug_assert!(column < self.steps * STEP);
        let tile = row / TILE_ROWS * self.steps + column / STEP;
        // SAFETY: inside the buffer, by the caller's promise about `row`.
        unsafe { self.pointer.add(tile * TILE + row % TILE_ROWS * STEP + column % STEP) }
    }
}
