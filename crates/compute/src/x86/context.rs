//! Tier 2's work on x86-64: pages in the order the kernels read them, and how a batch is cut into
//! jobs and shared among threads. What a job does is in `batch`.

mod batch;
mod shared;

use super::attention::{self, SPLIT_PAGES, Workspace, job_tiles_max};
use super::pages::{After, PAGE, RowsAhead, Together};
use super::softmax::{self, RunningSoftmax};
use super::tiles::TILE_ROWS;
use crate::memory::{Memory, SharedMut};
use crate::tables::BoundRow;
use crate::{ComputeError, ContextSpec, ContextType, Isa, Threads};
use batch::{Batch, split_pages};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use half::bf16;
use shared::SharedWork;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// With fewer jobs per thread than this, the splits of long contexts are shared out one by one.
const JOBS_PER_THREAD: usize = 4;
/// Memory is touched ahead by a fraction of what is in use, and by no more than this.
const AHEAD_FRACTION: usize = 4;
const AHEAD_BYTES_MAX: usize = 256 << 20;
/// What a thread touches at a time: a huge page, at the steps of small ones.
const TOUCH_BYTES: usize = 2 << 20;
const SMALL_PAGE_BYTES: usize = 4 << 10;

/// The pages of a slice's layers.
pub(crate) struct X86Context {
    shape: Shape,
    threads: Arc<Threads>,
    /// (layers, places of pages, kv_heads); [`attention::HeadPages`] describes each.
    bytes: Memory<u8>,
    layers: usize,
    /// Places whose memory is there, from the first on.
    touched: usize,
    workspaces: Vec<Workspace>,
    /// Parts of splits, if splits are shared out one by one.
    parts: Vec<RunningSoftmax>,
    /// Rows of the batch that follow each other in one slot.
    runs: Vec<Range<usize>>,
    /// The parts of the runs that are asked for.
    asked: Vec<Range<usize>>,
    shared: Box<SharedWork>,
    jobs: Vec<Job>,
    /// Rows at one place, of runs that no job stores.
    segments: Vec<Range<usize>>,
    /// One bit for each slot, all clear between calls.
    marked: Vec<u64>,
    /// Whether values were stored that are not numbers.
    seen_nan: bool,
}

/// What stays the same for all calls.
struct Shape {
    config: ModelConfig,
    context_type: ContextType,
    isa: Isa,
    together: Together,
    places: usize,
}

/// Some tiles to attend: some pairs of a run's rows and the query heads of one key/value head.
struct Job {
    /// The run's first row.
    row: usize,
    kv_head: usize,
    /// Pairs of row and query head, counted from the run's first row: row by row, head by head.
    pairs: Range<usize>,
    /// Whether the job first stores its row.
    stores: bool,
    /// Splits and the places of their parts, if splits are shared out one by one: each has one for every tile.
    splits: Range<usize>,
    first_part: usize,
}

impl Job {
    fn tiles(&self) -> usize {
        self.pairs.len().div_ceil(TILE_ROWS)
    }
}

impl Shape {
    /// Positions of the pages that stand together.
    fn positions(&self) -> usize {
        self.together.pages() * PAGE
    }

    /// Bytes of one place, all heads, keys and values.
    fn place_bytes(&self) -> usize {
        let head_bytes = self.context_type.head_bytes(self.config.head_dim, self.positions());
        head_bytes * self.config.kv_heads
    }

    /// Tiles of a job if there are so many in all: as many as may be, as long as each of several threads has a few jobs.
    fn job_tiles(&self, tiles: usize, threads: usize) -> usize {
        let most = job_tiles_max(self.config.head_dim);
        if threads == 1 {
            return most;
        }
        (tiles / (JOBS_PER_THREAD * threads) / 2 * 2).clamp(2, most)
    }

    /// Cuts pairs of row and query head into even jobs of at most `job_pairs`, in whole pairs of tiles. (A short last job
    /// would use the keys and values that it reads for few tiles.)
    fn even_jobs(pairs: usize, job_pairs: usize) -> impl Iterator<Item = Range<usize>> {
        let jobs = pairs.div_ceil(job_pairs).max(1);
        let each = pairs.div_ceil(jobs).next_multiple_of(2 * TILE_ROWS).max(1);
        (0..pairs).step_by(each).map(move |first| first..(first + each).min(pairs))
    }

    /// Query heads of one key/value head.
    fn group(&self) -> usize {
        self.config.heads / self.config.kv_heads
    }
}

impl X86Context {
    pub(crate) fn new(
        config: &ModelConfig,
        spec: &ContextSpec,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let ContextSpec { layers, context_type, .. } = *spec;
        let overflow = || ComputeError::Memory { what: "context pages", bytes: usize::MAX };
        let parts = Self::page_parts(spec.page_positions) as usize;
        let together = match (parts, context_type) {
            (2, ContextType::Bf16) => Together::Two,
            _ => Together::One,
        };
        // The kernels' pages have numbers of 32 bits too.
        let pages = spec.pages.checked_mul(parts).filter(|&pages| u32::try_from(pages).is_ok());
        let places = pages.ok_or(overflow())? / together.pages();
        let shape = Shape { config: config.clone(), context_type, isa, together, places };
        let len = shape.place_bytes().checked_mul(layers).and_then(|len| len.checked_mul(places));
        let workspaces: Result<_, _> =
            (0..threads.count()).map(|_| Workspace::new(config.head_dim, context_type)).collect();
        Ok(Self {
            bytes: Memory::zeroed("context pages", len.ok_or(overflow())?)?,
            layers,
            touched: 0,
            shape,
            threads,
            workspaces: workspaces?,
            parts: Vec::new(),
            runs: Vec::new(),
            asked: Vec::new(),
            shared: Box::default(),
            jobs: Vec::new(),
            segments: Vec::new(),
            marked: Vec::new(),
            seen_nan: false,
        })
    }

    /// The kernels' pages in one of so many positions, which is one of those that the instruction set can use.
    pub(crate) fn page_parts(page_positions: u32) -> u32 {
        page_positions / PAGE as u32
    }

    /// Attends on these threads from now on.
    pub(crate) fn use_threads(&mut self, threads: Arc<Threads>) -> Result<(), ComputeError> {
        let Shape { config, context_type, .. } = &self.shape;
        while self.workspaces.len() < threads.count() {
            self.workspaces.push(Workspace::new(config.head_dim, *context_type)?);
        }
        self.threads = threads;
        Ok(())
    }

    pub(crate) fn fill(&mut self, byte: u8) {
        self.bytes.fill(byte);
        self.touched = self.shape.places;
    }

    /// Has the memory of the pages that rows are written to there. The system clears it at the first touch, a huge page at
    /// a time: a thread that met one within a kernel would keep all others waiting. So all of them do it before, for all
    /// layers, and a little ahead. Pages are given out from the first on.
    fn touch(&mut self, rows: &[BoundRow<'_>]) {
        let last = rows.iter().map(|row| row.pages[row.position as usize / PAGE]).max();
        let needed = last.map_or(0, |last| last as usize / self.shape.together.pages() + 1);
        if needed <= self.touched {
            return;
        }
        if self.threads.count() == 1 {
            // It keeps nobody waiting. Several threads may go on here, and must not clear what it writes.
            self.touched = needed;
            return;
        }
        let (place_bytes, places) = (self.shape.place_bytes(), self.shape.places);
        let ahead =
            (self.touched / AHEAD_FRACTION).min(AHEAD_BYTES_MAX / (place_bytes * self.layers));
        let upto = needed.max(self.touched + ahead).min(places);
        let bytes = (upto - self.touched) * place_bytes;
        let parts = bytes.div_ceil(TOUCH_BYTES);
        let (first, layer_bytes) = (self.touched * place_bytes, place_bytes * places);
        let all = SharedMut::new(&mut self.bytes);
        self.threads.for_each(self.layers * parts, |task| {
            let (layer, part) = (task / parts, task % parts * TOUCH_BYTES);
            let len = TOUCH_BYTES.min(bytes - part);
            // SAFETY: tasks have different parts. Nothing was written there yet, so they are zero.
            let part = unsafe { all.part(layer * layer_bytes + first + part, len) };
            for byte in part.iter_mut().step_by(SMALL_PAGE_BYTES) {
                // SAFETY: a byte that is borrowed.
                unsafe { std::ptr::write_volatile(byte, 0) };
            }
        });
        self.touched = upto;
    }

    /// Cuts the batch into runs, segments and jobs. Returns whether all runs are of different slots.
    fn plan(&mut self, rows: &[BoundRow<'_>]) -> bool {
        self.runs.clear();
        self.jobs.clear();
        self.segments.clear();
        let mut start = 0;
        while start < rows.len() {
            let end = start + run_len(&rows[start..]);
            self.runs.push(start..end);
            start = end;
        }
        let distinct = self.are_distinct(rows);
        let group = self.shape.group();
        // Rows before the first that is asked for are only stored.
        let asked = |run: &Range<usize>| {
            let first = run.clone().find(|&row| rows[row].asked);
            first.map(|first| first..run.end)
        };
        self.asked.clear();
        self.asked.extend(self.runs.iter().filter_map(asked));
        let run_tiles = |run: &Range<usize>| (run.len() * group).div_ceil(TILE_ROWS);
        let tiles = self.asked.iter().map(run_tiles).sum::<usize>() * self.shape.config.kv_heads;
        let job_pairs = self.shape.job_tiles(tiles, self.threads.count()) * TILE_ROWS;
        for run in &self.runs {
            // Only a single row's own jobs use its keys and values. They are best written just
            // before, so that the page is in the cache.
            let stores = distinct && run.len() == 1 && rows[run.start].asked && group <= TILE_ROWS;
            if !stores {
                let place = |row: usize| rows[row].position as usize / self.shape.positions();
                let same_place = |one: &usize, other: &usize| place(*one) == place(*other);
                let all: Range<usize> = run.clone();
                let mut start = all.start;
                while start < all.end {
                    let len = (start..all.end).take_while(|row| same_place(&start, row)).count();
                    self.segments.push(start..start + len);
                    start += len;
                }
            }
            let Some(run) = asked(run) else { continue };
            let pairs = run.len() * group;
            for kv_head in 0..self.shape.config.kv_heads {
                // A head's jobs follow each other: they read the same pages.
                for pairs in Shape::even_jobs(pairs, job_pairs) {
                    self.jobs.push(Job {
                        row: run.start,
                        kv_head,
                        pairs,
                        stores,
                        splits: 0..0,
                        first_part: 0,
                    });
                }
            }
        }
        distinct
    }

    /// Whether all runs are of different slots.
    fn are_distinct(&mut self, rows: &[BoundRow<'_>]) -> bool {
        let slots = || self.runs.iter().map(|run| rows[run.start].slot);
        let words = slots().max().map_or(0, |last| (last / u64::BITS) as usize + 1);
        self.marked.resize(words.max(self.marked.len()), 0);
        let mut distinct = true;
        for slot in slots() {
            let (word, bit) = ((slot / u64::BITS) as usize, 1 << (slot % u64::BITS));
            distinct &= self.marked[word] & bit == 0;
            self.marked[word] |= bit;
        }
        for slot in slots() {
            self.marked[(slot / u64::BITS) as usize] = 0;
        }
        distinct
    }

    /// Gives each tile of each split of each job a part of its own; returns how many splits there are.
    fn plan_splits(&mut self, rows: &[BoundRow<'_>]) -> Result<usize, ComputeError> {
        let mut parts = 0;
        for job in &mut self.jobs {
            let pages = self.shape.queries(rows, job).range();
            job.splits = pages.start / SPLIT_PAGES..pages.end.div_ceil(SPLIT_PAGES);
            job.first_part = parts;
            parts += job.splits.len() * job.tiles();
        }
        while self.parts.len() < parts {
            self.parts.push(RunningSoftmax::new(self.shape.config.head_dim)?);
        }
        Ok(self.jobs.iter().map(|job| job.splits.len()).sum())
    }

    /// Stores and attends rows whose pages are bound.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        rows: &[BoundRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        let (qkv_width, width) = (self.shape.config.qkv_width(), self.shape.config.query_width());
        let qkv = &qkv.bf16()[..rows.len() * qkv_width];
        let attended = &mut attended.bf16_mut()[..rows.len() * width];
        if self.attend_together(layer, rows, qkv, attended) {
            return;
        }
        // A row that does not see a position multiplies its values by 0, which makes NaN of NaN. So each row is stored only
        // after all rows before it have attended.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&row| rows[row].position);
        for row in order {
            let qkv = &qkv[row * qkv_width..][..qkv_width];
            let attended = &mut attended[row * width..][..width];
            self.attend_together(layer, &rows[row..=row], qkv, attended);
        }
    }

    /// Stores all rows, then attends them. Returns false, and has stored nothing, if rows see values that are not numbers
    /// beside others that do not.
    fn attend_together(
        &mut self,
        layer: usize,
        rows: &[BoundRow<'_>],
        qkv: &[bf16],
        attended: &mut [bf16],
    ) -> bool {
        self.touch(rows);
        let distinct = self.plan(rows);
        let few =
            self.threads.count() > 1 && self.jobs.len() < JOBS_PER_THREAD * self.threads.count();
        let long = rows.iter().any(|row| row.position as usize / PAGE >= SPLIT_PAGES);
        let splits = if few && long { self.plan_splits(rows).unwrap_or(0) } else { 0 };
        let shape = &self.shape;
        self.shared.clear();
        if splits == 0 && distinct && shape.config.sliding_window.is_none() {
            // Without memory for it, every run attends alone.
            let planned = self.shared.plan(shape, &self.asked, rows, self.threads.count());
            planned.unwrap_or_else(|_| self.shared.clear());
        }
        let layer_bytes = shape.place_bytes() * shape.places;
        let batch = Batch {
            shape,
            rows,
            qkv,
            attended: SharedMut::new(attended),
            finite: AtomicBool::new(true),
            pages: SharedMut::new(&mut self.bytes[layer * layer_bytes..][..layer_bytes]),
        };
        batch.check();
        if self.seen_nan {
            batch.forget_what_follows();
        }
        let jobs = &self.jobs;
        if distinct && splits == 0 {
            batch.store_segments(&self.threads, &self.segments);
        } else {
            batch.store_rows(&self.threads);
        }
        if rows.len() > 1 && !batch.finite.load(Ordering::Relaxed) {
            batch.forget_rows();
            return false;
        }
        let team = Team { isa: shape.isa, threads: &self.threads };
        if splits == 0 {
            batch.attend_shared(&team, &mut self.shared, &mut self.workspaces);
            let shared = &self.shared;
            team.run(jobs.len(), &mut self.workspaces, |job, next, work| {
                batch.attend_whole(&jobs[job], jobs.get(next), shared, work);
            });
        } else {
            attend_split(&team, &batch, jobs, &mut self.parts, &mut self.workspaces);
        }
        self.seen_nan |= !batch.finite.load(Ordering::Relaxed);
        true
    }
}

/// How many of the first rows follow each other in one slot.
fn run_len(rows: &[BoundRow<'_>]) -> usize {
    let follows = |pair: &[BoundRow<'_>]| {
        pair[1].slot == pair[0].slot && pair[1].position == pair[0].position + 1
    };
    1 + rows.windows(2).take_while(|pair| follows(pair)).count()
}

/// Attends all jobs split by split, then adds up each job's parts in order.
fn attend_split(
    team: &Team<'_>,
    batch: &Batch<'_>,
    jobs: &[Job],
    parts: &mut [RunningSoftmax],
    workspaces: &mut [Workspace],
) {
    let splits = |job: usize| (0..jobs[job].splits.len()).map(move |split| (job, split));
    let tasks: Vec<(usize, usize)> = (0..jobs.len()).flat_map(splits).collect();
    let shared = SharedMut::new(parts);
    team.run(tasks.len(), workspaces, |task, _, work| {
        let (job, split) = (&jobs[tasks[task].0], tasks[task].1);
        let queries = batch.shape.queries(batch.rows, job);
        let pages = split_pages(job.splits.start + split, &queries.range());
        batch.load_queries(batch.pairs(job), &mut work.queries);
        work.rows_ahead = [RowsAhead::NONE; 2];
        work.clear_parts(job.pairs.len());
        // SAFETY: the instruction set is there, the pages are; no other task has these parts.
        unsafe {
            let head = batch.head_pages(job.kv_head);
            let after = After { head, pages: &[], written: None };
            attention::attend(team.isa, &queries, head, &pages, after, work);
            let parts = shared.part(job.first_part + split * job.tiles(), job.tiles());
            work.parts[..job.tiles()].swap_with_slice(parts);
        }
    });
    let totals = &mut workspaces[0].totals;
    for job in jobs {
        let parts = &parts[job.first_part..][..job.splits.len() * job.tiles()];
        softmax::clear(totals, job.pairs.len());
        for parts in parts.chunks_exact(job.tiles()) {
            softmax::combine_tiles(batch.shape.isa, job.pairs.len(), parts, totals);
        }
        batch.finish(job, totals);
    }
}

/// The threads, ready to attend.
struct Team<'a> {
    isa: Isa,
    threads: &'a Threads,
}

impl Team<'_> {
    /// Runs `task` for every index below `tasks`, on all threads, each with a workspace of its own.
    /// A task is told which task follows it on its thread, or a number past the last.
    fn run(
        &self,
        tasks: usize,
        workspaces: &mut [Workspace],
        task: impl Fn(usize, usize, &mut Workspace) + Sync,
    ) {
        let next = AtomicUsize::new(0);
        let workspaces = SharedMut::new(workspaces);
        self.threads.run(|thread, _| {
            // SAFETY: each thread has a workspace of its own.
            let [work] = (unsafe { workspaces.part(thread, 1) }) else {
                unreachable!("one was asked for")
            };
            let take = || next.fetch_add(1, Ordering::Relaxed);
            let mut index = take();
            while index < tasks {
                let following = take();
                task(index, following, work);
                index = following;
            }
            work.tiles = None;
        });
    }
}
