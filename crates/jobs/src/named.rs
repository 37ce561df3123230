//! An input's lines by name: each with its number, custom id and key. The job, the survey and the
//! check of earlier results all read lines through here, so they agree on what a line is.

use crate::error::JobError;
use crate::input::{LINE_BYTES_MAX, NextLine, OpenInput};
use crate::journal::WrittenLine;
use crate::key::{Key, RunDigest, seed_of_request};
use crate::line::{Line, derived_number};
use crate::refusal::Refusal;
use crate::request::Request;
use crate::served::ServedModel;
use std::collections::HashSet;

/// Names the lines of one pass over an input.
pub(crate) struct Namer {
    run: RunDigest,
    /// Keys of the custom ids so far: 16 bytes each, however long the ids are.
    claimed: HashSet<Key>,
    /// The last line that was read.
    number: u64,
}

/// A line that is not blank.
pub(crate) struct Named<'a> {
    /// Counted from 1, blank lines included.
    pub(crate) number: u64,
    pub(crate) key: Key,
    line: Line<'a>,
    /// Whether no earlier line has the same custom id.
    first: bool,
}

impl Namer {
    pub(crate) fn new(model: &ServedModel) -> Self {
        Self { run: model.run_digest(), claimed: HashSet::new(), number: 0 }
    }

    /// The next line that is not blank.
    pub(crate) fn next<'a>(
        &mut self,
        input: &'a mut OpenInput,
    ) -> Result<Option<Named<'a>>, JobError> {
        let next = loop {
            match input.lines.advance().map_err(|source| input.read_error(source))? {
                NextLine::End => return Ok(None),
                NextLine::Line if input.lines.line().trim_ascii().is_empty() => {}
                next => break next,
            }
        };
        let number = input.lines.number;
        self.number = number;
        let line = match next {
            NextLine::TooLong => Line::too_long(number, LINE_BYTES_MAX),
            _ => Line::read(number, input.lines.line()),
        };
        let first = self.claimed.insert(Key::of_custom_id(&line.custom_id));
        let key = match first {
            true => Key::of_request(self.run, &line.custom_id, &line.digest),
            false => Key::of_duplicate(&line.custom_id, number),
        };
        Ok(Some(Named { number, key, line, first }))
    }

    /// Whether a line so far has this custom id.
    pub(crate) fn has(&self, custom_id: &str) -> bool {
        self.claimed.contains(&Key::of_custom_id(custom_id))
    }

    /// Whether an earlier result is only an error, and its line has another result now. A line that
    /// could not be read is known by its number until it is fixed and has a custom id of its own.
    pub(crate) fn supersedes(&self, written: &WrittenLine) -> bool {
        let numbered = derived_number(&written.custom_id);
        let replaced = numbered.is_some_and(|number| (1..=self.number).contains(&number));
        !written.succeeded && (replaced || self.has(&written.custom_id))
    }
}

impl Named<'_> {
    /// The line's custom id, and its request or why it cannot be run.
    pub(crate) fn request(self, model: &ServedModel) -> (String, Result<Request, Refusal>) {
        let Line { custom_id, digest, body } = self.line;
        let request = body.and_then(|(endpoint, fields)| match self.first {
            true => Request::read(model, endpoint, fields, seed_of_request(&custom_id, &digest)),
            false => Err(duplicate(&custom_id)),
        });
        (custom_id, request)
    }
}

fn duplicate(custom_id: &str) -> Refusal {
    Refusal {
        message: format!("an earlier line has the same custom_id `{custom_id}`"),
        param: Some("custom_id".to_owned()),
        code: Some("duplicate_custom_id"),
    }
}
