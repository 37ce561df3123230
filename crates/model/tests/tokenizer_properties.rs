//! For any text and any ids: encoding round-trips, and decoding in pieces is decoding at once.

#[allow(dead_code, reason = "not every test file uses every helper")]
mod tokenizer_support;

use glinthawk_model::tokenizer::Sentinel;
use glinthawk_model::{Model, Tokenizer, testing};
use proptest::prelude::*;
use std::sync::LazyLock;
use tokenizer_support::{build, byte_level, sentencepiece};

const CONTROL: [&str; 3] = ["<|end|>", "<|im_start|>", "<s>"];
const MERGES: [&str; 6] = ["Ġ a", "a b", "Ġa b", "Ġ Ġ", "< |", "Ã ©"];

/// Tokenizers that can express every text.
static LOSSLESS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let pieces = [("▁", -1.0), ("a", -9.0), ("▁a", -2.0), ("<", -9.0), ("s>", -3.0), ("é", -4.0)];
    let mut tokenizers = vec![build(&sentencepiece(&pieces)), Tokenizer::bytes(300)];
    for pre in ["gpt-2", "default", "smollm", "llama-bpe", "tekken"] {
        tokenizers.push(build(&byte_level(pre, &CONTROL, &MERGES)));
    }
    tokenizers
});

/// The default model's tokenizer, if it can be fetched.
static REAL: LazyLock<Option<Tokenizer>> = LazyLock::new(|| {
    let model = Model::open(&testing::default_model()?).expect("the default model opens");
    Some(Tokenizer::of(&model).expect("it has a tokenizer"))
});

/// Text that is often close to what matters: control tokens, spaces, split characters.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<char>().prop_map(String::from),
        "[ \t\r\n]{0,9}",
        "[a-c ]{0,8}",
        "[0-9.,]{0,6}",
        Just("<|im_start|>".to_owned()),
        Just("<|end|>".to_owned()),
        Just("<s>".to_owned()),
        Just("👨‍👩‍👧é\u{301}▁\u{e000}".to_owned()),
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

fn check_pieces(tokenizer: &Tokenizer, ids: &[u32]) {
    for skip_special in [false, true] {
        let kept = ids.iter().filter(|&&id| !(skip_special && tokenizer.is_special(id)));
        let bytes: Vec<u8> = kept.flat_map(|&id| tokenizer.token_bytes(id)).collect();
        let mut decoder = tokenizer.decoder(skip_special);
        let mut pieces: String = ids.iter().map(|&id| decoder.push(id)).collect();
        pieces.push_str(&decoder.flush());
        assert_eq!(pieces, tokenizer.decode(ids, skip_special));
        // Some tokenizers put a space in front of every text.
        let text = String::from_utf8_lossy(&bytes);
        assert!(text == pieces || text.strip_prefix(' ') == Some(&pieces), "{text:?}: {pieces:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn text_comes_back_as_it_was_and_never_as_control(text in text()) {
        for tokenizer in LOSSLESS.iter() {
            let ids = tokenizer.encode(&text);
            // U+2581 is how SentencePiece writes a space: it cannot tell the two apart.
            let spaced = tokenizer.token_text(0) == "<unk>";
            let expected = if spaced { text.replace('▁', " ") } else { text.clone() };
            prop_assert_eq!(tokenizer.decode(&ids, false), expected);
            prop_assert!(!ids.iter().any(|&id| tokenizer.is_special(id)));
            check_pieces(tokenizer, &ids);
        }
    }

    #[test]
    fn guarded_text_is_encoded_as_plain_text(text in text()) {
        for tokenizer in LOSSLESS.iter() {
            let sentinel = Sentinel::absent_from([text.as_str()]).expect("a free character");
            let guarded = tokenizer.guard(&text, &sentinel);
            prop_assert_eq!(
                tokenizer.encode_rendered(&guarded, Some(&sentinel)),
                tokenizer.encode(&text)
            );
        }
    }

    #[test]
    fn any_ids_decode(ids in prop::collection::vec(0..600u32, 0..40)) {
        for tokenizer in LOSSLESS.iter() {
            check_pieces(tokenizer, &ids);
        }
    }

    #[test]
    fn the_default_model_round_trips(text in text(), ids in prop::collection::vec(0..50000u32, 0..40)) {
        if let Some(tokenizer) = REAL.as_ref() {
            check_pieces(tokenizer, &ids);
            let ids = tokenizer.encode(&text);
            prop_assert!(!ids.iter().any(|&id| tokenizer.is_special(id)));
            check_pieces(tokenizer, &ids);
            // Six control characters and two planes of Unicode have no tokens there.
            let missing = |c: char| "\u{4}\u{6}\u{13}\u{14}\u{16}\u{1d}".contains(c)
                || ('\u{40000}'..='\u{bffff}').contains(&c);
            if !text.contains(missing) {
                prop_assert_eq!(tokenizer.decode(&ids, true), text);
            }
        }
    }
}
