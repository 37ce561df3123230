//! A tiny model in a Hugging Face folder: 258 rows of vocabulary for a tokenizer that knows 259 ids.

use crate::common::Random;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

const LAYERS: usize = 2;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const FEED_FORWARD: usize = 96;

/// Rows of the embedding and of the classifier: all bytes and two control tokens.
pub const VOCAB: usize = 258;

/// Read as token 258, which the model does not have.
pub const BEYOND: &str = "<new>";

/// Writes the folder's files.
pub fn write(folder: &Path) {
    fs::create_dir_all(folder).expect("the folder");
    let put = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect(name);
    put("config.json", config().to_string().as_bytes());
    put("tokenizer.json", tokenizer().to_string().as_bytes());
    put("tokenizer_config.json", json!({"eos_token": "<|im_end|>"}).to_string().as_bytes());
    put("chat_template.jinja", CHAT_TEMPLATE.as_bytes());
    put("model.safetensors", &safetensors());
}

pub const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}: \
                                 {{ message.content }}<|im_end|>{% endfor %}<|im_start|>";

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FEED_FORWARD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
    })
}

fn tokenizer() -> Value {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..256).filter(|&byte| !printable(byte)).count() as u32;
    let letters = (0..256).filter(|&byte| printable(byte)).chain(0x100..0x100 + hidden);
    let letters = letters.map(|code| char::from_u32(code).expect("in Latin").to_string());
    let vocab: Map<String, Value> = letters.zip((0..).map(Value::from)).collect();
    let added = [("<|im_start|>", true), ("<|im_end|>", true), (BEYOND, false)];
    let added = (256..).zip(added).map(|(id, (content, special))| {
        json!({
            "id": id, "content": content, "special": special, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    });
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": false,
            "vocab": vocab, "merges": [],
        },
    })
}

fn safetensors() -> Vec<u8> {
    let (query, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![query, HIDDEN]),
            ("self_attn.k_proj", vec![kv, HIDDEN]),
            ("self_attn.v_proj", vec![kv, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, query]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.up_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FEED_FORWARD]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut random = Random(11);
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape) in tensors {
        let start = data.len();
        for _ in 0..shape.iter().product::<usize>() {
            // A bf16 of either sign from 1/8 to 1/4.
            let bits = 0x3e00 | random.below(0x80) as u16 | (random.below(2) as u16) << 15;
            data.extend(bits.to_le_bytes());
        }
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name, entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}
