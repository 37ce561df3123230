//! What a model is: its configuration, weights, tokenizer, chat template, and where to get it.

#![deny(unsafe_code)]

pub mod catalogue;
pub mod chat;
pub mod config;
mod encoding;
mod error;
mod hashes;
mod identity;
mod jinja;
mod json;
mod model;
mod names;
mod regular;
mod source;
mod stored;
pub mod testing;
pub mod tokenizer;
mod weights;

pub use chat::{ChatError, ChatMessage, ChatTemplate, Rendered};
pub use config::{ModelConfig, even_slices};
pub use error::{ConfigError, ModelError};
pub use identity::ModelIdentity;
pub use model::{ElsewhereWeights, Model, Source};
pub use source::gguf::{Metadata, Value};
pub use tokenizer::{Tokenizer, TokenizerError, guarded, silence_guarded_panics};
pub use weights::{LayerTensor, Tensor};
