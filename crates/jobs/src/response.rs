//! Output lines in the OpenAI batch format. The order of fields is fixed, so that the lines of two
//! runs differ only in `created`.

use crate::choice::{Choice, TokenLogprob, TokenLogprobs};
use crate::key::Key;
use crate::line::Endpoint;
use crate::refusal::Refusal;
use serde::{Serialize, Serializer};

/// What an answered line is made of.
pub(crate) struct Answer<'a> {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: &'a str,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) prompt_tokens: u64,
    /// Put in front of every choice's text.
    pub(crate) echo: &'a str,
    /// In the order of their index.
    pub(crate) choices: &'a [Choice],
}

/// The line of a request that was answered.
pub(crate) fn answered_line(key: Key, custom_id: &str, answer: &Answer) -> Vec<u8> {
    let completion_tokens = answer.choices.iter().map(|choice| choice.tokens).sum();
    let usage = Usage {
        prompt_tokens: answer.prompt_tokens,
        completion_tokens,
        total_tokens: answer.prompt_tokens + completion_tokens,
        prompt_tokens_details: PromptTokensDetails {
            // What the first of the choices shared; the others share with it.
            cached_tokens: answer.choices.iter().map(|choice| choice.shared).min().unwrap_or(0),
        },
    };
    let (id, object) = match answer.endpoint {
        Endpoint::Chat => (format!("chatcmpl-{key}"), "chat.completion"),
        Endpoint::Completions => (format!("cmpl-{key}"), "text_completion"),
    };
    let choices = answer.choices.iter().enumerate();
    let choices = choices.map(|(index, choice)| match answer.endpoint {
        Endpoint::Chat => ChoiceBody::chat(index, choice),
        Endpoint::Completions => ChoiceBody::completion(index, answer.echo, choice),
    });
    let body = Body::Answer {
        id,
        object,
        created: answer.created,
        model: answer.model,
        choices: choices.collect(),
        usage,
        system_fingerprint: None,
    };
    line(key, custom_id, Some((200, body)), None)
}

/// The line of a bad request: status 400 and the OpenAI error body.
pub(crate) fn refused_line(key: Key, custom_id: &str, refusal: &Refusal) -> Vec<u8> {
    let error = ErrorBody {
        message: &refusal.message,
        kind: "invalid_request_error",
        param: refusal.param.as_deref(),
        code: refusal.code,
    };
    line(key, custom_id, Some((400, Body::Error { error })), None)
}

/// The line of a good request that this run cannot answer; a later run tries again.
pub(crate) fn rejected_line(key: Key, custom_id: &str, reason: &str) -> Vec<u8> {
    line(key, custom_id, None, Some(BatchError { code: "rejected", message: reason }))
}

fn line(
    key: Key,
    custom_id: &str,
    response: Option<(u16, Body)>,
    error: Option<BatchError>,
) -> Vec<u8> {
    let line = OutputLine {
        id: key.batch_id(),
        custom_id,
        response: response.map(|(status_code, body)| Response {
            status_code,
            request_id: key.to_string(),
            body,
        }),
        error,
    };
    let mut bytes = serde_json::to_vec(&line).expect("no map with other keys than strings");
    bytes.push(b'\n');
    bytes
}

#[derive(Serialize)]
struct OutputLine<'a> {
    id: String,
    custom_id: &'a str,
    response: Option<Response<'a>>,
    error: Option<BatchError<'a>>,
}

#[derive(Serialize)]
struct Response<'a> {
    status_code: u16,
    request_id: String,
    body: Body<'a>,
}

#[derive(Serialize)]
struct BatchError<'a> {
    code: &'static str,
    message: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Answer {
        id: String,
        object: &'static str,
        created: u64,
        model: &'a str,
        choices: Vec<ChoiceBody<'a>>,
        usage: Usage,
        system_fingerprint: Option<&'a str>,
    },
    Error {
        error: ErrorBody<'a>,
    },
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize)]
struct PromptTokensDetails {
    /// Tokens whose context was there already, because other prompts began with them. It depends on what ran
    /// before and where: like `created`, it is no part of the answer.
    cached_tokens: u64,
}

#[derive(Serialize)]
struct ChoiceBody<'a> {
    index: usize,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Message { role: &'static str, content: &'a str, refusal: Option<&'a str> },
    Text(String),
}

#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs {
    Chat {
        content: Vec<ChatLogprob>,
        refusal: Option<Vec<ChatLogprob>>,
    },
    Completion {
        tokens: Vec<String>,
        token_logprobs: Vec<f32>,
        top_logprobs: Option<Vec<TopLogprobs>>,
        text_offset: Vec<usize>,
    },
}

/// An object of the likeliest tokens and their log-probabilities, likeliest first. The picked token
/// is always among them, so there may be one more than was asked for.
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(position: &TokenLogprobs) -> Self {
        let mut tokens: Vec<(String, f32)> = Vec::with_capacity(position.alternatives.len() + 1);
        for token in position.alternatives.iter().chain([&position.picked]) {
            // A control token and a plain one may read the same; an object has room for one.
            let text = token.text();
            if tokens.iter().all(|(other, _)| *other != text) {
                tokens.push((text, token.logprob));
            }
        }
        Self(tokens)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

#[derive(Serialize)]
struct ChatLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<ChatLogprob>>,
}

impl<'a> ChoiceBody<'a> {
    fn chat(index: usize, choice: &'a Choice) -> Self {
        Self {
            index,
            content: Content::Message { role: "assistant", content: &choice.text, refusal: None },
            logprobs: choice.logprobs.as_ref().map(|tokens| Logprobs::Chat {
                content: tokens.iter().map(ChatLogprob::of_position).collect(),
                refusal: None,
            }),
            finish_reason: choice.finish_reason,
        }
    }

    fn completion(index: usize, echo: &str, choice: &'a Choice) -> Self {
        Self {
            index,
            content: Content::Text(format!("{echo}{}", choice.text)),
            logprobs: choice.logprobs.as_deref().map(completion_logprobs),
            finish_reason: choice.finish_reason,
        }
    }
}

impl ChatLogprob {
    fn of_token(token: &TokenLogprob) -> Self {
        Self {
            token: token.text(),
            logprob: token.logprob,
            bytes: token.bytes.clone(),
            top_logprobs: None,
        }
    }

    fn of_position(position: &TokenLogprobs) -> Self {
        let alternatives = position.alternatives.iter().map(Self::of_token).collect();
        Self { top_logprobs: Some(alternatives), ..Self::of_token(&position.picked) }
    }
}

fn completion_logprobs(positions: &[TokenLogprobs]) -> Logprobs {
    let asked = positions.iter().any(|position| !position.alternatives.is_empty());
    Logprobs::Completion {
        tokens: positions.iter().map(|position| position.picked.text()).collect(),
        token_logprobs: positions.iter().map(|position| position.picked.logprob).collect(),
        top_logprobs: asked.then(|| positions.iter().map(TopLogprobs::new).collect()),
        text_offset: positions.iter().map(|position| position.text_offset).collect(),
    }
}
