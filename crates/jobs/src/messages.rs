//! A chat request's messages: roles and text, and nothing that a text model cannot read.

use crate::fields::{Fields, List, must_be, parse};
use crate::refusal::Refusal;
use glinthawk_model::ChatMessage;
use serde_json::value::RawValue;

const MESSAGES_MAX: usize = 16_384;
const PARTS_MAX: usize = 16_384;

/// Reads `messages`.
pub(crate) fn read_messages(value: &RawValue) -> Result<Vec<ChatMessage>, Refusal> {
    let expected = format!("an array of 1 to {MESSAGES_MAX} messages");
    let List::<&RawValue, MESSAGES_MAX>(messages) =
        parse(value).ok_or_else(|| must_be("messages", &expected))?;
    if messages.is_empty() {
        return Err(must_be("messages", &expected));
    }
    messages.iter().enumerate().map(|(index, message)| read_message(index, message)).collect()
}

fn read_message(index: usize, value: &RawValue) -> Result<ChatMessage, Refusal> {
    let path = |name: &str| format!("messages[{index}].{name}");
    let mut fields: Fields = parse(value)
        .ok_or_else(|| must_be(&format!("messages[{index}]"), "an object with no field twice"))?;
    let role = match fields.take("role").and_then(parse::<String>).as_deref() {
        // Templates know the older name of the same thing.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool" | "function") => {
            return Err(Refusal::unsupported(&path("role"), "tools are not supported"));
        }
        _ => {
            let expected = "\"system\", \"developer\", \"user\" or \"assistant\"";
            return Err(must_be(&path("role"), expected));
        }
    };
    let content = fields.take("content").ok_or_else(|| Refusal::missing(&path("content")))?;
    let content = read_content(&path("content"), content)?;
    for name in ["tool_calls", "function_call", "audio"] {
        match fields.take(name).map(RawValue::get) {
            None | Some("[]") => {}
            Some(_) => return Err(Refusal::unsupported(&path(name), "only text is supported")),
        }
    }
    // The API adds this to an earlier answer; it does not affect the next.
    for name in ["name", "refusal", "annotations"] {
        fields.take(name);
    }
    fields.finish().map_err(|refusal| match &refusal.param {
        Some(name) => Refusal::unknown(&path(name)),
        None => refusal,
    })?;
    Ok(ChatMessage { role: role.to_owned(), content })
}

fn read_content(path: &str, value: &RawValue) -> Result<String, Refusal> {
    if let Some(text) = parse::<String>(value) {
        return Ok(text);
    }
    let List::<Fields, PARTS_MAX>(parts) =
        parse(value).ok_or_else(|| must_be(path, "a string or an array of text parts"))?;
    let mut content = String::new();
    for mut part in parts {
        match part.take("type").and_then(parse::<String>).as_deref() {
            Some("text") => {}
            Some(_) => return Err(Refusal::unsupported(path, "only parts of text are supported")),
            None => return Err(must_be(path, "parts with a `type`")),
        }
        let text: Option<String> = part.take("text").and_then(parse);
        content += &text.ok_or_else(|| must_be(path, "parts with a `text` string"))?;
        part.finish()?;
    }
    Ok(content)
}
