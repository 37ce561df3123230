//! What a simulation reports: throughput, where a token's time goes, how busy nodes are, what crosses
//! the wires.

use crate::bound::Bottleneck;
use crate::configuration::Configuration;
use crate::program::Program;
use crate::simulator;
use crate::trace::Trace;
use crate::words::counted;
use serde::Serialize;
use std::fmt::Write;

/// Where the time per token goes, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenTime {
    /// In Tier-1 kernels.
    pub tier1_compute: f64,
    /// In attention on Tier 2.
    pub tier2_compute: f64,
    /// On links, transfer and delay.
    pub network: f64,
    /// Waiting for a node or a link.
    pub queueing: f64,
}

impl TokenTime {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.tier1_compute + self.tier2_compute + self.pending()
    }

    /// The part in which nothing is computed.
    pub fn pending(&self) -> f64 {
        self.network + self.queueing
    }
}

/// Bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrafficRates {
    /// Leaving the busiest Tier-1 node for Tier 2.
    pub tier1_node: f64,
    /// Leaving all Tier-1 nodes for Tier 2.
    pub tier1_total: f64,
    /// Leaving the busiest Tier-2 node.
    pub tier2_node: f64,
    /// Leaving all Tier-2 nodes.
    pub tier2_total: f64,
    /// From slice to slice, per link.
    pub hop_link: f64,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SettledReport {
    /// Tokens processed or generated per second.
    pub tokens_per_second: f64,
    /// What no run of this configuration can exceed.
    pub bound_tokens_per_second: f64,
    /// What sets that limit.
    pub bottleneck: Bottleneck,
    /// Where the time of one token goes.
    pub time_per_token: TokenTime,
    /// Rows per Tier-1 batch.
    pub rows: usize,
    /// Flights in the air.
    pub flights: usize,
    /// Fraction of time that every Tier-1 node is busy.
    pub tier1_busy: Vec<f64>,
    /// The same for every Tier-2 node, slice by slice; under the paper's rules one node stands for a
    /// whole slice.
    pub tier2_busy: Vec<f64>,
    /// The same for every Tier-1 node's outgoing inter-tier link.
    pub link_busy: Vec<f64>,
    /// What crosses the wires.
    pub traffic: TrafficRates,
    /// Events the simulator processed.
    pub events: u64,
}

/// Simulates a configuration.
pub fn simulate(configuration: &Configuration) -> SettledReport {
    report(configuration, None)
}

/// Simulates a configuration and returns its timeline as well.
pub fn simulate_traced(configuration: &Configuration) -> (SettledReport, Trace) {
    let mut trace = Trace::default();
    let report = report(configuration, Some(&mut trace));
    (report, trace)
}

fn report(configuration: &Configuration, trace: Option<&mut Trace>) -> SettledReport {
    let program = Program::of(configuration);
    let outcome = simulator::run(&program, trace);
    let network = program.network_seconds();
    let (tier1, tier2) = (outcome.tier1_seconds, outcome.tier2_seconds);
    SettledReport {
        tokens_per_second: outcome.rows_per_second,
        bound_tokens_per_second: outcome.bound,
        bottleneck: outcome.bottleneck,
        time_per_token: TokenTime {
            tier1_compute: tier1,
            tier2_compute: tier2,
            network,
            queueing: (outcome.step_seconds - tier1 - tier2 - network).max(0.0),
        },
        rows: program.rows,
        flights: program.flights,
        traffic: rates(configuration, outcome.rows_per_second),
        tier1_busy: outcome.tier1_busy,
        tier2_busy: outcome.tier2_busy,
        link_busy: outcome.link_busy,
        events: outcome.events,
    }
}

fn rates(configuration: &Configuration, rows_per_second: f64) -> TrafficRates {
    let (shape, traffic) = (&configuration.shape, configuration.traffic);
    let flights_per_second = rows_per_second / configuration.rows() as f64;
    let mut rates = TrafficRates {
        tier1_node: 0.0,
        tier1_total: 0.0,
        tier2_node: 0.0,
        tier2_total: 0.0,
        hop_link: 0.0,
    };
    for slice in &configuration.slices {
        let per_row = flights_per_second * slice.layers as f64 * 8.0;
        let (out, back) = (per_row * traffic.out_bytes(shape), per_row * traffic.back_bytes(shape));
        let remote = slice.remote_rows() as f64;
        rates.tier1_node = rates.tier1_node.max(out * remote);
        rates.tier1_total += out * remote;
        rates.tier2_total += back * remote;
        let most = slice.tier2.iter().map(|group| group.rows).max().unwrap_or(0);
        rates.tier2_node = rates.tier2_node.max(back * most as f64);
    }
    if configuration.slices.len() > 1 {
        rates.hop_link = rows_per_second * traffic.hop_bytes(shape) * 8.0;
    }
    rates
}

impl SettledReport {
    /// The report as text for a terminal.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let time = &self.time_per_token;
        let part = |seconds: f64| {
            format!("{:9.1} ms  {:4.1}%", seconds * 1e3, 100.0 * seconds / time.total())
        };
        let gbps = |bits: f64| format!("{:.3} Gbps", bits / 1e9);
        let lines = [
            ("throughput", format!("{:.1} tokens/s", self.tokens_per_second)),
            ("upper bound", format!("{:.1} tokens/s", self.bound_tokens_per_second)),
            ("bottleneck", self.bottleneck.words().to_owned()),
            (
                "batch",
                format!(
                    "{} in Tier 1, {}",
                    counted(self.rows, "row"),
                    counted(self.flights, "flight")
                ),
            ),
            ("time per token", format!("{:9.1} ms", time.total() * 1e3)),
            ("  Tier-1 compute", part(time.tier1_compute)),
            ("  Tier-2 compute", part(time.tier2_compute)),
            ("  network", part(time.network)),
            ("  queueing", part(time.queueing)),
            ("Tier-1 busy", spread(&self.tier1_busy)),
            ("Tier-2 busy", spread(&self.tier2_busy)),
            ("inter-tier link busy", spread(&self.link_busy)),
            (
                "Tier-1 egress",
                format!(
                    "{} per node, {} in total",
                    gbps(self.traffic.tier1_node),
                    gbps(self.traffic.tier1_total)
                ),
            ),
            (
                "Tier-2 egress",
                format!(
                    "{} per node, {} in total",
                    gbps(self.traffic.tier2_node),
                    gbps(self.traffic.tier2_total)
                ),
            ),
            ("between slices", gbps(self.traffic.hop_link)),
            ("events", self.events.to_string()),
        ];
        for (name, value) in lines {
            writeln!(text, "{name:<22}{value}").expect("writing to a string does not fail");
        }
        text
    }
}

/// Mean, least and greatest of some fractions.
fn spread(shares: &[f64]) -> String {
    if shares.is_empty() {
        return "none".to_owned();
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    let most = shares.iter().copied().fold(0.0, f64::max);
    format!("{:.1}% on average ({:.1}% to {:.1}%)", 100.0 * mean, 100.0 * least, 100.0 * most)
}
