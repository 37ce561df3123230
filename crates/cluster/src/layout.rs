//! Who hosts what: slices of layers, lanes, and the pages of each lane.

use crate::error::ClusterError;
use glinthawk_compute::{ContextType, CpuContext};
use glinthawk_flight::PAGE_POSITIONS;
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{DispatcherConfig, Merge};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How many times longer the longest answers are expected to be than the usual one.
const OVERSUBSCRIPTION: f32 = 3.0;

/// The shape of a cluster, as far as every node must know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Tier-1 nodes: slices the layers are cut into (K).
    pub slices: usize,
    /// Attention workers of each slice that are Tier-2 nodes (K').
    pub remote_lanes: usize,
    /// Whether each Tier-1 node is an attention worker itself: lane 0, before the Tier-2 nodes.
    pub local_lane: bool,
    /// Rows of a flight on each lane (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// What keys and values are kept as.
    pub context_type: ContextType,
    /// Whether Tier 1 waits for all shards of a flight before it computes.
    pub whole_flights: bool,
}

impl Layout {
    /// Attention workers of each slice.
    pub fn lanes(&self) -> usize {
        self.remote_lanes + usize::from(self.local_lane)
    }

    /// Context slots of every lane.
    pub fn slots(&self) -> u32 {
        self.flights * self.batch
    }

    /// Rows of every Tier-1 node's slab.
    pub fn slab_rows(&self) -> usize {
        self.slots() as usize * self.lanes()
    }

    /// Rows in one Tier-1 batch at most.
    pub fn rows_max(&self) -> usize {
        self.batch as usize * self.lanes()
    }

    /// When shards are ready for Tier 1.
    pub fn merge(&self) -> Merge {
        if self.whole_flights { Merge::WholeFlights } else { Merge::Ready }
    }

    /// The layers of a slice: as even as can be, the longer slices first.
    pub fn layers(&self, layers: usize, slice: usize) -> Range<usize> {
        let start = |slice: usize| slice * (layers / self.slices) + slice.min(layers % self.slices);
        start(slice)..start(slice + 1)
    }

    /// Pages of a slice's attention worker with this much memory: what it holds, and no more than
    /// could ever be used. Every worker must hold one longest context, so that memory never
    /// decides what a completion says.
    pub fn pages(
        &self,
        config: &ModelConfig,
        slice: usize,
        memory_bytes: u64,
    ) -> Result<u32, ClusterError> {
        let layers = self.layers(config.layers, slice).len();
        let page_bytes = CpuContext::page_bytes(config, layers, self.context_type) as u64;
        let pages = memory_bytes / page_bytes;
        let context_pages = u64::from(self.context_max.div_ceil(PAGE_POSITIONS));
        if pages < context_pages {
            return Err(ClusterError::ContextMemory {
                context_max: self.context_max,
                needed_bytes: context_pages * page_bytes,
                given_bytes: memory_bytes,
                context_fits: pages * u64::from(PAGE_POSITIONS),
            });
        }
        let useful = context_pages * u64::from(self.slots());
        Ok(u32::try_from(pages.min(useful)).unwrap_or(u32::MAX))
    }

    /// What the dispatcher needs; `lane_pages` is the least that any slice's worker has on a lane.
    pub fn dispatcher(&self, lane_pages: Vec<u32>) -> DispatcherConfig {
        DispatcherConfig {
            flights: self.flights,
            rows_per_lane: self.batch,
            chunk: self.chunk,
            lane_pages,
            context_max: self.context_max,
            oversubscription: OVERSUBSCRIPTION,
            merge: self.merge(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_layers_evenly() {
        let layout = Layout {
            slices: 3,
            remote_lanes: 2,
            local_lane: false,
            batch: 1,
            flights: 1,
            chunk: 1,
            context_max: 16,
            context_type: ContextType::Bf16,
            whole_flights: false,
        };
        let slices: Vec<_> = (0..3).map(|slice| layout.layers(8, slice)).collect();
        assert_eq!(slices, [0..3, 3..6, 6..8]);
    }
}
