//! Which of some contexts begin with the same pages, so that these are attended once for all of them.

use std::ops::Range;

/// Contexts that begin with the same pages.
#[derive(Debug, PartialEq)]
pub(crate) struct Family {
    /// Where its contexts are in [`Families::members`].
    pub(crate) members: Range<usize>,
    /// Pages that all of them begin with: whole blocks.
    pub(crate) pages: usize,
}

/// The families of a batch.
#[derive(Default)]
pub(crate) struct Families {
    /// Indices of contexts.
    pub(crate) members: Vec<usize>,
    pub(crate) families: Vec<Family>,
}

impl Families {
    /// Finds the families that save the most pages among `count` contexts, if every context is in one at most and each
    /// has at least `members_min`. `pages_of` gives a context's pages before the rows that attend, in whole blocks
    /// of `block` pages.
    pub(crate) fn find<'a>(
        &mut self,
        count: usize,
        block: usize,
        members_min: usize,
        pages_of: impl Fn(usize) -> &'a [u32],
    ) {
        self.families.clear();
        self.members.clear();
        self.members.extend((0..count).filter(|&context| !pages_of(context).is_empty()));
        let all = 0..self.members.len();
        let lists = Lists { pages_of, block, members_min: members_min.max(2) };
        lists.divide(&mut self.members, all, 0, &mut self.families);
    }
}

/// The pages of each context.
struct Lists<F> {
    pages_of: F,
    block: usize,
    members_min: usize,
}

impl<'a, F: Fn(usize) -> &'a [u32]> Lists<F> {
    /// Makes one family of some members, which are known to agree in their first pages, or several smaller ones with
    /// more pages in common: what saves more. Returns how many pages are saved.
    fn divide(
        &self,
        members: &mut [usize],
        among: Range<usize>,
        known: usize,
        families: &mut Vec<Family>,
    ) -> usize {
        if among.len() < self.members_min {
            return 0;
        }
        let first = (self.pages_of)(members[among.start]);
        let common = |&member: &usize| {
            let blocks = first[known..].chunks(self.block);
            let others = (self.pages_of)(member)[known..].chunks(self.block);
            known + self.block * blocks.zip(others).take_while(|(one, other)| one == other).count()
        };
        let common = members[among.clone()].iter().map(common).min().unwrap_or(known);
        let next = |member: usize| (self.pages_of)(member).get(common..common + self.block);
        members[among.clone()].sort_unstable_by(|one, other| next(*one).cmp(&next(*other)));

        let before = families.len();
        let mut saved = 0;
        let mut start = among.start;
        while start < among.end {
            let block = next(members[start]);
            let alike = members[start..among.end].iter().take_while(|&&run| next(run) == block);
            let end = start + alike.count();
            if block.is_some() {
                saved += self.divide(members, start..end, common + self.block, families);
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

    const BLOCK: usize = 4;

    /// Families of contexts with these pages, the last of which is not complete: as members and pages.
    fn families(lists: &[Vec<u32>], members_min: usize) -> Vec<(Vec<usize>, usize)> {
        let mut found = Families::default();
        let blocks = |context: usize| &lists[context][..(lists[context].len() - 1) / BLOCK * BLOCK];
        found.find(lists.len(), BLOCK, members_min, blocks);
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
        // Nothing in common, or less than a block before the last page.
        let one = |pages: Range<u32>| pages.collect::<Vec<_>>();
        assert!(families(&[one(0..9), one(10..20), one(0..3)], 2).is_empty());
        assert!(families(&[one(0..4), one(0..4)], 2).is_empty());
        // Two that agree in five pages: one block.
        let two = [pages(&[0..5, 9..19]), one(30..40), pages(&[0..5, 20..22])];
        assert_eq!(families(&two, 2), [(vec![0, 2], 4)]);
        assert!(families(&two, 3).is_empty());
        // A short beginning of all against long ones of some.
        let tree = |tail: u32| -> Vec<Vec<u32>> {
            (0..6)
                .map(|leaf| {
                    let branch = 1000 * (1 + leaf % 2);
                    pages(&[0..20, branch..branch + tail, 100 * leaf + 50..100 * leaf + 60])
                })
                .collect()
        };
        let all = vec![0, 1, 2, 3, 4, 5];
        assert_eq!(families(&tree(4), 2), [(all.clone(), 20)]);
        assert_eq!(families(&tree(40), 2), [(vec![0, 2, 4], 60), (vec![1, 3, 5], 60)]);
        assert_eq!(families(&tree(40), 4), [(all, 20)], "three are too few");
    }
}
