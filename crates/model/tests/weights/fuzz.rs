//! Damaged files: opening and reading any bytes never panics and never asks for memory that the
//! file does not justify.

use crate::support::*;
use glinthawk_model::{Model, ModelConfig, Tensor};
use half::bf16;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::path::Path;

/// What may happen to a file.
#[derive(Clone, Debug)]
enum Damage {
    Byte(Index, u8),
    /// A whole length or count, near the limits where arithmetic goes wrong.
    Number(Index, u64),
    Cut(Index),
    Repeat(Index, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let edge = prop_oneof![
        Just(u64::MAX),
        Just(u64::MAX - 31),
        Just(1 << 63),
        Just(1 << 40),
        Just(u64::from(u32::MAX)),
        Just(0),
        any::<u64>(),
        0_u64..70_000,
    ];
    prop_oneof![
        6 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        6 => (any::<Index>(), edge).prop_map(|(at, number)| Damage::Number(at, number)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1_usize..64).prop_map(|(at, count)| Damage::Repeat(at, count)),
    ]
}

/// Most damage goes to the first `head` bytes, where formats keep what can be lied about.
fn apply(bytes: &mut Vec<u8>, head: usize, damage: &[Damage]) {
    for damage in damage {
        if bytes.is_empty() {
            return;
        }
        let length = bytes.len();
        let place = |at: &Index| at.index(head.clamp(1, length));
        match damage {
            Damage::Byte(at, byte) => bytes[place(at)] = *byte,
            Damage::Number(at, number) => {
                let start = place(at);
                let end = length.min(start + 8);
                bytes[start..end].copy_from_slice(&number.to_le_bytes()[..end - start]);
            }
            Damage::Cut(at) => bytes.truncate(at.index(length)),
            Damage::Repeat(at, count) => {
                let start = place(at);
                let piece = bytes[start..length.min(start + count)].to_vec();
                bytes.splice(start..start, piece);
            }
        }
    }
}

/// Opens a model. If it opens despite the damage, it must be readable to its last tensor.
fn open_and_read(path: &Path) {
    let model = match Model::open(path) {
        Ok(model) => model,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    identity(&model);
    for tensor in Tensor::all(model.config()) {
        let (outputs, inputs) = tensor.shape(model.config());
        if tensor.is_vector() {
            model.read_vector(tensor).unwrap();
        } else {
            let mut row = vec![bf16::ZERO; inputs];
            model.read_rows(tensor, 0..1, &mut row).unwrap();
            model.read_rows(tensor, outputs - 1..outputs, &mut row).unwrap();
        }
    }
}

/// Largest address space this process has had, in bytes; `None` if the system does not tell.
fn address_space_max() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The same cases every time.
fn runner(cases: u32) -> TestRunner {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// Runs cases and asserts that none made the process grow by more than tests of a few kilobytes can
/// explain: address space counts even if an allocation is never touched.
fn check(cases: u32, bytes: &[u8], head: usize, open: impl Fn(&[u8])) {
    const GROWTH_MAX: u64 = 512 << 20;
    let before = address_space_max();
    let strategy = proptest::collection::vec(damage(), 1..6);
    let result = runner(cases).run(&strategy, |damage| {
        let mut bytes = bytes.to_vec();
        apply(&mut bytes, head, &damage);
        open(&bytes);
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    if let (Some(before), Some(after)) = (before, address_space_max()) {
        assert!(after < before + GROWTH_MAX, "grew from {before} to {after} bytes");
    }
}

#[test]
fn damaged_gguf_files() {
    for kind in [LLAMA, QWEN2, QWEN3] {
        let file = GgufFile::of(kind, 8);
        let bytes = file.bytes();
        let data: usize = file.tensors.iter().map(|tensor| tensor.data.len()).sum();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        check(600, &bytes, bytes.len() - data, |bytes| {
            std::fs::write(&path, bytes).unwrap();
            open_and_read(&path);
        });
    }
}

#[test]
fn damaged_safetensors_files() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), QWEN2, "BF16");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    check(1000, &bytes, 8 + header, |bytes| {
        std::fs::write(&path, bytes).unwrap();
        open_and_read(folder.path());
    });
}

#[test]
fn damaged_indexes() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), LLAMA, "BF16");
    let names = parts(LLAMA).into_iter().map(|part| (part.safetensors, "model.safetensors".into()));
    let map: serde_json::Map<String, serde_json::Value> = names.collect();
    let index = serde_json::json!({"weight_map": map}).to_string();
    let path = folder.path().join("model.safetensors.index.json");
    std::fs::write(&path, &index).unwrap();
    assert!(Model::open(folder.path()).is_ok());
    check(500, index.as_bytes(), index.len(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        open_and_read(folder.path());
    });
}

#[test]
fn damaged_configurations() {
    for kind in [LLAMA, QWEN2, QWEN3, Kind { family: "mistral", ..LLAMA }] {
        let mut config = config_json(kind);
        config["rope_scaling"] = serde_json::json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        });
        let config = config.to_string();
        let generation = r#"{"eos_token_id": [1, 2, 3]}"#;
        check(2000, config.as_bytes(), config.len(), |bytes| {
            if let Ok(config) = ModelConfig::from_hf_json(bytes, Some(generation.as_bytes())) {
                config.parameter_count();
                config.context_bytes_per_token();
            }
        });
    }
}

/// Numbers of any size in every field: refused or usable, never a panic.
#[test]
fn configurations_of_any_numbers() {
    const FIELDS: [&str; 12] = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "sliding_window",
        "max_window_layers",
    ];
    let number = prop_oneof![0_u64..200, any::<u64>()];
    let fields = proptest::collection::vec((0..FIELDS.len(), number), 1..4);
    let strategy = (fields, any::<f64>(), any::<f64>());
    let result = runner(1000).run(&strategy, |(fields, theta, factor)| {
        let mut config = config_json(QWEN3);
        for (field, value) in fields {
            config[FIELDS[field]] = value.into();
        }
        config["rope_theta"] = theta.into();
        config["rope_scaling"] = serde_json::json!({"type": "yarn", "factor": factor});
        if let Ok(config) = ModelConfig::from_hf_json(config.to_string().as_bytes(), None) {
            prop_assert!(config.rope_frequencies.iter().all(|frequency| frequency.is_finite()));
            config.parameter_count();
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}
