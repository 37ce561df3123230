//! What can end a job: everything that is not one line's own fault.

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
    /// The thread that reads the input is gone without having said why.
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
    /// The output's folder does not exist.
    #[error("cannot create output {path}: folder {folder} does not exist")]
    NoFolder {
        /// The output.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// Input and output are the same file.
    #[error("output {path} is the input file itself")]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// Another run writes this output.
    #[error("output {path} is being written by another run")]
    Busy {
        /// The output.
        path: PathBuf,
    },
    /// The output holds something else than results of ours; it is left alone.
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
