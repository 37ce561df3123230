//! The two products of attention on tiles: queries with keys, weights with values.

use super::{ROW_BYTES, clear, load, multiply_tiles, store};
use crate::x86::pages::{Fetcher, PAGE};
use crate::x86::tiles::{PANEL, RESULT_TILE, STEP, TILE};
use half::bf16;

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
    fetcher: &mut Fetcher,
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

/// into[row] += Σ weights[row][position] · values[position] over a block's pages.
///
/// # Safety
/// Tiles are configured for attention with the rows in use; weights are [position / 32][16][32], each page's
/// values [16 / 2][d][2], `into` [d / 16][16][16].
pub(in crate::x86) unsafe fn add_values(
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
                multiply_tiles!("0", "5", "7");
                fetcher.fetch(2);
                load!("7", column(values, first + 1), row_bytes);
                multiply_tiles!("1", "5", "7");
                fetcher.fetch(2);
                load!("7", column(values, first + 2), row_bytes);
                multiply_tiles!("2", "5", "7");
                fetcher.fetch(2);
                load!("7", column(values, first + 3), row_bytes);
                multiply_tiles!("3", "5", "7");
                fetcher.fetch(2);
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
                multiply_tiles!("0", "5", "7");
                fetcher.fetch(2);
            }
            store!("0", into);
        }
    }
}
