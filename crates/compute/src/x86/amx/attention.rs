//! The two products of attention on tiles: queries with keys, weights with values. Of one tile of rows (decoding,
//! the last rows of a prompt), and of two at once (prefill), so that half as many tiles are loaded for each product.
//! Sums have the same order either way.

use super::{ROW_BYTES, clear, load, multiply_tiles, store};
use crate::x86::attention::STEP_PAGES;
use crate::x86::pages::{BLOCK_PAGES, Fetcher};
use crate::x86::tiles::{PANEL, RESULT_TILE, STEP, TILE};
use half::bf16;

/// Loads a tile past the first-level cache, which scores and weights need for themselves.
macro_rules! stream {
    ($tile:literal, $from:expr, $row_bytes:expr) => {
        load!("tileloaddt1", $tile, $from, $row_bytes)
    };
}

/// into[page][row][position] = Σ queries[row] · keys[page][position] for a block's pages.
///
/// # Safety
/// Tiles are configured for attention with the rows in use; queries are [d / 32][16][32], each page's keys [d
/// / 2][16][2].
pub(in crate::x86) unsafe fn score_pages(
    queries: *const bf16,
    keys: &[*const bf16],
    head_dim: usize,
    into: *mut f32,
    fetcher: &mut Fetcher<'_>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        // Four pages at once. With one page, each product would wait for the one before.
        if let &[a, b, c, d] = keys {
            clear!("0");
            clear!("1");
            clear!("2");
            clear!("3");
            for step in 0..head_dim / STEP {
                load!("4", queries.add(step * TILE), ROW_BYTES);
                load!("6", a.add(step * TILE), ROW_BYTES);
                multiply_tiles!("0", "4", "6");
                fetcher.fetch(2);
                load!("6", b.add(step * TILE), ROW_BYTES);
                multiply_tiles!("1", "4", "6");
                fetcher.fetch(2);
                load!("6", c.add(step * TILE), ROW_BYTES);
                multiply_tiles!("2", "4", "6");
                fetcher.fetch(2);
                load!("6", d.add(step * TILE), ROW_BYTES);
                multiply_tiles!("3", "4", "6");
                fetcher.fetch(2);
            }
            if !head_dim.is_multiple_of(STEP) {
                let step = head_dim / STEP;
                load!("5", queries.add(step * TILE), ROW_BYTES);
                load!("7", a.add(step * TILE), ROW_BYTES);
                multiply_tiles!("0", "5", "7");
                load!("7", b.add(step * TILE), ROW_BYTES);
                multiply_tiles!("1", "5", "7");
                load!("7", c.add(step * TILE), ROW_BYTES);
                multiply_tiles!("2", "5", "7");
                load!("7", d.add(step * TILE), ROW_BYTES);
                multiply_tiles!("3", "5", "7");
                fetcher.fetch(4);
            }
            store!("0", into);
            store!("1", into.add(RESULT_TILE));
            store!("2", into.add(2 * RESULT_TILE));
            store!("3", into.add(3 * RESULT_TILE));
            return;
        }
        for (page, &keys) in keys.iter().enumerate() {
            clear!("0");
            for step in 0..head_dim / STEP {
                load!("4", queries.add(step * TILE), ROW_BYTES);
                load!("6", keys.add(step * TILE), ROW_BYTES);
                multiply_tiles!("0", "4", "6");
                fetcher.fetch(2);
            }
            if !head_dim.is_multiple_of(STEP) {
                let step = head_dim / STEP;
                load!("5", queries.add(step * TILE), ROW_BYTES);
                load!("7", keys.add(step * TILE), ROW_BYTES);
                multiply_tiles!("0", "5", "7");
                fetcher.fetch(1);
            }
            store!("0", into.add(page * RESULT_TILE));
        }
    }
}

/// As [`score_pages`], for two tiles of rows: into[tile][page][row][position]. Tiles are loaded a step ahead, among the
/// products of the step before. At the end, the pages that come next are begun, so that the tiles have work while the
/// scores become weights. Returns whether they are; then the next call is for them, and says that they have `begun`,
/// unless tiles were used for something else meanwhile.
///
/// # Safety
/// Tiles are configured for attention with whole tiles, d is a multiple of 32, queries are [tile][d / 32][16][32],
/// there is at least one page, and room for [`BLOCK_PAGES`]. If these pages have `begun`, they are the last call's `next`,
/// for the same queries, and no tile was used since.
pub(in crate::x86) unsafe fn score_pages_of_two(
    queries: *const bf16,
    keys: &[*const bf16],
    next: &[*const bf16],
    head_dim: usize,
    into: *mut f32,
    begun: bool,
) -> bool {
    let steps = head_dim / STEP;
    if let (2, &[a, b, c, d]) = (steps, keys) {
        let next = next.first_chunk();
        // SAFETY: as promised by the caller.
        unsafe { score_block_of_two(queries, [a, b, c, d], next, into, begun) };
        return next.is_some();
    }
    let second = queries.wrapping_add(steps * TILE);
    // The last of an odd number is scored twice.
    let pair = |keys: &[*const bf16]| [keys[0], keys[1.min(keys.len() - 1)]];
    let mut pages = pair(keys);
    // SAFETY: as promised by the caller.
    unsafe {
        if !begun {
            load!("4", queries, ROW_BYTES);
            stream!("6", pages[0], ROW_BYTES);
            stream!("7", pages[1], ROW_BYTES);
            load!("5", second, ROW_BYTES);
        }
        for first in (0..keys.len()).step_by(2) {
            clear!("0");
            clear!("2");
            clear!("1");
            clear!("3");
            for step in 1..steps {
                multiply_tiles!("0", "4", "6");
                multiply_tiles!("2", "4", "7");
                load!("4", queries.add(step * TILE), ROW_BYTES);
                multiply_tiles!("1", "5", "6");
                stream!("6", pages[0].add(step * TILE), ROW_BYTES);
                multiply_tiles!("3", "5", "7");
                load!("5", second.add(step * TILE), ROW_BYTES);
                stream!("7", pages[1].add(step * TILE), ROW_BYTES);
            }
            pages = match (keys.get(first + 2..), next) {
                (Some(left @ [_, ..]), _) | (_, left @ [_, ..]) => pair(left),
                _ => pages, // loaded in vain, as a partial block of heads of 64 loads the next
            };
            let into = into.add(first * RESULT_TILE);
            multiply_tiles!("0", "4", "6");
            multiply_tiles!("2", "4", "7");
            load!("4", queries, ROW_BYTES);
            multiply_tiles!("1", "5", "6");
            stream!("6", pages[0], ROW_BYTES);
            store!("0", into);
            multiply_tiles!("3", "5", "7");
            load!("5", second, ROW_BYTES);
            stream!("7", pages[1], ROW_BYTES);
            store!("2", into.add(RESULT_TILE));
            store!("1", into.add(BLOCK_PAGES * RESULT_TILE));
            store!("3", into.add((BLOCK_PAGES + 1) * RESULT_TILE));
        }
    }
    // Blocks of heads of 64 begin in another way.
    steps != 2 && !next.is_empty()
}

/// A block of heads of 64 for two tiles of rows. All four tiles of queries stay (4 to 7), so that a tile of keys (3) is all
/// that two products load. Results are in tiles 0 to 2 in turn: while one is stored, others are multiplied.
///
/// # Safety
/// As [`score_pages_of_two`], with d = 64.
unsafe fn score_block_of_two(
    queries: *const bf16,
    keys: [*const bf16; BLOCK_PAGES],
    next: Option<&[*const bf16; BLOCK_PAGES]>,
    into: *mut f32,
    begun: bool,
) {
    /// The products of the first page, and a tile of the second.
    macro_rules! begin {
        ($a:expr, $b:expr) => {
            stream!("3", $a, ROW_BYTES);
            clear!("0");
            multiply_tiles!("0", "4", "3");
            clear!("1");
            multiply_tiles!("1", "6", "3");
            stream!("3", $a.add(TILE), ROW_BYTES);
            multiply_tiles!("0", "5", "3");
            multiply_tiles!("1", "7", "3");
            stream!("3", $b, ROW_BYTES);
        };
    }
    let [a, b, c, d] = keys;
    let first = |page: usize| into.wrapping_add(page * RESULT_TILE);
    let second = |page: usize| first(BLOCK_PAGES + page);
    // SAFETY: as promised by the caller.
    unsafe {
        if !begun {
            load!("4", queries, ROW_BYTES);
            load!("6", queries.add(2 * TILE), ROW_BYTES);
            load!("5", queries.add(TILE), ROW_BYTES);
            load!("7", queries.add(3 * TILE), ROW_BYTES);
            begin!(a, b);
        }
        clear!("2");
        multiply_tiles!("2", "4", "3");
        store!("0", first(0));
        clear!("0");
        multiply_tiles!("0", "6", "3");
        stream!("3", b.add(TILE), ROW_BYTES);
        store!("1", second(0));
        multiply_tiles!("2", "5", "3");
        multiply_tiles!("0", "7", "3");
        stream!("3", c, ROW_BYTES);
        clear!("1");
        multiply_tiles!("1", "4", "3");
        store!("2", first(1));
        clear!("2");
        multiply_tiles!("2", "6", "3");
        stream!("3", c.add(TILE), ROW_BYTES);
        store!("0", second(1));
        multiply_tiles!("1", "5", "3");
        multiply_tiles!("2", "7", "3");
        stream!("3", d, ROW_BYTES);
        clear!("0");
        multiply_tiles!("0", "4", "3");
        store!("1", first(2));
        clear!("1");
        multiply_tiles!("1", "6", "3");
        stream!("3", d.add(TILE), ROW_BYTES);
        store!("2", second(2));
        multiply_tiles!("0", "5", "3");
        multiply_tiles!("1", "7", "3");
        store!("0", first(3));
        store!("1", second(3));
        if let Some(&[a, b, ..]) = next {
            begin!(a, b);
        }
    }
}

/// Values of some positions as tiles: [step of 32 positions][d / 16].
#[derive(Clone, Copy)]
pub(in crate::x86) struct ValueTiles<'a> {
    /// Where each page's are: those of a step begin with every second page's.
    pages: &'a [*const bf16],
    columns: usize,
    /// From a tile to the next column's.
    column: usize,
    row_bytes: usize,
    /// Groups of lines to fetch with each product.
    fetched: usize,
}

impl<'a> ValueTiles<'a> {
    /// Tile after tile: on their pages (`in_place`), or copied, which has fetched some lines.
    #[inline(always)]
    pub(in crate::x86) fn in_tiles(
        pages: &'a [*const bf16],
        head_dim: usize,
        in_place: bool,
    ) -> Self {
        let (columns, fetched) = (head_dim / PANEL, if in_place { 4 } else { 2 });
        Self { pages, columns, column: TILE, row_bytes: ROW_BYTES, fetched }
    }

    /// Steps of [32 / 2][d][2].
    #[inline(always)]
    pub(in crate::x86) fn in_pages(pages: &'a [*const bf16], head_dim: usize) -> Self {
        let row_bytes = head_dim * 2 * size_of::<bf16>();
        Self { pages, columns: head_dim / PANEL, column: 2 * PANEL, row_bytes, fetched: 2 }
    }

    fn steps(&self) -> usize {
        self.pages.len().div_ceil(STEP_PAGES)
    }

    /// # Safety
    /// There are so many steps.
    #[inline(always)]
    unsafe fn tile(&self, step: usize, column: usize) -> *const bf16 {
        // SAFETY: as promised by the caller.
        let first = unsafe { *self.pages.get_unchecked(step * STEP_PAGES) };
        first.wrapping_add(column * self.column)
    }
}

/// Sets a result tile to the sums so far, if they have begun.
macro_rules! begin_sums {
    ($begun:expr, $load:literal, $tile:literal, $from:expr) => {
        if $begun { load!($load, $tile, $from, ROW_BYTES) } else { clear!($tile) }
    };
}

/// into[row] += Σ weights[row][position] · values[position] over all steps. Sums that have not `begun` begin with 0.
///
/// # Safety
/// Tiles are configured for attention with the rows in use; weights are [step][16][32], `into` [d / 16][16][16].
pub(in crate::x86) unsafe fn add_values(
    weights: *const bf16,
    values: ValueTiles<'_>,
    into: *mut f32,
    begun: bool,
    fetcher: &mut Fetcher<'_>,
) {
    let ValueTiles { columns, row_bytes, fetched, .. } = values;
    let steps = values.steps();
    // SAFETY: as promised by the caller.
    unsafe {
        let value = |step: usize, column: usize| values.tile(step, column);
        for first in (0..columns / 4 * 4).step_by(4) {
            let into = into.add(first * RESULT_TILE);
            begin_sums!(begun, "tileloadd", "0", into);
            begin_sums!(begun, "tileloadd", "1", into.add(RESULT_TILE));
            begin_sums!(begun, "tileloadd", "2", into.add(2 * RESULT_TILE));
            begin_sums!(begun, "tileloadd", "3", into.add(3 * RESULT_TILE));
            for step in 0..steps {
                load!("4", weights.add(step * TILE), ROW_BYTES);
                load!("6", value(step, first), row_bytes);
                multiply_tiles!("0", "4", "6");
                fetcher.fetch(fetched);
                load!("6", value(step, first + 1), row_bytes);
                multiply_tiles!("1", "4", "6");
                fetcher.fetch(fetched);
                load!("6", value(step, first + 2), row_bytes);
                multiply_tiles!("2", "4", "6");
                fetcher.fetch(fetched);
                load!("6", value(step, first + 3), row_bytes);
                multiply_tiles!("3", "4", "6");
                fetcher.fetch(fetched);
            }
            store!("0", into);
            store!("1", into.add(RESULT_TILE));
            store!("2", into.add(2 * RESULT_TILE));
            store!("3", into.add(3 * RESULT_TILE));
        }
        for last in columns / 4 * 4..columns {
            let into = into.add(last * RESULT_TILE);
            begin_sums!(begun, "tileloadd", "0", into);
            for step in 0..steps {
                load!("4", weights.add(step * TILE), ROW_BYTES);
                load!("6", value(step, last), row_bytes);
                multiply_tiles!("0", "4", "6");
                fetcher.fetch(fetched);
            }
            store!("0", into);
        }
    }
}

/// As [`add_values`], for two tiles of rows, and with tiles loaded a step ahead. The second tile's weights are
/// `weights_tile` further.
///
/// # Safety
/// As [`add_values`], with whole tiles and d a multiple of 32.
pub(in crate::x86) unsafe fn add_values_of_two(
    weights: *const bf16,
    weights_tile: usize,
    values: ValueTiles<'_>,
    into: [*mut f32; 2],
    begun: [bool; 2],
) {
    let ValueTiles { columns, row_bytes, .. } = values;
    let steps = values.steps();
    let second = weights.wrapping_add(weights_tile);
    // SAFETY: as promised by the caller.
    unsafe {
        load!("4", weights, ROW_BYTES);
        stream!("6", values.tile(0, 0), row_bytes);
        for column in (0..columns).step_by(2) {
            let into = into.map(|into| into.add(column * RESULT_TILE));
            begin_sums!(begun[0], "tileloaddt1", "0", into[0]);
            stream!("7", values.tile(0, column + 1), row_bytes);
            begin_sums!(begun[0], "tileloaddt1", "2", into[0].add(RESULT_TILE));
            load!("5", second, ROW_BYTES);
            begin_sums!(begun[1], "tileloaddt1", "1", into[1]);
            begin_sums!(begun[1], "tileloaddt1", "3", into[1].add(RESULT_TILE));
            for step in 1..steps {
                multiply_tiles!("0", "4", "6");
                multiply_tiles!("2", "4", "7");
                load!("4", weights.add(step * TILE), ROW_BYTES);
                multiply_tiles!("1", "5", "6");
                stream!("6", values.tile(step, column), row_bytes);
                multiply_tiles!("3", "5", "7");
                load!("5", second.add(step * TILE), ROW_BYTES);
                stream!("7", values.tile(step, column + 1), row_bytes);
            }
            multiply_tiles!("0", "4", "6");
            multiply_tiles!("2", "4", "7");
            load!("4", weights, ROW_BYTES);
            multiply_tiles!("1", "5", "6");
            // After the last column, the first is loaded in vain.
            stream!("6", values.tile(0, (column + 2) % columns), row_bytes);
            store!("0", into[0]);
            multiply_tiles!("3", "5", "7");
            store!("2", into[0].add(RESULT_TILE));
            store!("1", into[1]);
            store!("3", into[1].add(RESULT_TILE));
        }
    }
}
