//! Small vocabularies made up for the tests.

use glinthawk_model::Tokenizer;
use glinthawk_model::tokenizer::GgufVocabulary;

pub const NORMAL: i64 = 1;
pub const UNKNOWN: i64 = 2;
pub const CONTROL: i64 = 3;
pub const USER_DEFINED: i64 = 4;
pub const BYTE: i64 = 6;

/// A byte-level vocabulary: these control tokens, all bytes, then what the merges make.
pub fn byte_level(pre: &str, control: &[&str], merges: &[&str]) -> GgufVocabulary {
    let mut tokens: Vec<String> = control.iter().map(|&token| token.to_owned()).collect();
    let mut token_type = vec![CONTROL; control.len()];
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..256).filter(|&byte| !printable(byte)).count() as u32;
    let stand_ins = (0..256).filter(|&byte| printable(byte)).chain(0x100..0x100 + hidden);
    tokens.extend(stand_ins.map(|code| char::from_u32(code).expect("in Latin").to_string()));
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    token_type.resize(tokens.len(), NORMAL);
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        tokens,
        token_type,
        merges: merges.iter().map(|&merge| merge.to_owned()).collect(),
        ..GgufVocabulary::default()
    }
}

/// A SentencePiece-style vocabulary: `<unk>`, `<s>`, `</s>`, the bytes from id 3 on, then these
/// tokens with their scores from id 259 on.
pub fn sentencepiece(tokens: &[(&str, f32)]) -> GgufVocabulary {
    let mut vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(0),
        ..GgufVocabulary::default()
    };
    let mut push = |text: String, kind: i64, score: f32| {
        vocabulary.tokens.push(text);
        vocabulary.token_type.push(kind);
        vocabulary.scores.push(score);
    };
    push("<unk>".to_owned(), UNKNOWN, 0.0);
    push("<s>".to_owned(), CONTROL, 0.0);
    push("</s>".to_owned(), CONTROL, 0.0);
    for byte in 0..256 {
        push(format!("<0x{byte:02X}>"), BYTE, 0.0);
    }
    for &(text, score) in tokens {
        push(text.to_owned(), NORMAL, score);
    }
    vocabulary
}

pub fn build(vocabulary: &GgufVocabulary) -> Tokenizer {
    Tokenizer::from_vocabulary(vocabulary).expect("a sound vocabulary")
}
