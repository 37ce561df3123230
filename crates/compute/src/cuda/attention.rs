//! How a step's attention is cut: tiles of rows that share a context, and units of a tile and a split. Rows of different
//! prompts are units together where their contexts begin with the same pages. The kernels are in attention.cu.

use super::PAGE;
use super::module::{FEW_SLOTS, MANY_WARPS};
use super::tables::{BLOCK_PAGES, Tables};
use super::together::{self, Together};
use bytemuck::{Pod, Zeroable};
use glinthawk_flight::Row;
use std::ops::Range;

/// Positions of a split; as in attention.cu.
const SPLIT: usize = 1024;
/// Pairs of row and query head that a warp handles.
const WARP_PAIRS: usize = 16;
/// Pairs that a block handles whose warps share keys and values.
const MANY_PAIRS: usize = MANY_WARPS * WARP_PAIRS;
/// Tiles are balanced where a prompt's rows are at least one of so many positions.
const BALANCED_SHARE: u32 = 8;
/// Blocks whose keys or values a warp fetches before it waits for the kernel before: as many as FEW_SLOTS reach into.
const FIRST_BLOCKS: usize = FEW_SLOTS.div_ceil(2);
/// Marks a unit that is a whole tile.
const NO_PARTIAL: u32 = u32::MAX;

/// A tile, whole or one of its splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Unit {
    first_row: u32,
    rows: u32,
    slot: u32,
    /// Of the first row.
    position: u32,
    /// Of a whole tile: the prompt's rows between its halves.
    split: u32,
    /// Pairs with partials before it.
    partial: u32,
    /// Positions that its row attends to together with others.
    begin: u32,
    /// Whether this step stores nothing in the blocks that it fetches first.
    settled: u32,
}

/// A row that attends together with others, and the pairs with partials before its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Member {
    row: u32,
    partial: u32,
}

impl Unit {
    /// Positions that its tile's last row attends to.
    fn end(&self) -> usize {
        (self.position + self.rows) as usize
    }

    fn splits(&self) -> usize {
        self.end().div_ceil(SPLIT)
    }

    /// Pages that a warp fetches first, counted from the context's first.
    fn first_pages(&self) -> Range<usize> {
        let split = if self.partial == NO_PARTIAL { 0 } else { self.split as usize * SPLIT };
        let first = split.max(self.begin as usize) / PAGE;
        first..(first + FIRST_BLOCKS * BLOCK_PAGES).min(self.end().div_ceil(PAGE))
    }
}

/// A tile whose splits are units of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Combined {
    first_row: u32,
    rows: u32,
    splits: u32,
    partial: u32,
}

/// What a step's attention is cut for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Query heads that share a key head.
    pub(super) group: usize,
    /// Key heads; each makes work of every unit.
    pub(super) kv_heads: usize,
    /// Multiprocessors of the device.
    pub(super) processors: usize,
    /// Whether rows may attend together to pages that they share.
    pub(super) shares: bool,
    /// Whether the halves of a tile of many pairs may stand apart.
    pub(super) halves: bool,
    /// Pairs of row and query head for whose partials there is room.
    pub(super) partials: usize,
}

/// A step's attention. Units come longest first.
#[derive(Debug, Default)]
pub(super) struct Tiling {
    /// Units of many pairs.
    pub(super) many: Vec<Unit>,
    /// Units of pages that rows share; their rows are members.
    pub(super) shared: Vec<Unit>,
    /// The rows of shared units.
    pub(super) members: Vec<Member>,
    /// Units of at most a warp's pairs.
    pub(super) few: Vec<Unit>,
    /// Tiles whose splits are to be combined.
    pub(super) combined: Vec<Combined>,
}

impl Tiling {
    /// Cuts up a step's rows, in which a prompt's stand together by position.
    pub(super) fn of(rows: &[Row], tables: &Tables, cut: &Cut) -> Self {
        let follows = |before: &Row, row: &Row| {
            row.slot == before.slot && row.position == before.position + 1
        };
        let rows_max = (MANY_PAIRS / cut.group).max(1);
        let mut tiles = Vec::new();
        let mut first_row = 0;
        for tile in rows.chunk_by(follows).flat_map(|run| run.chunks(rows_max)) {
            let (rows, first) = (tile.len() as u32, tile[0]);
            let (slot, position) = (first.slot, first.position);
            let place = Unit { first_row, rows, slot, position, ..Unit::zeroed() };
            tiles.push(Unit { partial: NO_PARTIAL, ..place });
            first_row += rows;
        }
        tiles.sort_by_key(|tile| std::cmp::Reverse(tile.end()));
        let is_few = |tile: &Unit| tile.rows as usize * cut.group <= WARP_PAIRS;
        let (mut few, many): (Vec<Unit>, Vec<Unit>) = tiles.into_iter().partition(is_few);
        let mut tiling = Self::default();
        let mut partial = 0;
        let own = tiling.share(&mut few, tables, cut, &mut partial);
        // With fewer blocks than these, too few bytes are under way; with more, partials cost more than they bring.
        tiling.few = tiling.split(few, cut, cut.processors * 3 / 2, &mut partial);
        tiling.few.extend(own);
        tiling.settle(rows, tables);
        tiling.many = tiling.split(many, cut, cut.processors / 2, &mut partial);
        // With at most one tile for each block, all wait for the longest.
        if cut.halves && tiling.many.len() * cut.kv_heads <= cut.processors {
            tiling.many = balanced(tiling.many, (MANY_PAIRS / 2 / cut.group) as u32);
        }
        tiling
    }

    /// Marks units that may fetch their first blocks before this step's rows are stored.
    fn settle(&mut self, rows: &[Row], tables: &Tables) {
        let mut stored: Vec<u32> = rows.iter().map(|row| row.page).collect();
        stored.sort_unstable();
        for unit in &mut self.few {
            let is_stored = |number| stored.binary_search(&tables.page(unit.slot, number)).is_ok();
            unit.settled = u32::from(!unit.first_pages().any(is_stored));
        }
    }

    /// Has rows attend together to what they share, as long as there is room. Takes them out of the tiles, and returns
    /// the units of what is their own.
    fn share(
        &mut self,
        tiles: &mut Vec<Unit>,
        tables: &Tables,
        cut: &Cut,
        partial: &mut usize,
    ) -> Vec<Unit> {
        let mut own = Vec::new();
        if !cut.shares {
            return own;
        }
        let single: Vec<Unit> = tiles.iter().filter(|tile| tile.rows == 1).copied().collect();
        let contexts: Vec<(u32, u32)> =
            single.iter().map(|tile| (tile.slot, tile.position)).collect();
        for Together { members, end } in together::find(&contexts, tables, cut.group) {
            let (first_member, slot) = (self.members.len(), single[members[0]].slot);
            for tile in members.into_iter().map(|member| single[member]) {
                let (first_row, splits) = (tile.first_row, tile.splits());
                let start = *partial as u32;
                if *partial + cut.group * splits > cut.partials {
                    break;
                }
                *partial += cut.group * splits;
                self.members.push(Member { row: first_row, partial: start });
                let (rows, count) = (1, splits as u32);
                self.combined.push(Combined { first_row, rows, splits: count, partial: start });
                own.extend((end / SPLIT..splits).map(|split| Unit {
                    split: split as u32,
                    partial: start + (split * cut.group) as u32,
                    begin: end as u32,
                    ..tile
                }));
            }
            self.share_members(first_member, slot, end, cut);
        }
        if !own.is_empty() {
            let mut taken: Vec<u32> = self.members.iter().map(|member| member.row).collect();
            taken.sort_unstable();
            tiles.retain(|tile| taken.binary_search(&tile.first_row).is_err());
        }
        own
    }

    /// The units of the first `end` positions, which members from the first on share; one of them is in this slot.
    fn share_members(&mut self, first_member: usize, slot: u32, end: usize, cut: &Cut) {
        let (rows_max, count) = (MANY_PAIRS / cut.group, self.members.len());
        for split in 0..end.div_ceil(SPLIT) {
            let position = ((split + 1) * SPLIT).min(end) as u32 - 1;
            for first in (first_member..count).step_by(rows_max) {
                let rows = rows_max.min(count - first) as u32;
                let (first_row, split) = (first as u32, split as u32);
                let members = Unit { first_row, rows, slot, position, split, ..Unit::zeroed() };
                self.shared.push(members);
            }
        }
    }

    /// Splits the tiles that are longer than what each of `blocks` blocks has to do, as long as there is room.
    fn split(
        &mut self,
        tiles: Vec<Unit>,
        cut: &Cut,
        blocks: usize,
        partial: &mut usize,
    ) -> Vec<Unit> {
        let total: usize = tiles.iter().map(Unit::splits).sum::<usize>() * cut.kv_heads;
        let mut units = Vec::with_capacity(tiles.len());
        for tile in tiles {
            let (pairs, splits) = (tile.rows as usize * cut.group, tile.splits());
            let fits = *partial + pairs * splits <= cut.partials;
            if splits == 1 || splits * blocks <= total || !fits {
                units.push(tile);
                continue;
            }
            let Unit { first_row, rows, .. } = tile;
            let (splits, start) = (splits as u32, *partial as u32);
            self.combined.push(Combined { first_row, rows, splits, partial: start });
            let partial_of = |split| start + split * pairs as u32;
            units.extend((0..splits).map(|split| Unit {
                split,
                partial: partial_of(split),
                ..tile
            }));
            *partial += pairs * splits as usize;
        }
        units
    }
}

/// Tiles of a prompt's rows, remade so that all take about as long: each has one half of earlier rows, and one of later.
fn balanced(mut units: Vec<Unit>, half: u32) -> Vec<Unit> {
    units.sort_by_key(|unit| unit.first_row);
    let full = |unit: &Unit| unit.partial == NO_PARTIAL && unit.rows == 2 * half;
    let follows = |before: &Unit, unit: &Unit| {
        let next = unit.first_row == before.first_row + before.rows;
        let same = unit.slot == before.slot && unit.position == before.position + before.rows;
        next && same && full(before) && full(unit)
    };
    for tiles in units.chunk_by_mut(follows) {
        let (first, count) = (tiles[0], tiles.len() as u32);
        let rows = count * first.rows;
        // Where rows differ little in length, two halves that end together are faster.
        if !full(&first) || rows * BALANCED_SHARE < first.position + rows {
            continue;
        }
        for (number, tile) in (0..count).zip(tiles) {
            tile.first_row = first.first_row + number * half;
            tile.position = first.position + number * half;
            tile.split = 2 * (count - 1 - number) * half;
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUT: Cut =
        Cut { group: 4, kv_heads: 2, processors: 100, shares: true, halves: false, partials: 1000 };

    fn rows(prompts: &[(u32, Range<u32>)]) -> Vec<Row> {
        let row = |slot, position| Row { slot, position, page: 0, token: 0 };
        prompts
            .iter()
            .flat_map(|(slot, positions)| positions.clone().map(move |at| row(*slot, at)))
            .collect()
    }

    /// Tables in which these rows' slots begin with `shared` common pages.
    fn tables(rows: &[Row], shared: u32) -> Tables {
        let mut tables = Tables::new(100, 4096);
        for row in rows {
            for page in 0..256 {
                let own = if page < shared { 0 } else { 1000 * (row.slot + 1) };
                tables.enter(row.slot, page as usize, own + page);
            }
        }
        tables
    }

    #[test]
    fn rows_that_share_pages_are_units_together() {
        // 60 rows share 1,100 positions, of which 1,088 are whole blocks; 12 others share nothing with them.
        let prompts: Vec<(u32, Range<u32>)> =
            (0..60).map(|slot| (slot, 1100 + 40 * slot..1101 + 40 * slot)).collect();
        let others: Vec<(u32, Range<u32>)> = (60..72).map(|slot| (slot, 30..31)).collect();
        let all = rows(&[&others[..], &prompts].concat());
        let tiling = Tiling::of(&all, &tables(&all, 69), &Cut { partials: 10_000, ..CUT });
        let shared: Vec<(u32, u32, u32)> =
            tiling.shared.iter().map(|unit| (unit.rows, unit.split, unit.position)).collect();
        assert_eq!(shared, [(32, 0, 1023), (28, 0, 1023), (32, 1, 1087), (28, 1, 1087)]);
        let mut members: Vec<u32> = tiling.members.iter().map(|member| member.row).collect();
        members.sort_unstable();
        assert_eq!(members, (12..72).collect::<Vec<_>>());
        // Each position of a row is in one unit, and every split of it has partials of its own.
        for (row, at) in all.iter().enumerate().skip(12) {
            let own: Vec<&Unit> =
                tiling.few.iter().filter(|unit| unit.first_row == row as u32).collect();
            let splits = (at.position as usize + 1).div_ceil(SPLIT);
            assert_eq!(own.len(), splits - 1);
            let member = tiling.members.iter().find(|member| member.row == row as u32);
            let start = member.expect("a member").partial;
            for unit in own {
                assert_eq!((unit.begin, unit.partial), (1088, start + 4 * unit.split));
            }
        }
        assert_eq!(tiling.few.iter().filter(|unit| unit.begin == 0).count(), 12);
        // Without room they attend alone.
        let tiling = Tiling::of(&all, &tables(&all, 69), &Cut { partials: 100, ..CUT });
        let taken: usize = tiling.members.len();
        assert!(taken < 13 && tiling.combined.len() >= taken);
        let alone = tiling.few.iter().filter(|unit| unit.begin == 0 && unit.split == 0);
        assert_eq!(alone.count(), 72 - taken);
        let apart = Tiling::of(&all, &tables(&all, 69), &Cut { shares: false, ..CUT });
        assert!(apart.shared.is_empty() && apart.members.is_empty());
    }

    #[test]
    fn a_unit_is_settled_if_nothing_is_stored_where_it_begins() {
        // A short context, a long one, one that another prompt's rows are stored in, chunks, and edges.
        let chunks = [(3, 40..43), (4, 700..703)];
        let single = [(0, 100), (1, 3000), (2, 500), (5, 1030), (6, 127), (7, 128)];
        let single = single.map(|(slot, at)| (slot, at..at + 1));
        let prompts = [&single[..], &chunks].concat();
        let mut rows = rows(&prompts);
        let mut tables = tables(&rows, 0);
        for row in &mut rows {
            row.page = tables.page(row.slot, row.position as usize / PAGE);
        }
        tables.enter(2, 7, tables.page(3, 2));
        let tiling = Tiling::of(&rows, &tables, &CUT);
        let settled = |slot: u32| -> Vec<u32> {
            let mut units: Vec<&Unit> =
                tiling.few.iter().filter(|unit| unit.slot == slot).collect();
            units.sort_by_key(|unit| unit.split);
            units.iter().map(|unit| unit.settled).collect()
        };
        assert_eq!(settled(0), [0], "its own row is among the first 128 positions");
        assert_eq!(settled(1), [1, 1, 1]);
        assert_eq!(settled(2), [0], "positions 112 to 127 are stored by another prompt");
        assert_eq!((settled(3), settled(4)), (vec![0], vec![1]));
        assert_eq!(settled(5), [1, 0], "its own row is in the second split");
        assert_eq!((settled(6), settled(7)), (vec![0], vec![1]));
        tables.enter(2, 8, tables.page(3, 2));
        tables.enter(2, 7, 999);
        let later = Tiling::of(&rows, &tables, &CUT);
        let unit = later.few.iter().find(|unit| unit.slot == 2).expect("a unit");
        assert_eq!(unit.settled, 1, "from position 128 on, blocks are fetched later");
        let own = Unit { begin: 640, partial: 0, position: 700, rows: 1, ..Unit::zeroed() };
        assert_eq!(own.first_pages(), 40..44, "what comes before is shared");
    }

    #[test]
    fn every_row_is_in_one_tile() {
        let rows = rows(&[(0, 5..6), (1, 0..200), (2, 1020..1030), (3, 3000..3001), (3, 7..9)]);
        let tiling = Tiling::of(&rows, &tables(&rows, 0), &CUT);
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
    fn tiles_are_split_while_there_is_room_and_need() {
        let prompts: Vec<(u32, Range<u32>)> = (0..90).map(|slot| (slot, 2000..2001)).collect();
        let (few, all) = (rows(&prompts[..9]), rows(&prompts));
        let tiling = Tiling::of(&few, &tables(&few, 0), &Cut { partials: 20, ..CUT });
        assert_eq!(tiling.combined.len(), 2, "two tiles of eight partials each");
        assert_eq!(tiling.few.len(), 9 + 2);
        let tiling = Tiling::of(&all, &tables(&all, 0), &CUT);
        assert_eq!(tiling.few.len(), 90, "180 blocks keep 100 processors busy");
    }

    #[test]
    fn halves_stand_apart_where_blocks_have_one_tile_each() {
        let rows = rows(&[(0, 600..856), (1, 100..101), (2, 4000..4064), (3, 0..40)]);
        let cut = Cut { halves: true, partials: 0, ..CUT };
        let tiling = Tiling::of(&rows, &tables(&rows, 0), &cut);
        let mut covered = Vec::new();
        for unit in [&tiling.many[..], &tiling.few[..]].concat() {
            let half = unit.rows.min(16);
            let second = unit.first_row + half + unit.split;
            for row in
                (unit.first_row..unit.first_row + half).chain(second..second + unit.rows - half)
            {
                covered.push(row);
                let (row, first) = (rows[row as usize], rows[unit.first_row as usize]);
                assert_eq!(row.slot, unit.slot);
                assert_eq!(first.position, unit.position);
            }
        }
        covered.sort_unstable();
        assert_eq!(covered, (0..rows.len() as u32).collect::<Vec<_>>());
        let apart =
            |slot| tiling.many.iter().filter(|unit| unit.slot == slot && unit.split > 0).count();
        // Of eight tiles one has its halves together. The third prompt's rows are as long as each other.
        assert_eq!((apart(0), apart(2), apart(3)), (7, 0, 0));
        let crowded = Tiling::of(&rows, &tables(&rows, 0), &Cut { processors: 20, ..cut });
        assert!(crowded.many.iter().all(|unit| unit.split == 0), "more tiles than blocks");
    }
}
