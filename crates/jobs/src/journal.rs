//! The output file as a journal: which results it holds already, its repair after a crash, and the
//! lock that keeps two runs apart. Writing new lines is the output's job.
//!
//! A line's `id` names the request it answers (see `key`), so sets of 16-byte keys are all that is
//! kept of a file of any size: some 36 MB for a million lines.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::error::JobError;
use crate::key::Key;

const BUFFER_BYTES: usize = 256 << 10;
/// How every line of ours begins.
const OPENING: &[u8] = b"{\"id\":\"batch_req_";

/// The results an output file holds from before.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// Lines with an answer.
    pub(crate) succeeded: HashSet<Key>,
    /// Lines that say why there is none (status 400): the same in every run, so they stand.
    pub(crate) failed: HashSet<Key>,
}

impl Results {
    fn contains(&self, key: Key) -> bool {
        self.succeeded.contains(&key) || self.failed.contains(&key)
    }
}

/// An output file, locked, with nothing but whole lines of ours in it.
#[derive(Debug)]
pub(crate) struct Journal {
    /// Opened for appending.
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

/// What one line of an output file turns out to be.
enum Written {
    Succeeded(Key),
    Failed(Key),
    /// The engine could not run it then; it is worth another try.
    Retry,
    /// Not JSON: a crash left it so.
    Broken,
    Foreign,
}

#[derive(Deserialize)]
struct WrittenLine {
    id: String,
    #[serde(rename = "custom_id")]
    _custom_id: String,
    response: Option<WrittenResponse>,
    #[serde(rename = "error")]
    _error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct WrittenResponse {
    status_code: u16,
}

impl Written {
    fn read(line: &[u8]) -> Self {
        match serde_json::from_slice::<WrittenLine>(line) {
            Ok(line) => match (Key::from_batch_id(&line.id), line.response) {
                (Some(key), Some(WrittenResponse { status_code: 200 })) => Self::Succeeded(key),
                (Some(key), Some(_)) => Self::Failed(key),
                (Some(_), None) => Self::Retry,
                (None, _) => Self::Foreign,
            },
            Err(error) if error.is_data() => Self::Foreign,
            Err(_) => Self::Broken,
        }
    }
}

impl Journal {
    /// Opens or creates an output file and takes what it holds; `overwrite` empties it first.
    pub(crate) fn open(path: &Path, overwrite: bool) -> Result<(Self, Results), JobError> {
        let mut journal = Self { file: open_locked(path)?, path: path.to_owned() };
        if overwrite {
            journal.truncate(0)?;
        }
        let (results, damaged) = journal.recover()?;
        if damaged {
            let mut kept = HashSet::new();
            journal.rewrite(|key| results.contains(key) && kept.insert(key))?;
        }
        Ok((journal, results))
    }

    /// Reads every line, cuts off what a crash left at the end, and tells whether other lines must
    /// go as well.
    fn recover(&mut self) -> Result<(Results, bool), JobError> {
        let mut results = Results::default();
        let mut reader = self.reader()?;
        let mut line = Vec::new();
        let (mut number, mut end_bytes, mut good_end_bytes) = (0u64, 0u64, 0u64);
        let (mut damaged, mut broken) = (false, false);
        loop {
            line.clear();
            let bytes = reader.read_until(b'\n', &mut line).map_err(|e| self.fail("read", e))?;
            if bytes == 0 {
                break;
            }
            number += 1;
            end_bytes += bytes as u64;
            let torn = !line.ends_with(b"\n");
            let written = match Written::read(&line) {
                // Even one that happens to be whole: the next line must not be glued to it.
                Written::Succeeded(_) | Written::Failed(_) | Written::Retry if torn => {
                    Written::Broken
                }
                Written::Broken if number == 1 && !(torn && begins_like_ours(&line)) => {
                    Written::Foreign
                }
                written => written,
            };
            match written {
                Written::Succeeded(key) | Written::Failed(key) if results.contains(key) => {
                    damaged = true;
                }
                Written::Succeeded(key) => _ = results.succeeded.insert(key),
                Written::Failed(key) => _ = results.failed.insert(key),
                Written::Retry => damaged = true,
                Written::Foreign => {
                    return Err(JobError::NotOurs { path: self.path.clone(), line: number });
                }
                Written::Broken => {
                    broken = true;
                    continue;
                }
            }
            // Broken lines with good ones after them: the file has a hole.
            damaged |= broken;
            good_end_bytes = end_bytes;
        }
        if good_end_bytes < end_bytes {
            self.truncate(good_end_bytes)?;
        }
        Ok((results, damaged))
    }

    /// Replaces the file, in one step, by one with only the lines whose key is to be kept.
    pub(crate) fn rewrite(&mut self, mut keep: impl FnMut(Key) -> bool) -> Result<(), JobError> {
        // Where the path is a link, what it leads to is replaced.
        let target = self.path.canonicalize().map_err(|e| self.fail("find", e))?;
        let mut temporary = target.clone().into_os_string();
        temporary.push(".rewrite");
        let temporary = PathBuf::from(temporary);
        let file = self.copy_lines(&temporary, &mut keep).map_err(|e| self.fail("rewrite", e))?;
        fs::rename(&temporary, &target).map_err(|e| self.fail("replace", e))?;
        sync_folder(&target).map_err(|e| self.fail("sync the folder of", e))?;
        self.file = file;
        Ok(())
    }

    fn copy_lines(&self, to: &Path, keep: &mut dyn FnMut(Key) -> bool) -> io::Result<File> {
        let copy = OpenOptions::new().create(true).append(true).open(to)?;
        copy.set_len(0)?;
        copy.set_permissions(self.file.metadata()?.permissions())?;
        lock(&copy)?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, File::open(&self.path)?);
        let mut writer = BufWriter::with_capacity(BUFFER_BYTES, &copy);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            if let Written::Succeeded(key) | Written::Failed(key) = Written::read(&line)
                && keep(key)
            {
                writer.write_all(&line)?;
            }
            line.clear();
        }
        writer.flush()?;
        drop(writer);
        copy.sync_all()?;
        Ok(copy)
    }

    fn reader(&self) -> Result<BufReader<File>, JobError> {
        let file = File::open(&self.path).map_err(|e| self.fail("read", e))?;
        Ok(BufReader::with_capacity(BUFFER_BYTES, file))
    }

    fn truncate(&mut self, bytes: u64) -> Result<(), JobError> {
        self.file.set_len(bytes).map_err(|e| self.fail("truncate", e))
    }

    /// Names the file in an error.
    pub(crate) fn fail(&self, action: &'static str, source: io::Error) -> JobError {
        JobError::Output { action, path: self.path.clone(), source }
    }
}

fn begins_like_ours(line: &[u8]) -> bool {
    let length = line.len().min(OPENING.len());
    line[..length] == OPENING[..length]
}

/// Opens for appending and locks; what it returns is what the path names.
fn open_locked(path: &Path) -> Result<File, JobError> {
    let fail = |action, source| JobError::Output { action, path: path.to_owned(), source };
    loop {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|source| {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            match folder {
                Some(folder) if source.kind() == io::ErrorKind::NotFound && !folder.exists() => {
                    JobError::NoFolder { path: path.to_owned(), folder: folder.to_owned() }
                }
                _ => fail("open", source),
            }
        })?;
        match lock(&file) {
            Ok(()) => {}
            Err(source) if source.kind() == io::ErrorKind::WouldBlock => {
                return Err(JobError::Busy { path: path.to_owned() });
            }
            Err(source) => return Err(fail("lock", source)),
        }
        // Another run may have replaced the file between our opening and our locking it.
        let ours = file.metadata().map_err(|source| fail("inspect", source))?;
        match fs::metadata(path) {
            Ok(named) if (named.dev(), named.ino()) == (ours.dev(), ours.ino()) => return Ok(file),
            _ => continue,
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
        // A file system without locks is no reason not to work on it.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}
