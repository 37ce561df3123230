//! Jinja2's tests: what may stand after `is`.

use super::Error;
use super::ast::Comparator;
use super::calls::{Given, required};
use super::filters;
use super::machine::Machine;
use super::value::{SequenceKind, Value};

impl Machine {
    pub(super) fn test(&self, name: &str, value: &Value, given: Given) -> Result<bool, Error> {
        if let Some(comparator) = comparator(name) {
            let [other] = given.bind(name, ["other"])?;
            return self.compare(comparator, value, &required(other, name, "other")?);
        }
        match name {
            "divisibleby" => {
                let [number] = given.bind(name, ["num"])?;
                let number = required(number, name, "num")?;
                let remainder = self.arithmetic(super::ast::Operator::Remainder, value, &number)?;
                return Ok(!remainder.is_true());
            }
            "sameas" => {
                let [other] = given.bind(name, ["other"])?;
                let other = required(other, name, "other")?;
                return Ok(value.type_name() == other.type_name() && self.equal(value, &other)?);
            }
            _ => {}
        }
        let [] = given.bind(name, [])?;
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Integer(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => value.as_number().is_some(),
            "string" => matches!(value, Value::Text(_)),
            "mapping" => matches!(value, Value::Dictionary(_)),
            "sequence" => match value {
                Value::Undefined(_) | Value::Text(_) | Value::Range(_) | Value::Dictionary(_) => {
                    true
                }
                Value::Sequence(it) => matches!(it.kind, SequenceKind::List | SequenceKind::Tuple),
                _ => false,
            },
            "iterable" => matches!(
                value,
                Value::Undefined(_)
                    | Value::Text(_)
                    | Value::Sequence(_)
                    | Value::Range(_)
                    | Value::Dictionary(_)
                    | Value::Stream(_)
                    | Value::Loop(_)
            ),
            "callable" => matches!(
                value,
                // Python's Undefined has a `__call__`, which fails.
                Value::Undefined(_)
                    | Value::Macro(_)
                    | Value::Function(_)
                    | Value::Method(_)
                    | Value::Loop(_)
                    | Value::Joiner(_)
            ),
            "odd" | "even" => {
                let number = self.expect_integer(value, name)?;
                (number.rem_euclid(2) == 1) == (name == "odd")
            }
            "lower" | "upper" => {
                let text = self.to_text(value)?;
                let method = if name == "lower" { "islower" } else { "isupper" };
                self.text_method(&text.into(), method, Given::default())?.is_true()
            }
            "escaped" => false,
            "filter" => value.as_text().is_some_and(|name| filters::exists(name)),
            "test" => value.as_text().is_some_and(|name| exists(name)),
            _ => return Err(Error::failed(format!("no test named '{name}'"))),
        })
    }
}

fn comparator(name: &str) -> Option<Comparator> {
    Some(match name {
        "eq" | "equalto" | "==" => Comparator::Equal,
        "ne" | "!=" => Comparator::NotEqual,
        "lt" | "lessthan" | "<" => Comparator::Less,
        "le" | "<=" => Comparator::LessOrEqual,
        "gt" | "greaterthan" | ">" => Comparator::Greater,
        "ge" | ">=" => Comparator::GreaterOrEqual,
        "in" => Comparator::In,
        _ => return None,
    })
}

fn exists(name: &str) -> bool {
    const NAMES: [&str; 23] = [
        "defined",
        "undefined",
        "none",
        "boolean",
        "true",
        "false",
        "integer",
        "float",
        "number",
        "string",
        "mapping",
        "sequence",
        "iterable",
        "callable",
        "odd",
        "even",
        "lower",
        "upper",
        "escaped",
        "filter",
        "test",
        "divisibleby",
        "sameas",
    ];
    NAMES.contains(&name) || comparator(name).is_some()
}
