//! How a step's attention is cut: tiles of rows that share a context, and units of a tile and a split.
//! The kernels are in attention.cu.

use super::module::MANY_WARPS;
use bytemuck::{Pod, Zeroable};
use glinthawk_flight::Row;
use std::ops::Range;

/// Positions of a split; as in attention.cu.
const SPLIT: usize = 1024;
/// Pairs of row and query head that a warp handles.
const WARP_PAIRS: usize = 16;
/// Pairs that a block handles whose warps share keys and values.
const MANY_PAIRS: usize = MANY_WARPS * WARP_PAIRS;
/// Marks a unit whose tile has one split only.
const NO_PARTIAL: u32 = u32::MAX;

/// A tile and one of its splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Unit {
    first_row: u32,
    rows: u32,
    split: u32,
    partial: u32,
}

/// A tile of several splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Combined {
    first_row: u32,
    rows: u32,
    splits: u32,
    partial: u32,
}

impl Combined {
    /// Rows of the tile.
    pub(super) fn rows(&self) -> u32 {
        self.rows
    }
}

/// Units whose partials fit the workspace together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wave {
    /// Of [`Tiling::many`].
    pub(super) many: Range<usize>,
    /// Of [`Tiling::few`].
    pub(super) few: Range<usize>,
    /// Of [`Tiling::combined`].
    pub(super) combined: Range<usize>,
}

/// A step's attention.
#[derive(Debug, Default)]
pub(super) struct Tiling {
    /// Units of many pairs.
    pub(super) many: Vec<Unit>,
    /// Units of at most a warp's pairs.
    pub(super) few: Vec<Unit>,
    /// Tiles whose splits are to be combined.
    pub(super) combined: Vec<Combined>,
    /// What is launched together.
    pub(super) waves: Vec<Wave>,
    /// Pairs with partials in the wave at hand.
    partial: usize,
}

/// Splits of a context of so many positions.
fn splits(positions: usize) -> usize {
    positions.div_ceil(SPLIT)
}

/// Pairs with partials that any one tile can have in contexts of up to `context_max` positions.
pub(super) fn partials_of_a_tile(group: usize, context_max: usize) -> usize {
    MANY_PAIRS.max(group) * splits(context_max)
}

impl Tiling {
    /// Cuts up a step's rows, in which a prompt's stand together by position. A query group has `group` heads;
    /// a wave has partials for at most `partials_max` pairs.
    pub(super) fn cut(&mut self, rows: &[Row], group: usize, partials_max: usize) {
        for list in [&mut self.many, &mut self.few] {
            list.clear();
        }
        self.combined.clear();
        self.waves.clear();
        self.waves.push(Wave::default());
        self.partial = 0;
        let follows = |before: &Row, row: &Row| {
            row.slot == before.slot && row.position == before.position + 1
        };
        let rows_max = (MANY_PAIRS / group).max(1);
        let mut first = 0;
        for run in rows.chunk_by(follows) {
            for tile in run.chunks(rows_max) {
                let end = tile.last().map_or(0, |row| row.position as usize + 1);
                self.add(first, tile.len(), splits(end), group, partials_max);
                first += tile.len();
            }
        }
        self.end_wave();
    }

    fn add(
        &mut self,
        first_row: usize,
        rows: usize,
        splits: usize,
        group: usize,
        partials_max: usize,
    ) {
        let pairs = rows * group;
        let partials = if splits > 1 { pairs * splits } else { 0 };
        assert!(partials <= partials_max, "a tile's partials fit the workspace");
        if self.partial + partials > partials_max {
            self.end_wave();
            self.waves.push(Wave {
                many: self.many.len()..0,
                few: self.few.len()..0,
                combined: self.combined.len()..0,
            });
            self.partial = 0;
        }
        let (first_row, rows) = (first_row as u32, rows as u32);
        for split in 0..splits {
            let partial = match splits {
                1 => NO_PARTIAL,
                _ => (self.partial + split * pairs) as u32,
            };
            let unit = Unit { first_row, rows, split: split as u32, partial };
            if pairs <= WARP_PAIRS { self.few.push(unit) } else { self.many.push(unit) }
        }
        if splits > 1 {
            let partial = self.partial as u32;
            self.combined.push(Combined { first_row, rows, splits: splits as u32, partial });
        }
        self.partial += partials;
    }

    fn end_wave(&mut self) {
        let wave = self.waves.last_mut().expect("there is one from the start");
        wave.many.end = self.many.len();
        wave.few.end = self.few.len();
        wave.combined.end = self.combined.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(prompts: &[(u32, Range<u32>)]) -> Vec<Row> {
        let row = |slot, position| Row { slot, position, page: 0, token: 0 };
        prompts
            .iter()
            .flat_map(|(slot, positions)| positions.clone().map(move |at| row(*slot, at)))
            .collect()
    }

    #[test]
    fn every_row_is_in_one_tile() {
        let rows = rows(&[(0, 5..6), (1, 0..200), (2, 1020..1030), (3, 3000..3001), (3, 7..9)]);
        let mut tiling = Tiling::default();
        tiling.cut(&rows, 4, 1000);
        let mut tiles: Vec<(u32, u32)> = [&tiling.many[..], &tiling.few[..]]
            .concat()
            .iter()
            .filter(|unit| unit.split == 0)
            .map(|unit| (unit.first_row, unit.rows))
            .collect();
        tiles.sort_unstable();
        let covered: Vec<u32> =
            tiles.iter().flat_map(|(first, count)| *first..first + count).collect();
        assert_eq!(covered, (0..rows.len() as u32).collect::<Vec<_>>());
        // One row of a long context has three splits, ten around a split's edge have two.
        assert_eq!(tiling.few.iter().filter(|unit| unit.first_row == 211).count(), 3);
        assert_eq!(tiling.combined.len(), 2);
    }

    #[test]
    fn waves_hold_no_more_partials_than_fit() {
        let prompts: Vec<(u32, Range<u32>)> = (0..9).map(|slot| (slot, 2000..2001)).collect();
        let mut tiling = Tiling::default();
        tiling.cut(&rows(&prompts), 4, 20);
        assert_eq!(tiling.waves.len(), 5, "two tiles of eight partials each in a wave");
        for wave in &tiling.waves {
            let partials = tiling.combined[wave.combined.clone()].iter();
            assert!(partials.clone().all(|tile| tile.partial + 8 <= 20));
            assert_eq!(wave.few.len(), 2 * wave.combined.len());
        }
    }
}
