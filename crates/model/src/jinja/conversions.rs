//! From one kind of value to another: items, lengths, numbers.

use super::Error;
use super::budget::STEP;
use super::machine::Machine;
use super::value::Value;

impl Machine {
    /// What iterating over a value gives.
    pub(super) fn items(&self, value: &Value) -> Result<Vec<Value>, Error> {
        Ok(match value {
            Value::Undefined(_) => Vec::new(),
            Value::Text(text) => {
                self.budget.spend_times(text.len(), STEP)?;
                text.chars().map(|it| Value::text(it.encode_utf8(&mut [0; 4]) as &str)).collect()
            }
            Value::Sequence(sequence) => {
                self.budget.spend_times(sequence.items.len(), STEP)?;
                sequence.items.clone()
            }
            Value::Range(range) => {
                self.budget.spend_times(range.length, STEP)?;
                (0..range.length).map(|index| range.item(index)).collect()
            }
            Value::Dictionary(dictionary) => {
                self.budget.spend_times(dictionary.entries.len(), STEP)?;
                dictionary.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Value::Stream(stream) => stream.drain(),
            other => {
                let message = format!("'{}' object is not iterable", other.type_name());
                return Err(Error::failed(message));
            }
        })
    }

    /// Python's `len`.
    pub(super) fn length(&self, value: &Value) -> Result<usize, Error> {
        Ok(match value {
            Value::Undefined(_) => 0,
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                text.chars().count()
            }
            Value::Sequence(sequence) => sequence.items.len(),
            Value::Range(range) => range.length,
            Value::Dictionary(dictionary) => dictionary.entries.len(),
            Value::Loop(it) => it.items.len(),
            other => {
                let message = format!("object of type '{}' has no len()", other.type_name());
                return Err(Error::failed(message));
            }
        })
    }

    /// A text argument.
    pub(super) fn expect_text(
        &self,
        value: &Value,
        what: &str,
    ) -> Result<std::sync::Arc<str>, Error> {
        match value {
            Value::Text(text) => Ok(std::sync::Arc::clone(text)),
            Value::Undefined(reason) => Err(Error::failed(&**reason)),
            other => {
                Err(Error::failed(format!("{what} must be a string, not {}", other.type_name())))
            }
        }
    }

    /// A whole number as an argument.
    pub(super) fn expect_integer(&self, value: &Value, what: &str) -> Result<i128, Error> {
        match (value.as_integer(), value) {
            (Some(number), _) => Ok(number),
            (None, Value::Undefined(reason)) => Err(Error::failed(&**reason)),
            (None, other) => {
                Err(Error::failed(format!("{what} must be an integer, not {}", other.type_name())))
            }
        }
    }
}

/// Reads a whole number as Python's `int` reads one.
pub(super) fn parse_integer(text: &str, radix: u32) -> Option<i128> {
    let text = text.trim_matches(super::text::is_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match radix {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let lower = digits.to_ascii_lowercase();
    let digits = lower.strip_prefix(prefix).unwrap_or(&lower);
    let well_formed = !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    if !well_formed || digits.starts_with(['+', '-']) {
        return None;
    }
    let value = i128::from_str_radix(&digits.replace('_', ""), radix).ok()?;
    Some(if negative { -value } else { value })
}

/// Reads a number as Python's `float` reads one.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    text.trim_matches(super::text::is_space).replace('_', "").parse().ok()
}
