//! AMX: configuration of the tiles, single operations on them, and what they can do at best.
//! Products and attention have files of their own.

mod attention;
mod product;

pub(super) use attention::{
    ValueTiles, add_values, add_values_of_two, score_pages, score_pages_of_two,
};
pub(super) use product::multiply;

use super::tiles::{PANEL, STEP, TILE, TILE_ROWS};
use half::bf16;
use std::arch::asm;

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

/// The right to use tiles on this thread. Dropping it releases their state, so that the kernel does
/// not save 8 KiB at every switch.
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
        // SAFETY: tiles were configured on this thread, and nothing reads them any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

impl Tiles {
    /// Tiles for attention with up to `rows` rows; a product takes time in proportion to them. Tiles
    /// 0 to 3 are results, 4 and 5 left tiles, 6 and 7 right ones. If the head's size is not a multiple of 32
    /// (`tail`), 5 and 7 are for its last 16.
    ///
    /// # Safety
    /// As `whole`; `rows` is 1 to 16.
    pub(super) unsafe fn for_attention(rows: usize, tail: bool) -> Self {
        let (left, whole) = (rows as u8, TILE_ROWS as u8);
        let mut row_bytes = [ROW_BYTES as u16; 8];
        let mut rows = [left, left, left, left, left, left, whole, whole];
        if tail {
            row_bytes[5] /= 2;
            rows[7] /= 2;
        }
        // SAFETY: as promised by the caller.
        unsafe { Self::configure(row_bytes, rows) }
    }
}

// Tile operations are spaced out with no-ops. If another hyperthread shares the core, back-to-back tile operations
// take half as long again (docs/notes/cpu-kernels.md). Otherwise the no-ops cost nothing.

/// Loads a tile whose rows are `row_bytes` apart, through the first-level cache or past it.
macro_rules! load {
    ($tile:literal, $from:expr, $row_bytes:expr) => {
        load!("tileloadd", $tile, $from, $row_bytes)
    };
    ($load:literal, $tile:literal, $from:expr, $row_bytes:expr) => {
        std::arch::asm!(concat!($load, " tmm", $tile, ", [{from} + {row}*1]"),
            ".rept 4", "nop", ".endr",
            from = in(reg) $from, row = in(reg) $row_bytes, options(nostack, readonly))
    };
}

/// Stores a result tile.
macro_rules! store {
    ($tile:literal, $into:expr) => {
        std::arch::asm!(concat!("tilestored [{into} + {row}*1], tmm", $tile),
            into = in(reg) $into, row = in(reg) $crate::x86::amx::ROW_BYTES, options(nostack))
    };
}

/// Clears a tile.
macro_rules! clear {
    ($tile:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $tile), options(nostack, nomem))
    };
}

/// result += left · right
macro_rules! multiply {
    ($result:literal, $left:literal, $right:literal) => {
        std::arch::asm!(
            concat!("tdpbf16ps tmm", $result, ", tmm", $left, ", tmm", $right),
            ".rept 8",
            "nop",
            ".endr",
            options(nostack, nomem)
        )
    };
}

use {clear, load, multiply as multiply_tiles, store};

/// Operations of one round of [`peak`].
pub(super) const PEAK_OPERATIONS: usize = 4 * 2 * TILE_ROWS * PANEL * STEP;

/// Multiplies tiles in registers: two left and two right ones.
///
/// # Safety
/// Tiles are configured whole on this thread.
pub(super) unsafe fn peak(rounds: usize, operands: &[bf16; 4 * TILE]) {
    let operands = operands.as_ptr();
    // SAFETY: four tiles lie there; the rest touches tiles only.
    unsafe {
        load!("4", operands, ROW_BYTES);
        load!("5", operands.add(TILE), ROW_BYTES);
        load!("6", operands.add(2 * TILE), ROW_BYTES);
        load!("7", operands.add(3 * TILE), ROW_BYTES);
        clear!("0");
        clear!("1");
        clear!("2");
        clear!("3");
        for _ in 0..rounds {
            multiply_tiles!("0", "4", "6");
            multiply_tiles!("1", "4", "7");
            multiply_tiles!("2", "5", "6");
            multiply_tiles!("3", "5", "7");
        }
    }
}
