//! Models of the Hugging Face hub: `org/name` to a folder of the cache. What the hub says is data:
//! the names of its files become file names only where they are on our list or pass `is_shard`.

use super::download::{Expected, Site};
use super::{CatalogueError, PullProgress, cache};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Fetched if the model has them, in this order; the weights come last.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Holds the revision that a folder's files are of.
const REVISION: &str = ".revision";

/// Several times the largest of the small files there is.
const SMALL_BYTES_MAX: u64 = 1 << 28;
const LISTING_BYTES_MAX: u64 = 1 << 24;
/// With what we put around a name it still fits any file system.
const NAME_BYTES_MAX: usize = 200;

/// Whether `name` has the form `org/name`.
pub(super) fn is_name(name: &str) -> bool {
    name.split_once('/').is_some_and(|(org, name)| is_plain(org) && is_plain(name))
        && !name.ends_with(".gguf")
}

/// Whether a name can be nothing but a name of one file or folder, and no hidden one.
fn is_plain(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Whether a file of this name may be written as one of a model's shards.
fn is_shard(name: &str) -> bool {
    is_plain(name) && name.ends_with(".safetensors")
}

/// The folder of a model that has been fetched.
pub(super) fn cached(name: &str, cache_folder: &Path) -> Option<PathBuf> {
    let folder = is_name(name).then(|| cache_folder.join("hub").join(name))?;
    // It gets its name once it is complete.
    folder.is_dir().then_some(folder)
}

/// The folder of a model, fetched if it is not in the cache.
pub(super) fn pull(
    name: &str,
    cache_folder: &Path,
    progress: &mut dyn FnMut(PullProgress<'_>),
) -> Result<PathBuf, CatalogueError> {
    if let Some(folder) = cached(name, cache_folder) {
        return Ok(folder);
    }
    let folder = cache_folder.join("hub").join(name);
    // No model's name begins with a dot, so these are nobody's folder.
    let hidden = |ending: &str| {
        let last = folder.file_name().unwrap_or_default().to_string_lossy();
        folder.with_file_name(format!(".{last}{ending}"))
    };
    let _lock = cache::lock(&hidden(""))?;
    // Another process may have fetched it while this one waited.
    if let Some(folder) = cached(name, cache_folder) {
        return Ok(folder);
    }
    let wrong = |reason: String| CatalogueError::Hub { name: name.to_owned(), reason };
    let endpoint = env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
    let endpoint = endpoint.as_deref().unwrap_or("https://huggingface.co");
    let site = Site::new(endpoint, token()).map_err(wrong)?;
    let partial = hidden(".partial");
    let mut revision = Revision::find(&site, name, &partial, progress).map_err(wrong)?;
    revision.fetch_all().map_err(wrong)?;
    fs::rename(&partial, &folder).map_err(cache::trouble(&folder))?;
    Ok(folder)
}

/// `HF_TOKEN`, else the one that Hugging Face's own tools keep.
fn token() -> Option<String> {
    let value = |name| env::var_os(name).filter(|value| !value.is_empty());
    let kept = || {
        let folder = match value("HF_HOME") {
            Some(folder) => PathBuf::from(folder),
            None => PathBuf::from(value("HOME")?).join(".cache/huggingface"),
        };
        fs::read_to_string(folder.join("token")).ok()
    };
    let token = env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()).or_else(kept)?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// What the hub says a model is.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
}

/// One revision of a model, there and here: all files come from it, even if the model changes
/// meanwhile.
struct Revision<'a> {
    site: &'a Site,
    /// `{name}/resolve/{revision}`, to which a file's name is added.
    address: String,
    folder: &'a Path,
    offered: BTreeMap<String, Expected>,
    progress: &'a mut dyn FnMut(PullProgress<'_>),
}

impl<'a> Revision<'a> {
    /// Asks the hub for the newest revision, and makes `folder` ready for its files. Those that an
    /// earlier pull of the same revision left there are kept.
    fn find(
        site: &'a Site,
        name: &str,
        folder: &'a Path,
        progress: &'a mut dyn FnMut(PullProgress<'_>),
    ) -> Result<Self, String> {
        let address = format!("api/models/{name}/revision/main?blobs=true");
        let listing = site.read(&address, LISTING_BYTES_MAX)?;
        let listing: Listing = serde_json::from_slice(&listing)
            .map_err(|error| format!("the hub's list of files cannot be read: {error}"))?;
        let sha = listing.sha;
        if !(7..=64).contains(&sha.len()) || !sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(format!("the hub calls the revision {}", quoted(&sha)));
        }
        make_ready(folder, &sha).map_err(|error| format!("{}: {error}", folder.display()))?;
        let expected = |listed: &Listed| Expected {
            bytes: listed.size,
            sha256: listed.lfs.as_ref().and_then(|large| large.sha256.clone()),
            bytes_max: SMALL_BYTES_MAX,
        };
        let offered = listing.siblings.iter();
        let offered = offered.map(|listed| (listed.rfilename.clone(), expected(listed))).collect();
        Ok(Self { site, address: format!("{name}/resolve/{sha}"), folder, offered, progress })
    }

    fn fetch_all(&mut self) -> Result<(), String> {
        for file in ["config.json", "tokenizer.json"] {
            if !self.offered.contains_key(file) {
                return Err(format!("has no {file}"));
            }
        }
        for file in SMALL_FILES {
            if self.offered.contains_key(file) {
                self.fetch(file, SMALL_BYTES_MAX)?;
            }
        }
        if !self.offered.contains_key(INDEX) {
            if !self.offered.contains_key(SINGLE) {
                return Err(format!("has neither {SINGLE} nor {INDEX}"));
            }
            return self.fetch(SINGLE, u64::MAX);
        }
        for shard in shards(&self.folder.join(INDEX))? {
            self.fetch(&shard, u64::MAX)?;
        }
        Ok(())
    }

    /// Fetches one file, under a name that was checked.
    fn fetch(&mut self, file: &str, bytes_max: u64) -> Result<(), String> {
        let Some(expected) = self.offered.get(file) else {
            return Err(format!("{INDEX} names {file}, which the model does not have"));
        };
        let expected = Expected { bytes_max, ..expected.clone() };
        let address = format!("{}/{file}", self.address);
        let target = self.folder.join(file);
        let mut show = |bytes_done, bytes_total| {
            (self.progress)(PullProgress { file, bytes_done, bytes_total });
        };
        self.site
            .download(&address, &target, &expected, &mut show)
            .map_err(|reason| format!("{file}: {reason}"))
    }
}

/// Empties the folder unless it holds files of this revision.
fn make_ready(folder: &Path, revision: &str) -> std::io::Result<()> {
    let note = folder.join(REVISION);
    let is_folder = fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir());
    if is_folder && fs::read_to_string(&note).is_ok_and(|noted| noted == revision) {
        return Ok(());
    }
    if is_folder {
        fs::remove_dir_all(folder)?;
    } else if fs::symlink_metadata(folder).is_ok() {
        fs::remove_file(folder)?;
    }
    fs::create_dir(folder)?;
    fs::write(note, revision)
}

/// The files that a sharded model's index names.
fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bytes = fs::read(index).map_err(|error| format!("{}: {error}", index.display()))?;
    let index: Index =
        serde_json::from_slice(&bytes).map_err(|error| format!("{INDEX}: {error}"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    match shards.iter().find(|shard| !is_shard(shard)) {
        Some(name) => Err(format!("{INDEX} names {}, which is no name of a shard", quoted(name))),
        None => Ok(shards),
    }
}

/// A name from outside, as a message may show it.
fn quoted(name: &str) -> String {
    let start: String = name.chars().take(60).collect();
    let more = if start.len() < name.len() { "…" } else { "" };
    format!("{start:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub() {
        for name in ["HuggingFaceTB/SmolLM2-135M-Instruct", "a/b", "Qwen/Qwen2.5-0.5B"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["a", "a/b/c", "/a", "a/", "./a", "../a", "a b/c", "models/x.gguf", "~/x", ""] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn names_of_shards() {
        for name in ["model-00001-of-00002.safetensors", "a.safetensors", "x_1.safetensors"] {
            assert!(is_shard(name), "{name}");
        }
        let long = format!("{}.safetensors", "x".repeat(300));
        for name in [
            "",
            ".safetensors",
            "..",
            "../a.safetensors",
            "/a.safetensors",
            "a/b.safetensors",
            "a\\b.safetensors",
            "a\0.safetensors",
            "é.safetensors",
            "a%2f.safetensors",
            "config.json",
            &long,
        ] {
            assert!(!is_shard(name), "{name:?}");
        }
    }
}
