//! One configuration in full: who hosts which layers, how many rows go where, over which links.

use crate::calculus::{NetworkLink, RowTraffic};
use crate::kernels::KernelTimes;
use crate::shape::Shape;
use crate::workload::{Mixture, Workload};
use std::sync::Arc;

/// Which machine the simulator mimics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// The paper's two algorithms: whole-flight transfers, hops between slices in a single tier only, local
    /// attention inside the Tier-1 stage, no classifier.
    Paper,
    /// As `Paper`, but a single tier sends after every layer, also where the next layer is on the same node. The
    /// paper's listing of the single tier is printed that way; its text has one hop per slice.
    Listing,
    /// This system: shards, merge, hops between slices, fused stages, classifier, local attention beside remote.
    Full,
}

impl Rules {
    /// Whether flights travel whole, as in the paper.
    pub(crate) fn is_paper(self) -> bool {
        self != Self::Full
    }
}

/// Lengths of the contexts that rows attend to.
#[derive(Clone, Debug)]
pub enum Contexts {
    /// Every row attends to this many positions.
    Fixed(f64),
    /// Each shard's rows attend to positions drawn from a workload, redrawn in every step.
    Sampled(Arc<Workload>),
    /// Some rows generate, the others stand in prefill chunks, as in a job on average.
    Mixed(Mixture),
}

impl Contexts {
    /// Positions attended to on average.
    pub fn mean(&self) -> f64 {
        match self {
            Self::Fixed(positions) => *positions,
            Self::Sampled(workload) => workload.context_mean(),
            Self::Mixed(mixture) => mixture.context_mean(),
        }
    }

    /// Seconds of one layer's attention of `rows` rows on average.
    pub fn attention_seconds(&self, kernels: &KernelTimes, rows: usize) -> f64 {
        match self {
            Self::Mixed(mixture) => mixture.attention_seconds(kernels, rows),
            _ => kernels.attention_seconds(rows, self.mean()),
        }
    }
}

/// Identical Tier-2 nodes of one slice.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their kernels.
    pub kernels: Arc<KernelTimes>,
    /// How many.
    pub nodes: usize,
    /// Rows per node and flight (B).
    pub rows: usize,
}

/// One Tier-1 node, its layers and its attention workers.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Layers it hosts.
    pub layers: usize,
    /// Its kernels.
    pub tier1: Arc<KernelTimes>,
    /// Rows per flight whose context it keeps itself.
    pub local_rows: usize,
    /// Its Tier-2 nodes; several groups if they differ.
    pub tier2: Vec<Group>,
}

impl Slice {
    /// Rows per flight.
    pub fn rows(&self) -> usize {
        self.local_rows + self.remote_rows()
    }

    /// Rows per flight that attend on Tier 2.
    pub fn remote_rows(&self) -> usize {
        self.tier2.iter().map(|group| group.nodes * group.rows).sum()
    }

    /// Whether no row leaves the Tier-1 node for attention.
    pub fn is_single_tier(&self) -> bool {
        self.remote_rows() == 0
    }
}

/// What makes real machines uneven; all zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// Every service takes its time times a factor drawn evenly from 1 ± this.
    pub jitter: f64,
    /// Fraction of the Tier-2 nodes that are stragglers.
    pub straggler_share: f64,
    /// How much longer a straggler takes: 0.5 is half as long again.
    pub straggler_extra: f64,
}

/// Everything the simulator needs to know.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// The model.
    pub shape: Shape,
    /// The slices in order of their layers.
    pub slices: Vec<Slice>,
    /// Flights in the air (IF).
    pub flights: usize,
    /// Context lengths.
    pub contexts: Contexts,
    /// Between Tier-1 nodes.
    pub hop: NetworkLink,
    /// Between the tiers, at the Tier-1 node's end.
    pub inter: NetworkLink,
    /// Bytes per second at a Tier-2 node's end.
    pub tier2_bandwidth: f64,
    /// What travels between the tiers.
    pub traffic: RowTraffic,
    /// Which machine to mimic.
    pub rules: Rules,
    /// Jitter and stragglers.
    pub disturbance: Disturbance,
    /// Seed of everything random.
    pub seed: u64,
}

impl Configuration {
    /// Rows per flight: what Tier 1 runs at once (K'·B and the local rows).
    pub fn rows(&self) -> usize {
        self.slices[0].rows()
    }
}
