//! Builds a tokenizer from the vocabulary a GGUF file carries.

use super::control::{ControlToken, ControlTokens};
use super::pretokenize::PreTokenizer;
use super::sentencepiece::{SPACE, SentencePiece};
use super::vocabulary::{ByteAlphabet, Vocabulary, fallback_byte};
use super::{Engine, Shared, SpecialToken, Tokenizer, TokenizerError};
use crate::source::gguf::Metadata;
use std::collections::HashMap;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, ModelWrapper};

/// The tokens a model may end a turn with beside its end-of-text token, as they are spelled.
/// GGUF files name one or two of them; the models' own generation settings name more.
const END_NAMES: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
];

/// The part of a GGUF file's metadata that makes its tokenizer; every field is named for its key
/// under `tokenizer.ggml`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// `gpt2` or `llama`.
    pub model: String,
    /// How text is cut into words, for `gpt2`.
    pub pre: Option<String>,
    /// The text of every id.
    pub tokens: Vec<String>,
    /// The kind of every id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    /// Empty: all normal.
    pub token_type: Vec<i64>,
    /// The score of every id, for `llama`.
    pub scores: Vec<f32>,
    /// Pairs to join, first to last, for `gpt2`.
    pub merges: Vec<String>,
    /// Whether a prompt begins with the begin-of-text token.
    pub add_bos_token: Option<bool>,
    /// Whether a space goes in front of text, for `llama`.
    pub add_space_prefix: Option<bool>,
    /// The begin-of-text token.
    pub bos_token_id: Option<u32>,
    /// The end-of-text token.
    pub eos_token_id: Option<u32>,
    /// The end-of-turn token.
    pub eot_token_id: Option<u32>,
    /// The token for text that has no other.
    pub unknown_token_id: Option<u32>,
    /// Of interest to chat templates alone, as the next three.
    pub padding_token_id: Option<u32>,
    /// Between texts.
    pub separator_token_id: Option<u32>,
    /// Stands for a whole text.
    pub cls_token_id: Option<u32>,
    /// Stands for a word to be guessed.
    pub mask_token_id: Option<u32>,
}

impl GgufVocabulary {
    /// Takes the vocabulary out of a file's metadata.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let missing = |name: &str| TokenizerError::field(key(name), "missing or not of its type");
        let strings = |name: &str| metadata.strings(&key(name)).map(<[String]>::to_vec);
        let id = |name: &str| {
            let id = metadata.unsigned(&key(name))?;
            u32::try_from(id).ok()
        };
        Ok(Self {
            model: metadata.string(&key("model")).ok_or_else(|| missing("model"))?.to_owned(),
            pre: metadata.string(&key("pre")).map(str::to_owned),
            tokens: strings("tokens").ok_or_else(|| missing("tokens"))?,
            token_type: metadata.integers(&key("token_type")).unwrap_or_default().to_vec(),
            scores: metadata.floats(&key("scores")).unwrap_or_default().to_vec(),
            merges: strings("merges").unwrap_or_default(),
            add_bos_token: metadata.bool(&key("add_bos_token")),
            add_space_prefix: metadata.bool(&key("add_space_prefix")),
            bos_token_id: id("bos_token_id"),
            eos_token_id: id("eos_token_id"),
            eot_token_id: id("eot_token_id"),
            unknown_token_id: id("unknown_token_id"),
            padding_token_id: id("padding_token_id"),
            separator_token_id: id("separator_token_id"),
            cls_token_id: id("cls_token_id"),
            mask_token_id: id("mask_token_id"),
        })
    }

    fn kind(&self, index: usize) -> Kind {
        match self.token_type.get(index) {
            Some(2) => Kind::Unknown,
            Some(3) => Kind::Control,
            Some(4) => Kind::UserDefined,
            Some(5) => Kind::Unused,
            Some(6) => Kind::Byte,
            _ => Kind::Normal,
        }
    }

    /// Every id with its text and kind.
    fn entries(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        (0..).zip(&self.tokens).map(|(id, text)| (id, text.as_str(), self.kind(id as usize)))
    }

    fn of_kind(&self, kind: Kind) -> ControlTokens {
        let tokens = self.entries().filter(|&(_, _, its)| its == kind);
        ControlTokens::new(tokens.map(|(id, text, _)| ControlToken::plain(text, id)))
    }

    fn check(&self) -> Result<(), TokenizerError> {
        let count = self.tokens.len();
        if count == 0 || count > super::VOCAB_SIZE_MAX {
            return Err(TokenizerError::field(
                "tokenizer.ggml.tokens",
                format!("{count} tokens; 1 to {} are supported", super::VOCAB_SIZE_MAX),
            ));
        }
        for (field, length) in
            [("token_type", self.token_type.len()), ("scores", self.scores.len())]
        {
            if length != 0 && length != count {
                return Err(TokenizerError::field(
                    format!("tokenizer.ggml.{field}"),
                    format!("{length} values for {count} tokens"),
                ));
            }
        }
        let ids = [
            ("bos_token_id", self.bos_token_id),
            ("eos_token_id", self.eos_token_id),
            ("eot_token_id", self.eot_token_id),
            ("unknown_token_id", self.unknown_token_id),
        ];
        for (field, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= count) {
                return Err(TokenizerError::field(
                    format!("tokenizer.ggml.{field}"),
                    format!("{id} is past the last of {count} tokens"),
                ));
            }
        }
        Ok(())
    }

    /// The special tokens under the names that chat templates know.
    fn special(&self) -> Vec<(String, SpecialToken)> {
        let named = [
            ("bos_token", self.bos_token_id),
            ("eos_token", self.eos_token_id),
            ("unk_token", self.unknown_token_id),
            ("pad_token", self.padding_token_id),
            ("sep_token", self.separator_token_id),
            ("cls_token", self.cls_token_id),
            ("mask_token", self.mask_token_id),
        ];
        let text = |id: Option<u32>| self.tokens.get(id? as usize).cloned();
        let tokens = named.into_iter().filter_map(|(name, id)| Some((name.to_owned(), text(id)?)));
        tokens.map(|(name, text)| (name, SpecialToken::One(text))).collect()
    }

    /// The tokens that end a text or turn, the file's own first.
    fn ends(&self) -> Vec<u32> {
        let named = [self.eos_token_id, self.eot_token_id].into_iter().flatten();
        let spelled = self
            .entries()
            .filter(|(_, text, kind)| *kind == Kind::Control && END_NAMES.contains(text))
            .map(|(id, _, _)| id);
        let mut ends = Vec::new();
        for id in named.chain(spelled) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        ends
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

pub(super) fn build(source: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
    source.check()?;
    match source.model.as_str() {
        "gpt2" => build_byte_level(source),
        "llama" => build_sentencepiece(source),
        unknown => Err(TokenizerError::field(
            "tokenizer.ggml.model",
            format!("unknown vocabulary type \"{unknown}\"; known: gpt2, llama"),
        )),
    }
}

fn assemble(
    source: &GgufVocabulary,
    engine: Engine,
    leading_spaces: usize,
    adds_bos: bool,
    bytes_of: impl Fn(&str, Kind) -> Vec<u8>,
) -> Tokenizer {
    let mut vocabulary = Vocabulary::with_size(source.tokens.len());
    for (id, text, kind) in source.entries() {
        let special = matches!(kind, Kind::Control | Kind::Unknown);
        vocabulary.set(id, bytes_of(text, kind), special);
    }
    let adds_bos = source.add_bos_token.unwrap_or(adds_bos);
    Tokenizer::new(Shared {
        engine,
        vocabulary,
        control: source.of_kind(Kind::Control),
        prefix: source.bos_token_id.filter(|_| adds_bos).into_iter().collect(),
        bos: source.bos_token_id,
        eos: source.ends(),
        special: source.special(),
        leading_spaces,
        files_sha256: None,
    })
}

fn build_byte_level(source: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
    let pre = PreTokenizer::named(source.pre.as_deref().unwrap_or("default"))?;
    let mut merges = Vec::with_capacity(source.merges.len());
    for merge in &source.merges {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            TokenizerError::field("tokenizer.ggml.merges", format!("\"{merge}\" is no pair"))
        })?;
        merges.push((left.to_owned(), right.to_owned()));
    }
    // Control tokens stay out of the model's reach, so that no text can become one.
    let tokens: Vocab = source
        .entries()
        .filter(|(_, _, kind)| !matches!(kind, Kind::Control | Kind::Unknown))
        .map(|(id, text, _)| (text.to_owned(), id))
        .collect();
    let broken = |error: tokenizers::Error| {
        TokenizerError::field("tokenizer.ggml.merges", error.to_string())
    };
    let model = BPE::builder()
        .vocab_and_merges(tokens, merges)
        .ignore_merges(pre.whole_words)
        .build()
        .map_err(broken)?;
    let mut engine = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
    engine.with_normalizer(pre.normalizer).map_err(broken)?;
    engine.with_pre_tokenizer(Some(pre.cutter));
    let fixed = source.entries().filter(|&(_, _, kind)| kind == Kind::UserDefined);
    engine
        .add_tokens(fixed.map(|(_, text, _)| AddedToken::from(text, false).normalized(false)))
        .map_err(broken)?;
    let alphabet = ByteAlphabet::new();
    let engine = Engine::HuggingFace { first: Box::new(engine), rest: None };
    Ok(assemble(source, engine, 0, pre.adds_bos, |text, kind| match kind {
        Kind::Normal | Kind::Unused | Kind::Byte => alphabet.decode(text),
        Kind::Control | Kind::Unknown | Kind::UserDefined => text.as_bytes().to_vec(),
    }))
}

fn build_sentencepiece(source: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
    if source.scores.is_empty() {
        return Err(TokenizerError::field("tokenizer.ggml.scores", "missing"));
    }
    let mut tokens = HashMap::new();
    let mut bytes = HashMap::new();
    for (id, text, kind) in source.entries() {
        match kind {
            // The first of two tokens with the same text is the one that text becomes.
            Kind::Normal => {
                tokens.entry(text.into()).or_insert((id, source.scores[id as usize]));
            }
            Kind::Byte => {
                bytes.extend(fallback_byte(text).map(|byte| (byte, id)));
            }
            Kind::Unknown | Kind::Control | Kind::UserDefined | Kind::Unused => {}
        }
    }
    let bytes: Option<Vec<u32>> = (0..=u8::MAX).map(|byte| bytes.get(&byte).copied()).collect();
    let bytes: Option<Box<[u32; 256]>> = bytes.and_then(|all| all.try_into().ok());
    let unknown = source.unknown_token_id;
    if bytes.is_none() && unknown.is_none() {
        return Err(TokenizerError::field(
            "tokenizer.ggml.tokens",
            "neither a token for every byte nor an unknown token: not all text can be encoded",
        ));
    }
    let space_prefix = source.add_space_prefix.unwrap_or(true);
    let fixed = source.of_kind(Kind::UserDefined);
    let engine = SentencePiece { tokens, bytes, unknown, fixed, space_prefix };
    let engine = Engine::SentencePiece(engine);
    Ok(assemble(source, engine, usize::from(space_prefix), true, |text, kind| match kind {
        Kind::Byte => {
            fallback_byte(text).map_or_else(|| text.as_bytes().to_vec(), |byte| vec![byte])
        }
        Kind::Normal | Kind::Unused | Kind::UserDefined => text.replace(SPACE, " ").into_bytes(),
        Kind::Control | Kind::Unknown => text.as_bytes().to_vec(),
    }))
}
