//! What result lines look like: text, stop strings, choices, log-probabilities, usage.

use crate::common::{
    Case, END, answer, backwards, complete, generated, model, seeded, submit, without_created,
};
use glinthawk_jobs::{Generation, Job, Next, OpenInput, PreparedJob};
use glinthawk_protocol::{Completion, Finish, Prompt, PromptId};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

/// The line's text, finish reason and completion tokens.
fn check(line: &str, text: &str, finish_reason: &str, tokens: u64) {
    let answer = answer(line);
    let body = &answer["response"]["body"];
    let choice = &body["choices"][0];
    let told = choice.get("text").unwrap_or(&choice["message"]["content"]);
    assert_eq!(told, text, "{line}");
    assert_eq!(choice["finish_reason"], finish_reason, "{line}");
    assert_eq!(body["usage"]["completion_tokens"], tokens, "{line}");
}

#[test]
fn completions_become_text() {
    check(r#"{"prompt":"abc"}"#, "cba", "stop", 4);
    check(r#"{"prompt":"abc","max_tokens":2}"#, "cb", "length", 2);
    check(r#"{"prompt":"abc","stop_token_ids":[98]}"#, "c", "stop", 2);
    check(r#"{"prompt":"abc","ignore_eos":true}"#, "cba", "length", 4);
    check(r#"{"prompt":"abc","echo":true}"#, "abccba", "stop", 4);
    check(r#"{"prompt":[97,98],"echo":true}"#, "abba", "stop", 3);
    check(r#"{"messages":[{"role":"user","content":"abc"}]}"#, ">tnatsissa<cba>resu<", "stop", 21);
}

#[test]
fn bytes_that_are_no_text_become_replacement_characters() {
    // Backwards, "é" is no character; cut after its first byte it is none either.
    check(r#"{"prompt":"aé"}"#, "\u{fffd}\u{fffd}a", "stop", 4);
    check(r#"{"prompt":[169,195,97],"max_tokens":2}"#, "a\u{fffd}", "length", 2);
    check(r#"{"prompt":[169,195,97]}"#, "aé", "stop", 4);
}

#[test]
fn stop_strings_cut_wherever_the_engine_stops() {
    for late in 0..4 {
        let mut case = Case::new(r#"{"prompt":"fedcba","stop":["cd","e"],"logprobs":0}"#);
        case.late = late;
        case.run().unwrap();
        let line: Value = serde_json::from_str(&case.output_text()).unwrap();
        let body = &line["response"]["body"];
        assert_eq!(body["choices"][0]["text"], "ab");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(body["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
        assert_eq!(
            body["usage"],
            json!({"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}})
        );
    }
    // Complete with the last token that may be generated: the stop string counts, not the length.
    check(r#"{"prompt":"cba","stop":"bc","max_tokens":3}"#, "a", "stop", 3);
    check(r#"{"prompt":"cba","stop":"bc","max_tokens":2}"#, "ab", "length", 2);
}

#[test]
fn a_completion_line_is_written_so() {
    let case = Case::new(r#"{"custom_id":"a","prompt":"hi","logprobs":2}"#);
    case.run().unwrap();
    let line = without_created(case.output_text().trim_end());
    let key = line["{\"id\":\"batch_req_".len()..][..32].to_owned();
    let expected = format!(
        r#"{{"id":"batch_req_{key}","custom_id":"a","response":{{"status_code":200,"request_id":"{key}","body":{{"id":"cmpl-{key}","object":"text_completion","model":"bytes","choices":[{{"index":0,"text":"ih","logprobs":{{"tokens":["i","h"],"token_logprobs":[-0.25,-0.25],"top_logprobs":[{{"i":-0.25,"j":-1.25}},{{"h":-0.25,"i":-1.25}}],"text_offset":[0,1]}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,"prompt_tokens_details":{{"cached_tokens":0}}}},"system_fingerprint":null}}}},"error":null}}"#
    );
    assert_eq!(line, expected);
    let created = serde_json::from_str::<Value>(&case.output_text()).unwrap();
    assert!(created["response"]["body"]["created"].as_u64().unwrap() > 1_700_000_000);
}

#[test]
fn a_chat_line_is_written_so() {
    let line = r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"é"}],"max_tokens":12,"logprobs":true,"top_logprobs":1}}"#;
    let answer = answer(line);
    let body = &answer["response"]["body"];
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &body["choices"][0];
    let message = json!({"role": "assistant", "content": ">tnatsissa<\u{fffd}", "refusal": null});
    assert_eq!(choice["message"], message);
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    let first = json!({
        "token": ">", "logprob": -0.25, "bytes": [62],
        "top_logprobs": [{"token": ">", "logprob": -0.25, "bytes": [62]}],
    });
    assert_eq!(content[0], first);
    assert_eq!(content[11]["token"], "bytes:\\xa9");
}

#[test]
fn choices_come_in_order_and_are_counted_together() {
    let mut case = Case::new(r#"{"prompt":"hi","n":20,"max_tokens":20}"#);
    case.script = seeded;
    let seeds: Vec<String> =
        case.prompts().iter().map(|prompt| format!("{:016x}", prompt.sampling.seed)).collect();
    case.run().unwrap();
    let line: Value = serde_json::from_str(&case.output_text()).unwrap();
    let body = &line["response"]["body"];
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 20);
    for (index, (choice, seed)) in choices.iter().zip(&seeds).enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], *seed);
    }
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 2, "completion_tokens": 340, "total_tokens": 342, "prompt_tokens_details": {"cached_tokens": 0}})
    );
}

/// A place in memory that a job writes to.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_job_needs_no_files() {
    let lines = "{\"prompt\":\"hi\"}\n{\"prompt\":\"ho\",\"n\":2}\nno JSON\n";
    let case = Case::new(lines);
    case.run().unwrap();
    let memory = Memory::default();
    let input = OpenInput::stream("a request", lines.as_bytes());
    let prepared = PreparedJob::to_stream(input, "a response", memory.clone());
    let job = prepared.start(Arc::new(case.model.clone())).unwrap();
    let summary = case.run_job(job, usize::MAX).unwrap().expect("ran to its end");
    assert_eq!((summary.succeeded, summary.failed), (2, 1));
    let text = String::from_utf8(memory.0.lock().unwrap().clone()).unwrap();
    let mut written: Vec<String> = text.lines().map(without_created).collect();
    written.sort();
    assert_eq!(written, case.sorted());
}

#[test]
fn a_rejected_prompt_fails_its_line_once() {
    let case = Case::new("{\"prompt\":\"hi\",\"n\":3}\n{\"prompt\":\"ho\"}\n");
    let mut job = case.open().unwrap();
    let first = next(&mut job);
    let id = submit(&mut job);
    next(&mut job);
    job.reject("no room for it").unwrap();
    let completion = complete(&mut job, id, &first, backwards, 0);
    job.finish(&completion).unwrap();
    let line: Value = serde_json::from_str(&case.output_text()).unwrap();
    assert_eq!(line["response"], Value::Null);
    assert_eq!(line["error"], json!({"code": "rejected", "message": "no room for it"}));
    let third = next(&mut job);
    assert_eq!(third.tokens, [104, 111], "the rejected line's third choice is not asked for");
    drop(job);
    // Another run tries again, and leaves one line for each.
    let summary = case.run().unwrap();
    assert_eq!((summary.succeeded, summary.failed), (2, 0));
    assert_eq!(case.output_text().lines().count(), 2);
    assert!(!case.output_text().contains("rejected"));
}

#[test]
fn a_prompt_for_which_no_token_can_be_picked_fails_its_line() {
    let case = Case::new("{\"prompt\":\"hi\",\"n\":3}\n{\"prompt\":\"ho\"}\n");
    let mut job = case.open().unwrap();
    let [first, second] = [0, 1].map(|_| {
        let prompt = next(&mut job);
        let id = submit(&mut job);
        complete(&mut job, id, &prompt, backwards, 0)
    });
    let without = |completion: Completion, tokens: usize| Completion {
        finish: Finish::NoToken,
        tokens: completion.tokens[..tokens].to_vec(),
        ..completion
    };
    let completion = without(first, 1);
    job.finish(&without(second, 2)).unwrap();
    assert_eq!(case.output_text(), "", "one is still to come");
    job.finish(&completion).unwrap();
    let line: Value = serde_json::from_str(&case.output_text()).unwrap();
    let message = line["error"]["message"].as_str().unwrap();
    assert_eq!((&line["response"], &line["error"]["code"]), (&Value::Null, &json!("rejected")));
    assert!(message.contains("no token can follow token 1 of the answer"), "{message}");
    assert_eq!(next(&mut job).tokens, [104, 111], "the third choice is not asked for");

    let body = json!({"prompt": "hi"});
    let mut generation = Generation::new(Arc::new(model()), &body).unwrap();
    let half = generated(&generation.prompt(), 0xc3);
    assert_eq!(
        (generation.token(&half).text.as_str(), generation.held().as_str()),
        ("", "\u{fffd}")
    );
    let completion = Completion { tokens: Vec::new(), ..completion };
    let reason = generation.finish(&completion).unwrap_err();
    assert!(reason.contains("no token can follow the prompt"), "{reason}");
}

fn next(job: &mut Job) -> Prompt {
    loop {
        match job.next(std::time::Duration::from_millis(20)).unwrap() {
            Next::Prompt(prompt) => return prompt,
            Next::Later => {}
            Next::Exhausted => panic!("there is a prompt left"),
        }
    }
}

/// Streams a body's completion; returns the pieces, the ending's text, and the whole.
fn stream(body: &Value, tokens: &[u32]) -> (Vec<String>, String) {
    let mut generation = Generation::new(Arc::new(model()), body).unwrap();
    let prompt: Prompt = generation.prompt();
    assert!(prompt.watched);
    let mut completion =
        Completion { id: PromptId(7), tokens: Vec::new(), finish: Finish::Length, shared: 0 };
    let mut pieces = Vec::new();
    for token in tokens {
        let token = generated(&prompt, *token);
        let piece = generation.token(&token);
        completion.tokens.push(token);
        pieces.push(piece.text);
        if piece.stop.is_some() {
            break;
        }
    }
    (pieces, generation.finish(&completion).unwrap().text)
}

#[test]
fn a_generation_tells_text_as_soon_as_it_is_certain() {
    let check = |body: Value, tokens: &[u8], pieces: &[&str], ending: &str| {
        let tokens: Vec<u32> = tokens.iter().map(|token| u32::from(*token)).collect();
        let (told, rest) = stream(&body, &tokens);
        assert_eq!(
            (told, rest.as_str()),
            (pieces.iter().map(|p| (*p).to_owned()).collect(), ending)
        );
    };
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    check(chat, b"ab", &["a", "b"], "");
    check(json!({"prompt": "x"}), "é!".as_bytes(), &["", "é", "!"], "");
    check(json!({"prompt": "x"}), b"\xc3!\xc3", &["", "\u{fffd}!", ""], "\u{fffd}");
    check(json!({"prompt": "x", "stop": "cde"}), b"abcdef", &["", "", "a", "b", ""], "");
    check(json!({"prompt": "x", "stop": "cde"}), b"abcd", &["", "", "a", "b"], "cd");
    assert!(stream(&json!({"prompt": "x"}), &[97, END]).1.is_empty());
    let refusal =
        Generation::new(Arc::new(model()), &json!({"prompt": "x", "n": 2})).err().unwrap();
    assert_eq!(refusal.param.as_deref(), Some("n"));
}
