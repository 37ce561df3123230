//! Page tables on the host: which pages hold a slot's positions.

use crate::{AttendRow, ComputeError};

/// The page table of every slot.
pub(crate) struct Tables {
    slots: Vec<Vec<u32>>,
    page_positions: u32,
    parts: u32,
}

/// A row with the pages of positions `0..=position`, in order.
#[derive(Clone, Copy)]
pub(crate) struct BoundRow<'a> {
    pub(crate) slot: u32,
    pub(crate) position: u32,
    pub(crate) asked: bool,
    pub(crate) pages: &'a [u32],
}

impl Tables {
    /// Tables of pages of so many positions. If kernels have smaller pages, each is so many `parts`, numbered in order.
    pub(crate) fn new(page_positions: u32, parts: u32) -> Self {
        Self { slots: Vec::new(), page_positions: page_positions / parts, parts }
    }

    /// Enters pages into a slot's table, from its page number `first` on. What followed is forgotten.
    pub(crate) fn bind(
        &mut self,
        slot: u32,
        first: usize,
        pages: &[u32],
    ) -> Result<(), ComputeError> {
        let slot = slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, Vec::new);
        }
        let table = &mut self.slots[slot];
        let known = first * self.parts as usize;
        if known > table.len() {
            return Err(ComputeError::Hole { slot, page: first });
        }
        table.truncate(known);
        let parts = |&page: &u32| page * self.parts..(page + 1) * self.parts;
        table.extend(pages.iter().flat_map(parts));
        Ok(())
    }

    /// The rows with their pages.
    pub(crate) fn rows(&self, rows: &[AttendRow]) -> Vec<BoundRow<'_>> {
        let bound = |&AttendRow { slot, position, asked }: &AttendRow| {
            let pages = &self.slots[slot as usize][..=(position / self.page_positions) as usize];
            BoundRow { slot, position, asked, pages }
        };
        rows.iter().map(bound).collect()
    }
}
