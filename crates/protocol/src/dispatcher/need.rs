//! What the prompts of a lane will need together. Each grows by a token in every step until it ends, and then gives its
//! pages back. So they never need as much as each does in the end, unless all began at the same time.

use glinthawk_flight::pages_for;

/// What a prompt needs, in positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// For the tokens that it has, without those on pages that it shares.
    pub now: u32,
    /// Until it ends.
    pub more: u32,
}

impl Need {
    /// Pages that it needs in the end.
    pub(super) fn pages(self, page_positions: u32) -> u32 {
        pages_for(self.now + self.more, page_positions)
    }
}

/// What the prompts of a lane need.
#[derive(Debug)]
pub(super) struct Needs {
    page_positions: u32,
    /// Pages that several prompts share, counted once.
    shared: u32,
    /// The one that has the most to come first.
    prompts: Vec<Need>,
    pages_in_the_end: u64,
}

impl Needs {
    pub(super) fn new(
        page_positions: u32,
        shared: u32,
        prompts: impl Iterator<Item = Need>,
    ) -> Self {
        let mut prompts: Vec<Need> = prompts.collect();
        prompts.sort_unstable_by_key(|need| std::cmp::Reverse(need.more));
        let pages = prompts.iter().map(|need| u64::from(need.pages(page_positions)));
        let pages_in_the_end = u64::from(shared) + pages.sum::<u64>();
        Self { page_positions, shared, prompts, pages_in_the_end }
    }

    /// The sum of the pages that each needs in the end.
    pub(super) fn pages_in_the_end(&self) -> u64 {
        self.pages_in_the_end
    }

    pub(super) fn add(&mut self, need: Need) {
        let place = self.prompts.partition_point(|other| other.more >= need.more);
        self.prompts.insert(place, need);
        self.pages_in_the_end += u64::from(need.pages(self.page_positions));
    }

    /// Whether another prompt finds room in so many pages, until all have ended. Alone, it does.
    pub(super) fn leave_room(&self, need: Need, pages: u32) -> bool {
        let pages = u64::from(pages);
        self.pages_in_the_end == 0
            || self.pages_in_the_end + u64::from(need.pages(self.page_positions)) <= pages
            || self.most_with(need) <= pages
    }

    /// The most pages that all and one more need at a time. When one is about to end, those that go on have grown as
    /// much as it. The last page of each is partly used: up to a whole page more, and half of one on average.
    fn most_with(&self, need: Need) -> u64 {
        let place = self.prompts.partition_point(|other| other.more >= need.more);
        let (before, after) = self.prompts.split_at(place);
        let (mut now, mut most) = (0, 0);
        for (count, need) in (1..).zip(before.iter().chain([&need]).chain(after)) {
            now += u64::from(need.now);
            let positions = now + count * u64::from(need.more);
            most = most.max(positions.div_ceil(self.page_positions.into()) + 3 * count / 4);
        }
        u64::from(self.shared) + most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most pages that prompts need, each given as its positions now and those to come.
    fn check(needs: &[(u32, u32)], expected: u64) {
        let need = |&(now, more): &(u32, u32)| Need { now, more };
        let (last, others) = needs.split_last().expect("one");
        let others = Needs::new(16, 0, others.iter().map(need));
        assert_eq!(others.most_with(need(last)), expected);
    }

    #[test]
    fn prompts_that_end_make_room() {
        check(&[(48, 80)], 8);
        check(&[(48, 80), (48, 80)], 16 + 1);
        // When the second ends, the first has grown by two pages.
        check(&[(16, 112), (96, 32)], 11 + 1);
        check(&[(16, 112), (144, 0)], 10 + 1);
        check(&[(128, 0), (96, 32), (64, 64), (32, 96)], 20 + 3);
    }

    #[test]
    fn room_counts_what_is_shared_once() {
        let needs = Needs::new(16, 4, [Need { now: 32, more: 0 }].into_iter());
        assert!(needs.leave_room(Need { now: 16, more: 48 }, 10));
        assert!(!needs.leave_room(Need { now: 48, more: 32 }, 8));
        assert!(Needs::new(16, 0, std::iter::empty()).leave_room(Need { now: 9, more: 9 }, 1));
    }
}
