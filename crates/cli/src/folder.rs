//! Folders of files that are written later.

use anyhow::bail;
use std::path::Path;

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
