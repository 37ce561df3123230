//! What a model is: its configuration, weights, tokenizer, chat template, and where to get it.

pub mod config;
mod weights;

pub use config::ModelConfig;
pub use weights::{LayerTensor, Tensor};
