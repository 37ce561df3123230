//! Blocking of a product: which thread multiplies what, in pieces that fit its caches, and when the
//! epilogue sees the result.
//!
//! Whatever the blocking, an output is one chain of sums over k in order: pieces of k go on from
//! the f32 that the piece before left, so a row's bits depend on nothing but the row.

use super::amx::{self, Tiles};
use super::pack::Panels;
use super::tiles::{RESULT_TILE, Rows, STEP, TILE, TILE_ROWS};
use super::vector;
use crate::memory::{Memory, SharedMut};
use crate::{ComputeError, Isa, Threads};
use half::bf16;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows multiplied before the weights are read again.
const ROWS_MAX: usize = 512;
/// Values of a thread's block of results: half a MiB, a quarter of its second-level cache.
const RESULTS_MAX: usize = 128 << 10;
/// Values of the left operand used between two reads of it: another quarter.
const LEFT_MAX: usize = 256 << 10;
/// Steps of k in a piece, at least: fewer would spend too much on storing and loading results.
const STEPS_MIN: usize = 16;
/// Blocks for each thread, where there is enough to share: the last to finish is waited for.
const BLOCKS_PER_THREAD: usize = 4;

/// One piece of a product for the innermost loops.
pub(super) struct Chunk {
    /// First tile of the left operand, and values from one row block to the next.
    pub(super) left: *const bf16,
    pub(super) left_block: usize,
    pub(super) rows: usize,
    /// First step of the first panel, and values from one panel to the next.
    pub(super) right: *const bf16,
    pub(super) right_panel: usize,
    pub(super) panels: usize,
    /// Steps of k, at least one.
    pub(super) steps: usize,
    /// [row block][panel][16 rows][16 outputs]
    pub(super) result: *mut f32,
    /// Whether sums go on from what `result` holds, or start at zero.
    pub(super) accumulate: bool,
}

/// A finished block of results.
pub(super) struct Block<'a> {
    /// Rows of the batch; the first is a multiple of 16.
    pub(super) rows: Range<usize>,
    /// Panels of the weights.
    pub(super) panels: Range<usize>,
    /// The block's number among those with the same rows.
    pub(super) index: usize,
    /// [row block][panel][16 rows][16 outputs]
    values: &'a [f32],
}

impl Block<'_> {
    /// Sixteen results: row of the batch, panel of the weights.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, panel: usize) -> *const f32 {
        let (row, panel) = (row - self.rows.start, panel - self.panels.start);
        let tile = row / TILE_ROWS * self.panels.len() + panel;
        self.values[tile * RESULT_TILE + row % TILE_ROWS * 16..][..16].as_ptr()
    }
}

/// How products are run: the instruction set, the threads, and each thread's block of results.
pub(super) struct Multiplier {
    pub(super) isa: Isa,
    results: Vec<Memory<f32>>,
}

/// How the panels of a product are shared out.
pub(super) struct Blocking {
    rows: usize,
    steps: usize,
    /// Blocks of panels for each range of rows.
    pub(super) blocks: usize,
    unit: usize,
    units: usize,
}

impl Blocking {
    /// `unit` panels stay together.
    pub(super) fn new(rows: usize, weights: &Panels, unit: usize, threads: usize) -> Self {
        let units = weights.panels().div_ceil(unit);
        let padded = rows.min(ROWS_MAX).next_multiple_of(TILE_ROWS).max(TILE_ROWS);
        let units_max = (RESULTS_MAX / padded / 16 / unit).max(1);
        let blocks_min = units.div_ceil(units_max);
        let blocks =
            blocks_min.max(threads * BLOCKS_PER_THREAD).next_multiple_of(threads).min(units).max(1);
        let steps = (LEFT_MAX / padded / STEP).max(STEPS_MIN);
        Self { rows: ROWS_MAX, steps, blocks, unit, units }
    }

    fn panels(&self, block: usize, panels: usize) -> Range<usize> {
        let start = |block: usize| (block * self.units / self.blocks * self.unit).min(panels);
        start(block)..start(block + 1)
    }
}

impl Multiplier {
    /// Room for products with units of up to `unit_max` panels.
    pub(super) fn new(isa: Isa, threads: usize, unit_max: usize) -> Result<Self, ComputeError> {
        let room = RESULTS_MAX.max(ROWS_MAX * 16 * unit_max);
        let results: Result<_, _> =
            (0..threads).map(|_| Memory::zeroed("product results", room)).collect();
        Ok(Self { isa, results: results? })
    }

    /// Multiplies `rows` rows with all panels; `epilogue` sees each finished block once, on the
    /// thread that made it.
    pub(super) fn run(
        &mut self,
        threads: &Threads,
        left: Rows,
        rows: usize,
        weights: &Panels,
        blocking: &Blocking,
        epilogue: impl Fn(&Block<'_>) + Sync,
    ) {
        assert_eq!(left.steps, weights.steps(), "steps of the left operand and of the weights");
        let row_blocks = rows.div_ceil(blocking.rows);
        let tasks = row_blocks * blocking.blocks;
        let next = AtomicUsize::new(0);
        let isa = self.isa;
        let results = SharedMut::new(&mut self.results);
        threads.run(|thread, _| {
            // SAFETY: each thread has a result block of its own.
            let [results] = (unsafe { results.part(thread, 1) }) else {
                unreachable!("one was asked for")
            };
            // SAFETY: the constructor's caller made sure that the machine has the instruction set.
            let _tiles = (isa == Isa::Amx).then(|| unsafe { Tiles::whole() });
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                // Row blocks innermost: the next one finds the weights in a cache.
                let (block, row_block) = (task / row_blocks, task % row_blocks);
                let start = row_block * blocking.rows;
                let task = Task {
                    rows: start..(start + blocking.rows).min(rows),
                    panels: blocking.panels(block, weights.panels()),
                    index: block,
                    steps: blocking.steps,
                };
                task.multiply(isa, left, weights, results);
                epilogue(&Block {
                    rows: task.rows,
                    panels: task.panels,
                    index: task.index,
                    values: results,
                });
            }
        });
    }
}

/// One block of results to be made.
struct Task {
    rows: Range<usize>,
    panels: Range<usize>,
    index: usize,
    steps: usize,
}

impl Task {
    fn multiply(&self, isa: Isa, left: Rows, weights: &Panels, results: &mut [f32]) {
        let needed = self.rows.len().div_ceil(TILE_ROWS) * self.panels.len() * RESULT_TILE;
        assert!(needed <= results.len(), "{needed} results in a block of {}", results.len());
        if self.panels.is_empty() {
            return;
        }
        for start in (0..left.steps).step_by(self.steps) {
            let chunk = Chunk {
                // SAFETY: tiles inside the left operand; whoever made it has room for all rows.
                left: unsafe {
                    left.pointer.add((self.rows.start / TILE_ROWS * left.steps + start) * TILE)
                },
                left_block: left.steps * TILE,
                rows: self.rows.len(),
                // SAFETY: `panel` checks the panel; `start` is below its steps.
                right: unsafe { weights.panel(self.panels.start).add(start * TILE) },
                right_panel: weights.steps() * TILE,
                panels: self.panels.len(),
                steps: (left.steps - start).min(self.steps),
                result: results.as_mut_ptr(),
                accumulate: start > 0,
            };
            // SAFETY: the chunk lies inside its operands, and the machine has the instruction set.
            unsafe {
                match isa {
                    Isa::Amx => amx::multiply(&chunk),
                    _ => vector::multiply(isa, &chunk),
                }
            }
        }
    }
}
