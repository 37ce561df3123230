//! `tojson`: Python's `json.dumps`, without escapes for HTML or, unless asked for, other scripts.

use super::Error;
use super::budget::STEP;
use super::calls::Given;
use super::machine::Machine;
use super::text::float_text;
use super::value::{SequenceKind, Value};

struct Layout {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Machine {
    pub(super) fn to_json(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [ensure_ascii, indent, separators, sort_keys] = given.bind("tojson", names)?;
        let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let indent = match indent {
            None | Some(Value::None) => None,
            Some(Value::Text(text)) => Some(text.to_string()),
            Some(count) => {
                let count = self.expect_integer(&count, "tojson: indent")?.max(0);
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                self.budget.spend(count)?;
                Some(" ".repeat(count))
            }
        };
        let mut layout = Layout {
            ensure_ascii: is_set(ensure_ascii),
            item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
            indent,
            key_separator: ": ".to_owned(),
            sort_keys: is_set(sort_keys),
        };
        if let Some(separators) = separators.filter(|it| !matches!(it, Value::None)) {
            let [item, key] = self
                .items(&separators)?
                .try_into()
                .map_err(|_| Error::failed("tojson: separators must be a pair"))?;
            layout.item_separator = self.expect_text(&item, "tojson: separators")?.to_string();
            layout.key_separator = self.expect_text(&key, "tojson: separators")?.to_string();
        }
        let mut text = String::new();
        self.write_json(&layout, value, 0, &mut text)?;
        Ok(Value::text(text))
    }

    fn write_json(
        &self,
        layout: &Layout,
        value: &Value,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        self.budget.spend(STEP)?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Integer(value) => out.push_str(&value.to_string()),
            Value::Float(value) => out.push_str(&json_float(*value)),
            Value::Text(text) => {
                self.budget.spend_times(text.len(), 2)?;
                write_string(text, layout.ensure_ascii, out);
            }
            Value::Sequence(sequence)
                if matches!(sequence.kind, SequenceKind::List | SequenceKind::Tuple) =>
            {
                out.push('[');
                for (index, item) in sequence.items.iter().enumerate() {
                    self.begin_item(layout, index, depth + 1, out)?;
                    self.write_json(layout, item, depth + 1, out)?;
                }
                self.end_items(layout, sequence.items.is_empty(), depth, out)?;
                out.push(']');
            }
            Value::Dictionary(dictionary) => {
                let mut entries: Vec<(String, &Value)> = Vec::new();
                for (key, value) in &dictionary.entries {
                    entries.push((self.json_key(key)?, value));
                }
                if layout.sort_keys {
                    self.budget.spend_times(entries.len(), STEP * 4)?;
                    entries.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                out.push('{');
                for (index, (key, value)) in entries.iter().enumerate() {
                    self.begin_item(layout, index, depth + 1, out)?;
                    self.budget.spend_times(key.len(), 2)?;
                    write_string(key, layout.ensure_ascii, out);
                    self.budget.spend(layout.key_separator.len())?;
                    out.push_str(&layout.key_separator);
                    self.write_json(layout, value, depth + 1, out)?;
                }
                self.end_items(layout, entries.is_empty(), depth, out)?;
                out.push('}');
            }
            other => {
                let name = other.type_name();
                return Err(Error::failed(format!(
                    "Object of type {name} is not JSON serializable"
                )));
            }
        }
        Ok(())
    }

    fn json_key(&self, key: &Value) -> Result<String, Error> {
        Ok(match key {
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                text.to_string()
            }
            Value::None => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Integer(value) => value.to_string(),
            Value::Float(value) => json_float(*value),
            other => {
                let name = other.type_name();
                return Err(Error::failed(format!("keys must be strings or numbers, not {name}")));
            }
        })
    }

    fn begin_item(
        &self,
        layout: &Layout,
        index: usize,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        if index > 0 {
            self.budget.spend(layout.item_separator.len())?;
            out.push_str(&layout.item_separator);
        }
        self.new_line(layout, depth, out)
    }

    fn end_items(
        &self,
        layout: &Layout,
        is_empty: bool,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        if is_empty { Ok(()) } else { self.new_line(layout, depth, out) }
    }

    fn new_line(&self, layout: &Layout, depth: usize, out: &mut String) -> Result<(), Error> {
        if let Some(indent) = &layout.indent {
            self.budget.spend_times(depth, indent.len())?;
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
        Ok(())
    }
}

fn json_float(value: f64) -> String {
    match value {
        _ if value.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        value => float_text(value),
    }
}

fn write_string(string: &str, ensure_ascii: bool, text: &mut String) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            control if control < ' ' => text.push_str(&format!("\\u{:04x}", control as u32)),
            other if ensure_ascii && !other.is_ascii() => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    text.push_str(&format!("\\u{unit:04x}"));
                }
            }
            other => text.push(other),
        }
    }
    text.push('"');
}
