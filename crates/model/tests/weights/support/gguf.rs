//! A writer of GGUF files, honest unless told otherwise.

use super::*;

/// A metadata value to be written.
#[derive(Clone, Debug)]
pub enum Meta {
    U32(u32),
    U64(u64),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    pub name: String,
    /// Innermost first.
    pub dimensions: Vec<u64>,
    pub type_number: u32,
    pub data: Vec<u8>,
    /// Falsified by tests of lying files.
    pub offset: Option<u64>,
}

/// A GGUF file to be written.
#[derive(Clone, Debug)]
pub struct GgufFile {
    pub version: u32,
    pub alignment: usize,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<GgufTensor>,
}

impl GgufFile {
    /// A tiny model, its matrices in one of the types F32 (0), F16 (1), Q8_0 (8), BF16 (30).
    pub fn of(kind: Kind, type_number: u32) -> Self {
        let parts = parts(kind);
        let tensors = parts.iter().map(|part| {
            let values = stored_values(kind, part);
            let is_vector = part.dimensions.len() == 1;
            let type_number = if is_vector { 0 } else { type_number };
            GgufTensor {
                name: part.gguf.clone(),
                dimensions: part.dimensions.iter().rev().map(|size| *size as u64).collect(),
                type_number,
                data: encode_gguf(type_number, &values),
                offset: None,
            }
        });
        GgufFile { version: 3, alignment: 32, metadata: metadata(kind), tensors: tensors.collect() }
    }

    /// Sets or replaces a metadata value.
    pub fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(other, _)| other != key);
        self.metadata.push((key.to_owned(), value));
    }

    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    /// A tensor, to be falsified.
    pub fn tensor(&mut self, name: &str) -> &mut GgufTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut bytes, key);
            put_meta(&mut bytes, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            put_text(&mut bytes, &tensor.name);
            bytes.extend((tensor.dimensions.len() as u32).to_le_bytes());
            bytes.extend(tensor.dimensions.iter().flat_map(|size| size.to_le_bytes()));
            bytes.extend(tensor.type_number.to_le_bytes());
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            bytes.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.data);
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(data);
        bytes
    }
}

/// A tensor's values in the order of a GGUF file: in llama files, the rows of every query and key
/// head alternate between the head's first and second half.
fn stored_values(kind: Kind, part: &Part) -> Vec<f32> {
    use LayerTensor::*;
    let values = part.values();
    let is_rotated = matches!(part.tensor, Tensor::Layer(_, Query | Key | QueryBias | KeyBias));
    if kind.family != "llama" || !is_rotated {
        return values;
    }
    let width = if part.dimensions.len() == 1 { 1 } else { part.dimensions[1] };
    let mut stored = Vec::new();
    for head in values.chunks(HEAD_DIM * width) {
        let (first, second) = head.split_at(HEAD_DIM / 2 * width);
        for (a, b) in first.chunks(width).zip(second.chunks(width)) {
            stored.extend_from_slice(a);
            stored.extend_from_slice(b);
        }
    }
    stored
}

fn encode_gguf(type_number: u32, values: &[f32]) -> Vec<u8> {
    match type_number {
        0 => encode("F32", values),
        1 => encode("F16", values),
        30 => encode("BF16", values),
        8 => {
            let scale = half::f16::from_f32(1.0 / 64.0).to_le_bytes();
            let block = |values: &[f32]| {
                let quants = values.iter().map(|value| (value * 64.0) as i8 as u8);
                scale.into_iter().chain(quants).collect::<Vec<u8>>()
            };
            values.chunks(32).flat_map(block).collect()
        }
        other => panic!("no writer for type {other}"),
    }
}

fn metadata(kind: Kind) -> Vec<(String, Meta)> {
    let mut metadata = vec![
        ("general.architecture".to_owned(), Meta::Text(kind.family.to_owned())),
        ("general.name".to_owned(), Meta::Text("Tiny".to_owned())),
    ];
    for (key, value) in [
        ("block_count", Meta::U32(LAYERS as u32)),
        ("context_length", Meta::U32(256)),
        ("embedding_length", Meta::U32(HIDDEN as u32)),
        ("feed_forward_length", Meta::U32(FEED_FORWARD as u32)),
        ("attention.head_count", Meta::U32(HEADS as u32)),
        ("attention.head_count_kv", Meta::U32(KV_HEADS as u32)),
        ("attention.key_length", Meta::U32(HEAD_DIM as u32)),
        ("attention.value_length", Meta::U32(HEAD_DIM as u32)),
        ("attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ("rope.freq_base", Meta::F32(10000.0)),
    ] {
        metadata.push((format!("{}.{key}", kind.family), value));
    }
    let token = |index: usize| match index {
        2 => "<|im_end|>".to_owned(),
        5 => "<|endoftext|>".to_owned(),
        _ => format!("t{index}"),
    };
    let token_kinds = (0..VOCAB).map(|index| if index < 8 { 3 } else { 1 }).collect();
    for (key, value) in [
        ("tokens", Meta::Texts((0..VOCAB).map(token).collect())),
        ("token_type", Meta::I32s(token_kinds)),
        ("scores", Meta::F32s((0..VOCAB).map(|index| -(index as f32)).collect())),
        ("add_bos_token", Meta::Bool(false)),
        ("bos_token_id", Meta::U32(1)),
        ("eos_token_id", Meta::U32(2)),
    ] {
        metadata.push((format!("tokenizer.ggml.{key}"), value));
    }
    metadata
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

fn put_meta(bytes: &mut Vec<u8>, value: &Meta) {
    let array = |bytes: &mut Vec<u8>, kind: u32, count: usize| {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((count as u64).to_le_bytes());
    };
    let mut scalar = |kind: u32, value: &[u8]| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend_from_slice(value);
    };
    match value {
        Meta::U32(value) => scalar(4, &value.to_le_bytes()),
        Meta::U64(value) => scalar(10, &value.to_le_bytes()),
        Meta::F32(value) => scalar(6, &value.to_le_bytes()),
        Meta::Bool(value) => scalar(7, &[u8::from(*value)]),
        Meta::Text(text) => {
            scalar(8, &[]);
            put_text(bytes, text);
        }
        Meta::Texts(texts) => {
            array(bytes, 8, texts.len());
            texts.iter().for_each(|text| put_text(bytes, text));
        }
        Meta::I32s(items) => {
            array(bytes, 5, items.len());
            bytes.extend(items.iter().flat_map(|item| item.to_le_bytes()));
        }
        Meta::F32s(items) => {
            array(bytes, 6, items.len());
            bytes.extend(items.iter().flat_map(|item| item.to_le_bytes()));
        }
    }
}
