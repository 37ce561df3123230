//! GGUF files: all families round trip, what cannot be done is refused, lies are found.

use crate::support::*;
use glinthawk_model::{LayerTensor, Model, Source, Tensor};
use half::bf16;

fn open(file: &GgufFile) -> Model {
    open_bytes("tiny.gguf", &file.bytes()).unwrap()
}

#[test]
fn every_family_round_trips_with_llama_rows_put_back_in_order() {
    let llama_with_bias = Kind { qkv_bias: true, ..LLAMA };
    for kind in [LLAMA, llama_with_bias, QWEN2, QWEN3, Kind { tied: true, ..LLAMA }] {
        let model = open(&GgufFile::of(kind, 0));
        let config = model.config();
        assert_eq!(config.family, kind.family);
        assert_eq!((config.qkv_bias, config.qk_norm), (kind.qkv_bias, kind.qk_norm));
        assert_eq!(config.tied_embeddings, kind.tied);
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (HEADS, KV_HEADS, HEAD_DIM));
        assert_eq!((config.vocab, config.context_max), (VOCAB, 256));
        assert_eq!(config.norm_eps, 1e-5);
        assert_eq!(config.bos_token, Some(1));
        check_weights(&model, kind);
    }
}

#[test]
fn every_stored_type_version_and_alignment_reads_the_same() {
    for type_number in [0, 1, 8, 30] {
        for (version, alignment) in [(2, 32), (3, 32), (3, 64), (3, 8)] {
            let mut file = GgufFile::of(LLAMA, type_number);
            (file.version, file.alignment) = (version, alignment);
            if alignment != 32 {
                file.set("general.alignment", Meta::U32(alignment as u32));
            }
            check_weights(&open(&file), LLAMA);
        }
    }
}

#[test]
fn metadata_is_there_for_the_tokenizer() {
    let model = open(&GgufFile::of(LLAMA, 0));
    assert_eq!(model.name(), "Tiny");
    let Source::Gguf { metadata, .. } = model.source() else { panic!("a GGUF file") };
    assert_eq!(metadata.strings("tokenizer.ggml.tokens").unwrap()[7], "t7");
    assert_eq!(metadata.integers("tokenizer.ggml.token_type").unwrap()[9], 1);
    assert_eq!(metadata.floats("tokenizer.ggml.scores").unwrap()[3], -3.0);
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token"), Some(false));
    assert_eq!(metadata.unsigned("tokenizer.ggml.eos_token_id"), Some(2));
    assert_eq!(metadata.float("llama.rope.freq_base"), Some(10000.0));
    assert_eq!(metadata.string("no.such.key"), None);
}

#[test]
fn control_tokens_that_end_a_text_are_found_by_their_text() {
    let mut file = GgufFile::of(LLAMA, 0);
    file.set("tokenizer.ggml.eot_token_id", Meta::U32(9));
    assert_eq!(open(&file).config().eos_tokens, [2, 5, 9]);
}

#[test]
fn a_file_without_a_name_is_called_by_its_path() {
    let mut file = GgufFile::of(LLAMA, 0);
    file.remove("general.name");
    assert_eq!(open(&file).name(), "tiny");
}

#[test]
fn rotary_scaling_follows_keys_and_divisors() {
    let plain = open(&GgufFile::of(LLAMA, 0)).config().rope_frequencies.clone();
    assert_eq!(plain.len(), HEAD_DIM / 2);
    assert_eq!(plain[8], 0.01); // 10000^(-16/32)

    let mut linear = GgufFile::of(LLAMA, 0);
    linear.set("llama.rope.scaling.type", Meta::Text("linear".into()));
    linear.set("llama.rope.scaling.factor", Meta::F32(4.0));
    let linear = open(&linear);
    let quarter: Vec<f32> = plain.iter().map(|frequency| frequency / 4.0).collect();
    assert_eq!(linear.config().rope_frequencies, quarter);

    let divisors: Vec<f32> = (1..=HEAD_DIM / 2).map(|index| index as f32).collect();
    let mut divided = GgufFile::of(LLAMA, 0);
    divided.tensors.push(GgufTensor {
        name: "rope_freqs.weight".into(),
        dimensions: vec![divisors.len() as u64],
        type_number: 0,
        data: encode("F32", &divisors),
        offset: None,
    });
    let divided = open(&divided);
    for (index, frequency) in divided.config().rope_frequencies.iter().enumerate() {
        let expected = plain[index] / divisors[index];
        assert!((frequency / expected - 1.0).abs() < 1e-6, "{index}: {frequency} {expected}");
    }

    let mut yarn = GgufFile::of(LLAMA, 0);
    yarn.set("llama.rope.scaling.type", Meta::Text("yarn".into()));
    yarn.set("llama.rope.scaling.factor", Meta::F32(4.0));
    yarn.set("llama.rope.scaling.original_context_length", Meta::U32(64));
    let yarn = open(&yarn);
    assert!((yarn.config().rope_magnitude - 1.138_629_4).abs() < 1e-6);
    assert_eq!(yarn.config().rope_frequencies[0], plain[0]);
    assert_eq!(yarn.config().rope_frequencies[15], plain[15] / 4.0);
}

#[test]
fn a_sliding_window_is_carried() {
    let mut file = GgufFile::of(LLAMA, 0);
    file.set("llama.attention.sliding_window", Meta::U32(128));
    assert_eq!(open(&file).config().sliding_window, Some(128));
}

#[test]
fn the_identity_follows_the_content_and_not_the_path() {
    let file = GgufFile::of(LLAMA, 0);
    let expected = identity(&open(&file));
    assert_eq!(identity(&open_bytes("other.gguf", &file.bytes()).unwrap()), expected);
    let mut other = file.clone();
    // In no place more than in another: every byte counts.
    other.tensor("blk.1.ffn_up.weight").data[777] ^= 1;
    assert_ne!(identity(&open(&other)), expected);
    let mut other = file.clone();
    other.set("llama.rope.freq_base", Meta::F32(20000.0));
    assert_ne!(identity(&open(&other)), expected);
}

#[test]
fn asking_for_what_is_not_there_is_an_error() {
    let model = open(&GgufFile::of(LLAMA, 0));
    let mut row = vec![bf16::ZERO; HIDDEN];
    let bias = Tensor::Layer(0, LayerTensor::QueryBias);
    assert!(model.read_vector(bias).unwrap_err().to_string().contains("layer 0 QueryBias"));
    let beyond = Tensor::Layer(LAYERS, LayerTensor::Query);
    assert!(model.read_rows(beyond, 0..1, &mut row).is_err());
    assert!(model.read_rows(Tensor::Embedding, VOCAB..VOCAB + 1, &mut row).is_err());
    assert!(model.read_rows(Tensor::Embedding, 0..2, &mut row).is_err());
    assert!(model.read_rows(Tensor::FinalNorm, 0..1, &mut row).is_err());
    assert!(model.read_vector(Tensor::Embedding).is_err());
}

fn check_edited(what: &str, edit: impl Fn(&mut GgufFile), fragments: &[&str]) {
    let mut file = GgufFile::of(LLAMA, 0);
    edit(&mut file);
    check_bytes(what, &file.bytes(), fragments);
}

fn check_bytes(what: &str, bytes: &[u8], fragments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lying.gguf");
    std::fs::write(&path, bytes).unwrap();
    check_refused(what, &path, fragments);
}

#[test]
fn lying_directories_are_found() {
    let tensor = "blk.1.attn_k.weight";
    type Edit = fn(&mut GgufTensor);
    let cases: [(&str, Edit, &[&str]); 10] = [
        ("offset past the end", |tensor| tensor.offset = Some(1 << 30), &["past the end"]),
        ("offset near overflow", |tensor| tensor.offset = Some(u64::MAX - 31), &["past the end"]),
        ("offset not aligned", |tensor| tensor.offset = Some(33), &["aligned to 32"]),
        ("shape overflows", |tensor| tensor.dimensions = vec![1 << 62, 1 << 62], &["overflows"]),
        ("five dimensions", |tensor| tensor.dimensions = vec![1; 5], &["5 dimensions"]),
        ("shape transposed", |tensor| tensor.dimensions.swap(0, 1), &[]),
        ("too few rows", |tensor| tensor.dimensions[1] = 63, &["[63, 64]", "[64, 64]"]),
        ("unknown type", |tensor| tensor.type_number = 20, &["IQ4_NL"]),
        ("half a block", |tensor| tensor.type_number = 12, &["whole Q4_K blocks"]),
        ("renamed", |tensor| tensor.name = "blk.1.attn_z.weight".into(), &["missing"]),
    ];
    for (what, edit, fragments) in cases {
        if what == "shape transposed" {
            let name = "blk.1.ffn_down.weight";
            check_edited(what, |file| edit(file.tensor(name)), &[name, "[96, 64]", "[64, 96]"]);
            continue;
        }
        let named: Vec<&str> = [tensor].into_iter().chain(fragments.iter().copied()).collect();
        check_edited(what, |file| edit(file.tensor(tensor)), &named);
    }
    check_edited(
        "a tensor twice",
        |file| file.tensors.push(file.tensors[0].clone()),
        &["token_embd.weight", "twice"],
    );
    let stray = "blk.0.attn_output.bias";
    let add_stray = |file: &mut GgufFile| {
        let tensor = file.tensor("blk.0.attn_norm.weight").clone();
        file.tensors.push(GgufTensor { name: stray.into(), ..tensor });
    };
    check_edited("a bias that nobody would add", add_stray, &[stray, "not known"]);
}

#[test]
fn lying_headers_are_found() {
    let good = GgufFile::of(LLAMA, 0).bytes();
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    let huge = &u64::MAX.to_le_bytes();
    for (what, bytes, fragment) in [
        ("empty", vec![], "empty"),
        ("another format", with(0, b"PK\x03\x04"), "not a GGUF file"),
        ("version 1", with(4, &1_u32.to_le_bytes()), "version 1"),
        ("big-endian", with(4, &3_u32.to_be_bytes()), "big-endian"),
        ("too many tensors", with(8, huge), "tensors"),
        ("too much metadata", with(16, huge), "metadata entries"),
        ("a key without end", with(24, huge), "key 0 of the metadata"),
        ("only magic", good[..4].to_vec(), "4 bytes wanted"),
        ("cut in the metadata", good[..200].to_vec(), "bytes wanted"),
        ("cut in the data", good[..good.len() - 1].to_vec(), "past the end"),
        // Key length, key, type and text length of general.architecture stand before its text.
        ("not UTF-8", with(24 + 8 + 20 + 4 + 8, &[0xff]), "general.architecture"),
    ] {
        check_bytes(what, &bytes, &[fragment]);
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    type Value = fn() -> Meta;
    let cases: [(&str, Value, &str); 17] = [
        ("general.architecture", || Meta::Text("gemma3".into()), "supported: llama, qwen2, qwen3"),
        ("general.alignment", || Meta::U32(24), "power of two"),
        ("split.count", || Meta::U32(3), "merge"),
        ("llama.expert_count", || Meta::U32(8), "not supported"),
        ("llama.attention.causal", || Meta::Bool(false), "not supported"),
        ("llama.rope.dimension_count", || Meta::U32(16), "head size being 32"),
        ("llama.rope.scaling.type", || Meta::Text("longrope".into()), "longrope"),
        ("llama.rope.scaling.type", || Meta::Text("yarn".into()), "factor: is missing"),
        ("llama.rope.scaling.factor", || Meta::F32(-1.0), "no usable frequencies"),
        ("llama.rope.freq_base", || Meta::F32(f32::NAN), "no usable frequencies"),
        ("llama.attention.head_count", || Meta::I32s(vec![4, 8]), "differ between layers"),
        ("llama.attention.head_count_kv", || Meta::U32(3), "do not divide"),
        ("llama.attention.head_count_kv", || Meta::U32(0), "between 1 and"),
        ("llama.embedding_length", || Meta::U64(1 << 40), "between 1 and"),
        ("llama.block_count", || Meta::Text("two".into()), "whole number"),
        ("llama.block_count", || Meta::U32(3), "blk.2.attn_norm.weight: is missing"),
        ("tokenizer.ggml.bos_token_id", || Meta::U32(40), "outside the vocabulary"),
    ];
    for (key, value, fragment) in cases {
        check_edited(key, |file| file.set(key, value()), &[fragment]);
    }
    for key in ["general.architecture", "llama.block_count", "llama.context_length"] {
        check_edited(key, |file| file.remove(key), &[key, "missing"]);
    }
}
