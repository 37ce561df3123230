//! The identity of a model: a hash of everything in its files that can change a result.

use crate::chat::ChatTemplate;
use crate::hashes::Hashes;
use crate::model::Model;
use crate::source::WeightFile;
use crate::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A hash that two models share only if they give the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelIdentity([u8; 32]);

impl ModelIdentity {
    /// Of a model's configuration and all bytes of its weight files: what a node computes with.
    /// `progress` is told how many bytes of the files are hashed, and of how many.
    pub fn of_weights(model: &Model, progress: &mut (dyn FnMut(u64, u64) + Send)) -> Self {
        let mut parts = Parts::new("weights");
        parts.add(format!("{:?}", model.config()).as_bytes());
        let files = model.weight_files();
        if files.is_empty() {
            parts.add(model.name().as_bytes());
        }
        let total = files.iter().map(|file| file.file.len() as u64).sum();
        let state = Mutex::new((0, progress));
        let hashed = |bytes: u64| {
            let mut state = state.lock().expect("no panic while progress is shown");
            state.0 += bytes;
            let done = state.0;
            (state.1)(done, total);
        };
        let sha256s = hash_all(files, &hashed);
        for (file, sha256) in files.iter().zip(sha256s) {
            parts.add(&sha256);
            // Of a tensor that lies in two files, only one counts.
            for (tensor, entry) in &file.entries {
                parts.add(tensor.as_bytes());
                parts.add(&(entry.bytes.start as u64).to_le_bytes());
            }
        }
        parts.finish()
    }

    /// Of a whole model: its weights, and how text becomes tokens.
    pub fn of_model(weights: Self, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let mut parts = Parts::new("model");
        parts.add(&weights.0);
        parts.add(format!("{:?}", tokenizer.files_sha256()).as_bytes());
        parts.add(format!("{:?}", template.map(ChatTemplate::source)).as_bytes());
        parts.finish()
    }
}

/// The hashes of files, as many at once as there are cores.
fn hash_all(files: &[WeightFile], hashed: &(dyn Fn(u64) + Sync)) -> Vec<[u8; 32]> {
    let hashes = Hashes::kept();
    let next = AtomicUsize::new(0);
    let sha256s = Mutex::new(vec![[0; 32]; files.len()]);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(files.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(index) else { break };
                    let sha256 = hashes.sha256(&file.file, hashed);
                    sha256s.lock().expect("no panic with the lock held")[index] = sha256;
                }
            });
        }
    });
    sha256s.into_inner().expect("no panic with the lock held")
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// A hash of parts that cannot run into each other.
struct Parts(Sha256);

impl Parts {
    fn new(kind: &str) -> Self {
        let mut parts = Self(Sha256::new());
        parts.add(kind.as_bytes());
        parts
    }

    fn add(&mut self, part: &[u8]) {
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    fn finish(self) -> ModelIdentity {
        ModelIdentity(self.0.finalize().into())
    }
}
