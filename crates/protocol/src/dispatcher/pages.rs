//! A lane's pages: the dispatcher hands them out, so no Tier-2 node ever finds itself out of memory.

use glinthawk_flight::pages_for;

/// Pages of `page_positions` positions of a lane that has memory for `held` of them: no more than its slots could ever use. `None` if one context of
/// the longest length does not fit: memory must never decide what a completion says.
pub fn lane_pages(held: u64, context_max: u32, slots: u64, page_positions: u32) -> Option<u32> {
    let context_pages = u64::from(pages_for(context_max, page_positions));
    let pages = held.min(context_pages.saturating_mul(slots));
    (held >= context_pages).then(|| u32::try_from(pages).unwrap_or(u32::MAX))
}

/// The free pages of one lane.
pub(super) struct PagePool {
    free: Vec<u32>,
    total: u32,
}

impl PagePool {
    pub(super) fn new(total: u32) -> Self {
        Self { free: (0..total).rev().collect(), total }
    }

    pub(super) fn total(&self) -> u32 {
        self.total
    }

    pub(super) fn used(&self) -> u32 {
        self.total - self.free.len() as u32
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(super) fn give(&mut self, pages: impl IntoIterator<Item = u32>) {
        self.free.extend(pages);
        assert!(self.free.len() <= self.total as usize, "more pages given back than the lane has");
    }
}
