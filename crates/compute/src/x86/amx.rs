//! AMX: configuration of the tiles, and the innermost loops, each one block of assembly.
//!
//! The loop over k stands inside the block, so that nothing of the compiler's can come between the
//! tiles. Tiles 0 to 3 hold results, 4 and 5 left operands, 6 and 7 right operands.

use super::attention::{Fetcher, PAGE};
use super::product::Chunk;
use super::tiles::{PANEL, RESULT_TILE, STEP, TILE, TILE_ROWS};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Bytes between the rows of a tile that lies in one piece.
const ROW_BYTES: usize = 64;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The right to use tiles on this thread; dropping it gives their state back, so that the kernel
/// need not save 8 KiB at every switch.
pub(super) struct Tiles(());

impl Tiles {
    /// All tiles whole: 16 rows of 64 bytes.
    ///
    /// # Safety
    /// The machine has AMX and the process may use it.
    pub(super) unsafe fn whole() -> Self {
        // SAFETY: as promised by the caller.
        unsafe { Self::configure([ROW_BYTES as u16; 8], [TILE_ROWS as u8; 8]) }
    }

    /// # Safety
    /// As `whole`; no tile exceeds 16 rows of 64 bytes.
    pub(super) unsafe fn configure(row_bytes: [u16; 8], rows: [u8; 8]) -> Self {
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        configuration.row_bytes[..8].copy_from_slice(&row_bytes);
        configuration.rows[..8].copy_from_slice(&rows);
        // SAFETY: a valid configuration, 64 bytes, that lives across the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles were configured on this thread; nobody reads them any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Operands of one innermost loop: up to two row blocks against up to two panels.
struct Loop {
    left: [*const bf16; 2],
    right: [*const bf16; 2],
    /// Result tiles in the order (block, panel).
    result: [*mut f32; 4],
    steps: usize,
    accumulate: bool,
    /// Weights that will be wanted next, fetched a few lines in every step.
    ahead: *const bf16,
}

/// Loads result tiles or clears them, runs `$body` for every step, stores the tiles.
///
/// One operand is used again by the next loop and should stay in the first-level cache; the other
/// streams through, loaded by `tileloaddt1`, which leaves that cache alone.
macro_rules! tile_loop {
    ($work:expr, $line_bytes:literal, [$(($tile:literal, $result:expr)),+], [$($body:expr),+ $(,)?]) => {
        // SAFETY: the caller's `Loop` points at whole tiles of every step; tiles are configured;
        // prefetches may point anywhere.
        unsafe {
            let work = $work;
            if work.accumulate {
                $(asm!(concat!("tileloadd tmm", $tile, ", [{result} + {row}*1]"),
                    result = in(reg) work.result[$result], row = in(reg) ROW_BYTES, options(nostack, readonly));)+
            } else {
                $(asm!(concat!("tilezero tmm", $tile), options(nostack, nomem));)+
            }
            asm!(
                ".p2align 5",
                "2:",
                $($body,)+
                concat!("add {ahead}, ", $line_bytes),
                "add {left_0}, 1024",
                "add {left_1}, 1024",
                "add {right_0}, 1024",
                "add {right_1}, 1024",
                "dec {steps}",
                "jnz 2b",
                left_0 = inout(reg) work.left[0] => _,
                left_1 = inout(reg) work.left[1] => _,
                right_0 = inout(reg) work.right[0] => _,
                right_1 = inout(reg) work.right[1] => _,
                ahead = inout(reg) work.ahead => _,
                steps = inout(reg) work.steps => _,
                row = in(reg) ROW_BYTES,
                options(nostack, readonly),
            );
            $(asm!(concat!("tilestored [{result} + {row}*1], tmm", $tile),
                result = in(reg) work.result[$result], row = in(reg) ROW_BYTES, options(nostack));)+
        }
    };
}

/// Prefetches of lines at the given offsets.
macro_rules! fetch {
    ($offsets:literal) => {
        concat!(".irp offset, ", $offsets, "\nprefetcht1 [{ahead} + \\offset]\n.endr")
    };
}

/// Makes the loops that fetch a given number of lines ahead in every step, a quarter at a time:
/// bunched together they would hold up the tiles' own loads.
macro_rules! tile_loops {
    ($name:ident, $left:literal, $right:literal, $line_bytes:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
        unsafe fn $name(work: &Loop, two_blocks: bool, two_panels: bool) {
            match (two_blocks, two_panels) {
                (true, true) => tile_loop!(
                    work,
                    $line_bytes,
                    [("0", 0), ("1", 1), ("2", 2), ("3", 3)],
                    [
                        concat!($left, " tmm4, [{left_0} + {row}*1]"),
                        concat!($right, " tmm6, [{right_0} + {row}*1]"),
                        fetch!($a),
                        concat!($right, " tmm7, [{right_1} + {row}*1]"),
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        fetch!($b),
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        concat!($left, " tmm5, [{left_1} + {row}*1]"),
                        fetch!($c),
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        fetch!($d),
                    ]
                ),
                (false, true) => tile_loop!(
                    work,
                    $line_bytes,
                    [("0", 0), ("1", 1)],
                    [
                        concat!($left, " tmm4, [{left_0} + {row}*1]"),
                        fetch!($a),
                        concat!($right, " tmm6, [{right_0} + {row}*1]"),
                        fetch!($b),
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        fetch!($c),
                        concat!($right, " tmm7, [{right_1} + {row}*1]"),
                        fetch!($d),
                        "tdpbf16ps tmm1, tmm4, tmm7",
                    ]
                ),
                (true, false) => tile_loop!(
                    work,
                    $line_bytes,
                    [("0", 0), ("2", 2)],
                    [
                        concat!($right, " tmm6, [{right_0} + {row}*1]"),
                        fetch!($a),
                        concat!($left, " tmm4, [{left_0} + {row}*1]"),
                        fetch!($b),
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        fetch!($c),
                        concat!($left, " tmm5, [{left_1} + {row}*1]"),
                        fetch!($d),
                        "tdpbf16ps tmm2, tmm5, tmm6",
                    ]
                ),
                (false, false) => tile_loop!(
                    work,
                    $line_bytes,
                    [("0", 0)],
                    [
                        concat!($left, " tmm4, [{left_0} + {row}*1]"),
                        fetch!($a),
                        fetch!($b),
                        concat!($right, " tmm6, [{right_0} + {row}*1]"),
                        fetch!($c),
                        fetch!($d),
                        "tdpbf16ps tmm0, tmm4, tmm6",
                    ]
                ),
            }
        }
    };
}

tile_loops!(stream_rows_ahead_4, "tileloaddt1", "tileloadd", "256", "0", "64", "128", "192");
tile_loops!(
    stream_rows_ahead_8,
    "tileloaddt1",
    "tileloadd",
    "512",
    "0,64",
    "128,192",
    "256,320",
    "384,448"
);
tile_loops!(
    stream_rows_ahead_16,
    "tileloaddt1",
    "tileloadd",
    "1024",
    "0,64,128,192",
    "256,320,384,448",
    "512,576,640,704",
    "768,832,896,960"
);
tile_loops!(
    stream_weights_ahead_32,
    "tileloadd",
    "tileloaddt1",
    "2048",
    "0,64,128,192,256,320,384,448",
    "512,576,640,704,768,832,896,960",
    "1024,1088,1152,1216,1280,1344,1408,1472",
    "1536,1600,1664,1728,1792,1856,1920,1984"
);

/// Lines of a pair of panels in one step.
const PAIR_LINES: usize = 32;

/// Multiplies one chunk of a product.
///
/// # Safety
/// Tiles are configured whole on this thread; the chunk describes live operands, and its rows are
/// backed by whole row blocks.
pub(super) unsafe fn multiply(chunk: &Chunk) {
    let blocks = chunk.rows.div_ceil(TILE_ROWS);
    // A pair of panels is fetched while the pair before it meets all rows.
    let (lines, run): (usize, unsafe fn(&Loop, bool, bool)) =
        match PAIR_LINES.div_ceil(chunk.ahead.pairs) {
            0..=4 => (4, stream_rows_ahead_4),
            5..=8 => (8, stream_rows_ahead_8),
            9..=16 => (16, stream_rows_ahead_16),
            _ => (32, stream_weights_ahead_32),
        };
    for panel in (0..chunk.panels).step_by(2) {
        for block in (0..blocks).step_by(2) {
            let (two_blocks, two_panels) = (block + 1 < blocks, panel + 1 < chunk.panels);
            // Where there is no second block or panel, its pointer repeats the first and is not read.
            let (block_1, panel_1) =
                (block + usize::from(two_blocks), panel + usize::from(two_panels));
            // SAFETY: blocks and panels inside the chunk, as promised by the caller.
            unsafe {
                let left = |block| chunk.left.add(block * chunk.left_block);
                let right = |panel| chunk.right.add(panel * chunk.right_panel);
                let result = |block, panel| {
                    chunk.result.wrapping_add((block * chunk.panels + panel) * RESULT_TILE)
                };
                let work = Loop {
                    left: [left(block), left(block_1)],
                    right: [right(panel), right(panel_1)],
                    result: [
                        result(block, panel),
                        result(block, panel_1),
                        result(block_1, panel),
                        result(block_1, panel_1),
                    ],
                    steps: chunk.steps,
                    accumulate: chunk.accumulate,
                    ahead: chunk.ahead(
                        panel + 2,
                        (chunk.ahead.pair + block / 2) * lines * chunk.steps * LINE,
                    ),
                };
                if chunk.accumulate {
                    let (block, panel) =
                        if block + 2 < blocks { (block + 2, panel) } else { (0, panel + 2) };
                    prefetch_results(result(block, panel), chunk.panels);
                }
                run(&work, two_blocks, two_panels);
            }
        }
    }
}

/// Values of a cache line.
const LINE: usize = 32;

/// Fetches the results that the next loop goes on from: it cannot begin without them.
fn prefetch_results(first: *mut f32, panels: usize) {
    for block in 0..2 {
        let tiles = first.wrapping_add(block * panels * RESULT_TILE);
        for line in 0..2 * RESULT_TILE * size_of::<f32>() / ROW_BYTES {
            // SAFETY: a prefetch reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(tiles.wrapping_add(line * LINE / 2).cast()) };
        }
    }
}

impl Tiles {
    /// Tiles for attention: 0 to 3 results, 4 a left and 6 a right tile of 32 k, 5 and 7 of 16 k.
    ///
    /// # Safety
    /// As `whole`.
    pub(super) unsafe fn for_attention() -> Self {
        let mut row_bytes = [ROW_BYTES as u16; 8];
        let mut rows = [TILE_ROWS as u8; 8];
        row_bytes[5] /= 2;
        rows[7] /= 2;
        // SAFETY: as promised by the caller.
        unsafe { Self::configure(row_bytes, rows) }
    }
}

macro_rules! load {
    ($tile:literal, $from:expr, $row_bytes:expr) => {
        asm!(concat!("tileloadd tmm", $tile, ", [{from} + {row}*1]"),
            from = in(reg) $from, row = in(reg) $row_bytes, options(nostack, readonly))
    };
}

macro_rules! store {
    ($tile:literal, $into:expr) => {
        asm!(concat!("tilestored [{into} + {row}*1], tmm", $tile),
            into = in(reg) $into, row = in(reg) ROW_BYTES, options(nostack))
    };
}

macro_rules! multiply {
    ($result:literal, $left:literal, $right:literal) => {
        asm!(
            concat!("tdpbf16ps tmm", $result, ", tmm", $left, ", tmm", $right),
            options(nostack, nomem)
        )
    };
}

/// into[page][row][position] = Σ queries[row] · keys[page][position] for a block's pages.
///
/// # Safety
/// Tiles are configured for attention; queries are [d / 32][16][32], each page's keys [d / 2][16][2].
pub(super) unsafe fn score_pages(
    queries: *const bf16,
    keys: &[*const bf16],
    head_dim: usize,
    into: *mut f32,
    fetcher: &mut Fetcher,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        // Four pages at once: one alone would wait for each product before the next.
        if let &[a, b, c, d] = keys {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem)
            );
            for step in 0..head_dim / STEP {
                load!("4", queries.add(step * TILE), ROW_BYTES);
                load!("6", a.add(step * TILE), ROW_BYTES);
                multiply!("0", "4", "6");
                fetcher.fetch(2);
                load!("6", b.add(step * TILE), ROW_BYTES);
                multiply!("1", "4", "6");
                fetcher.fetch(2);
                load!("6", c.add(step * TILE), ROW_BYTES);
                multiply!("2", "4", "6");
                fetcher.fetch(2);
                load!("6", d.add(step * TILE), ROW_BYTES);
                multiply!("3", "4", "6");
                fetcher.fetch(2);
            }
            if !head_dim.is_multiple_of(STEP) {
                let step = head_dim / STEP;
                load!("5", queries.add(step * TILE), ROW_BYTES);
                load!("7", a.add(step * TILE), ROW_BYTES);
                multiply!("0", "5", "7");
                load!("7", b.add(step * TILE), ROW_BYTES);
                multiply!("1", "5", "7");
                load!("7", c.add(step * TILE), ROW_BYTES);
                multiply!("2", "5", "7");
                load!("7", d.add(step * TILE), ROW_BYTES);
                multiply!("3", "5", "7");
                fetcher.fetch(4);
            }
            store!("0", into);
            store!("1", into.add(RESULT_TILE));
            store!("2", into.add(2 * RESULT_TILE));
            store!("3", into.add(3 * RESULT_TILE));
            return;
        }
        for (page, &keys) in keys.iter().enumerate() {
            asm!("tilezero tmm0", options(nostack, nomem));
            for step in 0..head_dim / STEP {
                load!("4", queries.add(step * TILE), ROW_BYTES);
                load!("6", keys.add(step * TILE), ROW_BYTES);
                multiply!("0", "4", "6");
                fetcher.fetch(2);
            }
            if !head_dim.is_multiple_of(STEP) {
                let step = head_dim / STEP;
                load!("5", queries.add(step * TILE), ROW_BYTES);
                load!("7", keys.add(step * TILE), ROW_BYTES);
                multiply!("0", "5", "7");
                fetcher.fetch(1);
            }
            store!("0", into.add(page * RESULT_TILE));
        }
    }
}

/// into[row] += Σ weights[row][position] · values[position] over a block's pages.
///
/// # Safety
/// Tiles are configured for attention; weights are [position / 32][16][32], each page's values
/// [16 / 2][d][2], `into` [d / 16][16][16].
pub(super) unsafe fn add_values(
    weights: *const bf16,
    values: &[*const bf16],
    head_dim: usize,
    into: *mut f32,
    fetcher: &mut Fetcher,
) {
    let row_bytes = head_dim * 2 * size_of::<bf16>();
    // SAFETY: as promised by the caller.
    unsafe {
        let weights = |page: usize| weights.add(page / 2 * TILE + page % 2 * PAGE);
        let column = |values: *const bf16, column: usize| values.add(2 * PANEL * column);
        let columns = head_dim / PANEL;
        for first in (0..columns / 4 * 4).step_by(4) {
            let into = into.add(first * RESULT_TILE);
            load!("0", into, ROW_BYTES);
            load!("1", into.add(RESULT_TILE), ROW_BYTES);
            load!("2", into.add(2 * RESULT_TILE), ROW_BYTES);
            load!("3", into.add(3 * RESULT_TILE), ROW_BYTES);
            for (page, &values) in values.iter().enumerate() {
                load!("5", weights(page), ROW_BYTES);
                load!("7", column(values, first), row_bytes);
                multiply!("0", "5", "7");
                fetcher.fetch(3);
                load!("7", column(values, first + 1), row_bytes);
                multiply!("1", "5", "7");
                fetcher.fetch(3);
                load!("7", column(values, first + 2), row_bytes);
                multiply!("2", "5", "7");
                fetcher.fetch(3);
                load!("7", column(values, first + 3), row_bytes);
                multiply!("3", "5", "7");
                fetcher.fetch(3);
            }
            store!("0", into);
            store!("1", into.add(RESULT_TILE));
            store!("2", into.add(2 * RESULT_TILE));
            store!("3", into.add(3 * RESULT_TILE));
        }
        for last in columns / 4 * 4..columns {
            let into = into.add(last * RESULT_TILE);
            load!("0", into, ROW_BYTES);
            for (page, &values) in values.iter().enumerate() {
                load!("5", weights(page), ROW_BYTES);
                load!("7", column(values, last), row_bytes);
                multiply!("0", "5", "7");
                fetcher.fetch(3);
            }
            store!("0", into);
        }
    }
}

/// Operations of one round of [`peak`].
pub(super) const PEAK_OPERATIONS: usize = 4 * 2 * TILE_ROWS * PANEL * STEP;

/// Multiplies tiles in registers.
///
/// # Safety
/// Tiles are configured whole on this thread; `rounds` is not zero.
pub(super) unsafe fn peak(rounds: usize) {
    // SAFETY: touches tiles only.
    unsafe {
        asm!(
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) rounds => _,
            options(nostack, nomem),
        );
    }
}
