//! What the sources call a model's tensors.

use crate::weights::{LayerTensor, Tensor};

/// The name in a Hugging Face folder's safetensors.
pub(crate) fn in_safetensors(tensor: Tensor) -> String {
    match tensor {
        Tensor::Embedding => "model.embed_tokens.weight".to_owned(),
        Tensor::FinalNorm => "model.norm.weight".to_owned(),
        Tensor::Classifier => "lm_head.weight".to_owned(),
        Tensor::Layer(layer, tensor) => format!("model.layers.{layer}.{}", of_layer(tensor).0),
    }
}

/// The name in a GGUF file.
pub(crate) fn in_gguf(tensor: Tensor) -> String {
    match tensor {
        Tensor::Embedding => "token_embd.weight".to_owned(),
        Tensor::FinalNorm => "output_norm.weight".to_owned(),
        Tensor::Classifier => "output.weight".to_owned(),
        Tensor::Layer(layer, tensor) => format!("blk.{layer}.{}", of_layer(tensor).1),
    }
}

/// (safetensors, GGUF)
fn of_layer(tensor: LayerTensor) -> (&'static str, &'static str) {
    match tensor {
        LayerTensor::AttentionNorm => ("input_layernorm.weight", "attn_norm.weight"),
        LayerTensor::Query => ("self_attn.q_proj.weight", "attn_q.weight"),
        LayerTensor::Key => ("self_attn.k_proj.weight", "attn_k.weight"),
        LayerTensor::Value => ("self_attn.v_proj.weight", "attn_v.weight"),
        LayerTensor::QueryBias => ("self_attn.q_proj.bias", "attn_q.bias"),
        LayerTensor::KeyBias => ("self_attn.k_proj.bias", "attn_k.bias"),
        LayerTensor::ValueBias => ("self_attn.v_proj.bias", "attn_v.bias"),
        LayerTensor::QueryNorm => ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        LayerTensor::KeyNorm => ("self_attn.k_norm.weight", "attn_k_norm.weight"),
        LayerTensor::Output => ("self_attn.o_proj.weight", "attn_output.weight"),
        LayerTensor::FeedForwardNorm => ("post_attention_layernorm.weight", "ffn_norm.weight"),
        LayerTensor::Gate => ("mlp.gate_proj.weight", "ffn_gate.weight"),
        LayerTensor::Up => ("mlp.up_proj.weight", "ffn_up.weight"),
        LayerTensor::Down => ("mlp.down_proj.weight", "ffn_down.weight"),
    }
}

/// Whether an unused stored tensor may be ignored: constants that follow from the configuration.
/// Anything else unknown would change the computation.
pub(crate) fn is_redundant(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn_rot_embd.weight")
}
