//! A configuration from a Hugging Face folder's config.json and generation_config.json.
//! What a field asks for is done or refused, never ignored.

use super::ModelConfig;
use super::fields::Fields;
use super::rope::{Rope, Scaling, yarn_magnitude};
use crate::error::ConfigError;
use serde_json::Value;

/// What sets a family apart from the others.
struct Family {
    model_type: &'static str,
    architecture: &'static str,
    qkv_bias: bool,
    qk_norm: bool,
    /// Key-value heads if config.json has none; `None` means as many as attention heads.
    kv_heads_absent: Option<usize>,
    /// Head size if config.json has none; `None` means hidden size over heads.
    head_dim_absent: Option<usize>,
    window: Window,
}

/// How a family says which layers attend through a sliding window.
enum Window {
    /// It has none.
    Never,
    /// `sliding_window` holds for all layers.
    All,
    /// `use_sliding_window` turns it on from layer `max_window_layers` on.
    Switched,
}

const FAMILIES: [Family; 4] = [
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        qkv_bias: false,
        qk_norm: false,
        kv_heads_absent: None,
        head_dim_absent: None,
        window: Window::Never,
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        qkv_bias: false,
        qk_norm: false,
        kv_heads_absent: Some(8),
        head_dim_absent: None,
        window: Window::All,
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        qkv_bias: true,
        qk_norm: false,
        kv_heads_absent: Some(32),
        head_dim_absent: None,
        window: Window::Switched,
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        qkv_bias: false,
        qk_norm: true,
        kv_heads_absent: Some(32),
        head_dim_absent: Some(128),
        window: Window::Switched,
    },
];

/// The families' window if config.json does not mention it; null there means none.
const WINDOW_ABSENT: usize = 4096;

/// Fields that change the computation in ways that are not supported, unless they hold this.
const REFUSED_UNLESS: [(&str, Unless); 13] = [
    ("attention_bias", Unless::False),
    ("mlp_bias", Unless::False),
    ("hidden_act", Unless::Text("silu")),
    ("partial_rotary_factor", Unless::One),
    ("quantization_config", Unless::Absent),
    ("num_experts", Unless::Absent),
    ("num_local_experts", Unless::Absent),
    ("no_rope_layers", Unless::Absent),
    ("use_qk_norm", Unless::False),
    ("attention_multiplier", Unless::Absent),
    ("embedding_multiplier", Unless::One),
    ("residual_multiplier", Unless::One),
    ("logits_scaling", Unless::One),
];

#[derive(Clone, Copy)]
enum Unless {
    Absent,
    False,
    One,
    Text(&'static str),
}

impl ModelConfig {
    /// Reads config.json and, if the folder has one, generation_config.json.
    pub fn from_hf_json(config: &[u8], generation: Option<&[u8]>) -> Result<Self, ConfigError> {
        let fields = Fields::parse("config.json", config)?;
        let family = family(&fields)?;
        refuse_unsupported(&fields)?;
        let heads = fields.size("num_attention_heads")?;
        let hidden = fields.size("hidden_size")?;
        let head_dim = match (fields.size_or_absent("head_dim")?, family.head_dim_absent) {
            (Some(head_dim), _) | (None, Some(head_dim)) => head_dim,
            (None, None) => hidden_over_heads(hidden, heads)?,
        };
        let layers = fields.size("num_hidden_layers")?;
        let context_max = fields.size("max_position_embeddings")?;
        let (theta, scaling) = rope_parameters(&fields, context_max)?;
        // Allocates one number for each pair, so the size is bounded here already.
        if head_dim > 1 << 12 {
            return Err(ConfigError::new("head_dim", format!("{head_dim} is too large")));
        }
        let rope = Rope::new(head_dim, theta, &scaling)?;
        let mut eos_tokens = fields.tokens("eos_token_id")?;
        if let Some(generation) = generation {
            let generation = Fields::parse("generation_config.json", generation)?;
            eos_tokens.extend(generation.tokens("eos_token_id")?);
        }
        eos_tokens.sort_unstable();
        eos_tokens.dedup();
        ModelConfig {
            family: family.model_type.to_owned(),
            layers,
            hidden,
            heads,
            kv_heads: fields
                .size_or_absent("num_key_value_heads")?
                .unwrap_or(family.kv_heads_absent.unwrap_or(heads)),
            head_dim,
            feed_forward: fields.size("intermediate_size")?,
            vocab: fields.size("vocab_size")?,
            context_max: stretched_context(context_max, &scaling),
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_frequencies: rope.frequencies,
            rope_magnitude: rope.magnitude,
            qkv_bias: family.qkv_bias,
            qk_norm: family.qk_norm,
            tied_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(false),
            sliding_window: sliding_window(&fields, family, layers)?,
            bos_token: fields.tokens("bos_token_id")?.first().copied(),
            eos_tokens,
        }
        .checked()
    }
}

/// The family's row of the table, if this is one of its language models.
fn family(fields: &Fields) -> Result<&'static Family, ConfigError> {
    let model_type = fields.text("model_type")?.unwrap_or("");
    let known = || {
        let names: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
        names.join(", ")
    };
    let family =
        FAMILIES.iter().find(|family| family.model_type == model_type).ok_or_else(|| {
            let reason = format!("{model_type:?} is not supported (supported: {})", known());
            ConfigError::new("model_type", reason)
        })?;
    match fields.get("architectures") {
        None => Ok(family),
        Some(Value::Array(names)) if names.iter().any(|name| name == family.architecture) => {
            Ok(family)
        }
        Some(other) => {
            let reason = format!("{other} is not supported (supported: {})", family.architecture);
            Err(ConfigError::new("architectures", reason))
        }
    }
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ConfigError> {
    for (field, unless) in REFUSED_UNLESS {
        let Some(value) = fields.get(field) else { continue };
        let fine = match unless {
            Unless::Absent => false,
            Unless::False => value == &Value::Bool(false),
            Unless::One => value.as_f64() == Some(1.0),
            Unless::Text(text) => value == text,
        };
        if !fine {
            let shown = if value.is_object() { "this".to_owned() } else { value.to_string() };
            return Err(ConfigError::new(field, format!("{shown} is not supported")));
        }
    }
    Ok(())
}

fn hidden_over_heads(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if heads == 0 || !hidden.is_multiple_of(heads) {
        let reason = format!("{heads} do not divide the hidden size of {hidden}");
        return Err(ConfigError::new("num_attention_heads", reason));
    }
    Ok(hidden / heads)
}

/// The window of all layers; a model whose layers differ is refused.
fn sliding_window(
    fields: &Fields,
    family: &Family,
    layers: usize,
) -> Result<Option<usize>, ConfigError> {
    let windowed_from = match family.window {
        Window::Never if fields.get("sliding_window").is_some() => {
            let reason = "the family has no sliding window, so what this asks for is unclear";
            return Err(ConfigError::new("sliding_window", reason));
        }
        Window::Never => layers,
        Window::All => 0,
        Window::Switched if !fields.bool("use_sliding_window")?.unwrap_or(false) => layers,
        Window::Switched => fields.size_or_absent("max_window_layers")?.unwrap_or(28).min(layers),
    };
    let stated = match fields.has("sliding_window") {
        true => fields.size_or_absent("sliding_window")?,
        false => Some(WINDOW_ABSENT),
    };
    let window = match (stated, windowed_from) {
        (None, _) => None,
        (_, from) if from == layers => None,
        (Some(window), 0) => Some(window),
        (Some(_), from) => {
            let reason = format!("a sliding window from layer {from} on only is not supported");
            return Err(ConfigError::new("max_window_layers", reason));
        }
    };
    check_layer_types(fields, window)?;
    Ok(window)
}

/// `layer_types`, if present, must agree with the other fields.
fn check_layer_types(fields: &Fields, window: Option<usize>) -> Result<(), ConfigError> {
    let Some(value) = fields.get("layer_types") else { return Ok(()) };
    let expected = if window.is_some() { "sliding_attention" } else { "full_attention" };
    let agrees = |kinds: &Vec<Value>| kinds.iter().all(|kind| kind == expected);
    if !value.as_array().is_some_and(agrees) {
        let reason = format!("anything but {expected:?} in all layers is not supported here");
        return Err(ConfigError::new("layer_types", reason));
    }
    Ok(())
}

/// Theta and scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.
fn rope_parameters(fields: &Fields, context: usize) -> Result<(f64, Scaling), ConfigError> {
    let nested = match fields.object("rope_parameters")? {
        Some(nested) => Some(nested),
        None => fields.object("rope_scaling")?,
    };
    let theta = match &nested {
        Some(nested) if nested.has("rope_theta") => nested.number("rope_theta")?,
        _ => fields.number("rope_theta")?,
    };
    let scaling = match &nested {
        Some(nested) => scaling(nested, context)?,
        None => Scaling::None,
    };
    Ok((theta.unwrap_or(10_000.0), scaling))
}

fn scaling(rope: &Fields, context: usize) -> Result<Scaling, ConfigError> {
    if let Some(kind) = rope.nested() {
        let reason = "parameters for some layers only are not supported";
        return Err(ConfigError::new(rope.named(kind), reason));
    }
    if let Some(share) = rope.number("partial_rotary_factor")?.filter(|share| *share != 1.0) {
        let reason = format!("{share} is not supported");
        return Err(ConfigError::new("partial_rotary_factor", reason));
    }
    let kind = match rope.text("rope_type")? {
        Some(kind) => kind,
        None => rope.text("type")?.unwrap_or("default"),
    };
    let required = |field: &str| {
        rope.number(field)?.ok_or_else(|| ConfigError::new(rope.named(field), "is missing"))
    };
    let context_original = rope.number("original_max_position_embeddings")?;
    match kind {
        "default" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: required("factor")? }),
        "llama3" => Ok(Scaling::Llama3 {
            factor: required("factor")?,
            low_factor: required("low_freq_factor")?,
            high_factor: required("high_freq_factor")?,
            context_original: required("original_max_position_embeddings")?,
        }),
        "yarn" => {
            let factor = required("factor")?;
            let magnitude = match rope.number("attention_factor")? {
                Some(stated) => stated,
                None => match (rope.number("mscale")?, rope.number("mscale_all_dim")?) {
                    (Some(own), Some(all)) if own != 0.0 && all != 0.0 => {
                        yarn_magnitude(factor, own) / yarn_magnitude(factor, all)
                    }
                    _ => yarn_magnitude(factor, 1.0),
                },
            };
            Ok(Scaling::Yarn {
                factor,
                beta_fast: rope.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.number("beta_slow")?.unwrap_or(1.0),
                context_original: context_original.unwrap_or(context as f64),
                truncate: rope.bool("truncate")?.unwrap_or(true),
                magnitude,
            })
        }
        other => {
            let reason = format!("{other:?} is not supported (linear, llama3 and yarn are)");
            Err(ConfigError::new(rope.named("rope_type"), reason))
        }
    }
}

/// YaRN configurations often state the length before stretching.
fn stretched_context(context: usize, scaling: &Scaling) -> usize {
    match scaling {
        Scaling::Yarn { factor, context_original, .. } => {
            context.max((factor * context_original) as usize)
        }
        _ => context,
    }
}
