//! What is fuzzed: everything that reads bytes of strangers. Each function takes any bytes and must return.
//!
//! `cargo fuzz` runs them under `fuzz_targets/`, and an ordinary test (`crates/cli/tests/suite/fuzzing.rs`) on every change.

use glinthawk_cluster::net::{HELLO_BYTES, Hello, Status, Token};
use glinthawk_cluster::read_any;
use glinthawk_flight::{BodyChecksum, Buffer, HEADER_BYTES, Header, Limits, Message};
use glinthawk_jobs::{ServedModel, preview_line};
use glinthawk_model::{
    ChatMessage, ChatTemplate, Model, Tensor, Tokenizer, guarded, silence_guarded_panics,
};
use glinthawk_plan::{Catalogue, Cluster, Plan, Profile, Shape, Workload};
use half::bf16;
use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Once};

/// A target by its name.
pub type Target = fn(&[u8]);

/// Every target.
pub const TARGETS: [(&str, Target); 9] = [
    ("frames", frames),
    ("handshake", handshake),
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("config", config),
    ("tokenizers", tokenizers),
    ("requests", requests),
    ("templates", templates),
    ("plans", plans),
];

/// A frame as it comes from a socket. Checksums are made to match, since a liar can compute them too.
pub fn frames(data: &[u8]) {
    let limits = Limits::default();
    _ = Header::decode(data, &limits);
    if data.len() < HEADER_BYTES {
        return;
    }
    let (header, body) = data.split_at(HEADER_BYTES);
    let mut header = header.to_vec();
    let pattern = Message::heartbeat().seal();
    header[..6].copy_from_slice(&pattern[..6]);
    header[40..56].fill(0);
    let table =
        body.len().min(u32::from_le_bytes(header[32..36].try_into().expect("4 bytes")) as usize);
    header[32..36].copy_from_slice(&(table as u32).to_le_bytes());
    header[36..40].copy_from_slice(&((body.len() - table) as u32).to_le_bytes());
    header[56..60].copy_from_slice(&crc32fast::hash(body).to_le_bytes());
    let checksum = crc32fast::hash(&header[..60]);
    header[60..64].copy_from_slice(&checksum.to_le_bytes());
    let Ok(header) = Header::decode(&header, &limits) else { return };
    let (table, payload) = body.split_at(header.table_bytes());
    let mut buffer = Buffer::zeroed(payload.len());
    buffer.bytes_mut().copy_from_slice(payload);
    let checksum = BodyChecksum::of(table, payload);
    if let Ok(message) = Message::open(header, table.to_vec(), buffer, checksum) {
        read_any(&message);
        assert!(message.check(&limits).is_ok());
    }
}

/// A hello of a stranger, and of one that has the secret.
pub fn handshake(data: &[u8]) {
    static TOKEN: LazyLock<Token> = LazyLock::new(|| Token::new("a secret of the tests"));
    _ = Hello::check_start(data);
    let Some(mut hello) = data.first_chunk::<HELLO_BYTES>().copied() else { return };
    for status in [Status::Hello, Status::Welcome] {
        _ = Hello::decode(&hello, &TOKEN, status);
        hello[32..64].copy_from_slice(&TOKEN.digest());
        _ = Hello::decode(&hello, &TOKEN, status);
    }
}

/// A folder of this process's own, in memory where there is such a place.
fn folder(name: &str) -> PathBuf {
    let shared = Path::new("/dev/shm");
    let root = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let folder = root.join(format!("glinthawk-fuzz-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Reads a model to its last tensor, with tokenizer and template.
fn read_model(path: &Path) {
    let Ok(model) = Model::open(path) else { return };
    for tensor in Tensor::all(model.config()) {
        let (outputs, inputs) = tensor.shape(model.config());
        if tensor.is_vector() {
            _ = model.read_vector(tensor);
        } else {
            let mut row = vec![bf16::ZERO; inputs];
            _ = model.read_rows(tensor, 0..1, &mut row);
            _ = model.read_rows(tensor, outputs - 1..outputs, &mut row);
        }
    }
    if let Ok(tokenizer) = Tokenizer::of(&model) {
        speak(&tokenizer);
        if let Ok(Some(template)) = ChatTemplate::of(&model) {
            _ = template.encode(&tokenizer, &conversation());
        }
    }
}

/// Puts bytes into a file of a folder of its own, and reads the model there.
fn read_file(target: &'static str, file: &str, data: &[u8]) {
    let folder = folder(target);
    let path = folder.join(file);
    fs::write(&path, data).expect("room for a file");
    read_model(if file.ends_with(".gguf") { &path } else { &folder });
}

/// A GGUF file.
pub fn gguf(data: &[u8]) {
    read_file("gguf", "model.gguf", data);
}

const CONFIG: &[u8] = include_bytes!("corpus/config/llama.json");
const WEIGHTS: &[u8] = include_bytes!("corpus/safetensors/llama.safetensors");
const TOKENIZER: &[u8] = include_bytes!("corpus/tokenizers/bytes.json");

/// The file of weights in a folder.
pub fn safetensors(data: &[u8]) {
    fs::write(folder("safetensors").join("config.json"), CONFIG).expect("room for a file");
    read_file("safetensors", "model.safetensors", data);
}

/// The configuration in a folder.
pub fn config(data: &[u8]) {
    fs::write(folder("config").join("model.safetensors"), WEIGHTS).expect("room for a file");
    fs::write(folder("config").join("tokenizer.json"), TOKENIZER).expect("room for a file");
    read_file("config", "config.json", data);
}

const TEXTS: [&str; 5] = [
    "",
    "Hello, world!  12345\n\n",
    "naïve 日本語 🙂\u{301}\u{fffd}",
    "<|im_end|><s> </s>",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
];

/// Encodes and decodes some texts.
fn speak(tokenizer: &Tokenizer) {
    for text in TEXTS {
        // As requests are encoded: the library may panic.
        let ids = guarded(|| tokenizer.encode_prompt(text)).unwrap_or_default();
        _ = tokenizer.decode(&ids, false);
        _ = guarded(|| tokenizer.encode_rendered(text, None));
    }
    _ = tokenizer.decode(&[0, 1, 5, u32::MAX], true);
}

/// A folder's tokenizer.
pub fn tokenizers(data: &[u8]) {
    // A panic that is caught is no finding, and printing it takes longer than all else.
    static SILENCED: Once = Once::new();
    SILENCED.call_once(silence_guarded_panics);
    let folder = folder("tokenizers");
    fs::write(folder.join("tokenizer.json"), data).expect("room for a file");
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder) {
        speak(&tokenizer);
    }
}

fn conversation() -> Vec<ChatMessage> {
    let message =
        |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
    vec![
        message("system", "Be brief."),
        message("user", "Hello 1 < 2\n"),
        message("assistant", "é"),
    ]
}

fn served() -> ServedModel {
    let tokenizer = Tokenizer::bytes(300);
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    ServedModel {
        name: "fuzzed".to_owned(),
        identity: String::new(),
        tokenizer,
        template: ChatTemplate::new(source, "corpus").ok(),
        vocab: 300,
        context_max: 4096,
        eos_tokens: vec![1],
    }
}

thread_local! {
    static SERVED: OnceCell<ServedModel> = const { OnceCell::new() };
}

/// A line of a job's input.
pub fn requests(data: &[u8]) {
    SERVED.with(|model| _ = preview_line(model.get_or_init(served), 1, data));
}

/// A chat template.
pub fn templates(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let Ok(template) = ChatTemplate::new(source, "corpus") else { return };
    _ = template.render(&Tokenizer::bytes(300), &conversation());
}

/// The files of a planner: plans, clusters, devices, profiles, lengths.
pub fn plans(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(plan) = Plan::parse("corpus", text) {
        _ = Plan::parse("corpus", &plan.to_toml()).expect("what is written can be read");
        _ = plan.check_layers("corpus", 32);
    }
    let model = Model::dummy("tiny").expect("a shape");
    let shape = Shape::of("tiny", model.config());
    _ = Cluster::parse("corpus", text, Path::new("/nonexistent"), &shape);
    _ = Catalogue::parse("corpus", text);
    _ = Profile::parse("corpus", text);
    _ = Workload::parse_csv("corpus", text);
}

/// Removes what a target wrote.
pub fn clean(name: &str) {
    // It may never have been there.
    _ = fs::remove_dir_all(folder(name));
}
