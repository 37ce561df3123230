//! JSON files of a model folder, read with a limit on their size.

use crate::error::ModelError;
use crate::regular;
use std::io::Read;
use std::path::Path;

const BYTES_MAX: u64 = 1 << 24;

/// The bytes of a JSON file.
pub(crate) fn read_bounded(path: &Path) -> Result<Vec<u8>, ModelError> {
    let file = regular::open(path).map_err(|source| ModelError::io(path, source))?;
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| ModelError::io(path, source))?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(ModelError::malformed(path, format!("is longer than {BYTES_MAX} bytes")));
    }
    Ok(bytes)
}
