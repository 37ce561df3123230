//! A completion turned back into text: cut at its stop string, with its log-probabilities.

use crate::request::Request;
use crate::served::ServedModel;
use crate::stop::{Cut, StopWatch};
use glinthawk_protocol::{Completion, Finish, Generated};

/// The API has no way to write minus infinity; it writes this.
const LOGPROB_MIN: f32 = -9999.0;

/// One of a request's completions as its result line tells it.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) finish_reason: &'static str,
    /// Tokens generated, the ending one included.
    pub(crate) tokens: u64,
    /// Prompt tokens that were not computed.
    pub(crate) shared: u64,
    pub(crate) logprobs: Option<Vec<TokenLogprobs>>,
}

/// One token's log-probability and its likeliest alternatives.
#[derive(Debug)]
pub(crate) struct TokenLogprobs {
    pub(crate) picked: TokenLogprob,
    pub(crate) alternatives: Vec<TokenLogprob>,
    /// Place of its first byte in the completion, in characters.
    pub(crate) text_offset: usize,
}

/// A token with its log-probability.
#[derive(Debug)]
pub(crate) struct TokenLogprob {
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
}

impl Choice {
    /// Depends on the request and the tokens alone: tokens past a stop string change nothing. Says what is wrong if the
    /// completion is none.
    pub(crate) fn new(
        model: &ServedModel,
        request: &Request,
        completion: &Completion,
    ) -> Result<Self, String> {
        let (texts, cut) = texts_and_cut(model, request, &completion.tokens);
        let finish_reason = match (cut, completion.finish) {
            (Some(_), _) | (None, Finish::Stop) => "stop",
            (None, Finish::Length) => "length",
            (None, Finish::NoToken) => return Err(no_token(completion.tokens.len())),
        };
        let mut bytes = texts.concat();
        if let Some(cut) = cut {
            bytes.truncate(cut.bytes);
        }
        let logprobs = request
            .wants_logprobs()
            .then(|| token_logprobs(model, &completion.tokens, &texts, &bytes));
        Ok(Self {
            text: String::from_utf8_lossy(&bytes).into_owned(),
            finish_reason,
            shared: u64::from(completion.shared),
            tokens: cut.map_or(completion.tokens.len() as u64, |cut| u64::from(cut.tokens)),
            logprobs,
        })
    }
}

fn no_token(tokens: usize) -> String {
    let after = match tokens {
        0 => "the prompt".to_owned(),
        tokens => format!("token {tokens} of the answer"),
    };
    format!(
        "no token can follow {after}, because the model's logits for all of them are NaN or minus infinity: its weights \
         may be damaged, or its values too large"
    )
}

/// Each token's bytes as far as they are text (an ending token is not), up to the first stop
/// string.
fn texts_and_cut(
    model: &ServedModel,
    request: &Request,
    tokens: &[Generated],
) -> (Vec<Vec<u8>>, Option<Cut>) {
    let mut watch = StopWatch::new();
    let mut texts = Vec::with_capacity(tokens.len());
    for generated in tokens {
        if request.ends_at(generated.token) {
            break;
        }
        let bytes = model.text_bytes(generated.token);
        let cut = watch.push(&request.stop_strings, &bytes);
        texts.push(bytes);
        if cut.is_some() {
            return (texts, cut);
        }
    }
    (texts, None)
}

/// Log-probabilities of the tokens that are part of the text.
fn token_logprobs(
    model: &ServedModel,
    tokens: &[Generated],
    texts: &[Vec<u8>],
    bytes: &[u8],
) -> Vec<TokenLogprobs> {
    let token = |token: u32, logprob: f32| TokenLogprob {
        bytes: model.tokenizer.token_bytes(token),
        logprob: logprob.max(LOGPROB_MIN),
    };
    let ends = character_ends(bytes);
    let (mut offset_bytes, mut text_offset) = (0, 0);
    let mut logprobs = Vec::new();
    for (generated, text) in tokens.iter().zip(texts) {
        if offset_bytes >= bytes.len() && !text.is_empty() {
            break;
        }
        let alternatives = &generated.alternatives;
        logprobs.push(TokenLogprobs {
            picked: token(generated.token, generated.logprob),
            alternatives: alternatives.iter().map(|(id, logprob)| token(*id, *logprob)).collect(),
            text_offset,
        });
        offset_bytes += text.len();
        // A character that goes on in the next token is not passed yet.
        text_offset += ends[text_offset..].iter().take_while(|end| **end <= offset_bytes).count();
    }
    logprobs
}

/// Where each character of the text ends in the bytes it is made from. Invalid bytes become U+FFFD,
/// in the same pieces as `String::from_utf8_lossy` makes.
fn character_ends(bytes: &[u8]) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut end = 0;
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            end += character.len_utf8();
            ends.push(end);
        }
        if !chunk.invalid().is_empty() {
            end += chunk.invalid().len();
            ends.push(end);
        }
    }
    ends
}

impl TokenLogprob {
    /// The token as text; bytes that are none are spelt out, so that two tokens never look alike.
    pub(crate) fn text(&self) -> String {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                let spelt = self.bytes.iter().map(|byte| format!("\\x{byte:02x}"));
                format!("bytes:{}", spelt.collect::<String>())
            }
        }
    }
}
