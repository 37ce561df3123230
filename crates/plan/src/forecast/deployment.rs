//! What is forecast: an engine, and what its nodes have to themselves.

use crate::calculus::NetworkLink;
use crate::kernels::KernelTimes;
use crate::shape::Shape;
use crate::workload::Length;
use glinthawk_protocol::{DispatcherConfig, LaneShape, Merge, OVERSUBSCRIPTION};
use std::sync::Arc;

/// What each node has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All nodes are one process, messages are function calls.
    OneProcess,
    /// Every node is a process, pinned in turn to one of this many cores of one machine. Strands side by side have so many
    /// cores each.
    SharedCores(usize),
    /// Every node has its own machine.
    OwnMachines,
}

/// The lane of Tier-1 nodes that are GPUs beside CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLane {
    /// Rows of each of its flights, of which there is one for each slice.
    pub batch: u32,
    /// Its pages.
    pub pages: u32,
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
    /// Their lane, if it is much faster than the others.
    pub own_lane: Option<OwnLane>,
    /// Pages of the Tier-1 nodes' own lanes in each strand, if these are filled before others.
    pub own_first: Option<u32>,
    /// Strands that compute side by side in every process, each with its part of the prompts. Kernel times are those of
    /// one strand's threads.
    pub strands: usize,
    /// Strands for each thread that kernel times are of, in Tier 1 and in Tier 2: more than 1 where they are more than
    /// the threads of a node.
    pub crowding: [f64; 2],
    /// Rows of a flight on each attention worker (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// Pages of each strand on each attention worker; the own lane has its own.
    pub lane_pages: u32,
    /// Positions of a page.
    pub page_positions: u32,
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
        match (self.whole_flights, self.place) {
            (true, _) => Merge::WholeFlights,
            (false, Place::SharedCores(1)) => Merge::SharedCore,
            (false, _) => Merge::Ready,
        }
    }

    /// What the dispatcher needs; prompts that begin alike may share pages.
    pub(super) fn dispatcher(&self, sharing: bool) -> DispatcherConfig {
        let mut lane_pages = vec![self.lane_pages; self.lanes()];
        if let Some(own) = self.own_lane {
            lane_pages[0] = own.pages;
        }
        if let Some(pages) = self.own_first {
            lane_pages[0] = pages;
        }
        let slices = self.slices.len() as u32;
        DispatcherConfig {
            flights: self.flights,
            slices,
            pipelines: 1,
            weights_positions: self.shape.weights_positions(),
            batch: self.batch,
            own_lane: self.own_lane.map(|own| LaneShape { flights: slices, batch: own.batch }),
            filled_first: self.own_first.map(|_| self.lanes() as u32),
            chunk: self.chunk,
            lane_pages,
            page_positions: self.page_positions,
            context_max: self.context_max,
            oversubscription: OVERSUBSCRIPTION,
            merge: self.merge(),
            nodes_apart: self.tier2 > 0,
            run_ahead: false,
            drafts: None,
            sharing,
        }
    }

    fn lane_shapes(&self) -> Vec<LaneShape> {
        let dispatcher = self.dispatcher(false);
        (0..self.lanes() as u32).map(|lane| dispatcher.lane_shape(lane)).collect()
    }

    /// Rows in one Tier-1 batch at most.
    pub(super) fn rows_max(&self) -> usize {
        self.lane_shapes().iter().map(|shape| shape.batch as usize).sum()
    }

    pub(super) fn seats(&self) -> usize {
        self.lane_shapes().iter().map(|shape| shape.slots() as usize).sum()
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
