//! A configuration from a GGUF file's metadata.
//! What a key asks for is done or refused, never ignored.

use super::ModelConfig;
use super::rope::{Rope, Scaling, yarn_magnitude};
use crate::error::ConfigError;
use crate::source::gguf::{Metadata, Value};

/// The tensor with a divisor for each rotary pair, if the model has one.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// What the tensor directory, rather than the metadata, says about the configuration.
pub(crate) struct FromTensors {
    /// There is no `output.weight`.
    pub tied_embeddings: bool,
    /// There is a `blk.0.attn_q.bias`.
    pub qkv_bias: bool,
    /// There is a `blk.0.attn_q_norm.weight`.
    pub qk_norm: bool,
    /// The values of [`ROPE_DIVISORS`].
    pub rope_divisors: Option<Vec<f32>>,
}

/// What sets a family apart from the others.
struct Family {
    architecture: &'static str,
    /// `Some` where the family's attention always or never has it.
    qkv_bias: Option<bool>,
    qk_norm: bool,
    /// Query and key rows are stored in the order for adjacent rotary pairs.
    adjacent_pairs: bool,
}

const FAMILIES: [Family; 3] = [
    // Mistral's files call themselves llama as well.
    Family { architecture: "llama", qkv_bias: None, qk_norm: false, adjacent_pairs: true },
    Family { architecture: "qwen2", qkv_bias: Some(true), qk_norm: false, adjacent_pairs: false },
    Family { architecture: "qwen3", qkv_bias: Some(false), qk_norm: true, adjacent_pairs: false },
];

/// Keys that change the computation in ways that are not supported, unless they hold this.
const REFUSED_UNLESS: [(&str, f64); 13] = [
    ("expert_count", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.causal", 1.0),
    ("use_parallel_residual", 0.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
];

/// Control tokens that end a turn or a text; files often name only one of them as end of sequence.
const END_TOKENS: [&str; 5] =
    ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"];

const CONTROL_TOKEN: i64 = 3;

impl ModelConfig {
    /// Reads a GGUF file's metadata.
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        tensors: FromTensors,
    ) -> Result<Self, ConfigError> {
        let keys = Keys::new(metadata)?;
        refuse_unsupported(&keys)?;
        let heads = keys.size("attention.head_count")?;
        let hidden = keys.size("embedding_length")?;
        let head_dim = head_dim(&keys, hidden, heads)?;
        let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
        let scaling = scaling(&keys, head_dim, tensors.rope_divisors)?;
        let rope = Rope::new(head_dim, theta, &scaling)?;
        let norm_eps = keys.number("attention.layer_norm_rms_epsilon")?.ok_or_else(|| {
            ConfigError::new(keys.named("attention.layer_norm_rms_epsilon"), "is missing")
        })?;
        if keys.family.qk_norm != tensors.qk_norm {
            let reason = format!("q and k norms do not fit the {} family", keys.name());
            return Err(ConfigError::new("blk.0.attn_q_norm.weight", reason));
        }
        ModelConfig {
            family: keys.name().to_owned(),
            layers: keys.size("block_count")?,
            hidden,
            heads,
            kv_heads: keys.size_or_absent("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            feed_forward: keys.size("feed_forward_length")?,
            vocab: vocab(&keys)?,
            context_max: keys.size("context_length")?,
            norm_eps: norm_eps as f32,
            rope_frequencies: rope.frequencies,
            rope_magnitude: rope.magnitude,
            qkv_bias: keys.family.qkv_bias.unwrap_or(tensors.qkv_bias),
            qk_norm: keys.family.qk_norm,
            tied_embeddings: tensors.tied_embeddings,
            sliding_window: keys
                .size_or_absent("attention.sliding_window")?
                .filter(|size| *size > 0),
            bos_token: token(metadata, "tokenizer.ggml.bos_token_id")?,
            eos_tokens: eos_tokens(metadata)?,
        }
        .checked()
    }
}

/// Whether the architecture's query and key rows are stored for adjacent rotary pairs.
pub(crate) fn has_adjacent_pairs(config: &ModelConfig) -> bool {
    FAMILIES.iter().any(|family| family.architecture == config.family && family.adjacent_pairs)
}

fn refuse_unsupported(keys: &Keys<'_>) -> Result<(), ConfigError> {
    for (key, fine) in REFUSED_UNLESS {
        let held = match keys.get(key) {
            None => continue,
            Some(Value::Bool(value)) => Some(f64::from(u8::from(*value))),
            Some(_) => keys.metadata.float(&keys.named(key)),
        };
        if held != Some(fine) {
            let shown = held.map_or("this".to_owned(), |held| held.to_string());
            return Err(ConfigError::new(keys.named(key), format!("{shown} is not supported")));
        }
    }
    Ok(())
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    let head_dim = match keys.size_or_absent("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let reason = format!("{heads} do not divide the hidden size of {hidden}");
            return Err(ConfigError::new(keys.named("attention.head_count"), reason));
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(length) = keys.size_or_absent(key)?.filter(|length| *length != head_dim) {
            let reason = format!("{length} is not supported, the head size being {head_dim}");
            return Err(ConfigError::new(keys.named(key), reason));
        }
    }
    // Allocates one number for each pair, so the size is bounded here already.
    if head_dim > 1 << 12 {
        let reason = format!("{head_dim} is too large");
        return Err(ConfigError::new(keys.named("attention.key_length"), reason));
    }
    Ok(head_dim)
}

fn scaling(
    keys: &Keys<'_>,
    head_dim: usize,
    divisors: Option<Vec<f32>>,
) -> Result<Scaling, ConfigError> {
    let factor = match keys.number("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.number("rope.scale_linear")?,
    };
    // Writers use 0 to say that there is none.
    let factor = factor.filter(|factor| *factor != 0.0);
    let stated = keys.text("rope.scaling.type")?;
    let kind = stated.unwrap_or(if factor.is_some() { "linear" } else { "none" });
    if let Some(divisors) = divisors {
        if divisors.len() != head_dim / 2 {
            let reason = format!("{} divisors for {} pairs", divisors.len(), head_dim / 2);
            return Err(ConfigError::new(ROPE_DIVISORS, reason));
        }
        if kind != "none" && factor.is_some_and(|factor| factor != 1.0) {
            let reason = format!("{kind:?} on top of {ROPE_DIVISORS} is not supported");
            return Err(ConfigError::new(keys.named("rope.scaling.type"), reason));
        }
        return Ok(Scaling::Divisors(divisors));
    }
    let required =
        || factor.ok_or_else(|| ConfigError::new(keys.named("rope.scaling.factor"), "is missing"));
    match kind {
        "none" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: required()? }),
        "yarn" => {
            let factor = required()?;
            let original = match keys.size_or_absent("rope.scaling.original_context_length")? {
                Some(original) => original,
                None => keys.size("context_length")?,
            };
            Ok(Scaling::Yarn {
                factor,
                beta_fast: keys.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                context_original: original as f64,
                truncate: true,
                magnitude: yarn_magnitude(factor, 1.0),
            })
        }
        other => {
            let reason = format!("{other:?} is not supported (linear and yarn are)");
            Err(ConfigError::new(keys.named("rope.scaling.type"), reason))
        }
    }
}

fn vocab(keys: &Keys<'_>) -> Result<usize, ConfigError> {
    if let Some(vocab) = keys.size_or_absent("vocab_size")? {
        return Ok(vocab);
    }
    let tokens = keys.metadata.strings("tokenizer.ggml.tokens");
    tokens.map(<[String]>::len).ok_or_else(|| {
        let reason = "is missing, and so is tokenizer.ggml.tokens";
        ConfigError::new(keys.named("vocab_size"), reason)
    })
}

fn token(metadata: &Metadata, key: &str) -> Result<Option<u32>, ConfigError> {
    if metadata.get(key).is_none() {
        return Ok(None);
    }
    let token = metadata.unsigned(key).and_then(|token| u32::try_from(token).ok());
    token.map(Some).ok_or_else(|| ConfigError::new(key, "must be a token id"))
}

fn eos_tokens(metadata: &Metadata) -> Result<Vec<u32>, ConfigError> {
    let mut tokens = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        tokens.extend(token(metadata, &format!("tokenizer.ggml.{key}"))?);
    }
    let texts = metadata.strings("tokenizer.ggml.tokens").unwrap_or_default();
    let kinds = metadata.integers("tokenizer.ggml.token_type").unwrap_or_default();
    for (token, (text, kind)) in texts.iter().zip(kinds).enumerate() {
        if *kind == CONTROL_TOKEN && END_TOKENS.contains(&text.as_str()) {
            tokens.push(token as u32);
        }
    }
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

/// The keys that begin with the architecture's name, read with their type checked.
struct Keys<'a> {
    metadata: &'a Metadata,
    family: &'static Family,
}

impl<'a> Keys<'a> {
    fn new(metadata: &'a Metadata) -> Result<Self, ConfigError> {
        const KEY: &str = "general.architecture";
        let name = metadata
            .string(KEY)
            .ok_or_else(|| ConfigError::new(KEY, "is missing or not a text"))?;
        let family =
            FAMILIES.iter().find(|family| family.architecture == name).ok_or_else(|| {
                let known: Vec<_> = FAMILIES.iter().map(|family| family.architecture).collect();
                let reason = format!("{name:?} is not supported (supported: {})", known.join(", "));
                ConfigError::new(KEY, reason)
            })?;
        Ok(Self { metadata, family })
    }

    fn name(&self) -> &'static str {
        self.family.architecture
    }

    fn named(&self, key: &str) -> String {
        format!("{}.{key}", self.name())
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.metadata.get(&self.named(key))
    }

    /// A size, or a size for each layer if all are the same.
    fn size_or_absent(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let wrong = |reason: &str| ConfigError::new(self.named(key), reason);
        let value = match self.get(key) {
            None => return Ok(None),
            Some(Value::Integers(sizes)) => {
                let first = *sizes.first().ok_or_else(|| wrong("is empty"))?;
                if sizes.iter().any(|size| *size != first) {
                    return Err(wrong("sizes that differ between layers are not supported"));
                }
                u64::try_from(first).ok()
            }
            Some(_) => self.metadata.unsigned(&self.named(key)),
        };
        let size = value.and_then(|value| usize::try_from(value).ok());
        size.map(Some).ok_or_else(|| wrong("must be a whole number"))
    }

    fn size(&self, key: &str) -> Result<usize, ConfigError> {
        let missing = || ConfigError::new(self.named(key), "is missing");
        self.size_or_absent(key)?.ok_or_else(missing)
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        if self.get(key).is_none() {
            return Ok(None);
        }
        let number = self.metadata.float(&self.named(key));
        number.map(Some).ok_or_else(|| ConfigError::new(self.named(key), "must be a number"))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ConfigError::new(self.named(key), "must be a text")),
        }
    }
}
