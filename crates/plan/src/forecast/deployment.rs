//! What is forecast: an engine, and what its nodes have to themselves.

use crate::calculus::NetworkLink;
use crate::kernels::KernelTimes;
use crate::shape::Shape;
use crate::workload::Length;
use glinthawk_protocol::Merge;
use std::sync::Arc;

/// What each node has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All nodes are one process, messages are function calls.
    OneProcess {
        /// Lanes that compute side by side, each with its part of the prompts.
        lanes: usize,
    },
    /// Every node is a process, pinned in turn to one of this many cores of one machine.
    SharedCores(usize),
    /// Every node has its own machine.
    OwnMachines,
}

/// An engine and where it runs, as far as a forecast needs to know.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The model.
    pub shape: Shape,
    /// Layers of each Tier-1 node.
    pub slices: Vec<usize>,
    /// Tier-2 nodes for each Tier-1 node.
    pub tier2: usize,
    /// Whether Tier-1 nodes attend too.
    pub local_lane: bool,
    /// Rows of a flight on each attention worker (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// Pages of each attention worker.
    pub lane_pages: u32,
    /// Whether Tier 1 waits for whole flights.
    pub whole_flights: bool,
    /// Whether tokens are the likeliest ones, else drawn.
    pub greedy: bool,
    /// Kernels of Tier 1, and of everything in one process.
    pub tier1: Arc<KernelTimes>,
    /// Kernels of Tier 2.
    pub tier2_kernels: Arc<KernelTimes>,
    /// Delay between the tiers, one way, in seconds.
    pub delay_seconds: f64,
    /// Bytes per second between a Tier-1 and a Tier-2 node, each direction; infinite if nothing limits it.
    pub bandwidth: f64,
    /// Bytes per second between a Tier-1 node and all its Tier-2 nodes together, each direction.
    pub port: f64,
    /// From slice to slice, each on a machine of its own.
    pub hop: NetworkLink,
    /// What the nodes share.
    pub place: Place,
}

impl Deployment {
    /// Attention workers of each slice.
    pub fn lanes(&self) -> usize {
        self.tier2 + usize::from(self.local_lane)
    }

    pub(super) fn merge(&self) -> Merge {
        if self.whole_flights { Merge::WholeFlights } else { Merge::Ready }
    }

    pub(super) fn seats(&self) -> usize {
        self.batch as usize * self.flights as usize * self.lanes()
    }

    /// Layers that one simulated layer stands for, so that a job of these lengths makes no more visits.
    pub(super) fn grain(&self, lengths: &[Length], visits_max: f64) -> usize {
        let steps = |length: &Length| length.steps(self.chunk as usize) as f64;
        let all: f64 = lengths.iter().map(steps).sum();
        let longest = lengths.iter().map(steps).fold(0.0, f64::max);
        // While there are enough prompts every step of a shard carries a batch of them, then fewer and fewer.
        let shards = f64::from(self.flights) * self.lanes() as f64;
        let shard_steps = (all / f64::from(self.batch) + shards * longest).min(all);
        let most = *self.slices.iter().max().expect("there is a slice");
        let visits = |grain: usize| {
            shard_steps
                * self.slices.iter().map(|layers| layers.div_ceil(grain) as f64).sum::<f64>()
        };
        (1..=most).find(|&grain| visits(grain) <= visits_max).unwrap_or(most)
    }
}
