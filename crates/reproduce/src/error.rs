//! What can go wrong while the evaluation is regenerated.

use glinthawk_plan::PlanError;
use std::io;
use std::path::Path;

/// Why the page could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReproduceError {
    /// The built-in data or a simulation.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plot could not be drawn.
    #[error("cannot draw {name}: {message}")]
    Plot {
        /// The plot's file name.
        name: String,
        /// Why.
        message: String,
    },
    /// The page or a plot could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file or folder.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

impl ReproduceError {
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self::Write { path, source }
    }
}
