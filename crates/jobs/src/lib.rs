//! Requests in, results out: lines of requests become prompts, completions become result lines,
//! and the output file is the journal from which an interrupted job resumes. Knows no engine.
#![forbid(unsafe_code)]

mod choice;
mod digest;
mod error;
mod fields;
mod generation;
mod input;
mod job;
mod journal;
mod key;
mod line;
mod messages;
mod output;
mod reader;
mod refusal;
mod request;
mod response;
mod sampling;
mod served;
mod stop;

pub use error::JobError;
pub use generation::{Ending, Generation, Piece};
pub use input::Input;
pub use job::{Job, JobOptions, JobSummary, Next, Progress};
pub use output::Output;
pub use reader::LINE_BYTES_MAX;
pub use refusal::Refusal;
pub use served::ServedModel;
