//! Blocking of a product: which thread multiplies what, in pieces that fit its caches, and when the
//! epilogue sees the result.
//!
//! Whatever the blocking, an output is one chain of sums over k in order: pieces of k go on from
//! the f32 that the piece before left, so a row's bits depend on nothing but the row.

use super::amx::{self, Tiles};
use super::pack::Panels;
use super::tiles::{PANEL, RESULT_TILE, Rows, TILE, TILE_ROWS};
use super::vector;
use crate::memory::{Arena, LINE_BYTES, Memory, SharedMut};
use crate::{ComputeError, Isa, Threads};
use half::bf16;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Steps of k for which a pair of panels stays in the first-level cache (40 KiB of 48).
const STEPS_IN_CACHE: usize = 20;
/// Steps of a piece where k is in several: a little less, because results pass through as well.
const STEPS_OF_PIECE: usize = 16;
/// Rows of one pair of row blocks: with no more, weights are used once and need not stay anywhere.
const ROWS_OF_PAIR: usize = 2 * TILE_ROWS;
/// Steps of k at a time where weights are used once: a pair of panels is fetched ahead of its use
/// and must fit the second-level cache (256 KiB of 2 MiB).
const STEPS_ONCE: usize = 128;
/// Bytes of the left operand that stay in the second-level cache where k is one piece.
const LEFT_BYTES: usize = 640 << 10;
/// Rows at a time where k is in pieces: the left operand's piece, the one after, and the results
/// share the second-level cache.
const ROWS_IN_PIECES: usize = 256;
/// Values of a thread's block of results: 768 KiB of its second-level cache.
const RESULTS_MAX: usize = 192 << 10;
/// Values that may be read past a block of results: one pair of row blocks and panels.
const RESULTS_PAST: usize = 4 * RESULT_TILE;
/// Rows with which the products are too short for all that comes after them to be fetched meanwhile, and the epilogues long
/// enough to help.
const ROWS_FETCH_LESS: Range<usize> = 96..160;
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
    /// As `result_tile` has it.
    pub(super) result: *mut f32,
    /// Whether sums go on from what `result` holds, or start at zero.
    pub(super) accumulate: bool,
    /// Weights wanted after the chunk's last panels, laid out as the chunk's own. May lie past the
    /// weights' end: it is for prefetches only.
    pub(super) after: *const bf16,
    /// Whether what comes after is in one piece, and the epilogue fetches what the products leave of it.
    pub(super) fetches_less: bool,
}

impl Chunk {
    /// A panel of the chunk, or of what comes after it.
    pub(super) fn panel(&self, panel: usize) -> *const bf16 {
        let whole = self.panels.next_multiple_of(2);
        let (first, panel) =
            if panel < whole { (self.right, panel) } else { (self.after, panel - whole) };
        first.wrapping_add(panel * self.right_panel)
    }

    /// Where a tile of results begins.
    pub(super) fn result_tile(&self, block: usize, panel: usize) -> usize {
        result_tile(self.rows, block, panel)
    }
}

/// Where the results of a row block and a panel begin, for a block of so many rows:
/// [pair of panels][pair of row blocks][2 row blocks][2 panels][16 rows][16 outputs].
#[inline(always)]
fn result_tile(rows: usize, block: usize, panel: usize) -> usize {
    let pair = panel / 2 * rows.div_ceil(ROWS_OF_PAIR) + block / 2;
    (4 * pair + 2 * (block % 2) + panel % 2) * RESULT_TILE
}

/// A finished block of results.
pub(super) struct Block<'a> {
    /// Rows of the batch; the first is a multiple of 16.
    pub(super) rows: Range<usize>,
    /// Panels of the weights.
    pub(super) panels: Range<usize>,
    /// The task's number among those with the same rows.
    pub(super) index: usize,
    /// As `result_tile` has it.
    values: &'a [f32],
    /// Weights that will be wanted next and are fetched little by little, up to an end.
    ahead: Cell<*const u8>,
    ahead_end: *const u8,
}

impl Block<'_> {
    /// Fetches a little more of what will be wanted next: an epilogue calls it now and then, for memory must not stand
    /// idle while it works.
    #[inline(always)]
    pub(super) fn fetch(&self) {
        let next = self.ahead.get();
        if next < self.ahead_end {
            // SAFETY: prefetches read nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(next.cast());
                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(LINE_BYTES).cast());
            }
            self.ahead.set(next.wrapping_add(2 * LINE_BYTES));
        }
    }

    /// Sixteen results: row of the batch, panel of the weights.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, panel: usize) -> *const f32 {
        let row_of_tile = (row - self.rows.start) % TILE_ROWS;
        self.tile(row - row_of_tile, panel).wrapping_add(row_of_tile * PANEL)
    }

    /// A whole tile, [16 rows][16 outputs], from its first row on. Rows past the block's last hold
    /// nothing of use, but are there.
    #[inline(always)]
    pub(super) fn tile(&self, row: usize, panel: usize) -> *const f32 {
        let (row, panel) = (row - self.rows.start, panel - self.panels.start);
        let tile = result_tile(self.rows.len(), row / TILE_ROWS, panel);
        self.values[tile..][..RESULT_TILE].as_ptr()
    }
}

/// How a product is cut into tasks, and a task into chunks.
pub(super) struct Blocking {
    /// Rows of a task.
    rows: usize,
    /// Steps of a piece of k.
    steps: usize,
    /// Whether k is one piece: then results need no place to wait for the next.
    whole: bool,
    /// Panels that stay together, and how many such units there are.
    unit: usize,
    units: usize,
    /// Tasks for each range of rows.
    pub(super) blocks: usize,
}

impl Blocking {
    /// For `rows` rows; `unit` panels stay together.
    pub(super) fn new(rows: usize, weights: &Panels, unit: usize, threads: usize) -> Self {
        let pieces = if rows <= ROWS_OF_PAIR {
            weights.steps().div_ceil(STEPS_ONCE)
        } else if weights.steps() <= STEPS_IN_CACHE {
            1
        } else {
            weights.steps().div_ceil(STEPS_OF_PIECE)
        };
        let whole = pieces == 1;
        let rows_max =
            if whole { LEFT_BYTES / (weights.steps() * TILE_ROWS) / 4 } else { ROWS_IN_PIECES };
        let rows_max = (rows_max / ROWS_OF_PAIR).max(1) * ROWS_OF_PAIR;
        // Even ranges, rather than a last one of few rows.
        let rows = rows
            .div_ceil(rows.div_ceil(rows_max).max(1))
            .next_multiple_of(ROWS_OF_PAIR)
            .max(ROWS_OF_PAIR);
        let units = weights.panels().div_ceil(unit);
        let units_max = if whole { units } else { (RESULTS_MAX / rows / PANEL / unit).max(1) };
        let blocks = units.div_ceil(units_max).max(threads * BLOCKS_PER_THREAD);
        let blocks = blocks.next_multiple_of(threads).min(units).max(1);
        Self { rows, steps: weights.steps().div_ceil(pieces), whole, unit, units, blocks }
    }

    fn panels(&self, block: usize, panels: usize) -> Range<usize> {
        let start = |block: usize| (block * self.units / self.blocks * self.unit).min(panels);
        start(block)..start(block + 1)
    }
}

/// How products are run: the instruction set, and each thread's block of results.
pub(super) struct Multiplier {
    pub(super) isa: Isa,
    results: Vec<Memory<f32>>,
    /// Tasks taken from each thread's share.
    taken: Vec<Taken>,
}

/// A counter with a cache line of its own.
#[repr(align(128))]
struct Taken(AtomicUsize);

impl Multiplier {
    /// Room for products with units of up to `unit_max` panels.
    pub(super) fn new(
        arena: &mut Arena,
        isa: Isa,
        threads: usize,
        unit_max: usize,
    ) -> Result<Self, ComputeError> {
        let rows_max = LEFT_BYTES / TILE_ROWS / 4;
        let room = RESULTS_MAX.max(rows_max * PANEL * unit_max.next_multiple_of(2)) + RESULTS_PAST;
        let results: Result<_, _> =
            (0..threads).map(|_| arena.zeroed("product results", room)).collect();
        let taken = (0..threads).map(|_| Taken(AtomicUsize::new(0))).collect();
        Ok(Self { isa, results: results?, taken })
    }

    /// Multiplies `rows` rows with all panels; `epilogue` sees every result once, in blocks, on the
    /// thread that made them.
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
        let row_ranges = rows.div_ceil(blocking.rows);
        let tasks = row_ranges * blocking.blocks;
        for taken in &mut self.taken {
            *taken.0.get_mut() = 0;
        }
        let (isa, taken) = (self.isa, &self.taken);
        let results = SharedMut::new(&mut self.results);
        threads.run(|thread, count| {
            // SAFETY: each thread has a result block of its own.
            let [results] = (unsafe { results.part(thread, 1) }) else {
                unreachable!("one was asked for")
            };
            // SAFETY: the constructor's caller made sure that the machine has the instruction set.
            let _tiles = (isa == Isa::Amx).then(|| unsafe { Tiles::whole() });
            // Its own share of the tasks in order, so that what follows can be fetched ahead; then
            // what others have left.
            for owner in (thread..count).chain(0..thread) {
                let share = owner * tasks / count..(owner + 1) * tasks / count;
                loop {
                    let number = share.start + taken[owner].0.fetch_add(1, Ordering::Relaxed);
                    if number >= share.end {
                        break;
                    }
                    // Row ranges innermost: the next one finds the weights in a cache.
                    let (block, range) = (number / row_ranges, number % row_ranges);
                    let start = range * blocking.rows;
                    let task = Task {
                        rows: start..(start + blocking.rows).min(rows),
                        panels: blocking.panels(block, weights.panels()),
                        index: block,
                        isa,
                        left,
                        weights,
                        blocking,
                    };
                    task.run(results, &epilogue);
                }
            }
        });
    }
}

/// One block of results to be made.
struct Task<'a> {
    rows: Range<usize>,
    panels: Range<usize>,
    index: usize,
    isa: Isa,
    left: Rows,
    weights: &'a Panels,
    blocking: &'a Blocking,
}

impl Task<'_> {
    fn run(&self, results: &mut [f32], epilogue: &impl Fn(&Block<'_>)) {
        if self.panels.is_empty() {
            return;
        }
        if !self.blocking.whole {
            for start in (0..self.left.steps).step_by(self.blocking.steps) {
                self.multiply(&self.panels, start, results);
            }
            epilogue(&self.block(self.panels.clone(), results, [ptr::null(); 2]));
            return;
        }
        let unit = self.blocking.unit.max(2);
        for panel in self.panels.clone().step_by(unit) {
            let panels = panel..(panel + unit).min(self.panels.end);
            let ahead = self.multiply(&panels, 0, results);
            epilogue(&self.block(panels, results, ahead));
        }
    }

    fn block<'a>(
        &self,
        panels: Range<usize>,
        values: &'a [f32],
        [ahead, ahead_end]: [*const u8; 2],
    ) -> Block<'a> {
        let (rows, index) = (self.rows.clone(), self.index);
        Block { rows, panels, index, values, ahead: Cell::new(ahead), ahead_end }
    }

    /// Multiplies all rows of the task, some panels and one piece of k. Returns what the epilogue should fetch meanwhile.
    fn multiply(&self, panels: &Range<usize>, start: usize, results: &mut [f32]) -> [*const u8; 2] {
        let (left, weights) = (self.left, self.weights);
        let needed =
            result_tile(self.rows.len(), 0, panels.len().next_multiple_of(2)) + RESULTS_PAST;
        assert!(needed <= results.len(), "{needed} results in a block of {}", results.len());
        let steps = (left.steps - start).min(self.blocking.steps);
        let right_panel = weights.steps() * TILE;
        let first = weights.panel(self.panels.start);
        // After these panels come the next ones, or the next piece of the task's first.
        let after = if start + steps < left.steps {
            first.wrapping_add((start + steps) * TILE)
        } else {
            first.wrapping_add((panels.end - self.panels.start) * right_panel)
        };
        let chunk = Chunk {
            // SAFETY: tiles inside the left operand; whoever made it has room for all rows.
            left: unsafe {
                left.pointer.add((self.rows.start / TILE_ROWS * left.steps + start) * TILE)
            },
            left_block: left.steps * TILE,
            rows: self.rows.len(),
            // SAFETY: `panel` checks the panel; `start` is below its steps.
            right: unsafe { weights.panel(panels.start).add(start * TILE) },
            right_panel,
            panels: panels.len(),
            steps,
            result: results.as_mut_ptr(),
            accumulate: start > 0,
            after,
            fetches_less: self.isa == Isa::Amx
                && self.blocking.whole
                && ROWS_FETCH_LESS.contains(&self.rows.len()),
        };
        // SAFETY: the chunk lies inside its operands, and the machine has the instruction set.
        unsafe {
            match self.isa {
                Isa::Amx => amx::multiply(&chunk),
                _ => vector::multiply(self.isa, &chunk),
            }
        }
        if !chunk.fetches_less {
            return [ptr::null(); 2];
        }
        let end = after.wrapping_add(2 * right_panel);
        [after.wrapping_byte_add(amx::fetched_bytes(&chunk)).cast(), end.cast()]
    }
}
