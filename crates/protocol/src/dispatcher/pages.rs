//! A lane's pages: the dispatcher hands them out, so no Tier-2 node ever finds itself out of memory.

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
