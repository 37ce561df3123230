//! Who hosts what: slices of layers, lanes, and the pages of each lane.

use crate::error::ClusterError;
use glinthawk_compute::{ContextSpec, ContextType, CpuContext, SliceSpec};
use glinthawk_flight::{ShardId, pages_for};
use glinthawk_model::{ModelConfig, even_slices};
use glinthawk_protocol::{
    DispatcherConfig, LaneShape, Merge, OVERSUBSCRIPTION, lane_flights, lane_pages,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A node's name; its pipeline has a part in it where there are several.
pub fn node_name(pipeline: Option<usize>, slice: usize, lane: Option<u32>) -> String {
    let pipeline = pipeline.map_or(String::new(), |pipeline| format!("pipeline{pipeline}-"));
    match lane {
        None => format!("{pipeline}tier1-{slice}"),
        Some(lane) => format!("{pipeline}tier2-{slice}-{lane}"),
    }
}

/// Rows of a strand's average batch that make a separate strand worthwhile. With fewer, it is better if the cores read
/// the weights together.
const STRAND_ROWS_MIN: usize = 64;
/// The same in a large model: its weights come from memory, where reading them takes as long as computing about 44 rows, and
/// its matrices are large enough to be shared.
const STRAND_ROWS_LARGE: usize = 192;
/// Bytes of a layer's weights from which on a model is large.
const LAYER_LARGE_BYTES: usize = 64 << 20;

pub(crate) fn is_large(config: &ModelConfig) -> bool {
    2 * config.layer_parameters() >= LAYER_LARGE_BYTES
}

/// What is known about the prompts to come that affects the shape.
#[derive(Clone, Copy, Debug)]
pub struct Crowd {
    /// How many there are: each choice of a request is one.
    pub prompts: usize,
    /// Tokens that each begins with, on average.
    pub input: usize,
    /// Tokens generated for each, on average.
    pub output: usize,
    /// Whether they begin alike and have little of their own ([`Self::are_alike`]).
    pub alike: bool,
}

/// A prompt that shares pages computes eight tokens more, on average, if they have 32 positions and not 16. With as many rows
/// of its own as this, it gains as much by them: some 3% of a prompt's time.
const OWN_ROWS_FEW: usize = 256;
/// Positions of a page where CPUs attend.
const PAGE_POSITIONS_CPU: u32 = 32;
/// The same for prompts that are alike.
const PAGE_POSITIONS_ALIKE: u32 = 16;

impl Crowd {
    /// One prompt alone.
    pub const ONE: Self = Self { prompts: 1, input: 1, output: 1, alike: false };
    /// For when nothing is known: many prompts of usual lengths.
    pub const UNKNOWN: Self = Self { prompts: usize::MAX, input: 256, output: 256, alike: false };

    /// Whether prompts with so many tokens in common, and rows of their own, are better off with small pages.
    pub fn are_alike(common: usize, own_rows: usize) -> bool {
        common > 0 && own_rows < OWN_ROWS_FEW
    }

    /// Positions of a page on CPUs, all of which can use it.
    pub fn page_positions(&self) -> u32 {
        if self.alike { PAGE_POSITIONS_ALIKE } else { PAGE_POSITIONS_CPU }
    }

    /// Rows of an average step if `together` of the prompts run at a time, in batches of up to `batch` rows. Every
    /// generated token needs a step of its own; prompts fill batches.
    pub fn rows_per_step(&self, together: usize, batch: usize) -> usize {
        let steps = self.output + (together * self.input).div_ceil(batch);
        together * (self.input + self.output) / steps.max(1)
    }
}

/// The shape of a cluster, as far as every node must know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Pipelines behind the dispatcher, each with all layers and lanes of its own.
    pub pipelines: usize,
    /// Tier-1 nodes: slices the layers are cut into (K).
    pub slices: usize,
    /// Attention workers of each slice that are Tier-2 nodes (K').
    pub tier2: usize,
    /// Whether Tier-1 nodes attend too, each as the first of its slice's attention workers.
    pub tier1_attends: bool,
    /// Strands of each pipeline: what its processes compute side by side, each strand with its part of their threads
    /// and with lanes of its own, one on every attention worker. All strands of a process share its weights.
    pub strands: usize,
    /// Rows of a flight on each lane (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Rows of each flight on the Tier-1 nodes' own lane, if they are GPUs and the other lanes are not: it is so much
    /// faster that it has one flight for each slice. Of one pipeline only.
    pub own_batch: Option<u32>,
    /// Whether the Tier-1 nodes' own lanes are filled before others, in a hybrid whose Tier 2 has no cores of its own.
    pub own_first: bool,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Positions of a page.
    pub page_positions: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// How keys and values are stored.
    pub context_type: ContextType,
    /// Whether Tier 1 waits for all shards of a flight before it computes.
    pub whole_flights: bool,
    /// Whether all nodes of a strand share a core.
    pub shares_cores: bool,
    /// Whether prompts that begin with the same tokens share the pages of those.
    pub sharing: bool,
    /// How many rows Tier 1 computes while it reads the weights, if tokens that may come next have rows of their own.
    pub drafts: Option<u32>,
}

impl Layout {
    /// Chooses the number of strands: the largest that leaves hardly a thread of a Tier-1 node over, each strand enough
    /// rows of the crowd, and each lane room for a longest context in an attention worker's memory.
    pub fn with_strands(
        self,
        config: &ModelConfig,
        threads: usize,
        memory_bytes: u64,
        crowd: Crowd,
    ) -> Self {
        let page_bytes = self.page_bytes(config, 0);
        let workers = self.pipelines * self.attention_workers();
        let held = self.contexts_held(config, memory_bytes, crowd);
        let together = crowd.prompts.min(held * workers);
        let batch = self.batch as usize;
        let rows_min = if is_large(config) { STRAND_ROWS_LARGE } else { STRAND_ROWS_MIN };
        // Where a step never leaves its threads, flights meet at every layer.
        let flights = if self.slices + self.tier2 == 1 { 1 } else { self.flights as usize };
        let worthwhile = |strands: &usize| {
            let shard = (together / (workers * strands * flights)).min(batch);
            let rows = self.attention_workers() * crowd.rows_per_step(shard, batch);
            10 * (threads / strands * strands) >= 9 * threads
                && rows >= rows_min
                && memory_bytes / *strands as u64 / page_bytes >= self.pages_for(self.context_max)
        };
        let strands = (2..=threads).rev().find(worthwhile).unwrap_or(1);
        Self { strands, ..self }
    }

    /// Contexts of a crowd's average length that an attention worker holds in so much memory.
    pub fn contexts_held(&self, config: &ModelConfig, memory_bytes: u64, crowd: Crowd) -> usize {
        let pages = self.pages_for((crowd.input + crowd.output) as u32).max(1);
        (memory_bytes / self.page_bytes(config, 0) / pages) as usize
    }

    /// Bytes of one page in all layers of a model.
    pub fn model_page_bytes(&self, config: &ModelConfig) -> u64 {
        CpuContext::bytes(config, config.layers, self.context_type, self.page_positions) as u64
    }

    /// Pages that hold this many positions.
    pub fn pages_for(&self, positions: u32) -> u64 {
        pages_for(positions, self.page_positions).into()
    }

    /// Attention workers of each slice: lanes of one strand.
    pub fn attention_workers(&self) -> usize {
        usize::from(self.tier1_attends) + self.tier2
    }

    /// Lanes of one pipeline.
    pub fn lanes(&self) -> usize {
        self.strands * self.attention_workers()
    }

    /// Lanes of a pipeline, among those of all pipelines: strand after strand.
    pub fn lanes_of(&self, pipeline: usize) -> Range<u32> {
        let lanes = self.lanes() as u32;
        pipeline as u32 * lanes..(pipeline as u32 + 1) * lanes
    }

    /// Lanes of a strand.
    pub fn lanes_of_strand(&self, pipeline: usize, strand: usize) -> Range<u32> {
        let workers = self.attention_workers() as u32;
        let first = (pipeline * self.strands + strand) as u32 * workers;
        first..first + workers
    }

    /// The lanes of an attention worker, by strand; `first` is its lane of the first strand.
    pub fn lanes_of_worker(&self, first: u32) -> impl Iterator<Item = u32> {
        let workers = self.attention_workers();
        (0..self.strands).map(move |strand| first + (strand * workers) as u32)
    }

    /// The pipeline of a lane.
    pub fn pipeline_of(&self, lane: u32) -> usize {
        lane as usize / self.lanes()
    }

    /// The strand of a lane within its pipeline.
    pub fn strand_of(&self, lane: u32) -> usize {
        lane as usize / self.attention_workers() % self.strands
    }

    /// Nodes of all pipelines in Tier 1, and in Tier 2.
    pub fn nodes(&self) -> (usize, usize) {
        let tier1 = self.pipelines * self.slices;
        (tier1, tier1 * self.tier2)
    }

    /// A node's name: `tier1-0` (slice), `tier2-0-1` (slice, lane); where there are several pipelines, with its pipeline
    /// first: `pipeline1-tier1-0`.
    pub fn node_name(&self, pipeline: usize, slice: usize, lane: Option<u32>) -> String {
        node_name((self.pipelines > 1).then_some(pipeline), slice, lane)
    }

    /// The name of a strand's part of a Tier-1 node: `tier1-0-3` (slice, strand) where there are several.
    pub(crate) fn strand_name(&self, pipeline: usize, slice: usize, strand: usize) -> String {
        let node = self.node_name(pipeline, slice, None);
        if self.strands > 1 { format!("{node}-{strand}") } else { node }
    }

    fn own_lane(&self) -> Option<LaneShape> {
        self.own_batch.map(|batch| LaneShape { flights: self.slices as u32, batch })
    }

    /// Flights and rows of a lane.
    pub fn lane_shape(&self, lane: u32) -> LaneShape {
        let usual = LaneShape { flights: self.flights, batch: self.batch };
        self.own_lane().filter(|_| lane == 0).unwrap_or(usual)
    }

    /// The flights of a lane.
    pub fn flights_of(&self, lane: u32) -> Range<u32> {
        lane_flights(self.flights, self.own_lane(), lane)
    }

    fn lane_shapes(&self) -> impl Iterator<Item = LaneShape> {
        (0..self.attention_workers() as u32).map(|lane| self.lane_shape(lane))
    }

    /// Rows of a strand's slab on every Tier-1 node.
    pub fn slab_rows(&self) -> usize {
        self.lane_shapes().map(|shape| shape.slots() as usize).sum()
    }

    /// Where a shard's rows begin in the slab of a strand that has the lanes from `first_lane` on.
    pub fn slab_start(&self, shard: ShardId, first_lane: u32) -> usize {
        let before = (first_lane..shard.lane).map(|lane| self.lane_shape(lane).slots());
        let flight = shard.flight - self.flights_of(shard.lane).start;
        (before.sum::<u32>() + flight * self.lane_shape(shard.lane).batch) as usize
    }

    /// Rows in one Tier-1 batch at most.
    pub fn rows_max(&self) -> usize {
        self.lane_shapes().map(|shape| shape.batch as usize).sum()
    }

    /// When shards are ready for Tier 1.
    pub fn merge(&self) -> Merge {
        match (self.whole_flights, self.shares_cores) {
            (true, _) => Merge::WholeFlights,
            (false, true) => Merge::SharedCore,
            (false, false) => Merge::Ready,
        }
    }

    /// The layers of a slice: as even as possible, with the longer slices first.
    pub fn layers(&self, layers: usize, slice: usize) -> Range<usize> {
        let lengths = even_slices(layers, self.slices);
        let start = lengths[..slice].iter().sum();
        start..start + lengths[slice]
    }

    /// Bytes of a page of a slice.
    pub fn page_bytes(&self, config: &ModelConfig, slice: usize) -> u64 {
        let layers = self.layers(config.layers, slice).len();
        CpuContext::bytes(config, layers, self.context_type, self.page_positions) as u64
    }

    /// Pages of a slice's attention worker with this much memory: as many as fit, but no more than
    /// could ever be used. Every worker must hold one longest context, so that memory never decides
    /// what a completion says.
    pub fn pages(
        &self,
        config: &ModelConfig,
        (slice, lane): (usize, u32),
        memory_bytes: u64,
    ) -> Result<u32, ClusterError> {
        let page_bytes = self.page_bytes(config, slice);
        let held = memory_bytes / page_bytes;
        let slots = self.lane_shape(lane).slots();
        lane_pages(held, self.context_max, slots.into(), self.page_positions).ok_or(
            ClusterError::ContextMemory {
                context_max: self.context_max,
                needed_bytes: self.pages_for(self.context_max) * page_bytes,
                given_bytes: memory_bytes,
                context_fits: held * u64::from(self.page_positions),
            },
        )
    }

    /// What a slice's Tier-1 node holds for one strand.
    pub fn slice(&self, config: &ModelConfig, slice: usize) -> SliceSpec {
        SliceSpec {
            layers: self.layers(config.layers, slice),
            embeds: slice == 0,
            classifies: slice + 1 == self.slices,
            slab_rows: self.slab_rows(),
            batch_rows: self.rows_max(),
        }
    }

    /// The contexts of a slice's attention worker that has so many pages.
    pub fn contexts(
        &self,
        config: &ModelConfig,
        (slice, lane): (usize, u32),
        pages: u32,
    ) -> ContextSpec {
        let shape = self.lane_shape(lane);
        ContextSpec {
            layers: self.layers(config.layers, slice).len(),
            pages: pages as usize,
            page_positions: self.page_positions,
            context_type: self.context_type,
            slots: shape.slots() as usize,
            context_max: self.context_max as usize,
            batch_rows: shape.batch as usize,
        }
    }

    /// What the dispatcher needs; `lane_pages` is the fewest that any slice's worker has on a lane.
    pub fn dispatcher(&self, config: &ModelConfig, lane_pages: Vec<u32>) -> DispatcherConfig {
        let weights_bytes = 2 * config.layers * config.layer_parameters();
        DispatcherConfig {
            flights: self.flights,
            slices: self.slices as u32,
            pipelines: (self.pipelines * self.strands) as u32,
            weights_positions: (weights_bytes / config.context_bytes_per_token()).max(1) as u64,
            batch: self.batch,
            own_lane: self.own_lane(),
            filled_first: self.own_first.then_some(self.attention_workers() as u32),
            chunk: self.chunk,
            lane_pages,
            page_positions: self.page_positions,
            context_max: self.context_max,
            oversubscription: OVERSUBSCRIPTION,
            merge: self.merge(),
            nodes_apart: self.tier2 > 0 || self.pipelines > 1,
            run_ahead: false,
            drafts: self.drafts,
            sharing: self.sharing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        Layout {
            pipelines: 1,
            slices: 1,
            tier2: 0,
            tier1_attends: true,
            strands: 1,
            batch: 256,
            flights: 1,
            own_batch: None,
            own_first: false,
            chunk: 1,
            page_positions: 16,
            context_max: 1024,
            context_type: ContextType::Bf16,
            whole_flights: false,
            shares_cores: false,
            sharing: true,
            drafts: None,
        }
    }

    #[test]
    fn lanes_have_rows_and_memory_enough() {
        let config = ModelConfig::shape("smollm2-135m").expect("a known shape");
        let token_bytes = 2 * 2 * config.kv_width() as u64 * config.layers as u64;
        let lanes = |batch, threads, contexts: u64, prompts| {
            let crowd = Crowd { prompts, input: 1, output: 255, alike: false };
            let memory_bytes = contexts * 256 * token_bytes;
            let layout = Layout { batch, ..layout() };
            layout.with_strands(&config, threads, memory_bytes, crowd).strands
        };
        assert_eq!(lanes(256, 2, 1000, 256), 2);
        assert_eq!(lanes(256, 2, 1000, 127), 1, "too few prompts");
        assert_eq!(lanes(63, 2, 1000, 256), 1, "too small batches");
        assert_eq!(lanes(256, 2, 127, 256), 1, "too few contexts fit");
        assert_eq!(lanes(256, 1, 1000, 256), 1);
        assert_eq!(lanes(256, 16, 1000, 256), 4, "of four threads each");
        assert_eq!(lanes(256, 3, 1000, 256), 3);
        assert_eq!(lanes(256, 13, 1000, 256), 4, "of three threads each, and one is left over");
        assert_eq!(lanes(256, 7, 1000, 256), 1, "three strands would leave a thread of seven over");
        let long = Layout { context_max: 8192, ..layout() };
        let crowd = Crowd { prompts: 1000, input: 8, output: 8, alike: false };
        let strands = long.with_strands(&config, 2, 16_000 * token_bytes, crowd).strands;
        assert_eq!(strands, 1, "two lanes could not hold a longest context each");
    }

    #[test]
    fn shards_stand_apart_in_the_slab() {
        let check = |own_batch, expected: &[(u32, u32, usize)]| {
            let layout =
                Layout { slices: 2, tier2: 2, batch: 10, flights: 3, own_batch, ..layout() };
            for &(lane, flight, start) in expected {
                assert_eq!(layout.slab_start(ShardId { flight, lane }, 0), start, "{own_batch:?}");
            }
            layout.slab_rows()
        };
        assert_eq!(check(None, &[(0, 0, 0), (0, 2, 20), (1, 0, 30), (2, 2, 80)]), 90);
        assert_eq!(check(Some(7), &[(0, 3, 0), (0, 4, 7), (1, 0, 14), (1, 2, 34), (2, 2, 64)]), 74);
    }

    #[test]
    fn lanes_follow_rows_not_prompts() {
        let config = ModelConfig::shape("smollm2-135m").expect("a known shape");
        let lanes = |prompts, input, output| {
            let crowd = Crowd { prompts, input, output, alike: false };
            let layout = Layout { context_max: 8192, ..layout() };
            layout.with_strands(&config, 2, 1 << 36, crowd).strands
        };
        assert_eq!(lanes(96, 512, 16), 2);
        assert_eq!(lanes(12, 4000, 16), 2);
        assert_eq!(lanes(12, 16, 4000), 1);
        assert_eq!(lanes(8, 64, 256), 1);
        assert_eq!(lanes(2, 4000, 1), 2);
        assert_eq!(lanes(1, 4000, 1), 1, "the second lane would have nothing to do");
    }

    #[test]
    fn lanes_of_a_large_model_need_more_rows() {
        let lanes = |model, prompts| {
            let config = ModelConfig::shape(model).expect("a known shape");
            let crowd = Crowd { prompts, input: 64, output: 16, alike: false };
            layout().with_strands(&config, 16, 1 << 36, crowd).strands
        };
        assert_eq!((lanes("smollm2-135m", 64), lanes("llama3-8b", 64)), (4, 1));
        assert_eq!((lanes("smollm2-135m", 4096), lanes("llama3-8b", 4096)), (16, 16));
    }

    #[test]
    fn slices_cover_all_layers_evenly() {
        let layout = Layout { slices: 3, ..layout() };
        assert_eq!([0, 1, 2].map(|slice| layout.layers(8, slice)), [0..3, 3..6, 6..8]);
    }
}
