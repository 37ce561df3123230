//! The folder that models are kept in, and the lock that lets one process at a time fill it.

use super::CatalogueError;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The folder models are kept in: `GLINTHAWK_CACHE`, else `glinthawk` in the platform's.
pub fn cache_folder() -> Result<PathBuf, CatalogueError> {
    choose(|name| env::var_os(name).filter(|value| !value.is_empty()))
}

fn choose(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CatalogueError> {
    if let Some(folder) = variable("GLINTHAWK_CACHE") {
        return Ok(PathBuf::from(folder));
    }
    let home = || variable("HOME").map(PathBuf::from);
    let platform = if cfg!(target_os = "macos") {
        home().map(|home| home.join("Library/Caches"))
    } else {
        variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            // A relative path there is to be ignored, says the specification.
            .filter(|folder| folder.is_absolute())
            .or_else(|| home().map(|home| home.join(".cache")))
    };
    platform.map(|folder| folder.join("glinthawk")).ok_or(CatalogueError::NoCacheFolder)
}

pub(super) fn trouble(path: &Path) -> impl FnOnce(std::io::Error) -> CatalogueError {
    let path = path.to_owned();
    move |source| CatalogueError::Cache { path, source }
}

/// A checksum as it is usually written.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Held while a file of the cache is fetched; creates the file's folder.
pub(super) struct Lock {
    _file: File,
}

/// Waits until no other process fetches the file at `path`.
pub(super) fn lock(path: &Path) -> Result<Lock, CatalogueError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(trouble(folder))?;
    }
    let lock_path = path.with_added_extension("lock");
    let file = File::create(&lock_path).map_err(trouble(&lock_path))?;
    file.lock().map_err(trouble(&lock_path))?;
    Ok(Lock { _file: file })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[(&str, &str)], expected: Option<&str>) {
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(key, _)| *key == name)?;
            Some(OsString::from(value))
        };
        assert_eq!(choose(variable).ok(), expected.map(PathBuf::from), "{variables:?}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_folder_follows_the_environment() {
        check(&[("GLINTHAWK_CACHE", "/g"), ("XDG_CACHE_HOME", "/x")], Some("/g"));
        check(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/x/glinthawk"));
        check(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")], Some("/h/.cache/glinthawk"));
        check(&[("HOME", "/h")], Some("/h/.cache/glinthawk"));
        check(&[], None);
    }
}
