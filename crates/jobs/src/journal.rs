//! The output file as a journal: which results it holds already, its repair after a crash, and the
//! lock that keeps two runs apart. Writing new lines is the output's job.
//!
//! A line's `id` names the request it answers (see `key`), so the reader keeps only sets of 16-byte
//! keys for a file of any size: about 36 MB for a million lines.

use crate::error::JobError;
use crate::key::Key;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

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
    pub(crate) fn len(&self) -> usize {
        self.succeeded.len() + self.failed.len()
    }

    pub(crate) fn contains(&self, key: Key) -> bool {
        self.succeeded.contains(&key) || self.failed.contains(&key)
    }
}

/// What must be mended in an output file before lines are added to it.
#[derive(Debug, Default)]
pub(crate) struct Damage {
    /// Length of the file as it was read.
    read_bytes: u64,
    /// Where the last whole line ends, if a crash left something after it.
    torn_at_bytes: Option<u64>,
    /// Whether there are lines to remove: broken ones, second copies, and those to be tried again.
    lines: bool,
}

/// An output file, locked.
#[derive(Debug)]
pub(crate) struct Journal {
    /// Opened for reading and appending.
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// Whether the file was created by this run. If no job starts after all, it is removed.
    created: bool,
}

/// A result line as the journal reads it back.
pub(crate) struct WrittenLine {
    pub(crate) key: Key,
    pub(crate) custom_id: String,
    /// The model that answered; `None` if the line is an error.
    pub(crate) model: Option<String>,
    pub(crate) succeeded: bool,
}

/// What one line of an output file turns out to be.
enum Written {
    Result(WrittenLine),
    /// The engine could not run it then; it is worth another try.
    Retry,
    /// Not JSON: a crash left it so.
    Broken,
    Foreign,
}

#[derive(Deserialize)]
struct LineFields {
    id: String,
    custom_id: String,
    response: Option<ResponseFields>,
    #[serde(rename = "error")]
    _error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct ResponseFields {
    status_code: u16,
    body: Option<BodyFields>,
}

#[derive(Deserialize)]
struct BodyFields {
    model: Option<String>,
}

impl Written {
    fn read(line: &[u8]) -> Self {
        let fields = match serde_json::from_slice::<LineFields>(line) {
            Ok(fields) => fields,
            Err(error) if error.is_data() => return Self::Foreign,
            Err(_) => return Self::Broken,
        };
        match (Key::from_batch_id(&fields.id), fields.response) {
            (Some(key), Some(response)) => Self::Result(WrittenLine {
                key,
                custom_id: fields.custom_id,
                model: response.body.and_then(|body| body.model),
                succeeded: response.status_code == 200,
            }),
            (Some(_), None) => Self::Retry,
            (None, _) => Self::Foreign,
        }
    }
}

impl Journal {
    /// Opens or creates an output file and locks it. Changes nothing in it.
    pub(crate) fn open(path: &Path) -> Result<Self, JobError> {
        let created = fs::metadata(path).is_err();
        Ok(Self { file: open_locked(path)?, path: path.to_owned(), created })
    }

    /// Reads every line. Changes nothing.
    pub(crate) fn read(&self) -> Result<(Results, Damage), JobError> {
        let mut results = Results::default();
        let mut damage = Damage::default();
        let mut reader = self.reader()?;
        let mut line = Vec::new();
        // A big file of something else need not be read to know that it is not ours.
        let start = reader.fill_buf().map_err(|e| self.fail("read", e))?;
        if start.first().is_some_and(|byte| *byte != b'{') {
            return Err(JobError::NotOurs { path: self.path.clone(), line: 1 });
        }
        let (mut number, mut end_bytes, mut good_end_bytes) = (0u64, 0u64, 0u64);
        let (mut broken, mut strange) = (false, false);
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
                Written::Result(_) | Written::Retry if torn => Written::Broken,
                Written::Broken => {
                    strange |= number == 1 && !(torn && begins_like_ours(&line));
                    Written::Broken
                }
                written => written,
            };
            match written {
                Written::Result(line) if results.contains(line.key) => damage.lines = true,
                Written::Result(line) if line.succeeded => _ = results.succeeded.insert(line.key),
                Written::Result(line) => _ = results.failed.insert(line.key),
                Written::Retry => damage.lines = true,
                Written::Foreign => {
                    return Err(JobError::NotOurs { path: self.path.clone(), line: number });
                }
                Written::Broken => {
                    broken = true;
                    continue;
                }
            }
            // Broken lines with good ones after them: the file has a hole.
            damage.lines |= broken;
            good_end_bytes = end_bytes;
        }
        // A first line that another program has spoilt is damage if results of ours follow it.
        if strange && results.len() == 0 {
            return Err(JobError::NotOurs { path: self.path.clone(), line: 1 });
        }
        damage.read_bytes = end_bytes;
        damage.torn_at_bytes = (good_end_bytes < end_bytes).then_some(good_end_bytes);
        Ok((results, damage))
    }

    /// Cuts off what a crash left at the end, and removes lines that hold no result. Fails, and changes
    /// nothing, if the file is not as long as it was when it was read.
    pub(crate) fn repair(&mut self, damage: &Damage) -> Result<(), JobError> {
        if self.bytes()? != damage.read_bytes {
            return Err(JobError::OutputChanged { path: self.path.clone() });
        }
        if let Some(end_bytes) = damage.torn_at_bytes {
            self.truncate(end_bytes)?;
        }
        if damage.lines {
            let mut kept = HashSet::new();
            self.rewrite(|line| kept.insert(line.key))?;
        }
        Ok(())
    }

    /// Removes everything.
    pub(crate) fn empty(&mut self) -> Result<(), JobError> {
        self.truncate(0)
    }

    /// A job writes to the file from now on: it stays.
    pub(crate) fn keep(&mut self) {
        self.created = false;
    }

    /// Calls `each` for every result line.
    pub(crate) fn for_each(&self, mut each: impl FnMut(WrittenLine)) -> Result<(), JobError> {
        let mut reader = self.reader()?;
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).map_err(|e| self.fail("read", e))? > 0 {
            if let Written::Result(written) = Written::read(&line) {
                each(written);
            }
            line.clear();
        }
        Ok(())
    }

    /// Replaces the file, in one step, by one with only the result lines that are to be kept.
    pub(crate) fn rewrite(
        &mut self,
        mut keep: impl FnMut(&WrittenLine) -> bool,
    ) -> Result<(), JobError> {
        // If the path is a link, its target is replaced.
        let target = self.path.canonicalize().map_err(|e| self.fail("find", e))?;
        let copy = self.copy_lines(&target, &mut keep).map_err(|e| self.fail("rewrite", e))?;
        let file = copy.persist(&target).map_err(|e| self.fail("replace", e.error))?;
        sync_folder(&target).map_err(|e| self.fail("sync the folder of", e))?;
        self.file = file;
        Ok(())
    }

    /// A new temporary file beside `target`; removed unless it takes the target's place.
    fn copy_lines(
        &self,
        target: &Path,
        keep: &mut dyn FnMut(&WrittenLine) -> bool,
    ) -> io::Result<tempfile::NamedTempFile> {
        let name = target.file_name().unwrap_or_default();
        let mut prefix = name.to_owned();
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".rewrite").append(true);
        let copy = builder.tempfile_in(folder_of(target))?;
        let like = self.file.metadata()?;
        // Only root may change a file's owner; for other users the owner is already right.
        _ = fchown(copy.as_file(), Some(like.uid()), Some(like.gid()));
        copy.as_file().set_permissions(like.permissions())?;
        lock(copy.as_file())?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, File::open(&self.path)?);
        let mut writer = BufWriter::with_capacity(BUFFER_BYTES, copy.as_file());
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            if let Written::Result(written) = Written::read(&line)
                && keep(&written)
            {
                writer.write_all(&line)?;
            }
            line.clear();
        }
        writer.flush()?;
        drop(writer);
        copy.as_file().sync_all()?;
        Ok(copy)
    }

    fn reader(&self) -> Result<BufReader<File>, JobError> {
        let file = File::open(&self.path).map_err(|e| self.fail("read", e))?;
        Ok(BufReader::with_capacity(BUFFER_BYTES, file))
    }

    /// Length of the file.
    pub(crate) fn bytes(&self) -> Result<u64, JobError> {
        Ok(self.file.metadata().map_err(|e| self.fail("inspect", e))?.len())
    }

    fn truncate(&mut self, bytes: u64) -> Result<(), JobError> {
        self.file.set_len(bytes).map_err(|e| self.fail("truncate", e))
    }

    /// Names the file in an error.
    pub(crate) fn fail(&self, action: &'static str, source: io::Error) -> JobError {
        JobError::Output { action, path: self.path.clone(), source }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let empty = |file: &File| file.metadata().is_ok_and(|metadata| metadata.len() == 0);
        if self.created && empty(&self.file) && names(&self.path, &self.file).unwrap_or(false) {
            // If the path is a link, the link existed before.
            _ = self.path.canonicalize().and_then(fs::remove_file);
        }
    }
}

/// Whether this is the file that the path names.
pub(crate) fn names(path: &Path, file: &File) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn begins_like_ours(line: &[u8]) -> bool {
    let length = line.len().min(OPENING.len());
    line[..length] == OPENING[..length]
}

/// Opens the file for appending and locks it. The returned file is the one the path names.
fn open_locked(path: &Path) -> Result<File, JobError> {
    let fail = |action, source| JobError::Output { action, path: path.to_owned(), source };
    loop {
        let mut options = OpenOptions::new();
        let file = options.create(true).read(true).append(true).open(path).map_err(|source| {
            let folder = folder_of(path);
            match source.kind() == io::ErrorKind::NotFound && !folder.exists() {
                true => JobError::NoFolder { path: path.to_owned(), folder: folder.to_owned() },
                false => fail("open", source),
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
        if names(path, &file).map_err(|source| fail("inspect", source))? {
            return Ok(file);
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
        // A file system without locks can still be used.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}
