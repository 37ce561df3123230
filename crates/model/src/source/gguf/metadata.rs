//! A GGUF file's key-value pairs.

use super::cursor::{Cursor, Malformed};
use std::collections::BTreeMap;

const KEY_BYTES_MAX: usize = 1 << 16;
const STRING_BYTES_MAX: usize = 1 << 28;

/// The key-value pairs of a GGUF file.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    values: BTreeMap<String, Value>,
}

/// A metadata value; integers and floats of all widths are widened.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// u8 to u64
    Unsigned(u64),
    /// i8 to i64
    Signed(i64),
    /// f32 and f64
    Float(f64),
    /// bool
    Bool(bool),
    /// UTF-8 text
    String(String),
    /// An array of integers of any width
    Integers(Vec<i64>),
    /// An array of f32 (f64 is rounded)
    Floats(Vec<f32>),
    /// An array of bools
    Bools(Vec<bool>),
    /// An array of texts
    Strings(Vec<String>),
}

impl Metadata {
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Self, Malformed> {
        let mut values = BTreeMap::new();
        for index in 0..count {
            let key = cursor
                .string(KEY_BYTES_MAX)
                .map_err(|wrong| wrong.within(&format!("key {index} of the metadata")))?;
            let value = read_value(cursor).map_err(|wrong| wrong.within(key))?;
            if values.insert(key.to_owned(), value).is_some() {
                return Err(Malformed::new("is listed twice").within(key));
            }
        }
        Ok(Self { values })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A text value.
    pub fn string(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// An integer value that is not negative.
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            Value::Unsigned(value) => Some(*value),
            Value::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A float or integer value.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::Float(value) => Some(*value),
            Value::Unsigned(value) => Some(*value as f64),
            Value::Signed(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// A bool value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// An array of texts.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Strings(items) => Some(items),
            _ => None,
        }
    }

    /// An array of integers.
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.get(key)? {
            Value::Integers(items) => Some(items),
            _ => None,
        }
    }

    /// An array of floats.
    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::Floats(items) => Some(items),
            _ => None,
        }
    }
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

fn read_value(cursor: &mut Cursor<'_>) -> Result<Value, Malformed> {
    let kind = cursor.u32()?;
    match kind {
        STRING => Ok(Value::String(cursor.string(STRING_BYTES_MAX)?.to_owned())),
        ARRAY => read_array(cursor),
        kind => read_scalar(cursor, kind),
    }
}

fn read_scalar(cursor: &mut Cursor<'_>, kind: u32) -> Result<Value, Malformed> {
    Ok(match kind {
        0 => Value::Unsigned(cursor.u8()?.into()),
        1 => Value::Signed((cursor.u8()? as i8).into()),
        2 => Value::Unsigned(cursor.u16()?.into()),
        3 => Value::Signed((cursor.u16()? as i16).into()),
        4 => Value::Unsigned(cursor.u32()?.into()),
        5 => Value::Signed((cursor.u32()? as i32).into()),
        6 => Value::Float(cursor.f32()?.into()),
        7 => Value::Bool(cursor.u8()? != 0),
        10 => Value::Unsigned(cursor.u64()?),
        11 => Value::Signed(cursor.u64()? as i64),
        12 => Value::Float(cursor.f64()?),
        kind => return Err(Malformed::new(format!("value type {kind} is unknown"))),
    })
}

fn read_array(cursor: &mut Cursor<'_>) -> Result<Value, Malformed> {
    let kind = cursor.u32()?;
    let item_bytes_min = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        STRING | 10..=12 => 8,
        ARRAY => return Err(Malformed::new("arrays of arrays are not supported")),
        kind => return Err(Malformed::new(format!("array type {kind} is unknown"))),
    };
    let count = cursor.count(item_bytes_min)?;
    if kind == STRING {
        let mut strings = Vec::with_capacity(count);
        for _ in 0..count {
            strings.push(cursor.string(STRING_BYTES_MAX)?.to_owned());
        }
        return Ok(Value::Strings(strings));
    }
    let scalars = (0..count).map(|_| read_scalar(cursor, kind));
    match kind {
        6 | 12 => {
            scalars.map(|item| item.map(widened_float)).collect::<Result<_, _>>().map(Value::Floats)
        }
        7 => scalars
            .map(|item| item.map(|item| item == Value::Bool(true)))
            .collect::<Result<_, _>>()
            .map(Value::Bools),
        _ => scalars
            .map(|item| item.and_then(integer))
            .collect::<Result<_, _>>()
            .map(Value::Integers),
    }
}

fn widened_float(value: Value) -> f32 {
    match value {
        Value::Float(value) => value as f32,
        other => unreachable!("{other:?} in an array of floats"),
    }
}

fn integer(value: Value) -> Result<i64, Malformed> {
    match value {
        Value::Signed(value) => Ok(value),
        Value::Unsigned(value) => i64::try_from(value)
            .map_err(|_| Malformed::new(format!("integer {value} in an array is out of range"))),
        other => unreachable!("{other:?} in an array of integers"),
    }
}
