//! What runs that begin with the same pages attend to together, before each of them goes on alone.

use super::Shape;
use crate::ComputeError;
use crate::families::Families;
use crate::tables::BoundRow;
use crate::x86::attention::{SPLIT_PAGES, Workspace};
use crate::x86::pages::{BLOCK_PAGES, PAGE};
use crate::x86::softmax::RunningSoftmax;
use crate::x86::tiles::TILE_ROWS;
use std::ops::Range;

/// The shared work of one call.
#[derive(Default)]
pub(super) struct SharedWork {
    families: Families,
    /// The rows of each family, one after the other.
    pub(super) rows: Vec<usize>,
    pub(super) jobs: Vec<SharedJob>,
    /// Who goes on from where, by a run's first row.
    heirs: Vec<(usize, Inherited)>,
    /// What has come out, tile by tile: parts of the last split that is shared, if it is not shared to its end, and
    /// totals of the splits before.
    pub(super) parts: Vec<RunningSoftmax>,
    pub(super) totals: Vec<RunningSoftmax>,
}

/// A few tiles of a family's pairs of row and query head.
pub(super) struct SharedJob {
    /// The family's first row among all.
    pub(super) row: usize,
    pub(super) kv_head: usize,
    /// Counted from the family's first row.
    pub(super) pairs: Range<usize>,
    pub(super) pages: usize,
    pub(super) first_tile: usize,
}

/// What a run's pairs have attended to already, and where to find it.
#[derive(Clone, Copy)]
pub(super) struct Inherited {
    pub(super) pages: usize,
    /// The family's first tile, and how many it has for each key/value head.
    first_tile: usize,
    tiles: usize,
    /// The family's pair that is the run's first.
    pair: usize,
}

impl SharedWork {
    /// Forgets the last call's work: nothing is shared.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.jobs.clear();
        self.heirs.clear();
    }

    /// Plans the shared work of runs of different slots.
    pub(super) fn plan(
        &mut self,
        shape: &Shape,
        runs: &[Range<usize>],
        rows: &[BoundRow<'_>],
        threads: usize,
    ) -> Result<(), ComputeError> {
        let blocks = |run: usize| {
            let BoundRow { position, pages, .. } = rows[runs[run].start];
            &pages[..position as usize / PAGE / BLOCK_PAGES * BLOCK_PAGES]
        };
        self.families.find(runs.len(), BLOCK_PAGES, 2, blocks);
        let (group, kv_heads) = (shape.group(), shape.config.kv_heads);
        let (mut first_tile, mut pages_max) = (0, 0);
        for family in &self.families.families {
            let (row, pages) = (self.rows.len(), family.pages);
            let members = &self.families.members[family.members.clone()];
            let count = members.iter().map(|&run| runs[run].len()).sum::<usize>();
            let pairs = count * group;
            let tiles = pairs.div_ceil(TILE_ROWS);
            for &run in members {
                let pair = (self.rows.len() - row) * group;
                self.heirs.push((runs[run].start, Inherited { pages, first_tile, tiles, pair }));
                self.rows.extend(runs[run].clone());
            }
            let job_pairs = shape.job_tiles(tiles * kv_heads, threads) * TILE_ROWS;
            for kv_head in 0..kv_heads {
                let jobs = Shape::even_jobs(pairs, job_pairs).map(|pairs| SharedJob {
                    row,
                    kv_head,
                    first_tile: first_tile + kv_head * tiles + pairs.start / TILE_ROWS,
                    pairs,
                    pages,
                });
                self.jobs.extend(jobs);
            }
            first_tile += tiles * kv_heads;
            pages_max = pages_max.max(pages);
        }
        self.heirs.sort_unstable_by_key(|(row, _)| *row);
        let head_dim = shape.config.head_dim;
        grow(&mut self.parts, first_tile, head_dim)?;
        let splits_end = if pages_max >= SPLIT_PAGES { first_tile } else { 0 };
        grow(&mut self.totals, splits_end, head_dim)
    }

    /// What the run that begins at a row has attended to.
    pub(super) fn inherited(&self, row: usize) -> Option<Inherited> {
        let place = self.heirs.binary_search_by_key(&row, |(row, _)| *row).ok()?;
        Some(self.heirs[place].1)
    }

    /// Lets a job's pairs go on from what they have attended to: fills in the parts of the split that they come to, and
    /// the totals of those before.
    pub(super) fn hand_over(
        &self,
        inherited: Inherited,
        kv_head: usize,
        pairs: Range<usize>,
        work: &mut Workspace,
    ) {
        let first = inherited.first_tile + kv_head * inherited.tiles;
        for (index, pair) in pairs.map(|pair| inherited.pair + pair).enumerate() {
            let (tile, row) = (first + pair / TILE_ROWS, pair % TILE_ROWS);
            let (own_tile, own_row) = (index / TILE_ROWS, index % TILE_ROWS);
            if !inherited.pages.is_multiple_of(SPLIT_PAGES) {
                work.parts[own_tile].take_row(own_row, &self.parts[tile], row);
            }
            if inherited.pages >= SPLIT_PAGES {
                work.totals[own_tile].take_row(own_row, &self.totals[tile], row);
            }
        }
    }
}

fn grow(
    tiles: &mut Vec<RunningSoftmax>,
    count: usize,
    head_dim: usize,
) -> Result<(), ComputeError> {
    while tiles.len() < count {
        tiles.push(RunningSoftmax::new(head_dim)?);
    }
    Ok(())
}
