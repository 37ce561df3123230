//! What can end a job: everything that is not one line's own fault.

use crate::file_use::FileUse;
use crate::sniff::Remedy;
use crate::unmatched::UnmatchedResults;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a job cannot go on. What it has written stays valid, and the same command resumes it.
#[derive(Debug, Error)]
pub enum JobError {
    /// The input cannot be opened.
    #[error("cannot open input {input}")]
    OpenInput {
        /// The input's name.
        input: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The input cannot be read on.
    #[error("cannot read {input} after line {line}")]
    ReadInput {
        /// The input's name.
        input: String,
        /// The last line that was read.
        line: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The thread that reads the input ended without saying why.
    #[error("the reader of {input} stopped unexpectedly")]
    ReaderLost {
        /// The input's name.
        input: String,
    },
    /// A thread cannot be started.
    #[error("cannot start the {name} thread")]
    Thread {
        /// Which.
        name: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The input is something else than lines of JSON.
    #[error("{input} is {what}. {remedy}")]
    NotRequests {
        /// The input's name.
        input: String,
        /// What it is.
        what: &'static str,
        /// What to do.
        remedy: Remedy,
    },
    /// The output holds results that match no line of the input.
    #[error("{0}")]
    Unmatched(Box<UnmatchedResults>),
    /// The output was moved while the job wrote it.
    #[error(
        "output {path} was moved to {now} while the job ran: the results so far are there; move it \
         back, and the same command continues"
    )]
    OutputMoved {
        /// The output.
        path: PathBuf,
        /// Where it is now.
        now: PathBuf,
    },
    /// The output was deleted or replaced while the job wrote it.
    #[error(
        "output {path} was deleted or replaced while the job ran: the results so far are saved in \
         {saved}; move that file to {path}, and the same command continues"
    )]
    OutputDeleted {
        /// The output.
        path: PathBuf,
        /// The copy of what it held.
        saved: PathBuf,
    },
    /// The output was deleted while the job wrote it, and what it held cannot be saved.
    #[error("output {path} was deleted while the job ran, and its results cannot be saved")]
    OutputLost {
        /// The output.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The output was made shorter while the job wrote it.
    #[error(
        "output {path} was cut short while the job ran: {lost_bytes} bytes of results are lost, \
         {left_bytes} bytes are left; the same command runs the lost lines again"
    )]
    OutputCut {
        /// The output.
        path: PathBuf,
        /// What is left of it.
        left_bytes: u64,
        /// What is missing.
        lost_bytes: u64,
    },
    /// Another program changed the output after it was read and before the job wrote to it.
    #[error(
        "another program changed output {path} while the job was being prepared, so nothing was run: the same command \
         looks at it again"
    )]
    OutputChanged {
        /// The output.
        path: PathBuf,
    },
    /// The output's folder does not exist.
    #[error("cannot create output {path}: folder {folder} does not exist")]
    NoFolder {
        /// The output.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// A file that is written is also something else.
    #[error("{} {} and {} {} are the same file", other.role, other.path.display(), file.role, file.path.display())]
    Collision {
        /// One of the two.
        file: FileUse,
        /// The other one.
        other: FileUse,
    },
    /// An empty input would only remove what an earlier run answered.
    #[error("{input} has no requests, so --overwrite leaves output {path} as it is")]
    NothingToOverwriteWith {
        /// The input's name.
        input: String,
        /// The output.
        path: PathBuf,
    },
    /// Another run writes this output.
    #[error("output {path} is being written by another run")]
    Busy {
        /// The output.
        path: PathBuf,
    },
    /// The output holds something other than our results; it is left alone.
    #[error(
        "line {line} of {path} is not a result line of ours: refusing to continue that file; \
         choose another output, or --overwrite to replace it"
    )]
    NotOurs {
        /// The output.
        path: PathBuf,
        /// The first line that is not ours.
        line: u64,
    },
    /// The output cannot be opened, read, written or synced.
    #[error("cannot {action} output {path}")]
    Output {
        /// What failed.
        action: &'static str,
        /// The output.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl JobError {
    /// Whether the command line alone is at fault, whatever the files hold.
    pub fn is_bad_usage(&self) -> bool {
        matches!(self, Self::Collision { .. })
    }
}
