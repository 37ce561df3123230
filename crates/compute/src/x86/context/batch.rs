//! One call's rows and what is done with them: storing keys and values, attending a tile.

use super::shared::{SharedJob, SharedWork};
use super::{Job, Shape, Team};
use crate::memory::SharedMut;
use crate::tables::BoundRow;
use crate::x86::attention::{self, MANY_TILES, Queries, SPLIT_PAGES, Workspace};
use crate::x86::int8;
use crate::x86::pages::{After, HeadPages, PAGE, PAGE_LINES, RowsAhead, Together, fetch};
use crate::x86::softmax::{self, RunningSoftmax};
use crate::x86::store::{self, LineOrder, PagePlace};
use crate::x86::tiles::{STEP, TILE, TILE_ROWS};
use crate::{ContextType, Isa, Threads};
use half::bf16;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// What all jobs of a call share.
pub(super) struct Batch<'a> {
    pub(super) shape: &'a Shape,
    pub(super) rows: &'a [BoundRow<'a>],
    /// (rows, qkv_width)
    pub(super) qkv: &'a [bf16],
    /// (rows, query_width)
    pub(super) attended: SharedMut<'a, bf16>,
    /// One layer's bytes: (places, kv_heads, keys and values).
    pub(super) pages: SharedMut<'a, u8>,
    /// Whether all values that were stored are numbers.
    pub(super) finite: AtomicBool,
}

/// Pairs of row and query head by their numbers: row by row, head by head. (To find each by itself would take two
/// divisions.)
fn pairs_by_number(pairs: Range<usize>, group: usize) -> impl Iterator<Item = (usize, usize)> {
    let next = move |&(row, head): &(usize, usize)| {
        Some(if head + 1 < group { (row, head + 1) } else { (row + 1, 0) })
    };
    let first = (pairs.start / group, pairs.start % group);
    std::iter::successors(Some(first), next).take(pairs.len())
}

impl Shape {
    /// Positions that a row sees, its own included.
    fn window(&self) -> u32 {
        self.config.sliding_window.unwrap_or(usize::MAX).min(u32::MAX as usize) as u32
    }

    /// What a job's rows may see.
    pub(super) fn queries<'a>(&self, rows: &[BoundRow<'a>], job: &Job) -> Queries<'a> {
        let group = self.group();
        Queries {
            pages: rows[job.row + (job.pairs.end - 1) / group].pages,
            position: rows[job.row + job.pairs.start / group].position,
            head: (job.pairs.start % group) as u32,
            heads: group as u32,
            window: self.window(),
            rows: job.pairs.len(),
            tiles: self.isa == Isa::Amx,
        }
    }
}

/// The pages of one split.
pub(super) fn split_pages(split: usize, pages: &Range<usize>) -> Range<usize> {
    (split * SPLIT_PAGES).max(pages.start)..((split + 1) * SPLIT_PAGES).min(pages.end)
}

impl Batch<'_> {
    /// Panics if a row names a page that does not exist.
    pub(super) fn check(&self) {
        for row in self.rows {
            let pages = &row.pages[..row.position as usize / PAGE + 1];
            let last = pages.iter().max().copied().unwrap_or(0) as usize;
            let pages = self.shape.places * self.shape.together.pages();
            assert!(last < pages, "page {last} of {pages}");
        }
    }

    /// One head's pages.
    pub(super) fn head_pages(&self, kv_head: usize) -> HeadPages {
        let Shape { ref config, context_type, together, .. } = *self.shape;
        let first = self.pages.place(0, self.shape.place_bytes() * self.shape.places);
        let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
        HeadPages { first, kv_head, kv_heads, head_dim, context_type, together }
    }

    /// Stores all rows in any order: first clears the places that begin, then fills them in.
    pub(super) fn store_rows(&self, threads: &Threads) {
        let kv_heads = self.shape.config.kv_heads;
        for row in (0..self.rows.len()).filter(|&row| self.begins_place(row)) {
            (0..kv_heads).for_each(|kv_head| self.clear_place(row, kv_head));
        }
        threads.for_each(self.rows.len(), |row| {
            (0..kv_heads).for_each(|kv_head| self.store(row, kv_head));
        });
    }

    /// Stores segments, which belong to different places and are in order.
    pub(super) fn store_segments(&self, threads: &Threads, segments: &[Range<usize>]) {
        let kv_heads = self.shape.config.kv_heads;
        threads.for_each(segments.len(), |segment| {
            let rows = segments[segment].clone();
            let by_page = self.shape.context_type == ContextType::Bf16;
            let all_written = by_page && rows.len() == self.shape.positions();
            for kv_head in 0..kv_heads {
                if self.begins_place(rows.start) && !all_written {
                    self.clear_place(rows.start, kv_head);
                }
                let mut row = rows.start;
                while row < rows.end {
                    let left = PAGE - self.rows[row].position as usize % PAGE;
                    let of_page = row..rows.end.min(row + left);
                    if by_page && of_page.len() == PAGE {
                        self.store_page(row, kv_head);
                    } else {
                        of_page.clone().for_each(|row| self.store(row, kv_head));
                    }
                    row = of_page.end;
                }
            }
        });
    }

    /// Stores all rows of a page, from the first on.
    fn store_page(&self, row: usize, kv_head: usize) {
        let config = &self.shape.config;
        let (head_dim, width) = (config.head_dim, config.qkv_width());
        let rows = &self.qkv[row * width..][..PAGE * width];
        let keys = &rows[config.query_width() + kv_head * head_dim..];
        let values = &keys[config.kv_width()..];
        let (isa, page) = (self.shape.isa, self.page(self.page_of(row), kv_head));
        let mut finite = true;
        // SAFETY: the instruction set is there; all lines of the page are these rows'.
        unsafe {
            let (keys, values) = (keys.as_ptr(), values.as_ptr());
            store::store_page(isa, keys, values, width, head_dim, page, &mut finite);
        }
        self.note(finite);
    }

    /// Stores a row after all earlier rows of its place.
    fn store_in_order(&self, row: usize, kv_head: usize) {
        if self.begins_place(row) {
            self.clear_place(row, kv_head);
        }
        self.store(row, kv_head);
    }

    fn begins_place(&self, row: usize) -> bool {
        (self.rows[row].position as usize).is_multiple_of(self.shape.positions())
    }

    /// The page that a row is written on, and where on it.
    fn page_and_slot(&self, row: usize) -> (u32, usize) {
        let position = self.rows[row].position as usize;
        (self.rows[row].pages[position / PAGE], position % PAGE)
    }

    fn page_of(&self, row: usize) -> u32 {
        self.page_and_slot(row).0
    }

    /// Where the place of a page begins, for one head.
    fn place(&self, page: u32, kv_head: usize) -> (*mut u8, HeadPages) {
        let head = self.head_pages(kv_head);
        (self.pages.place(head.place(page), head.head_bytes()), head)
    }

    /// Where the keys and values of a page go, if it is bf16.
    fn page(&self, page: u32, kv_head: usize) -> PagePlace {
        let (place, head) = self.place(page, kv_head);
        let second = head.second(page);
        let order = match (head.together, self.shape.isa) {
            (Together::Two, Isa::Amx) => LineOrder::Tiles(second),
            _ => LineOrder::From(usize::from(second) * PAGE_LINES),
        };
        PagePlace {
            keys: place.wrapping_add(head.keys(page)).cast(),
            values: place.wrapping_add(head.values()).cast(),
            column: head.column(),
            order,
        }
    }

    /// Clears the row's place. An earlier prompt may have left NaN there, and even a weight of 0 would keep it
    /// NaN.
    fn clear_place(&self, row: usize, kv_head: usize) {
        let (place, head) = self.place(self.page_of(row), kv_head);
        // SAFETY: all of the place for one head, which nothing else uses yet.
        unsafe { place.write_bytes(0, head.head_bytes()) };
    }

    fn store(&self, row: usize, kv_head: usize) {
        let config = &self.shape.config;
        let head_dim = config.head_dim;
        let values = &self.qkv[row * config.qkv_width()..][..config.qkv_width()];
        let keys = &values[config.query_width() + kv_head * head_dim..][..head_dim];
        let values =
            &values[config.query_width() + config.kv_width() + kv_head * head_dim..][..head_dim];
        self.note(store::are_finite(values));
        self.write(self.page_and_slot(row), kv_head, keys, values);
    }

    /// Notes whether some values are numbers.
    fn note(&self, finite: bool) {
        if !finite {
            self.finite.store(false, Ordering::Relaxed);
        }
    }

    /// Overwrites what was stored with zeros.
    pub(super) fn forget_rows(&self) {
        self.write_zeros((0..self.rows.len()).map(|row| self.page_and_slot(row)));
    }

    /// Overwrites what stands behind the last row of each slot, at its place: rows whose tokens turned out to be others
    /// may have left NaN there.
    pub(super) fn forget_what_follows(&self) {
        for row in 0..self.rows.len() {
            let (page, slot) = self.page_and_slot(row);
            let is_first_half = self.shape.together.pages() == 2 && page.is_multiple_of(2);
            let behind = (0..PAGE).filter(|_| is_first_half).map(|slot| (page + 1, slot));
            self.write_zeros((slot + 1..PAGE).map(|slot| (page, slot)).chain(behind));
        }
    }

    fn write_zeros(&self, places: impl Iterator<Item = (u32, usize)>) {
        let zeros = vec![bf16::ZERO; self.shape.config.head_dim];
        for place in places {
            (0..self.shape.config.kv_heads)
                .for_each(|kv_head| self.write(place, kv_head, &zeros, &zeros));
        }
    }

    fn write(&self, (page, slot): (u32, usize), kv_head: usize, keys: &[bf16], values: &[bf16]) {
        let isa = self.shape.isa;
        // SAFETY: the instruction set is there; no two rows have the same page and position, and
        // others' places on the page are not touched.
        unsafe {
            match self.shape.context_type {
                ContextType::Bf16 => {
                    store::store(isa, keys, values, self.page(page, kv_head), slot);
                }
                ContextType::Int8 => {
                    let (place, head) = self.place(page, kv_head);
                    int8::store(isa, keys, values, place.wrapping_add(head.keys(page)), slot);
                }
            }
        }
    }

    /// Copies the queries of some rows and query heads into left-tile order, as products read them.
    pub(super) fn load_queries(
        &self,
        pairs: impl Iterator<Item = (usize, usize)>,
        queries: &mut [f32],
    ) {
        let config = &self.shape.config;
        let (width, head_dim) = (config.qkv_width(), config.head_dim);
        let mut heads =
            pairs.map(|(row, head)| &self.qkv[row * width + head * head_dim..][..head_dim]);
        // Rows stand far apart, so they are fetched a tile ahead.
        let mut next_tile = || {
            let (mut tile, mut count) = ([[].as_slice(); TILE_ROWS], 0);
            for (place, head) in tile.iter_mut().zip(&mut heads) {
                fetch(head);
                *place = head;
                count += 1;
            }
            (tile, count)
        };
        let mut next = next_tile();
        let values = head_dim.div_ceil(STEP) * TILE;
        let room = if self.shape.isa.widens() { values } else { values / 2 };
        for queries in queries.chunks_exact_mut(room) {
            let (tile, count) = std::mem::replace(&mut next, next_tile());
            if count == 0 {
                return;
            }
            // SAFETY: the instruction set is there, and all tiles of a head.
            unsafe { store::load_tile(self.shape.isa, &tile[..count], queries.as_mut_ptr()) };
        }
    }

    /// A job's rows and query heads, in order.
    pub(super) fn pairs(&self, job: &Job) -> impl Iterator<Item = (usize, usize)> {
        let (row, group) = (job.row, self.shape.group());
        let first = job.kv_head * group;
        let pairs = pairs_by_number(job.pairs.clone(), group);
        pairs.map(move |(pair_row, head)| (row + pair_row, first + head))
    }

    /// Attends every family to the pages that its rows share.
    pub(super) fn attend_shared(
        &self,
        team: &Team<'_>,
        shared: &mut SharedWork,
        workspaces: &mut [Workspace],
    ) {
        let SharedWork { jobs, rows, parts, totals, .. } = shared;
        if jobs.is_empty() {
            return;
        }
        let (parts, totals) = (SharedMut::new(parts), SharedMut::new(totals));
        let pages = |job: &SharedJob| &self.rows[rows[job.row]].pages[..job.pages];
        team.run(jobs.len(), workspaces, |index, next, work| {
            let job = &jobs[index];
            let next = jobs.get(next);
            let after = After {
                head: self.head_pages(next.unwrap_or(job).kv_head),
                pages: next.map_or(&[], pages),
                written: None,
            };
            self.attend_shared_job(job, rows, after, work);
            let tiles = job.pairs.len().div_ceil(TILE_ROWS);
            // SAFETY: no other job has these tiles.
            unsafe {
                work.parts[..tiles].swap_with_slice(parts.part(job.first_tile, tiles));
                if job.pages >= SPLIT_PAGES {
                    work.totals[..tiles].swap_with_slice(totals.part(job.first_tile, tiles));
                }
            }
        });
    }

    /// Attends a job split by split. Whole splits are added to the totals; what is left stays in the parts.
    fn attend_shared_job(
        &self,
        job: &SharedJob,
        rows: &[usize],
        after: After<'_>,
        work: &mut Workspace,
    ) {
        let (isa, group) = (self.shape.isa, self.shape.group());
        // Every pair sees all of these pages.
        let queries = Queries {
            pages: &self.rows[rows[job.row]].pages[..job.pages],
            position: (job.pages * PAGE - 1) as u32,
            head: 0,
            heads: u32::MAX,
            window: u32::MAX,
            rows: job.pairs.len(),
            tiles: isa == Isa::Amx,
        };
        let head = self.head_pages(job.kv_head);
        let pairs = pairs_by_number(job.pairs.clone(), group);
        let pairs = pairs.map(|(row, head)| (rows[job.row + row], job.kv_head * group + head));
        self.load_queries(pairs, &mut work.queries);
        work.rows_ahead = [RowsAhead::NONE; 2];
        softmax::clear(&mut work.totals, job.pairs.len());
        for split in 0..job.pages.div_ceil(SPLIT_PAGES) {
            let range = split_pages(split, &(0..job.pages));
            let after = match &queries.pages[range.end..] {
                [] => after,
                left => After { head, pages: left, written: None },
            };
            work.clear_parts(job.pairs.len());
            // SAFETY: the instruction set is there, and `check` saw that the pages are.
            unsafe { attention::attend(isa, &queries, head, &range, after, work) };
            if range.len() == SPLIT_PAGES {
                softmax::combine_tiles(isa, job.pairs.len(), &work.parts, &mut work.totals);
            }
        }
    }

    /// Attends a whole job, split after split, from where its family has left off. `next` is the job that this thread
    /// will do afterwards.
    pub(super) fn attend_whole(
        &self,
        job: &Job,
        next: Option<&Job>,
        shared: &SharedWork,
        work: &mut Workspace,
    ) {
        let isa = self.shape.isa;
        if job.stores {
            self.store_in_order(job.row, job.kv_head);
        }
        let queries = self.shape.queries(self.rows, job);
        let head = self.head_pages(job.kv_head);
        let mut pages = queries.range();
        let several = pages.end.div_ceil(SPLIT_PAGES) - pages.start / SPLIT_PAGES > 1;
        self.load_queries(self.pairs(job), &mut work.queries);
        work.rows_ahead =
            [self.written_by(job), next.map_or(RowsAhead::NONE, |next| self.read_by(next))];
        work.clear_parts(job.pairs.len());
        // The first split's parts are the totals, unless there are some already.
        let mut begun = false;
        if let Some(inherited) = shared.inherited(job.row) {
            begun = several;
            if begun {
                softmax::clear(&mut work.totals, job.pairs.len());
            }
            shared.hand_over(inherited, job.kv_head, job.pairs.clone(), work);
            pages.start = inherited.pages;
        }
        let nothing = After { head, pages: &[], written: None };
        let next = next.map_or(nothing, |next| self.wanted_by(next, shared));
        for split in pages.start / SPLIT_PAGES..pages.end.div_ceil(SPLIT_PAGES) {
            let range = split_pages(split, &pages);
            if split > pages.start / SPLIT_PAGES {
                work.clear_parts(job.pairs.len());
            }
            let after = match &queries.pages[range.end..pages.end] {
                [] => next,
                left => After { pages: left, ..nothing },
            };
            // SAFETY: the instruction set is there, and `check` saw that the pages are.
            unsafe { attention::attend(isa, &queries, head, &range, after, work) };
            if several && begun {
                softmax::combine_tiles(isa, job.pairs.len(), &work.parts, &mut work.totals);
            } else if several {
                work.parts[..job.tiles()].swap_with_slice(&mut work.totals[..job.tiles()]);
                begun = true;
            }
        }
        self.finish(job, if several { &work.totals } else { &work.parts });
    }

    /// The rows that a job writes.
    fn written_by(&self, job: &Job) -> RowsAhead {
        let width = self.shape.config.query_width();
        self.rows_of(job, self.attended.place(0, 0).cast_const(), width)
    }

    /// The rows whose queries a job reads.
    fn read_by(&self, job: &Job) -> RowsAhead {
        self.rows_of(job, self.qkv.as_ptr(), self.shape.config.qkv_width())
    }

    /// A job's part of rows that begin with the values of all query heads. None, if there are few.
    fn rows_of(&self, job: &Job, first: *const bf16, width: usize) -> RowsAhead {
        if job.tiles() < MANY_TILES {
            return RowsAhead::NONE;
        }
        let group = self.shape.group();
        let len = group * self.shape.config.head_dim;
        let rows = job.pairs.start / group..job.pairs.end.div_ceil(group);
        let first = first.wrapping_add((job.row + rows.start) * width + job.kv_head * len);
        RowsAhead::new(first, rows.len(), width, len)
    }

    /// The pages that a job needs first.
    fn wanted_by(&self, job: &Job, shared: &SharedWork) -> After<'_> {
        let row = job.row + job.pairs.start / self.shape.group();
        let BoundRow { position, pages, .. } = self.rows[row];
        let seen = position.saturating_sub(self.shape.window() - 1) as usize / PAGE;
        let first = shared.inherited(job.row).map_or(seen, |inherited| inherited.pages);
        let written = job.stores.then(|| pages[position as usize / PAGE]);
        After { head: self.head_pages(job.kv_head), pages: &pages[first..], written }
    }

    /// Writes a job's attention output.
    pub(super) fn finish(&self, job: &Job, totals: &[RunningSoftmax]) {
        let config = &self.shape.config;
        let mut places = self.pairs(job).map(|(row, head)| {
            let start = row * config.query_width() + head * config.head_dim;
            // SAFETY: no other job has this row and head.
            unsafe { self.attended.part(start, config.head_dim) }.as_mut_ptr()
        });
        for total in &totals[..job.tiles()] {
            let (mut tile, mut count) = ([std::ptr::null_mut(); TILE_ROWS], 0);
            for (row, place) in tile.iter_mut().zip(&mut places) {
                *row = place;
                count += 1;
            }
            // SAFETY: the instruction set is there, and each place has room for a head.
            unsafe { softmax::finish_tile(self.shape.isa, total, &tile[..count]) };
        }
    }
}
