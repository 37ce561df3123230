//! A file, and what a command uses it for.

use std::path::PathBuf;

/// A file and its role in a command.
#[derive(Clone, Debug)]
pub struct FileUse {
    /// Such as "the input".
    pub role: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// Whether the command writes it.
    pub written: bool,
}
