//! The pages of a head's context in memory, and how they are fetched before they are needed.

use super::tiles::PANEL;
use crate::ContextType;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Positions of one page: as many as a tile has rows and an AVX-512 register has lanes. Outside the kernels, two of them may
/// be one.
pub(crate) const PAGE: usize = 16;
/// Pages between two updates of the softmax.
pub(super) const BLOCK_PAGES: usize = 4;
/// Pages whose values are added together, if a job has several tiles.
pub(super) const STRETCH_PAGES: usize = 32;

/// Values of a line: a pair of positions, sixteen columns of a head.
pub(super) const LINE_VALUES: usize = 2 * PANEL;
/// Lines of a page and sixteen columns.
pub(super) const PAGE_LINES: usize = PAGE / 2;

/// How many pages stand together: they have one place, and belong to the same contexts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Together {
    One,
    Two,
}

impl Together {
    /// Pages that stand together.
    #[inline(always)]
    pub(super) fn pages(self) -> usize {
        match self {
            Together::One => 1,
            Together::Two => 2,
        }
    }

    /// At which place a page stands, and whether as the second there.
    #[inline(always)]
    fn place(self, page: u32) -> (u32, usize) {
        match self {
            Together::One => (page, 0),
            Together::Two => (page / 2, page as usize % 2),
        }
    }
}

/// The pages of one layer and one key/value head. The pages of a place have keys [d / 2][16 positions][2] one after the other,
/// and then values of all their positions, [d / 16][positions / 2][16][2]. Two pages that stand together have the values of
/// a step as tiles. On a machine with tiles, the pairs of positions then have the order of [`tile_pair`].
///
/// int8 pages stand by themselves, which is faster: keys, values [16 / 2][d][2] and scales.
///
/// [`tile_pair`]: super::weigh::tile_pair
#[derive(Clone, Copy)]
pub(super) struct HeadPages {
    /// The layer's first page.
    pub(super) first: *const u8,
    pub(super) kv_head: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) context_type: ContextType,
    pub(super) together: Together,
}

// SAFETY: only read while attending.
unsafe impl Send for HeadPages {}
// SAFETY: as above.
unsafe impl Sync for HeadPages {}

impl HeadPages {
    /// Bytes of one head at one place.
    #[inline(always)]
    pub(super) fn head_bytes(&self) -> usize {
        self.context_type.head_bytes(self.head_dim, PAGE * self.together.pages())
    }

    /// Where a place begins, in bytes from the layer's first. Heads have another order at every place. Otherwise a head's
    /// pages would be a multiple of a power of two apart in most models, and a cache would have room for few of them.
    #[inline(always)]
    fn offset(&self, place: u32) -> usize {
        // Fibonacci hashing: places at any usual distance from each other differ.
        let turn = (place.wrapping_mul(0x9E37_79B1) >> 16) as usize;
        (place as usize * self.kv_heads + (self.kv_head + turn) % self.kv_heads) * self.head_bytes()
    }

    /// Where the place of a page begins, in bytes from the layer's first.
    #[inline(always)]
    pub(super) fn place(&self, page: u32) -> usize {
        self.offset(self.together.place(page).0)
    }

    /// Where a page's keys begin, in bytes from the first of its place.
    #[inline(always)]
    pub(super) fn keys(&self, page: u32) -> usize {
        self.together.place(page).1 * self.part_bytes()
    }

    /// Whether a page is the second of two that stand together.
    #[inline(always)]
    pub(super) fn second(&self, page: u32) -> bool {
        self.together.place(page).1 == 1
    }

    /// Where the values of a bf16 place begin, likewise.
    #[inline(always)]
    pub(super) fn values(&self) -> usize {
        self.together.pages() * self.part_bytes()
    }

    /// Values from sixteen columns of a bf16 place to the next sixteen.
    #[inline(always)]
    pub(super) fn column(&self) -> usize {
        self.together.pages() * PAGE_LINES * LINE_VALUES
    }

    /// Bytes of a page's keys, or of its values. Scales are half of each.
    #[inline(always)]
    fn part_bytes(&self) -> usize {
        self.context_type.head_bytes(self.head_dim, PAGE) / 2
    }

    /// A page's keys.
    #[inline(always)]
    pub(super) unsafe fn page(&self, page: u32) -> *const u8 {
        // SAFETY: the page exists, as promised by the caller.
        unsafe { self.first.add(self.place(page) + self.keys(page)) }
    }

    /// As many bytes as a page's values have: its own, or its part of those that stand together.
    #[inline(always)]
    fn values_part(&self, page: u32) -> *const u8 {
        let (place, second) = self.together.place(page);
        let part = self.together.pages() + second;
        self.first.wrapping_add(self.offset(place) + part * self.part_bytes())
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
        let part_bytes = after.head.part_bytes();
        let group_lines = match after.head.context_type {
            ContextType::Bf16 => 4,
            ContextType::Int8 => 2,
        };
        let part_groups = part_bytes.div_ceil(group_lines * LINE);
        let next = std::ptr::null();
        Self { after, keys: pages, values: pages, next, groups: 0, part_groups, group_lines }
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
        Some(head.values_part(page))
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
