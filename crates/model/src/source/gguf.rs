//! GGUF files, versions 2 and 3: the header, the metadata, the tensor directory.
//! Every count and length is checked against what the file can hold before anything is allocated.

mod cursor;
mod metadata;

pub use metadata::{Metadata, Value};

use super::{Entry, MappedFile, WeightFile};
use crate::encoding::Encoding;
use crate::error::ModelError;
use cursor::{Cursor, Malformed};
use std::collections::BTreeMap;
use std::path::Path;

/// The first four bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const METADATA_COUNT_MAX: u64 = 1 << 16;
const TENSOR_COUNT_MAX: u64 = 1 << 20;
const TENSOR_NAME_BYTES_MAX: usize = 1024;
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// Reads a mapped file's metadata and tensor directory.
pub(crate) fn read(file: MappedFile) -> Result<(Metadata, WeightFile), ModelError> {
    let mut cursor = Cursor::new(&file);
    let path = file.path();
    let header = read_header(&mut cursor).map_err(|wrong| wrong.at(path))?;
    let metadata =
        Metadata::read(&mut cursor, header.metadata_count).map_err(|wrong| wrong.at(path))?;
    refuse_split(path, &metadata)?;
    let tensors =
        read_directory(&mut cursor, header.tensor_count).map_err(|wrong| wrong.at(path))?;
    let alignment = alignment(&metadata).map_err(|wrong| wrong.at(path))?;
    let data_start = cursor.position().next_multiple_of(alignment);
    let entries = locate(path, file.len(), data_start, alignment, tensors)?;
    Ok((metadata, WeightFile { file, entries }))
}

struct Header {
    tensor_count: u64,
    metadata_count: u64,
}

fn read_header(cursor: &mut Cursor<'_>) -> Result<Header, Malformed> {
    if cursor.take(4).ok() != Some(MAGIC.as_slice()) {
        return Err(Malformed::new(
            "not a GGUF file (a Hugging Face model is given by its folder)",
        ));
    }
    let version = cursor.u32()?;
    if VERSIONS.contains(&version.swap_bytes()) {
        return Err(Malformed::new("big-endian GGUF files are not supported"));
    }
    if !VERSIONS.contains(&version) {
        return Err(Malformed::new(format!(
            "GGUF version {version} is not supported (2 and 3 are)"
        )));
    }
    let tensor_count = cursor.u64()?;
    if tensor_count > TENSOR_COUNT_MAX {
        return Err(Malformed::new(format!("claims to hold {tensor_count} tensors")));
    }
    let metadata_count = cursor.u64()?;
    if metadata_count > METADATA_COUNT_MAX {
        return Err(Malformed::new(format!("claims to hold {metadata_count} metadata entries")));
    }
    Ok(Header { tensor_count, metadata_count })
}

fn refuse_split(path: &Path, metadata: &Metadata) -> Result<(), ModelError> {
    match metadata.unsigned("split.count") {
        Some(count) if count > 1 => Err(ModelError::malformed(
            path,
            format!(
                "is one of {count} files of a split GGUF, which is not supported: \
                 merge them into one file first"
            ),
        )),
        _ => Ok(()),
    }
}

fn alignment(metadata: &Metadata) -> Result<usize, Malformed> {
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT_DEFAULT,
        Some(_) => metadata.unsigned("general.alignment").unwrap_or(0),
    };
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        return Err(Malformed::new(format!(
            "general.alignment: must be a power of two up to {ALIGNMENT_MAX}"
        )));
    }
    Ok(alignment as usize)
}

/// A tensor as the directory lists it; nothing in it has been checked yet.
struct Listed {
    name: String,
    /// Innermost first.
    dimensions: Vec<u64>,
    type_number: u32,
    /// From the start of the data section.
    offset: u64,
}

fn read_directory(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Listed>, Malformed> {
    let mut tensors = Vec::new();
    for index in 0..count {
        let in_tensor =
            |wrong: Malformed| wrong.within(&format!("tensor {index} of the directory"));
        tensors.push(read_listed(cursor).map_err(in_tensor)?);
    }
    Ok(tensors)
}

fn read_listed(cursor: &mut Cursor<'_>) -> Result<Listed, Malformed> {
    let name = cursor.string(TENSOR_NAME_BYTES_MAX)?.to_owned();
    let dimension_count = cursor.u32()?;
    if dimension_count > DIMENSIONS_MAX {
        return Err(Malformed::new(format!("{name} claims {dimension_count} dimensions")));
    }
    let mut dimensions = Vec::new();
    for _ in 0..dimension_count {
        dimensions.push(cursor.u64()?);
    }
    Ok(Listed { name, dimensions, type_number: cursor.u32()?, offset: cursor.u64()? })
}

fn locate(
    path: &Path,
    file_bytes: usize,
    data_start: usize,
    alignment: usize,
    tensors: Vec<Listed>,
) -> Result<BTreeMap<String, Entry>, ModelError> {
    let mut entries = BTreeMap::new();
    for tensor in tensors {
        let wrong = |reason: String| ModelError::tensor(path, &tensor.name, reason);
        let encoding = Encoding::from_gguf(tensor.type_number)
            .map_err(|name| wrong(format!("type {name} is not supported")))?;
        let bytes = byte_count(&tensor, encoding).map_err(wrong)?;
        if !tensor.offset.is_multiple_of(alignment as u64) {
            return Err(wrong(format!("offset {} is not aligned to {alignment}", tensor.offset)));
        }
        let range = usize::try_from(tensor.offset)
            .ok()
            .and_then(|offset| data_start.checked_add(offset))
            .and_then(|start| Some(start..start.checked_add(bytes)?))
            .filter(|range| range.end <= file_bytes)
            .ok_or_else(|| {
                let offset = tensor.offset;
                wrong(format!("{bytes} bytes at offset {offset} lie past the end of the file"))
            })?;
        let dimensions = tensor.dimensions.iter().rev().map(|&size| size as usize).collect();
        let entry = Entry { dimensions, encoding: Ok(encoding), bytes: range };
        if entries.insert(tensor.name.clone(), entry).is_some() {
            return Err(wrong("is listed twice".to_owned()));
        }
    }
    Ok(entries)
}

/// Bytes of a tensor; rows (the innermost dimension) must fill whole blocks.
fn byte_count(tensor: &Listed, encoding: Encoding) -> Result<usize, String> {
    let dimensions = &tensor.dimensions;
    let overflow = || format!("shape {dimensions:?} overflows");
    let mut sizes = dimensions.iter().map(|&size| usize::try_from(size));
    let inner = sizes.next().unwrap_or(Ok(1)).map_err(|_| overflow())?;
    if !inner.is_multiple_of(encoding.block_values()) {
        return Err(format!("rows of {inner} values do not fill whole {encoding:?} blocks"));
    }
    let mut bytes = encoding.bytes(inner).ok_or_else(overflow)?;
    for size in sizes {
        let size = size.map_err(|_| overflow())?;
        bytes = bytes.checked_mul(size).ok_or_else(overflow)?;
    }
    Ok(bytes)
}
