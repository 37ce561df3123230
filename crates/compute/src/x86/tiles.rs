//! The two layouts that every product shares, named for the AMX tiles they are made of.
//!
//! Left operands (activations, queries, softmax weights) are [row block][k / 32][16 rows][32 k]; if a
//! product goes through k in pieces, its activations have this layout for one piece after the other.
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
/// Rows of one pair of row blocks. With no more rows than this, weights are used once and need not
/// stay in a cache.
pub(super) const ROWS_OF_PAIR: usize = 2 * TILE_ROWS;
/// Steps of k for which a pair of panels stays in the first-level cache (40 KiB of 48).
pub(super) const STEPS_IN_CACHE: usize = 20;
/// Steps of a piece if k is cut into several: fewer, because results pass through the cache as
/// well.
const STEPS_OF_PIECE: usize = 12;

/// Steps of k that stay together in a left operand of this many rows and steps.
pub(super) fn steps_of_piece(rows: usize, steps: usize) -> usize {
    if rows <= ROWS_OF_PAIR || steps <= STEPS_IN_CACHE {
        steps.max(1)
    } else {
        steps.div_ceil(steps.div_ceil(STEPS_OF_PIECE))
    }
}

/// The left operand of a product: rows of bf16, padded to whole tiles.
pub(super) struct Activations {
    shape: Shape,
    values: Memory<bf16>,
}

/// How many rows there are, how wide they are, and where their tiles stand.
#[derive(Clone, Copy)]
struct Shape {
    steps: usize,
    /// Steps that stay together: [piece][row block][step of the piece].
    piece: usize,
    blocks: usize,
}

impl Shape {
    fn new(rows: usize, width: usize) -> Self {
        let steps = width.div_ceil(STEP);
        Self { steps, piece: steps_of_piece(rows, steps), blocks: rows.div_ceil(TILE_ROWS) }
    }

    fn tiles(&self) -> usize {
        self.steps.next_multiple_of(self.piece) * self.blocks
    }

    #[inline(always)]
    fn tile(&self, block: usize, step: usize) -> usize {
        (step / self.piece * self.blocks + block) * self.piece + step % self.piece
    }
}

impl Activations {
    /// Room for `rows` rows of up to `width` values.
    pub(super) fn new(arena: &mut Arena, rows: usize, width: usize) -> Result<Self, ComputeError> {
        let shape = Shape::new(rows, width);
        // Pieces of another shape may leave as much as a piece unused in every row block.
        let room = shape.blocks * (shape.steps + STEPS_IN_CACHE) * TILE;
        Ok(Self { shape, values: arena.zeroed("activations", room)? })
    }

    /// Says how many rows there are, and how wide they are, from now on. The content is unspecified
    /// until every row, padding included, is written.
    pub(super) fn reshape(&mut self, rows: usize, width: usize) -> RowsMut<'_> {
        self.shape = Shape::new(rows, width);
        let room = self.values.len() / TILE;
        assert!(self.shape.tiles() <= room, "{rows} rows of {width} in a buffer of {room} tiles");
        let (shape, pointer) = (self.shape, self.values.as_mut_ptr());
        RowsMut { width, shape, pointer, borrow: std::marker::PhantomData }
    }

    /// The rows as last written.
    pub(super) fn view(&self) -> Rows {
        Rows { shape: self.shape, pointer: self.values.as_ptr() }
    }
}

/// Rows of [`Activations`] being read.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    shape: Shape,
    pointer: *const bf16,
}

// SAFETY: only read.
unsafe impl Send for Rows {}
// SAFETY: only read.
unsafe impl Sync for Rows {}

impl Rows {
    pub(super) fn steps(&self) -> usize {
        self.shape.steps
    }

    /// Steps that stay together.
    pub(super) fn piece(&self) -> usize {
        self.shape.piece
    }

    /// Where a tile stands. The tiles of later steps in the same piece follow it, and then those of the
    /// next row block.
    pub(super) fn tile(&self, block: usize, step: usize) -> *const bf16 {
        self.pointer.wrapping_add(self.shape.tile(block, step) * TILE)
    }
}

/// Rows of [`Activations`] being written by several threads, each its own rows or columns.
pub(super) struct RowsMut<'a> {
    pub(super) width: usize,
    shape: Shape,
    pointer: *mut bf16,
    borrow: std::marker::PhantomData<&'a mut [bf16]>,
}

// SAFETY: writers promise to keep to disjoint places.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

impl RowsMut<'_> {
    pub(super) fn steps(&self) -> usize {
        self.shape.steps
    }

    /// Where the 32 values of a row and a step stand. Those of the next row block stand `block_values`
    /// further.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, step: usize) -> *mut bf16 {
        debug_assert!(step < self.shape.steps);
        let tile = self.shape.tile(row / TILE_ROWS, step);
        self.pointer.wrapping_add(tile * TILE + row % TILE_ROWS * STEP)
    }

    /// Where the steps of a row stand, one after the other. (To find each by its number would take a division.)
    #[inline(always)]
    pub(super) fn places(&self, row: usize) -> impl Iterator<Item = *mut bf16> {
        let Shape { steps, piece, blocks } = self.shape;
        let first = self.at(row, 0);
        (0..steps.div_ceil(piece)).flat_map(move |index| {
            let first = first.wrapping_add(index * blocks * piece * TILE);
            (0..piece.min(steps - index * piece)).map(move |step| first.wrapping_add(step * TILE))
        })
    }

    /// Clears the last step of all rows if only a part of it will be written. The weights there are 0, but what an earlier
    /// batch left there may be NaN.
    pub(super) fn clear_padding(&self) {
        if self.width.is_multiple_of(STEP) {
            return;
        }
        for block in 0..self.shape.blocks {
            let tile = self.shape.tile(block, self.shape.steps - 1);
            // SAFETY: a whole tile of the buffer, which nothing else uses yet.
            unsafe { self.pointer.add(tile * TILE).write_bytes(0, TILE) };
        }
    }

    /// Values from one row block to the next.
    pub(super) fn block_values(&self) -> usize {
        self.shape.piece * TILE
    }
}
