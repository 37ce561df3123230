//! Models of the Hugging Face hub: `org/name` to a folder of the cache.

use std::collections::BTreeSet;
use std::env;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{CatalogueError, PullProgress, cache};

/// Fetched where the model has them, in this order; the weights come last.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Whether `name` has the form `org/name`.
pub(super) fn is_name(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
        && !name.ends_with(".gguf")
}

/// The folder of a model, fetched where it is not in the cache.
pub(super) fn pull(
    name: &str,
    cache_folder: &Path,
    progress: &mut dyn FnMut(PullProgress<'_>),
) -> Result<PathBuf, CatalogueError> {
    let wrong = |reason: String| CatalogueError::Hub { name: name.to_owned(), reason };
    let store = Cache::new(cache_folder.join("hub"));
    let main = store.model(name.to_owned());
    if let Some(folder) = folder_of(&main) {
        return Ok(folder);
    }
    let _lock = cache::lock(&store.path().join(Repo::model(name.to_owned()).folder_name()))?;
    // Whoever held the lock before may have fetched it.
    if let Some(folder) = folder_of(&main) {
        return Ok(folder);
    }
    let mut builder =
        ApiBuilder::from_cache(store.clone()).with_progress(false).with_token(token());
    if let Ok(endpoint) = env::var("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint);
    }
    let api = builder.build().map_err(|error| wrong(error.to_string()))?;
    let info = api.model(name.to_owned()).info().map_err(|error| wrong(error.to_string()))?;
    // One revision for all files, even if the model changes meanwhile.
    let repo = Repo::with_revision(name.to_owned(), RepoType::Model, info.sha.clone());
    let pinned = Pinned { api: api.repo(repo.clone()), cache: store.repo(repo) };
    let offered: BTreeSet<&str> =
        info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    pinned.fetch_all(&offered, progress).map_err(wrong)?;
    // `main` is set last, so that a model found in the cache is complete.
    main.create_ref(&info.sha).map_err(|error| wrong(error.to_string()))?;
    folder_of(&main).ok_or_else(|| wrong("the fetched files are not in the cache".to_owned()))
}

fn folder_of(repo: &CacheRepo) -> Option<PathBuf> {
    repo.get("config.json")?.parent().map(Path::to_owned)
}

/// `HF_TOKEN`, else the one that Hugging Face's own tools keep.
fn token() -> Option<String> {
    let given = env::var("HF_TOKEN").ok().filter(|token| !token.is_empty());
    let home = |name| env::var_os(name).filter(|value| !value.is_empty());
    given.or_else(|| {
        let folder = match home("HF_HOME") {
            Some(folder) => PathBuf::from(folder),
            None => PathBuf::from(home("HOME")?).join(".cache/huggingface"),
        };
        Cache::new(folder.join("hub")).token()
    })
}

/// One revision of a model, there and here.
struct Pinned {
    api: ApiRepo,
    cache: CacheRepo,
}

impl Pinned {
    fn fetch_all(
        &self,
        offered: &BTreeSet<&str>,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<(), String> {
        for file in ["config.json", "tokenizer.json"] {
            if !offered.contains(file) {
                return Err(format!("has no {file}"));
            }
        }
        for file in SMALL_FILES.into_iter().filter(|file| offered.contains(file)) {
            self.fetch(file, progress)?;
        }
        if !offered.contains(INDEX) {
            if !offered.contains(SINGLE) {
                return Err(format!("has neither {SINGLE} nor {INDEX}"));
            }
            return self.fetch(SINGLE, progress).map(|_| ());
        }
        let index = self.fetch(INDEX, progress)?;
        for shard in shards(&index)? {
            if !offered.contains(shard.as_str()) {
                return Err(format!("{INDEX} names {shard}, which the model does not have"));
            }
            self.fetch(&shard, progress)?;
        }
        Ok(())
    }

    fn fetch(
        &self,
        file: &str,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<PathBuf, String> {
        if let Some(path) = self.cache.get(file) {
            return Ok(path);
        }
        let counter = Counter { file, bytes_done: 0, bytes_total: 0, progress };
        let path = self
            .api
            .download_with_progress(file, counter)
            .map_err(|error| format!("{file}: {error}"))?;
        verify(&path).map_err(|reason| format!("{file}: {reason}"))?;
        Ok(path)
    }
}

/// Compares a large file with its checksum, which is the name that the cache keeps it under (small
/// files have another kind of name); removes it if it is not what it should be.
fn verify(link: &Path) -> Result<(), String> {
    let kept = link.canonicalize().map_err(|error| error.to_string())?;
    let name = kept.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name.len() != 64 || !name.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut hash = Sha256::new();
    File::open(&kept)
        .and_then(|mut file| std::io::copy(&mut file, &mut HashWriter(&mut hash)))
        .map_err(|error| error.to_string())?;
    let digest = cache::hexadecimal(&hash.finalize());
    if digest == name {
        return Ok(());
    }
    for wrong in BTreeSet::from([link, &kept]) {
        std::fs::remove_file(wrong).map_err(|error| error.to_string())?;
    }
    Err(format!("has sha256 {digest}, not {name}; try again"))
}

/// Hashes what is written to it.
struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The files that a sharded model's index names.
fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let bytes = std::fs::read(index).map_err(|error| format!("{}: {error}", index.display()))?;
    let index: Index =
        serde_json::from_slice(&bytes).map_err(|error| format!("{}: {error}", index.display()))?;
    Ok(index.weight_map.into_values().collect())
}

/// Reports one file's bytes as they come.
struct Counter<'a> {
    file: &'a str,
    bytes_done: u64,
    bytes_total: u64,
    progress: &'a mut dyn FnMut(PullProgress<'_>),
}

impl Progress for Counter<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        self.bytes_total = size as u64;
        self.bytes_done = 0;
    }

    fn update(&mut self, size: usize) {
        self.bytes_done += size as u64;
        (self.progress)(PullProgress {
            file: self.file,
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
        });
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_named_for_their_checksum_are_held_to_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let check = |name: &str, verified: bool| {
            let path = folder.path().join(name);
            std::fs::write(&path, "the model").expect("a file");
            assert_eq!(verify(&path).is_ok(), verified, "{name}");
            assert_eq!(path.exists(), verified, "{name}");
        };
        check("36cc7e3d6f6200756c81e18470827e9dac1c602fcd87761cbb0b8f015611c098", true);
        check(&"0".repeat(64), false);
        check("0123456789abcdef0123456789abcdef01234567", true);
    }

    #[test]
    fn names_of_the_hub() {
        for name in ["HuggingFaceTB/SmolLM2-135M-Instruct", "a/b", "Qwen/Qwen2.5-0.5B"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["a", "a/b/c", "/a", "a/", "./a", "../a", "a b/c", "models/x.gguf", "~/x", ""] {
            assert!(!is_name(name), "{name}");
        }
    }
}
