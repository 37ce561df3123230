//! Blocking of a product: which thread multiplies what, in pieces that fit its caches, and when the
//! epilogue sees the results.
//!
//! With any blocking, an output is one chain of sums over k in order: each piece of k continues
//! from the f32 that the previous piece left. So a row's bits depend on the row alone.

use super::amx::{self, Tiles};
use super::delayed_epilogue::DelayedEpilogue;
use super::epilogue::Epilogue;
use super::for_each_isa;
use super::pack::Panels;
use super::panel_pass::{PanelGroup, PanelPass, RESULTS_OF_PAIR};
use super::simd::Simd;
use super::tiles::{
    PANEL, ROWS_OF_PAIR, Rows, STEP, STEPS_IN_CACHE, TILE, TILE_ROWS, steps_of_piece,
};
use super::vector::{self, STEP_OF_PAIR};
use crate::memory::{Arena, LINE_BYTES, Memory, SharedMut};
use crate::{ComputeError, Isa, Threads};
use half::bf16;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Steps of k at a time when weights are used once. A pair of panels is fetched before it is used
/// and must fit in the second-level cache (256 KiB of 2 MiB).
const STEPS_ONCE: usize = 128;
/// Bytes of the left operand that stay in the second-level cache, with all of k, if it is not widened.
const LEFT_BYTES: usize = 800 << 10;
/// The same, and a group's results, if that saves cutting the rows into ranges: weights are then read once, and the
/// ranges do not push each other out of the cache (of 2 MiB).
const UNCUT_BYTES: usize = 1600 << 10;
/// Rows at a time when the left operand does not stay in the cache. One piece of it, the next
/// piece, and the results of many panels share the second-level cache.
const ROWS_IN_PIECES: usize = 256;
/// The same where rows are widened to f32, for a second-level cache of 1 MiB, which two threads may share.
const ROWS_WIDENED: usize = 128;
/// Steps of widened pairs of row blocks that stay in it.
const WIDENED_STEPS: usize = ROWS_WIDENED / ROWS_OF_PAIR * STEPS_IN_CACHE;
/// Values of a thread's results: 512 KiB of its second-level cache.
const RESULTS_MAX: usize = 128 << 10;
/// Values of a cache line.
const LINE: usize = LINE_BYTES / size_of::<bf16>();
/// Blocks for each thread, if there is enough to share. More blocks shorten the wait for the last thread, and
/// consecutive ranges of rows find a block's weights in a cache.
const BLOCKS_PER_THREAD: usize = 4;

/// Rows of a part: from twice as many on, threads share out rows before they share out outputs. What a thread makes is then
/// in its own cache when the next kernel of the layer reads it. The price is that every part reads all weights.
const ROWS_OF_PART: usize = 128;
/// The same for weights that do not stay in any core's cache.
const ROWS_OF_LARGE_PART: usize = 192;
/// Bytes of such weights.
const WEIGHTS_LARGE: usize = 8 << 20;

/// Where a thread's share of the rows of a batch begins. Kernels that share out rows agree on it.
pub(super) fn share_start(rows: usize, thread: usize, threads: usize) -> usize {
    let run = if rows >= threads * ROWS_OF_PART { ROWS_OF_PAIR } else { TILE_ROWS / 2 };
    ((rows.div_ceil(run) * thread).div_ceil(threads) * run).min(rows)
}

/// How a product is cut into tasks, and a task into passes.
pub(super) struct Blocking {
    /// Rows of a task.
    rows: usize,
    /// Parts of the rows, and ranges of rows in a part. A part is one thread's, or shared by a few.
    parts: usize,
    ranges: usize,
    /// Steps of a piece of k.
    steps: usize,
    /// Whether the left operand stays in the cache with all of k, so that a few panels are finished
    /// before the next begin. Otherwise all panels of a task go through one piece of k before the
    /// next piece.
    stays: bool,
    /// Panels that stay together, and how many such groups there are.
    group: usize,
    groups: usize,
    /// Tasks for each range of rows.
    pub(super) blocks: usize,
    /// Whether rows are widened to f32.
    widens: bool,
}

impl Blocking {
    /// For `rows` rows; `group` panels stay together; `widens`: rows are widened to f32.
    fn new(rows: usize, weights: &Panels, group: usize, threads: usize, widens: bool) -> Self {
        let piece = steps_of_piece(rows, weights.steps());
        let steps = piece.div_ceil(piece.div_ceil(STEPS_ONCE));
        let row_bytes = weights.steps() * STEP * size_of::<bf16>();
        let pairs_max = match widens {
            true => WIDENED_STEPS / weights.steps(),
            false => (LEFT_BYTES / row_bytes / ROWS_OF_PAIR).max(1),
        };
        let rows_max = pairs_max * ROWS_OF_PAIR;
        let rows_in_pieces = if widens { ROWS_WIDENED } else { ROWS_IN_PIECES };
        let stays = steps == weights.steps() || rows.clamp(1, rows_in_pieces) <= rows_max;
        let bytes = weights.panels() * weights.steps() * TILE * size_of::<bf16>();
        let least = if bytes < WEIGHTS_LARGE { ROWS_OF_PART } else { ROWS_OF_LARGE_PART };
        let rows_of_part = rows.div_ceil((rows / least).clamp(1, threads));
        let result_bytes = group.next_multiple_of(2) * PANEL * size_of::<f32>();
        let uncut = !widens && stays && rows_of_part * (row_bytes + result_bytes) <= UNCUT_BYTES;
        let ranges = match uncut {
            true => 1,
            false => {
                let rows = if stays { rows_max.max(ROWS_OF_PAIR) } else { rows_in_pieces };
                rows_of_part.div_ceil(rows).max(1)
            }
        };
        // Even ranges, rather than a last one of few rows.
        let range = rows_of_part.div_ceil(ranges).next_multiple_of(ROWS_OF_PAIR).max(ROWS_OF_PAIR);
        let parts = rows.div_ceil(ranges * range).max(1);
        let rows = range;
        let groups = weights.panels().div_ceil(group);
        let group_results = rows * PANEL * group.next_multiple_of(2);
        let groups_max = if stays { groups } else { (RESULTS_MAX / group_results).max(1) };
        // A single thread with a single range of rows shares nothing and reuses nothing.
        let alone = threads == 1 && (ranges == 1 || widens);
        let share = if alone { 1 } else { threads * BLOCKS_PER_THREAD };
        let blocks = groups.div_ceil(groups_max).max(share.div_ceil(parts));
        let blocks = blocks.next_multiple_of(threads.div_ceil(parts)).min(groups).max(1);
        Self { rows, parts, ranges, steps, stays, group, groups, blocks, widens }
    }

    fn panels(&self, block: usize, panels: usize) -> Range<usize> {
        let start = |block: usize| (block * self.groups / self.blocks * self.group).min(panels);
        start(block)..start(block + 1)
    }
}

/// How products are run: the instruction set, and each thread's results.
pub(super) struct Multiplier {
    pub(super) isa: Isa,
    results: Vec<Memory<f32>>,
    /// Each thread's widened rows, if the instruction set has them widened.
    widened: Vec<Memory<f32>>,
    /// Tasks taken from each thread's share.
    taken: Vec<Taken>,
}

/// A counter with a cache line of its own.
#[repr(align(128))]
struct Taken(AtomicUsize);

impl Multiplier {
    /// Room for products with groups of up to `group_max` panels.
    pub(super) fn new(
        arena: &mut Arena,
        isa: Isa,
        threads: usize,
        group_max: usize,
    ) -> Result<Self, ComputeError> {
        let rows_max = LEFT_BYTES / (STEP * size_of::<bf16>());
        let room = RESULTS_MAX.max(rows_max * PANEL * group_max.next_multiple_of(2));
        let results: Result<_, _> =
            (0..threads).map(|_| arena.zeroed("product results", room)).collect();
        let room = if isa.widens() { WIDENED_STEPS.max(STEPS_ONCE) * STEP_OF_PAIR } else { 0 };
        let widened: Result<_, _> =
            (0..threads).map(|_| arena.zeroed("widened rows", room)).collect();
        let taken = (0..threads).map(|_| Taken(AtomicUsize::new(0))).collect();
        Ok(Self { isa, results: results?, widened: widened?, taken })
    }

    /// How a product of `rows` rows is cut; `group` panels stay together.
    pub(super) fn blocking(&self, rows: usize, weights: &Panels, group: usize) -> Blocking {
        Blocking::new(rows, weights, group, self.results.len(), self.isa.widens())
    }

    /// Multiplies `rows` rows with all panels; `epilogue` sees every result once, on the thread
    /// that made it.
    ///
    /// # Safety
    /// The machine has the instruction set; `epilogue` may be called for all rows and panels.
    pub(super) unsafe fn run(
        &mut self,
        threads: &Threads,
        left: Rows,
        rows: usize,
        weights: &Panels,
        blocking: &Blocking,
        epilogue: &impl Epilogue,
    ) {
        assert_eq!(left.steps(), weights.steps(), "steps of the left operand and of the weights");
        let whole = left.piece() == left.steps();
        assert!(whole || left.piece() == blocking.steps, "pieces of the left operand");
        let Blocking { ranges, blocks, .. } = *blocking;
        let tasks = blocking.parts * blocks * ranges;
        for taken in &mut self.taken {
            *taken.0.get_mut() = 0;
        }
        let (isa, taken) = (self.isa, &self.taken);
        let results = SharedMut::new(&mut self.results);
        let widened = SharedMut::new(&mut self.widened);
        threads.run(|thread, count| {
            // SAFETY: each thread has a result block of its own, and a block of widened rows.
            let ([results], [widened]) =
                (unsafe { (results.part(thread, 1), widened.part(thread, 1)) })
            else {
                unreachable!("one was asked for")
            };
            let mut widened = WidenedRows { rows: 0..0, steps: 0..0, values: widened };
            // SAFETY: the caller promised that the machine has the instruction set.
            let _tiles = (isa == Isa::Amx).then(|| unsafe { Tiles::whole() });
            // First its own tasks in order, so that the next one can be fetched ahead; then tasks
            // that others have left.
            for owner in (thread..count).chain(0..thread) {
                let share = owner * tasks / count..(owner + 1) * tasks / count;
                loop {
                    let number = share.start + taken[owner].0.fetch_add(1, Ordering::Relaxed);
                    if number >= share.end {
                        break;
                    }
                    // Part by part, with the ranges of a part innermost, or the blocks of a range, whose rows are then
                    // widened once.
                    let (part, number) = (number / (ranges * blocks), number % (ranges * blocks));
                    let (range, block) = match blocking.widens {
                        true => (number / blocks, number % blocks),
                        false => (number % ranges, number / ranges),
                    };
                    let start = (part * ranges + range) * blocking.rows;
                    let after = (part * ranges + (range + 1) % ranges) * blocking.rows;
                    if start >= rows {
                        continue;
                    }
                    let task = Task {
                        rows: start..(start + blocking.rows).min(rows),
                        panels: blocking.panels(block, weights.panels()),
                        number: block,
                        rows_after: if after < rows { after } else { start },
                        isa,
                        left,
                        weights,
                        blocking,
                    };
                    // SAFETY: as promised by the caller.
                    unsafe { task.run(results, &mut widened, epilogue) };
                }
            }
        });
    }
}

/// A thread's widened rows.
struct WidenedRows<'a> {
    rows: Range<usize>,
    steps: Range<usize>,
    values: &'a mut [f32],
}

impl WidenedRows<'_> {
    /// Widens these steps of these rows, if that has not been done.
    ///
    /// # Safety
    /// As `Multiplier::run`.
    unsafe fn hold(&mut self, isa: Isa, left: Rows, rows: &Range<usize>, steps: Range<usize>) {
        if (&self.rows, &self.steps) == (rows, &steps) {
            return;
        }
        (self.rows, self.steps) = (rows.clone(), steps);
        let used = rows.len().div_ceil(ROWS_OF_PAIR) * self.pair();
        assert!(used <= self.values.len(), "{used} widened values, more than there is room for");
        // SAFETY: as promised by the caller; there is room.
        unsafe { vector::widen(isa, left, rows, &self.steps, self.values.as_mut_ptr()) };
    }

    /// Values of a pair of row blocks.
    fn pair(&self) -> usize {
        self.steps.len() * STEP_OF_PAIR
    }

    /// Where those from a step on stand.
    fn from(&self, step: usize) -> *const f32 {
        self.values.as_ptr().wrapping_add((step - self.steps.start) * STEP_OF_PAIR)
    }
}

/// One block of results to be made.
struct Task<'a> {
    rows: Range<usize>,
    panels: Range<usize>,
    number: usize,
    /// First row of the task that probably comes next.
    rows_after: usize,
    isa: Isa,
    left: Rows,
    weights: &'a Panels,
    blocking: &'a Blocking,
}

/// Where a pass stands in its task.
struct PassRange {
    /// Panels that stay together, and how many pairs before them share the results.
    group: Range<usize>,
    pairs_before: usize,
    panels: Range<usize>,
    /// Steps of k.
    steps: Range<usize>,
}

/// `range` in pieces.
fn pieces(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..(start + len).min(end))
}

impl Task<'_> {
    /// All passes in order.
    fn ranges(&self) -> impl Iterator<Item = PassRange> {
        let Blocking { steps: piece, stays, group, .. } = *self.blocking;
        let steps = self.left.steps();
        let together = if stays { group } else { self.panels.len() };
        let group_pairs = group.div_ceil(2);
        pieces(self.panels.clone(), together.max(1)).flat_map(move |panels| {
            pieces(0..steps, piece).flat_map(move |steps| {
                pieces(panels.clone(), group).enumerate().flat_map(move |(index, group)| {
                    let (steps, pairs_before) = (steps.clone(), index * group_pairs);
                    pieces(group.clone(), 2).map(move |panels| PassRange {
                        group: group.clone(),
                        pairs_before,
                        panels,
                        steps: steps.clone(),
                    })
                })
            })
        })
    }

    /// # Safety
    /// As `Multiplier::run`.
    unsafe fn run(
        &self,
        results: &mut [f32],
        widened: &mut WidenedRows<'_>,
        epilogue: &impl Epilogue,
    ) {
        let mut delayed = DelayedEpilogue::none(epilogue);
        // SAFETY: passes lie inside their operands; the rest as promised by the caller.
        unsafe {
            self.passes(results, widened, &mut |pass| match self.isa {
                Isa::Amx => amx::multiply(pass, &mut delayed),
                isa => multiply_vectors(isa, pass, &mut delayed),
            });
            finish(self.isa, &mut delayed);
        }
    }

    /// Has each pass multiplied, in order. (Compiled once, not for every epilogue.)
    ///
    /// # Safety
    /// As `Multiplier::run`.
    unsafe fn passes(
        &self,
        results: &mut [f32],
        widened: &mut WidenedRows<'_>,
        multiply: &mut dyn FnMut(&PanelPass),
    ) {
        let results_pair = self.rows.len().div_ceil(ROWS_OF_PAIR) * RESULTS_OF_PAIR;
        let (room, results) = (results.len(), results.as_mut_ptr());
        let mut ranges = self.ranges().peekable();
        while let Some(range) = ranges.next() {
            let ahead = match ranges.peek() {
                Some(next) => self.right(next),
                None => [0, 1].map(|panel| self.weights.after(self.panels.end - 1 + panel)),
            };
            let last = range.steps.end == self.left.steps() && range.panels.end == range.group.end;
            let used = (range.pairs_before + range.group.len().div_ceil(2)) * results_pair;
            assert!(used <= room, "{used} results in room for {room}");
            let of_group = results.wrapping_add(range.pairs_before * results_pair);
            let pairs_in_group = (range.panels.start - range.group.start) / 2;
            if self.blocking.widens {
                let all = 0..self.left.steps();
                let steps = if self.blocking.stays { all } else { range.steps.clone() };
                // SAFETY: as promised by the caller.
                unsafe { widened.hold(self.isa, self.left, &self.rows, steps) };
            }
            let pass = PanelPass {
                widened: widened.from(range.steps.start),
                widened_pair: widened.pair(),
                left: self.left.tile(self.rows.start / TILE_ROWS, range.steps.start),
                left_block: self.left.piece() * TILE,
                rows: self.rows.clone(),
                right: self.right(&range),
                steps: range.steps.len(),
                accumulate: range.steps.start > 0,
                ahead,
                left_ahead: self.left_ahead(&range),
                results: of_group.wrapping_add(pairs_in_group * results_pair),
                one_pair: range.steps.len() == self.left.steps() && range.group.len() <= 2,
                finishes: last.then(|| {
                    (
                        PanelGroup { panels: range.group.clone(), task: self.number },
                        of_group.cast_const(),
                    )
                }),
            };
            multiply(&pass);
        }
    }

    /// This pass's part of the next piece of the left operand, which later passes need. Nothing, if
    /// the left operand stays in the cache.
    fn left_ahead(&self, range: &PassRange) -> Range<*const bf16> {
        let Blocking { steps: piece, stays, .. } = *self.blocking;
        let (row, step) = if range.steps.end < self.left.steps() {
            (self.rows.start, range.steps.end)
        } else {
            (self.rows_after, 0)
        };
        let first = self.left.tile(row / TILE_ROWS, step);
        if stays {
            return first..first;
        }
        let values = self.rows.len().div_ceil(TILE_ROWS) * piece * TILE;
        let share = |panel: usize| {
            let lines = values / LINE * (panel - self.panels.start) / self.panels.len();
            first.wrapping_add(lines * LINE)
        };
        share(range.panels.start)..share(range.panels.end)
    }

    /// The panels that a pass needs.
    fn right(&self, range: &PassRange) -> [*const bf16; 2] {
        // SAFETY: `panel` checks the panel; the piece begins inside it.
        [range.panels.start, range.panels.end - 1]
            .map(|panel| unsafe { self.weights.panel(panel).add(range.steps.start * TILE) })
    }
}

/// Multiplies a pass, and runs the epilogue of the groups that it finishes.
///
/// # Safety
/// As `Multiplier::run`.
unsafe fn multiply_vectors<E: Epilogue>(
    isa: Isa,
    pass: &PanelPass,
    delayed: &mut DelayedEpilogue<'_, E>,
) {
    for pair in 0..pass.pairs() {
        // SAFETY: as promised by the caller.
        unsafe {
            vector::multiply(isa, pass, pair);
            delayed.take(pass, pair);
            finish(isa, delayed);
        }
    }
}

#[inline(always)]
unsafe fn finish_simd<S: Simd, E: Epilogue>(delayed: &mut DelayedEpilogue<'_, E>) {
    // SAFETY: as promised by the caller.
    unsafe { delayed.finish::<S>() };
}

for_each_isa! {
    /// Finishes all remaining rows.
    fn finish<E: Epilogue> = finish_simd(delayed: &mut DelayedEpilogue<'_, E>)
}
