//! One point of the space of configurations, and what simulating it gave.

use crate::bound::Bottleneck;

/// One point of the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Candidate {
    /// Tier-1 nodes (K).
    pub tier1: usize,
    /// Tier-2 nodes per Tier-1 node (K'); 0 is single-tier.
    pub tier2: usize,
    /// Which kind of Tier-2 node.
    pub pool: usize,
    /// Rows per Tier-2 node and flight (B); rows per flight in a single tier.
    pub batch: usize,
    /// Rows per flight that attend on Tier 1.
    pub local_rows: usize,
    /// Flights in the air.
    pub flights: usize,
}

impl Candidate {
    /// Rows of a Tier-1 batch.
    pub fn rows(&self) -> usize {
        self.tier2 * self.batch + self.local_rows
    }
}

/// A simulated candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The candidate.
    pub candidate: Candidate,
    /// Simulated tokens per second.
    pub tokens_per_second: f64,
    /// The limit no run exceeds.
    pub bound: f64,
    /// What sets the limit.
    pub bottleneck: Bottleneck,
    /// Cost of its nodes.
    pub cost: f64,
}
