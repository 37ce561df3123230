//! Why lines failed: the kinds of failure, how often each occurred, and where first. Bounded,
//! however many lines fail in how many ways.

use crate::refusal::{Refusal, printable};
use std::collections::HashMap;

/// Kinds that are told apart; further ones are only counted.
const KINDS_MAX: usize = 256;

/// One kind of failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureKind {
    /// Lines that failed in this way.
    pub lines: u64,
    /// The first of them.
    pub first_line: u64,
    /// What was wrong with the first one.
    pub reason: String,
}

/// The failures of a job, by kind.
#[derive(Debug, Default)]
pub(crate) struct Failures(HashMap<Kind, FailureKind>);

/// What one kind has in common: code, field and message, without the numbers in them.
type Kind = (Option<&'static str>, Option<String>, String);

fn without_numbers(text: &str) -> String {
    text.split(|c: char| c.is_ascii_digit()).collect()
}

impl Failures {
    pub(crate) fn refused(&mut self, line: u64, refusal: &Refusal) {
        // The same fault in different messages of a chat is one kind.
        let param = refusal.param.as_deref().map(without_numbers);
        let kind = (refusal.code, param, without_numbers(&refusal.message));
        self.add(kind, line, &refusal.message);
    }

    pub(crate) fn rejected(&mut self, line: u64, reason: &str) {
        self.add((Some("rejected"), None, without_numbers(reason)), line, reason);
    }

    fn add(&mut self, kind: Kind, line: u64, message: &str) {
        if self.0.len() == KINDS_MAX && !self.0.contains_key(&kind) {
            return;
        }
        let none = FailureKind { lines: 0, first_line: u64::MAX, reason: String::new() };
        let kind = self.0.entry(kind).or_insert(none);
        kind.lines += 1;
        // Rejections do not come in the order of lines.
        if line < kind.first_line {
            // Some messages begin with the line's number, which is reported separately.
            let reason = message.strip_prefix(&format!("line {line} is ")).unwrap_or(message);
            (kind.first_line, kind.reason) = (line, printable(reason));
        }
    }

    /// The kinds, commonest first.
    pub(crate) fn by_count(&self) -> Vec<FailureKind> {
        let mut kinds: Vec<_> = self.0.values().cloned().collect();
        kinds.sort_by_key(|kind| (std::cmp::Reverse(kind.lines), kind.first_line));
        kinds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_counted_and_bounded() {
        let mut failures = Failures::default();
        let json = |line| Refusal::line("invalid_json", format!("line {line} is not valid JSON"));
        for line in [3, 7, 9] {
            failures.refused(line, &json(line));
        }
        failures.refused(2, &Refusal::line("invalid_json", "line 2 is not valid JSON: too deep"));
        failures.refused(4, &Refusal::unknown("messages[1].nmae"));
        failures.refused(5, &Refusal::unknown("messages[12].nmae"));
        failures.rejected(8, "no room\u{1b}[31m");
        failures.rejected(12, "nothing after token 2");
        failures.rejected(10, "nothing after token 5");
        let told: Vec<_> = failures
            .by_count()
            .into_iter()
            .map(|kind| (kind.lines, kind.first_line, kind.reason))
            .collect();
        let expected = [
            (3, 3, "not valid JSON".to_owned()),
            (2, 4, "unknown field `messages[1].nmae`".to_owned()),
            (2, 10, "nothing after token 5".to_owned()),
            (1, 2, "not valid JSON: too deep".to_owned()),
            (1, 8, "no room\\u{1b}[31m".to_owned()),
        ];
        assert_eq!(told, expected);
        for line in 0..10_000 {
            let name = "x".repeat(line);
            failures.refused(line as u64, &Refusal::field(&name, "wrong"));
        }
        assert_eq!(failures.by_count().len(), KINDS_MAX);
    }
}
