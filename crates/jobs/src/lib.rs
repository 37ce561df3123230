//! Requests in, results out: lines of requests become prompts, completions become result lines,
//! and the output file is the journal from which an interrupted job resumes. Knows no engine.
//!
//! **One line for each.** When a job has processed its input, its output holds exactly one result
//! line for each input line that is not blank. A result line's `id` derives from the request, its
//! `custom_id`, and everything else that decides the result (model, context limit), so a resumed
//! job skips every line whose `id` it finds.
//!
//! **No answer is lost.** Answers that no input line asks for (a request was changed, another model
//! runs, another input) stop a job before it starts, unless the user says to keep or remove them.
//!
//! **Bounded memory.** The reader is a fixed number of lines ahead; a line is held only while it
//! is read or in the engine. What grows with the input are sets of 16-byte keys: custom ids seen,
//! and results found in the output; some 36 MB each for a million lines.
#![forbid(unsafe_code)]

mod beginnings;
mod choice;
mod collision;
mod digest;
mod earlier;
mod error;
mod failures;
mod fields;
mod file_use;
mod generation;
mod input;
mod job;
mod journal;
mod key;
mod line;
mod messages;
mod named;
mod output;
mod prepared;
mod preview;
mod reader;
mod refusal;
mod request;
mod rescue;
mod response;
mod sampling;
mod served;
mod sniff;
mod stop;
mod survey;
mod unmatched;

pub use beginnings::Beginning;
pub use collision::refuse_collisions;
pub use earlier::{Earlier, JobStanding};
pub use error::JobError;
pub use failures::FailureKind;
pub use file_use::FileUse;
pub use generation::{Ending, Generation, Piece};
pub use input::{Input, LINE_BYTES_MAX, OpenInput};
pub use job::{Job, JobOptions, JobSummary, Next, Progress};
pub use output::Output;
pub use prepared::PreparedJob;
pub use preview::{PreviewError, preview_input, preview_line};
pub use refusal::Refusal;
pub use served::ServedModel;
pub use sniff::{Remedy, shell_quoted};
pub use survey::{OUTPUT_TOKENS_ASSUMED, RequestLength, Survey};
pub use unmatched::UnmatchedResults;
