//! An output file that is moved, deleted or cut short while a job writes it: how that is noticed,
//! and what can still be kept.

use crate::error::JobError;
use crate::journal::{Journal, folder_of, names};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Whether the path names the open file and the file has all the bytes that were written to it.
pub(crate) fn is_sound(path: &Path, file: &File, bytes: u64) -> io::Result<bool> {
    Ok(names(path, file)? && file.metadata()?.len() >= bytes)
}

/// Keeps what can be kept of an output that is not sound; the error says where.
pub(crate) fn rescue(journal: &Journal, bytes: u64) -> JobError {
    let (path, file) = (journal.path.clone(), &journal.file);
    let metadata = match file.metadata() {
        Ok(metadata) => metadata,
        Err(source) => return journal.fail("inspect", source),
    };
    if names(&path, file).unwrap_or(false) {
        let (left_bytes, lost_bytes) = (metadata.len(), bytes.saturating_sub(metadata.len()));
        return JobError::OutputCut { path, left_bytes, lost_bytes };
    }
    if metadata.nlink() > 0
        && let Some(now) = name_of(file)
    {
        return JobError::OutputMoved { path, now };
    }
    match save(journal) {
        Ok(saved) => JobError::OutputDeleted { path, saved },
        Err(source) => JobError::OutputLost { path, source },
    }
}

/// The name that an open file has now, if the system knows it.
fn name_of(file: &File) -> Option<PathBuf> {
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    names(&name, file).unwrap_or(false).then_some(name)
}

/// Copies the open file into a new one beside its old place or, if its folder is gone too, among
/// the system's temporary files.
fn save(journal: &Journal) -> io::Result<PathBuf> {
    let mut prefix = journal.path.file_name().unwrap_or_default().to_owned();
    prefix.push(".saved-");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".jsonl");
    let copy = builder.tempfile_in(folder_of(&journal.path)).or_else(|_| builder.tempfile())?;
    let mut source = &journal.file;
    source.seek(SeekFrom::Start(0))?;
    io::copy(&mut source, &mut copy.as_file())?;
    copy.as_file().set_permissions(source.metadata()?.permissions())?;
    copy.as_file().sync_all()?;
    let (_, path) = copy.keep().map_err(|error| error.error)?;
    // By the name that the user knows the folder by.
    let beside = path.file_name().map(|name| journal.path.with_file_name(name));
    Ok(beside.filter(|path| path.exists()).unwrap_or(path))
}
