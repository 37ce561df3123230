//! How values are printed: Python's `str` and `repr`.

use super::budget::STEP;
use super::machine::Machine;
use super::value::{SequenceKind, Value};
use super::{Error, ErrorKind};

/// Deeper than values can be nested, less than the stack holds.
const DEPTH_MAX: u32 = 200;

/// White space as Python has it.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// Python's shortest form: fixed between 1e-4 and 1e16, else with a two-digit exponent.
pub(super) fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(-4..=15) => format!("{value:?}"),
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        Err(_) => scientific,
    }
}

impl Machine {
    /// Adds a value as Python's `str` writes it.
    pub(super) fn write(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        match value {
            Value::Undefined(_) => Ok(()),
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                out.push_str(text);
                Ok(())
            }
            value => self.write_repr(value, 0, out),
        }
    }

    pub(super) fn to_text(&self, value: &Value) -> Result<String, Error> {
        let mut text = String::new();
        self.write(value, &mut text)?;
        Ok(text)
    }

    /// Adds a value as Python's `repr` writes it.
    pub(super) fn write_repr(
        &self,
        value: &Value,
        depth: u32,
        out: &mut String,
    ) -> Result<(), Error> {
        self.budget.spend(STEP)?;
        if depth > DEPTH_MAX {
            return Err(Error::new(
                ErrorKind::Exhausted,
                "a value that contains itself is printed",
            ));
        }
        match value {
            Value::Undefined(_) => out.push_str("Undefined"),
            Value::None => out.push_str("None"),
            Value::Bool(true) => out.push_str("True"),
            Value::Bool(false) => out.push_str("False"),
            Value::Integer(value) => out.push_str(&value.to_string()),
            Value::Float(value) => out.push_str(&float_text(*value)),
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                write_quoted(text, out);
            }
            Value::Sequence(sequence) => {
                let (open, close) = match sequence.kind {
                    SequenceKind::List => ("[", "]"),
                    SequenceKind::Tuple if sequence.items.len() == 1 => ("(", ",)"),
                    SequenceKind::Tuple => ("(", ")"),
                    SequenceKind::Keys => ("dict_keys([", "])"),
                    SequenceKind::Values => ("dict_values([", "])"),
                    SequenceKind::Items => ("dict_items([", "])"),
                };
                out.push_str(open);
                for (index, item) in sequence.items.iter().enumerate() {
                    out.push_str(if index > 0 { ", " } else { "" });
                    self.write_repr(item, depth + 1, out)?;
                }
                out.push_str(close);
            }
            Value::Range(range) if range.step == 1 => {
                out.push_str(&format!("range({}, {})", range.start, range.stop));
            }
            Value::Range(it) => {
                out.push_str(&format!("range({}, {}, {})", it.start, it.stop, it.step));
            }
            Value::Dictionary(dictionary) => {
                let entries = dictionary.entries.iter();
                self.write_entries(entries.map(|(key, value)| (key, value)), depth, out)?;
            }
            Value::Namespace(number) => {
                let entries = self.namespace_entries(*number)?;
                out.push_str("<Namespace ");
                let entries = entries.iter().map(|(key, value)| (key, value));
                self.write_entries(entries, depth, out)?;
                out.push('>');
            }
            Value::Stream(_) => out.push_str("<generator object>"),
            Value::Macro(it) => out.push_str(&format!("<Macro '{}'>", it.definition.name)),
            Value::Function(_) => out.push_str("<function>"),
            Value::Method(_) => out.push_str("<built-in method>"),
            Value::Loop(it) => {
                let (index, length) = (it.index.get() + 1, it.items.len());
                out.push_str(&format!("<LoopContext {index}/{length}>"));
            }
            Value::Cycler(_) => out.push_str("<Cycler>"),
            Value::Joiner(_) => out.push_str("<Joiner>"),
        }
        Ok(())
    }

    fn write_entries<'a>(
        &self,
        entries: impl Iterator<Item = (&'a Value, &'a Value)>,
        depth: u32,
        out: &mut String,
    ) -> Result<(), Error> {
        out.push('{');
        for (index, (key, value)) in entries.enumerate() {
            out.push_str(if index > 0 { ", " } else { "" });
            self.write_repr(key, depth + 1, out)?;
            out.push_str(": ");
            self.write_repr(value, depth + 1, out)?;
        }
        out.push('}');
        Ok(())
    }
}

/// A text in quotes, single ones where that needs no escapes.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            it if it == quote => out.extend(['\\', it]),
            // Private-use characters stay as they are, unlike in Python: they may be marks.
            it if (it.is_control() || it.is_whitespace() || it == '\u{ad}') && it != ' ' => {
                let code = it as u32;
                out.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    _ => format!("\\u{code:04x}"),
                });
            }
            it => out.push(it),
        }
    }
    out.push(quote);
}
