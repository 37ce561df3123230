//! A survey of an input before its job: how many lines it has, how long some of them are, and what they have in common. Reads
//! the lines as the job will: same limits, same chat template, same refusals.

use crate::beginnings::{Beginning, Beginnings};
use crate::error::JobError;
use crate::input::OpenInput;
use crate::named::Namer;
use crate::served::ServedModel;

/// Assumed length of a completion, in tokens, if its request sets no limit.
pub const OUTPUT_TOKENS_ASSUMED: u32 = 256;
/// A survey ends after this many bytes, however few lines that is.
const SAMPLE_BYTES_MAX: u64 = 256 << 20;

/// What an input holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Lines that are not blank: exact if all were read, else an estimate from the bytes read.
    pub lines: u64,
    /// Lines that were read.
    pub lines_read: u64,
    /// Lengths of the lines that were read and can be run; refused lines take no time.
    pub lengths: Vec<RequestLength>,
}

/// One request's lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLength {
    /// Tokens of the prompt, the chat template's included.
    pub prompt_tokens: u32,
    /// Tokens of each completion at most; [`OUTPUT_TOKENS_ASSUMED`] if the request sets no limit.
    pub output_tokens: u32,
    /// Completions of the request (`n`): as many prompts for the engine.
    pub choices: u32,
    /// What its prompt begins with and those of other requests do too.
    pub beginning: Beginning,
}

impl OpenInput {
    /// Reads up to `lines_max` lines and goes back to the beginning. A stream cannot be surveyed:
    /// it can be read only once.
    pub fn survey(
        &mut self,
        model: &ServedModel,
        lines_max: u64,
    ) -> Result<Option<Survey>, JobError> {
        let Some(bytes) = self.bytes() else { return Ok(None) };
        let mut namer = Namer::new(model);
        let mut survey = Survey { lines: 0, lines_read: 0, lengths: Vec::new() };
        let mut beginnings = Beginnings::default();
        let whole = loop {
            if survey.lines_read == lines_max
                || (lines_max < u64::MAX && self.lines.position_bytes >= SAMPLE_BYTES_MAX)
            {
                break self.lines.position_bytes >= bytes;
            }
            let Some(line) = namer.next(self)? else { break true };
            survey.lines_read += 1;
            if let (_, Ok(request)) = line.request(model) {
                survey.lengths.push(RequestLength {
                    prompt_tokens: request.tokens.len() as u32,
                    output_tokens: request.output_tokens(OUTPUT_TOKENS_ASSUMED),
                    choices: request.choices,
                    beginning: beginnings.add(&request.tokens),
                });
            }
        };
        for (length, beginning) in survey.lengths.iter_mut().zip(beginnings.of_the_first()) {
            length.beginning = beginning;
        }
        survey.lines = match whole {
            true => survey.lines_read,
            false => scaled(survey.lines_read, bytes, self.lines.position_bytes),
        };
        self.rewind()?;
        Ok(Some(survey))
    }
}

/// `count × whole / part`.
pub(crate) fn scaled(count: u64, whole: u64, part: u64) -> u64 {
    let scaled = u128::from(count) * u128::from(whole) / u128::from(part.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
