//! Page tables on the host: which pages hold a slot's positions.

use crate::{AttendRow, ComputeError};

/// The page table of every slot.
pub(crate) struct Tables {
    slots: Vec<Vec<u32>>,
    page_positions: u32,
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
    /// Tables of pages of so many positions.
    pub(crate) fn new(page_positions: u32) -> Self {
        Self { slots: Vec::new(), page_positions }
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
        if first > table.len() {
            return Err(ComputeError::Hole { slot, page: first });
        }
        table.truncate(first);
        table.extend_from_slice(pages);
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
