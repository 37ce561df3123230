//! Attention to a stretch of pages: scores become weights block after block, and then the values of the whole stretch are
//! added.

use super::{Queries, STEP_PAGES, STRETCH_WEIGHTS, TILES_TOGETHER, Workspace};
use crate::ContextType;
use crate::x86::amx::{self, ValueTiles};
use crate::x86::int8;
use crate::x86::pages::{
    BLOCK_PAGES, Fetcher, HeadPages, LINE_VALUES, PAGE, PAGE_LINES, STRETCH_PAGES, Together,
};
use crate::x86::simd::{SIMD_WIDTH, Simd};
use crate::x86::softmax::{self, BlockRow, TileBlock};
use crate::x86::tiles::{RESULT_TILE, STEP, TILE, TILE_ROWS};
use crate::x86::vector::{DotRows, HALF_PAIRS, dot_rows};
use crate::x86::weigh::{Weigh, tile_pair};
use half::bf16;
use std::ops::Range;

/// From so many tiles of a job on, lines are fetched once for each block of one tile or two. A few instructions for each
/// row would take as long as the row itself. With fewer tiles they are fetched more often, so that not too many are on
/// their way.
pub(in crate::x86) const MANY_TILES: usize = 32;
/// Lines of rows that are fetched with each block of two tiles. A core has 16 on their way at most.
const ROW_LINES: usize = 16;
/// Rows that become weights before the next lines are fetched, if tiles are few.
const FEW_ROWS: usize = 8;

/// Pages whose values are added together.
pub(super) struct Stretch<'a> {
    queries: &'a Queries<'a>,
    head: HeadPages,
    range: Range<usize>,
    pages: [*const u8; STRETCH_PAGES],
    /// Each page's keys as bf16. Those of int8 pages are widened first.
    keys: [*const bf16; STRETCH_PAGES],
    /// The first line of each page's values. Where pages stand together, those of every second page are a step's tiles;
    /// others are copied, and int8 ones widened, before they are used.
    values: [*const bf16; STRETCH_PAGES],
    /// log2 e / √d
    scale: f32,
    /// Whether the values are where the products want them.
    values_ready: bool,
    fetcher: Fetcher<'a>,
    /// Rows that become weights before the next lines are fetched, and how many groups of lines then are.
    rows_at_once: usize,
    share: usize,
}

/// A bit for each position of a block that begins at `start` and is below `end`.
#[inline(always)]
fn positions_below(end: usize, start: usize) -> u64 {
    match end.saturating_sub(start) {
        count if count >= BLOCK_PAGES * PAGE => u64::MAX,
        count => (1 << count) - 1,
    }
}

impl<'a> Stretch<'a> {
    #[inline(always)]
    pub(super) fn new(
        queries: &'a Queries<'a>,
        head: HeadPages,
        range: Range<usize>,
        fetcher: Fetcher<'a>,
    ) -> Self {
        let mut pages = [std::ptr::null(); STRETCH_PAGES];
        let mut values = [std::ptr::null(); STRETCH_PAGES];
        for (index, &page) in queries.pages[range.clone()].iter().enumerate() {
            let place = head.first.wrapping_add(head.place(page));
            pages[index] = place.wrapping_add(head.keys(page));
            if head.context_type == ContextType::Bf16 {
                let lines = usize::from(head.second(page)) * PAGE_LINES * LINE_VALUES;
                let first = place.wrapping_add(head.values()).cast::<bf16>();
                values[index] = first.wrapping_add(lines);
            }
        }
        let keys = pages.map(|page| page.cast());
        let blocks = range.len().div_ceil(BLOCK_PAGES);
        let (rows_at_once, share) = match queries.tile_count() {
            1 => (1, fetcher.share_of_row(queries.rows)),
            2..MANY_TILES => (FEW_ROWS, FEW_ROWS * fetcher.share(blocks * queries.rows)),
            // Twice what all tiles and blocks would need, because not all rows of a prompt see all of them.
            tiles => (TILE_ROWS, fetcher.share(blocks * tiles / 2)),
        };
        let scale = std::f32::consts::LOG2_E / (head.head_dim as f32).sqrt();
        Self {
            queries,
            head,
            range,
            pages,
            keys,
            values,
            scale,
            values_ready: false,
            fetcher,
            rows_at_once,
            share,
        }
    }

    /// Whether products run on tiles. Paths that never do need no code for it.
    #[inline(always)]
    fn tiles<S: Weigh>(&self) -> bool {
        S::MAY_HAVE_TILES && self.queries.tiles
    }

    /// Attends all tiles. The keys and values of a stretch stay in a cache meanwhile.
    #[inline(always)]
    pub(super) unsafe fn attend<S: Weigh, const SCALED: bool>(&mut self, work: &mut Workspace) {
        // SAFETY: as promised by the caller.
        unsafe {
            if SCALED {
                let count = PAGE * self.head.head_dim;
                let into = work.keys.as_mut_ptr();
                let pages = self.pages.map(|page| page.cast());
                let pages = &pages[..self.range.len()];
                int8::widen::<S>(pages, count, into, self.queries.tiles, &mut self.fetcher);
                let first = into.cast_const();
                self.keys = std::array::from_fn(|page| first.wrapping_add(page * count));
            }
            let together = if self.tiles::<S>() && self.head.head_dim.is_multiple_of(STEP) {
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
        // What all rows see.
        let (first, last) = (self.queries.seen(rows.end - 1).0, self.queries.seen(rows.start).1);
        // SAFETY: as promised by the caller.
        unsafe {
            let (start, many) = (self.range.start, self.rows_at_once == TILE_ROWS);
            let block_from = |page: usize| {
                let block_end = ((page / BLOCK_PAGES + 1) * BLOCK_PAGES).min(end);
                page - start..block_end - start
            };
            let mut begun = false;
            while page < end {
                let block = block_from(page);
                let block_end = start + block.end;
                let blocks = [block.clone(), block_from(block_end)];
                begun = self.score::<S>(&tiles, blocks, begun, work);
                let whole = block.len() == BLOCK_PAGES
                    && first as usize <= page * PAGE
                    && block_end * PAGE <= last as usize + 1;
                let raised = match (whole, self.tiles::<S>()) {
                    (_, true) if !SCALED && many && tiles.len() == TILES_TOGETHER => {
                        self.weigh_two(&tiles, block, rows.clone(), whole, work)
                    }
                    (true, true) => self.weigh::<S, SCALED, true, true>(&tiles, block, work),
                    (true, false) => self.weigh::<S, SCALED, true, false>(&tiles, block, work),
                    (false, true) => self.weigh::<S, SCALED, false, true>(&tiles, block, work),
                    (false, false) => self.weigh::<S, SCALED, false, false>(&tiles, block, work),
                };
                if raised {
                    self.add_values::<S, SCALED>(&tiles, added..page, work);
                    work.parts[tiles.clone()].iter_mut().for_each(|part| part.scale_values::<S>());
                    added = page;
                    begun = false;
                }
                page = block_end;
            }
            self.add_values::<S, SCALED>(&tiles, added..end, work);
        }
    }

    /// Turns the scores of one tile or two into weights, for a block's pages, counted from the stretch's first.
    /// Returns whether sums of values must be scaled before the block's are added.
    #[inline(always)]
    unsafe fn weigh<S: Weigh, const SCALED: bool, const WHOLE: bool, const TILES: bool>(
        &mut self,
        tiles: &Range<usize>,
        block: Range<usize>,
        work: &mut Workspace,
    ) -> bool {
        let position = (self.range.start + block.start) * PAGE;
        let pages = &self.pages[block.clone()];
        let mut raised = false;
        let mut scores = work.scores.as_ptr();
        let weights = work.weights.as_mut_ptr().cast::<S::Value>();
        let mut weights = weights.wrapping_add(block.start / STEP_PAGES * TILE);
        let mut first_row = tiles.start * TILE_ROWS;
        for part in &mut work.parts[tiles.clone()] {
            let rows = (self.queries.rows - first_row).min(TILE_ROWS);
            let mut seen = (!WHOLE).then(|| self.queries.seen_from(first_row));
            for first in (0..rows).step_by(self.rows_at_once) {
                let rows = first..(first + self.rows_at_once).min(rows);
                if !self.fetcher.is_done() {
                    self.fetcher.fetch(self.share);
                }
                for row in rows {
                    let block = BlockRow {
                        scores: scores.wrapping_add(row * PAGE),
                        weights: weights.wrapping_add(row * STEP),
                        pages,
                        position,
                        seen: seen.as_mut().and_then(Iterator::next).unwrap_or_default(),
                        head_dim: self.head.head_dim,
                        scale: self.scale,
                    };
                    // SAFETY: as promised by the caller.
                    unsafe { part.weigh::<S, SCALED, WHOLE, TILES>(row, &block, &mut raised) };
                }
            }
            scores = scores.wrapping_add(BLOCK_PAGES * RESULT_TILE);
            weights = weights.wrapping_add(STRETCH_WEIGHTS);
            first_row += TILE_ROWS;
        }
        raised
    }

    /// As [`Self::weigh`], for two tiles on AMX and a block without scales, which is `whole` if all rows see all of it.
    #[inline(always)]
    unsafe fn weigh_two(
        &mut self,
        tiles: &Range<usize>,
        block: Range<usize>,
        rows: Range<usize>,
        whole: bool,
        work: &mut Workspace,
    ) -> bool {
        if !self.fetcher.is_done() {
            self.fetcher.fetch(TILES_TOGETHER * self.share);
        } else {
            let [written, read] = &mut work.rows_ahead;
            let left = written.fetch(ROW_LINES);
            read.fetch(left);
        }
        let mut seen = [0; TILES_TOGETHER * TILE_ROWS];
        if !whole {
            let [position, end] =
                [block.start, block.end].map(|page| (self.range.start + page) * PAGE);
            for (seen, (first, last)) in seen.iter_mut().zip(self.queries.seen_from(rows.start)) {
                *seen = positions_below(end.min(last as usize + 1), position)
                    & !positions_below(first as usize, position);
            }
        }
        let (weights, pairs) = (block.start / STEP_PAGES * TILE, block.len().div_ceil(STEP_PAGES));
        assert!(
            weights + pairs * TILE <= STRETCH_WEIGHTS,
            "weights of a block outside the stretch"
        );
        let block = TileBlock {
            scores: work.scores.as_ptr(),
            weights: work.weights.as_mut_ptr().cast::<bf16>().wrapping_add(weights),
            weights_tile: STRETCH_WEIGHTS,
            pairs,
            rows: rows.len(),
            seen: (!whole).then_some(&seen),
            scale: self.scale,
        };
        let (parts, mut raised) = (&mut work.parts[tiles.clone()], false);
        // SAFETY: whoever uses tiles has the instruction set, and buffers are as described.
        unsafe { softmax::weigh_tiles(parts, &block, &mut raised) };
        raised
    }

    /// Scores of one tile or two for a block's pages, counted from the stretch's first: q · k, not yet scaled. Returns
    /// whether those of the `next` block have begun.
    #[inline(always)]
    unsafe fn score<S: Weigh>(
        &mut self,
        tiles: &Range<usize>,
        [block, next]: [Range<usize>; 2],
        begun: bool,
        work: &mut Workspace,
    ) -> bool {
        let head_dim = self.head.head_dim;
        let (keys, next) = (&self.keys[block], &self.keys[next]);
        // SAFETY: as promised by the caller.
        unsafe {
            let queries = work.queries.as_ptr().cast::<S::Value>();
            let queries = queries.add(tiles.start * head_dim.div_ceil(STEP) * TILE);
            let into = work.scores.as_mut_ptr();
            if self.tiles::<S>() && tiles.len() == TILES_TOGETHER {
                return amx::score_pages_of_two(queries.cast(), keys, next, head_dim, into, begun);
            }
            if self.tiles::<S>() {
                amx::score_pages(queries.cast(), keys, head_dim, into, &mut self.fetcher);
                return false;
            }
            for (index, keys) in keys.chunks(2).enumerate() {
                self.fetcher.fetch(keys.len() * head_dim / SIMD_WIDTH);
                let right = |half: usize, panel: usize| {
                    keys[panel].wrapping_add(half * HALF_PAIRS * 2 * PAGE)
                };
                dot_rows::<S, false>(&DotRows {
                    left: queries,
                    left_step: TILE,
                    rows: (self.queries.rows - tiles.start * TILE_ROWS).min(TILE_ROWS),
                    right,
                    right_pair: 2 * PAGE,
                    panels: keys.len(),
                    halves: head_dim / PAGE,
                    result: into.add(2 * index * RESULT_TILE),
                    accumulate: false,
                    first: false,
                });
            }
        }
        false
    }

    /// Adds the values of some pages, weighted, to the sums of one tile or two.
    #[inline(always)]
    unsafe fn add_values<S: Weigh, const SCALED: bool>(
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
            let all_weights = work.weights.as_ptr().cast::<S::Value>();
            let part = &mut work.parts[tiles.start];
            let (into, begun) = (part.values.as_mut_ptr(), part.begun);
            part.begun = true;
            if self.tiles::<S>() {
                let weights = all_weights.add(pages.start / STEP_PAGES * TILE).cast();
                let places = &self.values[pages];
                let values = match SCALED {
                    true => ValueTiles::in_pages(places, head_dim),
                    false => ValueTiles::in_tiles(places, head_dim, !self.copies_values()),
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
            let (column_values, right_pair) = match SCALED {
                true => (LINE_VALUES, 2 * head_dim),
                false => (self.head.column(), LINE_VALUES),
            };
            // A few at a time if lines are fetched meanwhile.
            let together = if self.queries.tile_count() == 1 { STEP_PAGES } else { STRETCH_PAGES };
            for first in pages.clone().step_by(together) {
                let count = (pages.end - first).min(together);
                for column in (0..columns).step_by(2) {
                    let panels = (columns - column).min(2);
                    self.fetcher.fetch(2 * panels * count);
                    let right = |half: usize, panel: usize| {
                        self.values[first + half].wrapping_add(column_values * (column + panel))
                    };
                    dot_rows::<S, false>(&DotRows {
                        left: all_weights.add(first / STEP_PAGES * TILE),
                        left_step: TILE,
                        rows: (self.queries.rows - tiles.start * TILE_ROWS).min(TILE_ROWS),
                        right,
                        right_pair,
                        panels,
                        halves: count,
                        result: into.add(column * RESULT_TILE),
                        accumulate: begun || first > pages.start,
                        first: false,
                    });
                }
            }
        }
    }

    /// Whether bf16 values are copied for tiles: a tile holds those of two pages, which stand apart.
    #[inline(always)]
    fn copies_values(&self) -> bool {
        self.head.together == Together::One
    }

    /// Brings the values of all pages to where the products want them.
    #[inline(always)]
    unsafe fn prepare_values<S: Weigh, const SCALED: bool>(&mut self, work: &mut Workspace) {
        let copies = self.tiles::<S>() && self.copies_values();
        if self.values_ready || !(SCALED || copies) {
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
        let first = into.cast_const();
        for (page, values) in self.values[..stored].iter_mut().enumerate() {
            *values = first.wrapping_add(page * count);
        }
    }

    /// Copies the values of all pages into tiles: [step][d / 16][32 / 2][16][2], pairs of positions as weights have them.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&mut self, into: *mut bf16) {
        let head_dim = self.head.head_dim;
        let stored = self.range.len();
        let fetched = usize::from(self.queries.tile_count() == 1);
        for page in 0..stored.next_multiple_of(STEP_PAGES) {
            let step = into.wrapping_add(page / STEP_PAGES * STEP * head_dim);
            for pair in 0..PAGE_LINES {
                let line = tile_pair(page % STEP_PAGES == 1, pair);
                let into = step.wrapping_add(line * LINE_VALUES);
                // SAFETY: every line lies on a page of the stretch, or in its tile.
                unsafe {
                    if page == stored {
                        // Their weights are 0, but what an earlier stretch left there may be NaN.
                        (0..head_dim / SIMD_WIDTH)
                            .for_each(|column| into.add(column * TILE).write_bytes(0, LINE_VALUES));
                        continue;
                    }
                    self.fetcher
                        .fetch(fetched * (head_dim * (pair + 1) / 128 - head_dim * pair / 128));
                    let values = self.values[page].add(pair * LINE_VALUES);
                    for column in 0..head_dim / SIMD_WIDTH {
                        let line = S::load(values.add(column * self.head.column()).cast());
                        line.store(into.add(column * TILE).cast());
                    }
                }
            }
        }
    }
}
