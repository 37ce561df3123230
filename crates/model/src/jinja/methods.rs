//! Methods of lists, tuples, dictionaries and numbers; those of texts are in `strings.rs`. What
//! would change a value is refused, as in Jinja2's immutable sandbox.

use super::Error;
use super::budget::STEP;
use super::calls::{Given, required};
use super::machine::Machine;
use super::value::{SequenceKind, Value};

const OF_TEXT: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const OF_DICTIONARY: &[&str] = &["copy", "get", "items", "keys", "values"];
const CHANGING_DICTIONARIES: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const OF_LIST: &[&str] = &["copy", "count", "index"];
const CHANGING_LISTS: &[&str] =
    &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const OF_TUPLE: &[&str] = &["count", "index"];

/// Whether values of this kind have the method.
pub(super) fn has(value: &Value, name: &str) -> bool {
    match value {
        Value::Text(_) => OF_TEXT.contains(&name),
        Value::Dictionary(_) => {
            OF_DICTIONARY.contains(&name) || CHANGING_DICTIONARIES.contains(&name)
        }
        Value::Sequence(sequence) => match sequence.kind {
            SequenceKind::List => OF_LIST.contains(&name) || CHANGING_LISTS.contains(&name),
            SequenceKind::Tuple => OF_TUPLE.contains(&name),
            _ => false,
        },
        Value::Float(_) => name == "is_integer",
        _ => false,
    }
}

impl Machine {
    pub(super) fn method(&self, value: &Value, name: &str, given: Given) -> Result<Value, Error> {
        match value {
            Value::Text(text) => self.text_method(text, name, given),
            Value::Dictionary(dictionary) => {
                let entries = &dictionary.entries;
                self.budget.spend_times(entries.len(), STEP)?;
                match name {
                    "get" => {
                        let [key, default] = given.bind("get", ["key", "default"])?;
                        let key = required(key, "get", "key")?;
                        let found = self.entry(entries, &key)?;
                        return Ok(found.or(default).unwrap_or(Value::None));
                    }
                    "copy" | "keys" | "values" | "items" => {}
                    _ => return Err(unsafe_attribute(value, name)),
                }
                let [] = given.bind(name, [])?;
                match name {
                    "keys" => {
                        let keys = entries.iter().map(|(key, _)| key.clone()).collect();
                        Value::sequence(SequenceKind::Keys, keys)
                    }
                    "values" => {
                        let values = entries.iter().map(|(_, value)| value.clone()).collect();
                        Value::sequence(SequenceKind::Values, values)
                    }
                    "items" => Value::sequence(SequenceKind::Items, self.pairs(entries)?),
                    _ => Ok(value.clone()),
                }
            }
            Value::Sequence(sequence) => {
                self.budget.spend_times(sequence.items.len(), STEP)?;
                match name {
                    "count" | "index" => {
                        let [wanted] = given.bind(name, ["value"])?;
                        let wanted = required(wanted, name, "value")?;
                        let mut count = 0;
                        for (index, item) in sequence.items.iter().enumerate() {
                            if self.equal(item, &wanted)? {
                                if name == "index" {
                                    return Ok(Value::Integer(index as i128));
                                }
                                count += 1;
                            }
                        }
                        match name {
                            "index" => Err(Error::failed("the value is not in the list")),
                            _ => Ok(Value::Integer(count)),
                        }
                    }
                    "copy" => Ok(value.clone()),
                    _ => Err(unsafe_attribute(value, name)),
                }
            }
            Value::Float(number) => Ok(Value::Bool(number.fract() == 0.0)),
            other => Err(unsafe_attribute(other, name)),
        }
    }

    /// Entries as tuples of key and value.
    pub(super) fn pairs(&self, entries: &[(Value, Value)]) -> Result<Vec<Value>, Error> {
        self.budget.spend_times(entries.len(), 4 * STEP)?;
        entries.iter().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()])).collect()
    }
}

fn unsafe_attribute(value: &Value, name: &str) -> Error {
    let kind = value.type_name();
    Error::failed(format!("access to attribute '{name}' of '{kind}' object is unsafe"))
}
