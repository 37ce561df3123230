//! Tiny models made up by the tests: their tensors, and writers for the formats they are stored in.

mod gguf;

pub use gguf::{GgufFile, GgufTensor, Meta};

use glinthawk_model::{LayerTensor, Model, ModelError, ModelIdentity, Tensor};
use half::bf16;
use serde_json::{Value, json};
use std::path::Path;

/// What varies between the tiny models; all sizes are fixed.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub family: &'static str,
    pub qkv_bias: bool,
    pub qk_norm: bool,
    pub tied: bool,
}

pub const LLAMA: Kind = Kind { family: "llama", qkv_bias: false, qk_norm: false, tied: false };
pub const QWEN2: Kind = Kind { family: "qwen2", qkv_bias: true, qk_norm: false, tied: true };
pub const QWEN3: Kind = Kind { family: "qwen3", qkv_bias: false, qk_norm: true, tied: false };

pub const LAYERS: usize = 2;
pub const HIDDEN: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 32;
pub const FEED_FORWARD: usize = 96;
pub const VOCAB: usize = 40;

/// A tensor of a tiny model under all its names.
#[derive(Clone, Debug)]
pub struct Part {
    pub tensor: Tensor,
    pub safetensors: String,
    pub gguf: String,
    /// Outermost first.
    pub dimensions: Vec<usize>,
}

impl Part {
    /// Its values, row by row; all are exact in bf16, in f16, and in Q8_0 with a scale of 1/64.
    pub fn values(&self) -> Vec<f32> {
        let seed = self.safetensors.bytes().fold(7_u64, |hash, byte| {
            hash.wrapping_mul(0x0100_0000_01b3).wrapping_add(byte.into())
        });
        let count: usize = self.dimensions.iter().product();
        let hash = |index: u64| (seed ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        (0..count as u64).map(|index| (hash(index) % 255) as f32 / 64.0 - 127.0 / 64.0).collect()
    }
}

/// All tensors that are stored for a tiny model.
pub fn parts(kind: Kind) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut add = |tensor, safetensors: String, gguf: String, dimensions: &[usize]| {
        parts.push(Part { tensor, safetensors, gguf, dimensions: dimensions.to_vec() });
    };
    let (query, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let embedding = ("model.embed_tokens.weight".into(), "token_embd.weight".into());
    add(Tensor::Embedding, embedding.0, embedding.1, &[VOCAB, HIDDEN]);
    add(Tensor::FinalNorm, "model.norm.weight".into(), "output_norm.weight".into(), &[HIDDEN]);
    if !kind.tied {
        let dimensions = [VOCAB, HIDDEN];
        add(Tensor::Classifier, "lm_head.weight".into(), "output.weight".into(), &dimensions);
    }
    use LayerTensor::*;
    for layer in 0..LAYERS {
        let mut add = |tensor, safetensors: &str, gguf: &str, dimensions: &[usize]| {
            let safetensors = format!("model.layers.{layer}.{safetensors}");
            let tensor = Tensor::Layer(layer, tensor);
            add(tensor, safetensors, format!("blk.{layer}.{gguf}"), dimensions);
        };
        add(AttentionNorm, "input_layernorm.weight", "attn_norm.weight", &[HIDDEN]);
        add(Query, "self_attn.q_proj.weight", "attn_q.weight", &[query, HIDDEN]);
        add(Key, "self_attn.k_proj.weight", "attn_k.weight", &[kv, HIDDEN]);
        add(Value, "self_attn.v_proj.weight", "attn_v.weight", &[kv, HIDDEN]);
        if kind.qkv_bias {
            add(QueryBias, "self_attn.q_proj.bias", "attn_q.bias", &[query]);
            add(KeyBias, "self_attn.k_proj.bias", "attn_k.bias", &[kv]);
            add(ValueBias, "self_attn.v_proj.bias", "attn_v.bias", &[kv]);
        }
        if kind.qk_norm {
            add(QueryNorm, "self_attn.q_norm.weight", "attn_q_norm.weight", &[HEAD_DIM]);
            add(KeyNorm, "self_attn.k_norm.weight", "attn_k_norm.weight", &[HEAD_DIM]);
        }
        add(Output, "self_attn.o_proj.weight", "attn_output.weight", &[HIDDEN, query]);
        add(FeedForwardNorm, "post_attention_layernorm.weight", "ffn_norm.weight", &[HIDDEN]);
        add(Gate, "mlp.gate_proj.weight", "ffn_gate.weight", &[FEED_FORWARD, HIDDEN]);
        add(Up, "mlp.up_proj.weight", "ffn_up.weight", &[FEED_FORWARD, HIDDEN]);
        add(Down, "mlp.down_proj.weight", "ffn_down.weight", &[HIDDEN, FEED_FORWARD]);
    }
    parts
}

/// Reads every tensor of an open model and compares it with the values that were stored.
pub fn check_weights(model: &Model, kind: Kind) {
    let parts = parts(kind);
    let stored = |tensor| parts.iter().find(|part| part.tensor == tensor);
    let mut seen = 0;
    for tensor in Tensor::all(model.config()) {
        let tied = kind.tied && tensor == Tensor::Classifier;
        let part = stored(if tied { Tensor::Embedding } else { tensor }).unwrap();
        seen += usize::from(!tied);
        let values = part.values();
        if tensor.is_vector() {
            assert_eq!(model.read_vector(tensor).unwrap(), values, "{tensor}");
            continue;
        }
        let (outputs, inputs) = tensor.shape(model.config());
        let expected: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
        for rows in [0..outputs, 0..0, 3..4, outputs - 5..outputs] {
            let mut read = vec![bf16::NAN; rows.len() * inputs];
            model.read_rows(tensor, rows.clone(), &mut read).unwrap();
            let expected = &expected[rows.start * inputs..rows.end * inputs];
            assert_eq!(read, expected, "{tensor} {rows:?}");
        }
    }
    assert_eq!(seen, parts.len(), "every stored tensor belongs to the model");
}

/// Opens what must not open; its message must hold all fragments.
pub fn check_refused(what: &str, path: &Path, fragments: &[&str]) {
    let error = match Model::open(path) {
        Ok(_) => panic!("{what}: opened"),
        Err(error) => error.to_string(),
    };
    for fragment in fragments {
        assert!(error.contains(fragment), "{what}: {error:?} does not mention {fragment:?}");
    }
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(error.contains(name), "{what}: {error:?} does not name the file");
}

/// config.json of a tiny model.
pub fn config_json(kind: Kind) -> Value {
    let architecture = match kind.family {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => panic!("no such family: {other}"),
    };
    json!({
        "architectures": [architecture],
        "model_type": kind.family,
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
        "tie_word_embeddings": kind.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    })
}

/// Values in a safetensors type.
pub fn encode(dtype: &str, values: &[f32]) -> Vec<u8> {
    let bytes = |value: &f32| match dtype {
        "F32" => value.to_le_bytes().to_vec(),
        "F16" => half::f16::from_f32(*value).to_le_bytes().to_vec(),
        "BF16" => bf16::from_f32(*value).to_le_bytes().to_vec(),
        other => panic!("no such type: {other}"),
    };
    values.iter().flat_map(bytes).collect()
}

/// A safetensors file of some tensors, and its header for tests that falsify it.
pub fn safetensors(dtype: &str, parts: &[Part]) -> (Value, Vec<u8>) {
    let mut header = json!({"__metadata__": {"format": "pt"}});
    let mut data = Vec::new();
    for part in parts {
        let start = data.len();
        data.extend(encode(dtype, &part.values()));
        header[&part.safetensors] =
            json!({"dtype": dtype, "shape": part.dimensions, "data_offsets": [start, data.len()]});
    }
    (header, data)
}

/// Header length, header, data.
pub fn join_safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// Writes a Hugging Face folder with one safetensors file.
pub fn write_folder(folder: &Path, kind: Kind, dtype: &str) {
    let (header, data) = safetensors(dtype, &parts(kind));
    std::fs::write(folder.join("model.safetensors"), join_safetensors(&header, &data)).unwrap();
    std::fs::write(folder.join("config.json"), config_json(kind).to_string()).unwrap();
}

/// Writes bytes to a file of this name and opens it.
pub fn open_bytes(name: &str, bytes: &[u8]) -> Result<Model, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    Model::open(&path)
}

pub fn identity(model: &Model) -> ModelIdentity {
    ModelIdentity::of_weights(model, &mut |_, _| ())
}
