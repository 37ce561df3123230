//! Which runs of a batch begin with the same pages, so that these are attended once for all of them.

use crate::tables::BoundRow;
use crate::x86::pages::{BLOCK_PAGES, PAGE};
use std::ops::Range;

/// Runs that begin with the same pages.
#[derive(Debug, PartialEq)]
pub(super) struct Family {
    /// Where its runs are in [`Families::members`].
    pub(super) members: Range<usize>,
    /// Pages that all of them begin with: whole blocks, before anything that the batch stores.
    pub(super) pages: usize,
}

/// The families of a batch.
#[derive(Default)]
pub(super) struct Families {
    /// Indices of runs.
    pub(super) members: Vec<usize>,
    pub(super) families: Vec<Family>,
}

impl Families {
    /// Finds the families that save the most pages, if every run is in one at most.
    pub(super) fn find(&mut self, runs: &[Range<usize>], rows: &[BoundRow<'_>]) {
        self.families.clear();
        self.members.clear();
        let lists = Lists { runs, rows };
        self.members.extend((0..runs.len()).filter(|&run| !lists.of(run).is_empty()));
        let all = 0..self.members.len();
        lists.divide(&mut self.members, all, 0, &mut self.families);
    }
}

/// The pages of each run.
struct Lists<'a> {
    runs: &'a [Range<usize>],
    rows: &'a [BoundRow<'a>],
}

impl Lists<'_> {
    /// The blocks before a run's first row.
    fn of(&self, run: usize) -> &[u32] {
        let BoundRow { position, pages, .. } = self.rows[self.runs[run].start];
        &pages[..position as usize / PAGE / BLOCK_PAGES * BLOCK_PAGES]
    }

    /// Makes one family of some members, which are known to agree in their first pages, or several smaller ones with
    /// more pages in common: what saves more. Returns how many pages are saved.
    fn divide(
        &self,
        members: &mut [usize],
        among: Range<usize>,
        known: usize,
        families: &mut Vec<Family>,
    ) -> usize {
        if among.len() < 2 {
            return 0;
        }
        let first = self.of(members[among.start]);
        let common = |&member: &usize| {
            let blocks = first[known..].chunks(BLOCK_PAGES);
            let others = self.of(member)[known..].chunks(BLOCK_PAGES);
            known + BLOCK_PAGES * blocks.zip(others).take_while(|(one, other)| one == other).count()
        };
        let common = members[among.clone()].iter().map(common).min().unwrap_or(known);
        let next = |member: usize| self.of(member).get(common..common + BLOCK_PAGES);
        members[among.clone()].sort_unstable_by(|one, other| next(*one).cmp(&next(*other)));

        let before = families.len();
        let mut saved = 0;
        let mut start = among.start;
        while start < among.end {
            let block = next(members[start]);
            let alike = members[start..among.end].iter().take_while(|&&run| next(run) == block);
            let end = start + alike.count();
            if block.is_some() {
                saved += self.divide(members, start..end, common + BLOCK_PAGES, families);
            }
            start = end;
        }
        let together = (among.len() - 1) * common;
        if together < saved || together == 0 {
            return saved;
        }
        families.truncate(before);
        families.push(Family { members: among, pages: common });
        together
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Families of single rows with these pages, as members and pages.
    fn families(lists: &[Vec<u32>]) -> Vec<(Vec<usize>, usize)> {
        let row = |pages: &Vec<u32>| (PAGE * pages.len() - 1) as u32;
        let bound = |pages| BoundRow { slot: 0, position: row(pages), pages };
        let rows: Vec<_> = lists.iter().map(bound).collect();
        let runs: Vec<_> = (0..rows.len()).map(|row| row..row + 1).collect();
        let mut found = Families::default();
        found.find(&runs, &rows);
        let sorted = |family: &Family| {
            let mut members = found.members[family.members.clone()].to_vec();
            members.sort_unstable();
            (members, family.pages)
        };
        found.families.iter().map(sorted).collect()
    }

    fn pages(parts: &[Range<u32>]) -> Vec<u32> {
        parts.iter().cloned().flatten().collect()
    }

    #[test]
    fn families_save_the_most_pages() {
        // Nothing in common, or less than a block before the row's own page.
        let one = |pages: Range<u32>| pages.collect::<Vec<_>>();
        assert!(families(&[one(0..9), one(10..20), one(0..3)]).is_empty());
        assert!(families(&[one(0..4), one(0..4)]).is_empty());
        // Two that agree in five pages: one block.
        let two = [pages(&[0..5, 9..19]), one(30..40), pages(&[0..5, 20..22])];
        assert_eq!(families(&two), [(vec![0, 2], 4)]);
        // A short beginning of all against long ones of some.
        let tree = |tail: u32| -> Vec<Vec<u32>> {
            (0..6)
                .map(|leaf| {
                    let branch = 1000 * (1 + leaf % 2);
                    pages(&[0..20, branch..branch + tail, 100 * leaf + 50..100 * leaf + 60])
                })
                .collect()
        };
        assert_eq!(families(&tree(4)), [(vec![0, 1, 2, 3, 4, 5], 20)]);
        assert_eq!(families(&tree(40)), [(vec![0, 2, 4], 60), (vec![1, 3, 5], 60)]);
    }
}
