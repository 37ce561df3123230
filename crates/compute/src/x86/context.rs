//! Tier 2's work on x86-64: pages in the order the kernels read them, and the sharing of attention
//! among threads.

use super::amx::Tiles;
use super::attention::{self, HeadPages, PAGE, Part, SPLIT_PAGES, Tile, Workspace};
use super::tiles::{STEP, TILE, TILE_ROWS};
use crate::memory::{Memory, SharedMut};
use crate::{AttendRow, ComputeError, ContextKernels, Isa, Threads};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use half::bf16;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tiles for each thread below which splits of long contexts are shared out one by one.
const TILES_PER_THREAD: usize = 4;

/// The pages of a slice's layers.
pub(crate) struct X86Context {
    config: ModelConfig,
    isa: Isa,
    threads: Arc<Threads>,
    pages: usize,
    /// (layers, pages, kv_heads, keys and values): keys [d / 2][16 positions][2], values [16 / 2][d][2]
    values: Memory<bf16>,
    workspaces: Vec<Workspace>,
    /// Parts of splits, where these are shared out one by one.
    parts: Vec<Part>,
    jobs: Vec<Job>,
}

/// One tile to attend: some rows of the batch and some query heads of one key/value head.
#[derive(Clone)]
struct Job {
    rows: Range<usize>,
    kv_head: usize,
    /// Query heads, counted within the group of the key/value head.
    heads: Range<usize>,
    /// First split, and how many.
    splits: Range<usize>,
    /// Where the parts of its splits stand.
    first_part: usize,
}

/// What all jobs of a call share.
struct Batch<'a> {
    rows: &'a [AttendRow<'a>],
    /// (rows, qkv_width)
    qkv: &'a [bf16],
    /// (rows, query_width)
    attended: SharedMut<'a, bf16>,
}

impl X86Context {
    pub(crate) fn new(
        config: &ModelConfig,
        layers: usize,
        pages: usize,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let overflow = ComputeError::Memory { what: "context pages", bytes: usize::MAX };
        let len = (2 * PAGE * config.kv_width())
            .checked_mul(layers)
            .and_then(|len| len.checked_mul(pages));
        let workspaces: Result<_, _> =
            (0..threads.count()).map(|_| Workspace::new(config.head_dim)).collect();
        Ok(Self {
            values: Memory::zeroed("context pages", len.ok_or(overflow)?)?,
            config: config.clone(),
            isa,
            threads,
            pages,
            workspaces: workspaces?,
            parts: Vec::new(),
            jobs: Vec::new(),
        })
    }

    pub(crate) fn fill(&mut self, value: bf16) {
        self.values.fill(value);
    }

    /// Values of one page, one head, keys and values.
    fn head_values(&self) -> usize {
        2 * PAGE * self.config.head_dim
    }

    fn store(&mut self, layer: usize, rows: &[AttendRow<'_>], qkv: &[bf16]) {
        let (head_values, head_dim, kv_heads) =
            (self.head_values(), self.config.head_dim, self.config.kv_heads);
        let page_values = head_values * kv_heads;
        let (query_width, kv_width, qkv_width) =
            (self.config.query_width(), self.config.kv_width(), self.config.qkv_width());
        let (pages, isa) = (self.pages, self.isa);
        let layer_values = &mut self.values[layer * pages * page_values..][..pages * page_values];
        for row in rows {
            let page = row.pages[row.position as usize / PAGE] as usize;
            assert!(page < pages, "page {page} of {pages}");
            // What an earlier prompt left behind may be anything, and even a weight of 0 would make
            // NaN of it.
            if (row.position as usize).is_multiple_of(PAGE) {
                layer_values[page * page_values..][..page_values].fill(bf16::ZERO);
            }
        }
        let layer_values = SharedMut::new(layer_values);
        self.threads.for_each(rows.len(), |index| {
            let (pages, position) = (rows[index].pages, rows[index].position as usize);
            let (page, slot) = (pages[position / PAGE] as usize, position % PAGE);
            let row = &qkv[index * qkv_width..][..qkv_width];
            for head in 0..kv_heads {
                let keys = &row[query_width + head * head_dim..][..head_dim];
                let values = &row[query_width + kv_width + head * head_dim..][..head_dim];
                // SAFETY: the instruction set is there; no two rows have the same page and
                // position, and others' places on the page are not touched.
                unsafe {
                    let into =
                        layer_values.place(page * page_values + head * head_values, head_values);
                    attention::store(isa, keys, values, into, slot);
                }
            }
        });
    }

    /// Cuts the batch into tiles.
    fn plan(&mut self, rows: &[AttendRow<'_>]) {
        let group = self.config.heads / self.config.kv_heads;
        let rows_per_tile = (TILE_ROWS / group).max(1);
        self.jobs.clear();
        let mut start = 0;
        while start < rows.len() {
            let end = start + prompt_rows(&rows[start..], rows_per_tile);
            for kv_head in 0..self.config.kv_heads {
                for first in (0..group).step_by(TILE_ROWS) {
                    let heads = first..(first + TILE_ROWS).min(group);
                    self.jobs.push(Job {
                        rows: start..end,
                        kv_head,
                        heads,
                        splits: 0..0,
                        first_part: 0,
                    });
                }
            }
            start = end;
        }
    }

    /// Gives each split of each job a part of its own; returns how many there are.
    fn plan_splits(&mut self, rows: &[AttendRow<'_>]) -> Result<usize, ComputeError> {
        let mut parts = 0;
        for job in &mut self.jobs {
            let pages = Self::tile(&self.config, self.isa, rows, job).range();
            job.splits = pages.start / SPLIT_PAGES..pages.end.div_ceil(SPLIT_PAGES);
            job.first_part = parts;
            parts += job.splits.len();
        }
        while self.parts.len() < parts {
            self.parts.push(Part::new(self.config.head_dim)?);
        }
        Ok(parts)
    }

    fn tile<'a>(config: &ModelConfig, isa: Isa, rows: &[AttendRow<'a>], job: &Job) -> Tile<'a> {
        let mut seen = [(0, 0); TILE_ROWS];
        let heads = job.heads.len();
        for (seen, index) in seen.iter_mut().zip(0..job.rows.len() * heads) {
            let last = rows[job.rows.start + index / heads].position;
            let window = config
                .sliding_window
                .map_or(u32::MAX, |window| window.min(u32::MAX as usize) as u32);
            *seen = (last.saturating_sub(window - 1), last);
        }
        Tile {
            pages: rows[job.rows.end - 1].pages,
            seen,
            rows: job.rows.len() * heads,
            tiles: isa == Isa::Amx,
        }
    }

    fn head_pages(&self, layer: usize, kv_head: usize) -> HeadPages {
        let head_values = self.head_values();
        let stride = head_values * self.config.kv_heads;
        let first = self.values[layer * self.pages * stride + kv_head * head_values..].as_ptr();
        HeadPages { first, stride, head_dim: self.config.head_dim }
    }

    /// Copies a tile's queries into left-tile order.
    fn load_queries(&self, batch: &Batch<'_>, job: &Job, queries: &mut [bf16]) {
        let head_dim = self.config.head_dim;
        let group = self.config.heads / self.config.kv_heads;
        let pairs = job.rows.clone().flat_map(|row| job.heads.clone().map(move |head| (row, head)));
        for (tile_row, (row, head)) in pairs.enumerate() {
            let start = row * self.config.qkv_width() + (job.kv_head * group + head) * head_dim;
            for (step, values) in batch.qkv[start..][..head_dim].chunks(STEP).enumerate() {
                queries[step * TILE + tile_row * STEP..][..values.len()].copy_from_slice(values);
            }
        }
    }

    /// Attends a whole tile, split after split. `next` is the job that this thread will do then.
    fn attend_whole(
        &self,
        layer: usize,
        batch: &Batch<'_>,
        job: &Job,
        next: Option<&Job>,
        work: &mut Workspace,
    ) {
        let tile = Self::tile(&self.config, self.isa, batch.rows, job);
        let head = self.head_pages(layer, job.kv_head);
        let pages = tile.range();
        self.load_queries(batch, job, &mut work.queries);
        let splits = pages.start / SPLIT_PAGES..pages.end.div_ceil(SPLIT_PAGES);
        if splits.len() > 1 {
            work.total.clear();
        }
        let next = next.map_or((head, &[][..]), |next| {
            let tile = Self::tile(&self.config, self.isa, batch.rows, next);
            (self.head_pages(layer, next.kv_head), &tile.pages[tile.range().start..])
        });
        for split in splits.clone() {
            let range = split_pages(split, &pages);
            let after =
                if split + 1 < splits.end { (head, &tile.pages[range.end..]) } else { next };
            // SAFETY: the instruction set is there; pages were checked when their rows were stored.
            unsafe {
                attention::attend(self.isa, &tile, head, &range, after, work);
                if splits.len() > 1 {
                    attention::combine(self.isa, tile.rows, &work.part, &mut work.total);
                }
            }
        }
        let total = if splits.len() > 1 { &work.total } else { &work.part };
        self.finish(batch, job, total);
    }

    fn finish(&self, batch: &Batch<'_>, job: &Job, total: &Part) {
        let (head_dim, query_width) = (self.config.head_dim, self.config.query_width());
        let group = self.config.heads / self.config.kv_heads;
        let pairs = job.rows.clone().flat_map(|row| job.heads.clone().map(move |head| (row, head)));
        for (tile_row, (row, head)) in pairs.enumerate() {
            let start = row * query_width + (job.kv_head * group + head) * head_dim;
            // SAFETY: the instruction set is there; no other job has this row and head.
            unsafe {
                let into = batch.attended.part(start, head_dim);
                attention::finish_row(self.isa, tile_row, total, into.as_mut_ptr());
            }
        }
    }
}

/// The pages of one split.
fn split_pages(split: usize, pages: &Range<usize>) -> Range<usize> {
    (split * SPLIT_PAGES).max(pages.start)..((split + 1) * SPLIT_PAGES).min(pages.end)
}

/// How many of the first rows follow each other in one prompt, at most `rows_max`.
fn prompt_rows(rows: &[AttendRow<'_>], rows_max: usize) -> usize {
    let follows = |pair: &[AttendRow<'_>]| {
        pair[1].position == pair[0].position + 1 && pair[1].pages.starts_with(pair[0].pages)
    };
    1 + rows.windows(2).take(rows_max - 1).take_while(|pair| follows(pair)).count()
}

impl ContextKernels for X86Context {
    type Buffer = Buffer;

    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        let qkv = &qkv.bf16()[..rows.len() * self.config.qkv_width()];
        self.store(layer, rows, qkv);
        self.plan(rows);
        let attended =
            SharedMut::new(&mut attended.bf16_mut()[..rows.len() * self.config.query_width()]);
        let batch = Batch { rows, qkv, attended };
        let longest = rows.iter().map(|row| row.position as usize / PAGE).max().unwrap_or(0);
        let few =
            self.threads.count() > 1 && self.jobs.len() < TILES_PER_THREAD * self.threads.count();
        let parts =
            if few && longest >= SPLIT_PAGES { self.plan_splits(rows).unwrap_or(0) } else { 0 };
        let mut workspaces = std::mem::take(&mut self.workspaces);
        if parts == 0 {
            self.for_each_job(self.jobs.len(), &mut workspaces, |this, job, next, work| {
                this.attend_whole(layer, &batch, &this.jobs[job], this.jobs.get(next), work);
            });
        } else {
            self.attend_split(layer, &batch, parts, &mut workspaces);
        }
        self.workspaces = workspaces;
    }
}

impl X86Context {
    /// Attends all jobs split by split, then adds up each job's parts in order.
    fn attend_split(
        &mut self,
        layer: usize,
        batch: &Batch<'_>,
        parts: usize,
        workspaces: &mut [Workspace],
    ) {
        let mut made = std::mem::take(&mut self.parts);
        let shared = SharedMut::new(&mut made);
        self.for_each_job(parts, workspaces, |this, part, _, work| {
            let job =
                this.jobs.iter().rfind(|job| job.first_part <= part).expect("every part has a job");
            let tile = Self::tile(&this.config, this.isa, batch.rows, job);
            let pages = split_pages(job.splits.start + part - job.first_part, &tile.range());
            this.load_queries(batch, job, &mut work.queries);
            // SAFETY: the instruction set is there, the pages are; no other task has this part.
            unsafe {
                let head = this.head_pages(layer, job.kv_head);
                attention::attend(this.isa, &tile, head, &pages, (head, &[]), work);
                std::mem::swap(&mut work.part, &mut shared.part(part, 1)[0]);
            }
        });
        for job in &self.jobs {
            let total = &mut workspaces[0].total;
            total.clear();
            for part in &made[job.first_part..][..job.splits.len()] {
                // SAFETY: the instruction set is there.
                unsafe {
                    attention::combine(self.isa, job.rows.len() * job.heads.len(), part, total)
                };
            }
            self.finish(batch, job, total);
        }
        self.parts = made;
    }

    /// Runs `task` for every index below `tasks`, on all threads, each with a workspace of its own.
    /// A task hears which one follows it on its thread, or a number past the last.
    fn for_each_job(
        &self,
        tasks: usize,
        workspaces: &mut [Workspace],
        task: impl Fn(&Self, usize, usize, &mut Workspace) + Sync,
    ) {
        let next = AtomicUsize::new(0);
        let workspaces = SharedMut::new(workspaces);
        self.threads.run(|thread, _| {
            // SAFETY: each thread has a workspace of its own.
            let [work] = (unsafe { workspaces.part(thread, 1) }) else {
                unreachable!("one was asked for")
            };
            // SAFETY: whoever made the context was sure that the machine has the instruction set.
            let _tiles = (self.isa == Isa::Amx).then(|| unsafe { Tiles::for_attention() });
            let take = || next.fetch_add(1, Ordering::Relaxed);
            let mut index = take();
            while index < tasks {
                let following = take();
                task(self, index, following, work);
                index = following;
            }
        });
    }
}
