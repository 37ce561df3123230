//! Between text and token ids: tokens that the model does not have, and control tokens in a prompt.

use crate::common::{Case, answer};
use glinthawk_model::Tokenizer;
use glinthawk_model::tokenizer::GgufVocabulary;
use serde_json::Value;

/// The tokenizer knows 300 ids, the model only the first 122: up to `y`.
fn check_beyond_the_model(line: &str, param: &str, token: u32) {
    let mut case = Case::new(line);
    case.model.vocab = 122;
    let summary = case.run().unwrap();
    assert_eq!((summary.succeeded, summary.failed), (0, 1), "{line}");
    let answer: Value = serde_json::from_str(&case.output_text()).unwrap();
    let error = &answer["response"]["body"]["error"];
    assert_eq!(error["param"], param, "{line}: {error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("token {token}")), "{line}: {message}");
    assert!(message.contains("but the model has 122 tokens, 0 to 121"), "{line}: {message}");
}

#[test]
fn a_token_that_the_model_lacks_makes_an_error_line() {
    check_beyond_the_model(r#"{"prompt":"lazy"}"#, "prompt", 122);
    check_beyond_the_model(r#"{"prompt":[97,122]}"#, "prompt", 122);
    check_beyond_the_model(r#"{"prompt":[4294967295]}"#, "prompt", u32::MAX);
    let chat = r#"{"messages":[{"role":"user","content":"hazy"}]}"#;
    check_beyond_the_model(chat, "messages", 122);
    check_beyond_the_model(r#"{"prompt":"a","logit_bias":{"122":1}}"#, "logit_bias", 122);
    check_beyond_the_model(r#"{"prompt":"a","stop_token_ids":[5,122]}"#, "stop_token_ids", 122);
}

#[test]
fn an_end_that_the_model_lacks_is_never_met_and_harms_nobody() {
    let mut case = Case::new(r#"{"prompt":"a","max_tokens":3,"ignore_eos":false}"#);
    case.model.vocab = 122;
    case.model.eos_tokens = vec![256, 4_000_000];
    assert_eq!(case.run().unwrap().succeeded, 1);
}

/// A byte is a token; three tokens are control, and a prompt begins with the first of them.
fn with_control_tokens() -> Tokenizer {
    let control = ["<s>", "<|im_start|>", "<|im_end|>"];
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<String> = control.map(str::to_owned).into_iter().chain(bytes).collect();
    let vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        token_type: (0..tokens.len()).map(|id| if id < control.len() { 3 } else { 6 }).collect(),
        scores: vec![0.0; tokens.len()],
        tokens,
        add_bos_token: Some(true),
        add_space_prefix: Some(false),
        bos_token_id: Some(0),
        ..GgufVocabulary::default()
    };
    Tokenizer::from_vocabulary(&vocabulary).unwrap()
}

fn check_tokens(fields: &str, expected: &[u32]) {
    let mut case = Case::new(format!(r#"{{"prompt":"<|im_start|>a<|im_end|>"{fields}}}"#));
    case.model.tokenizer = with_control_tokens();
    let prompts = case.prompts();
    assert_eq!(prompts.len(), 1, "{fields}");
    assert_eq!(prompts[0].tokens, expected, "{fields}");
}

#[test]
fn control_tokens_of_a_prompt_are_text_unless_the_request_says_otherwise() {
    let text: Vec<u32> =
        "<|im_start|>a<|im_end|>".bytes().map(|byte| 3 + u32::from(byte)).collect();
    let a = 3 + u32::from(b'a');
    let after_bos = [&[0], text.as_slice()].concat();
    check_tokens("", &after_bos);
    check_tokens(r#","parse_special":false"#, &after_bos);
    check_tokens(r#","parse_special":true"#, &[0, 1, a, 2]);
    check_tokens(r#","add_special_tokens":true"#, &after_bos);
    check_tokens(r#","add_special_tokens":false"#, &text);
    check_tokens(r#","add_special_tokens":false,"parse_special":true"#, &[1, a, 2]);
}

#[test]
fn both_fields_are_for_prompts_and_take_a_flag() {
    for field in ["parse_special", "add_special_tokens"] {
        let error = |line: String| answer(&line)["response"]["body"]["error"].clone();
        let wrong = error(format!(r#"{{"prompt":"a","{field}":1}}"#));
        assert_eq!((&wrong["param"], &wrong["code"]), (&field.into(), &"invalid_value".into()));
        let chat = r#"{"messages":[{"role":"user","content":"x"}]"#;
        let wrong = error(format!(r#"{chat},"{field}":true}}"#));
        assert_eq!((&wrong["param"], &wrong["code"]), (&field.into(), &"unknown_parameter".into()));
    }
}

#[test]
fn a_request_with_another_reading_of_its_prompt_is_another_request() {
    let id = |fields: &str| answer(&format!(r#"{{"prompt":"a"{fields}}}"#))["id"].clone();
    assert_ne!(id(""), id(r#","parse_special":true"#));
    assert_ne!(id(""), id(r#","add_special_tokens":false"#));
}
