//! The CUDA backend: a whole step of a model on one NVIDIA GPU, from tokens to tokens ([`CudaModel`]), or the work of
//! either tier layer by layer ([`CudaBackend`]). Both queue the same kernels, so both give the same bits.
//!
//! The driver, cuBLASLt and NVRTC are loaded when a GPU is asked for, so the ordinary build needs no CUDA toolkit and
//! the ordinary binary runs without a GPU. Kernels are `.cu` texts in this folder, compiled for the model's shape.
//!
//! **Bits.** A row's results depend on the row alone: our kernels sum in orders that know nothing of other rows, and
//! products use cuBLASLt algorithms without split-K, which agree on every bit (see `product.rs`).

mod activations;
mod attention;
mod backend;
mod bench;
mod choice;
mod device;
mod kept;
mod layers;
mod module;
mod pages;
mod pick;
mod picked;
mod product;
mod staged;
mod step;
mod tables;
mod text;
mod together;
mod weights;

pub use activations::{CudaBuffer, CudaMark, pinned_pool};
pub use backend::{CudaBackend, CudaContext, CudaWeights};
pub use bench::{LayerBench, LayerTiming, PRODUCTS};
pub use device::{CudaDevice, Gpu, gpus, has_driver};
pub use step::{CudaModel, StepLimits, Stepped};

use crate::source::{ContextSpec, SliceSpec};
use glinthawk_model::ModelConfig;

/// Bytes on a device that a slice and its contexts take beside the pages.
pub fn bytes_beside_pages(
    config: &ModelConfig,
    slice: &SliceSpec,
    contexts: &ContextSpec,
) -> usize {
    let residuals = 4 * config.hidden * (slice.slab_rows + slice.batch_rows);
    let rows = 4 * config.query_width() * slice.batch_rows.max(contexts.batch_rows);
    let logits = 4 * layers::LOGIT_ROWS * config.vocab;
    let table = 4 * contexts.slots * contexts.context_max.div_ceil(PAGE);
    // The products' workspace, the context of the driver, and what fragments.
    let spare = 1 << 30;
    layers::Layers::bytes(config, slice, contexts.context_max)
        + residuals
        + rows
        + logits
        + table
        + pages::PARTIAL_BYTES
        + spare
}

/// Positions in one page.
const PAGE: usize = 16;
