//! A request that can be run: a body checked field by field, rendered and tokenized.

use crate::digest::HARMLESS;
use crate::fields::{Fields, List, check_tokens, must_be, parse};
use crate::key::seed_of_choice;
use crate::line::Endpoint;
use crate::messages::read_messages;
use crate::refusal::{Refusal, shortened};
use crate::sampling::read_sampling;
use crate::served::ServedModel;
use glinthawk_model::{Tokenizer, guarded};
use glinthawk_protocol::{Biases, Prompt, Sampling};
use serde_json::value::RawValue;

/// Choices of one request, at most.
pub(crate) const CHOICES_MAX: u32 = 128;
const STOP_STRINGS_MAX: usize = 16;
const STOP_STRING_BYTES_MAX: usize = 1024;
const STOP_IDS_MAX: usize = 256;
/// Tokens that the OpenAI API generates for a plain prompt without a limit.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Bytes per token that hardly any text reaches.
const UNLIKELY_TOKEN_BYTES: usize = 32;
/// The most that a tokenizer's Unicode normalization can shorten a text.
const NORMALIZATION: usize = 3;

/// Fields of the OpenAI API that we cannot honour, with the values that ask for nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("suffix", &["\"\""]),
    ("best_of", &["1"]),
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("reasoning_effort", &["\"none\""]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
];

/// A checked request, ready for the engine.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) endpoint: Endpoint,
    pub(crate) tokens: Vec<u32>,
    tokens_max: u32,
    /// Whether `tokens_max` is the request's own limit, not all that the context has room for.
    limited: bool,
    /// Sorted.
    stop_ids: Vec<u32>,
    pub(crate) stop_strings: Vec<String>,
    sampling: Sampling,
    biases: Biases,
    /// How many completions are wanted (`n`).
    pub(crate) choices: u32,
    /// The prompt's text, if it is to be repeated in front of the completion.
    pub(crate) echo: Option<String>,
    /// Lower goes first.
    priority: i32,
}

impl Request {
    /// Checks a body; `seed` is the seed of a request that names none.
    pub(crate) fn read(
        model: &ServedModel,
        endpoint: Endpoint,
        mut fields: Fields,
        seed: u64,
    ) -> Result<Self, Refusal> {
        let input = match endpoint {
            Endpoint::Chat => {
                fields.take("messages").ok_or_else(|| Refusal::missing("messages"))?
            }
            Endpoint::Completions => {
                fields.take("prompt").ok_or_else(|| Refusal::missing("prompt"))?
            }
        };
        let (sampling, biases) = read_sampling(&mut fields, endpoint, model.vocab, seed)?;
        let tokens_max = read_tokens_max(&mut fields, endpoint)?;
        let choices = fields.integer("n", 1..=i64::from(CHOICES_MAX))?.unwrap_or(1) as u32;
        let priority = fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
        let stop_strings = read_stop_strings(&mut fields)?;
        let stop_ids = read_stop_ids(&mut fields, model)?;
        let echo = endpoint == Endpoint::Completions && fields.flag("echo")?;
        let reading = match endpoint {
            Endpoint::Chat => PromptReading::default(),
            Endpoint::Completions => PromptReading::read(&mut fields)?,
        };
        if echo && sampling.logprobs.is_some() {
            let what = "the prompt's own log-probabilities are not available";
            return Err(Refusal::unsupported("echo", what));
        }
        refuse_unsupported(&mut fields)?;
        for name in HARMLESS {
            fields.take(name);
        }
        fields.finish()?;

        let (tokens, text) = match endpoint {
            Endpoint::Chat => (chat_tokens(model, input)?, None),
            Endpoint::Completions => prompt_tokens(model, input, reading)?,
        };
        let room = room_left(model, endpoint, tokens.len())?;
        let echo = echo.then(|| text.unwrap_or_else(|| model.tokenizer.decode(&tokens, true)));
        Ok(Self {
            endpoint,
            tokens_max: tokens_max.map_or(room, |wanted| wanted.min(room)),
            limited: tokens_max.is_some(),
            tokens,
            stop_ids,
            stop_strings,
            sampling,
            biases,
            choices,
            echo,
            priority: priority.unwrap_or(0) as i32,
        })
    }

    /// Whether generating this token ends a completion.
    pub(crate) fn ends_at(&self, token: u32) -> bool {
        self.stop_ids.binary_search(&token).is_ok()
    }

    /// Tokens of a completion for forecasts: as many as it may have, or `assumed` where the request
    /// does not say.
    pub(crate) fn output_tokens(&self, assumed: u32) -> u32 {
        if self.limited { self.tokens_max } else { self.tokens_max.min(assumed) }
    }

    pub(crate) fn wants_logprobs(&self) -> bool {
        self.sampling.logprobs.is_some()
    }

    /// One of the request's choices as the engine runs it.
    pub(crate) fn prompt(&self, choice: u32) -> Prompt {
        assert!(choice < self.choices);
        let seed = seed_of_choice(self.sampling.seed, choice);
        Prompt {
            tokens: self.tokens.clone(),
            tokens_max: self.tokens_max,
            stop_ids: self.stop_ids.clone(),
            sampling: Sampling { seed, ..self.sampling.clone() },
            biases: self.biases.clone(),
            watched: !self.stop_strings.is_empty(),
            priority: self.priority,
        }
    }
}

fn read_tokens_max(fields: &mut Fields, endpoint: Endpoint) -> Result<Option<u32>, Refusal> {
    let range = 1..=i64::from(u32::MAX);
    let older = fields.integer("max_tokens", range.clone())?;
    let wanted = match endpoint {
        Endpoint::Completions => Some(older.unwrap_or(i64::from(COMPLETION_TOKENS_DEFAULT))),
        Endpoint::Chat => match (fields.integer("max_completion_tokens", range)?, older) {
            (Some(newer), Some(older)) if newer != older => {
                let message = "`max_tokens` and `max_completion_tokens` differ: give one";
                return Err(Refusal::field("max_completion_tokens", message));
            }
            (newer, older) => newer.or(older),
        },
    };
    Ok(wanted.map(|count| u32::try_from(count).expect("within the range just checked")))
}

fn read_stop_strings(fields: &mut Fields) -> Result<Vec<String>, Refusal> {
    let refuse = || {
        let expected = format!(
            "a string or up to {STOP_STRINGS_MAX} strings, each of 1 to {STOP_STRING_BYTES_MAX} bytes"
        );
        must_be("stop", &expected)
    };
    let Some(value) = fields.take("stop") else { return Ok(Vec::new()) };
    let strings = match parse::<String>(value) {
        Some(string) => vec![string],
        None => parse::<List<String, STOP_STRINGS_MAX>>(value).ok_or_else(refuse)?.0,
    };
    let fits = |string: &String| (1..=STOP_STRING_BYTES_MAX).contains(&string.len());
    if strings.iter().all(fits) { Ok(strings) } else { Err(refuse()) }
}

fn read_stop_ids(fields: &mut Fields, model: &ServedModel) -> Result<Vec<u32>, Refusal> {
    let expected = format!("up to {STOP_IDS_MAX} token ids");
    let own = fields.read::<List<u32, STOP_IDS_MAX>>("stop_token_ids", &expected)?;
    let mut ids = own.map_or(Vec::new(), |list| list.0);
    check_tokens("stop_token_ids", &ids, model.vocab)?;
    if !fields.flag("ignore_eos")? {
        ids.extend(&model.eos_tokens);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), Refusal> {
    for (name, harmless) in UNSUPPORTED {
        match fields.take(name) {
            Some(value) if !harmless.contains(&value.get()) => {
                return Err(Refusal::unsupported(name, "not supported"));
            }
            _ => {}
        }
    }
    if let Some(format) = fields.take("response_format") {
        let kind: Option<String> =
            parse::<Fields>(format).and_then(|mut format| format.take("type").and_then(parse));
        if kind.as_deref() != Some("text") {
            return Err(Refusal::unsupported("response_format", "only type \"text\" is supported"));
        }
    }
    Ok(())
}

fn chat_tokens(model: &ServedModel, value: &RawValue) -> Result<Vec<u32>, Refusal> {
    let messages = read_messages(value)?;
    let Some(template) = &model.template else {
        let message = format!("model {} has no chat template: use `prompt`", model.name);
        return Err(Refusal::field("messages", message));
    };
    check_text(model, "messages", messages.iter().map(|message| message.content.len()).sum())?;
    let rendered = template
        .prepare(&model.tokenizer, &messages)
        .map_err(|error| Refusal::field("messages", shortened(&error.to_string())))?;
    // A template may say much more than the messages do.
    check_text(model, "messages", rendered.text_bytes())?;
    let tokens = encoded("messages", || rendered.encode(&model.tokenizer))?;
    check_not_empty("messages", &tokens)?;
    check_text_tokens(model, "messages", &tokens)?;
    Ok(tokens)
}

/// The tokens of a text, unless the model's tokenizer breaks on it.
fn encoded(param: &str, encode: impl FnOnce() -> Vec<u32>) -> Result<Vec<u32>, Refusal> {
    let message = "the tokenizers library fails on this text, with the model's tokenizer.json";
    guarded(encode).ok_or_else(|| Refusal::field(param, message))
}

/// How a `prompt` string becomes tokens.
#[derive(Clone, Copy, Default)]
struct PromptReading {
    /// No begin-of-text token goes in front.
    bare: bool,
    /// Control tokens written in the text are control tokens.
    parse_special: bool,
}

impl PromptReading {
    fn read(fields: &mut Fields) -> Result<Self, Refusal> {
        let added = fields.read("add_special_tokens", "true or false")?.unwrap_or(true);
        Ok(Self { bare: !added, parse_special: fields.flag("parse_special")? })
    }

    fn encode(self, tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        match (self.parse_special, self.bare) {
            (false, true) => tokenizer.encode(text),
            (false, false) => tokenizer.encode_prompt(text),
            (true, true) => tokenizer.encode_rendered(text, None),
            (true, false) => tokenizer.encode_rendered_prompt(text),
        }
    }
}

/// The prompt's tokens, and its text if it came as text.
fn prompt_tokens(
    model: &ServedModel,
    value: &RawValue,
    reading: PromptReading,
) -> Result<(Vec<u32>, Option<String>), Refusal> {
    if let Some(text) = parse::<String>(value) {
        if text.is_empty() {
            return Err(Refusal::field("prompt", "`prompt` is empty"));
        }
        check_text(model, "prompt", text.len())?;
        let tokens = encoded("prompt", || reading.encode(&model.tokenizer, &text))?;
        check_not_empty("prompt", &tokens)?;
        check_text_tokens(model, "prompt", &tokens)?;
        return Ok((tokens, Some(text)));
    }
    let several = value.get().strip_prefix('[').map(str::trim_start);
    if several.is_some_and(|items| items.starts_with(['"', '['])) {
        return Err(Refusal::field(
            "prompt",
            "a list of prompts in `prompt`: give each its own line",
        ));
    }
    let tokens: Vec<u32> =
        parse(value).ok_or_else(|| must_be("prompt", "a string or an array of token ids"))?;
    check_not_empty("prompt", &tokens)?;
    check_tokens("prompt", &tokens, model.vocab)?;
    Ok((tokens, None))
}

/// Refuses a text with a token that only the tokenizer knows, and says what was written for it.
fn check_text_tokens(model: &ServedModel, param: &str, tokens: &[u32]) -> Result<(), Refusal> {
    check_tokens(param, tokens, model.vocab).map_err(|refusal| {
        let token = tokens.iter().find(|token| **token >= model.vocab);
        let text = token.map_or_else(String::new, |token| model.tokenizer.token_text(*token));
        let message = format!("{}; the tokenizer reads {text:?} as it", refusal.message);
        Refusal { message, ..refusal }
    })
}

fn check_not_empty(name: &str, tokens: &[u32]) -> Result<(), Refusal> {
    if tokens.is_empty() {
        return Err(Refusal::field(name, format!("`{name}` has no tokens")));
    }
    Ok(())
}

/// Refuses a text that cannot fit before a tokenizer spends time and memory on it.
fn check_text(model: &ServedModel, param: &str, bytes: usize) -> Result<(), Refusal> {
    let context_max = model.context_max;
    let fits = |token_bytes: usize| bytes / token_bytes < context_max as usize;
    // Looking for the longest token is only worth it for texts that are unlikely to fit.
    if fits(UNLIKELY_TOKEN_BYTES) || fits(NORMALIZATION * model.longest_token_bytes()) {
        return Ok(());
    }
    let message =
        format!("the context holds {context_max} tokens; a text of {bytes} bytes has more");
    Err(context_length_exceeded(param, message))
}

/// How many tokens may be generated after a prompt of this length.
fn room_left(model: &ServedModel, endpoint: Endpoint, length: usize) -> Result<u32, Refusal> {
    let context_max = model.context_max;
    if let Ok(length) = u32::try_from(length)
        && length < context_max
    {
        return Ok(context_max - length);
    }
    let param = if endpoint == Endpoint::Chat { "messages" } else { "prompt" };
    let message = format!(
        "the context holds {context_max} tokens; the prompt alone has {length} and leaves no room to answer"
    );
    Err(context_length_exceeded(param, message))
}

fn context_length_exceeded(param: &str, message: String) -> Refusal {
    Refusal { message, param: Some(param.to_owned()), code: Some("context_length_exceeded") }
}
