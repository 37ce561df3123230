//! Results of an output that match no line of the input, and what the user is told about them.

use std::fmt;

use crate::refusal::printable;

/// Custom ids that a message names.
const EXAMPLES_MAX: usize = 3;

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
    /// Starts with none, for an output with this many results.
    pub(crate) fn new(output: String, input: &str, model: &str, results: u64) -> Self {
        Self {
            output,
            input: input.to_owned(),
            model: model.to_owned(),
            results,
            changed: 0,
            strange: 0,
            other_model: None,
            examples: Vec::new(),
        }
    }

    /// Adds a result, by its custom id, whether the input has that, and the model that gave it.
    pub(crate) fn add(&mut self, custom_id: &str, in_input: bool, model: Option<String>) {
        match in_input {
            true => self.changed += 1,
            false => self.strange += 1,
        }
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(printable(custom_id));
        }
        if self.other_model.is_none() {
            self.other_model = model.filter(|model| *model != self.model);
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
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
