//! Everything that can go wrong between a file on disk and a plan. Each error names the place and the
//! remedy.

use std::path::Path;

/// An error of the planner. It names the file, line or field at fault, or what would be needed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A file could not be read.
    #[error("{path}: cannot read: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("{path}: cannot write: {source}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its format says; the message of the parser names line and field.
    #[error("{path}: {message}")]
    Syntax {
        /// The file.
        path: String,
        /// The parser's message.
        message: String,
    },
    /// A field holds a value that cannot be used.
    #[error("{path}: {field}: {problem}")]
    Field {
        /// The file.
        path: String,
        /// The field, dotted from the file's root.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A line of a data file cannot be used.
    #[error("{path}:{line}: {field}: {problem}")]
    Line {
        /// The file.
        path: String,
        /// The line, counted from 1.
        line: usize,
        /// The field of the line.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The cluster cannot hold the model's weights.
    #[error("the model does not fit: {0}")]
    ModelTooBig(String),
    /// The weights fit but nothing is left for contexts.
    #[error("no context memory is left: {0}")]
    NoContext(String),
    /// No configuration that was forecast reaches the deadline.
    #[error("{0}")]
    Deadline(String),
    /// The objective needs a figure that the cluster file does not give.
    #[error("{0}")]
    MissingFigure(String),
}

impl PlanError {
    /// A field of `path` that cannot be used, and why.
    pub fn field(path: &str, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { path: path.to_owned(), field: field.into(), problem: problem.into() }
    }
}

/// Reads a whole text file, or says which one could not be read.
pub(crate) fn read_text(path: &Path) -> Result<String, PlanError> {
    std::fs::read_to_string(path)
        .map_err(|source| PlanError::Read { path: path.display().to_string(), source })
}

/// Writes a whole text file, or says which one could not be written.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), PlanError> {
    std::fs::write(path, text)
        .map_err(|source| PlanError::Write { path: path.display().to_string(), source })
}
