//! config.json of every family: what is read from it, and what is refused.

use glinthawk_model::ModelConfig;
use serde_json::{Value, json};

fn llama31_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    })
}

fn llama2_7b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float16", "vocab_size": 32000,
    })
}

fn mistral_7b() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000,
    })
}

fn qwen25_7b() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 152064,
    })
}

fn qwen3_4b() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "use_sliding_window": false, "vocab_size": 151936,
    })
}

/// SmolLM2 as newer writers store it: rotary parameters in one place.
fn smollm2_135m() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 100000, "rope_type": "default"},
        "tie_word_embeddings": true, "vocab_size": 49152,
    })
}

/// The configuration with fields of it replaced.
fn read(base: Value, edits: Value) -> Result<ModelConfig, String> {
    let mut config = base;
    for (field, value) in edits.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelConfig::from_hf_json(config.to_string().as_bytes(), None)
        .map_err(|error| error.to_string())
}

fn near(value: f32, expected: f64) -> bool {
    (f64::from(value) / expected - 1.0).abs() < 1e-6
}

#[test]
fn families_have_their_published_number_of_parameters() {
    for (base, parameters) in [
        (llama31_8b(), 8_030_261_248),
        (llama2_7b(), 6_738_415_616),
        (mistral_7b(), 7_241_732_096),
        (qwen25_7b(), 7_615_616_512),
        (qwen3_4b(), 4_022_468_096),
        (smollm2_135m(), 134_515_008),
    ] {
        let name = base["model_type"].clone();
        assert_eq!(read(base, json!({})).unwrap().parameter_count(), parameters, "{name}");
    }
}

#[test]
fn every_field_lands_in_its_place() {
    let config = read(qwen3_4b(), json!({})).unwrap();
    assert_eq!(config.family, "qwen3");
    assert_eq!((config.layers, config.hidden, config.feed_forward), (36, 2560, 9728));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (32, 8, 128));
    assert_eq!((config.query_width(), config.kv_width(), config.qkv_width()), (4096, 1024, 6144));
    assert_eq!((config.vocab, config.context_max, config.norm_eps), (151_936, 40_960, 1e-6));
    assert_eq!((config.qkv_bias, config.qk_norm, config.tied_embeddings), (false, true, true));
    assert_eq!((config.bos_token, config.eos_tokens), (Some(151_643), vec![151_645]));
    assert_eq!((config.sliding_window, config.rope_magnitude), (None, 1.0));
    let qwen2 = read(qwen25_7b(), json!({})).unwrap();
    assert_eq!((qwen2.qkv_bias, qwen2.qk_norm, qwen2.tied_embeddings), (true, false, false));
    let llama2 = read(llama2_7b(), json!({})).unwrap();
    assert_eq!(
        (llama2.kv_heads, llama2.head_dim),
        (32, 128),
        "absent: as many heads, hidden/heads"
    );
    let nemo = read(mistral_7b(), json!({"hidden_size": 5120, "head_dim": 128})).unwrap();
    assert_eq!((nemo.query_width(), nemo.head_dim), (4096, 128), "a head size of its own");
}

#[test]
fn end_tokens_may_be_one_many_or_none() {
    for (tokens, expected) in [
        (json!([128009, 128001]), vec![128_001, 128_009]),
        (json!(7), vec![7]),
        (json!(null), vec![]),
    ] {
        let config = read(llama31_8b(), json!({"eos_token_id": tokens})).unwrap();
        assert_eq!(config.eos_tokens, expected);
    }
}

#[test]
fn plain_rotary_frequencies() {
    let config = read(smollm2_135m(), json!({})).unwrap();
    assert_eq!(config.rope_frequencies.len(), 32);
    assert!(near(config.rope_frequencies[16], 100_000_f64.powf(-0.5)), "theta is read where it is");
    let older = json!({"rope_parameters": null, "rope_theta": 100000.0});
    assert_eq!(read(smollm2_135m(), older).unwrap(), config);
    let absent = json!({"rope_parameters": null});
    assert!(near(read(smollm2_135m(), absent).unwrap().rope_frequencies[16], 0.01));
}

#[test]
fn llama3_keeps_short_waves_and_stretches_long_ones() {
    let config = read(llama31_8b(), json!({})).unwrap();
    for (pair, expected) in [
        (0, 1.0),
        (20, 1.656044008e-2),
        (28, 3.211445995e-3),
        (30, 1.371893568e-3),
        (33, 3.126937504e-4),
        (36, 7.784655274e-5),
        (63, 3.068925989e-7),
    ] {
        let frequency = config.rope_frequencies[pair];
        assert!(near(frequency, expected), "{pair}: {frequency} {expected}");
    }
    assert_eq!(config.rope_magnitude, 1.0);
}

#[test]
fn yarn_blends_over_pairs_and_lengthens_the_context() {
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let config = read(qwen25_7b(), json!({"rope_scaling": yarn})).unwrap();
    for (pair, expected) in [
        (0, 1.0),
        (20, 1.333521432e-2),
        (24, 5.375321491e-3),
        (30, 1.064360981e-3),
        (36, 1.798411559e-4),
        (40, 4.445698525e-5),
        (63, 3.102344402e-7),
    ] {
        let frequency = config.rope_frequencies[pair];
        assert!(near(frequency, expected), "{pair}: {frequency} {expected}");
    }
    assert!(near(config.rope_magnitude, 1.138629436));
    assert_eq!(config.context_max, 131_072);
    let mut stated = yarn;
    stated["attention_factor"] = json!(1.5);
    let config = read(qwen25_7b(), json!({"rope_scaling": stated})).unwrap();
    assert_eq!(config.rope_magnitude, 1.5);
}

#[test]
fn linear_scaling_divides() {
    let plain = read(llama2_7b(), json!({})).unwrap();
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2.0}});
    let config = read(llama2_7b(), linear).unwrap();
    for (frequency, plain) in config.rope_frequencies.iter().zip(&plain.rope_frequencies) {
        assert_eq!(*frequency, plain / 2.0);
    }
}

#[test]
fn a_sliding_window_holds_for_all_layers_or_none() {
    let check = |base: Value, edits: Value, expected: Option<usize>| {
        let config = read(base, edits.clone()).unwrap();
        assert_eq!(config.sliding_window, expected, "{edits}");
    };
    check(mistral_7b(), json!({}), Some(4096));
    check(mistral_7b(), json!({"sliding_window": null}), None);
    let mut unmentioned = mistral_7b();
    unmentioned.as_object_mut().unwrap().shift_remove("sliding_window");
    check(unmentioned, json!({}), Some(4096));
    check(qwen25_7b(), json!({}), None);
    check(qwen25_7b(), json!({"use_sliding_window": true}), None);
    check(qwen25_7b(), json!({"use_sliding_window": true, "max_window_layers": 0}), Some(131_072));
    check(qwen3_4b(), json!({"layer_types": vec!["full_attention"; 36]}), None);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let scaling = |kind: &str| json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
    let partial = json!({"use_sliding_window": true, "max_window_layers": 14});
    let mixed = json!({"layer_types": ["full_attention", "sliding_attention"]});
    let by_layer = json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}});
    for (base, edits, fragments) in [
        (llama2_7b(), json!({"model_type": "gemma2"}), ["model_type", "gemma2"]),
        (llama2_7b(), json!({"model_type": null}), ["model_type", "supported: llama, mistral"]),
        (llama2_7b(), json!({"architectures": ["LlamaModel"]}), ["architectures", "LlamaModel"]),
        (llama2_7b(), json!({"hidden_act": "gelu"}), ["hidden_act", "gelu"]),
        (llama2_7b(), json!({"attention_bias": true}), ["attention_bias", "true"]),
        (qwen3_4b(), json!({"attention_bias": true}), ["attention_bias", "true"]),
        (llama2_7b(), json!({"mlp_bias": true}), ["mlp_bias", "true"]),
        (llama2_7b(), json!({"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "0.5"]),
        (llama2_7b(), json!({"num_local_experts": 8}), ["num_local_experts", "8"]),
        (llama2_7b(), json!({"quantization_config": {}}), ["quantization_config", "supported"]),
        (llama2_7b(), json!({"sliding_window": 4096}), ["sliding_window", "unclear"]),
        (llama2_7b(), scaling("dynamic"), ["rope_scaling.rope_type", "dynamic"]),
        (llama2_7b(), scaling("longrope"), ["rope_scaling.rope_type", "longrope"]),
        (llama2_7b(), scaling("llama3"), ["rope_scaling.low_freq_factor", "missing"]),
        (llama2_7b(), json!({"rope_theta": -1.0}), ["rotary", "no usable frequencies"]),
        (llama2_7b(), json!({"rope_theta": "10000"}), ["rope_theta", "a number"]),
        (llama2_7b(), by_layer, ["rope_parameters.full_attention", "some layers only"]),
        (qwen25_7b(), partial, ["max_window_layers", "layer 14"]),
        (qwen25_7b(), mixed, ["layer_types", "full_attention"]),
        (llama2_7b(), json!({"num_attention_heads": 0}), ["num_attention_heads", "divide"]),
        (llama2_7b(), json!({"num_attention_heads": 33}), ["num_attention_heads", "divide"]),
        (llama2_7b(), json!({"num_key_value_heads": 0}), ["key-value heads", "between 1"]),
        (llama2_7b(), json!({"num_key_value_heads": 5}), ["key-value heads", "divide"]),
        (llama2_7b(), json!({"head_dim": 127}), ["head size", "odd"]),
        (llama2_7b(), json!({"head_dim": 1_u64 << 40}), ["head_dim", "too large"]),
        (llama2_7b(), json!({"vocab_size": 1_u64 << 40}), ["vocabulary size", "between 1"]),
        (llama2_7b(), json!({"hidden_size": null}), ["hidden_size", "missing"]),
        (llama2_7b(), json!({"hidden_size": -4096}), ["hidden_size", "whole number"]),
        (llama2_7b(), json!({"hidden_size": 4096.5}), ["hidden_size", "whole number"]),
        (llama2_7b(), json!({"rms_norm_eps": -1e-5}), ["norm epsilon", "positive"]),
        (llama2_7b(), json!({"eos_token_id": 32000}), ["special token", "32000"]),
        (llama2_7b(), json!({"eos_token_id": "</s>"}), ["eos_token_id", "token id"]),
        (mistral_7b(), json!({"sliding_window": 0}), ["sliding window", "at least 1"]),
    ] {
        let error = read(base, edits.clone()).expect_err(&edits.to_string());
        for fragment in fragments {
            assert!(error.contains(fragment), "{edits}: {error:?} does not mention {fragment:?}");
        }
    }
    let error = ModelConfig::from_hf_json(b"[1, 2", None).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    let config = llama2_7b().to_string();
    let error = ModelConfig::from_hf_json(config.as_bytes(), Some(b"?")).unwrap_err().to_string();
    assert!(error.contains("generation_config.json"), "{error}");
}
