//! Typed access to the fields of a JSON object, with errors that name the field.

use crate::error::ConfigError;
use serde_json::{Map, Value};

/// A JSON object whose fields are read with their type checked; null counts as absent.
pub(super) struct Fields {
    /// Put before the names of nested fields.
    prefix: String,
    object: Map<String, Value>,
}

impl Fields {
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self, ConfigError> {
        let object = serde_json::from_slice(bytes)
            .map_err(|wrong| ConfigError::new(file, format!("not a JSON object: {wrong}")))?;
        Ok(Self { prefix: String::new(), object })
    }

    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is there, even as null.
    pub(super) fn has(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    /// The first field that is an object itself.
    pub(super) fn nested(&self) -> Option<&str> {
        self.object.iter().find(|(_, value)| value.is_object()).map(|(name, _)| name.as_str())
    }

    /// The field's full name, for messages.
    pub(super) fn named(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    fn typed<'a, T>(
        &'a self,
        field: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let wrong = || ConfigError::new(self.named(field), format!("must be {kind}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&str>, ConfigError> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(super) fn bool(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(super) fn number(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub(super) fn size_or_absent(&self, field: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(field, "a whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    pub(super) fn size(&self, field: &str) -> Result<usize, ConfigError> {
        let missing = || ConfigError::new(self.named(field), "is missing");
        self.size_or_absent(field)?.ok_or_else(missing)
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<Fields>, ConfigError> {
        let object = self.typed(field, "an object", Value::as_object)?;
        let prefix = format!("{}{field}.", self.prefix);
        Ok(object.map(|object| Fields { prefix, object: object.clone() }))
    }

    /// A token id, or a list of them.
    pub(super) fn tokens(&self, field: &str) -> Result<Vec<u32>, ConfigError> {
        let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let tokens = self.typed(field, "a token id or a list of them", |value| match value {
            Value::Array(values) => values.iter().map(token).collect(),
            value => token(value).map(|token| vec![token]),
        })?;
        Ok(tokens.unwrap_or_default())
    }
}
