//! Where weights come from. Every source lists its tensors as entries of mapped files; how a
//! model's tensors are found among them is `model`'s business.

pub(crate) mod dummy;
pub mod gguf;
mod mapped;
pub(crate) mod safetensors;

use crate::encoding::Encoding;
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) use mapped::MappedFile;

/// A tensor of a mapped file, as its directory describes it.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Outermost first.
    pub dimensions: Vec<usize>,
    /// How it is stored, or the name of a type that cannot be decoded.
    pub encoding: Result<Encoding, String>,
    /// Bytes of the file, inside its bounds.
    pub bytes: Range<usize>,
}

/// A file of weights: its bytes and the tensors in them.
#[derive(Debug)]
pub(crate) struct WeightFile {
    pub file: MappedFile,
    pub entries: BTreeMap<String, Entry>,
}
