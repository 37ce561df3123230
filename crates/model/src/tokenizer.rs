//! Text to token ids and back, with one interface for every vocabulary file.

mod control;
mod decoder;
mod gguf;
mod guarded;
mod huggingface;
mod pretokenize;
mod screening;
mod sentencepiece;
mod special;
mod vocabulary;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

pub use control::Sentinel;
pub use decoder::Decoder;
pub use gguf::GgufVocabulary;
pub use guarded::{guarded, silence_guarded_panics};
pub use special::SpecialToken;

use crate::model::{Model, Source};
use crate::source::gguf::Metadata;
use control::{ControlTokens, Piece};
use sentencepiece::SentencePiece;
use vocabulary::Vocabulary;

/// Ids above any real vocabulary's; a file that claims more is lying.
const VOCAB_SIZE_MAX: usize = 1 << 22;

/// Why a tokenizer cannot be made from a model's files.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("{path}: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A field holds something this tokenizer cannot be built from.
    #[error("tokenizer: {field}: {reason}")]
    Field {
        /// The field, as the file spells it.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl TokenizerError {
    fn field(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Field { field: field.into(), reason: reason.into() }
    }
}

/// A model's tokenizer: cheap to clone, shared between threads.
///
/// [`encode`](Self::encode) drops what a vocabulary cannot express, as the reference
/// implementations do. For example, SmolLM2's has no token for six of the control characters. Where a file is not to be
/// trusted, encode in [`guarded`] work: there are files on which the tokenizers library panics.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    engine: Engine,
    vocabulary: Vocabulary,
    control: ControlTokens,
    /// Put in front of a plain prompt.
    prefix: Vec<u32>,
    bos: Option<u32>,
    eos: Vec<u32>,
    /// As the model's files name them.
    special: Vec<(String, SpecialToken)>,
    /// Spaces that encoding puts in front of a text and decoding takes away again.
    leading_spaces: usize,
    /// Of the files it was made from, where these are not the weights' own.
    files_sha256: Option<[u8; 32]>,
}

/// What turns plain text into ids; it never yields a control token.
enum Engine {
    HuggingFace {
        /// For text at the very start of the input.
        first: Box<tokenizers::Tokenizer>,
        /// For text after a control token, if that differs.
        rest: Option<Box<tokenizers::Tokenizer>>,
    },
    SentencePiece(SentencePiece),
    /// Every byte is the token of its value.
    Bytes,
}

impl Engine {
    fn encode(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) {
        match self {
            Engine::HuggingFace { first, rest } => {
                let engine = match rest {
                    Some(rest) if !at_start => rest,
                    _ => first,
                };
                let encoding = engine
                    .encode_fast(text, false)
                    .expect("byte-pair encoding of any text succeeds, as loading made sure");
                ids.extend_from_slice(encoding.get_ids());
            }
            Engine::SentencePiece(engine) => engine.encode(text, ids),
            Engine::Bytes => ids.extend(text.bytes().map(u32::from)),
        }
    }
}

impl Tokenizer {
    /// The tokenizer among a model's files; bytes as tokens if it has no files.
    pub fn of(model: &Model) -> Result<Self, TokenizerError> {
        match model.source() {
            Source::Gguf { metadata, .. } => Self::from_gguf(metadata),
            Source::Folder(folder) => Self::from_folder(folder),
            Source::Dummy | Source::Elsewhere => Ok(Self::bytes(model.config().vocab)),
        }
    }

    /// From a folder's `tokenizer.json` and, if it has one, `tokenizer_config.json`.
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizerError> {
        huggingface::load(folder)
    }

    /// From a GGUF file's metadata.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        gguf::build(&GgufVocabulary::from_metadata(metadata)?)
    }

    /// From a vocabulary as GGUF files carry it.
    pub fn from_vocabulary(vocabulary: &GgufVocabulary) -> Result<Self, TokenizerError> {
        gguf::build(vocabulary)
    }

    /// For models without a vocabulary of their own (`dummy:SHAPE`): a byte is the token of its
    /// value, all tokens above decode to nothing. `vocab_size` must be at least 256.
    pub fn bytes(vocab_size: usize) -> Self {
        assert!(vocab_size >= 256, "{vocab_size} tokens cannot name every byte");
        let mut vocabulary = Vocabulary::with_size(vocab_size);
        for byte in 0..=u8::MAX {
            vocabulary.set(u32::from(byte), vec![byte], false);
        }
        Self::new(Shared {
            engine: Engine::Bytes,
            vocabulary,
            control: ControlTokens::default(),
            prefix: Vec::new(),
            bos: None,
            eos: Vec::new(),
            special: Vec::new(),
            leading_spaces: 0,
            files_sha256: None,
        })
    }

    fn new(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Encodes plain text: control tokens written in it are text like any other.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.shared.engine.encode(text, true, &mut ids);
        ids
    }

    /// Encodes a plain prompt: [`encode`](Self::encode) after the begin-of-text token, if this
    /// tokenizer asks for one.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        let mut ids = self.shared.prefix.clone();
        self.shared.engine.encode(text, true, &mut ids);
        ids
    }

    /// Encodes text in which control tokens are control: a chat template's output. Nothing is
    /// added. To render text from requests, guard it with a [`Sentinel`] and pass it here.
    pub fn encode_rendered(&self, rendered: &str, sentinel: Option<&Sentinel>) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut at_start = true;
        for piece in self.shared.control.split(rendered, sentinel) {
            match piece {
                Piece::Control(id) => ids.push(id),
                Piece::Text(text) => self.shared.engine.encode(&text, at_start, &mut ids),
            }
            at_start = false;
        }
        ids
    }

    /// Encodes a prompt in which control tokens are control, after the begin-of-text token where
    /// this tokenizer asks for one.
    pub fn encode_rendered_prompt(&self, rendered: &str) -> Vec<u32> {
        let mut ids = self.shared.prefix.clone();
        ids.extend(self.encode_rendered(rendered, None));
        ids
    }

    /// Marks every control token's text in `text` so that
    /// [`encode_rendered`](Self::encode_rendered) takes it as text.
    pub fn guard(&self, text: &str, sentinel: &Sentinel) -> String {
        self.shared.control.guard(text, sentinel)
    }

    /// The text of a whole sequence; bytes that are not UTF-8 become U+FFFD. Special tokens are
    /// left out with `skip_special`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.decoder(skip_special).finish_with(ids)
    }

    /// Decodes token by token; the pieces together are exactly what [`decode`](Self::decode)
    /// returns.
    pub fn decoder(&self, skip_special: bool) -> Decoder {
        Decoder::new(self.clone(), skip_special, self.shared.leading_spaces)
    }

    /// A hash of the files it was made from; none where these are the weights' own or there are none.
    pub(crate) fn files_sha256(&self) -> Option<[u8; 32]> {
        self.shared.files_sha256
    }

    /// Number of ids, holes included; the model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.shared.vocabulary.len()
    }

    /// The bytes a token stands for; none for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.shared.vocabulary.bytes(id).to_vec()
    }

    /// The text a token stands for; bytes that are not UTF-8 by themselves become U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.shared.vocabulary.bytes(id)).into_owned()
    }

    /// Whether a token is control, not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.shared.vocabulary.is_special(id)
    }

    /// The begin-of-text token, if there is one.
    pub fn bos_token(&self) -> Option<u32> {
        self.shared.bos
    }

    /// Tokens that end a text or a turn, the main one first.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.shared.eos
    }

    /// The special tokens that the model's files name, by those names.
    pub fn special_tokens(&self) -> &[(String, SpecialToken)] {
        &self.shared.special
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos_token", &self.bos_token())
            .field("eos_tokens", &self.eos_tokens())
            .finish_non_exhaustive()
    }
}
