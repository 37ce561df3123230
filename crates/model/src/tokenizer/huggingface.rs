//! Builds a tokenizer from a Hugging Face folder: `tokenizer.json` and `tokenizer_config.json`.

use super::control::{ControlToken, ControlTokens};
use super::vocabulary::{ByteAlphabet, Vocabulary, fallback_byte};
use super::{
    Engine, Shared, Tokenizer, TokenizerError, VOCAB_SIZE_MAX, guarded, screening, special,
};
use crate::regular;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{AddedToken, ModelWrapper};

/// Several times the largest tokenizer there is.
const FILE_BYTES_MAX: u64 = 1 << 28;

/// The fields of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    add_bos_token: Option<bool>,
    #[serde(flatten)]
    fields: serde_json::Map<String, serde_json::Value>,
}

pub(super) fn load(folder: &Path) -> Result<Tokenizer, TokenizerError> {
    let path = folder.join("tokenizer.json");
    let mut hash = Sha256::new();
    let bytes = read(&path, &mut hash)?;
    let wrong = |reason: String| TokenizerError::Parse { path: path.clone(), reason };
    let config = load_config(folder, &mut hash)?;
    let mut shared =
        read_engine(&bytes).and_then(|engine| build(engine, &config)).map_err(wrong)?;
    shared.files_sha256 = Some(hash.finalize().into());
    Ok(Tokenizer::new(shared))
}

/// Reads a file, and hashes what was read: the tokenizer depends on nothing else.
fn read(path: &Path, hash: &mut Sha256) -> Result<Vec<u8>, TokenizerError> {
    let wrong = |source| TokenizerError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = regular::open(path).map_err(wrong)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(wrong)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let reason = format!("a tokenizer has at most {FILE_BYTES_MAX} bytes");
        return Err(TokenizerError::Parse { path: path.to_owned(), reason });
    }
    hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(&bytes);
    Ok(bytes)
}

fn load_config(folder: &Path, hash: &mut Sha256) -> Result<TokenizerConfig, TokenizerError> {
    let mut config: TokenizerConfig = load_json(folder.join("tokenizer_config.json"), hash)?;
    // Older models name their special tokens in a file of their own; newer ones have it for older
    // programs, and nobody reads it.
    if !config.fields.contains_key("added_tokens_decoder") {
        let named: TokenizerConfig = load_json(folder.join("special_tokens_map.json"), hash)?;
        config.fields.extend(named.fields);
    }
    Ok(config)
}

fn load_json(path: PathBuf, hash: &mut Sha256) -> Result<TokenizerConfig, TokenizerError> {
    if !path.exists() {
        return Ok(TokenizerConfig::default());
    }
    serde_json::from_slice(&read(&path, hash)?)
        .map_err(|error| TokenizerError::Parse { path, reason: error.to_string() })
}

/// Has the library read a file that it can read.
fn read_engine(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    screening::check(bytes)?;
    // The library does not promise that what is let in does not make it panic.
    let read = guarded(|| {
        let read = tokenizers::Tokenizer::from_bytes(bytes);
        let mut engine = read.map_err(|error| error.to_string())?;
        settle(&mut engine)?;
        template_prefix(&engine)?;
        Ok(engine)
    });
    read.unwrap_or_else(|| Err("the tokenizers library cannot read this file".to_owned()))
}

/// Makes encoding a function of the text alone that cannot fail.
fn settle(engine: &mut tokenizers::Tokenizer) -> Result<(), String> {
    engine.with_padding(None);
    engine.with_truncation(None).map_err(|error| error.to_string())?;
    engine.set_encode_special_tokens(true);
    let ModelWrapper::BPE(model) = engine.get_model() else {
        return Err("model.type: only byte-pair encoding (BPE) is supported".to_owned());
    };
    if let Some(unknown) = model.get_unk_token()
        // Added tokens do not count: the model does not know them.
        && tokenizers::Model::token_to_id(model, unknown).is_none()
    {
        return Err(format!("model.unk_token: \"{unknown}\" is not in the vocabulary"));
    }
    if model.dropout.is_some() {
        let mut model = model.clone();
        model.dropout = None;
        engine.with_model(model);
    }
    Ok(())
}

fn build(engine: tokenizers::Tokenizer, config: &TokenizerConfig) -> Result<Shared, String> {
    let style = DecoderStyle::of(engine.get_decoder())?;
    let added = engine.get_added_tokens_decoder();
    let mut vocabulary = Vocabulary::with_size(vocab_size(&engine)?);
    for (text, id) in engine.get_vocab(false) {
        vocabulary.set(id, style.bytes_of(text), false);
    }
    for (&id, token) in &added {
        vocabulary.set(id, token.content.clone().into_bytes(), token.special);
    }
    let control = added.iter().filter(|(_, token)| token.special);
    let control = ControlTokens::new(control.map(|(&id, token)| control_token(id, token)));
    let bos = named_id(&engine, config, "bos_token")?;
    let eos = named_id(&engine, config, "eos_token")?;
    let template = template_prefix(&engine)?;
    let prefix = match config.add_bos_token {
        Some(true) if template.is_empty() => bos.into_iter().collect(),
        Some(false) => Vec::new(),
        _ => template,
    };
    Ok(Shared {
        vocabulary,
        control,
        bos: bos.or(prefix.first().copied()),
        prefix,
        eos: eos.into_iter().collect(),
        special: special::of_config(&config.fields),
        leading_spaces: style.leading_spaces,
        engine: Engine::HuggingFace {
            rest: without_first_space(&engine).map(Box::new),
            first: Box::new(engine),
        },
        files_sha256: None,
    })
}

fn vocab_size(engine: &tokenizers::Tokenizer) -> Result<usize, String> {
    let last = engine.get_vocab(true).into_values().max();
    let size = last.map_or(0, |last| last as usize + 1);
    if size == 0 || size > VOCAB_SIZE_MAX {
        return Err(format!("{size} token ids; 1 to {VOCAB_SIZE_MAX} are supported"));
    }
    Ok(size)
}

fn control_token(id: u32, token: &AddedToken) -> ControlToken {
    ControlToken {
        text: token.content.clone(),
        id,
        strip_left: token.lstrip,
        strip_right: token.rstrip,
    }
}

fn named_id(
    engine: &tokenizers::Tokenizer,
    config: &TokenizerConfig,
    field: &str,
) -> Result<Option<u32>, String> {
    let Some(token) = config.fields.get(field).filter(|token| !token.is_null()) else {
        return Ok(None);
    };
    let wrong = |reason: &str| Err(format!("{field} of tokenizer_config.json: {token} {reason}"));
    let Some(text) = special::text_of(token) else { return wrong("is not the text of a token") };
    match engine.token_to_id(text) {
        Some(id) => Ok(Some(id)),
        None => wrong("is not in the vocabulary"),
    }
}

/// What the post-processor puts in front of a text.
fn template_prefix(engine: &tokenizers::Tokenizer) -> Result<Vec<u32>, String> {
    let encode = |whole: bool| {
        let encoding = engine.encode_fast("a", whole).map_err(|error| error.to_string())?;
        Ok::<_, String>(encoding.get_ids().to_vec())
    };
    let (whole, bare) = (encode(true)?, encode(false)?);
    let start = (0..=whole.len()).find(|&start| whole[start..].starts_with(&bare));
    Ok(whole[..start.unwrap_or(0)].to_vec())
}

/// A copy for text after a control token, where only the text at the very start gets a space.
fn without_first_space(engine: &tokenizers::Tokenizer) -> Option<tokenizers::Tokenizer> {
    let mut cutter = engine.get_pre_tokenizer()?.clone();
    if !drop_first_space(&mut cutter) {
        return None;
    }
    let mut copy = engine.clone();
    copy.with_pre_tokenizer(Some(cutter));
    Some(copy)
}

/// Turns "prepend to the first" into "never prepend"; returns whether there was one to turn.
fn drop_first_space(cutter: &mut PreTokenizerWrapper) -> bool {
    match cutter {
        PreTokenizerWrapper::Metaspace(metaspace)
            if metaspace.get_prepend_scheme() == PrependScheme::First =>
        {
            metaspace.set_prepend_scheme(PrependScheme::Never);
            true
        }
        PreTokenizerWrapper::Sequence(steps) => {
            let mut changed = false;
            for step in steps.as_mut() {
                changed |= drop_first_space(step);
            }
            changed
        }
        _ => false,
    }
}

/// How token texts become bytes, read off the file's decoder.
#[derive(Default)]
struct DecoderStyle {
    alphabet: Option<ByteAlphabet>,
    /// Replaced in every token's text, in this order.
    replacements: Vec<(String, String)>,
    byte_fallback: bool,
    leading_spaces: usize,
}

impl DecoderStyle {
    fn of(decoder: Option<&DecoderWrapper>) -> Result<Self, String> {
        let Some(decoder) = decoder else {
            return Err("decoder: missing; ByteLevel and Llama-style ones are supported".into());
        };
        let mut style = Self::default();
        let description = serde_json::to_value(decoder).map_err(|error| error.to_string())?;
        style.add(&description)?;
        Ok(style)
    }

    fn add(&mut self, decoder: &serde_json::Value) -> Result<(), String> {
        let unsupported = || Err(format!("decoder: {decoder} is not supported"));
        match decoder["type"].as_str() {
            Some("Sequence") => {
                for step in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(step)?;
                }
            }
            Some("ByteLevel") => self.alphabet = Some(ByteAlphabet::new()),
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => {
                let pattern = decoder["pattern"]["String"].as_str();
                let (Some(pattern), Some(content)) = (pattern, decoder["content"].as_str()) else {
                    return unsupported();
                };
                self.replacements.push((pattern.to_owned(), content.to_owned()));
            }
            Some("Strip") if decoder["content"] == " " && decoder["stop"] == 0 => {
                let Some(start) = decoder["start"].as_u64() else { return unsupported() };
                self.leading_spaces = start as usize;
            }
            Some("Metaspace") => {
                let Some(replacement) = decoder["replacement"].as_str() else {
                    return unsupported();
                };
                self.replacements.push((replacement.to_owned(), " ".to_owned()));
                self.leading_spaces = usize::from(decoder["prepend_scheme"] != "never");
            }
            _ => return unsupported(),
        }
        Ok(())
    }

    fn bytes_of(&self, token: String) -> Vec<u8> {
        if let Some(byte) = fallback_byte(&token).filter(|_| self.byte_fallback) {
            return vec![byte];
        }
        let mut text = token;
        for (pattern, content) in &self.replacements {
            text = text.replace(pattern, content);
        }
        match &self.alphabet {
            Some(alphabet) => alphabet.decode(&text),
            None => text.into_bytes(),
        }
    }
}
