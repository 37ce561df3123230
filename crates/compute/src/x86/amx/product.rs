//! The innermost loops of a product on tiles. All rows meet one pair of panels in a single block of
//! assembly, a strip, so that nothing of the compiler's comes between the tiles and one pair of row
//! blocks overlaps with the next.

use super::{ROW_BYTES, clear, load, multiply_tiles, store};
use crate::x86::product::Chunk;
use crate::x86::tiles::{RESULT_TILE, TILE, TILE_ROWS};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Cache lines of a tile.
const TILE_LINES: usize = TILE_ROWS;

/// All pairs of row blocks against one pair of panels.
struct Strip {
    left: *const bf16,
    /// Values from one row block to the next.
    left_block: usize,
    /// Pairs of row blocks, at least one.
    pairs: usize,
    right: [*const bf16; 2],
    steps: usize,
    /// [pair][2 row blocks][2 panels][16][16]; readable for one pair more.
    result: *mut f32,
    /// Panels that will be wanted next.
    ahead: [*const bf16; 2],
}

/// Prefetches of lines at the given offsets.
macro_rules! fetch {
    ($from:literal, $offsets:literal) => {
        concat!(".irp offset, ", $offsets, "\nprefetcht1 [{", $from, "} + \\offset]\n.endr")
    };
}

/// Makes a strip. Tiles 0 to 3 are results, 4 and 5 left, 6 and 7 right operands.
///
/// One operand is used again by the next pair of row blocks, or by the next strip, and should stay
/// in the first-level cache; the other streams through, loaded by `tileloaddt1`, which leaves that
/// cache alone. Tiles are loaded a step ahead, among the products of the step before: where loads and
/// products do not overlap by themselves, that costs least. Every step fetches a few lines of the
/// panels ahead, spread among the products:
/// bunched together they would hold up the tiles' own loads. The last step of a pair makes room
/// for the next pair's results tile by tile, so that the multiplier never runs dry.
macro_rules! strip {
    (
        $name:ident, $left:literal, $right:literal, $begin:literal, $results_ahead:literal,
        $line_bytes:literal, $first:literal $(, $second:literal)?
    ) => {
        unsafe fn $name(strip: &Strip) {
            let pair_bytes = 2 * strip.left_block * size_of::<bf16>();
            let step_bytes = (strip.steps - 1) * TILE * size_of::<bf16>();
            let mut constants = [strip.steps - 1, pair_bytes.wrapping_sub(step_bytes), step_bytes, strip.pairs];
            // SAFETY: the strip describes live operands; tiles are configured; prefetches may point
            // anywhere.
            unsafe {
                asm!(
                    concat!(".irp tile, 0,1,2,3\n", $begin, "\n.endr"),
                    "2:",
                    "mov {steps}, [{constants}]",
                    "lea {results_ahead}, [{result} + 4096]",
                    concat!($left, " tmm4, [{left_0} + {row}*1]"),
                    concat!($right, " tmm6, [{right_0} + {row}*1]"),
                    concat!($right, " tmm7, [{right_1} + {row}*1]"),
                    concat!($left, " tmm5, [{left_1} + {row}*1]"),
                    "test {steps}, {steps}",
                    "jz 4f",
                    ".p2align 5",
                    "3:",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    fetch!("ahead_0", $first),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    concat!($left, " tmm4, [{left_0} + {row}*1 + 1024]"),
                    fetch!("ahead_1", $first),
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    concat!($right, " tmm6, [{right_0} + {row}*1 + 1024]"),
                    concat!("", $(fetch!("ahead_0", $second))?),
                    $results_ahead,
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    concat!($left, " tmm5, [{left_1} + {row}*1 + 1024]"),
                    concat!($right, " tmm7, [{right_1} + {row}*1 + 1024]"),
                    concat!("", $(fetch!("ahead_1", $second))?),
                    concat!("add {ahead_0}, ", $line_bytes),
                    concat!("add {ahead_1}, ", $line_bytes),
                    "add {results_ahead}, 256",
                    "add {left_0}, 1024",
                    "add {left_1}, 1024",
                    "add {right_0}, 1024",
                    "add {right_1}, 1024",
                    "dec {steps}",
                    "jnz 3b",
                    "4:",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "add {result}, 4096",
                    "tilestored [{result} + {row}*1 - 4096], tmm0",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tilestored [{result} + {row}*1 - 3072], tmm1",
                    "add {left_0}, [{constants} + 8]",
                    "add {left_1}, [{constants} + 8]",
                    "sub {right_0}, [{constants} + 16]",
                    "sub {right_1}, [{constants} + 16]",
                    concat!(".irp tile, 0,1\n", $begin, "\n.endr"),
                    "tilestored [{result} + {row}*1 - 2048], tmm2",
                    "tilestored [{result} + {row}*1 - 1024], tmm3",
                    concat!(".irp tile, 2,3\n", $begin, "\n.endr"),
                    "dec qword ptr [{constants} + 24]",
                    "jnz 2b",
                    left_0 = inout(reg) strip.left => _,
                    left_1 = inout(reg) strip.left.wrapping_add(strip.left_block) => _,
                    right_0 = inout(reg) strip.right[0] => _,
                    right_1 = inout(reg) strip.right[1] => _,
                    ahead_0 = inout(reg) strip.ahead[0] => _,
                    ahead_1 = inout(reg) strip.ahead[1] => _,
                    result = inout(reg) strip.result => _,
                    results_ahead = out(reg) _,
                    steps = out(reg) _,
                    constants = in(reg) constants.as_mut_ptr(),
                    row = in(reg) ROW_BYTES,
                    options(nostack),
                );
            }
        }
    };
}

/// Makes a strip that starts from zero and one that goes on from the results so far.
macro_rules! strips {
    ($fresh:ident, $further:ident, $left:literal, $right:literal, $bytes:literal, $first:literal $(, $second:literal)?) => {
        strip!($fresh, $left, $right, "tilezero tmm\\tile", "", $bytes, $first $(, $second)?);
        strip!(
            $further,
            $left,
            $right,
            "tileloadd tmm\\tile, [{result} + {row}*1 + 1024*\\tile]",
            ".irp offset, 0,64,128,192\nprefetcht0 [{results_ahead} + \\offset]\n.endr",
            $bytes,
            $first
            $(, $second)?
        );
    };
}

strips!(fresh_2, further_2, "tileloaddt1", "tileloadd", "64", "0");
strips!(fresh_4, further_4, "tileloaddt1", "tileloadd", "128", "0", "64");
strips!(fresh_6, further_6, "tileloaddt1", "tileloadd", "192", "0,64", "128");
strips!(fresh_8, further_8, "tileloaddt1", "tileloadd", "256", "0,64", "128,192");
strips!(fresh_16, further_16, "tileloaddt1", "tileloadd", "512", "0,64,128,192", "256,320,384,448");
strips!(
    fresh_32,
    further_32,
    "tileloadd",
    "tileloaddt1",
    "1024",
    "0,64,128,192,256,320,384,448",
    "512,576,640,704,768,832,896,960"
);

/// Multiplies one chunk of a product.
///
/// # Safety
/// Tiles are configured whole on this thread; the chunk describes live operands, and its rows are
/// backed by whole row blocks.
pub(in crate::x86) unsafe fn multiply(chunk: &Chunk) {
    let blocks = chunk.rows.div_ceil(TILE_ROWS);
    for panel in (0..chunk.panels).step_by(2) {
        let last = panel + 2 >= chunk.panels;
        let lines = lines_in_step(blocks / 2, chunk.steps, last && chunk.fetches_less);
        // With one pair of row blocks the weights are the operand that streams.
        let strips: [unsafe fn(&Strip); 2] = match lines {
            2 => [fresh_2, further_2],
            4 => [fresh_4, further_4],
            6 => [fresh_6, further_6],
            8 => [fresh_8, further_8],
            16 => [fresh_16, further_16],
            _ => [fresh_32, further_32],
        };
        let run = strips[usize::from(chunk.accumulate)];
        let ahead = [chunk.panel(panel + 2), chunk.panel(panel + 3)];
        let strip = Strip {
            left: chunk.left,
            left_block: chunk.left_block,
            pairs: blocks / 2,
            right: [chunk.panel(panel), chunk.panel(panel + 1)],
            steps: chunk.steps,
            result: chunk.result.wrapping_add(chunk.result_tile(0, panel)),
            ahead: match last && chunk.fetches_less {
                // In one piece, so that what is left is in one piece too.
                true => [ahead[0], ahead[0].wrapping_byte_add(fetched_bytes(chunk) / 2)],
                false => ahead,
            },
        };
        let two_panels = panel + 1 < chunk.panels;
        // SAFETY: as promised by the caller.
        unsafe {
            if two_panels && strip.pairs > 0 {
                run(&strip);
            }
            let done = if two_panels { blocks / 2 * 2 } else { 0 };
            for block in done..blocks {
                let result = chunk.result.add(chunk.result_tile(block, panel));
                multiply_block(
                    &strip,
                    chunk.left.add(block * chunk.left_block),
                    two_panels,
                    result,
                    chunk.accumulate,
                );
            }
        }
    }
}

/// Lines that each step fetches of the next pair of panels while so many pairs of row blocks meet this one: as few as
/// fetch nearly all of them, or, where others fetch some too, a good part.
fn lines_in_step(pairs: usize, steps: usize, less: bool) -> usize {
    let fetching = pairs * (steps - 1);
    let lines = 2 * steps * TILE_LINES;
    // The epilogue fetches two lines for every row.
    let of_rows = 2 * 2 * TILE_ROWS * pairs;
    let wanted = match less {
        true => lines.saturating_sub(of_rows).max(lines * 9 / 20),
        false => lines * 9 / 10,
    };
    let most = if pairs <= 1 { 32 } else { 16 };
    [2, 4, 6, 8].into_iter().find(|each| each * fetching >= wanted).unwrap_or(most)
}

/// Bytes of what comes after a chunk that its strips fetch, where it `fetches_less`.
pub(in crate::x86) fn fetched_bytes(chunk: &Chunk) -> usize {
    let pairs = chunk.rows.div_ceil(TILE_ROWS) / 2;
    lines_in_step(pairs, chunk.steps, true) * pairs * (chunk.steps - 1) * ROW_BYTES
}

/// One row block against one panel or two: what strips leave over, and batches of up to 16 rows,
/// which are bound by the reading of weights.
unsafe fn multiply_block(
    strip: &Strip,
    left: *const bf16,
    two: bool,
    result: *mut f32,
    accumulate: bool,
) {
    // SAFETY: the strip describes live operands; tiles are configured.
    unsafe {
        if accumulate {
            load!("0", result, ROW_BYTES);
            load!("1", result.add(RESULT_TILE), ROW_BYTES);
        } else {
            clear!("0");
            clear!("1");
        }
        for step in 0..strip.steps {
            let step = step * TILE;
            load!("4", left.add(step), ROW_BYTES);
            load!("6", strip.right[0].add(step), ROW_BYTES);
            multiply_tiles!("0", "4", "6");
            prefetch_step(strip.ahead[0].wrapping_add(step));
            if two {
                load!("7", strip.right[1].add(step), ROW_BYTES);
                multiply_tiles!("1", "4", "7");
                prefetch_step(strip.ahead[1].wrapping_add(step));
            }
        }
        store!("0", result);
        if two {
            store!("1", result.add(RESULT_TILE));
        }
    }
}

/// Fetches one step of a panel.
#[inline(always)]
fn prefetch_step(from: *const bf16) {
    const LINE: usize = ROW_BYTES / size_of::<bf16>();
    for line in (0..TILE).step_by(LINE) {
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
    }
}
