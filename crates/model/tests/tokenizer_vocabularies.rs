//! Tokenizers of small made-up vocabularies, with ids worked out by hand.

#[allow(dead_code, reason = "not every test file uses every helper")]
mod tokenizer_support;

use glinthawk_model::tokenizer::GgufVocabulary;
use glinthawk_model::{Tokenizer, TokenizerError};
use serde_json::{Value, json};
use tokenizer_support::{USER_DEFINED, build, byte_level, sentencepiece};

/// Ids 259 on: ▁ a b c ab bc abc ▁a ▁ab < s > s>
const PIECES: [(&str, f32); 13] = [
    ("▁", -100.0),
    ("a", -101.0),
    ("b", -102.0),
    ("c", -103.0),
    ("ab", -2.0),
    ("bc", -1.0),
    ("abc", -3.0),
    ("▁a", -4.0),
    ("▁ab", -5.0),
    ("<", -104.0),
    ("s", -105.0),
    (">", -106.0),
    ("s>", -6.0),
];
const SPACE: u32 = 259;

fn byte(byte: u32) -> u32 {
    3 + byte
}

#[test]
fn sentencepiece_joins_the_best_pair_first() {
    let tokenizer = build(&sentencepiece(&PIECES));
    let check = |text: &str, ids: &[u32]| {
        assert_eq!(tokenizer.encode(text), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    };
    check("", &[]);
    // bc (-1) before ab (-2); then a+bc (-3) before ▁+a (-4); no token is ▁abc.
    check("abc", &[SPACE, SPACE + 6]);
    // Both ab (-2), then ▁+ab (-5).
    check("abab", &[SPACE + 8, SPACE + 4]);
    // A space of the text's own is kept beside the one put in front.
    check(" a", &[SPACE, SPACE + 7]);
    check("a a", &[SPACE + 7, SPACE + 7]);
    // No token for é or the line break: their bytes.
    check("é\n", &[SPACE, byte(0xc3), byte(0xa9), byte(0x0a)]);
    // < s > could join to the text of a control token, and must not: s+> (-6) is as far as it goes.
    check("<s>", &[SPACE, SPACE + 9, SPACE + 12]);
    check(
        "<0x41>",
        &[SPACE, SPACE + 9, byte(0x30), byte(0x78), byte(0x34), byte(0x31), SPACE + 11],
    );
}

#[test]
fn sentencepiece_prompts_begin_with_bos_and_rendered_text_does_not() {
    let mut vocabulary = sentencepiece(&PIECES);
    let tokenizer = build(&vocabulary);
    assert_eq!(tokenizer.encode_prompt("ab"), [1, SPACE + 8]);
    assert_eq!(tokenizer.encode_rendered("<s>ab</s>ab", None), [1, SPACE + 8, 2, SPACE + 8]);
    assert_eq!(tokenizer.decode(&[1, SPACE + 8, 2], true), "ab");
    assert_eq!(tokenizer.decode(&[1, SPACE + 8, 2], false), "<s> ab</s>");
    assert_eq!(tokenizer.eos_tokens(), [2]);

    vocabulary.add_bos_token = Some(false);
    vocabulary.add_space_prefix = Some(false);
    let tokenizer = build(&vocabulary);
    assert_eq!(tokenizer.encode_prompt("ab"), [SPACE + 4]);
    assert_eq!(tokenizer.decode(&[SPACE + 8], false), " ab");
}

#[test]
fn user_defined_tokens_are_found_in_plain_text() {
    let mut vocabulary = sentencepiece(&PIECES);
    vocabulary.tokens.push("<tool>".to_owned());
    vocabulary.token_type.push(USER_DEFINED);
    vocabulary.scores.push(0.0);
    let tokenizer = build(&vocabulary);
    let tool = SPACE + 13;
    assert_eq!(tokenizer.encode("a<tool>b"), [SPACE + 7, tool, SPACE, SPACE + 2]);
    assert!(!tokenizer.is_special(tool));

    let mut vocabulary = byte_level("gpt-2", &["<|end|>"], &[]);
    vocabulary.tokens.push("<tool>".to_owned());
    vocabulary.token_type.push(USER_DEFINED);
    let tokenizer = build(&vocabulary);
    let ids = tokenizer.encode("a<tool>");
    assert_eq!(ids.len(), 2);
    assert_eq!(tokenizer.decode(&ids, true), "a<tool>");
}

#[test]
fn byte_level_merges_within_words() {
    let merges = ["Ġ a", "a b", "Ġa b"];
    // One control token, 256 bytes, then the merges.
    let (space_a, ab, space_ab) = (257, 258, 259);
    let tokenizer = build(&byte_level("gpt-2", &["<|end|>"], &merges));
    assert_eq!(tokenizer.encode("ab ab"), [ab, space_ab]);
    assert_eq!(tokenizer.encode("ab a"), [ab, space_a]);
    assert_eq!(tokenizer.encode_rendered("ab<|end|>ab", None), [ab, 0, ab]);
    assert_eq!(tokenizer.encode("<|end|>").len(), "<|end|>".len());
    assert_eq!(tokenizer.decode(&tokenizer.encode("<|end|>"), true), "<|end|>");
    assert_eq!(tokenizer.eos_tokens(), [0]);
}

#[test]
fn whole_words_go_before_merges_where_the_name_says_so() {
    // No merges lead to "abc", which is a token all the same.
    let word = |pre: &str| {
        let mut vocabulary = byte_level(pre, &["<|begin_of_text|>"], &["a b"]);
        vocabulary.tokens.push("abc".to_owned());
        vocabulary.token_type.push(1);
        vocabulary.bos_token_id = Some(0);
        build(&vocabulary)
    };
    assert_eq!(word("llama-bpe").encode_prompt("abc"), [0, 258]);
    assert_eq!(word("tekken").encode("abc"), [258]);
    assert_eq!(word("qwen2").encode_prompt("abc"), [257, word("qwen2").encode("c")[0]]);
}

fn check_refused(change: impl Fn(&mut GgufVocabulary), expected: &str) {
    let mut vocabulary = sentencepiece(&PIECES);
    change(&mut vocabulary);
    let error = Tokenizer::from_vocabulary(&vocabulary).expect_err(expected).to_string();
    assert!(error.contains(expected), "{error} should say {expected}");
}

#[test]
fn broken_vocabularies_are_refused_by_field() {
    check_refused(|it| it.model = "bert".to_owned(), "tokenizer.ggml.model");
    check_refused(|it| it.tokens.clear(), "tokenizer.ggml.tokens");
    check_refused(|it| it.scores.truncate(5), "tokenizer.ggml.scores");
    check_refused(|it| it.scores.clear(), "tokenizer.ggml.scores");
    check_refused(|it| it.token_type.truncate(5), "tokenizer.ggml.token_type");
    check_refused(|it| it.bos_token_id = Some(9999), "tokenizer.ggml.bos_token_id");
    check_refused(
        |it| {
            it.token_type[7] = 1;
            it.unknown_token_id = None;
        },
        "neither a token for every byte",
    );
    check_refused(|it| *it = byte_level("no-such", &[], &[]), "no-such");
    check_refused(|it| *it = byte_level("gpt-2", &[], &["ab"]), "tokenizer.ggml.merges");
    check_refused(
        |it| {
            *it = byte_level("gpt-2", &[], &[]);
            it.merges = vec!["a ☃".to_owned()];
        },
        "tokenizer.ggml.merges",
    );
}

/// A `tokenizer.json` in the style of Llama 2: byte fallback, ▁ for spaces.
fn llama_json(normalizer: Value, pre_tokenizer: Value, decoder: Value) -> Value {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2});
    for byte in 0..256 {
        vocab[format!("<0x{byte:02X}>")] = json!(3 + byte);
    }
    for (id, (text, _)) in (259..).zip(PIECES) {
        vocab[text] = json!(id);
    }
    let added = ["<unk>", "<s>", "</s>"].iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    });
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 2,
            "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "dropout": 0.5, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": ["b c", "a b", "a bc", "▁ a", "▁ ab"]},
    })
}

fn llama_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

fn from_folder(tokenizer: &Value, config: Option<Value>) -> Result<Tokenizer, TokenizerError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, value: &Value| {
        std::fs::write(folder.path().join(name), value.to_string()).expect(name);
    };
    write("tokenizer.json", tokenizer);
    if let Some(config) = config {
        write("tokenizer_config.json", &config);
    }
    Tokenizer::from_folder(folder.path())
}

#[test]
fn hugging_face_llama_style() {
    let legacy = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let file = llama_json(legacy, Value::Null, llama_decoder());
    let tokenizer = from_folder(&file, None).expect("loads");
    assert_eq!(tokenizer.encode("abc"), [SPACE, SPACE + 6]);
    assert_eq!(tokenizer.encode("abab"), [SPACE + 8, SPACE + 4]);
    assert_eq!(tokenizer.encode("é"), [SPACE, byte(0xc3), byte(0xa9)]);
    assert_eq!(tokenizer.encode_prompt("ab"), [1, SPACE + 8]);
    assert_eq!(tokenizer.encode("<s>"), [SPACE, SPACE + 9, SPACE + 10, SPACE + 11]);
    // In this style every text after a control token gets its own space.
    assert_eq!(tokenizer.encode_rendered("<s>ab</s>ab", None), [1, SPACE + 8, 2, SPACE + 8]);
    assert_eq!(tokenizer.decode(&[1, SPACE + 8, byte(0xc3), byte(0xa9), 2], true), "abé");
    assert_eq!(tokenizer.vocab_size(), 272);
}

#[test]
fn hugging_face_space_before_the_first_word_only() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let file = llama_json(Value::Null, metaspace, llama_decoder());
    let config =
        json!({"add_bos_token": false, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
    let tokenizer = from_folder(&file, Some(config)).expect("loads");
    assert_eq!(tokenizer.encode_prompt("ab"), [SPACE + 8]);
    assert_eq!(tokenizer.encode_rendered("ab</s>ab", None), [SPACE + 8, 2, SPACE + 4]);
    assert_eq!(tokenizer.encode_rendered("<s>ab</s>", None), [1, SPACE + 4, 2]);
    assert_eq!(tokenizer.bos_token(), Some(1));
    assert_eq!(tokenizer.eos_tokens(), [2]);
}

#[test]
fn hugging_face_files_that_cannot_be_used_are_named() {
    let check = |file: &Value, config: Option<Value>, expected: &str| {
        let error = from_folder(file, config).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error} should say {expected}");
    };
    let good = llama_json(Value::Null, Value::Null, llama_decoder());
    check(&json!({}), None, "tokenizer.json");
    check(&good, Some(json!({"bos_token": "<no>"})), "bos_token");
    check(&good, Some(json!([])), "tokenizer_config.json");
    let word_piece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    check(&llama_json(Value::Null, Value::Null, word_piece), None, "WordPiece");
    check(&llama_json(Value::Null, Value::Null, Value::Null), None, "decoder");
    let missing = Tokenizer::from_folder(std::path::Path::new("no/such/folder"));
    assert!(missing.expect_err("missing").to_string().contains("no/such/folder"));
}
