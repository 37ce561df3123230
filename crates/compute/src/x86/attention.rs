//! Attention of one tile: up to 16 (row, query head) pairs of one prompt that share a key/value
//! head, over a range of its positions, by online softmax.
//!
//! Positions go in blocks of 64 and splits of 1024, cut at the same positions for every row, and a
//! position that a row may not see adds exact zeros. So a row's bits depend on the row alone, not
//! on the other rows of its tile or on how many threads share its splits.

use super::amx::{self, Tiles};
use super::for_each_isa;
use super::functions::exp2;
use super::int8::{self, Scales};
use super::pages::{After, BLOCK_PAGES, Fetcher, HeadPages, PAGE};
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{RESULT_TILE, STEP, TILE, TILE_ROWS};
use super::vector::{DotRows, dot_rows};
use crate::memory::Memory;
use crate::{ComputeError, ContextType};
use half::bf16;
use std::ops::Range;

/// Pages of a split.
pub(super) const SPLIT_PAGES: usize = 64;
/// Stands for "no score yet": below any score, but finite, so that differences stay numbers.
const MAXIMUM_NONE: f32 = -1e30;

/// Running softmax of a tile: maxima, sums of weights, and weighted sums of values.
pub(super) struct RunningSoftmax {
    maxima: [f32; TILE_ROWS],
    sums: [f32; TILE_ROWS],
    /// [d / 16][16 rows][16]
    values: Memory<f32>,
}

impl RunningSoftmax {
    pub(super) fn new(head_dim: usize) -> Result<Self, ComputeError> {
        let values = Memory::zeroed("attention sums", head_dim / SIMD_WIDTH * RESULT_TILE)?;
        Ok(Self { maxima: [MAXIMUM_NONE; TILE_ROWS], sums: [0.0; TILE_ROWS], values })
    }

    /// Resets the first `rows` rows: they have seen nothing yet.
    pub(super) fn clear(&mut self, rows: usize) {
        self.maxima = [MAXIMUM_NONE; TILE_ROWS];
        self.sums = [0.0; TILE_ROWS];
        for values in self.values.chunks_exact_mut(RESULT_TILE) {
            values[..rows * SIMD_WIDTH].fill(0.0);
        }
    }
}

/// One thread's scratch.
pub(super) struct Workspace {
    /// [d / 32][16 rows][32]
    pub(super) queries: Memory<bf16>,
    /// [page of the block][16 rows][16 positions]
    scores: Memory<f32>,
    /// [64 / 32][16 rows][32 positions]
    weights: Memory<bf16>,
    /// For int8 pages, the keys or the values of a block as bf16: [page of the block][16 d]
    widened: Memory<bf16>,
    pub(super) part: RunningSoftmax,
    pub(super) total: RunningSoftmax,
    /// The thread's tiles while it attends, and for how many rows they are configured.
    pub(super) tiles: Option<(usize, Tiles)>,
}

impl Workspace {
    pub(super) fn new(head_dim: usize, context_type: ContextType) -> Result<Self, ComputeError> {
        let widened_pages = if context_type == ContextType::Int8 { BLOCK_PAGES } else { 0 };
        Ok(Self {
            queries: Memory::zeroed("queries", head_dim.div_ceil(STEP) * TILE)?,
            scores: Memory::zeroed("scores", BLOCK_PAGES * RESULT_TILE)?,
            weights: Memory::zeroed("attention weights", BLOCK_PAGES * PAGE / STEP * TILE)?,
            widened: Memory::zeroed("widened pages", widened_pages * PAGE * head_dim)?,
            part: RunningSoftmax::new(head_dim)?,
            total: RunningSoftmax::new(head_dim)?,
            tiles: None,
        })
    }

    /// Configures the thread's tiles for this many rows.
    ///
    /// # Safety
    /// The machine has AMX and the process may use it.
    unsafe fn configure_tiles(&mut self, rows: usize) {
        if self.tiles.as_ref().is_none_or(|(configured, _)| *configured != rows) {
            // Drop the old configuration first: dropping it releases the tiles' state.
            self.tiles = None;
            // SAFETY: as promised by the caller.
            self.tiles = Some((rows, unsafe { Tiles::for_attention(rows) }));
        }
    }
}

/// The rows of a tile and what each may see.
pub(super) struct Tile<'a> {
    pub(super) pages: &'a [u32],
    /// First position each tile row sees, and its last.
    pub(super) seen: [(u32, u32); TILE_ROWS],
    pub(super) rows: usize,
    /// Whether products run on AMX tiles.
    pub(super) tiles: bool,
}

impl Tile<'_> {
    /// Pages that any row sees.
    pub(super) fn range(&self) -> Range<usize> {
        let rows = &self.seen[..self.rows];
        let first = rows.iter().map(|seen| seen.0).min().expect("a tile has rows");
        let last = rows.iter().map(|seen| seen.1).max().expect("a tile has rows");
        first as usize / PAGE..last as usize / PAGE + 1
    }
}

/// Writes one position's keys and values into a head's page, [d / 2][16 positions][2] and
/// [16 / 2][d][2]. Other positions of the page may be written at the same time.
#[inline(always)]
unsafe fn store_simd<S: Simd>(keys: &[bf16], values: &[bf16], into: *mut bf16, slot: usize) {
    // SAFETY: every place lies on the page, as promised by the caller.
    unsafe {
        for (pair, keys) in keys.chunks_exact(2).enumerate() {
            into.add(pair * 2 * PAGE + slot * 2)
                .cast::<[bf16; 2]>()
                .write_unaligned([keys[0], keys[1]]);
        }
        let into = into.add(PAGE * keys.len() + slot / 2 * 2 * keys.len() + slot % 2);
        for (column, values) in values.chunks_exact(SIMD_WIDTH).enumerate() {
            S::spread_bf16(values.as_ptr(), into.add(2 * SIMD_WIDTH * column));
        }
    }
}

for_each_isa! {
    /// Stores one position of one head.
    fn store = store_simd(keys: &[bf16], values: &[bf16], into: *mut bf16, slot: usize)
}

/// Attends the queries in `work` to the given pages, all of one split, into `work.part`. `after` is
/// what will be needed next.
#[inline(always)]
unsafe fn attend_simd<S: Simd>(
    tile: &Tile<'_>,
    head: HeadPages,
    range: &Range<usize>,
    after: After<'_>,
    work: &mut Workspace,
) {
    work.part.clear(tile.rows);
    if tile.tiles {
        // SAFETY: the context was made only after checking that the machine has the instruction
        // set.
        unsafe { work.configure_tiles(tile.rows) };
    }
    let mut page = range.start;
    while page < range.end {
        let end = (page / BLOCK_PAGES * BLOCK_PAGES + BLOCK_PAGES).min(range.end);
        let pages = &tile.pages[page..end];
        // SAFETY: pages of the tile exist, and buffers have room for a block, by construction.
        unsafe {
            let mut fetcher = Fetcher::new(if end < range.end {
                After { head, pages: &tile.pages[end..range.end], written: None }
            } else {
                after
            });
            let mut block = [std::ptr::null(); BLOCK_PAGES];
            for (pointer, &page) in block.iter_mut().zip(pages) {
                *pointer = head.page(page);
            }
            let block = Block { pages: block, count: pages.len(), position: page * PAGE };
            attend_block::<S>(tile, head, &block, work, &mut fetcher);
        }
        page = end;
    }
}

/// Pages between two updates of the softmax.
struct Block {
    pages: [*const u8; BLOCK_PAGES],
    count: usize,
    /// First position of the first page.
    position: usize,
}

/// Attends to one block.
#[inline(always)]
unsafe fn attend_block<S: Simd>(
    tile: &Tile<'_>,
    head: HeadPages,
    block: &Block,
    work: &mut Workspace,
    fetcher: &mut Fetcher,
) {
    let (dim, part_values) = (head.head_dim, PAGE * head.head_dim);
    // SAFETY: as promised by the caller; values follow the keys.
    unsafe {
        match head.context_type {
            ContextType::Bf16 => {
                let keys = block.pages.map(|page| page.cast::<bf16>());
                let values = keys.map(|keys| keys.wrapping_add(part_values));
                score_pages::<S>(tile, dim, &keys[..block.count], work, fetcher);
                weigh_rows::<S, false>(tile, dim, block, work, fetcher);
                add_values::<S>(tile, dim, &values[..block.count], work, fetcher);
            }
            ContextType::Int8 => {
                let keys = block.pages.map(|page| page.cast::<i8>());
                let values = keys.map(|keys| keys.wrapping_add(part_values));
                let into = work.widened.as_mut_ptr();
                let widened: [_; BLOCK_PAGES] =
                    std::array::from_fn(|page| into.wrapping_add(page * part_values).cast_const());
                let widened = &widened[..block.count];
                int8::widen::<S>(&keys[..block.count], part_values, into, tile.tiles, fetcher);
                score_pages::<S>(tile, dim, widened, work, fetcher);
                weigh_rows::<S, true>(tile, dim, block, work, fetcher);
                int8::widen::<S>(&values[..block.count], part_values, into, tile.tiles, fetcher);
                add_values::<S>(tile, dim, widened, work, fetcher);
            }
        }
    }
}

/// Scores of all rows for a block's pages: q · k, not yet scaled.
#[inline(always)]
unsafe fn score_pages<S: Simd>(
    tile: &Tile<'_>,
    head_dim: usize,
    keys: &[*const bf16],
    work: &mut Workspace,
    fetcher: &mut Fetcher,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let into = work.scores.as_mut_ptr();
        if tile.tiles {
            return amx::score_pages(work.queries.as_ptr(), keys, head_dim, into, fetcher);
        }
        for (index, &keys) in keys.iter().enumerate() {
            fetcher.fetch(head_dim / SIMD_WIDTH);
            dot_rows::<S>(&DotRows {
                left: work.queries.as_ptr(),
                rows: tile.rows,
                right: keys,
                right_pair: 2 * PAGE,
                right_panel: 0,
                panels: 1,
                pairs: head_dim / 2,
                result: into.add(index * RESULT_TILE),
                accumulate: false,
            });
        }
    }
}

/// Turns the scores of a block into weights, row by row. If pages have scales (`SCALED`), a key's
/// scale multiplies its score. A value's scale multiplies its weight, after the weight was added to
/// the sum.
#[inline(always)]
unsafe fn weigh_rows<S: Simd, const SCALED: bool>(
    tile: &Tile<'_>,
    head_dim: usize,
    block: &Block,
    work: &mut Workspace,
    fetcher: &mut Fetcher,
) {
    let share = fetcher.share_of_row(tile.rows);
    for row in 0..tile.rows {
        fetcher.fetch(share);
        // SAFETY: as promised by the caller.
        unsafe { weigh_row::<S, SCALED>(tile, row, head_dim, block, work) };
    }
}

/// Turns one row's scores of a block into weights, and rescales what came before.
#[inline(always)]
unsafe fn weigh_row<S: Simd, const SCALED: bool>(
    tile: &Tile<'_>,
    row: usize,
    head_dim: usize,
    block: &Block,
    work: &mut Workspace,
) {
    let pages = &block.pages[..block.count];
    let (first, last) = tile.seen[row];
    // SAFETY: rows and pages inside the block's buffers.
    unsafe {
        let scale = S::splat(std::f32::consts::LOG2_E / (head_dim as f32).sqrt());
        let none = S::splat(f32::NEG_INFINITY);
        let mut scores = [none; BLOCK_PAGES];
        let mut maximum = none;
        for (page, (score, &at)) in scores.iter_mut().zip(pages).enumerate() {
            let start = block.position + page * PAGE;
            *score = S::load(work.scores.as_ptr().add(page * RESULT_TILE + row * PAGE));
            if SCALED {
                *score = score.multiply(S::load((*Scales::of(at, head_dim)).keys.as_ptr()));
            }
            *score = score.multiply(scale);
            if start < first as usize || start + PAGE - 1 > last as usize {
                let positions = S::load(COUNT.as_ptr()).add(S::splat(start as f32));
                *score = positions.if_greater(S::splat(last as f32), none, *score);
                *score = S::splat(first as f32).if_greater(positions, none, *score);
            }
            maximum = maximum.max(*score);
        }
        let part = &mut work.part;
        let before = part.maxima[row];
        let maximum = maximum.largest().max(before);
        let mut sum = S::splat(0.0);
        for (page, (score, &at)) in scores.into_iter().zip(pages).enumerate() {
            let mut weight = exp2(score.subtract(S::splat(maximum)));
            sum = sum.add(weight);
            if SCALED {
                weight = weight.multiply(S::load((*Scales::of(at, head_dim)).values.as_ptr()));
            }
            let place = page / 2 * TILE + row * STEP + page % 2 * PAGE;
            weight.store_bf16(work.weights.as_mut_ptr().add(place));
        }
        if maximum > before {
            let factor = S::splat(before - maximum);
            let factor = exp2(factor);
            for values in part.values.chunks_exact_mut(RESULT_TILE) {
                let values = values[row * SIMD_WIDTH..].as_mut_ptr();
                S::load(values).multiply(factor).store(values);
            }
            part.sums[row] *= factor.to_array()[0];
            part.maxima[row] = maximum;
        }
        part.sums[row] += sum.sum();
    }
}

/// Adds the block's values, weighted.
#[inline(always)]
unsafe fn add_values<S: Simd>(
    tile: &Tile<'_>,
    head_dim: usize,
    values: &[*const bf16],
    work: &mut Workspace,
    fetcher: &mut Fetcher,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        if tile.tiles {
            let into = work.part.values.as_mut_ptr();
            return amx::add_values(work.weights.as_ptr(), values, head_dim, into, fetcher);
        }
        for (index, &values) in values.iter().enumerate() {
            let columns = head_dim / SIMD_WIDTH;
            for column in (0..columns).step_by(2) {
                let panels = (columns - column).min(2);
                fetcher.fetch(2 * panels);
                dot_rows::<S>(&DotRows {
                    left: work.weights.as_ptr().add(index / 2 * TILE + index % 2 * PAGE),
                    rows: tile.rows,
                    right: values.add(2 * SIMD_WIDTH * column),
                    right_pair: 2 * head_dim,
                    right_panel: 2 * SIMD_WIDTH,
                    panels,
                    pairs: PAGE / 2,
                    result: work.part.values.as_mut_ptr().add(column * RESULT_TILE),
                    accumulate: true,
                });
            }
        }
    }
}

const COUNT: [f32; SIMD_WIDTH] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

for_each_isa! {
    /// Attends a tile to the pages of one split.
    fn attend = attend_simd(
        tile: &Tile<'_>,
        head: HeadPages,
        range: &Range<usize>,
        after: After<'_>,
        work: &mut Workspace,
    )
}

/// Adds a split's part to the total. Rows that saw nothing in the split do not change.
#[inline(always)]
unsafe fn combine_simd<S: Simd>(rows: usize, part: &RunningSoftmax, total: &mut RunningSoftmax) {
    for row in (0..rows).filter(|&row| part.sums[row] != 0.0) {
        let maximum = total.maxima[row].max(part.maxima[row]);
        // SAFETY: rows of both parts, which are of one size.
        unsafe {
            let old = exp2(S::splat(total.maxima[row] - maximum));
            let new = exp2(S::splat(part.maxima[row] - maximum));
            let tiles = total
                .values
                .chunks_exact_mut(RESULT_TILE)
                .zip(part.values.chunks_exact(RESULT_TILE));
            for (total, part) in tiles {
                let total = total[row * SIMD_WIDTH..].as_mut_ptr();
                let part = S::load(part[row * SIMD_WIDTH..].as_ptr()).multiply(new);
                S::load(total).multiply_add(old, part).store(total);
            }
            total.sums[row] =
                total.sums[row] * old.to_array()[0] + part.sums[row] * new.to_array()[0];
            total.maxima[row] = maximum;
        }
    }
}

for_each_isa! {
    /// Adds a split's part to the total.
    fn combine = combine_simd(rows: usize, part: &RunningSoftmax, total: &mut RunningSoftmax)
}

/// The attention output of one tile row, `head_dim` values.
#[inline(always)]
unsafe fn finish_row_simd<S: Simd>(row: usize, total: &RunningSoftmax, into: *mut bf16) {
    // SAFETY: `into` has room for the head, as promised by the caller.
    unsafe {
        let reciprocal = S::splat(1.0 / total.sums[row]);
        for (column, values) in total.values.chunks_exact(RESULT_TILE).enumerate() {
            // Adding 0 turns a negative zero into a positive one. Otherwise the sign could depend
            // on the rest of the tile.
            let value = S::load(values[row * SIMD_WIDTH..].as_ptr())
                .multiply_add(reciprocal, S::splat(0.0));
            value.store_bf16(into.add(column * SIMD_WIDTH));
        }
    }
}

for_each_isa! {
    /// Writes one row's attention output.
    fn finish_row = finish_row_simd(row: usize, total: &RunningSoftmax, into: *mut bf16)
}
