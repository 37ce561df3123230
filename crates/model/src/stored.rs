//! A model's tensors among the entries of mapped files: found and checked once, when the model is
//! opened, so that reading rows later cannot fail.

use crate::config::ModelConfig;
use crate::encoding::Encoding;
use crate::error::ModelError;
use crate::names;
use crate::source::{Entry, WeightFile};
use crate::weights::{LayerTensor, Tensor};
use half::bf16;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

/// Where a tensor's rows lie.
#[derive(Clone, Copy, Debug)]
struct Stored {
    file: usize,
    start: usize,
    encoding: Encoding,
    order: RowOrder,
}

/// In which order a file holds the rows of the q and k projections.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RowOrder {
    /// As the kernels need them: rotary pairs are (i, i + head_dim/2).
    AsIs,
    /// Within each head of this width: rotary pairs are (2i, 2i + 1).
    AdjacentPairs(usize),
}

impl RowOrder {
    /// The row of the file that holds a row of the tensor.
    fn stored_row(self, row: usize) -> usize {
        match self {
            RowOrder::AsIs => row,
            RowOrder::AdjacentPairs(head_dim) => {
                let (head, place) = (row / head_dim, row % head_dim);
                let (half, pair) = (place / (head_dim / 2), place % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }
}

/// The differences between sources in how a model's tensors are stored.
pub(crate) struct Layout {
    pub name: fn(Tensor) -> String,
    /// The q and k projections are stored for adjacent rotary pairs.
    pub adjacent_pairs: bool,
    /// A name of the source's own, beside the model's tensors.
    pub extra: Option<&'static str>,
}

/// All tensors of a model in mapped files.
#[derive(Debug)]
pub(crate) struct StoredTensors {
    files: Vec<WeightFile>,
    tensors: HashMap<Tensor, Stored>,
}

impl StoredTensors {
    /// Finds and checks every tensor that the configuration asks for, and refuses files with
    /// tensors that it does not explain.
    pub(crate) fn bind(
        source: &Path,
        config: &ModelConfig,
        files: Vec<WeightFile>,
        layout: &Layout,
    ) -> Result<Self, ModelError> {
        let mut tensors = HashMap::new();
        let mut explained = BTreeSet::new();
        explained.extend(layout.extra.map(str::to_owned));
        // A tied classifier may be stored as well; the embedding is used then.
        explained.insert((layout.name)(Tensor::Classifier));
        for tensor in Tensor::all(config) {
            let name = stored_name(&files, config, layout, tensor);
            let Some((file, entry)) = find(&files, &name) else {
                let path = if let [only] = files.as_slice() { only.file.path() } else { source };
                return Err(ModelError::tensor(path, &name, "is missing"));
            };
            let path = files[file].file.path();
            let encoding = check(entry, tensor, config)
                .map_err(|reason| ModelError::tensor(path, &name, reason))?;
            let order = match tensor {
                Tensor::Layer(_, kind) if layout.adjacent_pairs && is_rotated(kind) => {
                    RowOrder::AdjacentPairs(config.head_dim)
                }
                _ => RowOrder::AsIs,
            };
            tensors.insert(tensor, Stored { file, start: entry.bytes.start, encoding, order });
            explained.insert(name);
        }
        for file in &files {
            let unknown = |name: &&String| !explained.contains(*name) && !names::is_redundant(name);
            if let Some(name) = file.entries.keys().find(unknown) {
                let reason = format!("is not known in a {} model of this shape", config.family);
                return Err(ModelError::tensor(file.file.path(), name, reason));
            }
        }
        Ok(Self { files, tensors })
    }

    pub(crate) fn contains(&self, tensor: Tensor) -> bool {
        self.tensors.contains_key(&tensor)
    }

    /// Decodes rows of a matrix: (rows, inputs).
    pub(crate) fn read_rows(
        &self,
        tensor: Tensor,
        inputs: usize,
        rows: Range<usize>,
        out: &mut [bf16],
    ) {
        let stored = self.tensors[&tensor];
        let mut read = 0;
        for (row, out) in rows.zip(out.chunks_exact_mut(inputs)) {
            let bytes = self.row_bytes(stored, stored.order.stored_row(row), inputs);
            stored.encoding.decode_bf16(bytes, out);
            read += bytes.len();
        }
        self.files[stored.file].file.has_read(read);
    }

    /// Decodes a vector.
    pub(crate) fn read_vector(&self, tensor: Tensor, length: usize) -> Vec<f32> {
        let stored = self.tensors[&tensor];
        let mut values = vec![0.0; length];
        stored.encoding.decode(self.row_bytes(stored, 0, length), &mut values);
        match stored.order {
            RowOrder::AsIs => values,
            order => (0..length).map(|place| values[order.stored_row(place)]).collect(),
        }
    }

    fn row_bytes(&self, stored: Stored, row: usize, inputs: usize) -> &[u8] {
        let row_bytes = stored.encoding.bytes(inputs).expect("whole blocks, as checked by `bind`");
        let start = stored.start + row * row_bytes;
        &self.files[stored.file].file[start..start + row_bytes]
    }

    pub(crate) fn files(&self) -> &[WeightFile] {
        &self.files
    }
}

/// The name under which a tensor is stored. If two are tied, the one that exists.
fn stored_name(
    files: &[WeightFile],
    config: &ModelConfig,
    layout: &Layout,
    tensor: Tensor,
) -> String {
    let is_table = matches!(tensor, Tensor::Embedding | Tensor::Classifier);
    if !(is_table && config.tied_embeddings) {
        return (layout.name)(tensor);
    }
    let embedding = (layout.name)(Tensor::Embedding);
    let classifier = (layout.name)(Tensor::Classifier);
    let only_classifier = find(files, &embedding).is_none() && find(files, &classifier).is_some();
    if only_classifier { classifier } else { embedding }
}

fn find<'a>(files: &'a [WeightFile], name: &str) -> Option<(usize, &'a Entry)> {
    let in_file = |(index, file): (usize, &'a WeightFile)| Some((index, file.entries.get(name)?));
    files.iter().enumerate().find_map(in_file)
}

/// Whether the rows of this tensor go through the rotary embedding.
fn is_rotated(tensor: LayerTensor) -> bool {
    use LayerTensor::*;
    matches!(tensor, Query | Key | QueryBias | KeyBias)
}

/// Checks an entry's type and shape; its byte range was checked when the directory was read.
fn check(entry: &Entry, tensor: Tensor, config: &ModelConfig) -> Result<Encoding, String> {
    let encoding =
        entry.encoding.clone().map_err(|dtype| format!("type {dtype} is not supported"))?;
    let (outputs, inputs) = tensor.shape(config);
    let expected = if tensor.is_vector() { vec![inputs] } else { vec![outputs, inputs] };
    if entry.dimensions != expected {
        return Err(format!("shape {:?} where {expected:?} is wanted", entry.dimensions));
    }
    let wanted = encoding.bytes(inputs).and_then(|row_bytes| row_bytes.checked_mul(outputs));
    if wanted != Some(entry.bytes.len()) {
        return Err(format!("{} bytes do not hold shape {expected:?}", entry.bytes.len()));
    }
    Ok(encoding)
}
