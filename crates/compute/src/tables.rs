//! Page tables on the host: which pages hold a slot's positions.

use crate::AttendRow;
use glinthawk_flight::PAGE_POSITIONS;

/// The page table of every slot.
#[derive(Default)]
pub(crate) struct Tables(Vec<Vec<u32>>);

/// A row with the pages of positions `0..=position`, in order.
#[derive(Clone, Copy)]
pub(crate) struct BoundRow<'a> {
    pub(crate) slot: u32,
    pub(crate) position: u32,
    pub(crate) pages: &'a [u32],
}

impl Tables {
    /// Enters pages into a slot's table, from its page number `first` on. What followed is forgotten.
    pub(crate) fn bind(&mut self, slot: u32, first: usize, pages: &[u32]) {
        let slot = slot as usize;
        if self.0.len() <= slot {
            self.0.resize_with(slot + 1, Vec::new);
        }
        let table = &mut self.0[slot];
        assert!(first <= table.len(), "a hole in the table of slot {slot}");
        table.truncate(first);
        table.extend_from_slice(pages);
    }

    /// The rows with their pages.
    pub(crate) fn rows(&self, rows: &[AttendRow]) -> Vec<BoundRow<'_>> {
        let bound = |&AttendRow { slot, position }: &AttendRow| {
            let pages = &self.0[slot as usize][..=(position / PAGE_POSITIONS) as usize];
            BoundRow { slot, position, pages }
        };
        rows.iter().map(bound).collect()
    }
}
