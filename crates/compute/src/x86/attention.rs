//! Attention of one job: some (row, query head) pairs of one prompt that share a key/value head, in tiles of 16, over a
//! range of its positions, by online softmax.
//!
//! Positions go in steps of 32, blocks of 64 and splits of 1024, cut at the same positions for every row, and a
//! position that a row may not see adds exact zeros. So a row's bits depend on the row alone, not on the other rows of
//! its job or on how many threads share its splits. How many blocks' values are added together (a stretch) does not
//! change bits: a sum continues where it was.

use super::amx::{self, Tiles, ValueTiles};
use super::for_each_isa;
use super::int8;
use super::pages::{After, BLOCK_PAGES, Fetcher, HeadPages, PAGE, STRETCH_PAGES};
use super::simd::{SIMD_WIDTH, Simd};
use super::softmax::{self, BlockRow, RunningSoftmax};
use super::tiles::{RESULT_TILE, STEP, TILE, TILE_ROWS};
use super::vector::{DotRows, HALF_PAIRS, dot_rows};
use super::weigh::{Weigh, tile_pair};
use crate::memory::Memory;
use crate::{ComputeError, ContextType};
use half::bf16;
use std::ops::Range;

/// Pages of a split.
pub(super) const SPLIT_PAGES: usize = 64;
/// Tiles of a job at most. Each reads the same keys and values, so that they come from a cache; but what the tiles
/// themselves keep must stay in it too.
const JOB_TILES: usize = 96;
/// Head size for which there are so many; larger heads have fewer.
const JOB_HEAD_DIM: usize = 64;

/// Pages of one step of the values' product.
const STEP_PAGES: usize = STEP / PAGE;
/// Tiles that go through the products together.
const TILES_TOGETHER: usize = 2;
/// Rows of a tile that become weights before the next lines are fetched, if a job has several tiles.
const ROWS_AT_ONCE: usize = 8;
/// Weights of one tile and one stretch.
const STRETCH_WEIGHTS: usize = STRETCH_PAGES / STEP_PAGES * TILE;

/// Tiles of a job at most, an even number.
pub(super) fn job_tiles_max(head_dim: usize) -> usize {
    (JOB_TILES * JOB_HEAD_DIM / head_dim).clamp(2, JOB_TILES) / 2 * 2
}

/// One thread's scratch.
pub(super) struct Workspace {
    /// [tile][d / 32][16 rows][32]
    pub(super) queries: Memory<bf16>,
    /// [tile of two][page of the block][16 rows][16 positions]
    scores: Memory<f32>,
    /// [tile of two][step of the stretch][16 rows][32 positions]
    weights: Memory<bf16>,
    /// For int8 pages, a stretch's keys as bf16: [page][16 d]
    keys: Memory<bf16>,
    /// A stretch's values as bf16. For int8 pages, one page after the other: [page][16 / 2][d][2]. For tiles, tile
    /// after tile: [step][d / 16][32 / 2][16][2]
    values: Memory<bf16>,
    /// One for each tile of the job.
    pub(super) parts: Vec<RunningSoftmax>,
    pub(super) totals: Vec<RunningSoftmax>,
    /// The thread's tiles while it attends, and for how many rows they are configured.
    pub(super) tiles: Option<(usize, Tiles)>,
}

impl Workspace {
    pub(super) fn new(head_dim: usize, context_type: ContextType) -> Result<Self, ComputeError> {
        let keys_pages = if context_type == ContextType::Int8 { STRETCH_PAGES } else { 0 };
        let tiles = job_tiles_max(head_dim);
        let softmaxes = || (0..tiles).map(|_| RunningSoftmax::new(head_dim));
        let scores = TILES_TOGETHER * BLOCK_PAGES * RESULT_TILE;
        Ok(Self {
            queries: Memory::zeroed("queries", tiles * head_dim.div_ceil(STEP) * TILE)?,
            scores: Memory::zeroed("scores", scores)?,
            weights: Memory::zeroed("attention weights", TILES_TOGETHER * STRETCH_WEIGHTS)?,
            keys: Memory::zeroed("widened keys", keys_pages * PAGE * head_dim)?,
            values: Memory::zeroed("values of a stretch", STRETCH_PAGES * PAGE * head_dim)?,
            parts: softmaxes().collect::<Result<_, _>>()?,
            totals: softmaxes().collect::<Result<_, _>>()?,
            tiles: None,
        })
    }

    /// Clears the parts of so many rows: they have seen nothing of a split yet.
    pub(super) fn clear_parts(&mut self, rows: usize) {
        softmax::clear(&mut self.parts, rows);
    }

    /// Configures the thread's tiles for this many rows.
    ///
    /// # Safety
    /// The machine has AMX and the process may use it.
    unsafe fn configure_tiles(&mut self, rows: usize, head_dim: usize) {
        if self.tiles.as_ref().is_none_or(|(configured, _)| *configured != rows) {
            // Drop the old configuration first: dropping it releases the tiles' state.
            self.tiles = None;
            let tail = !head_dim.is_multiple_of(STEP);
            // SAFETY: as promised by the caller.
            self.tiles = Some((rows, unsafe { Tiles::for_attention(rows, tail) }));
        }
    }
}

/// The rows of a job and what each may see.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub(super) pages: &'a [u32],
    /// Position of the first row. The next row is the next query head at the same position, or the first one at the
    /// next position.
    pub(super) position: u32,
    /// The first row's query head and how many there are.
    pub(super) head: u32,
    pub(super) heads: u32,
    /// Positions that a row sees, its own included.
    pub(super) window: u32,
    pub(super) rows: usize,
    /// Whether products run on AMX tiles.
    pub(super) tiles: bool,
}

impl Queries<'_> {
    /// The first and the last position that a row sees.
    #[inline(always)]
    fn seen(&self, row: usize) -> (u32, u32) {
        let last = self.position + (self.head + row as u32) / self.heads;
        (last.saturating_sub(self.window - 1), last)
    }

    /// Pages that any row sees, from a step's first page on.
    pub(super) fn range(&self) -> Range<usize> {
        self.range_of(0..self.rows)
    }

    #[inline(always)]
    fn range_of(&self, rows: Range<usize>) -> Range<usize> {
        let (first, last) = (self.seen(rows.start).0, self.seen(rows.end - 1).1);
        first as usize / STEP * STEP_PAGES..last as usize / PAGE + 1
    }

    /// How many tiles the rows fill.
    pub(super) fn tile_count(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }
}

/// Attends the queries in `work` to the given pages, all of one split, and adds that to `work.parts`. `after` is what
/// will be needed next.
#[inline(always)]
unsafe fn attend_simd<S: Weigh>(
    queries: &Queries<'_>,
    head: HeadPages,
    range: &Range<usize>,
    after: After<'_>,
    work: &mut Workspace,
) {
    if queries.tiles {
        // SAFETY: the context was made only after checking that the machine has the instruction
        // set.
        unsafe { work.configure_tiles(queries.rows.min(TILE_ROWS), head.head_dim) };
    }
    let several = queries.tile_count() > 1;
    let stretch_pages = if several { STRETCH_PAGES } else { BLOCK_PAGES };
    let mut page = range.start;
    while page < range.end {
        let end = ((page / stretch_pages + 1) * stretch_pages).min(range.end);
        let after = if end < range.end {
            After { head, pages: &queries.pages[end..range.end], written: None }
        } else {
            after
        };
        let fetcher = Fetcher::new(after, stretch_pages);
        // SAFETY: pages of the job exist, and buffers have room for a stretch, by construction.
        unsafe {
            let mut stretch = Stretch::new(queries, head, page..end, fetcher);
            match head.context_type {
                ContextType::Bf16 => stretch.attend::<S, false>(work),
                ContextType::Int8 => stretch.attend::<S, true>(work),
            }
        }
        page = end;
    }
}

for_each_isa! {
    /// Attends a job to the pages of one split.
    fn attend = attend_simd(
        queries: &Queries<'_>,
        head: HeadPages,
        range: &Range<usize>,
        after: After<'_>,
        work: &mut Workspace,
    )
}

/// Pages whose values are added together.
struct Stretch<'a> {
    queries: &'a Queries<'a>,
    head: HeadPages,
    range: Range<usize>,
    pages: [*const u8; STRETCH_PAGES],
    /// Whether the values are where the products want them.
    values_ready: bool,
    fetcher: Fetcher<'a>,
}

impl<'a> Stretch<'a> {
    #[inline(always)]
    unsafe fn new(
        queries: &'a Queries<'a>,
        head: HeadPages,
        range: Range<usize>,
        fetcher: Fetcher<'a>,
    ) -> Self {
        let mut pages = [std::ptr::null(); STRETCH_PAGES];
        for (pointer, &page) in pages.iter_mut().zip(&queries.pages[range.clone()]) {
            // SAFETY: the page exists, as promised by the caller.
            *pointer = unsafe { head.page(page) };
        }
        Self { queries, head, range, pages, values_ready: false, fetcher }
    }

    /// Attends all tiles. The keys and values of a stretch stay in a cache meanwhile.
    #[inline(always)]
    unsafe fn attend<S: Weigh, const SCALED: bool>(&mut self, work: &mut Workspace) {
        // SAFETY: as promised by the caller.
        unsafe {
            if SCALED {
                let count = PAGE * self.head.head_dim;
                let into = work.keys.as_mut_ptr();
                let pages = self.pages.map(|page| page.cast());
                let pages = &pages[..self.range.len()];
                int8::widen::<S>(pages, count, into, self.queries.tiles, &mut self.fetcher);
            }
            let together = if self.queries.tiles && self.head.head_dim.is_multiple_of(STEP) {
                TILES_TOGETHER
            } else {
                1
            };
            let count = self.queries.tile_count();
            for first in (0..count).step_by(together) {
                self.attend_tiles::<S, SCALED>(first..(first + together).min(count), work);
            }
        }
    }

    /// Attends one tile or two.
    #[inline(always)]
    unsafe fn attend_tiles<S: Weigh, const SCALED: bool>(
        &mut self,
        tiles: Range<usize>,
        work: &mut Workspace,
    ) {
        let rows = tiles.start * TILE_ROWS..(tiles.end * TILE_ROWS).min(self.queries.rows);
        let seen = self.queries.range_of(rows.clone());
        let end = self.range.end.min(seen.end);
        let mut page = self.range.start.max(seen.start);
        let mut added = page;
        let share = if self.queries.tile_count() == 1 {
            self.fetcher.share_of_row(rows.len())
        } else {
            let blocks = self.range.len().div_ceil(BLOCK_PAGES);
            self.fetcher.whole_share_of_row(blocks * self.queries.rows)
        };
        // SAFETY: as promised by the caller.
        unsafe {
            while page < end {
                let block_end = ((page / BLOCK_PAGES + 1) * BLOCK_PAGES).min(end);
                let block = page - self.range.start..block_end - self.range.start;
                self.score::<S, SCALED>(&tiles, block.clone(), work);
                let (first, last) =
                    (self.queries.seen(rows.end - 1).0, self.queries.seen(rows.start).1);
                let whole = block.len() == BLOCK_PAGES
                    && first as usize <= page * PAGE
                    && block_end * PAGE <= last as usize + 1;
                let raised = match (whole, self.queries.tiles) {
                    (true, true) => self.weigh::<S, SCALED, true, true>(&tiles, block, share, work),
                    (true, false) => {
                        self.weigh::<S, SCALED, true, false>(&tiles, block, share, work)
                    }
                    (false, true) => {
                        self.weigh::<S, SCALED, false, true>(&tiles, block, share, work)
                    }
                    (false, false) => {
                        self.weigh::<S, SCALED, false, false>(&tiles, block, share, work)
                    }
                };
                if raised {
                    self.add_values::<S, SCALED>(&tiles, added..page, work);
                    work.parts[tiles.clone()].iter_mut().for_each(|part| part.scale_values::<S>());
                    added = page;
                }
                page = block_end;
            }
            self.add_values::<S, SCALED>(&tiles, added..end, work);
        }
    }

    /// Turns the scores of one tile or two into weights, for a block's pages, counted from the stretch's first.
    /// Returns whether sums of values must be scaled before the block's are added. Between two rows, `share` groups of
    /// lines are fetched.
    #[inline(always)]
    unsafe fn weigh<S: Weigh, const SCALED: bool, const WHOLE: bool, const TILES: bool>(
        &mut self,
        tiles: &Range<usize>,
        block: Range<usize>,
        share: usize,
        work: &mut Workspace,
    ) -> bool {
        let head_dim = self.head.head_dim;
        let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
        let position = (self.range.start + block.start) * PAGE;
        let pages = &self.pages[block.clone()];
        let mut raised = false;
        // Few instructions between the rows of whole tiles: they would take as long as the rows themselves.
        let rows_at_once = if self.queries.tile_count() == 1 { 1 } else { ROWS_AT_ONCE };
        for tile in tiles.clone() {
            let index = tile - tiles.start;
            let scores = work.scores[index * BLOCK_PAGES * RESULT_TILE..].as_ptr();
            let weights =
                stretch_weights(work, index).wrapping_add(block.start / STEP_PAGES * TILE);
            let part = &mut work.parts[tile];
            let first_row = tile * TILE_ROWS;
            let rows = (self.queries.rows - first_row).min(TILE_ROWS);
            for first in (0..rows).step_by(rows_at_once) {
                let rows = first..(first + rows_at_once).min(rows);
                if !self.fetcher.is_done() {
                    self.fetcher.fetch(rows.len() * share);
                }
                for row in rows {
                    let block = BlockRow {
                        scores: scores.wrapping_add(row * PAGE),
                        weights: weights.wrapping_add(row * STEP),
                        pages,
                        position,
                        seen: if WHOLE { (0, 0) } else { self.queries.seen(first_row + row) },
                        head_dim,
                        scale,
                    };
                    // SAFETY: as promised by the caller.
                    unsafe { part.weigh::<S, SCALED, WHOLE, TILES>(row, &block, &mut raised) };
                }
            }
        }
        raised
    }

    /// Scores of one tile or two for a block's pages, counted from the stretch's first: q · k, not yet scaled.
    #[inline(always)]
    unsafe fn score<S: Simd, const SCALED: bool>(
        &mut self,
        tiles: &Range<usize>,
        block: Range<usize>,
        work: &mut Workspace,
    ) {
        let head_dim = self.head.head_dim;
        let mut keys = [std::ptr::null(); BLOCK_PAGES];
        for (keys, page) in keys.iter_mut().zip(block.clone()) {
            *keys = match SCALED {
                true => work.keys.as_ptr().wrapping_add(page * PAGE * head_dim),
                false => self.pages[page].cast(),
            };
        }
        let keys = &keys[..block.len()];
        // SAFETY: as promised by the caller.
        unsafe {
            let queries = work.queries.as_ptr().add(tiles.start * head_dim.div_ceil(STEP) * TILE);
            let into = work.scores.as_mut_ptr();
            if tiles.len() == TILES_TOGETHER {
                return amx::score_pages_of_two(queries, keys, head_dim, into);
            }
            if self.queries.tiles {
                return amx::score_pages(queries, keys, head_dim, into, &mut self.fetcher);
            }
            for (index, keys) in keys.chunks(2).enumerate() {
                self.fetcher.fetch(keys.len() * head_dim / SIMD_WIDTH);
                let right = |half: usize, panel: usize| {
                    keys[panel].wrapping_add(half * HALF_PAIRS * 2 * PAGE)
                };
                dot_rows::<S>(&DotRows {
                    left: queries,
                    left_block: 0,
                    rows: (self.queries.rows - tiles.start * TILE_ROWS).min(TILE_ROWS),
                    right,
                    right_pair: 2 * PAGE,
                    panels: keys.len(),
                    halves: head_dim / PAGE,
                    result: into.add(2 * index * RESULT_TILE),
                    accumulate: false,
                });
            }
        }
    }

    /// Adds the values of some pages, weighted, to the sums of one tile or two.
    #[inline(always)]
    unsafe fn add_values<S: Simd, const SCALED: bool>(
        &mut self,
        tiles: &Range<usize>,
        pages: Range<usize>,
        work: &mut Workspace,
    ) {
        if pages.is_empty() {
            return;
        }
        let head_dim = self.head.head_dim;
        let pages = pages.start - self.range.start..pages.end - self.range.start;
        // SAFETY: as promised by the caller.
        unsafe {
            self.prepare_values::<S, SCALED>(work);
            let (step, steps) = (pages.start / STEP_PAGES, pages.len().div_ceil(STEP_PAGES));
            let weights = stretch_weights(work, 0).add(step * TILE);
            let part = &mut work.parts[tiles.start];
            let (into, begun) = (part.values.as_mut_ptr(), part.begun);
            part.begun = true;
            if self.queries.tiles {
                let first = work.values.as_ptr().wrapping_add(pages.start * PAGE * head_dim);
                let values = match SCALED {
                    true => ValueTiles::in_pages(first, steps, head_dim),
                    false => ValueTiles::packed(first, steps, head_dim),
                };
                if tiles.len() == TILES_TOGETHER {
                    let second = &mut work.parts[tiles.start + 1];
                    let begun = [begun, std::mem::replace(&mut second.begun, true)];
                    let into = [into, second.values.as_mut_ptr()];
                    return amx::add_values_of_two(weights, STRETCH_WEIGHTS, values, into, begun);
                }
                return amx::add_values(weights, values, into, begun, &mut self.fetcher);
            }
            let columns = head_dim / SIMD_WIDTH;
            let values = work.values.as_ptr();
            // A few at a time if lines are fetched meanwhile.
            let together = if self.queries.tile_count() == 1 { STEP_PAGES } else { STRETCH_PAGES };
            for first in pages.clone().step_by(together) {
                let count = (pages.end - first).min(together);
                for column in (0..columns).step_by(2) {
                    let panels = (columns - column).min(2);
                    self.fetcher.fetch(2 * panels * count);
                    let right = |half: usize, panel: usize| {
                        let page = first + half;
                        let values = match SCALED {
                            true => values.wrapping_add(page * PAGE * head_dim),
                            false => self.pages[page].cast::<bf16>().wrapping_add(PAGE * head_dim),
                        };
                        values.wrapping_add(2 * SIMD_WIDTH * (column + panel))
                    };
                    dot_rows::<S>(&DotRows {
                        left: stretch_weights(work, 0).add(first / STEP_PAGES * TILE),
                        left_block: 0,
                        rows: (self.queries.rows - tiles.start * TILE_ROWS).min(TILE_ROWS),
                        right,
                        right_pair: 2 * head_dim,
                        panels,
                        halves: count,
                        result: into.add(column * RESULT_TILE),
                        accumulate: begun || first > pages.start,
                    });
                }
            }
        }
    }

    /// Brings the values of all pages to where the products want them. A tile holds those of two pages, which stand
    /// apart.
    #[inline(always)]
    unsafe fn prepare_values<S: Simd, const SCALED: bool>(&mut self, work: &mut Workspace) {
        if self.values_ready || !(SCALED || self.queries.tiles) {
            return;
        }
        self.values_ready = true;
        let count = PAGE * self.head.head_dim;
        let into = work.values.as_mut_ptr();
        let stored = self.range.len();
        // SAFETY: a stretch's pages have `count` values each, and `into` has room for a whole stretch.
        unsafe {
            if SCALED {
                let values = self.pages.map(|page| page.wrapping_add(count).cast());
                let tiles = self.queries.tiles;
                int8::widen::<S>(&values[..stored], count, into, tiles, &mut self.fetcher);
                if !stored.is_multiple_of(STEP_PAGES) {
                    // Their weights are 0, but what an earlier stretch left there may be NaN.
                    into.add(stored * count).write_bytes(0, count);
                }
            } else {
                self.pack_values::<S>(into);
            }
        }
    }

    /// Copies the values of all pages into tiles: [step][d / 16][32 / 2][16][2], pairs of positions as weights have them.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&mut self, into: *mut bf16) {
        const LINE: usize = 2 * SIMD_WIDTH;
        let head_dim = self.head.head_dim;
        let stored = self.range.len();
        let fetched = usize::from(self.queries.tile_count() == 1);
        for page in 0..stored.next_multiple_of(STEP_PAGES) {
            let step = into.wrapping_add(page / STEP_PAGES * STEP * head_dim);
            for pair in 0..PAGE / 2 {
                let into = step.wrapping_add(tile_pair(page % STEP_PAGES == 1, pair) * LINE);
                // SAFETY: every line lies on a page of the stretch, or in its tile.
                unsafe {
                    if page == stored {
                        // Their weights are 0, but what an earlier stretch left there may be NaN.
                        (0..head_dim / SIMD_WIDTH)
                            .for_each(|column| into.add(column * TILE).write_bytes(0, LINE));
                        continue;
                    }
                    self.fetcher
                        .fetch(fetched * (head_dim * (pair + 1) / 128 - head_dim * pair / 128));
                    let values = self.pages[page].cast::<bf16>().add((PAGE + 2 * pair) * head_dim);
                    for column in 0..head_dim / SIMD_WIDTH {
                        let line = S::load(values.add(column * LINE).cast());
                        line.store(into.add(column * TILE).cast());
                    }
                }
            }
        }
    }
}

/// The weights of a stretch, of the first or the second tile.
#[inline(always)]
fn stretch_weights(work: &mut Workspace, tile: usize) -> *mut bf16 {
    work.weights[tile * STRETCH_WEIGHTS..].as_mut_ptr()
}
