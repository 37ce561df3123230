//! What a job must know of the model that answers it: names, limits, tokenizer and template.

use crate::key::RunDigest;
use glinthawk_model::{ChatTemplate, Tokenizer};

/// The model that runs a job's requests.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// As results name it.
    pub name: String,
    /// Everything else that decides the results' bytes: files, context type, instruction set. If it
    /// or the name differs from an output file's, that file's results are not reused.
    pub identity: String,
    /// Between text and tokens.
    pub tokenizer: Tokenizer,
    /// Between messages and text; without one, chat requests are refused.
    pub template: Option<ChatTemplate>,
    /// Token ids are below this.
    pub vocab: u32,
    /// Tokens of a prompt and its completion together, at most.
    pub context_max: u32,
    /// Tokens that end a completion.
    pub eos_tokens: Vec<u32>,
}

impl ServedModel {
    pub(crate) fn run_digest(&self) -> RunDigest {
        RunDigest::new(&self.name, &self.identity, self.context_max)
    }

    /// What a generated token adds to the text: control tokens add nothing.
    pub(crate) fn text_bytes(&self, token: u32) -> Vec<u8> {
        if self.tokenizer.is_special(token) {
            Vec::new()
        } else {
            self.tokenizer.token_bytes(token)
        }
    }

    /// Bytes of the longest token, at least one. Looks at the whole vocabulary.
    pub(crate) fn longest_token_bytes(&self) -> usize {
        let tokens = 0..self.vocab;
        tokens.map(|token| self.tokenizer.token_bytes(token).len()).max().unwrap_or(0).max(1)
    }
}
