//! A layout on cores as a rough forecast sees it: from the times of one thread, whose work several are taken to share
//! evenly.

use glinthawk_cluster::{Crowd, Layout};
use glinthawk_model::{ModelConfig, even_slices};
use glinthawk_plan::{Deployment, KernelTimes, NetworkLink, Place, Shape, Workload, forecast};
use std::sync::Arc;

/// Prompts that are forecast at most: more of the same take proportionally longer.
const PROMPTS_FORECAST: usize = 4000;

/// What is between the nodes.
#[derive(Clone, Copy)]
pub(crate) struct Between {
    pub delay_seconds: f64,
    pub bandwidth: f64,
}

/// Tokens per second that a layout promises for a crowd, where each Tier-1 and each Tier-2 node has so many threads and
/// memory for contexts; `None` if it cannot hold a longest context.
pub(crate) fn promised(
    layout: &Layout,
    config: &ModelConfig,
    kernels: &Arc<KernelTimes>,
    crowd: Crowd,
    threads: [usize; 2],
    memory_bytes: u64,
    between: Between,
) -> Option<f64> {
    let strands = layout.strands;
    let share = |bytes: f64| bytes / strands as f64;
    let crowding = |threads: usize| strands as f64 / threads.max(1) as f64;
    let Between { delay_seconds, bandwidth } = between;
    let deployment = Deployment {
        shape: Shape::of("", config),
        slices: even_slices(config.layers, layout.slices),
        tier2: layout.tier2,
        local_lane: layout.tier1_attends,
        strands: strands * layout.pipelines,
        own_lane: None,
        own_first: None,
        crowding: threads.map(crowding),
        batch: layout.batch,
        flights: layout.flights,
        chunk: layout.chunk,
        context_max: layout.context_max,
        lane_pages: layout.pages(config, (0, 0), memory_bytes / strands as u64).ok()?,
        page_positions: layout.page_positions,
        whole_flights: layout.whole_flights,
        greedy: true,
        tier1: Arc::clone(kernels),
        tier2_kernels: Arc::clone(kernels),
        delay_seconds,
        bandwidth: share(bandwidth),
        port: share(bandwidth),
        hop: NetworkLink { rtt_seconds: 2.0 * delay_seconds, bandwidth: share(bandwidth) },
        place: Place::OwnMachines,
    };
    let prompts = crowd.prompts.min(PROMPTS_FORECAST);
    let job = Workload::uniform(crowd.input.max(1), crowd.output.max(1), prompts).ok()?;
    Some(forecast(&deployment, &job, None).tokens_per_second())
}
