//! The pages of a head's context in memory, and how they are fetched before they are needed.

use crate::ContextType;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Positions of one page: as many as a tile has rows and an AVX-512 register has lanes.
pub(crate) const PAGE: usize = 16;
/// Pages between two updates of the softmax.
pub(super) const BLOCK_PAGES: usize = 4;

/// The pages of one layer and one key/value head.
#[derive(Clone, Copy)]
pub(super) struct HeadPages {
    /// Page 0 of this head: keys [d / 2][16 positions][2], then values [16 / 2][d][2]; for int8,
    /// scales follow.
    pub(super) first: *const u8,
    /// Bytes from one page to the next.
    pub(super) stride: usize,
    pub(super) head_dim: usize,
    pub(super) context_type: ContextType,
}

// SAFETY: only read while attending.
unsafe impl Send for HeadPages {}
// SAFETY: as above.
unsafe impl Sync for HeadPages {}

impl HeadPages {
    #[inline(always)]
    pub(super) unsafe fn page(&self, page: u32) -> *const u8 {
        // SAFETY: the page exists, as promised by the caller.
        unsafe { self.first.add(page as usize * self.stride) }
    }
}

/// What is needed after a range of pages: pages of a head, and one page that comes first because it
/// will be written.
#[derive(Clone, Copy)]
pub(super) struct After<'a> {
    pub(super) head: HeadPages,
    pub(super) pages: &'a [u32],
    pub(super) written: Option<u32>,
}

/// Fetches the pages of the next block, a few lines at a time, between the work on this one. So
/// memory is never idle and never overloaded.
pub(super) struct Fetcher {
    /// What is still to be fetched, with the next one last. Keys of all pages come before values, because they
    /// are needed first.
    parts: [*const u8; 2 * (BLOCK_PAGES + 1)],
    left: usize,
    /// Where to continue, and how many groups of lines that part has left.
    next: *const u8,
    groups: usize,
    part_groups: usize,
    /// Lines fetched together: an int8 page has half as many for the same work.
    group_lines: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl Fetcher {
    /// Prepares to fetch what comes next, up to one block.
    #[inline(always)]
    pub(super) unsafe fn new(After { head, pages, written }: After<'_>) -> Self {
        let mut parts = [std::ptr::null(); 2 * (BLOCK_PAGES + 1)];
        let pages = &pages[..pages.len().min(BLOCK_PAGES)];
        let count = pages.len() + usize::from(written.is_some());
        let wanted = written.iter().chain(pages);
        let part_bytes = head.context_type.head_bytes(head.head_dim, PAGE) / 2;
        let (values, keys) = parts[..2 * count].split_at_mut(count);
        for ((keys, values), &page) in keys.iter_mut().zip(values).rev().zip(wanted) {
            // SAFETY: the page exists, as promised by the caller.
            *keys = unsafe { head.page(page) };
            *values = keys.wrapping_add(part_bytes);
        }
        let group_lines = match head.context_type {
            ContextType::Bf16 => 4,
            ContextType::Int8 => 2,
        };
        let part_groups = part_bytes.div_ceil(group_lines * LINE);
        let (left, next) = (2 * count, std::ptr::null());
        Self { parts, left, next, groups: 0, part_groups, group_lines }
    }

    /// Groups to fetch for each of `rows` rows while a block's scores become weights.
    #[inline(always)]
    pub(super) fn share_of_row(&self, rows: usize) -> usize {
        (BLOCK_PAGES * self.part_groups / 2).div_ceil(rows)
    }

    /// Fetches the next `groups` groups of lines. Two groups for each step of a page's scores, a
    /// quarter of the block spread over its rows, and two for each column of its values together
    /// fetch as many pages as are used in that time.
    #[inline(always)]
    pub(super) fn fetch(&mut self, groups: usize) {
        for _ in 0..groups {
            if self.groups == 0 {
                if self.left == 0 {
                    return;
                }
                self.left -= 1;
                self.next = self.parts[self.left];
                self.groups = self.part_groups;
            }
            for line in 0..self.group_lines {
                // SAFETY: a prefetch reads nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.wrapping_add(line * LINE).cast()) };
            }
            self.next = self.next.wrapping_add(self.group_lines * LINE);
            self.groups -= 1;
        }
    }
}
