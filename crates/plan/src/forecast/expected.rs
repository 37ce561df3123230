//! What a forecast says: how long a job takes, and what was busy meanwhile.

use super::deployment::Deployment;
use crate::bound::Bottleneck;
use serde::Serialize;
use std::fmt::Write;

/// What a job is expected to do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Forecast {
    /// From the first prompt to the last token.
    pub seconds: f64,
    /// Prompt and generated tokens.
    pub tokens: f64,
    /// Prompt tokens of those that are not computed, because another prompt begins with them.
    pub tokens_shared: f64,
    /// Fraction of the job that was simulated; the rest follows at its pace.
    pub share_simulated: f64,
    /// Steps of shards that were simulated.
    pub steps: u64,
    /// Seconds of all these steps together.
    pub step_seconds: f64,
    /// Seconds that shards were in Tier 1's kernels.
    pub tier1_shard_seconds: f64,
    /// Seconds that shards waited for kernels.
    pub queueing_seconds: f64,
    /// Seconds that each Tier-1 node's kernels ran.
    pub tier1_seconds: Vec<f64>,
    /// Seconds that each attention worker's kernels ran, slice by slice.
    pub tier2_seconds: Vec<f64>,
    /// Batches of all Tier-1 nodes.
    pub tier1_batches: u64,
    /// Rows in them.
    pub tier1_rows: u64,
    /// Bytes that Tier-1 nodes send to other processes.
    pub tier1_bytes: f64,
    /// Bytes that Tier-2 nodes send.
    pub tier2_bytes: f64,
    /// Prompts whose context is dropped because pages run out, and computed again.
    pub preemptions: u64,
    /// Seconds of the part that was simulated.
    pub simulated_seconds: f64,
    /// Layers that one simulated layer stood for: 1, unless the job would have taken too long to simulate.
    pub layers_as_one: usize,
    pub(super) rows_done: u64,
    /// Events of the simulation.
    pub events: u64,
}

impl Forecast {
    pub(super) fn new(tier1: usize, tier2: usize) -> Self {
        Self { tier1_seconds: vec![0.0; tier1], tier2_seconds: vec![0.0; tier2], ..Self::default() }
    }

    /// Prompt and generated tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds
    }

    /// What is busiest on `deployment`; latency where nothing is busy for most of the time.
    pub fn bottleneck(&self, deployment: &Deployment) -> Bottleneck {
        let most = |seconds: &[f64]| seconds.iter().copied().fold(0.0, f64::max);
        let lanes = deployment.lanes();
        let own = usize::from(deployment.local_lane);
        let remote: Vec<f64> =
            self.tier2_seconds.chunks(lanes).flat_map(|of| &of[own..]).copied().collect();
        let local = self.tier2_seconds.chunks(lanes).map(|of| of[..own].iter().sum::<f64>());
        let tier1: Vec<f64> =
            self.tier1_seconds.iter().zip(local).map(|(own, attention)| own + attention).collect();
        let slices = deployment.slices.len() as f64;
        let out = self.tier1_bytes.max(self.tier2_bytes) / slices;
        let loads = [
            (most(&tier1), Bottleneck::Tier1Compute),
            (most(&remote), Bottleneck::Tier2Compute),
            (out / deployment.port, Bottleneck::InterTierLink),
            (out / deployment.tier2.max(1) as f64 / deployment.bandwidth, Bottleneck::Tier2Link),
        ];
        let busiest = loads.into_iter().max_by(|one, other| one.0.total_cmp(&other.0));
        match busiest {
            Some((seconds, what)) if 2.0 * seconds > self.simulated_seconds => what,
            _ => Bottleneck::Latency,
        }
    }

    /// The forecast as text for a terminal.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let mut say = |name: &str, value: String| {
            writeln!(text, "{name:<22}{value}").expect("writing to a string does not fail");
        };
        say("the job", format!("{:.2} s, {:.1} tokens/s", self.seconds, self.tokens_per_second()));
        if self.tokens_shared > 0.0 {
            let share = 100.0 * self.tokens_shared / self.tokens;
            say("  shared", format!("{:.0} tokens, {share:.0}% of all", self.tokens_shared));
        }
        if self.layers_as_one > 1 {
            let layers = self.layers_as_one;
            say(
                "  simulated",
                format!("{layers} layers as one, which may be up to a third too fast"),
            );
        }
        if self.share_simulated < 1.0 {
            let share = 100.0 * self.share_simulated;
            say("  simulated", format!("{share:.1}% of it; the rest follows at the same pace"));
        }
        let steps = self.steps.max(1) as f64;
        let tier2: f64 = self.tier2_seconds.iter().sum();
        let network = self.step_seconds - self.tier1_shard_seconds - tier2 - self.queueing_seconds;
        let parts = [
            ("  a step", self.step_seconds),
            ("    Tier-1 compute", self.tier1_shard_seconds),
            ("    Tier-2 compute", tier2),
            ("    queueing", self.queueing_seconds),
            ("    network", network.max(0.0)),
        ];
        for (name, seconds) in parts {
            say(name, format!("{:9.2} ms", seconds / steps * 1e3));
        }
        let share = |seconds: &f64| format!("{:.1}%", 100.0 * seconds / self.simulated_seconds);
        let shares = |all: &[f64]| all.iter().map(share).collect::<Vec<_>>().join(" ");
        say("  Tier-1 busy", shares(&self.tier1_seconds));
        say("  attention busy", shares(&self.tier2_seconds));
        let rows = self.tier1_rows as f64 / self.tier1_batches.max(1) as f64;
        say("  Tier-1 batch", format!("{rows:.1} rows on average"));
        let rate = |bytes: f64| bytes * 8.0 / self.simulated_seconds / 1e9;
        say(
            "  traffic",
            format!(
                "{:.3} Gbps from Tier 1, {:.3} Gbps from Tier 2",
                rate(self.tier1_bytes),
                rate(self.tier2_bytes)
            ),
        );
        say("  preemptions", self.preemptions.to_string());
        text
    }
}
