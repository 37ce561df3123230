//! Jinja2's filters on single values; those on many items are in `selections.rs`. Not here are
//! those that make HTML of links, and `random`, which a prompt cannot have.

use super::Error;
use super::ast::Operator;
use super::budget::STEP;
use super::calls::{Given, required};
use super::conversions::{parse_float, parse_integer};
use super::machine::Machine;
use super::strings::{capitalized, split_lines};
use super::text::is_space;
use super::value::Value;
use std::sync::Arc;

const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
];

pub(super) fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

impl Machine {
    pub(super) fn filter(&self, name: &str, value: Value, given: Given) -> Result<Value, Error> {
        match name {
            "default" | "d" => {
                let [default, boolean] = given.bind(name, ["default_value", "boolean"])?;
                let strict = boolean.is_some_and(|boolean| boolean.is_true());
                Ok(match value.is_undefined() || (strict && !value.is_true()) {
                    true => default.unwrap_or_else(|| Value::text("")),
                    false => value,
                })
            }
            "length" | "count" => {
                let [] = given.bind(name, [])?;
                Ok(Value::Integer(self.length(&value)? as i128))
            }
            "list" => {
                let [] = given.bind(name, [])?;
                Value::list(self.items(&value)?)
            }
            // Nothing is escaped here, so nothing has to be marked as safe.
            "string" | "safe" => {
                let [] = given.bind(name, [])?;
                self.to_text(&value).map(Value::text)
            }
            "tojson" => self.to_json(&value, given),
            "attr" => {
                let [wanted] = given.bind(name, ["name"])?;
                let wanted = self.expect_text(&required(wanted, name, "name")?, name)?;
                match &value {
                    // Only attributes, not items.
                    Value::Dictionary(_) if !super::methods::has(&value, &wanted) => {
                        Ok(Value::undefined(format!("'dict' object has no attribute '{wanted}'")))
                    }
                    value => self.attribute(value, &wanted),
                }
            }
            "items" => {
                let [] = given.bind(name, [])?;
                match &value {
                    Value::Undefined(_) => Value::stream(Vec::new()),
                    Value::Dictionary(it) => Value::stream(self.pairs(&it.entries)?),
                    _ => Err(Error::failed("Can only get item pairs from a mapping.")),
                }
            }
            "abs" => {
                let [] = given.bind(name, [])?;
                match (&value, value.as_integer()) {
                    (Value::Float(number), _) => Ok(Value::Float(number.abs())),
                    (_, Some(number)) => number
                        .checked_abs()
                        .map(Value::Integer)
                        .ok_or_else(super::operators::too_large),
                    _ => self.negative(&value),
                }
            }
            "int" => self.to_integer(&value, given),
            "float" => {
                let [default] = given.bind(name, ["default"])?;
                if let Value::Undefined(reason) = &value {
                    return Err(Error::failed(&**reason));
                }
                let number = match &value {
                    Value::Text(text) => parse_float(text),
                    value => value.as_number(),
                };
                Ok(number.map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
            }
            "round" => self.round(&value, given),
            "first" | "last" | "reverse" | "join" | "sort" | "unique" | "min" | "max" | "sum"
            | "map" | "select" | "reject" | "selectattr" | "rejectattr" | "groupby"
            | "dictsort" | "batch" | "slice" => self.selection(name, &value, given),
            _ => self.text_filter(name, &value, given),
        }
    }

    /// Filters that take any value as its text.
    fn text_filter(&self, name: &str, value: &Value, given: Given) -> Result<Value, Error> {
        if !exists(name) {
            return Err(Error::failed(format!("no filter named '{name}'")));
        }
        let text: Arc<str> = match value {
            Value::Text(text) => Arc::clone(text),
            value => self.to_text(value)?.into(),
        };
        self.budget.spend_times(text.len(), 3)?;
        match name {
            "trim" => {
                let [characters] = given.bind(name, ["chars"])?;
                let positional = characters.into_iter().collect();
                self.text_method(&text, "strip", Given { positional, named: Vec::new() })
            }
            "upper" | "lower" | "capitalize" => {
                let [] = given.bind(name, [])?;
                self.text_method(&text, name, Given::default())
            }
            "center" => {
                let [width] = given.bind(name, ["width"])?;
                let positional = vec![width.unwrap_or(Value::Integer(80))];
                self.text_method(&text, name, Given { positional, named: Vec::new() })
            }
            "title" => {
                let [] = given.bind(name, [])?;
                Ok(Value::text(title(&text)))
            }
            "wordcount" => {
                let [] = given.bind(name, [])?;
                let is_word = |it: char| it == '_' || it.is_alphanumeric();
                let words = text.split(|it| !is_word(it)).filter(|word| !word.is_empty());
                Ok(Value::Integer(words.count() as i128))
            }
            "replace" => {
                let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
                let old = self.to_text(&required(old, name, "old")?)?;
                let new = self.to_text(&required(new, name, "new")?)?;
                let count = match count {
                    None | Some(Value::None) => -1,
                    Some(count) => self.expect_integer(&count, name)?,
                };
                self.replaced(&text, &old, &new, count).map(Value::text)
            }
            "format" => {
                let arguments = match given.named.is_empty() {
                    true => Value::tuple(given.positional)?,
                    false => {
                        let named = given.named.into_iter();
                        Value::dictionary(
                            named.map(|(name, it)| (Value::Text(name), it)).collect(),
                        )?
                    }
                };
                self.percent(&text, &arguments).map(Value::text)
            }
            "indent" => self.indent(&text, given),
            "truncate" => self.truncate(&text, given),
            _ => {
                let [] = given.bind(name, [])?;
                self.budget.spend_times(text.len(), 5)?;
                Ok(Value::text(escaped(&text)))
            }
        }
    }

    fn to_integer(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let [default, base] = given.bind("int", ["default", "base"])?;
        let default = default.unwrap_or(Value::Integer(0));
        let base = base.map_or(Ok(10), |base| self.expect_integer(&base, "int: base"))?;
        let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base));
        let base = base.ok_or_else(|| Error::failed("int: base must be 2 to 36"))?;
        let whole = |number: f64| number.is_finite().then_some(number as i128);
        let number = match value {
            Value::Undefined(reason) => return Err(Error::failed(&**reason)),
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                parse_integer(text, base).or_else(|| parse_float(text).and_then(whole))
            }
            Value::Float(number) => whole(*number),
            value => value.as_integer(),
        };
        Ok(number.map_or(default, Value::Integer))
    }

    fn round(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let [precision, method] = given.bind("round", ["precision", "method"])?;
        let precision =
            precision.map_or(Ok(0), |it| self.expect_integer(&it, "round: precision"))?;
        let precision = i32::try_from(precision.clamp(-400, 400)).unwrap_or_default();
        let Some(number) = value.as_number() else { return self.positive(value) };
        let method = match &method {
            None => "common",
            Some(method) => &*self.expect_text(method, "round: method")?,
        };
        let scale = 10f64.powi(precision);
        let rounded = match method {
            // Python rounds the number as it is written, not as it is scaled.
            "common" if precision >= 0 => match value.as_integer() {
                Some(number) => return Ok(Value::Integer(number)),
                None => format!("{number:.*}", precision as usize).parse().unwrap_or(number),
            },
            "common" => {
                let rounded = (number * scale).round_ties_even() / scale;
                match value.as_integer() {
                    Some(_) => return Ok(Value::Integer(rounded as i128)),
                    None => rounded,
                }
            }
            "ceil" => (number * scale).ceil() / scale,
            "floor" => (number * scale).floor() / scale,
            _ => return Err(Error::failed("method must be common, ceil or floor")),
        };
        Ok(Value::Float(rounded))
    }

    fn indent(&self, text: &str, given: Given) -> Result<Value, Error> {
        let [width, first, blank] = given.bind("indent", ["width", "first", "blank"])?;
        let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let (first, blank) = (is_set(first), is_set(blank));
        let indention = match width {
            Some(Value::Text(text)) => text.to_string(),
            width => {
                let width = width.map_or(Ok(4), |it| self.expect_integer(&it, "indent: width"))?;
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                self.budget.spend(width)?;
                " ".repeat(width)
            }
        };
        let whole = [text, "\n"].concat();
        let mut out = String::new();
        for (index, line) in split_lines(&whole, false).into_iter().enumerate() {
            self.budget.spend(STEP + indention.len() + line.len())?;
            if index > 0 {
                out.push('\n');
            }
            let indents = match index {
                0 => first,
                _ => blank || !line.is_empty(),
            };
            if indents {
                out.push_str(&indention);
            }
            out.push_str(line);
        }
        Ok(Value::text(out))
    }

    fn truncate(&self, text: &str, given: Given) -> Result<Value, Error> {
        let names = ["length", "killwords", "end", "leeway"];
        let [length, kill, end, leeway] = given.bind("truncate", names)?;
        let number = |value: Option<Value>, otherwise: i128| match value {
            None | Some(Value::None) => Ok(otherwise),
            Some(value) => self.expect_integer(&value, "truncate"),
        };
        let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
        let end = end.map_or(Ok("...".into()), |end| self.expect_text(&end, "truncate: end"))?;
        let end_length = end.chars().count() as i128;
        if length < end_length || leeway < 0 {
            return Err(Error::failed(format!("truncate: expected length >= {end_length}")));
        }
        if (text.chars().count() as i128) <= length.saturating_add(leeway) {
            return Ok(Value::text(text));
        }
        let kept: String = text.chars().take((length - end_length) as usize).collect();
        let kept = match (kill.is_some_and(|kill| kill.is_true()), kept.rsplit_once(' ')) {
            (false, Some((before, _))) => before,
            _ => &kept,
        };
        Ok(Value::text([kept, &end].concat()))
    }

    /// `value + other`, for `sum`.
    pub(super) fn plus(&self, value: &Value, other: &Value) -> Result<Value, Error> {
        self.arithmetic(Operator::Add, value, other)
    }
}

/// The filter's title case: words begin after white space, hyphens and opening brackets.
fn title(text: &str) -> String {
    let begins = |it: char| is_space(it) || "-({[<".contains(it);
    let mut titled = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let spaces = rest.find(|it| !begins(it)).unwrap_or(rest.len());
        titled.push_str(&rest[..spaces]);
        rest = &rest[spaces..];
        let word = rest.find(begins).unwrap_or(rest.len());
        titled.push_str(&capitalized(&rest[..word]));
        rest = &rest[word..];
    }
    titled
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    out
}
