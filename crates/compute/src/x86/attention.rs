//! Attention of one job: some (row, query head) pairs of one prompt that share a key/value head, in tiles of 16, over a
//! range of its positions, by online softmax.
//!
//! Positions go in steps of 32, blocks of 64 and splits of 4096, cut at the same positions for every row, and a
//! position that a row may not see adds exact zeros. So a row's bits depend on the row alone, not on the other rows of
//! its job or on how many threads share its splits. How many blocks' values are added together (a stretch) does not
//! change bits: a sum continues where it was.

mod stretch;

use super::amx::Tiles;
use super::for_each_isa;
use super::pages::{After, BLOCK_PAGES, Fetcher, HeadPages, PAGE, RowsAhead, STRETCH_PAGES};
use super::softmax::{self, RunningSoftmax};
use super::tiles::{RESULT_TILE, STEP, TILE, TILE_ROWS};
use super::weigh::Weigh;
use crate::memory::Memory;
use crate::{ComputeError, ContextType};
use half::bf16;
use std::ops::Range;
pub(super) use stretch::MANY_TILES;
use stretch::Stretch;

/// Pages of a split. Each is begun anew and then added to those before, which takes time, so splits are long. In tests
/// they are shorter: contexts that tests have time for then have several.
pub(super) const SPLIT_PAGES: usize = if cfg!(test) { 64 } else { 256 };
/// Tiles of a job at most. Each reads the same keys and values, so that they come from a cache; but what the tiles
/// themselves keep must stay in it too.
const JOB_TILES: usize = 96;
/// Columns of all tiles of a job at most: larger heads have fewer tiles.
const JOB_COLUMNS: usize = 8192;

/// Pages of one step of the values' product.
pub(super) const STEP_PAGES: usize = STEP / PAGE;
/// Tiles that go through the products together.
const TILES_TOGETHER: usize = 2;
/// Weights of one tile and one stretch.
const STRETCH_WEIGHTS: usize = STRETCH_PAGES / STEP_PAGES * TILE;

/// Tiles of a job at most, an even number.
pub(super) fn job_tiles_max(head_dim: usize) -> usize {
    (JOB_COLUMNS / head_dim).clamp(2, JOB_TILES) / 2 * 2
}

/// One thread's scratch.
pub(super) struct Workspace {
    /// [tile][d / 32][16 rows][32], in f32 or, where products read rows of bf16, in the half of the room.
    pub(super) queries: Memory<f32>,
    /// [tile of two][page of the block][16 rows][16 positions]
    scores: Memory<f32>,
    /// [tile of two][step of the stretch][16 rows][32 positions], likewise.
    weights: Memory<f32>,
    /// For int8 pages, a stretch's keys as bf16: [page][16 d]
    keys: Memory<bf16>,
    /// A stretch's values as bf16. For int8 pages, one page after the other: [page][16 / 2][d][2]. For tiles,
    /// if pages stand by themselves, tile after tile: [step][d / 16][32 / 2][16][2]
    values: Memory<bf16>,
    /// One for each tile of the job.
    pub(super) parts: Vec<RunningSoftmax>,
    pub(super) totals: Vec<RunningSoftmax>,
    /// Rows that the thread will write at the end of a job of many tiles, and then those that it reads for the next.
    pub(super) rows_ahead: [RowsAhead; 2],
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
            rows_ahead: [RowsAhead::NONE; 2],
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

    /// The first and the last position that a row sees, and then those of the rows that follow.
    #[inline(always)]
    fn seen_from(&self, row: usize) -> impl Iterator<Item = (u32, u32)> {
        let (window, heads) = (self.window, self.heads);
        let at = self.head + row as u32;
        let first = (self.position + at / heads, at % heads);
        let next = move |&(last, head): &(u32, u32)| {
            Some(if head + 1 < heads { (last, head + 1) } else { (last + 1, 0) })
        };
        std::iter::successors(Some(first), next)
            .map(move |(last, _)| (last.saturating_sub(window - 1), last))
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
