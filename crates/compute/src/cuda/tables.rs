//! The page tables of a device as the host knows them.

use super::PAGE;

/// Pages of a block: what the kernels attend to at a time.
pub(super) const BLOCK_PAGES: usize = 4;
/// Marks a place that nothing was bound to.
const NO_PAGE: u32 = u32::MAX;

/// Which pages hold the positions of each slot.
pub(super) struct Tables {
    /// (slots, pages of the longest context)
    pages: Vec<u32>,
    width: usize,
    /// Counts changes.
    version: u64,
}

impl Tables {
    /// Empty tables for contexts of at most `context_max` positions.
    pub(super) fn new(slots: usize, context_max: usize) -> Self {
        let width = context_max.div_ceil(PAGE);
        Self { pages: vec![NO_PAGE; slots * width], width, version: 0 }
    }

    /// Pages of the longest context.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// The same as long as nothing changes.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// A page of a slot.
    pub(super) fn page(&self, slot: u32, number: usize) -> u32 {
        self.pages[slot as usize * self.width + number]
    }

    /// Enters a page; says whether that is new.
    pub(super) fn enter(&mut self, slot: u32, number: usize, page: u32) -> bool {
        assert!(number < self.width, "page {number} of slot {slot} is too far");
        let place = &mut self.pages[slot as usize * self.width + number];
        let new = std::mem::replace(place, page) != page;
        self.version += u64::from(new);
        new
    }

    /// The pages of a slot's whole blocks before a position.
    pub(super) fn blocks_before(&self, slot: u32, position: u32) -> &[u32] {
        let count = position as usize / PAGE / BLOCK_PAGES * BLOCK_PAGES;
        &self.pages[slot as usize * self.width..][..count]
    }
}
