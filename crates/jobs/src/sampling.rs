//! A body's sampling fields: ranges and defaults of the OpenAI API, and the usual extensions.

use crate::fields::{Fields, check_tokens, must_be};
use crate::line::Endpoint;
use crate::refusal::Refusal;
use glinthawk_protocol::{Biases, Sampling};
use std::collections::BTreeMap;

/// Temperatures below are greedy: dividing by them would overflow.
const TEMPERATURE_MIN: f64 = 1e-5;
const ALTERNATIVES_MAX: i64 = 20;

/// Takes the sampling fields; `seed` is the seed of a request that names none.
pub(crate) fn read_sampling(
    fields: &mut Fields,
    endpoint: Endpoint,
    vocab: u32,
    seed: u64,
) -> Result<(Sampling, Biases), Refusal> {
    let temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0);
    // -1 is how others spell "all".
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0);
    let mut sampling = Sampling {
        temperature: if temperature < TEMPERATURE_MIN { 0.0 } else { temperature as f32 },
        top_k: u32::try_from(top_k).expect("within the range just checked"),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0) as f32,
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0) as f32,
        seed: read_seed(fields)?.unwrap_or(seed),
        ..Sampling::default()
    };
    let mut penalty = |name| Ok(fields.number(name, -2.0..=2.0)?.unwrap_or(0.0) as f32);
    let presence_penalty = penalty("presence_penalty")?;
    let frequency_penalty = penalty("frequency_penalty")?;
    let repetition_penalty = fields.number("repetition_penalty", 0.01..=100.0)?;
    sampling.repetition_penalty = repetition_penalty.unwrap_or(1.0) as f32;
    let logit_bias = read_logit_bias(fields, vocab)?;
    sampling.logprobs = match endpoint {
        Endpoint::Chat => read_chat_logprobs(fields)?,
        Endpoint::Completions => {
            fields.integer("logprobs", 0..=ALTERNATIVES_MAX)?.map(|count| count as u8)
        }
    };
    Ok((sampling, Biases { presence_penalty, frequency_penalty, logit_bias }))
}

/// Any 64-bit integer; a negative one is its two's complement.
fn read_seed(fields: &mut Fields) -> Result<Option<u64>, Refusal> {
    let Some(seed) = fields.read::<i128>("seed", "an integer")? else { return Ok(None) };
    let seed = u64::try_from(seed).or_else(|_| i64::try_from(seed).map(i64::cast_unsigned));
    seed.map(Some).map_err(|_| must_be("seed", "an integer of 64 bits"))
}

fn read_logit_bias(fields: &mut Fields, vocab: u32) -> Result<Vec<(u32, f32)>, Refusal> {
    let refuse = || {
        let expected = "an object of token ids, each with a number from -100 to 100";
        must_be("logit_bias", expected)
    };
    let Some(value) = fields.take("logit_bias") else { return Ok(Vec::new()) };
    let entries: BTreeMap<TokenKey, f64> = crate::fields::parse(value).ok_or_else(refuse)?;
    let mut biases = Vec::with_capacity(entries.len());
    for (TokenKey(token), bias) in entries {
        check_tokens("logit_bias", &[token], vocab)?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(refuse());
        }
        biases.push((token, bias as f32));
    }
    Ok(biases)
}

/// A token id as an object's key, where JSON only has strings.
#[derive(PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(try_from = "String")]
struct TokenKey(u32);

impl TryFrom<String> for TokenKey {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

fn read_chat_logprobs(fields: &mut Fields) -> Result<Option<u8>, Refusal> {
    let wanted = fields.flag("logprobs")?;
    let alternatives = fields.integer("top_logprobs", 0..=ALTERNATIVES_MAX)?.unwrap_or(0);
    if alternatives > 0 && !wanted {
        return Err(Refusal::field("top_logprobs", "`top_logprobs` needs `logprobs` to be true"));
    }
    Ok(wanted.then_some(alternatives as u8))
}
