//! Upper bounds on any run of a configuration: the busiest resource, and Little's law for the available
//! flights.
//!
//! Tier 1 merges the shards that are ready, so a batch may have any number of rows between a shard's and a flight's.
//! Its time is at least `fixed_seconds + row_seconds · rows`. With `m` rows in a batch on average, a row costs a node at
//! least `fixed_seconds / m + row_seconds`, and waits in it for at least `fixed_seconds + row_seconds · m`: large batches
//! save work and take longer.

use serde::{Deserialize, Serialize};

/// What limits throughput.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// A Tier-1 node's kernels.
    Tier1Compute,
    /// A Tier-2 node's attention.
    Tier2Compute,
    /// A Tier-1 node's links to Tier 2.
    InterTierLink,
    /// A Tier-2 node's own links.
    Tier2Link,
    /// The link between slices.
    HopLink,
    /// Too few flights to cover the way there and back: more context memory would help.
    Latency,
}

impl Bottleneck {
    /// The bottleneck in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Tier1Compute => "Tier-1 compute",
            Self::Tier2Compute => "Tier-2 attention",
            Self::InterTierLink => "the Tier-1 node's inter-tier link",
            Self::Tier2Link => "the Tier-2 node's link",
            Self::HopLink => "the link between Tier-1 nodes",
            Self::Latency => "latency (too few flights in the air)",
        }
    }
}

/// A line below a stage's time: `fixed_seconds + row_seconds · rows` seconds for any batch from `least` to `most` rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Line {
    pub fixed_seconds: f64,
    pub row_seconds: f64,
}

impl Line {
    /// The line through the smallest batch that stays below `time`, which is linear between its `knots`.
    pub fn below(time: impl Fn(usize) -> f64, least: usize, most: usize, knots: &[usize]) -> Self {
        if least >= most {
            return Self { fixed_seconds: time(most), row_seconds: 0.0 };
        }
        let base = time(least);
        let inner = knots.iter().copied().filter(|&rows| least < rows && rows < most);
        let slopes = inner.chain([most]).map(|rows| (time(rows) - base) / (rows - least) as f64);
        let steepest = base / least as f64;
        let row_seconds = slopes.fold(f64::INFINITY, f64::min).clamp(0.0, steepest);
        Self { fixed_seconds: base - row_seconds * least as f64, row_seconds }
    }
}

/// A step's work on Tier-1 nodes that are alike.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    /// How many nodes.
    pub nodes: f64,
    fixed_seconds: f64,
    row_seconds: f64,
    roots: f64,
    /// Seconds of attention on the node itself for a row that attends there.
    pub local_row_seconds: f64,
}

impl Load {
    pub fn new(nodes: f64, local_row_seconds: f64) -> Self {
        Self { nodes, local_row_seconds, ..Self::default() }
    }

    /// Adds `times` stages.
    pub fn add(&mut self, line: Line, times: f64) {
        self.fixed_seconds += times * line.fixed_seconds;
        self.row_seconds += times * line.row_seconds;
        self.roots += times * (line.fixed_seconds * line.row_seconds).sqrt();
    }

    /// The fixed part that batches of `m` rows share. Stages may differ in their batches; Cauchy's inequality bounds
    /// what that saves.
    fn shared(&self) -> f64 {
        if self.row_seconds == 0.0 {
            self.fixed_seconds
        } else {
            self.roots * self.roots / self.row_seconds
        }
    }

    /// The least seconds that a row costs the node.
    fn row_seconds_least(&self, rows: f64) -> f64 {
        self.shared() / rows + self.row_seconds
    }
}

/// Rows that attend on the Tier-1 nodes themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub rows: f64,
    /// Seconds of a step off Tier 1's queues, attention included.
    pub step_seconds: f64,
}

/// Everything that limits a configuration.
#[derive(Debug)]
pub(crate) struct Demand<'a> {
    /// Rows of a flight.
    pub rows: f64,
    /// Rows of its smallest shard.
    pub rows_least: f64,
    pub flights: f64,
    pub loads: &'a [Load],
    /// The least seconds that a shard is away from Tier 1 in a step.
    pub away_seconds: f64,
    /// The most rows per second that can reach Tier 2, and why.
    pub remote: Option<(f64, Bottleneck)>,
    pub local: Option<Local>,
    /// Seconds of a row on the busiest link between slices.
    pub hop_row_seconds: f64,
}

impl Demand<'_> {
    /// Rows per second that no run exceeds, and what sets the limit.
    pub fn limit(&self) -> (f64, Bottleneck) {
        let hop =
            if self.hop_row_seconds > 0.0 { 1.0 / self.hop_row_seconds } else { f64::INFINITY };
        let local = self.local.map_or(0.0, |local| self.local_rate(local));
        let remote = self.remote.map(|(rate, what)| (rate + local, what));
        let mut limit = (self.compute(), Bottleneck::Tier1Compute);
        for (rate, what) in remote.into_iter().chain([(hop, Bottleneck::HopLink)]) {
            if rate < limit.0 {
                limit = (rate, what);
            }
        }
        let latency = self.latency(limit.0);
        if latency < limit.0 { (latency, Bottleneck::Latency) } else { limit }
    }

    fn local_rate(&self, local: Local) -> f64 {
        self.flights * local.rows / local.step_seconds
    }

    /// Assumes the largest batches everywhere; attention on Tier 1 takes time from the rest.
    fn compute(&self) -> f64 {
        let of = |load: &Load| {
            let each = load.row_seconds_least(self.rows);
            match (self.local, self.remote) {
                // Local shards are away for no longer than the others and queue with them, so they make at
                // least as many steps.
                (Some(local), Some(_)) if local.step_seconds <= self.away_seconds => {
                    1.0 / (each + load.local_row_seconds * local.rows / self.rows)
                }
                (Some(local), Some((remote, _))) if remote * each < 1.0 => {
                    let left = (1.0 - remote * each) / (each + load.local_row_seconds);
                    remote + left.min(self.local_rate(local))
                }
                _ => 1.0 / each,
            }
        };
        self.loads.iter().map(of).fold(f64::INFINITY, f64::min)
    }

    /// The rate, up to `most`, at which the available flights just cover a step.
    fn latency(&self, most: f64) -> f64 {
        let in_air = self.flights * self.rows;
        if self.loads.iter().all(|load| load.row_seconds == 0.0) {
            let step: f64 = self.loads.iter().map(|load| load.nodes * load.fixed_seconds).sum();
            return in_air / (step + self.away_seconds);
        }
        let possible = |rate: f64| {
            let mut step = self.away_seconds;
            for load in self.loads {
                let spare = 1.0 / rate - load.row_seconds;
                let batch = (load.shared() / spare).max(self.rows_least).min(self.rows);
                if spare <= 0.0 {
                    return false;
                }
                step += load.nodes * (load.fixed_seconds + load.row_seconds * batch);
            }
            step * rate <= in_air
        };
        if possible(most) {
            return most;
        }
        let (mut low, mut high) = (0.0, most);
        for _ in 0..48 {
            let middle = (low + high) / 2.0;
            if possible(middle) { low = middle } else { high = middle }
        }
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_below_the_time_it_stands_for() {
        let time = |rows: usize| if rows < 20 { 5.0 } else { 5.0 + 0.5 * (rows as f64 - 20.0) };
        let line = Line::below(time, 10, 40, &[20]);
        assert_eq!(line, Line { fixed_seconds: 5.0, row_seconds: 0.0 });
        let line = Line::below(|rows| 2.0 + 0.25 * rows as f64, 8, 64, &[]);
        assert!(
            (line.fixed_seconds - 2.0).abs() < 1e-12 && (line.row_seconds - 0.25).abs() < 1e-12
        );
        // Steeper than proportional: small batches are the cheapest, and the line goes through zero.
        assert_eq!(Line::below(|rows| (rows * rows) as f64, 2, 8, &[4]).fixed_seconds, 0.0);
    }

    #[test]
    fn few_flights_cannot_have_both_large_batches_and_short_steps() {
        let mut load = Load::new(1.0, 0.0);
        load.add(Line { fixed_seconds: 1.0, row_seconds: 0.01 }, 10.0);
        let loads = [load];
        let demand = |flights| Demand {
            rows: 100.0,
            rows_least: 10.0,
            flights,
            loads: &loads,
            away_seconds: 10.0,
            remote: None,
            local: None,
            hop_row_seconds: 0.0,
        };
        // 100 rows of one flight in batches of m: at most 100 / (10 + 10 + 0.1 m), and m / (10 + 0.1 m).
        let (rate, what) = demand(1.0).limit();
        assert_eq!(what, Bottleneck::Latency);
        let batch = 10.0 * rate / (1.0 - 0.1 * rate);
        assert!((rate * (20.0 + 0.1 * batch) - 100.0).abs() < 1e-6, "{rate} in batches of {batch}");
        assert_eq!(demand(9.0).limit(), (1.0 / 0.2, Bottleneck::Tier1Compute));
    }
}
