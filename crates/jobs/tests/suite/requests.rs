//! Which lines are requests, what prompts they become, and what the other lines' errors say.

use crate::common::{CONTEXT_MAX, Case, END, answer};
use glinthawk_protocol::{Prompt, Sampling};
use serde_json::Value;

/// The line is refused with this code, parameter and (part of the) message.
fn check_refused(line: &str, code: &str, param: &str, message: &str) {
    let answer = answer(line);
    let error = &answer["response"]["body"]["error"];
    assert_eq!(answer["response"]["status_code"], 400, "{line}: {answer}");
    assert_eq!(answer["error"], Value::Null);
    assert_eq!(error["type"], "invalid_request_error");
    assert_eq!(error["code"], code, "{line}: {error}");
    assert_eq!(error["param"].as_str().unwrap_or(""), param, "{line}: {error}");
    assert!(error["message"].as_str().unwrap().contains(message), "{line}: {error}");
}

/// The line becomes one prompt; sampling is greedy unless `edit` says otherwise.
fn check_prompt(line: &str, text: &str, tokens_max: u32, edit: impl Fn(&mut Prompt)) {
    let prompts = Case::new(line).prompts();
    let mut expected = Prompt {
        tokens: text.bytes().map(u32::from).collect(),
        tokens_max,
        stop_ids: vec![END],
        sampling: Sampling { temperature: 0.0, seed: 1, ..Sampling::default() },
        ..Prompt::default()
    };
    edit(&mut expected);
    assert_eq!(prompts, [expected], "{line}");
}

/// The same for a bare completions line with these further fields.
fn check_field(field: &str, edit: impl Fn(&mut Prompt)) {
    let defaults = [("temperature", "0"), ("seed", "1")];
    let defaults = defaults.iter().filter(|(name, _)| !field.contains(name));
    let defaults: String = defaults.map(|(name, value)| format!(r#","{name}":{value}"#)).collect();
    check_prompt(&format!(r#"{{"prompt":"hi",{field}{defaults}}}"#), "hi", 16, edit);
}

fn check_chat_field(field: &str, tokens_max: u32, edit: impl Fn(&mut Prompt)) {
    let message = r#""messages":[{"role":"user","content":"hi"}],"temperature":0,"seed":1"#;
    check_prompt(&format!("{{{message},{field}}}"), "<user>hi<assistant>", tokens_max, edit);
}

#[test]
fn lines_become_prompts() {
    let batch = r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"gpt","prompt":"hi","seed":1,"temperature":0}}"#;
    check_prompt(batch, "hi", 16, |_| {});
    let chat = r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"developer","content":"be"},{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}],"seed":1,"temperature":0,"max_completion_tokens":3}}"#;
    check_prompt(chat, "<system>be<user>hi<assistant>", 3, |_| {});
    check_field(r#""custom_id":"mine""#, |_| {});
    check_prompt(
        "\u{feff}{\"prompt\":[104,105],\"seed\":1,\"temperature\":0}\r\n",
        "hi",
        16,
        |_| {},
    );
}

#[test]
fn body_fields_become_sampling() {
    check_field(r#""max_tokens":5"#, |p| p.tokens_max = 5);
    check_field(r#""priority":-7"#, |p| p.priority = -7);
    check_field(r#""max_tokens":1000000"#, |p| p.tokens_max = CONTEXT_MAX - 2);
    check_field(r#""temperature":null"#, |p| p.sampling.temperature = 1.0);
    check_field(r#""temperature":0.5"#, |p| p.sampling.temperature = 0.5);
    check_field(r#""temperature":1e-30"#, |p| p.sampling.temperature = 0.0);
    check_field(r#""top_p":0.5,"top_k":7,"min_p":0.25"#, |p| {
        (p.sampling.top_p, p.sampling.top_k, p.sampling.min_p) = (0.5, 7, 0.25);
    });
    check_field(r#""top_k":-1"#, |p| p.sampling.top_k = 0);
    check_field(r#""seed":-1"#, |p| p.sampling.seed = u64::MAX);
    check_field(r#""seed":18446744073709551615"#, |p| p.sampling.seed = u64::MAX);
    check_field(r#""presence_penalty":-2,"frequency_penalty":2"#, |p| {
        (p.biases.presence_penalty, p.biases.frequency_penalty) = (-2.0, 2.0);
    });
    check_field(r#""repetition_penalty":1.5"#, |p| p.sampling.repetition_penalty = 1.5);
    check_field(r#""logit_bias":{"20":-100,"3":0.5}"#, |p| {
        p.biases.logit_bias = vec![(3, 0.5), (20, -100.0)];
    });
    check_field(r#""logprobs":3"#, |p| p.sampling.logprobs = Some(3));
    check_field(r#""stop":"x""#, |p| p.watched = true);
    check_field(r#""stop":["x","y"]"#, |p| p.watched = true);
    check_field(r#""stop":[]"#, |_| {});
    check_field(r#""stop_token_ids":[5,5,4]"#, |p| p.stop_ids = vec![4, 5, END]);
    check_field(r#""ignore_eos":true"#, |p| p.stop_ids = vec![]);
    check_field(r#""ignore_eos":true,"stop_token_ids":[4]"#, |p| p.stop_ids = vec![4]);
}

#[test]
fn chat_fields_become_sampling() {
    let room = CONTEXT_MAX - 19;
    check_chat_field(r#""n":1"#, room, |_| {});
    check_chat_field(r#""max_tokens":4"#, 4, |_| {});
    check_chat_field(r#""max_tokens":4,"max_completion_tokens":4"#, 4, |_| {});
    check_chat_field(r#""logprobs":false,"top_logprobs":0"#, room, |_| {});
    check_chat_field(r#""logprobs":true"#, room, |p| p.sampling.logprobs = Some(0));
    check_chat_field(r#""logprobs":true,"top_logprobs":20"#, room, |p| {
        p.sampling.logprobs = Some(20);
    });
    check_chat_field(
        r#""tools":[],"tool_choice":"none","response_format":{"type":"text"}"#,
        room,
        |_| {},
    );
    check_chat_field(
        r#""stream":true,"stream_options":null,"user":"u","metadata":{},"store":true"#,
        room,
        |_| {},
    );
}

#[test]
fn bad_lines_are_refused() {
    check_refused(
        "{",
        "invalid_json",
        "",
        "line 1 is not valid JSON: EOF while parsing an object (column 1)",
    );
    check_refused(r#"{"seed":1e999}"#, "invalid_json", "", "number out of range (column 13)");
    check_refused("nonsense", "invalid_json", "", "column 2");
    check_refused(r#"{"prompt":"hi"} x"#, "invalid_json", "", "trailing");
    check_refused("true", "invalid_line", "", "expected an object");
    check_refused("17", "invalid_line", "", "expected an object");
    check_refused("{}", "invalid_line", "", "neither");
    check_refused(r#"{"prompt":"a","prompt":"b"}"#, "invalid_line", "", "`prompt` is there twice");
    check_refused(r#"{"prompt":"a","messages":[]}"#, "invalid_line", "", "not both");
    let deep = format!("{{\"prompt\":{}", "[".repeat(100_000));
    check_refused(&deep, "invalid_json", "", "recursion limit");
    let batch = |custom_id: &str, method: &str, url: &str, body: &str| {
        format!(r#"{{"custom_id":{custom_id},"method":{method},"url":{url},"body":{body}}}"#)
    };
    let check_batch =
        |line: String, code: &str, param: &str| check_refused(&line, code, param, param);
    let (id, post, url, body) =
        (r#""a""#, r#""POST""#, r#""/v1/completions""#, r#"{"prompt":"x"}"#);
    check_batch(batch("7", post, url, body), "invalid_value", "custom_id");
    check_batch(batch(r#""""#, post, url, body), "invalid_value", "custom_id");
    check_batch(batch("null", post, url, body), "missing_required_parameter", "custom_id");
    check_batch(batch(id, r#""GET""#, url, body), "invalid_value", "method");
    check_batch(batch(id, "null", url, body), "missing_required_parameter", "method");
    check_batch(batch(id, post, r#""/v1/embeddings""#, body), "invalid_value", "url");
    check_batch(batch(id, post, "[]", body), "invalid_value", "url");
    check_batch(batch(id, post, url, "[]"), "invalid_value", "body");
    check_batch(batch(id, post, url, "null"), "missing_required_parameter", "body");
    check_batch(batch(id, post, url, "{}"), "missing_required_parameter", "prompt");
    check_batch(batch(id, post, url, r#"{"messages":[]}"#), "missing_required_parameter", "prompt");
    check_batch(
        format!(r#"{{"custom_id":"a","method":"POST","url":{url},"body":{body},"bdy":1}}"#),
        "unknown_parameter",
        "bdy",
    );
}

#[test]
fn bad_prompts_and_messages_are_refused() {
    let prompt = |value: &str, message: &str| {
        check_refused(&format!(r#"{{"prompt":{value}}}"#), "invalid_value", "prompt", message);
    };
    prompt(r#""""#, "empty");
    prompt("[]", "no tokens");
    prompt("[1,300]", "`prompt` has token 300, but the model has 300 tokens, 0 to 299");
    prompt("[1,-1]", "an array of token ids");
    prompt("[1,2.5]", "an array of token ids");
    prompt("{}", "a string or an array of token ids");
    prompt(r#"["a","b"]"#, "each its own line");
    prompt("[[1],[2]]", "each its own line");
    let line = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(64));
    check_refused(
        &line,
        "context_length_exceeded",
        "prompt",
        "holds 64 tokens; the prompt alone has 64",
    );
    let messages = |value: &str, code: &str, param: &str, message: &str| {
        check_refused(&format!(r#"{{"messages":{value}}}"#), code, param, message);
    };
    messages("[]", "invalid_value", "messages", "1 to");
    messages("{}", "invalid_value", "messages", "an array");
    messages("[7]", "invalid_value", "messages[0]", "an object");
    messages(r#"[{"content":"x"}]"#, "invalid_value", "messages[0].role", "user");
    messages(
        r#"[{"role":"user"}]"#,
        "missing_required_parameter",
        "messages[0].content",
        "missing",
    );
    messages(
        r#"[{"role":"user","content":7}]"#,
        "invalid_value",
        "messages[0].content",
        "a string",
    );
    messages(
        r#"[{"role":"user","content":"a"},{"role":"tool","content":"x"}]"#,
        "unsupported_parameter",
        "messages[1].role",
        "tools",
    );
    let image = r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#;
    messages(image, "unsupported_parameter", "messages[0].content", "text");
    let typo = r#"[{"role":"user","content":"x","contnet":"y"}]"#;
    messages(typo, "unknown_parameter", "messages[0].contnet", "unknown");
}

#[test]
fn bad_fields_are_refused() {
    let check = |field: &str, code: &str, param: &str, message: &str| {
        check_refused(&format!(r#"{{"prompt":"hi",{field}}}"#), code, param, message);
    };
    for (field, message) in [
        (r#""temperature":2.1"#, "from 0 to 2"),
        (r#""temperature":"hot""#, "a number"),
        (r#""top_p":1.5"#, "from 0 to 1"),
        (r#""top_k":-2"#, "from -1"),
        (r#""top_k":1.5"#, "an integer"),
        (r#""min_p":-0.1"#, "from 0 to 1"),
        (r#""seed":"x""#, "an integer"),
        (r#""seed":18446744073709551616"#, "64 bits"),
        (r#""presence_penalty":3"#, "from -2 to 2"),
        (r#""frequency_penalty":-3"#, "from -2 to 2"),
        (r#""repetition_penalty":0"#, "from 0.01 to 100"),
        (r#""logit_bias":{"x":1}"#, "token ids"),
        (r#""logit_bias":{"1":101}"#, "-100 to 100"),
        (r#""logit_bias":{"300":1}"#, "has token 300, but the model has 300 tokens"),
        (r#""logit_bias":[]"#, "an object"),
        (r#""max_tokens":0"#, "from 1"),
        (r#""n":0"#, "from 1 to 128"),
        (r#""n":129"#, "from 1 to 128"),
        (r#""logprobs":21"#, "from 0 to 20"),
        (r#""logprobs":true"#, "an integer"),
        (r#""stop":"""#, "1 to 1024 bytes"),
        (r#""stop":[1]"#, "a string"),
        (
            r#""stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]"#,
            "up to 16",
        ),
        (r#""stop_token_ids":[300]"#, "has token 300, but the model has 300 tokens, 0 to 299"),
        (r#""ignore_eos":1"#, "true or false"),
        (r#""echo":"yes""#, "true or false"),
    ] {
        let param = field.split('"').nth(1).unwrap();
        check(field, "invalid_value", param, message);
    }
    for field in [
        "\"suffix\":\"x\"",
        "\"best_of\":2",
        "\"tools\":[{}]",
        "\"response_format\":{\"type\":\"json_object\"}",
    ] {
        let param = field.split('"').nth(1).unwrap();
        check(field, "unsupported_parameter", param, "support");
    }
    check(r#""echo":true,"logprobs":1"#, "unsupported_parameter", "echo", "not available");
    check(r#""temprature":0"#, "unknown_parameter", "temprature", "unknown field `temprature`");
    check(r#""top_logprobs":1"#, "unknown_parameter", "top_logprobs", "unknown");
    let chat = r#"{"messages":[{"role":"user","content":"x"}],"#;
    let line = format!(r#"{chat}"top_logprobs":2}}"#);
    check_refused(&line, "invalid_value", "top_logprobs", "needs `logprobs`");
    let line = format!(r#"{chat}"max_tokens":2,"max_completion_tokens":3}}"#);
    check_refused(&line, "invalid_value", "max_completion_tokens", "differ");
    let line = format!(r#"{chat}"echo":true}}"#);
    check_refused(&line, "unknown_parameter", "echo", "unknown");
}

#[test]
fn a_model_without_template_refuses_chat() {
    let mut case = Case::new(r#"{"messages":[{"role":"user","content":"x"}]}"#);
    case.model.template = None;
    case.run().unwrap();
    assert!(case.output_text().contains("model bytes has no chat template: use `prompt`"));
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let case = Case::new(b"{\"prompt\":\"\xff\"}\n\n  \t\n{\"prompt\":\"b\"}");
    let summary = case.run().unwrap();
    assert_eq!((summary.succeeded, summary.failed), (1, 1));
    let output = case.sorted().join("\n");
    assert!(output.contains(r#""custom_id":"line-1""#), "{output}");
    assert!(output.contains("line 1 is not valid UTF-8 (column 12)"), "{output}");
    assert!(output.contains(r#""custom_id":"line-4""#), "{output}");
}

#[test]
fn a_line_too_long_is_refused_and_the_next_one_runs() {
    let long = "x".repeat(glinthawk_jobs::LINE_BYTES_MAX);
    let case = Case::new(format!("{{\"prompt\":\"{long}\"}}\n{{\"prompt\":\"b\"}}\n"));
    let summary = case.run().unwrap();
    assert_eq!((summary.succeeded, summary.failed), (1, 1));
    assert!(case.output_text().contains("line 1 is longer than 16777216 bytes"));
}

#[test]
fn a_refusal_does_not_repeat_the_whole_line() {
    let long = "x".repeat(1 << 20);
    for line in [format!("\"{long}\""), format!(r#"{{"prompt":"a","{long}":1}}"#)] {
        assert!(answer(&line).to_string().len() < 2000);
    }
}

#[test]
fn a_text_far_too_long_is_refused_before_it_is_tokenized() {
    let long = "x".repeat(1 << 20);
    let message = "holds 64 tokens; a text of 1048576 bytes has more";
    let line = format!(r#"{{"prompt":"{long}"}}"#);
    check_refused(&line, "context_length_exceeded", "prompt", message);
    let line = format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}]}}"#);
    check_refused(&line, "context_length_exceeded", "messages", message);
}

#[test]
fn a_seed_derives_from_the_request() {
    let seed = |line: &str| Case::new(line).prompts()[0].sampling.seed;
    let first = seed(r#"{"custom_id":"a","prompt":"hi"}"#);
    assert_eq!(first, seed(r#"{ "prompt": "hi", "custom_id": "a" }"#));
    assert_ne!(first, seed(r#"{"custom_id":"b","prompt":"hi"}"#));
    assert_ne!(first, seed(r#"{"custom_id":"a","prompt":"ho"}"#));
}

#[test]
fn fields_that_do_not_count_change_neither_seed_nor_id() {
    let of = |line: &str| {
        let case = Case::new(line);
        let seed = case.prompts()[0].sampling.seed;
        case.run().unwrap();
        let line: Value = serde_json::from_str(&case.output_text()).unwrap();
        (seed, line["id"].clone())
    };
    let plain = of(r#"{"custom_id":"a","prompt":"hi"}"#);
    for field in [r#""priority":7"#, r#""user":"bob""#, r#""model":"m""#, r#""stream":true"#] {
        assert_eq!(of(&format!(r#"{{"custom_id":"a","prompt":"hi",{field}}}"#)), plain, "{field}");
    }
    let batch = |field: &str| {
        let body = format!(r#"{{"prompt":"hi"{field}}}"#);
        of(&format!(r#"{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{body}}}"#))
    };
    assert_eq!(batch(""), batch(r#","metadata":{"a":"b"},"priority":-1"#));
}

#[test]
fn choices_differ_in_their_seed_alone() {
    let prompts = Case::new(r#"{"prompt":"hi","n":3,"seed":9}"#).prompts();
    assert_eq!(prompts.len(), 3);
    assert_eq!(prompts[0].sampling.seed, 9);
    let mut seeds: Vec<u64> = prompts.iter().map(|prompt| prompt.sampling.seed).collect();
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    for prompt in &prompts[1..] {
        let sampling = Sampling { seed: 9, ..prompt.sampling.clone() };
        assert_eq!(Prompt { sampling, ..prompt.clone() }, prompts[0]);
    }
}
