//! Results from earlier runs, held against the lines of this run's input before anything starts.
//! Nothing that was answered is removed unless the user says so.

use crate::error::JobError;
use crate::input::OpenInput;
use crate::journal::{Journal, Results};
use crate::named::Namer;
use crate::served::ServedModel;
use crate::unmatched::UnmatchedResults;
use std::collections::HashSet;

/// What happens to results that the output holds from before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// They are continued. One that matches no line of the input stops the job before it starts,
    /// unless the input is a stream, which cannot be read in advance: then they all stay.
    Continue,
    /// They are continued, and those that match no line stay in the file.
    Keep,
    /// They are removed.
    Overwrite,
}

/// How much of an input has its result before the job starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobStanding {
    /// Lines of the input that are not blank.
    pub lines: u64,
    /// Those that have their result.
    pub done: u64,
}

/// Reads the whole input and goes back to its beginning; fails if results match no line.
pub(crate) fn compare(
    input: &mut OpenInput,
    model: &ServedModel,
    journal: &Journal,
    results: &Results,
    earlier: Earlier,
) -> Result<JobStanding, JobError> {
    let mut namer = Namer::new(model);
    let mut unmatched: HashSet<_> = results.succeeded.union(&results.failed).copied().collect();
    let mut standing = JobStanding { lines: 0, done: 0 };
    while let Some(line) = namer.next(input)? {
        standing.lines += 1;
        standing.done += u64::from(unmatched.remove(&line.key));
    }
    input.rewind()?;
    if unmatched.is_empty() || earlier == Earlier::Keep {
        return Ok(standing);
    }
    let output = journal.path.display().to_string();
    let mut found = UnmatchedResults::new(output, &input.name, &model.name, results.len() as u64);
    journal.for_each(|line| {
        if unmatched.contains(&line.key) && !namer.supersedes(&line) {
            found.add(&line.custom_id, namer.has(&line.custom_id), line.model);
        }
    })?;
    match found.count() {
        0 => Ok(standing),
        _ => Err(JobError::Unmatched(Box::new(found))),
    }
}
