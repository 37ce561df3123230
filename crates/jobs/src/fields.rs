//! An object's fields, taken one by one and checked as they are taken. Values stay unparsed text
//! until then, so that a hostile line cannot blow up into a tree of values.

use crate::refusal::{Refusal, shortened};
use serde::de::{
    Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

/// More fields than any request has; bounds what a line can make us hold.
const FIELDS_MAX: usize = 128;

/// The fields of one object that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// Whether the field is there, null or not.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(field, _)| field == name)
    }

    /// Removes a field; one that is null counts as absent, as in the OpenAI API.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.0.iter().position(|(field, _)| field == name)?;
        let (_, value) = self.0.swap_remove(at);
        (value.get() != "null").then_some(value)
    }

    /// Removes a field and reads it as `T`.
    pub(crate) fn read<T: DeserializeOwned>(
        &mut self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| must_be(name, expected))
    }

    /// Removes a field and reads a number within a range.
    pub(crate) fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, Refusal> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        match self.read::<f64>(name, &expected)? {
            Some(value) if !range.contains(&value) => Err(must_be(name, &expected)),
            value => Ok(value),
        }
    }

    /// Removes a field and reads an integer within a range.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, Refusal> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        match self.read::<i64>(name, &expected)? {
            Some(value) if !range.contains(&value) => Err(must_be(name, &expected)),
            value => Ok(value),
        }
    }

    /// Removes a field and reads true or false; absent is false.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        Ok(self.read(name, "true or false")?.unwrap_or(false))
    }

    /// Removes a field and reads a string.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        self.read(name, "a string")
    }

    /// Refuses what is left: all fields that mean something have been taken.
    pub(crate) fn finish(self) -> Result<(), Refusal> {
        match self.0.into_iter().next() {
            Some((name, _)) => Err(Refusal::unknown(&name)),
            None => Ok(()),
        }
    }
}

/// The refusal of a value that is of the wrong type or out of range.
pub(crate) fn must_be(name: &str, expected: &str) -> Refusal {
    Refusal::field(name, format!("`{name}` must be {expected}"))
}

/// Refuses a token id that the model has no row for: no kernel could look it up.
pub(crate) fn check_tokens(param: &str, tokens: &[u32], vocab: u32) -> Result<(), Refusal> {
    let Some(token) = tokens.iter().find(|token| **token >= vocab) else { return Ok(()) };
    let last = vocab - 1;
    let message =
        format!("`{param}` has token {token}, but the model has {vocab} tokens, 0 to {last}");
    Err(Refusal::field(param, message))
}

/// Reads an unparsed value; `None` if it has another type.
pub(crate) fn parse<'a, T: Deserialize<'a>>(value: &'a RawValue) -> Option<T> {
    serde_json::from_str(value.get()).ok()
}

/// A parser's complaint without its "line 1": the input's own line number is what counts.
pub(crate) fn complaint(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((what, _)) => format!("{} (column {})", shortened(what), error.column()),
        None => shortened(&text),
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields(Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if fields.has(&name) {
                return Err(A::Error::custom(format_args!("field `{name:.64}` is there twice")));
            }
            if fields.0.len() == FIELDS_MAX {
                return Err(A::Error::custom(format_args!("more than {FIELDS_MAX} fields")));
            }
            fields.0.push((name, map.next_value()?));
        }
        Ok(fields)
    }
}

/// An array of at most `MAX` items; a longer one is refused before it is held.
#[derive(Debug)]
pub(crate) struct List<T, const MAX: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor::<T, MAX>(PhantomData))
    }
}

struct ListVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
    type Value = List<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {MAX} items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            list.push(item);
        }
        Ok(List(list))
    }
}
