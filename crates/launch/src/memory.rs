//! Memory for contexts: how much, where nobody has said so, and whether there is as much as was said.

use crate::error::LaunchError;
use crate::machine;
use crate::opened::Opened;
use glinthawk_cluster::{ClusterError, GpuFabric, Layout, gpu_remedy};
use glinthawk_compute::ContextType;
use glinthawk_compute::cuda::{CudaDevice, CudaModel};
use glinthawk_model::ModelConfig;
use glinthawk_plan::Shape;
use std::ops::Range;

/// Memory for the contexts of each process that attends on this machine's CPUs: half of what the weights leave, in equal
/// parts. A longest context must fit, so it may be more than half.
pub(crate) fn memory_bytes(opened: &Opened, layout: &Layout) -> Result<u64, LaunchError> {
    let config = opened.model.config();
    let (tier1, _) = layout.nodes();
    let weights = match (0..tier1).all(|node| is_gpu(opened, node)) {
        true => 0,
        false => {
            layout.pipelines as u64 * Shape::of(opened.model.name(), config).model_bytes() as u64
        }
    };
    let attending = attending(opened, layout).iter().sum::<u64>().max(1);
    let each = machine::free_memory_bytes()?.saturating_sub(weights) / attending;
    let longest = layout.model_page_bytes(config) * layout.pages_for(layout.context_max);
    Ok((each / 2).max(longest.min(each / 10 * 9)))
}

/// Fails if the contexts of an engine on this machine's CPUs were promised more than is free. `wanted` is for each node that
/// attends in Tier 1 and in Tier 2.
pub(crate) fn check_memory(
    opened: &Opened,
    layout: &Layout,
    wanted: [u64; 2],
) -> Result<(), LaunchError> {
    let nodes = attending(opened, layout);
    let wanted = nodes.iter().zip(wanted).map(|(count, bytes)| count.saturating_mul(bytes));
    check_free_memory(wanted.fold(0, u64::saturating_add), nodes.iter().sum())
}

/// Fails if contexts of some nodes were promised more than is free. The system would give it as long as it is not used, and
/// then end a process.
pub fn check_free_memory(wanted_bytes: u64, nodes: u64) -> Result<(), LaunchError> {
    // Where the system does not say what is free, the user knows better.
    match machine::free_memory_bytes() {
        Ok(free_bytes) if wanted_bytes > free_bytes => {
            Err(LaunchError::ContextMemory { wanted_bytes, nodes, free_bytes })
        }
        _ => Ok(()),
    }
}

fn is_gpu(opened: &Opened, node: usize) -> bool {
    opened.local.get(node).is_some_and(|(_, gpu)| gpu.is_some())
}

/// Nodes that attend on this machine's CPUs, of Tier 1 and of Tier 2.
fn attending(opened: &Opened, layout: &Layout) -> [u64; 2] {
    let (tier1, tier2) = layout.nodes();
    let on_cpus = |nodes: Range<usize>| nodes.filter(|&node| !is_gpu(opened, node)).count() as u64;
    [if layout.tier1_attends { on_cpus(0..tier1) } else { 0 }, on_cpus(tier1..tier1 + tier2)]
}

/// Memory for contexts on a GPU, which holds the whole model: all that is left, or less where less was asked for.
pub(crate) fn gpu_memory_bytes(
    wanted: Option<u64>,
    config: &ModelConfig,
    layout: &Layout,
    device: &CudaDevice,
) -> Result<u64, LaunchError> {
    if layout.context_type != ContextType::Bf16 {
        return Err(ClusterError::GpuContextType.into());
    }
    let needed_bytes = CudaModel::bytes_beside_pages(config, &GpuFabric::limits(layout, 0)) as u64;
    let free_bytes = device.memory_free_bytes()?;
    let left = free_bytes.checked_sub(needed_bytes);
    let left = left.ok_or_else(|| {
        let remedy = gpu_remedy(layout, config, free_bytes);
        ClusterError::GpuMemory { needed_bytes, free_bytes, remedy }
    })?;
    Ok(wanted.unwrap_or(left).min(left))
}
