//! The pages of a head's context in memory, and how they are fetched before they are needed.

use crate::ContextType;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Positions of one page: as many as a tile has rows and an AVX-512 register has lanes.
pub(crate) const PAGE: usize = 16;
/// Pages between two updates of the softmax.
pub(super) const BLOCK_PAGES: usize = 4;
/// Pages whose values are added together, if a job has several tiles.
pub(super) const STRETCH_PAGES: usize = 32;

/// The pages of one layer and one key/value head: keys [d / 2][16 positions][2], then values [16 / 2][d][2]; for int8,
/// scales follow.
#[derive(Clone, Copy)]
pub(super) struct HeadPages {
    /// The layer's first page.
    pub(super) first: *const u8,
    pub(super) kv_head: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) context_type: ContextType,
}

// SAFETY: only read while attending.
unsafe impl Send for HeadPages {}
// SAFETY: as above.
unsafe impl Sync for HeadPages {}

impl HeadPages {
    /// Bytes of one page of one head.
    #[inline(always)]
    pub(super) fn head_bytes(&self) -> usize {
        self.context_type.head_bytes(self.head_dim, PAGE)
    }

    /// Where a page stands, in bytes from the layer's first. Heads have another order on every page. Otherwise a head's
    /// pages would be a multiple of a power of two apart in most models, and a cache would have room for few of them.
    #[inline(always)]
    pub(super) fn offset(&self, page: u32) -> usize {
        // Fibonacci hashing: pages at any usual distance from each other differ.
        let turn = (page.wrapping_mul(0x9E37_79B1) >> 16) as usize;
        (page as usize * self.kv_heads + (self.kv_head + turn) % self.kv_heads) * self.head_bytes()
    }

    #[inline(always)]
    pub(super) unsafe fn page(&self, page: u32) -> *const u8 {
        // SAFETY: the page exists, as promised by the caller.
        unsafe { self.first.add(self.offset(page)) }
    }
}

/// Fetches some values into the second-level cache.
pub(super) fn fetch<T>(values: &[T]) {
    for line in values.chunks(LINE / size_of::<T>()) {
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
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

/// Fetches the pages of the next stretch, a few lines at a time, between the work on this one. So
/// memory is never idle and never overloaded.
pub(super) struct Fetcher<'a> {
    after: After<'a>,
    /// What is left: pages whose keys are to be fetched, then those whose values are. Keys come first because they are
    /// needed first.
    keys: &'a [u32],
    values: &'a [u32],
    /// Where to continue, and how many groups of lines that part has left.
    next: *const u8,
    groups: usize,
    part_bytes: usize,
    part_groups: usize,
    /// Lines fetched together: an int8 page has half as many for the same work.
    group_lines: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl<'a> Fetcher<'a> {
    /// Prepares to fetch what comes next, up to `pages_max` pages.
    #[inline(always)]
    pub(super) fn new(after: After<'a>, pages_max: usize) -> Self {
        let pages = &after.pages[..after.pages.len().min(pages_max)];
        let part_bytes = after.head.context_type.head_bytes(after.head.head_dim, PAGE) / 2;
        let group_lines = match after.head.context_type {
            ContextType::Bf16 => 4,
            ContextType::Int8 => 2,
        };
        let part_groups = part_bytes.div_ceil(group_lines * LINE);
        let next = std::ptr::null();
        Self {
            after,
            keys: pages,
            values: pages,
            next,
            groups: 0,
            part_bytes,
            part_groups,
            group_lines,
        }
    }

    /// Whether nothing is left to fetch.
    #[inline(always)]
    pub(super) fn is_done(&self) -> bool {
        self.groups == 0 && self.values.is_empty() && self.after.written.is_none()
    }

    /// Groups to fetch for each of `rows` rows while a block's scores become weights.
    #[inline(always)]
    pub(super) fn share_of_row(&self, rows: usize) -> usize {
        (BLOCK_PAGES * self.part_groups / 2).div_ceil(rows)
    }

    /// Groups to fetch at each of so many times, if nothing is fetched at others.
    #[inline(always)]
    pub(super) fn share(&self, times: usize) -> usize {
        (2 * self.keys.len() * self.part_groups).div_ceil(times)
    }

    /// Where the next part begins.
    #[inline(always)]
    fn next_part(&mut self) -> Option<*const u8> {
        let head = self.after.head;
        // SAFETY: whoever made `After` promised that the page exists.
        let place = |page: u32| unsafe { head.page(page) };
        if let Some(page) = self.after.written.take() {
            return Some(place(page));
        }
        if let Some((&page, left)) = self.keys.split_first() {
            self.keys = left;
            return Some(place(page));
        }
        let (&page, left) = self.values.split_first()?;
        self.values = left;
        Some(place(page).wrapping_add(self.part_bytes))
    }

    /// Fetches the next `groups` groups of lines. Two groups for each step of a page's scores, a
    /// quarter of the block spread over its rows, and two for each column of its values together
    /// fetch as many pages as are used in that time.
    #[inline(always)]
    pub(super) fn fetch(&mut self, groups: usize) {
        for _ in 0..groups {
            if self.groups == 0 {
                let Some(next) = self.next_part() else { return };
                self.next = next;
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

/// Rows that will be read or written, fetched a few lines at a time.
#[derive(Clone, Copy)]
pub(super) struct RowsAhead {
    /// The next row, and how many there are.
    next: *const u8,
    rows: usize,
    /// Bytes from a row to the next, and lines of each.
    stride: usize,
    lines: usize,
    /// Lines of the next row that were fetched.
    fetched: usize,
}

// SAFETY: nothing is read through it.
unsafe impl Send for RowsAhead {}

impl RowsAhead {
    pub(super) const NONE: Self =
        Self { next: std::ptr::null(), rows: 0, stride: 0, lines: 0, fetched: 0 };

    /// `rows` rows of `len` values each, `width` apart.
    pub(super) fn new<T>(first: *const T, rows: usize, width: usize, len: usize) -> Self {
        let lines = (len * size_of::<T>()).div_ceil(LINE);
        Self { next: first.cast(), rows, stride: width * size_of::<T>(), lines, fetched: 0 }
    }

    /// Fetches up to `lines` lines; returns how many more it could have been.
    #[inline(always)]
    pub(super) fn fetch(&mut self, mut lines: usize) -> usize {
        while self.rows > 0 && lines > 0 {
            let line = self.next.wrapping_add(self.fetched * LINE);
            // SAFETY: a prefetch reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
            lines -= 1;
            self.fetched += 1;
            if self.fetched == self.lines {
                self.fetched = 0;
                self.next = self.next.wrapping_add(self.stride);
                self.rows -= 1;
            }
        }
        lines
    }
}
