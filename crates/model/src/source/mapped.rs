//! A file mapped into memory: the crate's one unsafe spot.

use crate::error::ModelError;
use crate::regular;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::{File, Metadata};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// After so many bytes, the pages that were read are let go.
const HELD_BYTES: usize = 256 << 20;

/// The bytes of a read-only mapped file; pages are read when they are touched.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    /// Bytes read so far.
    read_bytes: AtomicUsize,
}

impl MappedFile {
    /// Maps a file that is not empty.
    #[allow(unsafe_code)]
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let file = regular::open(path).map_err(|source| ModelError::io(path, source))?;
        let about = file.metadata().map_err(|source| ModelError::io(path, source))?;
        if about.len() == 0 {
            return Err(ModelError::malformed(path, "the file is empty"));
        }
        // SAFETY: the map is private and read-only, and every access is bounds-checked against the
        // length mapped here. Nothing in this process writes to model files. Another process that
        // truncates the file while it is mapped makes reads fault (SIGBUS), and one that rewrites
        // it changes weights under us: the user must avoid both, as with every mapped model.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| ModelError::io(path, source))?;
        Ok(Self { path: path.to_owned(), file, map, read_bytes: AtomicUsize::new(0) })
    }

    /// Says that so many bytes were read, which are not needed soon. Now and then all pages are let go, so that a process
    /// that goes through a file once does not hold all of it.
    #[allow(unsafe_code)]
    pub(crate) fn has_read(&self, bytes: usize) {
        let before = self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / HELD_BYTES != (before + bytes) / HELD_BYTES {
            // SAFETY: the map is of a file and nobody writes to it. So a page that was let go has the same bytes when
            // it is read again.
            let advised = unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // A refusal costs memory, never correctness.
            _ = advised;
        }
    }

    /// What the file that is mapped looks like now, whatever is at its path.
    pub(crate) fn metadata(&self) -> std::io::Result<Metadata> {
        self.file.metadata()
    }

    /// The path it was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
