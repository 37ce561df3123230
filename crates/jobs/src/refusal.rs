//! Why a request is not run. It becomes the OpenAI error body of a status-400 line.

use thiserror::Error;

/// A bad request, in the words its error line will carry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    /// What is wrong and what would be right.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// A machine-readable name of the fault.
    pub code: Option<&'static str>,
}

/// What a refusal repeats of a request, at most.
const QUOTED_CHARACTERS_MAX: usize = 300;

/// A text that may hold parts of a request, cut to a length fit for a message.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARACTERS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A text from a user's file, fit for a terminal: short, and without control characters.
pub(crate) fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    shortened(text).chars().map(escape).collect()
}

impl Refusal {
    /// A line that cannot be read as a request at all.
    pub(crate) fn line(code: &'static str, message: impl Into<String>) -> Self {
        Self { message: message.into(), param: None, code: Some(code) }
    }

    /// A field whose value is not acceptable.
    pub(crate) fn field(param: &str, message: impl Into<String>) -> Self {
        Self { message: message.into(), param: Some(param.to_owned()), code: Some("invalid_value") }
    }

    /// A field that must be there.
    pub(crate) fn missing(param: &str) -> Self {
        Self {
            message: format!("`{param}` is missing"),
            param: Some(param.to_owned()),
            code: Some("missing_required_parameter"),
        }
    }

    /// An unknown field: a typo must not silently change a result.
    pub(crate) fn unknown(param: &str) -> Self {
        let shown = shortened(param);
        Self {
            message: format!("unknown field `{shown}`"),
            param: Some(shown),
            code: Some("unknown_parameter"),
        }
    }

    /// A field of the OpenAI API that would change the result and that Glinthawk cannot honour.
    pub(crate) fn unsupported(param: &str, what: &str) -> Self {
        Self {
            message: format!("`{param}`: {what}"),
            param: Some(param.to_owned()),
            code: Some("unsupported_parameter"),
        }
    }
}
