//! Chat templates: messages to text, and to the tokens of that text.

mod dialect;
mod load;

use std::error::Error as _;
use std::sync::Arc;

use minijinja::{Environment, ErrorKind, Value, context};
use thiserror::Error;

use crate::tokenizer::{Sentinel, Tokenizer};
use dialect::Refused;

/// The one template of every environment here.
const NAME: &str = "chat_template";

/// Instructions a template may execute: thousands of messages' worth, and then it is stopped.
const FUEL: u64 = 10_000_000;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or whatever else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// Why a conversation has no prompt.
#[derive(Debug, Error)]
pub enum ChatError {
    /// The template's file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The template's file holds none that could be used.
    #[error("{path}: chat_template: {reason}")]
    Parse {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The template is not one.
    #[error("the model's chat template is broken: {0}")]
    Syntax(String),
    /// The template refuses these messages.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template fails on these messages.
    #[error("the model's chat template fails on these messages: {0}")]
    Render(String),
    /// The template did not come to an end.
    #[error("the model's chat template is stopped after {FUEL} instructions")]
    Endless,
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
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
}

impl ChatTemplate {
    /// Compiles a template in the dialect of Hugging Face's `transformers`.
    pub fn new(source: &str) -> Result<Self, ChatError> {
        let mut environment = dialect::environment();
        environment.set_fuel(Some(FUEL));
        environment
            .add_template_owned(NAME, dialect::without_generation_marks(source))
            .map_err(|error| ChatError::Syntax(describe(&error)))?;
        Ok(Self { environment: Arc::new(environment), source: source.into() })
    }

    /// The text of a conversation, ready for the assistant's next words. Control tokens in the
    /// messages are indistinguishable from the template's: to show, not to encode.
    pub fn render(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
    ) -> Result<String, ChatError> {
        let text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => &message.role, content => &message.content })
            .collect();
        let variables = context! {
            messages,
            add_generation_prompt => true,
            bos_token => text(tokenizer.bos_token()),
            eos_token => text(tokenizer.eos_tokens().first().copied()),
            tools => (),
            documents => (),
        };
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(variables))
            .map_err(|error| failure(&error))
    }

    /// The tokens of a conversation, ready for the assistant's next. Control tokens written in the
    /// messages are text; all else is as if the rendered text had been encoded whole.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
    ) -> Result<Vec<u32>, ChatError> {
        let strings = messages.iter().flat_map(|message| [&message.role, &message.content]);
        let texts = strings.map(String::as_str).chain([&*self.source]);
        let sentinel = Sentinel::absent_from(texts).ok_or(ChatError::NoSentinel)?;
        let guarded: Vec<ChatMessage> = messages
            .iter()
            .map(|message| ChatMessage {
                role: tokenizer.guard(&message.role, &sentinel),
                content: tokenizer.guard(&message.content, &sentinel),
            })
            .collect();
        let rendered = self.render(tokenizer, &guarded)?;
        Ok(tokenizer.encode_rendered(&rendered, Some(&sentinel)))
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

fn failure(error: &minijinja::Error) -> ChatError {
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::Endless;
    }
    let mut cause = Some(error as &(dyn std::error::Error + 'static));
    while let Some(error) = cause {
        if let Some(Refused(reason)) = error.downcast_ref() {
            return ChatError::Refused(reason.clone());
        }
        cause = error.source();
    }
    ChatError::Render(describe(error))
}

/// An error with all its causes, in one line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
