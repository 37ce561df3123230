//! What a run did, in figures: the content of `--stats`.

use glinthawk_protocol::{DispatcherStats, Histogram};
use serde::Serialize;
use std::time::Duration;

/// Counters of one node.
#[derive(Clone, Debug, Default)]
pub struct NodeStats {
    /// Time spent in kernels.
    pub busy: Duration,
    /// Kernel batches run.
    pub batches: u64,
    /// Rows in them.
    pub rows: u64,
    /// Most rows in one.
    pub rows_max: usize,
}

impl NodeStats {
    pub(crate) fn record(&mut self, rows: usize, busy: Duration) {
        self.busy += busy;
        self.batches += 1;
        self.rows += rows as u64;
        self.rows_max = self.rows_max.max(rows);
    }
}

/// Statistics of a run, as written by `--stats`.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    /// The model's name.
    pub model: String,
    /// Kernel backend.
    pub backend: &'static str,
    /// Instruction set of the backend.
    pub instruction_set: &'static str,
    /// Kernel threads.
    pub threads: usize,
    /// Tier-1 nodes.
    pub tier1_nodes: usize,
    /// Tier-2 nodes per Tier-1 node; 0 is single-tier.
    pub tier2_nodes: usize,
    /// Rows per lane and flight (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Memory set aside for contexts, in bytes.
    pub context_memory_bytes: u64,
    /// Most of it that was in use, in bytes.
    pub context_memory_used_max_bytes: u64,
    /// Positions a context may have.
    pub max_context: u32,
    /// Seconds from the first prompt to the end.
    pub wall_s: f64,
    /// Prompts finished.
    pub prompts: u64,
    /// Their input tokens.
    pub prompt_tokens: u64,
    /// Their generated tokens.
    pub generated_tokens: u64,
    /// Prompt and generated tokens per second.
    pub tokens_per_second: f64,
    /// Generated tokens per second.
    pub generated_tokens_per_second: f64,
    /// Rows in a Tier-1 batch, on average.
    pub tier1_batch_rows_mean: f64,
    /// Rows in a Tier-1 batch, at most.
    pub tier1_batch_rows_max: usize,
    /// Every node's share of the wall time in which its kernels ran.
    pub nodes: Vec<NodeShare>,
    /// Bytes sent by Tier 1 to other processes.
    pub tier1_bytes_sent: u64,
    /// Bytes sent by Tier 2 to other processes.
    pub tier2_bytes_sent: u64,
    /// Submission to first token, in seconds.
    pub time_to_first_token_s: Percentiles,
    /// Time between a prompt's tokens, in seconds.
    pub time_per_output_token_s: Percentiles,
    /// Nodes lost during the run.
    pub failures: u64,
    /// Prompts whose context was dropped and recomputed.
    pub prompts_recomputed: u64,
    /// Rows computed again because of that.
    pub rows_recomputed: u64,
    /// Peak resident memory of this process, in bytes.
    pub peak_memory_bytes: u64,
}

/// One node's share of the work.
#[derive(Clone, Debug, Serialize)]
pub struct NodeShare {
    /// `tier1-0`, `tier2-0-1` (slice, lane).
    pub name: String,
    /// Share of the wall time spent in kernels.
    pub busy: f64,
    /// Kernel batches run.
    pub batches: u64,
    /// Rows per batch, on average.
    pub rows_mean: f64,
}

impl NodeShare {
    pub(crate) fn new(name: String, stats: &NodeStats, wall_s: f64) -> Self {
        let busy = if wall_s > 0.0 { stats.busy.as_secs_f64() / wall_s } else { 0.0 };
        Self { name, busy, batches: stats.batches, rows_mean: mean(stats.rows, stats.batches) }
    }
}

/// Five points of a distribution.
#[derive(Clone, Debug, Serialize)]
pub struct Percentiles {
    p5: Option<f64>,
    p25: Option<f64>,
    p50: Option<f64>,
    p75: Option<f64>,
    p95: Option<f64>,
}

impl From<&Histogram> for Percentiles {
    fn from(histogram: &Histogram) -> Self {
        let at = |percent| histogram.percentile_s(percent);
        Self { p5: at(5.0), p25: at(25.0), p50: at(50.0), p75: at(75.0), p95: at(95.0) }
    }
}

pub(crate) fn mean(sum: u64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { sum as f64 / count as f64 }
}

pub(crate) fn per_second(count: u64, wall_s: f64) -> f64 {
    if wall_s > 0.0 { count as f64 / wall_s } else { 0.0 }
}

impl Stats {
    pub(crate) fn take_dispatcher(&mut self, stats: &DispatcherStats, page_bytes: u64) {
        self.context_memory_used_max_bytes = u64::from(stats.pages_used_max) * page_bytes;
        self.prompts = stats.prompts;
        self.prompt_tokens = stats.prompt_tokens;
        self.generated_tokens = stats.generated_tokens;
        self.tokens_per_second =
            per_second(stats.prompt_tokens + stats.generated_tokens, self.wall_s);
        self.generated_tokens_per_second = per_second(stats.generated_tokens, self.wall_s);
        self.time_to_first_token_s = Percentiles::from(&stats.time_to_first_token);
        self.time_per_output_token_s = Percentiles::from(&stats.time_per_output_token);
        self.prompts_recomputed = stats.preemptions;
        self.rows_recomputed = stats.rows_recomputed;
    }
}

/// Peak resident memory of this process in bytes; 0 where the system does not tell.
pub(crate) fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
