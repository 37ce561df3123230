//! What a completion's log-probabilities say of its text: offsets, and the likeliest tokens.

use crate::common::{Case, END, submit};
use glinthawk_jobs::Next;
use glinthawk_protocol::{Completion, Finish, Generated, Prompt};
use serde_json::{Value, json};
use std::time::Duration;

/// The only choice of a line whose prompt the engine answers like this.
fn choice(line: &str, tokens: impl Fn(&Prompt) -> Vec<Generated>) -> Value {
    let case = Case::new(line);
    let mut job = case.open().unwrap();
    loop {
        match job.next(Duration::from_millis(20)).unwrap() {
            Next::Prompt(prompt) => {
                let tokens = tokens(&prompt);
                let completion =
                    Completion { id: submit(&mut job), tokens, finish: Finish::Stop, shared: 0 };
                job.finish(&completion).unwrap();
            }
            Next::Later => {}
            Next::Exhausted => break,
        }
    }
    job.close().unwrap();
    let line: Value = serde_json::from_str(&case.output_text()).unwrap();
    line["response"]["body"]["choices"][0].clone()
}

fn generated(token: u32, logprob: f32, alternatives: &[(u32, f32)]) -> Generated {
    Generated { token, logprob, alternatives: alternatives.to_vec() }
}

/// The model says these bytes, a token each, and ends.
fn check_offsets(bytes: &[u8], text: &str, offsets: &[usize]) {
    let choice = choice(r#"{"prompt":"p","logprobs":0,"max_tokens":30,"stop":["!!"]}"#, |_| {
        let tokens = bytes.iter().map(|byte| u32::from(*byte)).chain([END]);
        tokens.map(|token| generated(token, -0.5, &[])).collect()
    });
    assert_eq!(choice["text"], text, "{bytes:x?}");
    assert_eq!(choice["logprobs"]["text_offset"], json!(offsets), "{bytes:x?}");
    // An offset is the place of a token's first byte in the text that is returned.
    let characters: Vec<char> = text.chars().collect();
    for (byte, offset) in bytes.iter().zip(offsets).filter(|(byte, _)| byte.is_ascii()) {
        assert_eq!(characters[*offset], char::from(*byte), "{bytes:x?}");
    }
}

#[test]
fn text_offsets_count_the_characters_that_are_returned() {
    check_offsets(b"abc", "abc", &[0, 1, 2]);
    check_offsets("aé🙂b".as_bytes(), "aé🙂b", &[0, 1, 1, 2, 2, 2, 2, 3]);
    // Bytes that begin no character are a U+FFFD each.
    check_offsets(b"\x80\x80a", "\u{fffd}\u{fffd}a", &[0, 1, 2]);
    // So is the beginning of a character that is not continued.
    check_offsets(b"\xf0\x9fab", "\u{fffd}ab", &[0, 0, 1, 2]);
    check_offsets(b"\xc3\xc3\xa9a", "\u{fffd}éa", &[0, 1, 1, 2]);
    check_offsets(b"a\xe4\xbd", "a\u{fffd}", &[0, 1, 1]);
    // A stop string is cut off, and so are its tokens.
    check_offsets(b"\x80ab!!", "\u{fffd}ab", &[0, 1, 2]);
}

fn check_top(count: u8, token: Generated, expected: &str) {
    let line = format!(r#"{{"prompt":"p","logprobs":{count}}}"#);
    let choice = choice(&line, |_| vec![token.clone(), generated(END, -0.5, &token.alternatives)]);
    assert_eq!(choice["logprobs"]["top_logprobs"].to_string(), expected);
}

#[test]
fn top_logprobs_hold_the_picked_token_even_if_it_is_unlikely() {
    let likeliest = [(97, -0.25), (98, -1.5)];
    check_top(2, generated(97, -0.25, &likeliest), r#"[{"a":-0.25,"b":-1.5}]"#);
    check_top(2, generated(98, -1.5, &likeliest), r#"[{"a":-0.25,"b":-1.5}]"#);
    check_top(2, generated(122, -7.0, &likeliest), r#"[{"a":-0.25,"b":-1.5,"z":-7.0}]"#);
    // Minus infinity has no spelling in JSON.
    check_top(1, generated(122, f32::NEG_INFINITY, &[(97, -0.25)]), r#"[{"a":-0.25,"z":-9999.0}]"#);
    check_top(0, generated(122, -7.0, &[]), "null");
}
