//! Tier 2's work on x86-64: pages in the order the kernels read them, and how a batch is cut into
//! jobs and shared among threads. What a job does is in `batch`.

mod batch;

use super::attention::{self, RunningSoftmax, SPLIT_PAGES, Workspace};
use super::pages::{After, PAGE};
use super::tiles::TILE_ROWS;
use crate::memory::{Memory, SharedMut};
use crate::tables::BoundRow;
use crate::{ComputeError, ContextSpec, ContextType, Isa, Threads};
use batch::{Batch, split_pages};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// With fewer jobs per thread than this, the splits of long contexts are shared out one by one.
const JOBS_PER_THREAD: usize = 4;

/// The pages of a slice's layers.
pub(crate) struct X86Context {
    shape: Shape,
    threads: Arc<Threads>,
    /// (layers, pages, kv_heads); [`attention::HeadPages`] describes each.
    bytes: Memory<u8>,
    workspaces: Vec<Workspace>,
    /// Parts of splits, if splits are shared out one by one.
    parts: Vec<RunningSoftmax>,
    /// Rows of the batch that follow each other in one slot.
    runs: Vec<Range<usize>>,
    jobs: Vec<Job>,
    /// Rows on one page, of runs that no job stores.
    segments: Vec<Range<usize>>,
    /// One bit for each slot, all clear between calls.
    marked: Vec<u64>,
}

/// What stays the same for all calls.
struct Shape {
    config: ModelConfig,
    context_type: ContextType,
    isa: Isa,
    pages: usize,
}

/// One tile to attend: some rows of a run and some query heads of one key/value head.
struct Job {
    rows: Range<usize>,
    kv_head: usize,
    /// Query heads, counted within the group of the key/value head.
    heads: Range<usize>,
    /// Whether the job first stores its rows.
    stores: bool,
    /// Splits and the places of their parts, if splits are shared out one by one.
    splits: Range<usize>,
    first_part: usize,
}

impl Shape {
    /// Bytes of one page, one head, keys and values.
    fn head_bytes(&self) -> usize {
        self.context_type.head_bytes(self.config.head_dim, PAGE)
    }

    /// Bytes of one page, all heads.
    fn page_bytes(&self) -> usize {
        self.head_bytes() * self.config.kv_heads
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
        let ContextSpec { layers, pages, context_type, .. } = *spec;
        let overflow = ComputeError::Memory { what: "context pages", bytes: usize::MAX };
        let shape = Shape { config: config.clone(), context_type, isa, pages };
        let len = shape.page_bytes().checked_mul(layers).and_then(|len| len.checked_mul(pages));
        let workspaces: Result<_, _> =
            (0..threads.count()).map(|_| Workspace::new(config.head_dim, context_type)).collect();
        Ok(Self {
            bytes: Memory::zeroed("context pages", len.ok_or(overflow)?)?,
            shape,
            threads,
            workspaces: workspaces?,
            parts: Vec::new(),
            runs: Vec::new(),
            jobs: Vec::new(),
            segments: Vec::new(),
            marked: Vec::new(),
        })
    }

    pub(crate) fn fill(&mut self, byte: u8) {
        self.bytes.fill(byte);
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
        let rows_per_tile = (TILE_ROWS / group).max(1);
        for run in &self.runs {
            // Only a single row's own jobs use its keys and values. They are best written just
            // before, so that the page is in the cache.
            let stores = distinct && run.len() == 1 && group <= TILE_ROWS;
            if !stores {
                let same_page = |one: &usize, other: &usize| {
                    rows[*one].position as usize / PAGE == rows[*other].position as usize / PAGE
                };
                let all: Range<usize> = run.clone();
                let mut start = all.start;
                while start < all.end {
                    let len = (start..all.end).take_while(|row| same_page(&start, row)).count();
                    self.segments.push(start..start + len);
                    start += len;
                }
            }
            for start in run.clone().step_by(rows_per_tile) {
                let rows = start..(start + rows_per_tile).min(run.end);
                for kv_head in 0..self.shape.config.kv_heads {
                    for first in (0..group).step_by(TILE_ROWS) {
                        let heads = first..(first + TILE_ROWS).min(group);
                        let job = Job {
                            rows: rows.clone(),
                            kv_head,
                            heads,
                            stores,
                            splits: 0..0,
                            first_part: 0,
                        };
                        self.jobs.push(job);
                    }
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

    /// Gives each split of each job a part of its own; returns how many there are.
    fn plan_splits(&mut self, rows: &[BoundRow<'_>]) -> Result<usize, ComputeError> {
        let mut parts = 0;
        for job in &mut self.jobs {
            let pages = self.shape.tile(rows, job).range();
            job.splits = pages.start / SPLIT_PAGES..pages.end.div_ceil(SPLIT_PAGES);
            job.first_part = parts;
            parts += job.splits.len();
        }
        while self.parts.len() < parts {
            self.parts.push(RunningSoftmax::new(self.shape.config.head_dim)?);
        }
        Ok(parts)
    }

    /// Stores and attends rows whose pages are bound.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        rows: &[BoundRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        let distinct = self.plan(rows);
        let few =
            self.threads.count() > 1 && self.jobs.len() < JOBS_PER_THREAD * self.threads.count();
        let long = rows.iter().any(|row| row.position as usize / PAGE >= SPLIT_PAGES);
        let parts = if few && long { self.plan_splits(rows).unwrap_or(0) } else { 0 };
        let shape = &self.shape;
        let layer_bytes = shape.page_bytes() * shape.pages;
        let batch = Batch {
            shape,
            rows,
            qkv: &qkv.bf16()[..rows.len() * shape.config.qkv_width()],
            attended: SharedMut::new(
                &mut attended.bf16_mut()[..rows.len() * shape.config.query_width()],
            ),
            pages: SharedMut::new(&mut self.bytes[layer * layer_bytes..][..layer_bytes]),
        };
        batch.check();
        let jobs = &self.jobs;
        if distinct && parts == 0 {
            batch.store_segments(&self.threads, &self.segments);
        } else {
            batch.store_rows(&self.threads);
        }
        let team = Team { isa: shape.isa, threads: &self.threads };
        if parts == 0 {
            team.run(jobs.len(), &mut self.workspaces, |job, next, work| {
                batch.attend_whole(&jobs[job], jobs.get(next), work);
            });
        } else {
            attend_split(&team, &batch, jobs, parts, &mut self.parts, &mut self.workspaces);
        }
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
    parts: usize,
    made: &mut [RunningSoftmax],
    workspaces: &mut [Workspace],
) {
    let shared = SharedMut::new(made);
    team.run(parts, workspaces, |part, _, work| {
        let job = jobs.iter().rfind(|job| job.first_part <= part).expect("every part has a job");
        let tile = batch.shape.tile(batch.rows, job);
        let pages = split_pages(job.splits.start + part - job.first_part, &tile.range());
        batch.load_queries(job, &mut work.queries);
        // SAFETY: the instruction set is there, the pages are; no other task has this part.
        unsafe {
            let head = batch.head_pages(job.kv_head);
            let after = After { head, pages: &[], written: None };
            attention::attend(team.isa, &tile, head, &pages, after, work);
            std::mem::swap(&mut work.part, &mut shared.part(part, 1)[0]);
        }
    });
    let total = &mut workspaces[0].total;
    for job in jobs {
        total.clear(job.rows.len() * job.heads.len());
        for part in &made[job.first_part..][..job.splits.len()] {
            // SAFETY: the instruction set is there.
            unsafe { attention::combine(team.isa, job.rows.len() * job.heads.len(), part, total) };
        }
        batch.finish(job, total);
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
