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
    /// The lane that it attends on, of the first strand.
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
    /// Shares out memory; `wanted` is the most for each attention worker of Tier 1 and of Tier 2.
    pub(crate) fn new(
        layout: &Layout,
        config: &ModelConfig,
        wanted: [Option<u64>; 2],
        workers: &[Placed<'_>],
    ) -> Result<Self, ClusterError> {
        let mut lane_pages = vec![u32::MAX; layout.pipelines * layout.lanes()];
        let mut memory_bytes_min = u64::MAX;
        for worker in workers {
            let left = left_on_gpu(layout, config, worker, workers)?;
            let Some(lane) = worker.lane else { continue };
            let wanted = wanted[usize::from(!worker.has_weights)];
            let offered = match (worker.offer.gpu, wanted) {
                (Some(_), Some(wanted)) => wanted.min(worker.offer.memory_bytes),
                (_, wanted) => wanted.unwrap_or(worker.offer.memory_bytes),
            };
            let memory = offered.min(left);
            for lane in layout.lanes_of_worker(lane) {
                let memory = memory / layout.strands as u64;
                let pages = layout.pages(config, (worker.slice, lane), memory)?;
                let fewest = &mut lane_pages[lane as usize];
                *fewest = (*fewest).min(pages);
            }
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
    bytes_beside(layout, config, &held, (worker.slice, worker.lane.unwrap_or(0)))
}

fn bytes_beside(
    layout: &Layout,
    config: &ModelConfig,
    held: &SliceSpec,
    place: (usize, u32),
) -> u64 {
    let contexts = layout.contexts(config, place, 0);
    // q, k, v and attention of every row in the air, in buffers of up to twice their size.
    let rows = held.slab_rows.max(contexts.slots);
    let travelling = rows * 2 * 2 * (config.qkv_width() + config.query_width());
    (cuda::bytes_beside_pages(config, held, &contexts) + travelling) as u64
}

/// What the first slice leaves for contexts on a GPU that it has to itself.
pub fn left_beside_slice(layout: &Layout, config: &ModelConfig, free_bytes: u64) -> Option<u64> {
    free_bytes.checked_sub(bytes_beside(layout, config, &layout.slice(config, 0), (0, 0)))
}

/// What would fit on a GPU that a slice does not fit on: smaller batches, or more slices.
pub fn gpu_remedy(layout: &Layout, config: &ModelConfig, free_bytes: u64) -> String {
    let fits = |layout: &Layout| {
        let contexts = layout.contexts(config, (0, 0), 0);
        let beside = cuda::bytes_beside_pages(config, &layout.slice(config, 0), &contexts) as u64;
        let longest = layout.pages_for(layout.context_max) * layout.page_bytes(config, 0);
        beside + longest <= free_bytes
    };
    let halved = std::iter::successors(Some(layout.batch / 2), |batch| Some(batch / 2));
    let mut batches = halved.take_while(|batch| *batch > 0);
    let smaller = |batch: u32| {
        let own_batch = layout.own_batch.map(|own| own.min(batch));
        Layout { batch, own_batch, ..layout.clone() }
    };
    if let Some(batch) = batches.find(|&batch| fits(&smaller(batch))) {
        return format!("--batch {batch} would fit");
    }
    let mut slices = layout.slices + 1..=config.layers;
    match slices.find(|&slices| fits(&Layout { slices, ..layout.clone() })) {
        Some(slices) => format!("--tier1 {slices} would fit, on as many such GPUs"),
        None => "it does not fit in any number of slices".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::GpuOffer;

    const GIB: u64 = 1 << 30;

    fn layout(slices: usize, tier2: usize) -> Layout {
        Layout {
            pipelines: 1,
            slices,
            tier2,
            tier1_attends: tier2 == 0,
            strands: 1,
            batch: 64,
            flights: 3,
            own_batch: None,
            own_first: false,
            chunk: 64,
            page_positions: 16,
            context_max: 1024,
            context_type: ContextType::Bf16,
            whole_flights: false,
            shares_cores: false,
            sharing: true,
            drafts: None,
        }
    }

    /// A worker with memory for contexts, perhaps on a GPU of this number with free memory.
    fn offer(memory_bytes: u64, gpu: Option<(u8, u64)>) -> Offer {
        Offer {
            tier: None,
            local: None,
            threads: 1,
            kind: String::new(),
            gpu: gpu.map(|(number, free_bytes)| GpuOffer { uuid: [number; 16], free_bytes }),
            memory_bytes,
            page_positions: vec![16],
            port: 0,
        }
    }

    /// Least memory for contexts, in GiB, of the slices of a 70B model, each on an offer; or what is wrong.
    fn check(offers: &[Offer], wanted: Option<u64>, expected: Result<u64, &str>) {
        let config = ModelConfig::shape("llama2-70b").expect("a known shape");
        let placed = offers.iter().enumerate().map(|(slice, offer)| Placed {
            offer,
            slice,
            has_weights: true,
            lane: Some(0),
        });
        let placed: Vec<_> = placed.collect();
        let budget = Budget::new(&layout(offers.len(), 0), &config, [wanted, None], &placed);
        match (budget, expected) {
            (Ok(budget), Ok(gib)) => assert_eq!(budget.memory_bytes_min / GIB, gib),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{:?}", found.map(|budget| budget.memory_bytes_min)),
        }
    }

    #[test]
    fn contexts_have_what_weights_leave_of_a_gpu() {
        let all = |gpu| offer(u64::MAX, Some(gpu));
        check(&[all((0, 141 * GIB))], None, Ok(11));
        check(&[all((0, 141 * GIB))], Some(2 * GIB), Ok(2));
        check(&[offer(3 * GIB, Some((0, 141 * GIB)))], None, Ok(3));
        check(&[offer(5 * GIB, None)], None, Ok(5));
        check(&[offer(5 * GIB, None)], Some(7 * GIB), Ok(7));
        // Two slices on one GPU share what is left; two GPUs do not.
        check(&[all((0, 141 * GIB)), all((0, 141 * GIB))], None, Ok(5));
        check(&[all((0, 80 * GIB)), all((1, 80 * GIB))], None, Ok(14));
    }

    #[test]
    fn what_does_not_fit_says_what_would() {
        let all = |gpu| offer(u64::MAX, Some(gpu));
        check(
            &[all((0, 80 * GIB))],
            None,
            Err("too little: --tier1 2 would fit, on as many such GPUs"),
        );
        check(&[all((0, 30 * GIB))], None, Err("--tier1 5 would fit"));
        let shared = [all((0, 80 * GIB)), all((0, 80 * GIB))];
        check(&shared, None, Err("2 nodes share it"));
    }
}
