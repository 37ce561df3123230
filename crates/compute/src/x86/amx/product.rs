//! The innermost loop of a product on tiles. While the tiles multiply, the core runs the epilogue
//! of the previous results.

use super::{ROW_BYTES, clear, load, multiply_tiles, store};
use crate::memory::LINE_BYTES;
use crate::x86::delayed_epilogue::DelayedEpilogue;
use crate::x86::epilogue::Epilogue;
use crate::x86::panel_pass::PanelPass;
use crate::x86::simd::ZmmBf16;
use crate::x86::tiles::{RESULT_TILE, TILE, TILE_ROWS};
use half::bf16;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

/// Cache lines of a tile.
const TILE_LINES: usize = TILE_ROWS;
/// Lines of the next pair's partial results that a step fetches when k is in pieces: all 64 in a piece of 12 steps.
const RESULT_LINES_IN_STEP: usize = 6;

/// Multiplies a pass, and starts the epilogue of the results that it finishes.
///
/// # Safety
/// Tiles are configured whole on this thread; the pass describes live operands, and its
/// rows are backed by whole row blocks; the epilogue may be called for the finished results.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
pub(in crate::x86) unsafe fn multiply<E: Epilogue>(
    pass: &PanelPass,
    delayed: &mut DelayedEpilogue<'_, E>,
) {
    let mut ahead = Ahead::new(pass);
    let blocks = pass.rows.len().div_ceil(TILE_ROWS);
    // SAFETY: as promised by the caller.
    unsafe {
        match blocks {
            1 => {
                begin::<true>(pass);
                multiply_pair::<E, 1, true, 0>(pass, 0, &mut ahead, delayed);
            }
            2 => {
                begin::<true>(pass);
                multiply_pair::<E, 2, true, 0>(pass, 0, &mut ahead, delayed);
            }
            _ => {
                begin::<false>(pass);
                for pair in 0..blocks / 2 {
                    match ahead.few_lines() {
                        Some(1) => multiply_pair::<E, 2, false, 1>(pass, pair, &mut ahead, delayed),
                        Some(2) => multiply_pair::<E, 2, false, 2>(pass, pair, &mut ahead, delayed),
                        _ => multiply_pair::<E, 2, false, 0>(pass, pair, &mut ahead, delayed),
                    }
                }
                if !blocks.is_multiple_of(2) {
                    multiply_pair::<E, 1, false, 0>(pass, blocks / 2, &mut ahead, delayed);
                }
            }
        }
    }
}

/// What is fetched little by little: where the next lines are, and how many of them a step fetches.
struct Ahead {
    /// Of each panel that the next pass needs.
    next: [*const u8; 2],
    lines: usize,
    /// Of the left operand.
    left: Range<*const u8>,
    left_lines: usize,
}

impl Ahead {
    /// The fewest lines per step that fetch all of the next panels while the current ones meet all rows.
    /// With many rows this rounds up and runs on into the panels after those.
    fn new(pass: &PanelPass) -> Self {
        let next = pass.ahead.map(|panel| panel.cast::<u8>());
        let left = pass.left_ahead.start.cast::<u8>()..pass.left_ahead.end.cast::<u8>();
        let left_lines = (left.end.addr() - left.start.addr()) / LINE_BYTES;
        let left_lines = left_lines.div_ceil(pass.pairs() * (pass.steps - 1).max(1));
        Self { next, lines: TILE_LINES.div_ceil(pass.pairs()), left, left_lines }
    }

    /// Lines of each panel that a step fetches, if they are one or two and all that it fetches. Large batches have so
    /// few, and no time for a loop.
    fn few_lines(&self) -> Option<usize> {
        (self.left_lines == 0 && self.lines <= 2).then_some(self.lines)
    }

    #[inline(always)]
    fn fetch_left(&mut self) {
        for _ in 0..self.left_lines {
            if self.left.start < self.left.end {
                // SAFETY: a prefetch reads nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.left.start.cast()) };
                self.left.start = self.left.start.wrapping_add(LINE_BYTES);
            }
        }
    }

    /// Fetches a step's lines of one panel: `LINES` if that is not 0.
    #[inline(always)]
    fn fetch<const LINES: usize>(&mut self, panel: usize) {
        let lines = if LINES > 0 { LINES } else { self.lines };
        let next = self.next[panel];
        for line in 0..lines {
            // SAFETY: a prefetch reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * LINE_BYTES).cast()) };
        }
        self.next[panel] = next.wrapping_add(lines * LINE_BYTES);
    }
}

/// Loads a left tile: it streams, unless weights are used only `ONCE`.
macro_rules! load_left {
    ($tile:literal, $from:expr) => {
        if ONCE {
            load!($tile, $from, ROW_BYTES)
        } else {
            load!("tileloaddt1", $tile, $from, ROW_BYTES)
        }
    };
}
/// Loads a right tile: it is used again soon, unless weights are used only `ONCE`.
macro_rules! load_right {
    ($tile:literal, $from:expr) => {
        if ONCE {
            load!("tileloaddt1", $tile, $from, ROW_BYTES)
        } else {
            load!($tile, $from, ROW_BYTES)
        }
    };
}

/// Sets a result tile to its value before the first product.
macro_rules! begin_result {
    ($pass:expr, $tile:literal, $from:expr) => {
        if $pass.accumulate { load!($tile, $from, ROW_BYTES) } else { clear!($tile) }
    };
}

/// Where the two row blocks of a pair begin; the first one twice if there is no second.
fn left_of(pass: &PanelPass, pair: usize) -> [*const bf16; 2] {
    let first = pass.left.wrapping_add(2 * pair * pass.left_block);
    let two = (2 * pair + 1) * TILE_ROWS < pass.rows.len();
    [first, if two { first.wrapping_add(pass.left_block) } else { first }]
}

/// Loads all tiles for the first products of the first pair of row blocks.
#[inline(always)]
unsafe fn begin<const ONCE: bool>(pass: &PanelPass) {
    let (results, left) = (pass.results(0), left_of(pass, 0));
    // SAFETY: as promised by the caller of `multiply`; there is room for all results of a pair.
    unsafe {
        begin_result!(pass, "0", results);
        begin_result!(pass, "1", results.add(RESULT_TILE));
        begin_result!(pass, "2", results.add(2 * RESULT_TILE));
        begin_result!(pass, "3", results.add(3 * RESULT_TILE));
        load_left!("4", left[0]);
        load_right!("6", pass.right[0]);
        load_right!("7", pass.right[1]);
        load_left!("5", left[1]);
    }
}

/// Multiplies one pair of row blocks, or the single last block, which `begin` or the previous pair has
/// begun. Tiles 0 to 3 are results, 4 and 5 left, 6 and 7 right operands.
///
/// One operand is used again by the next pair of row blocks (or by the next pass, if weights are used
/// only `ONCE`) and should stay in the first-level cache. The other streams through: `tileloaddt1` leaves
/// that cache alone. Tiles are loaded a step ahead, among the products of the step before, which costs
/// least on cores where loads and products do not overlap by themselves. The products of a step take 64
/// cycles and almost none of the core's time. Between them, the core fetches a few lines of the next
/// panels and finishes a few rows of the previous results. `LINES` lines of each panel are all that a step fetches;
/// if it is 0, `ahead` says what.
#[inline(always)]
unsafe fn multiply_pair<E: Epilogue, const BLOCKS: usize, const ONCE: bool, const LINES: usize>(
    pass: &PanelPass,
    pair: usize,
    ahead: &mut Ahead,
    delayed: &mut DelayedEpilogue<'_, E>,
) {
    let [mut left, mut left_second] = left_of(pass, pair);
    let [mut right, mut right_second] = pass.right;
    let (results, next_results) = (pass.results(pair), pass.results(pair + 1));
    let mut results_ahead = next_results.cast::<u8>();
    let each = TILE_ROWS.div_ceil((pass.steps - 1).max(1));
    // SAFETY: as promised by the caller of `multiply`; places are those of the pass's operands.
    unsafe {
        let mut finished = 0;
        for _ in 1..pass.steps {
            left = left.add(TILE);
            left_second = left_second.add(TILE);
            right = right.add(TILE);
            right_second = right_second.add(TILE);
            multiply_tiles!("0", "4", "6");
            multiply_tiles!("1", "4", "7");
            load_left!("4", left);
            ahead.fetch::<LINES>(0);
            if BLOCKS == 2 {
                multiply_tiles!("2", "5", "6");
                load_right!("6", right);
                multiply_tiles!("3", "5", "7");
                load_left!("5", left_second);
            } else {
                load_right!("6", right);
            }
            load_right!("7", right_second);
            ahead.fetch::<LINES>(1);
            if LINES == 0 {
                ahead.fetch_left();
            }
            if pass.accumulate && !ONCE {
                for line in 0..RESULT_LINES_IN_STEP {
                    let line = results_ahead.wrapping_add(line * LINE_BYTES);
                    _mm_prefetch::<_MM_HINT_T0>(line.cast());
                }
                results_ahead = results_ahead.wrapping_add(RESULT_LINES_IN_STEP * LINE_BYTES);
            }
            delayed.finish_some::<ZmmBf16>(finished..finished + each);
            finished += each;
        }
        // These results may overwrite those of the previous pair. Rows are left only if there was no step before.
        delayed.finish_some::<ZmmBf16>(finished..TILE_ROWS);
        delayed.done();
        multiply_tiles!("0", "4", "6");
        ahead.fetch::<LINES>(0);
        multiply_tiles!("1", "4", "7");
        ahead.fetch::<LINES>(1);
        if pair + 1 == pass.pairs() {
            if BLOCKS == 2 {
                multiply_tiles!("2", "5", "6");
                multiply_tiles!("3", "5", "7");
            }
            store!("0", results);
            store!("1", results.add(RESULT_TILE));
            if BLOCKS == 2 {
                store!("2", results.add(2 * RESULT_TILE));
                store!("3", results.add(3 * RESULT_TILE));
            }
        } else {
            // Begin the next pair before this one ends, so that the multiplier is never idle.
            let next = left_of(pass, pair + 1);
            load_left!("4", next[0]);
            multiply_tiles!("2", "5", "6");
            load_right!("6", pass.right[0]);
            store!("0", results);
            begin_result!(pass, "0", next_results);
            multiply_tiles!("3", "5", "7");
            load_left!("5", next[1]);
            load_right!("7", pass.right[1]);
            store!("1", results.add(RESULT_TILE));
            begin_result!(pass, "1", next_results.add(RESULT_TILE));
            store!("2", results.add(2 * RESULT_TILE));
            begin_result!(pass, "2", next_results.add(2 * RESULT_TILE));
            store!("3", results.add(3 * RESULT_TILE));
            begin_result!(pass, "3", next_results.add(3 * RESULT_TILE));
        }
        delayed.take(pass, pair);
    }
}
