//! What can be wrong with a model's configuration or weights, always naming the file.

use std::path::{Path, PathBuf};

/// Why a model cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it answered.
        source: std::io::Error,
    },
    /// A folder that is no model's.
    #[error(
        "{} holds no model: config.json is missing{hint} (a model's folder has config.json, tokenizer.json and \
         safetensors files)",
        folder.display()
    )]
    NoModel {
        /// The folder.
        folder: PathBuf,
        /// What may have been meant.
        hint: String,
    },
    /// The file is not what it claims to be.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// One tensor is missing, mis-shaped, out of bounds or of an unknown type.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The file that holds, or should hold, the tensor.
        path: PathBuf,
        /// Its name in the file.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The configuration is incomplete, contradicts itself, or asks for something unsupported.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file with the configuration.
        path: PathBuf,
        /// Field and reason.
        source: ConfigError,
    },
    /// `dummy:SHAPE` with an unknown shape.
    #[error("unknown shape \"{shape}\"; known shapes: {known}")]
    UnknownShape {
        /// As given.
        shape: String,
        /// All names, separated by commas.
        known: String,
    },
    /// The reader asked for a tensor or rows that this model does not have.
    #[error("{model}: {tensor}: {reason}")]
    Read {
        /// The model's name.
        model: String,
        /// The tensor asked for.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
}

/// A configuration field and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct ConfigError {
    /// The field, as the source spells it.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

impl ConfigError {
    pub(crate) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, reason: impl Into<String>) -> Self {
        Self::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), reason: reason.into() }
    }

    pub(crate) fn config(path: &Path, source: ConfigError) -> Self {
        Self::Config { path: path.to_owned(), source }
    }
}
