//! What a run did, in figures: the content of `--stats`.

use crate::report::{NodeReport, Traffic, peak_memory_bytes};
use glinthawk_protocol::{DispatcherStats, Histogram};
use serde::Serialize;
use std::collections::BTreeMap;

/// What was run, and on what.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The model's name.
    pub model: String,
    /// Kernel backend.
    pub backend: &'static str,
    /// Instruction set of the backend.
    pub instruction_set: String,
    /// Kernel threads of each node.
    pub threads: usize,
    /// Pipelines, each with all layers.
    pub pipelines: usize,
    /// Tier-1 nodes of a pipeline (K).
    pub tier1_nodes: usize,
    /// Tier-2 nodes per Tier-1 node (K'); 0 is single-tier.
    pub tier2_nodes: usize,
    /// Whether Tier-1 nodes attend too.
    pub tier1_attends: bool,
    /// Attention workers of each Tier-1 node, itself among them; in one process, lanes that compute side by side.
    pub lanes: usize,
    /// Rows per lane and flight (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Memory for contexts of each process that attends, in bytes.
    pub context_memory_bytes: u64,
    /// How keys and values are stored.
    pub context_type: &'static str,
    /// Bytes of a page, over all slices.
    pub page_bytes: u64,
    /// Positions a context may have.
    pub max_context: u32,
}

/// Statistics of a run.
#[derive(Clone, Debug, Serialize)]
pub struct RunStats {
    /// What was run.
    #[serde(flatten)]
    pub setting: Setting,
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
    /// Prompt tokens that were not computed, because other prompts began with the same ones.
    pub prompt_tokens_shared: u64,
    /// Tokens that were computed before it was known that they come next.
    pub tokens_drafted: u64,
    /// Those of them that did.
    pub drafts_right: u64,
    /// Rows in a Tier-1 batch, on average.
    pub tier1_batch_rows_mean: f64,
    /// Rows in a Tier-1 batch, at most.
    pub tier1_batch_rows_max: u64,
    /// Every node's part.
    pub nodes: Vec<NodeShare>,
    /// Bytes sent by Tier-1 nodes to other processes.
    pub tier1_bytes_sent: u64,
    /// Bytes sent by Tier-2 nodes to other processes.
    pub tier2_bytes_sent: u64,
    /// Submission to first token, in seconds.
    pub time_to_first_token_s: Percentiles,
    /// Time between a prompt's tokens, in seconds.
    pub time_per_output_token_s: Percentiles,
    /// Where the time of a step (a token of a prompt that generates) goes, on average.
    pub time_per_step_s: StepTime,
    /// Most context memory in use at once, over all workers, in bytes.
    pub context_memory_used_max_bytes: u64,
    /// The share of contexts that each lane was given in the end: 1, or less if its nodes are slower than others.
    pub lane_shares: Vec<f64>,
    /// Nodes lost during the run.
    pub failures: u64,
    /// Workers that took the place of a node that was lost or left.
    pub nodes_replaced: u64,
    /// Steps that were launched again because a node was lost that they passed through.
    pub steps_relaunched: u64,
    /// Prompts whose context was dropped and recomputed.
    pub prompts_recomputed: u64,
    /// Of those, because the context was lost with a node.
    pub prompts_lost: u64,
    /// Rows computed again because of that.
    pub rows_recomputed: u64,
    /// Peak resident memory of all processes together, in bytes.
    pub peak_memory_bytes: u64,
}

/// One node's share of the work.
#[derive(Clone, Debug, Serialize)]
pub struct NodeShare {
    /// `tier1-0` (slice; in one process with several lanes, slice and lane), `tier2-0-1` (slice, lane).
    pub name: String,
    /// Fraction of the wall time in which its kernels ran.
    pub busy: f64,
    /// Kernel batches run.
    pub batches: u64,
    /// Rows per batch, on average.
    pub rows_mean: f64,
    /// Seconds a shard waited for the kernels, on average over batches.
    pub queue_wait_mean_s: f64,
    /// Sent, by kind of message.
    pub sent: BTreeMap<String, Traffic>,
    /// Received, by kind of message.
    pub received: BTreeMap<String, Traffic>,
    /// Peak resident memory, in bytes.
    pub peak_memory_bytes: u64,
}

/// Mean seconds of a shard's step, by what it was doing.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepTime {
    /// From launch to home.
    pub total: f64,
    /// In Tier 1's kernels.
    pub tier1_compute: f64,
    /// In Tier 2's kernels (or Tier 1's own attention).
    pub tier2_compute: f64,
    /// Waiting for kernels.
    pub queueing: f64,
    /// The rest: on the way.
    pub network: f64,
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

/// A ratio; 0 if the divisor is 0.
fn ratio(value: f64, by: f64) -> f64 {
    if by > 0.0 { value / by } else { 0.0 }
}

impl NodeShare {
    fn new(report: &NodeReport, wall_s: f64) -> Self {
        let batches = report.batches as f64;
        Self {
            name: report.name.clone(),
            busy: ratio(report.busy_ns as f64 / 1e9, wall_s),
            batches: report.batches,
            rows_mean: ratio(report.rows as f64, batches),
            queue_wait_mean_s: ratio(report.shard_wait_ns as f64 / 1e9, batches),
            sent: report.sent.clone(),
            received: report.received.clone(),
            peak_memory_bytes: report.peak_memory_bytes,
        }
    }
}

impl StepTime {
    fn new(nodes: &[NodeReport], steps: u64, steps_s: f64) -> Self {
        let sum = |value: fn(&NodeReport) -> u64, tier: u8| {
            let nodes = nodes.iter().filter(|node| node.tier == tier);
            ratio(nodes.map(value).sum::<u64>() as f64 / 1e9, steps as f64)
        };
        let total = ratio(steps_s, steps as f64);
        let tier1_compute = sum(|node| node.shard_busy_ns, 1);
        let tier2_compute = sum(|node| node.shard_busy_ns, 2);
        let queueing = sum(|node| node.shard_wait_ns, 1) + sum(|node| node.shard_wait_ns, 2);
        let network = (total - tier1_compute - tier2_compute - queueing).max(0.0);
        Self { total, tier1_compute, tier2_compute, queueing, network }
    }
}

impl RunStats {
    /// Of a run that had nothing to do.
    pub fn of_nothing(setting: Setting) -> Self {
        Self::new(setting, &DispatcherStats::default(), &[], 0.0, (0, 0.0), (0, 0))
    }

    /// Puts a run's figures together; `steps` are their number and the sum of their seconds.
    pub(crate) fn new(
        setting: Setting,
        dispatcher: &DispatcherStats,
        nodes: &[NodeReport],
        wall_s: f64,
        steps: (u64, f64),
        (failures, nodes_replaced): (u64, u64),
    ) -> Self {
        let of_tier = |tier: u8| nodes.iter().filter(move |node| node.tier == tier);
        let batches: u64 = of_tier(1).map(|node| node.batches).sum();
        let rows: u64 = of_tier(1).map(|node| node.rows).sum();
        let tokens = dispatcher.prompt_tokens + dispatcher.generated_tokens;
        // Nodes in this process all report the same peak; other processes add to it.
        let others = nodes.iter().filter(|node| !node.sent.is_empty() || !node.received.is_empty());
        let others_bytes: u64 = others.map(|node| node.peak_memory_bytes).sum();
        Self {
            wall_s,
            prompts: dispatcher.prompts,
            prompt_tokens: dispatcher.prompt_tokens,
            generated_tokens: dispatcher.generated_tokens,
            prompt_tokens_shared: dispatcher.shared,
            tokens_drafted: dispatcher.drafted,
            drafts_right: dispatcher.drafts_right,
            tokens_per_second: ratio(tokens as f64, wall_s),
            generated_tokens_per_second: ratio(dispatcher.generated_tokens as f64, wall_s),
            tier1_batch_rows_mean: ratio(rows as f64, batches as f64),
            tier1_batch_rows_max: of_tier(1).map(|node| node.rows_max).max().unwrap_or(0),
            nodes: nodes.iter().map(|node| NodeShare::new(node, wall_s)).collect(),
            tier1_bytes_sent: of_tier(1).map(NodeReport::bytes_sent).sum(),
            tier2_bytes_sent: of_tier(2).map(NodeReport::bytes_sent).sum(),
            time_to_first_token_s: Percentiles::from(&dispatcher.time_to_first_token),
            time_per_output_token_s: Percentiles::from(&dispatcher.time_per_output_token),
            time_per_step_s: StepTime::new(nodes, steps.0, steps.1),
            context_memory_used_max_bytes: u64::from(dispatcher.pages_used_max)
                * setting.page_bytes,
            lane_shares: Vec::new(),
            failures,
            nodes_replaced,
            steps_relaunched: dispatcher.relaunches,
            prompts_recomputed: dispatcher.preemptions + dispatcher.prompts_lost,
            prompts_lost: dispatcher.prompts_lost,
            rows_recomputed: dispatcher.rows_recomputed,
            peak_memory_bytes: peak_memory_bytes() + others_bytes,
            setting,
        }
    }
}
