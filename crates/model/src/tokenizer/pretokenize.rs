//! How byte-level vocabularies cut text into words before merging, by the name GGUF gives it.

use super::TokenizerError;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// What a `tokenizer.ggml.pre` name stands for.
pub(super) struct PreTokenizer {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) cutter: PreTokenizerWrapper,
    /// If a whole word is a token, it becomes that token without merging.
    pub(super) whole_words: bool,
    /// Whether prompts begin with the begin-of-text token if the file does not say.
    pub(super) adds_bos: bool,
}

/// Every name [`PreTokenizer::named`] knows.
const NAMES: &str = "default, gpt-2, llama-bpe, qwen2, smollm, tekken";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Applied in order, each to the parts that the one before left whole.
const DEFAULT: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

impl PreTokenizer {
    pub(super) fn named(name: &str) -> Result<Self, TokenizerError> {
        let plain = |cutter| Self { normalizer: None, cutter, whole_words: false, adds_bos: false };
        Ok(match name {
            "gpt-2" => plain(byte_level(true).into()),
            "smollm" => plain(sequence(vec![Digits::new(true).into(), byte_level(true).into()])),
            // The format's own rule for files that name none.
            "default" => plain(cut_at(&DEFAULT)?),
            // This family's own tokenizer composes characters first; the name implies it.
            "qwen2" | "deepseek-r1-qwen" => {
                Self { normalizer: Some(NormalizerWrapper::NFC(NFC)), ..plain(cut_at(&[QWEN2])?) }
            }
            "llama-bpe" | "llama3" | "llama-v3" => {
                Self { whole_words: true, adds_bos: true, ..plain(cut_at(&[LLAMA3])?) }
            }
            "tekken" => Self { whole_words: true, adds_bos: true, ..plain(cut_at(&[TEKKEN])?) },
            unknown => {
                return Err(TokenizerError::field(
                    "tokenizer.ggml.pre",
                    format!("unknown pre-tokenizer \"{unknown}\"; known: {NAMES}"),
                ));
            }
        })
    }
}

fn byte_level(cuts_words: bool) -> ByteLevel {
    ByteLevel::new(false, true, cuts_words)
}

fn sequence(steps: Vec<PreTokenizerWrapper>) -> PreTokenizerWrapper {
    PreTokenizerWrapper::Sequence(Sequence::new(steps))
}

fn cut_at(patterns: &[&str]) -> Result<PreTokenizerWrapper, TokenizerError> {
    let mut steps = Vec::with_capacity(patterns.len() + 1);
    for pattern in patterns {
        let split = Split::new(
            SplitPattern::Regex((*pattern).to_owned()),
            SplitDelimiterBehavior::Isolated,
            false,
        )
        .map_err(|error| TokenizerError::field("tokenizer.ggml.pre", error.to_string()))?;
        steps.push(split.into());
    }
    steps.push(byte_level(false).into());
    Ok(sequence(steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    fn check(name: &str, text: &str, words: &[&str]) {
        let cutter = PreTokenizer::named(name).expect(name).cutter;
        let mut cut = PreTokenizedString::from(text);
        cutter.pre_tokenize(&mut cut).expect("any text can be cut");
        let got: Vec<&str> = cut
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(_, (start, end), _)| &text[start..end])
            .collect();
        assert_eq!(got, words, "{name}: {text:?}");
    }

    #[test]
    fn words_are_cut_as_the_name_says() {
        check("gpt-2", "I'll  pay 1234.", &["I", "'ll", " ", " pay", " 1234", "."]);
        check("smollm", "pay 123x", &["pay", " ", "1", "2", "3", "x"]);
        check("llama-bpe", "pay 12345\n\nI'LL", &["pay", " ", "123", "45", "\n\n", "I", "'LL"]);
        check("qwen2", "(pay 123", &["(pay", " ", "1", "2", "3"]);
        check("tekken", "camelCase a/\n12", &["camel", "Case", " a", "/\n", "1", "2"]);
        check("default", "a<=b 12345", &["a", "<=", "b", " ", "123", "45"]);
    }

    #[test]
    fn unknown_name_is_named() {
        let error = PreTokenizer::named("klingon").err().expect("unknown");
        assert!(error.to_string().contains("klingon"), "{error}");
    }
}
