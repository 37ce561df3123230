//! Results of an output that match no line of the input, and what the user is told about them.

use crate::refusal::printable;
use std::fmt;

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
    /// Those of `changed` that another model gave.
    of_other_model: u64,
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
            of_other_model: 0,
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
        let other = model.filter(|model| *model != self.model);
        self.of_other_model += u64::from(in_input && other.is_some());
        self.other_model = self.other_model.take().or(other);
    }

    /// Why results with a custom id of the input may not match. A result's key is one hash of all of these.
    fn cause(&self) -> &'static str {
        if self.of_other_model == self.changed {
            return "the model has changed";
        }
        "something that decides results has changed: the request, the model's files, --max-context, \
         --context-type, the instruction set (--isa, --device, another machine), or the version of Glinthawk"
    }

    /// Whether the output would have two results of one custom_id if these were kept.
    pub fn would_be_doubled(&self) -> bool {
        self.changed > 0
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.changed + self.strange
    }
}

impl fmt::Display for UnmatchedResults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, input, model, results, changed, strange, .. } = self;
        let count = self.count();
        let one = count == 1;
        let more = if count > self.examples.len() as u64 { ", …" } else { "" };
        let examples = self.examples.join(", ");
        match (count, results) {
            (1, 1) => write!(formatter, "the only result in {output} matches")?,
            (_, all) if count == *all => {
                write!(formatter, "all {count} results in {output} match")?
            }
            (1, _) => write!(formatter, "1 of the {results} results in {output} matches")?,
            _ => write!(formatter, "{count} of the {results} results in {output} match")?,
        }
        write!(formatter, " no line of {input} ({examples}{more}), so nothing was run. ")?;
        let (ids, are) = if one { ("Its custom_id", "is") } else { ("Their custom_ids", "are") };
        match (*strange, *changed) {
            (_, 0) => write!(formatter, "{ids} {are} not in this input")?,
            (0, _) => write!(formatter, "{ids} {are} in this input, but {}", self.cause())?,
            _ => {
                let are = if *strange == 1 { "is" } else { "are" };
                write!(formatter, "{strange} of their custom_ids {are} not in this input; for ")?;
                match changed {
                    1 => write!(formatter, "the other one, {}", self.cause())?,
                    _ => write!(formatter, "the other {changed}, {}", self.cause())?,
                }
            }
        }
        if let Some(other) = &self.other_model {
            let they = if one { "It was" } else { "They were" };
            write!(formatter, ". {they} answered by {}; this run uses {model}", printable(other))?;
        }
        write!(
            formatter,
            ". Choose another output (-o), keep {} in the file (--keep{}), or remove all results and start \
             anew (--overwrite)",
            if one { "this result" } else { "these results" },
            if *changed > 0 { ": it will have two of one custom_id" } else { "" }
        )
    }
}
