//! Where result lines go: each is written whole, at once, and synced within a second.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::JobError;
use crate::journal::{Journal, Results};
use crate::key::Key;

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

/// An open output.
pub(crate) enum Writer {
    File {
        journal: Journal,
        syncer: Syncer,
    },
    /// A stream, and its name.
    Stream {
        stream: Box<dyn Write + Send>,
        path: PathBuf,
    },
}

impl Writer {
    /// Opens an output; the results are those it holds from before.
    pub(crate) fn open(output: &Output, overwrite: bool) -> Result<(Self, Results), JobError> {
        let path = match output {
            Output::Stdout => {
                let path = PathBuf::from("standard output");
                let stream = Box::new(io::stdout());
                return Ok((Self::Stream { stream, path }, Results::default()));
            }
            Output::File(path) => path,
        };
        let special =
            fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
        if special {
            // A device or a pipe: nothing to resume, lock or sync.
            let file = fs::OpenOptions::new().write(true).open(path).map_err(|source| {
                JobError::Output { action: "open", path: path.clone(), source }
            })?;
            let stream = Box::new(file);
            return Ok((Self::Stream { stream, path: path.clone() }, Results::default()));
        }
        let (journal, results) = Journal::open(path, overwrite)?;
        let syncer = Syncer::start(&journal)?;
        Ok((Self::File { journal, syncer }, results))
    }

    /// Writes a whole line, its break included. After an error nothing more may be written: the
    /// file may end in a torn line, which the next run repairs.
    pub(crate) fn write(&mut self, line: &[u8]) -> Result<(), JobError> {
        assert!(line.ends_with(b"\n"));
        match self {
            Self::File { journal, syncer } => {
                syncer.failure().map_err(|source| journal.fail("sync", source))?;
                (&journal.file).write_all(line).map_err(|source| journal.fail("write", source))?;
                syncer.wake();
                Ok(())
            }
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

    /// Makes everything durable; lines with a stale key are removed.
    pub(crate) fn close(self, stale: &HashSet<Key>) -> Result<(), JobError> {
        let Self::File { mut journal, syncer } = self else { return Ok(()) };
        syncer.stop().map_err(|source| journal.fail("sync", source))?;
        journal.file.sync_all().map_err(|source| journal.fail("sync", source))?;
        if stale.is_empty() { Ok(()) } else { journal.rewrite(|key| !stale.contains(&key)) }
    }
}

/// A thread that syncs a file soon after each write, so that the engine never waits for a disk.
pub(crate) struct Syncer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
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
    failure: Option<io::Error>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Syncer {
    fn start(journal: &Journal) -> Result<Self, JobError> {
        let file = journal.file.try_clone().map_err(|source| journal.fail("open", source))?;
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("output-sync".to_owned())
            .spawn(move || sync_until_closing(&file, &theirs))
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

    /// Ends the thread; an error is one that no write has reported yet.
    fn stop(mut self) -> io::Result<()> {
        self.join();
        self.failure()
    }

    fn join(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and the final sync does not depend on that thread.
            _ = thread.join();
        }
    }

    fn failure(&self) -> io::Result<()> {
        self.shared.lock().failure.take().map_or(Ok(()), Err)
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.join();
    }
}

fn sync_until_closing(file: &fs::File, shared: &Shared) {
    let mut state = shared.lock();
    while !state.closing {
        if !state.dirty {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        state.dirty = false;
        drop(state);
        let synced = file.sync_data();
        state = shared.lock();
        if let Err(error) = synced {
            state.failure = Some(error);
        }
        let pause = shared.changed.wait_timeout_while(state, SYNC_PAUSE, |state| !state.closing);
        state = pause.unwrap_or_else(PoisonError::into_inner).0;
    }
}
