//! The special tokens that a model's files name, as chat templates see them: `bos_token`,
//! `eos_token`, `pad_token` and so on, by their texts. A token that no file names has no variable.

use serde_json::{Map, Value};

/// What a chat template finds under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpecialToken {
    /// A token's text.
    One(String),
    /// The texts of several, under `additional_special_tokens`.
    Many(Vec<String>),
}

impl SpecialToken {
    /// The texts.
    pub fn texts(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

/// A token by its text, which older files wrap in an object.
pub(super) fn text_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The tokens in the fields of `tokenizer_config.json`: every field that ends in `_token`, those of
/// `extra_special_tokens`, and `additional_special_tokens`.
pub(super) fn of_config(fields: &Map<String, Value>) -> Vec<(String, SpecialToken)> {
    let extra = fields.get("extra_special_tokens").and_then(Value::as_object);
    let named = fields.iter().filter(|(name, _)| name.ends_with("_token"));
    let mut tokens: Vec<(String, SpecialToken)> = named
        .chain(extra.into_iter().flatten())
        .filter_map(|(name, token)| {
            Some((name.clone(), SpecialToken::One(text_of(token)?.to_owned())))
        })
        .collect();
    if let Some(Value::Array(additional)) = fields.get("additional_special_tokens") {
        let texts = additional.iter().filter_map(text_of).map(str::to_owned).collect();
        tokens.push(("additional_special_tokens".to_owned(), SpecialToken::Many(texts)));
    }
    tokens
}
