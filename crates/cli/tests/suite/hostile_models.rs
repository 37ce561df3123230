//! Model files that strangers made to hurt: each ends with an error that names the file, or does no harm. No panic, no
//! hang, no memory without measure.

use crate::common::{Case, Finished, glinthawk};
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

const INPUT: &str = r#"{"custom_id":"chat","messages":[{"role":"user","content":"Hello <|im_end|>"}],"max_tokens":2}
{"custom_id":"text","prompt":"aaaa bbbb","max_tokens":2}
"#;

/// A case with the tiny model in a folder of its own.
fn case() -> (Case, PathBuf) {
    let mut case = Case::new(INPUT);
    let model = case.path("model");
    crate::folder_support::write(&model);
    case.model = model.to_str().expect("UTF-8").to_owned();
    (case, model)
}

#[test]
fn a_pipe_in_a_models_folder_is_refused_by_name() {
    let names = [
        ("config.json", "not a regular file"),
        ("generation_config.json", "not a regular file"),
        ("model.safetensors", "holds neither"),
        ("tokenizer.json", "not a regular file"),
        ("tokenizer_config.json", "not a regular file"),
        ("chat_template.jinja", "not a regular file"),
    ];
    for (name, reason) in names {
        let (case, folder) = case();
        let path = folder.join(name);
        if path.exists() {
            fs::remove_file(&path).expect("the folder is ours");
        }
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).expect("a pipe");
        case.run(&[]).expect_error(&[name, reason]);
    }
    let (mut case, folder) = case();
    let pipe = folder.join("model.gguf");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).expect("a pipe");
    for path in [pipe.to_str().expect("UTF-8"), "/dev/zero"] {
        path.clone_into(&mut case.model);
        case.run(&[]).expect_error(&[path, "not a regular file"]);
    }
}

/// Changes a part of the tokenizer.
type Change = fn(&mut Value);

#[test]
fn hostile_tokenizers_are_refused_by_name() {
    let changes: [Change; 14] = [
        |file| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        |file| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "////"}),
        |file| file["normalizer"] = json!({"type": "Nothing"}),
        |file| {
            // Each doubles the text.
            let step = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
            file["normalizer"] = json!({"type": "Sequence", "normalizers": vec![step; 60]});
        },
        |file| {
            let content = "a".repeat(1 << 20);
            file["normalizer"] =
                json!({"type": "Replace", "pattern": {"String": ""}, "content": content});
        },
        |file| {
            file["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {},
            });
        },
        |file| {
            file["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1, 2], "tokens": []}},
            });
        },
        |file| file["decoder"] = json!({"type": "CTC"}),
        |file| file["decoder"] = json!({"type": "Sequence", "decoders": "none"}),
        |file| {
            file["decoder"] = json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""})
        },
        |file| file["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}),
        |file| {
            file["pre_tokenizer"] = json!({
                "type": "Split", "pattern": {"Regex": "(((a*)*)*"}, "behavior": "Isolated", "invert": false,
            });
        },
        |file| file["model"]["vocab"]["far"] = json!(u32::MAX),
        |file| {
            file["model"]["continuing_subword_prefix"] = json!("a long prefix");
            file["model"]["merges"] = json!([["a", "b"]]);
        },
    ];
    for (number, change) in changes.iter().enumerate() {
        let (case, folder) = case();
        let path = folder.join("tokenizer.json");
        let text = fs::read_to_string(&path).expect("the tokenizer");
        let mut file: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut file);
        fs::write(&path, file.to_string()).expect("written");
        let refused = case.run(&[]);
        assert_eq!(refused.code, Some(1), "{number}: {}", refused.stderr);
        assert!(!refused.stderr.contains("panicked"), "{number}: {}", refused.stderr);
        let error = refused.stderr.lines().last().unwrap_or_default();
        assert!(
            error.starts_with("error: ") && error.contains("tokenizer.json"),
            "{number}: {error}"
        );
    }
}

/// Files that the library takes, and that make it panic on a text.
#[test]
fn tokenizers_that_break_on_a_text_cost_its_line_only() {
    let empty = json!({"type": "Prepend", "prepend": ""});
    let nothing = |before: &str| {
        let pattern = format!("(?={before})");
        json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "z"})
    };
    for (normalizer, text, chat) in
        [(nothing("aaaa"), 400, 200), (nothing("user"), 200, 400), (empty, 400, 400)]
    {
        let (case, folder) = case();
        let path = folder.join("tokenizer.json");
        let file = fs::read_to_string(&path).expect("the tokenizer");
        let mut file: Value = serde_json::from_str(&file).expect("JSON");
        file["normalizer"] = normalizer;
        fs::write(&path, file.to_string()).expect("written");
        let finished = case.run(&[]).expect(3);
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
        let answers = case.answers();
        for (id, code) in [("text", text), ("chat", chat)] {
            let response = &answers[id]["response"];
            assert_eq!(response["status_code"], code, "{id}: {response}");
            let message = response["body"]["error"]["message"].as_str().unwrap_or("tokenizer.json");
            assert!(message.contains("tokenizer.json"), "{message}");
        }
    }
}

#[test]
fn a_template_that_says_too_much_costs_no_memory() {
    let (case, folder) = case();
    let template = "{{ ('a' * 1000).replace('', 'b' * 100000) }}";
    fs::write(folder.join("chat_template.jinja"), template).expect("written");
    case.run(&[]).expect(3);
    let answers = case.answers();
    assert_eq!(answers["text"]["response"]["status_code"], 200);
    let message = &answers["chat"]["response"]["body"]["error"]["message"];
    assert!(
        message.as_str().is_some_and(|message| message.contains("bytes has more")),
        "{message}"
    );
}

#[test]
fn hostile_templates_cost_their_lines_only() {
    let templates = [
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{{ 'a'|indent(10**12) }}",
        "{{ [1]|tojson(indent=10**12) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages[0].content * 10**9 }}",
        "{{ messages|map('string')|join('a' * 10**9) }}",
    ];
    for template in templates {
        let (case, folder) = case();
        fs::write(folder.join("chat_template.jinja"), template).expect("written");
        case.run(&[]).expect(3);
        let answers = case.answers();
        assert_eq!(answers["text"]["response"]["status_code"], 200, "{template}");
        let chat = &answers["chat"]["response"];
        assert_eq!(chat["status_code"], 400, "{template}: {chat}");
        let message = chat["body"]["error"]["message"].as_str().expect("a message");
        assert!(message.contains("chat_template.jinja"), "{template}: {message}");
    }
    let (case, folder) = case();
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000));
    fs::write(folder.join("chat_template.jinja"), deep).expect("written");
    let generated = Finished::of(&mut glinthawk(["generate", "--model", &case.model, "hi"]));
    generated.expect_error(&["chat_template.jinja", "deep"]);
}

#[test]
fn a_prompt_for_which_nothing_can_be_computed_costs_its_line_only() {
    let (case, folder) = case();
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("the model");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    // The embedding comes first, and `z` is the 90th letter from `!` on.
    let row = 8 + header + 89 * 64 * 2;
    bytes[row..row + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    fs::write(&path, bytes).expect("written");
    let lines = [("good", "aaaa bbbb"), ("bad", "aaaa z"), ("last", "aaaa bbbb aaaa bbbb")];
    let lines = lines.map(|(id, prompt)| {
        json!({"custom_id": id, "prompt": prompt, "max_tokens": 3, "temperature": 0.7, "n": 2})
    });
    fs::write(case.input(), lines.map(|line| format!("{line}\n")).concat()).expect("written");
    for options in [&[][..], &["--batch", "1"], &["--tier1", "1", "--tier2", "1"]] {
        let _ = fs::remove_file(case.output());
        let finished = case.run(options).expect(3);
        assert!(finished.stderr.contains("line 2: no token can follow the prompt"), "{finished:?}");
        let answers = case.answers();
        for good in ["good", "last"] {
            assert_eq!(answers[good]["response"]["status_code"], 200, "{options:?}");
        }
        let message = answers["bad"]["error"]["message"].as_str().expect("a message");
        assert!(message.contains("no token can follow the prompt"), "{message}");
    }
    let generated =
        Finished::of(&mut glinthawk(["generate", "--model", &case.model, "--raw", "z"]));
    generated.expect_error(&["no token can follow the prompt"]);
    // Among as many prompts of one token, each of the model's tokens is one.
    let bench =
        ["bench", "--model", &case.model, "--prompts", "258", "--input", "1", "--runs", "1"];
    let bench = Finished::of(&mut glinthawk(bench)).expect(1);
    assert!(bench.stderr.contains("the model picks no token"), "{bench:?}");
}
