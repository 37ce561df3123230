//! Hugging Face folders: one file or shards, every type, tied tables, and headers that lie.

use crate::support::*;
use glinthawk_model::{Model, Source};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

fn folder(kind: Kind, dtype: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), kind, dtype);
    folder
}

fn write_weights(folder: &Path, parts: &[Part]) {
    let (header, data) = safetensors("BF16", parts);
    std::fs::write(folder.join("model.safetensors"), join_safetensors(&header, &data)).unwrap();
}

#[test]
fn every_family_and_type_round_trips() {
    let mistral = Kind { family: "mistral", ..LLAMA };
    for kind in [LLAMA, mistral, QWEN2, QWEN3] {
        for dtype in ["F32", "F16", "BF16"] {
            let folder = folder(kind, dtype);
            let model = Model::open(folder.path()).unwrap();
            assert!(matches!(model.source(), Source::Folder(path) if path == folder.path()));
            assert_eq!(model.name(), folder.path().file_name().unwrap().to_str().unwrap());
            check_weights(&model, kind);
        }
    }
}

#[test]
fn a_tied_table_may_be_stored_under_either_name_or_both() {
    let kind = Kind { tied: true, ..LLAMA };
    let folder = folder(kind, "BF16");
    check_weights(&Model::open(folder.path()).unwrap(), kind);

    // Values follow the name under which a part was made, so only the stored name is changed.
    let (header, data) = safetensors("BF16", &parts(kind));
    let mut renamed = header.clone();
    let table = renamed.as_object_mut().unwrap().shift_remove("model.embed_tokens.weight").unwrap();
    renamed["lm_head.weight"] = table;
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, join_safetensors(&renamed, &data)).unwrap();
    check_weights(&Model::open(folder.path()).unwrap(), kind);

    // With both stored, the embedding is the table.
    write_weights(folder.path(), &parts(LLAMA));
    check_weights(&Model::open(folder.path()).unwrap(), kind);
}

#[test]
fn an_untied_model_without_a_classifier_is_refused() {
    let folder = folder(LLAMA, "BF16");
    write_weights(folder.path(), &parts(Kind { tied: true, ..LLAMA }));
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: tensor lm_head.weight: is missing"), "{error}");
}

/// Writes the model in two shards and returns its index.
fn write_shards(folder: &Path, kind: Kind) -> Value {
    let parts = parts(kind);
    let mut weight_map = json!({});
    for (name, parts) in [("a.safetensors", &parts[..7]), ("b.safetensors", &parts[7..])] {
        let (header, data) = safetensors("F16", parts);
        std::fs::write(folder.join(name), join_safetensors(&header, &data)).unwrap();
        for part in parts {
            weight_map[&part.safetensors] = name.into();
        }
    }
    std::fs::write(folder.join("config.json"), config_json(kind).to_string()).unwrap();
    json!({"metadata": {"total_size": 1}, "weight_map": weight_map})
}

fn write_index(folder: &Path, index: &Value) {
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn shards_are_read_as_one_model() {
    let folder = tempfile::tempdir().unwrap();
    let index = write_shards(folder.path(), QWEN3);
    write_index(folder.path(), &index);
    check_weights(&Model::open(folder.path()).unwrap(), QWEN3);
}

#[test]
fn lying_indexes_are_found() {
    let name = "model.norm.weight";
    for (what, file, fragments) in [
        ("a missing shard", "c.safetensors", &["c.safetensors"][..]),
        ("the wrong shard", "b.safetensors", &["b.safetensors", name, "is not in this file"]),
        ("a path out of the folder", "../b.safetensors", &["index.json", "not a file name"]),
        ("an absolute path", "/etc/passwd", &["index.json", "not a file name"]),
        ("no name", "", &["index.json", "not a file name"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut index = write_shards(folder.path(), LLAMA);
        index["weight_map"][name] = file.into();
        write_index(folder.path(), &index);
        let error = Model::open(folder.path()).unwrap_err().to_string();
        for fragment in fragments {
            assert!(error.contains(fragment), "{what}: {error}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path(), LLAMA);
    write_index(folder.path(), &json!({"weight_map": []}));
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("index.json"), "{error}");
}

#[test]
fn end_tokens_of_both_files_are_joined() {
    let folder = folder(LLAMA, "BF16");
    let generation = json!({"eos_token_id": [7, 2, 5]}).to_string();
    std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
    assert_eq!(Model::open(folder.path()).unwrap().config().eos_tokens, [2, 5, 7]);
}

#[test]
fn constants_that_old_files_carry_are_left_alone() {
    let folder = folder(LLAMA, "BF16");
    let mut parts = parts(LLAMA);
    let mut constant = parts[1].clone();
    constant.safetensors = "model.layers.0.self_attn.rotary_emb.inv_freq".into();
    parts.push(constant);
    write_weights(folder.path(), &parts);
    check_weights(&Model::open(folder.path()).unwrap(), LLAMA);
}

#[test]
fn a_tensor_that_would_be_ignored_is_refused() {
    let folder = folder(LLAMA, "BF16");
    write_weights(folder.path(), &parts(Kind { qkv_bias: true, ..LLAMA }));
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("k_proj.bias: is not known in a llama model"), "{error}");
}

fn check_weight_bytes(what: &str, bytes: &[u8], fragments: &[&str]) {
    let folder = folder(LLAMA, "BF16");
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let error = Model::open(folder.path()).unwrap_err().to_string();
    for fragment in fragments.iter().chain(&["model.safetensors"]) {
        assert!(error.contains(fragment), "{what}: {error:?} does not mention {fragment:?}");
    }
}

#[test]
fn lying_headers_are_found() {
    let (header, data) = safetensors("BF16", &parts(LLAMA));
    let name = "model.layers.1.mlp.up_proj.weight";
    let end = data.len();
    for (what, field, value, fragment) in [
        ("past the end", "data_offsets", json!([0, end + 1]), "past the end"),
        ("end before start", "data_offsets", json!([64, 0]), "past the end"),
        ("near overflow", "data_offsets", json!([0, u64::MAX]), "past the end"),
        ("one offset", "data_offsets", json!([0]), "header"),
        ("negative", "data_offsets", json!([-1, 5]), "header"),
        ("overflowing shape", "shape", json!([1_u64 << 63, 4]), "overflows"),
        ("shape and bytes disagree", "shape", json!([96, 65]), "takes 12480 bytes"),
        ("another shape of the same size", "shape", json!([64, 96]), "[96, 64] is wanted"),
        ("another dimension", "shape", json!([96, 64, 1]), "[96, 64] is wanted"),
        ("unknown type", "dtype", json!("F8_E4M3"), "type F8_E4M3"),
        ("no type", "dtype", json!(null), "header"),
    ] {
        let mut header = header.clone();
        header[name][field] = value;
        check_weight_bytes(what, &join_safetensors(&header, &data), &[fragment, name]);
    }
    let mut missing = header.clone();
    missing.as_object_mut().unwrap().shift_remove(name);
    check_weight_bytes("missing", &join_safetensors(&missing, &data), &[name, "is missing"]);

    let good = join_safetensors(&header, &data);
    let with_length = |length: u64| [&length.to_le_bytes()[..], &good[8..]].concat();
    let twice = r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":0}"#;
    for (what, bytes, fragment) in [
        ("empty", vec![], "empty"),
        ("five bytes", good[..5].to_vec(), "too short"),
        ("huge header", with_length(u64::MAX), "header of 18446744073709551615 bytes"),
        ("long header", with_length(1 << 24), "past the end"),
        ("no header", with_length(0), "header"),
        ("cut", good[..good.len() - 1].to_vec(), "past the end"),
        ("nonsense after the length", [&with_length(4)[..8], b"\xff{}["].concat(), "header"),
        ("twice", [&(twice.len() as u64).to_le_bytes(), twice.as_bytes()].concat(), "tensor a"),
    ] {
        check_weight_bytes(what, &bytes, &[fragment]);
    }
}

#[test]
fn folders_that_hold_no_model_say_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    std::fs::write(folder.path().join("config.json"), config_json(LLAMA).to_string()).unwrap();
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors.index.json"), "{error}");
    let error = Model::open(&folder.path().join("nowhere")).unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("config.json: model_type: \"gpt2\" is not supported"), "{error}");
}
