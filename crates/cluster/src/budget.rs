//! Memory for contexts: what every attention worker of a cluster has, from what the workers offer. On a GPU that is what
//! its weights and buffers leave, shared by all nodes on it.

use crate::control::Offer;
use crate::error::ClusterError;
use crate::layout::Layout;
use glinthawk_compute::{ContextType, SliceSpec, cuda};
use glinthawk_model::ModelConfig;

/// A worker that has a place in the cluster.
pub(crate) struct Placed<'a> {
    pub offer: &'a Offer,
    pub slice: usize,
    /// Whether it is the slice's Tier-1 node.
    pub has_weights: bool,
    /// The lane that it attends on.
    pub lane: Option<u32>,
}

/// What a cluster's contexts have.
pub(crate) struct Budget {
    /// Pages of every lane: the fewest of any slice's worker there.
    pub lane_pages: Vec<u32>,
    /// Least memory for contexts of any attention worker, in bytes.
    pub memory_bytes_min: u64,
}

impl Budget {
    /// Shares out memory; `wanted` is the most for each attention worker.
    pub(crate) fn new(
        layout: &Layout,
        config: &ModelConfig,
        wanted: Option<u64>,
        workers: &[Placed<'_>],
    ) -> Result<Self, ClusterError> {
        let mut lane_pages = vec![u32::MAX; layout.pipelines * layout.lanes()];
        let mut memory_bytes_min = u64::MAX;
        for worker in workers {
            let left = left_on_gpu(layout, config, worker, workers)?;
            let Some(lane) = worker.lane else { continue };
            let offered = match (worker.offer.gpu, wanted) {
                (Some(_), Some(wanted)) => wanted.min(worker.offer.memory_bytes),
                (_, wanted) => wanted.unwrap_or(worker.offer.memory_bytes),
            };
            let memory = offered.min(left);
            let pages = layout.pages(config, worker.slice, memory)?;
            let fewest = &mut lane_pages[lane as usize];
            *fewest = (*fewest).min(pages);
            memory_bytes_min = memory_bytes_min.min(memory);
        }
        Ok(Self { lane_pages, memory_bytes_min })
    }
}

/// What a worker's GPU leaves for its contexts. A CPU sets no such limit.
fn left_on_gpu(
    layout: &Layout,
    config: &ModelConfig,
    worker: &Placed<'_>,
    workers: &[Placed<'_>],
) -> Result<u64, ClusterError> {
    let Some(gpu) = worker.offer.gpu else { return Ok(u64::MAX) };
    if layout.context_type != ContextType::Bf16 && worker.lane.is_some() {
        return Err(ClusterError::GpuContextType);
    }
    let on_it = workers.iter().filter_map(|other| Some((other, other.offer.gpu?)));
    let on_it: Vec<_> = on_it.filter(|(_, other)| other.uuid == gpu.uuid).collect();
    let free_bytes = on_it.iter().map(|(_, gpu)| gpu.free_bytes).min().unwrap_or(gpu.free_bytes);
    let needs = on_it.iter().map(|(other, _)| beside_contexts(layout, config, other));
    let needed_bytes: u64 = needs.sum();
    let Some(left) = free_bytes.checked_sub(needed_bytes) else {
        let remedy = match on_it.len() {
            1 => gpu_remedy(layout, config, free_bytes),
            nodes => format!("{nodes} nodes share it, and each could have a GPU of its own"),
        };
        return Err(ClusterError::GpuMemory { needed_bytes, free_bytes, remedy });
    };
    let attending = on_it.iter().filter(|(other, _)| other.lane.is_some()).count();
    Ok(left / attending.max(1) as u64)
}

fn beside_contexts(layout: &Layout, config: &ModelConfig, worker: &Placed<'_>) -> u64 {
    let held = match worker.has_weights {
        true => layout.slice(config, worker.slice),
        false => SliceSpec::nothing(),
    };
    let contexts = layout.contexts(config, worker.slice, 0);
    cuda::bytes_beside_pages(config, &held, &contexts) as u64
}

/// What would fit on a GPU that a slice does not fit on: smaller batches, or more slices.
pub fn gpu_remedy(layout: &Layout, config: &ModelConfig, free_bytes: u64) -> String {
    let fits = |layout: &Layout| {
        let contexts = layout.contexts(config, 0, 0);
        let beside = cuda::bytes_beside_pages(config, &layout.slice(config, 0), &contexts) as u64;
        let longest = layout.pages_for(layout.context_max) * layout.page_bytes(config, 0);
        beside + longest <= free_bytes
    };
    let halved = std::iter::successors(Some(layout.batch / 2), |batch| Some(batch / 2));
    let mut batches = halved.take_while(|batch| *batch > 0);
    if let Some(batch) = batches.find(|&batch| fits(&Layout { batch, ..layout.clone() })) {
        return format!("--batch {batch} would fit");
    }
    let mut slices = layout.slices + 1..=config.layers;
    match slices.find(|&slices| fits(&Layout { slices, ..layout.clone() })) {
        Some(slices) => format!("--tier1 {slices} would fit, on as many such GPUs"),
        None => "it does not fit in any number of slices".to_owned(),
    }
}
