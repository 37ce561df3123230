//! The tokens that a job would give the model for one line of its input, without a job.

use crate::error::JobError;
use crate::input::Input;
use crate::key::seed_of_request;
use crate::line::Line;
use crate::named::Namer;
use crate::refusal::Refusal;
use crate::request::Request;
use crate::served::ServedModel;
use std::cmp::Ordering;
use thiserror::Error;

/// Why a line has no tokens to show.
#[derive(Debug, Error)]
pub enum PreviewError {
    /// The input cannot be read.
    #[error(transparent)]
    Input(#[from] JobError),
    /// The input ends before the line.
    #[error("{input} has no line {number}: it ends after line {last}")]
    NoLine {
        /// The input.
        input: String,
        /// The line that was asked for.
        number: u64,
        /// The input's last line.
        last: u64,
    },
    /// The line is blank: a job skips it.
    #[error("line {0} is blank: a job passes over it")]
    Blank(u64),
    /// A job would answer the line with this error.
    #[error("{0}")]
    Refused(Refusal),
}

/// The prompt's tokens of line `number`, counted from 1, of an input.
pub fn preview_input(
    model: &ServedModel,
    input: &Input,
    number: u64,
) -> Result<Vec<u32>, PreviewError> {
    let mut input = input.open()?;
    let mut namer = Namer::new(model);
    while let Some(named) = namer.next(&mut input)? {
        match named.number.cmp(&number) {
            Ordering::Less => {}
            Ordering::Equal => return tokens_of(named.request(model).1),
            Ordering::Greater => return Err(PreviewError::Blank(number)),
        }
    }
    let last = input.lines.number;
    match number <= last {
        true => Err(PreviewError::Blank(number)),
        false => Err(PreviewError::NoLine { input: input.name, number, last }),
    }
}

/// The prompt's tokens of one line; `number` is what errors call it.
pub fn preview_line(
    model: &ServedModel,
    number: u64,
    line: &[u8],
) -> Result<Vec<u32>, PreviewError> {
    let line = Line::read(number, line);
    let seed = seed_of_request(&line.custom_id, &line.digest);
    let read = |(endpoint, fields)| Request::read(model, endpoint, fields, seed);
    tokens_of(line.body.and_then(read))
}

fn tokens_of(request: Result<Request, Refusal>) -> Result<Vec<u32>, PreviewError> {
    request.map(|request| request.tokens).map_err(PreviewError::Refused)
}
