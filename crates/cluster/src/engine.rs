//! The in-process driver: dispatcher and nodes on one set of threads, messages as function calls.

use crate::error::ClusterError;
use crate::stats::{NodeShare, NodeStats, Percentiles, Stats, mean, peak_memory_bytes, per_second};
use crate::tier1::{Outgoing, Tier1Place, Tier1Worker};
use crate::tier2::Tier2Worker;
use glinthawk_compute::{CpuContext, CpuWeights, Isa, SliceSpec, Threads};
use glinthawk_flight::{PAGE_POSITIONS, Pool};
use glinthawk_model::Model;
use glinthawk_protocol::{
    Completion, Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, Generated, Prompt,
    PromptId, Rejection, Tier1Node, Tier2Node,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// How an engine is laid out.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Slices the layers are cut into (K).
    pub slices: usize,
    /// Attention workers of each slice (K').
    pub lanes: usize,
    /// Rows of a flight on each lane (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Memory for contexts, over all lanes, in bytes.
    pub context_memory_bytes: u64,
    /// Positions a context may have.
    pub context_max: u32,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Kernel threads.
    pub threads: usize,
}

/// How many times longer the longest answers are expected to be than the usual one.
const OVERSUBSCRIPTION: f32 = 3.0;

/// What an engine reports.
#[derive(Debug)]
pub enum EngineEvent {
    /// A watched prompt has a new token.
    Token(PromptId, Generated),
    /// A prompt is finished.
    Finished(Completion),
    /// A prompt cannot be run.
    Rejected(PromptId, Rejection),
}

/// A cluster in one process.
pub struct Engine {
    config: EngineConfig,
    model_name: String,
    dispatcher: Dispatcher,
    tier1: Vec<Tier1Worker<CpuWeights>>,
    /// (slice, lane), row-major
    tier2: Vec<Tier2Worker<CpuContext>>,
    outgoing: Vec<Outgoing>,
    events: Vec<EngineEvent>,
    page_bytes: u64,
    created: Instant,
    first_submit: Option<Instant>,
}

impl Engine {
    /// Loads the model's weights (reporting bytes done and in all) and makes room for contexts.
    pub fn load(
        model: &Model,
        config: EngineConfig,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ClusterError> {
        let shape = model.config();
        let threads = Arc::new(Threads::new(config.threads)?);
        threads.pin_caller();
        let pool = Arc::new(Pool::new(4 * config.flights as usize * config.lanes * config.slices));
        let page_bytes = CpuContext::page_bytes(shape, shape.layers) as u64;
        let lane_pages = lane_pages(&config, page_bytes)?;
        let slots = config.flights * config.batch;
        let slab_rows = slots as usize * config.lanes;
        let (mut tier1, mut tier2) = (Vec::new(), Vec::new());
        for slice in 0..config.slices {
            let layers = slice_layers(shape.layers, config.slices, slice);
            let place = Tier1Place {
                first: slice == 0,
                last: slice + 1 == config.slices,
                lanes: config.lanes as u32,
                rows_per_lane: config.batch,
            };
            let count = layers.len();
            let spec = SliceSpec { layers, embeds: place.first, classifies: place.last, slab_rows };
            let weights =
                CpuWeights::load(model, spec, config.isa, Arc::clone(&threads), progress)?;
            let node = Tier1Node::new(count as u32, config.batch as usize * config.lanes);
            tier1.push(Tier1Worker::new(
                node,
                weights,
                place,
                shape,
                Arc::clone(&pool),
                Arc::clone(&threads),
            ));
            for _ in 0..config.lanes {
                let pages = lane_pages as usize;
                let context =
                    CpuContext::new(shape, count, pages, config.isa, Arc::clone(&threads))?;
                let node = Tier2Node::new(slots, lane_pages);
                tier2.push(Tier2Worker::new(node, context, shape.query_width(), Arc::clone(&pool)));
            }
        }
        let dispatcher = Dispatcher::new(DispatcherConfig {
            flights: config.flights,
            rows_per_lane: config.batch,
            chunk: config.chunk,
            lane_pages: vec![lane_pages; config.lanes],
            context_max: config.context_max,
            oversubscription: OVERSUBSCRIPTION,
        });
        Ok(Self {
            config,
            model_name: model.name().to_owned(),
            dispatcher,
            tier1,
            tier2,
            outgoing: Vec::new(),
            events: Vec::new(),
            page_bytes,
            created: Instant::now(),
            first_submit: None,
        })
    }

    /// Positions a context may have here.
    pub fn positions_max(&self) -> u32 {
        self.dispatcher.positions_max()
    }

    /// Whether another prompt should be submitted now.
    pub fn wants_prompts(&self) -> bool {
        self.dispatcher.wants_prompts()
    }

    /// Whether no prompt is inside.
    pub fn is_idle(&self) -> bool {
        self.dispatcher.is_idle()
    }

    /// Takes a prompt; exactly one `Finished` or `Rejected` follows.
    pub fn submit(&mut self, prompt: Prompt) {
        self.first_submit.get_or_insert_with(Instant::now);
        self.dispatch(DispatcherEvent::Submit(prompt));
    }

    /// Ends a watched prompt's completion after `tokens_kept` tokens.
    pub fn stop(&mut self, id: PromptId, tokens_kept: usize) {
        self.dispatch(DispatcherEvent::Stop(id, tokens_kept));
    }

    /// Computes one batch and hands over what happened since the last call.
    pub fn advance(&mut self) -> Result<Vec<EngineEvent>, ClusterError> {
        for slice in (0..self.tier1.len()).rev() {
            for lane in 0..self.config.lanes {
                let index = slice * self.config.lanes + lane;
                if let Some((attended, output)) = self.tier2[index].compute() {
                    self.tier1[slice].attended(attended, output);
                }
            }
            if self.tier1[slice].compute(&mut self.outgoing) {
                self.route(slice)?;
                break;
            }
        }
        Ok(std::mem::take(&mut self.events))
    }

    fn route(&mut self, slice: usize) -> Result<(), ClusterError> {
        for outgoing in std::mem::take(&mut self.outgoing) {
            match outgoing {
                Outgoing::Attend(attend, qkv) => {
                    let index = slice * self.config.lanes + attend.shard.lane as usize;
                    self.tier2[index].take(attend, qkv)?;
                }
                Outgoing::Hop(launch, residual) => {
                    self.tier1[slice + 1].arrive(launch, Some(residual))
                }
                Outgoing::Home(home) => self.dispatch(DispatcherEvent::Home(home)),
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, event: DispatcherEvent) {
        let mut actions = Vec::new();
        self.dispatcher.on(event, self.created.elapsed().as_nanos() as u64, &mut actions);
        for action in actions {
            match action {
                DispatcherAction::Launch(launch) => self.tier1[0].arrive(launch, None),
                DispatcherAction::Token(id, token) => {
                    self.events.push(EngineEvent::Token(id, token))
                }
                DispatcherAction::Finish(completion) => {
                    self.events.push(EngineEvent::Finished(completion))
                }
                DispatcherAction::Reject(id, why) => {
                    self.events.push(EngineEvent::Rejected(id, why))
                }
            }
        }
    }

    /// Prompt and generated tokens of finished prompts per second so far.
    pub fn tokens_per_second(&self) -> f64 {
        let stats = self.dispatcher.stats();
        per_second(stats.prompt_tokens + stats.generated_tokens, self.wall_s())
    }

    fn wall_s(&self) -> f64 {
        self.first_submit.map_or(0.0, |start| start.elapsed().as_secs_f64())
    }

    /// What the run did so far.
    pub fn stats(&self) -> Stats {
        let config = &self.config;
        let wall_s = self.wall_s();
        let tier1 = self.tier1.iter().enumerate();
        let tier1 = tier1.map(|(slice, worker)| (format!("tier1-{slice}"), worker.stats()));
        let tier2 = self.tier2.iter().enumerate().map(|(index, worker)| {
            (format!("tier2-{}-{}", index / config.lanes, index % config.lanes), worker.stats())
        });
        let nodes: Vec<(String, &NodeStats)> = tier1.chain(tier2).collect();
        let tier1 = self.tier1.iter().map(|worker| worker.stats());
        let (batches, rows) =
            tier1.clone().fold((0, 0), |sum, node| (sum.0 + node.batches, sum.1 + node.rows));
        let dispatcher = self.dispatcher.stats();
        let mut stats = Stats {
            model: self.model_name.clone(),
            backend: "cpu",
            instruction_set: config.isa.name(),
            threads: config.threads,
            tier1_nodes: config.slices,
            tier2_nodes: 0,
            batch: config.batch,
            flights: config.flights,
            chunk: config.chunk,
            context_memory_bytes: config.context_memory_bytes,
            context_memory_used_max_bytes: 0,
            max_context: self.positions_max(),
            wall_s,
            prompts: 0,
            prompt_tokens: 0,
            generated_tokens: 0,
            tokens_per_second: 0.0,
            generated_tokens_per_second: 0.0,
            tier1_batch_rows_mean: mean(rows, batches),
            tier1_batch_rows_max: tier1.map(|node| node.rows_max).max().unwrap_or(0),
            nodes: nodes
                .into_iter()
                .map(|(name, node)| NodeShare::new(name, node, wall_s))
                .collect(),
            tier1_bytes_sent: 0,
            tier2_bytes_sent: 0,
            time_to_first_token_s: Percentiles::from(&dispatcher.time_to_first_token),
            time_per_output_token_s: Percentiles::from(&dispatcher.time_per_output_token),
            failures: 0,
            prompts_recomputed: 0,
            rows_recomputed: 0,
            peak_memory_bytes: peak_memory_bytes(),
        };
        stats.take_dispatcher(dispatcher, self.page_bytes);
        stats
    }
}

/// The layers of slice `slice` of `slices`: as even as can be, the longer ones first.
fn slice_layers(layers: usize, slices: usize, slice: usize) -> Range<usize> {
    let start = |slice: usize| slice * (layers / slices) + slice.min(layers % slices);
    start(slice)..start(slice + 1)
}

/// Pages of each lane: what the memory holds, and no more than could ever be used. Every lane holds
/// one longest context, so that memory never decides what a completion says.
fn lane_pages(config: &EngineConfig, page_bytes: u64) -> Result<u32, ClusterError> {
    let pages = config.context_memory_bytes / page_bytes / config.lanes as u64;
    let context_pages = u64::from(config.context_max.div_ceil(PAGE_POSITIONS));
    if pages < context_pages {
        return Err(ClusterError::ContextMemory {
            context_max: config.context_max,
            needed_mib: (context_pages * page_bytes).div_ceil(1 << 20),
            lanes: config.lanes,
            given_mib: config.context_memory_bytes >> 20,
            context_fits: pages * u64::from(PAGE_POSITIONS),
        });
    }
    let useful = context_pages * u64::from(config.flights) * u64::from(config.batch);
    Ok(u32::try_from(pages.min(useful)).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_layers_evenly() {
        let slices: Vec<_> = (0..3).map(|slice| slice_layers(8, 3, slice)).collect();
        assert_eq!(slices, [0..3, 3..6, 6..8]);
    }
}
