//! Chat templates: messages to text, and to the tokens of that text.

mod load;

use crate::jinja::{self, Budget, ErrorKind, Template, Value};
use crate::tokenizer::{Sentinel, SpecialToken, Tokenizer};
use std::sync::Arc;

/// Work that a template may do whatever the messages, in bytes made or looked at: many times what
/// thousands of messages need, and done in a second or two.
const WORK_BYTES: u64 = 256 << 20;

/// Further work for each byte of the messages.
const WORK_PER_BYTE: u64 = 64;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template's file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The template's file holds no usable template.
    #[error("{path}: chat_template: {reason}")]
    Parse {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The template does not parse.
    #[error("{file}: the chat template is broken: {reason}")]
    Syntax {
        /// Where the template is from.
        file: Arc<str>,
        /// What is wrong.
        reason: String,
    },
    /// The template refuses these messages.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template fails on these messages.
    #[error("{file}: the chat template fails on these messages: {reason}")]
    Render {
        /// Where the template is from.
        file: Arc<str>,
        /// What is wrong.
        reason: String,
    },
    /// The template did more than any should.
    #[error("{file}: the chat template is stopped: {reason}")]
    Stopped {
        /// Where the template is from.
        file: Arc<str>,
        /// What it had too much of.
        reason: String,
    },
    /// No character is left to mark user text with.
    #[error("the messages use every private-use character of Unicode; leave at least one out")]
    NoSentinel,
}

/// A model's chat template: cheap to clone, shared between threads.
///
/// The same messages always give the same tokens, so `strftime_now`, which some templates call
/// for today's date, always tells of 26 July 2024: the day that the Llama 3 templates fall back to.
#[derive(Clone)]
pub struct ChatTemplate {
    template: Arc<Template>,
    source: Arc<str>,
    /// Where it is from, for messages.
    file: Arc<str>,
}

/// A conversation as text, in which what was said is marked, so that no control token is read from it.
pub struct Rendered {
    text: String,
    sentinel: Sentinel,
}

impl Rendered {
    /// Bytes of the text, a few of which are marks.
    pub fn text_bytes(&self) -> usize {
        self.text.len()
    }

    /// Its tokens.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        tokenizer.encode_rendered(&self.text, Some(&self.sentinel))
    }
}

impl ChatTemplate {
    /// Parses a template in the dialect of Hugging Face's `transformers`; `file` is where it is
    /// from, for messages.
    pub fn new(source: &str, file: impl Into<Arc<str>>) -> Result<Self, ChatError> {
        let file = file.into();
        match Template::parse(source) {
            Ok(template) => Ok(Self { template: Arc::new(template), source: source.into(), file }),
            Err(error) => Err(ChatError::Syntax { file, reason: error.to_string() }),
        }
    }

    /// The template's own text.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation, ready for the assistant's next words. Control tokens in the
    /// messages are indistinguishable from the template's: to show, not to encode.
    pub fn render(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
    ) -> Result<String, ChatError> {
        let bytes: usize = messages.iter().map(|it| it.role.len() + it.content.len()).sum();
        let budget = Budget::of_bytes(WORK_BYTES + WORK_PER_BYTE * bytes as u64);
        variables(tokenizer, messages)
            .and_then(|variables| self.template.render(variables, budget))
            .map_err(|error| self.failure(error))
    }

    /// The tokens of a conversation, ready for the assistant's next. Control tokens written in the
    /// messages are text; all else is as if the rendered text had been encoded whole.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
    ) -> Result<Vec<u32>, ChatError> {
        Ok(self.prepare(tokenizer, messages)?.encode(tokenizer))
    }

    /// The text of a conversation, ready to be encoded.
    pub fn prepare(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
    ) -> Result<Rendered, ChatError> {
        let strings = messages.iter().flat_map(|message| [&message.role, &message.content]);
        let special = tokenizer.special_tokens().iter().flat_map(|(_, token)| token.texts());
        let texts = strings.chain(special).map(String::as_str).chain([&*self.source]);
        let sentinel = Sentinel::absent_from(texts).ok_or(ChatError::NoSentinel)?;
        let guarded: Vec<ChatMessage> = messages
            .iter()
            .map(|message| ChatMessage {
                role: tokenizer.guard(&message.role, &sentinel),
                content: tokenizer.guard(&message.content, &sentinel),
            })
            .collect();
        let text = self.render(tokenizer, &guarded)?;
        Ok(Rendered { text, sentinel })
    }

    fn failure(&self, error: jinja::Error) -> ChatError {
        let (file, reason) = (Arc::clone(&self.file), error.to_string());
        match error.kind {
            ErrorKind::Raised => ChatError::Refused(error.message),
            ErrorKind::Exhausted => ChatError::Stopped { file, reason },
            ErrorKind::Syntax | ErrorKind::Failed => ChatError::Render { file, reason },
        }
    }
}

/// What `transformers` gives a template: the special tokens that the model's files name, and no
/// tools or documents.
fn variables(
    tokenizer: &Tokenizer,
    messages: &[ChatMessage],
) -> Result<Vec<(Arc<str>, Value)>, jinja::Error> {
    let mut turns = Vec::with_capacity(messages.len());
    for message in messages {
        turns.push(Value::dictionary(vec![
            (Value::text("role"), Value::text(message.role.as_str())),
            (Value::text("content"), Value::text(message.content.as_str())),
        ])?);
    }
    let mut variables = vec![
        ("messages".into(), Value::list(turns)?),
        ("add_generation_prompt".into(), Value::Bool(true)),
        ("tools".into(), Value::None),
        ("documents".into(), Value::None),
    ];
    for (name, token) in tokenizer.special_tokens() {
        let value = match token {
            SpecialToken::One(text) => Value::text(text.as_str()),
            SpecialToken::Many(texts) => {
                Value::list(texts.iter().map(|text| Value::text(text.as_str())).collect())?
            }
        };
        variables.push((name.as_str().into(), value));
    }
    Ok(variables)
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}
