//! The CUDA backend: a whole step of a model on one NVIDIA GPU, from tokens to tokens.
//!
//! The driver, cuBLASLt and NVRTC are loaded when a GPU is asked for, so the ordinary build needs no CUDA toolkit and
//! the ordinary binary runs without a GPU. Kernels are `.cu` texts in this folder, compiled for the model's shape.
//!
//! **Bits.** A row's results depend on the row alone: our kernels sum in orders that know nothing of other rows, and
//! products use cuBLASLt algorithms without split-K, which agree on every bit (see `product.rs`).

mod attention;
mod device;
mod module;
mod pick;
mod product;
mod step;
mod weights;

pub use device::{CudaDevice, Gpu, gpus, has_driver};
pub use step::{CudaModel, StepLimits};

/// Positions in one page.
const PAGE: usize = glinthawk_flight::PAGE_POSITIONS as usize;
