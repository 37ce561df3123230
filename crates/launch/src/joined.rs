//! What workers that have joined become, where nobody has said: the shape that promises most by forecast.

use crate::promise::Promise;
use crate::rough::{Between, promised};
use crate::specification::flights_default;
use glinthawk_cluster::{Crowd, Layout, Offered};
use glinthawk_model::{ModelConfig, even_slices};
use glinthawk_plan::{KernelTimes, Shape};
use std::sync::Arc;

/// What is assumed of a network that nobody has described: 10 Gbit/s, a tenth of a millisecond.
const UNKNOWN: Between = Between { delay_seconds: 1e-4, bandwidth: 1.25e9 };

/// The shapes that these workers can take, the best first; none if one of them has a GPU, whose kernels nobody has timed.
pub(crate) fn promises(
    layout: &Layout,
    config: &ModelConfig,
    kernels: &Arc<KernelTimes>,
    crowd: Crowd,
    flights: Option<u32>,
    workers: &[Offered],
) -> Vec<(Layout, Promise)> {
    if workers.iter().any(|worker| worker.has_gpu) {
        return Vec::new();
    }
    let count = workers.len();
    let shapes = (1..=count).flat_map(|pipelines| (1..=count).map(move |tier1| (pipelines, tier1)));
    let shapes = shapes.filter(|(pipelines, tier1)| {
        count.is_multiple_of(pipelines * tier1) && *tier1 <= config.layers
    });
    let promise = |(pipelines, tier1): (usize, usize)| {
        let tier2 = count / (pipelines * tier1) - 1;
        let layout = Layout {
            pipelines,
            slices: tier1,
            tier2,
            tier1_attends: tier2 == 0,
            flights: flights.unwrap_or(flights_default(tier1 as u32, tier2 as u32)),
            ..layout.clone()
        };
        let (layout, tokens_per_second) = fitted(layout, config, kernels, crowd, workers)?;
        Some((layout, Promise { pipelines, tier1, tier2, tokens_per_second }))
    };
    let mut promises: Vec<(Layout, Promise)> = shapes.filter_map(promise).collect();
    // Of equal ones, the one with the fewest nodes in a row.
    promises.sort_by(|(_, one), (_, other)| {
        other.tokens_per_second.total_cmp(&one.tokens_per_second).then(one.tier1.cmp(&other.tier1))
    });
    promises
}

/// A shape with the strands that these workers can have, and the tokens per second that it promises; `None` if it does
/// not fit them.
fn fitted(
    layout: Layout,
    config: &ModelConfig,
    kernels: &Arc<KernelTimes>,
    crowd: Crowd,
    workers: &[Offered],
) -> Option<(Layout, f64)> {
    let (tier1, _) = layout.nodes();
    let wishes = |tier: u8| workers.iter().filter(|worker| worker.tier == Some(tier)).count();
    if wishes(1) > tier1 || wishes(2) > workers.len() - tier1 {
        return None;
    }
    let threads = workers.iter().map(|worker| worker.threads).min()?.max(1);
    let memory_bytes = workers.iter().map(|worker| worker.memory_bytes).min()?;
    // What a worker offers for contexts is half of what it has: the other half is for weights.
    let slices = even_slices(config.layers, layout.slices);
    let weights = Shape::of("", config).slice_bytes(slices[0], true, layout.slices == 1);
    if weights > memory_bytes as f64 {
        return None;
    }
    let layout = layout.with_strands(config, threads, memory_bytes, crowd);
    let rate = promised(&layout, config, kernels, crowd, [threads; 2], memory_bytes, UNKNOWN)?;
    Some((layout, rate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::thread_kernels;
    use glinthawk_compute::{ContextType, Isa};

    /// The best shape of four workers with so much memory each, of which some ask for a tier.
    fn best(memory_mib: u64, wishes: [Option<u8>; 4]) -> Option<(usize, usize, usize)> {
        let config = ModelConfig::shape("smollm2-135m").expect("a known shape");
        let kernels = Arc::new(thread_kernels(&config, "smollm2-135m", Isa::Portable));
        let layout = Layout {
            pipelines: 1,
            slices: 1,
            tier2: 3,
            tier1_attends: false,
            strands: 1,
            batch: 64,
            flights: 3,
            own_batch: None,
            own_first: false,
            chunk: 256,
            page_positions: 16,
            context_max: 256,
            context_type: ContextType::Bf16,
            whole_flights: false,
            shares_cores: false,
            sharing: true,
            drafts: None,
        };
        let memory_bytes = memory_mib << 20;
        let worker = |tier| Offered { tier, threads: 2, memory_bytes, has_gpu: false };
        let crowd = Crowd { prompts: 200, input: 32, output: 16, alike: false };
        let promises = promises(&layout, &config, &kernels, crowd, None, &wishes.map(worker));
        let (layout, promise) = promises.into_iter().next()?;
        let Promise { pipelines, tier1, tier2, .. } = promise;
        assert_eq!((layout.pipelines, layout.slices, layout.tier2), (pipelines, tier1, tier2));
        Some((pipelines, tier1, tier2))
    }

    #[test]
    fn workers_become_what_promises_most() {
        assert_eq!(best(4096, [None; 4]), Some((4, 1, 0)), "replicas need nothing of each other");
        let (_, tier1, _) = best(200, [None; 4]).expect("slices of 257 MiB fit");
        assert!(tier1 > 1);
        let (pipelines, tier1, tier2) =
            best(4096, [Some(2), None, None, None]).expect("there is a Tier 2");
        assert_eq!((pipelines * tier1 * (1 + tier2), tier2 > 0), (4, true));
        assert_eq!(best(1, [None; 4]), None, "nothing fits");
    }
}
