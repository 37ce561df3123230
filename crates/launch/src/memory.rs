//! Memory for contexts, where nobody has said how much.

use crate::error::LaunchError;
use crate::machine;
use crate::opened::Opened;
use glinthawk_cluster::{ClusterError, GpuFabric, Layout, gpu_remedy};
use glinthawk_compute::ContextType;
use glinthawk_compute::cuda::{CudaDevice, CudaModel};
use glinthawk_model::ModelConfig;
use glinthawk_plan::Shape;

/// Memory for the contexts of each process that attends on this machine's CPUs: half of what the weights leave, in equal
/// parts. A longest context must fit, so it may be more than half.
pub(crate) fn memory_bytes(opened: &Opened, layout: &Layout) -> Result<u64, LaunchError> {
    let config = opened.model.config();
    let is_gpu = |node: usize| opened.local.get(node).is_some_and(|(_, gpu)| gpu.is_some());
    let (tier1, tier2) = layout.nodes();
    let nodes = tier1 + tier2;
    let weights = match (0..tier1).all(is_gpu) {
        true => 0,
        false => {
            layout.pipelines as u64 * Shape::of(opened.model.name(), config).model_bytes() as u64
        }
    };
    let on_gpus =
        (0..nodes).filter(|&node| is_gpu(node) && (node >= tier1 || layout.tier1_attends));
    let attending = (tier1 * layout.lanes()).saturating_sub(on_gpus.count()).max(1) as u64;
    let each = machine::free_memory_bytes()?.saturating_sub(weights) / attending;
    let longest = layout.model_page_bytes(config) * layout.pages_for(layout.context_max);
    Ok((each / 2).max(longest.min(each / 10 * 9)))
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
