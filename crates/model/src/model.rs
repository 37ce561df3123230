//! A model that is ready to be read: its configuration and its weights, from any source.

use crate::config::{FromTensors, ModelConfig, ROPE_DIVISORS, has_adjacent_pairs};
use crate::error::ModelError;
use crate::source::gguf::{self, Metadata};
use crate::source::{MappedFile, WeightFile, dummy, safetensors};
use crate::stored::{Layout, StoredTensors};
use crate::weights::{LayerTensor, Tensor};
use crate::{json, names};
use half::bf16;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A model's configuration and weights. Files are mapped, and only what is asked for is read.
#[derive(Debug)]
pub struct Model {
    name: String,
    config: ModelConfig,
    source: Source,
    weights: Weights,
}

/// Where a model comes from, for code that reads more than weights from there.
#[derive(Debug)]
pub enum Source {
    /// A GGUF file.
    Gguf {
        /// The file.
        path: PathBuf,
        /// Its metadata, the tokenizer's included.
        metadata: Metadata,
    },
    /// A Hugging Face folder.
    Folder(PathBuf),
    /// Random weights.
    Dummy,
    /// Another machine.
    Elsewhere,
}

/// Weights that are read from another machine, as the one that has the files reads them.
pub trait ElsewhereWeights: Send + Sync + std::fmt::Debug {
    /// Rows of a matrix into `out`: (rows, inputs). The error is a sentence.
    fn read_rows(&self, tensor: Tensor, rows: Range<usize>, out: &mut [bf16])
    -> Result<(), String>;

    /// A norm or a bias of this length.
    fn read_vector(&self, tensor: Tensor, length: usize) -> Result<Vec<f32>, String>;
}

#[derive(Debug)]
enum Weights {
    Stored(StoredTensors),
    Dummy,
    Elsewhere(Box<dyn ElsewhereWeights>),
}

impl Model {
    /// Opens a Hugging Face folder or a GGUF file, and checks all tensors against the configuration.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let about = std::fs::metadata(path).map_err(|source| ModelError::io(path, source))?;
        if about.is_dir() { Self::open_folder(path) } else { Self::open_gguf(path) }
    }

    /// A model of a well-known shape with random weights, the same every time.
    pub fn dummy(shape: &str) -> Result<Self, ModelError> {
        let config = ModelConfig::shape(shape).ok_or_else(|| ModelError::UnknownShape {
            shape: shape.to_owned(),
            known: ModelConfig::shape_names().collect::<Vec<_>>().join(", "),
        })?;
        Ok(Self::random(format!("dummy:{shape}"), config))
    }

    /// A model of any shape with random weights, the same every time.
    pub fn random(name: String, config: ModelConfig) -> Self {
        Self { name, config, source: Source::Dummy, weights: Weights::Dummy }
    }

    /// A model whose weights another machine reads.
    pub fn elsewhere(
        name: String,
        config: ModelConfig,
        weights: Box<dyn ElsewhereWeights>,
    ) -> Self {
        Self { name, config, source: Source::Elsewhere, weights: Weights::Elsewhere(weights) }
    }

    fn open_folder(folder: &Path) -> Result<Self, ModelError> {
        let config_path = folder.join("config.json");
        if !config_path.exists() {
            return Err(no_model(folder));
        }
        let config = json::read_bounded(&config_path)?;
        let generation_path = folder.join("generation_config.json");
        let generation = match generation_path.exists() {
            true => Some(json::read_bounded(&generation_path)?),
            false => None,
        };
        let config = ModelConfig::from_hf_json(&config, generation.as_deref())
            .map_err(|source| ModelError::config(&config_path, source))?;
        let files = safetensors::open_folder(folder)?;
        let layout = Layout { name: names::in_safetensors, adjacent_pairs: false, extra: None };
        let stored = StoredTensors::bind(folder, &config, files, &layout)?;
        let source = Source::Folder(folder.to_owned());
        Ok(Self { name: name_of(folder), config, source, weights: Weights::Stored(stored) })
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let (metadata, file) = gguf::read(MappedFile::open(path)?)?;
        let from_tensors = from_tensors(path, &file)?;
        let config = ModelConfig::from_gguf(&metadata, from_tensors)
            .map_err(|source| ModelError::config(path, source))?;
        let layout = Layout {
            name: names::in_gguf,
            adjacent_pairs: has_adjacent_pairs(&config),
            extra: Some(ROPE_DIVISORS),
        };
        let stored = StoredTensors::bind(path, &config, vec![file], &layout)?;
        let stated = metadata.string("general.name").filter(|name| !name.is_empty());
        let name = stated.map_or_else(|| name_of(path), str::to_owned);
        let source = Source::Gguf { path: path.to_owned(), metadata };
        Ok(Self { name, config, source, weights: Weights::Stored(stored) })
    }

    /// Shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The name the file gives itself, the folder's name, or `dummy:SHAPE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the model comes from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The files its weights are in; none where they are made up or elsewhere.
    pub(crate) fn weight_files(&self) -> &[WeightFile] {
        match &self.weights {
            Weights::Stored(stored) => stored.files(),
            Weights::Dummy | Weights::Elsewhere(_) => &[],
        }
    }

    /// Rows of a matrix, decoded to bf16, into `out`: (rows, inputs). Touches only their bytes.
    pub fn read_rows(
        &self,
        tensor: Tensor,
        rows: Range<usize>,
        out: &mut [bf16],
    ) -> Result<(), ModelError> {
        let (outputs, inputs) = self.shape_of(tensor)?;
        if tensor.is_vector() {
            return Err(self.unreadable(tensor, "is a vector and has no rows"));
        }
        if rows.start > rows.end || rows.end > outputs {
            return Err(self.unreadable(tensor, format!("has {outputs} rows, not {rows:?}")));
        }
        if out.len() != rows.len() * inputs {
            let wanted = rows.len() * inputs;
            let reason = format!("{} values of room where {wanted} are wanted", out.len());
            return Err(self.unreadable(tensor, reason));
        }
        match &self.weights {
            Weights::Stored(stored) => stored.read_rows(tensor, inputs, rows, out),
            Weights::Dummy => dummy::fill_rows(self.dummy_table(tensor), inputs, rows, out),
            Weights::Elsewhere(weights) => {
                let read = weights.read_rows(tensor, rows, out);
                read.map_err(|reason| self.unreadable(tensor, reason))?;
            }
        }
        Ok(())
    }

    /// A norm or a bias as f32.
    pub fn read_vector(&self, tensor: Tensor) -> Result<Vec<f32>, ModelError> {
        let (_, length) = self.shape_of(tensor)?;
        if !tensor.is_vector() {
            return Err(self.unreadable(tensor, "is a matrix, not a vector"));
        }
        match &self.weights {
            Weights::Stored(stored) => Ok(stored.read_vector(tensor, length)),
            Weights::Dummy => Ok(dummy::vector(tensor, length)),
            Weights::Elsewhere(weights) => weights
                .read_vector(tensor, length)
                .map_err(|reason| self.unreadable(tensor, reason)),
        }
    }

    /// The shape of a tensor that this model has.
    fn shape_of(&self, tensor: Tensor) -> Result<(usize, usize), ModelError> {
        let present = match &self.weights {
            Weights::Stored(stored) => stored.contains(tensor),
            Weights::Dummy | Weights::Elsewhere(_) => {
                Tensor::all(&self.config).any(|other| other == tensor)
            }
        };
        match present {
            true => Ok(tensor.shape(&self.config)),
            false => Err(self.unreadable(tensor, "is not part of this model")),
        }
    }

    /// The embedding in place of a classifier that is tied to it.
    fn dummy_table(&self, tensor: Tensor) -> Tensor {
        let tied = self.config.tied_embeddings && tensor == Tensor::Classifier;
        if tied { Tensor::Embedding } else { tensor }
    }

    fn unreadable(&self, tensor: Tensor, reason: impl Into<String>) -> ModelError {
        ModelError::Read {
            model: self.name.clone(),
            tensor: tensor.to_string(),
            reason: reason.into(),
        }
    }
}

/// What a GGUF file says by the tensors it holds.
fn from_tensors(path: &Path, file: &WeightFile) -> Result<FromTensors, ModelError> {
    let holds = |tensor| file.entries.contains_key(&names::in_gguf(tensor));
    let rope_divisors = match file.entries.get(ROPE_DIVISORS) {
        None => None,
        Some(entry) => {
            let wrong = |reason| ModelError::tensor(path, ROPE_DIVISORS, reason);
            let &[length] = entry.dimensions.as_slice() else {
                return Err(wrong(format!("shape {:?} is not a vector's", entry.dimensions)));
            };
            let encoding = entry.encoding.clone().map_err(wrong)?;
            let mut divisors = vec![0.0; length];
            encoding.decode(&file.file[entry.bytes.clone()], &mut divisors);
            Some(divisors)
        }
    };
    Ok(FromTensors {
        tied_embeddings: !holds(Tensor::Classifier),
        qkv_bias: holds(Tensor::Layer(0, LayerTensor::QueryBias)),
        qk_norm: holds(Tensor::Layer(0, LayerTensor::QueryNorm)),
        rope_divisors,
    })
}

/// Why a folder without a configuration cannot be opened; it may hold a file that can.
fn no_model(folder: &Path) -> ModelError {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "gguf"));
    files.sort();
    let hint = files.first().map(|path| format!("; did you mean {}?", path.display()));
    ModelError::NoModel { folder: folder.to_owned(), hint: hint.unwrap_or_default() }
}

/// The last part of a path, without a file's extension.
fn name_of(path: &Path) -> String {
    let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if canonical.is_dir() { canonical.file_name() } else { canonical.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
