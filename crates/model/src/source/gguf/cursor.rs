//! Reads little-endian values from untrusted bytes; never past their end.

use crate::error::ModelError;
use std::path::Path;

/// What is wrong with the bytes; the caller knows the file.
#[derive(Debug)]
pub(super) struct Malformed(String);

impl Malformed {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }

    pub(super) fn within(self, place: &str) -> Self {
        Self(format!("{place}: {}", self.0))
    }

    pub(super) fn at(self, path: &Path) -> ModelError {
        ModelError::malformed(path, self.0)
    }
}

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let rest = &self.bytes[self.position..];
        let Some(taken) = rest.get(..count) else {
            return Err(Malformed::new(format!(
                "{count} bytes wanted at byte {}, where {} are left",
                self.position,
                rest.len()
            )));
        };
        self.position += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn f32(&mut self) -> Result<f32, Malformed> {
        self.array().map(f32::from_le_bytes)
    }

    pub(super) fn f64(&mut self) -> Result<f64, Malformed> {
        self.array().map(f64::from_le_bytes)
    }

    /// A length and that many bytes of UTF-8.
    pub(super) fn string(&mut self, bytes_max: usize) -> Result<&'a str, Malformed> {
        let length = self.u64()?;
        if length > bytes_max as u64 {
            return Err(Malformed::new(format!("a string claims {length} bytes")));
        }
        let bytes = self.take(length as usize)?;
        std::str::from_utf8(bytes).map_err(|_| Malformed::new("a string is not UTF-8"))
    }

    /// A count of items that take at least `item_bytes_min` bytes each, so that it can be trusted
    /// for an allocation.
    pub(super) fn count(&mut self, item_bytes_min: usize) -> Result<usize, Malformed> {
        let count = self.u64()?;
        let left = (self.bytes.len() - self.position) / item_bytes_min;
        if count > left as u64 {
            return Err(Malformed::new(format!("{count} items claimed where {left} could fit")));
        }
        Ok(count as usize)
    }
}
