//! Results from earlier runs, held against the lines of this run's input before anything starts.
//! Nothing that was answered is removed unless the user says so.

use std::collections::HashSet;
use std::fmt;

use crate::error::JobError;
use crate::input::OpenInput;
use crate::journal::{Journal, Results, WrittenLine};
use crate::named::Namer;
use crate::refusal::printable;
use crate::served::ServedModel;

/// Custom ids that a message names.
const EXAMPLES_MAX: usize = 3;

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
pub struct Standing {
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
) -> Result<Standing, JobError> {
    let mut namer = Namer::new(model);
    let mut unmatched: HashSet<_> = results.succeeded.union(&results.failed).copied().collect();
    let mut standing = Standing { lines: 0, done: 0 };
    while let Some(line) = namer.next(input)? {
        standing.lines += 1;
        standing.done += u64::from(unmatched.remove(&line.key));
    }
    input.rewind()?;
    if unmatched.is_empty() || earlier == Earlier::Keep {
        return Ok(standing);
    }
    let mut found = UnmatchedResults {
        output: journal.path.display().to_string(),
        input: input.name.clone(),
        model: model.name.clone(),
        results: results.len() as u64,
        changed: 0,
        strange: 0,
        other_model: None,
        examples: Vec::new(),
    };
    journal.for_each(|line| {
        if unmatched.contains(&line.key) && !namer.supersedes(&line) {
            found.add(line, &namer);
        }
    })?;
    match found.count() {
        0 => Ok(standing),
        _ => Err(JobError::Unmatched(Box::new(found))),
    }
}

/// Results that match no line of an input.
#[derive(Debug)]
pub struct UnmatchedResults {
    output: String,
    input: String,
    /// The model of this run.
    model: String,
    /// All results that the output holds.
    results: u64,
    /// Those with a custom id of the input.
    changed: u64,
    /// Those with another custom id.
    strange: u64,
    /// Which model gave the first result that is not of this run's model.
    other_model: Option<String>,
    examples: Vec<String>,
}

impl UnmatchedResults {
    fn add(&mut self, line: WrittenLine, namer: &Namer) {
        match namer.has(&line.custom_id) {
            true => self.changed += 1,
            false => self.strange += 1,
        }
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(printable(&line.custom_id));
        }
        if self.other_model.is_none() {
            self.other_model = line.model.filter(|model| *model != self.model);
        }
    }

    fn count(&self) -> u64 {
        self.changed + self.strange
    }
}

impl fmt::Display for UnmatchedResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, input, model, results, changed, strange, .. } = self;
        let count = self.count();
        let verb = if count == 1 { "matches" } else { "match" };
        let more = if count > self.examples.len() as u64 { ", …" } else { "" };
        let examples = self.examples.join(", ");
        write!(f, "{count} of the {results} results in {output} {verb} no line of {input} ")?;
        write!(f, "({examples}{more}), so nothing was run. ")?;
        match (*strange, *changed) {
            (_, 0) => write!(f, "Their custom_ids are not in this input")?,
            (0, _) => write!(
                f,
                "Their custom_ids are in this input, but the request, the model or an option has changed"
            )?,
            _ => write!(
                f,
                "{strange} of their custom_ids are not in this input; for the other {changed}, the \
                 request, the model or an option has changed"
            )?,
        }
        if let Some(other) = &self.other_model {
            write!(f, ". They were answered by {}; this run uses {model}", printable(other))?;
        }
        write!(
            f,
            ". Choose another output (-o), keep these results in the file (--keep), or remove all \
             results and start anew (--overwrite)"
        )
    }
}
