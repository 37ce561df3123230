//! One input line's envelope: its custom id, its endpoint and its body's fields.

use crate::digest::{LineDigest, hash};
use crate::fields::{Fields, complaint, must_be, parse};
use crate::refusal::Refusal;

/// Longer custom ids are refused: they are held for as long as their line is in flight.
const CUSTOM_ID_BYTES_MAX: usize = 1024;

/// Which of the OpenAI API's two ways to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`: `messages` in, a message out.
    Chat,
    /// `/v1/completions`: a `prompt` in, its continuation out.
    Completions,
}

/// A line with its name; what it asks for, or why it cannot be understood.
#[derive(Debug)]
pub(crate) struct Line<'a> {
    /// The line's own id, or `line-N` if it has none that can be read.
    pub(crate) custom_id: String,
    /// Digest of the whole line's meaning.
    pub(crate) digest: [u8; 32],
    pub(crate) body: Result<(Endpoint, Fields<'a>), Refusal>,
}

/// The custom id of a line that has none of its own.
pub(crate) fn derived_custom_id(number: u64) -> String {
    format!("line-{number}")
}

/// The number in a custom id that may be a derived one.
pub(crate) fn derived_number(custom_id: &str) -> Option<u64> {
    custom_id.strip_prefix("line-")?.parse().ok()
}

impl<'a> Line<'a> {
    /// Reads one line, without its line break; `number` counts from 1.
    pub(crate) fn read(number: u64, bytes: &'a [u8]) -> Self {
        let bad = |digest, refusal| Self {
            custom_id: derived_custom_id(number),
            digest,
            body: Err(refusal),
        };
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let column = error.valid_up_to() + 1;
                let message = format!("line {number} is not valid UTF-8 (column {column})");
                return bad(hash(&[b"bytes", bytes]), Refusal::line("invalid_utf8", message));
            }
        };
        let digest = match serde_json::from_str::<LineDigest>(text) {
            Ok(LineDigest(digest)) => digest,
            Err(error) => {
                let message = format!("line {number} is not valid JSON: {}", complaint(&error));
                return bad(hash(&[b"bytes", bytes]), Refusal::line("invalid_json", message));
            }
        };
        let fields = match serde_json::from_str::<Fields>(text) {
            Ok(fields) => fields,
            Err(error) => {
                let message = format!("line {number} is not a request: {}", complaint(&error));
                return bad(digest, Refusal::line("invalid_line", message));
            }
        };
        Self::envelope(number, digest, fields)
    }

    /// A line longer than the limit; its content was thrown away.
    pub(crate) fn too_long(number: u64, limit_bytes: usize) -> Self {
        let message = format!("line {number} is longer than {limit_bytes} bytes");
        Self {
            custom_id: derived_custom_id(number),
            digest: hash(&[b"too long", &limit_bytes.to_le_bytes()]),
            body: Err(Refusal::line("line_too_long", message)),
        }
    }

    fn envelope(number: u64, digest: [u8; 32], mut fields: Fields<'a>) -> Self {
        let batch = ["body", "url", "method"].iter().any(|name| fields.has(name));
        let (custom_id, refusal) = match custom_id(&mut fields) {
            Ok(Some(custom_id)) => (custom_id, None),
            Ok(None) if batch => (derived_custom_id(number), Some(Refusal::missing("custom_id"))),
            Ok(None) => (derived_custom_id(number), None),
            Err(refusal) => (derived_custom_id(number), Some(refusal)),
        };
        let body = match refusal {
            Some(refusal) => Err(refusal),
            None if batch => batch_body(fields),
            None => bare_body(fields),
        };
        Self { custom_id, digest, body }
    }
}

fn custom_id(fields: &mut Fields) -> Result<Option<String>, Refusal> {
    match fields.string("custom_id")? {
        Some(id) if id.is_empty() || id.len() > CUSTOM_ID_BYTES_MAX => {
            Err(must_be("custom_id", &format!("a string of 1 to {CUSTOM_ID_BYTES_MAX} bytes")))
        }
        id => Ok(id),
    }
}

fn batch_body<'a>(mut fields: Fields<'a>) -> Result<(Endpoint, Fields<'a>), Refusal> {
    match fields.string("method")?.as_deref() {
        Some("POST") => {}
        Some(_) => return Err(must_be("method", "\"POST\"")),
        None => return Err(Refusal::missing("method")),
    }
    let endpoint = match fields.string("url")?.as_deref() {
        Some("/v1/chat/completions") => Endpoint::Chat,
        Some("/v1/completions") => Endpoint::Completions,
        Some(_) => {
            return Err(must_be("url", "\"/v1/chat/completions\" or \"/v1/completions\""));
        }
        None => return Err(Refusal::missing("url")),
    };
    let body = fields.take("body").ok_or_else(|| Refusal::missing("body"))?;
    fields.finish()?;
    let body = parse(body).ok_or_else(|| must_be("body", "an object with no field twice"))?;
    Ok((endpoint, body))
}

/// A body without an envelope.
pub(crate) fn bare_body<'a>(fields: Fields<'a>) -> Result<(Endpoint, Fields<'a>), Refusal> {
    match (fields.has("messages"), fields.has("prompt")) {
        (true, false) => Ok((Endpoint::Chat, fields)),
        (false, true) => Ok((Endpoint::Completions, fields)),
        (true, true) => Err(Refusal::line("invalid_line", "give `prompt` or `messages`, not both")),
        (false, false) => Err(Refusal::line(
            "invalid_line",
            "neither a batch line (`custom_id`, `method`, `url`, `body`) nor one with `prompt` or `messages`",
        )),
    }
}
