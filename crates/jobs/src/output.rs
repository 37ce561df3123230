//! Where result lines go: each is written whole, at once, and synced within a second. The file is
//! watched meanwhile, so that results do not go into a file that nobody will find.

use crate::error::JobError;
use crate::journal::{Damage, Journal, Results, WrittenLine};
use crate::rescue;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Pause between two syncs; with the sync itself, a line is safe within a second.
const SYNC_PAUSE: Duration = Duration::from_millis(500);

/// Where results go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A file; one that a run left unfinished is continued.
    File(PathBuf),
    /// Standard output; nothing can be resumed.
    Stdout,
}

/// An output that is open and has not been changed.
pub(crate) enum PreparedOutput {
    File {
        journal: Journal,
        /// What it holds from before, unless that is to be removed.
        results: Results,
        /// `None` if everything is to be removed.
        damage: Option<Damage>,
    },
    /// A stream, and its name.
    Stream { stream: Box<dyn Write + Send>, path: PathBuf },
}

impl PreparedOutput {
    /// Opens and locks an output; reads it unless it is to be overwritten.
    pub(crate) fn open(output: &Output, overwrite: bool) -> Result<Self, JobError> {
        let path = match output {
            Output::Stdout => {
                let path = PathBuf::from("standard output");
                return Ok(Self::Stream { stream: Box::new(io::stdout()), path });
            }
            Output::File(path) => path.clone(),
        };
        let special =
            fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
        if special {
            // A device or a pipe: nothing to resume, lock or sync.
            return match fs::OpenOptions::new().write(true).open(&path) {
                Ok(file) => Ok(Self::Stream { stream: Box::new(file), path }),
                Err(source) => Err(JobError::Output { action: "open", path, source }),
            };
        }
        let journal = Journal::open(&path)?;
        if overwrite {
            return Ok(Self::File { journal, results: Results::default(), damage: None });
        }
        let (results, damage) = journal.read()?;
        Ok(Self::File { journal, results, damage: Some(damage) })
    }

    /// Repairs or empties a file, and makes the output ready to be written.
    pub(crate) fn start(self) -> Result<(Writer, Results), JobError> {
        let (mut journal, results, damage) = match self {
            Self::Stream { stream, path } => {
                return Ok((Writer::Stream { stream, path }, Results::default()));
            }
            Self::File { journal, results, damage } => (journal, results, damage),
        };
        journal.keep();
        match damage {
            Some(damage) => journal.repair(&damage)?,
            None => journal.empty()?,
        }
        Ok((Writer::File(FileWriter::new(journal)?), results))
    }
}

/// An output that is being written.
pub(crate) enum Writer {
    File(FileWriter),
    /// A stream, and its name.
    Stream {
        stream: Box<dyn Write + Send>,
        path: PathBuf,
    },
}

impl Writer {
    /// Writes a whole line, its break included. After an error nothing more may be written: the
    /// file may end in a torn line, which the next run repairs.
    pub(crate) fn write(&mut self, line: &[u8]) -> Result<(), JobError> {
        assert!(line.ends_with(b"\n"));
        match self {
            Self::File(file) => file.write(line),
            Self::Stream { stream, path } => {
                let written = stream.write_all(line).and_then(|()| stream.flush());
                written.map_err(|source| JobError::Output {
                    action: "write",
                    path: path.clone(),
                    source,
                })
            }
        }
    }

    /// Fails if the results written so far are not in place any more.
    pub(crate) fn check(&mut self) -> Result<(), JobError> {
        match self {
            Self::File(file) => file.check(),
            Self::Stream { .. } => Ok(()),
        }
    }

    /// Makes everything durable, and removes superseded result lines.
    pub(crate) fn close(
        self,
        superseded: Option<&dyn Fn(&WrittenLine) -> bool>,
    ) -> Result<Closed, JobError> {
        match self {
            Self::File(file) => file.close(superseded),
            Self::Stream { .. } => Ok(Closed::default()),
        }
    }
}

/// What came of closing an output.
#[derive(Default)]
pub(crate) struct Closed {
    /// Result lines that were removed.
    pub(crate) superseded: u64,
    /// Bytes that another program added while the job wrote. If there are any, no line is removed.
    pub(crate) foreign_bytes: u64,
}

/// An output file that is being written.
pub(crate) struct FileWriter {
    journal: Journal,
    /// Length that the file must have at least; more was written by somebody else.
    bytes: Arc<AtomicU64>,
    syncer: Syncer,
    /// The output is not there any more; what could be kept has been.
    given_up: bool,
}

impl FileWriter {
    fn new(journal: Journal) -> Result<Self, JobError> {
        let bytes = Arc::new(AtomicU64::new(journal.bytes()?));
        let syncer = Syncer::start(&journal, &bytes)?;
        Ok(Self { journal, bytes, syncer, given_up: false })
    }

    fn write(&mut self, line: &[u8]) -> Result<(), JobError> {
        let written = (&self.journal.file).write_all(line);
        written.map_err(|source| self.journal.fail("write", source))?;
        self.bytes.fetch_add(line.len() as u64, Ordering::Relaxed);
        self.syncer.wake();
        self.check()
    }

    fn check(&mut self) -> Result<(), JobError> {
        match self.syncer.trouble() {
            None => Ok(()),
            Some(Trouble::Sync(source)) => Err(self.journal.fail("sync", source)),
            Some(Trouble::Displaced) => self.verify(),
        }
    }

    /// Checks the file. If it does not hold what was written, saves what can be saved.
    fn verify(&mut self) -> Result<(), JobError> {
        let bytes = self.bytes.load(Ordering::Relaxed);
        let journal = &self.journal;
        if rescue::is_sound(&journal.path, &journal.file, bytes)
            .map_err(|source| journal.fail("inspect", source))?
        {
            return Ok(());
        }
        self.given_up = true;
        Err(rescue::rescue(journal, bytes))
    }

    fn close(
        mut self,
        superseded: Option<&dyn Fn(&WrittenLine) -> bool>,
    ) -> Result<Closed, JobError> {
        let trouble = self.syncer.stop();
        if self.given_up {
            return Ok(Closed::default());
        }
        if let Some(Trouble::Sync(source)) = trouble {
            return Err(self.journal.fail("sync", source));
        }
        self.journal.file.sync_all().map_err(|source| self.journal.fail("sync", source))?;
        self.verify()?;
        let foreign_bytes =
            self.journal.bytes()?.saturating_sub(self.bytes.load(Ordering::Relaxed));
        // Rewriting the file would lose what is not ours.
        let Some(superseded) = superseded.filter(|_| foreign_bytes == 0) else {
            return Ok(Closed { superseded: 0, foreign_bytes });
        };
        let mut count = 0;
        self.journal.for_each(|line| count += u64::from(superseded(&line)))?;
        if count > 0 {
            self.journal.rewrite(|line| !superseded(line))?;
        }
        Ok(Closed { superseded: count, foreign_bytes })
    }
}

/// A thread that syncs a file soon after each write, so that the engine never waits for a disk, and
/// looks now and then whether the file is still there.
struct Syncer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread found.
enum Trouble {
    Sync(io::Error),
    /// The path names another file, or none, or the file has become shorter.
    Displaced,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    dirty: bool,
    closing: bool,
    trouble: Option<Trouble>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Syncer {
    fn start(journal: &Journal, bytes: &Arc<AtomicU64>) -> Result<Self, JobError> {
        let file = journal.file.try_clone().map_err(|source| journal.fail("open", source))?;
        let watched = Watched { file, path: journal.path.clone(), bytes: Arc::clone(bytes) };
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("output-sync".to_owned())
            .spawn(move || watched.sync_until_closing(&theirs))
            .map_err(|source| JobError::Thread { name: "output-sync", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn wake(&self) {
        let mut state = self.shared.lock();
        if !state.dirty {
            state.dirty = true;
            self.shared.changed.notify_one();
        }
    }

    /// Ends the thread; returns what it has not reported yet.
    fn stop(&mut self) -> Option<Trouble> {
        self.shared.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and the final sync does not depend on that thread.
            _ = thread.join();
        }
        self.trouble()
    }

    fn trouble(&self) -> Option<Trouble> {
        self.shared.lock().trouble.take()
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the thread syncs and looks at.
struct Watched {
    file: File,
    path: PathBuf,
    bytes: Arc<AtomicU64>,
}

impl Watched {
    fn sync_until_closing(&self, shared: &Shared) {
        let mut state = shared.lock();
        while !state.closing {
            let dirty = std::mem::take(&mut state.dirty);
            drop(state);
            let trouble = self.look(dirty);
            state = shared.lock();
            state.trouble = trouble.or(state.trouble.take());
            let pause =
                shared.changed.wait_timeout_while(state, SYNC_PAUSE, |state| !state.closing);
            state = pause.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn look(&self, dirty: bool) -> Option<Trouble> {
        if dirty && let Err(error) = self.file.sync_data() {
            return Some(Trouble::Sync(error));
        }
        let bytes = self.bytes.load(Ordering::Relaxed);
        match rescue::is_sound(&self.path, &self.file, bytes) {
            Ok(false) => Some(Trouble::Displaced),
            // If it cannot be checked now, it is checked again at the end of the job.
            Ok(true) | Err(_) => None,
        }
    }
}
