//! Files that options name, and the folders of those that are written later.

use anyhow::bail;
use glinthawk_jobs::FileUse;
use std::path::Path;

/// The files that options name: each option, its file if it was given, and whether it is written.
pub fn file_uses(options: &[(&'static str, Option<&Path>, bool)]) -> Vec<FileUse> {
    let uses = options.iter().filter_map(|&(role, path, written)| {
        path.map(|path| FileUse { role, path: path.to_owned(), written })
    });
    uses.collect()
}

/// Fails if the folder of a file that is to be written later does not exist.
pub fn require_folder(option: &str, path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    match path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        Some(folder) => bail!(
            "cannot create {option} {}: folder {} does not exist",
            path.display(),
            folder.display()
        ),
        None => Ok(()),
    }
}
