//! Safetensors files: one file, or the shards that an index names.

use super::{Entry, MappedFile, WeightFile};
use crate::encoding::Encoding;
use crate::error::ModelError;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// The header of a shard of the largest models takes a few hundred kilobytes.
const HEADER_BYTES_MAX: usize = 1 << 25;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Maps the folder's weight files and reads their directories.
pub(crate) fn open_folder(folder: &Path) -> Result<Vec<WeightFile>, ModelError> {
    let index = folder.join(INDEX);
    if index.is_file() {
        return open_sharded(folder, &index);
    }
    let single = folder.join(SINGLE);
    if !single.is_file() {
        return Err(ModelError::malformed(folder, format!("holds neither {SINGLE} nor {INDEX}")));
    }
    Ok(vec![read(MappedFile::open(&single)?)?])
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn open_sharded(folder: &Path, index_path: &Path) -> Result<Vec<WeightFile>, ModelError> {
    let bytes = crate::json::read_bounded(index_path)?;
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|wrong| ModelError::malformed(index_path, wrong.to_string()))?;
    let names: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let mut files = BTreeMap::new();
    for name in names {
        // A name with a folder in it could point anywhere on the machine.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(ModelError::malformed(index_path, format!("{name:?} is not a file name")));
        }
        files.insert(name, read(MappedFile::open(&folder.join(name))?)?);
    }
    for (tensor, name) in &index.weight_map {
        let file = &files[name.as_str()];
        if !file.entries.contains_key(tensor) {
            let reason = format!("is not in this file, where {INDEX} puts it");
            return Err(ModelError::tensor(file.file.path(), tensor, reason));
        }
    }
    // If a tensor is in two files, the index says which one counts.
    for (name, file) in &mut files {
        let here = |tensor: &str| index.weight_map.get(tensor).is_none_or(|at| at == name);
        file.entries.retain(|tensor, _| here(tensor));
    }
    Ok(files.into_values().collect())
}

#[derive(serde::Deserialize)]
struct Listed {
    dtype: String,
    /// Outermost first.
    shape: Vec<usize>,
    /// From the end of the header.
    data_offsets: (usize, usize),
}

/// Reads a mapped file's header.
fn read(file: MappedFile) -> Result<WeightFile, ModelError> {
    let path = file.path();
    let data_start = data_start(&file).map_err(|reason| ModelError::malformed(path, reason))?;
    let header: Header = serde_json::from_slice(&file[8..data_start])
        .map_err(|wrong| ModelError::malformed(path, format!("header: {wrong}")))?;
    let mut entries = BTreeMap::new();
    for (name, listed) in header.0 {
        let entry = locate(&listed, data_start, file.len())
            .map_err(|reason| ModelError::tensor(path, &name, reason))?;
        entries.insert(name, entry);
    }
    Ok(WeightFile { entries, file })
}

/// The tensors a header lists. Read without an intermediate tree, which for a header of nonsense
/// would take many times the header's bytes.
struct Header(BTreeMap<String, Listed>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object with the tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let wrong = |what: String| A::Error::custom(format!("tensor {name}: {what}"));
            let listed = map.next_value().map_err(|error| wrong(error.to_string()))?;
            if tensors.contains_key(&name) {
                return Err(wrong("is listed twice".to_owned()));
            }
            tensors.insert(name, listed);
        }
        Ok(Header(tensors))
    }
}

/// Eight bytes of header length, the header, then the tensors.
fn data_start(bytes: &[u8]) -> Result<usize, String> {
    let length = bytes.first_chunk::<8>().ok_or("is too short for a safetensors header")?;
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX as u64 {
        return Err(format!("claims a header of {length} bytes"));
    }
    let end = 8 + length as usize;
    if end > bytes.len() {
        return Err(format!("the header of {length} bytes lies past the end of the file"));
    }
    Ok(end)
}

fn locate(listed: &Listed, data_start: usize, file_bytes: usize) -> Result<Entry, String> {
    let (start, end) = listed.data_offsets;
    let bytes: Range<usize> = data_start
        .checked_add(start)
        .zip(data_start.checked_add(end))
        .map(|(start, end)| start..end)
        .filter(|range| range.start <= range.end && range.end <= file_bytes)
        .ok_or_else(|| format!("bytes {start} to {end} lie past the end of the file"))?;
    let encoding = Encoding::from_safetensors(&listed.dtype).ok_or_else(|| listed.dtype.clone());
    if let Ok(encoding) = encoding {
        let wanted = listed
            .shape
            .iter()
            .try_fold(1, |values: usize, &size| values.checked_mul(size))
            .and_then(|values| encoding.bytes(values))
            .ok_or_else(|| format!("shape {:?} overflows", listed.shape))?;
        if wanted != bytes.len() {
            let (shape, dtype, held) = (&listed.shape, &listed.dtype, bytes.len());
            return Err(format!("shape {shape:?} of {dtype} takes {wanted} bytes, not {held}"));
        }
    }
    Ok(Entry { dimensions: listed.shape.clone(), encoding, bytes })
}
