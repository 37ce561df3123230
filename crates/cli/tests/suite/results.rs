//! What happens to files: no answer is lost to another input, a wrong option or a file that is moved
//! away, and an input that is not a file of requests is named as what it is.

use crate::common::{Case, Finished, TINY, glinthawk, lines_in, mixed_requests};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Pause between two looks at a growing file.
const LOOK: Duration = Duration::from_millis(1);

fn line(id: &str, prompt: &str) -> String {
    format!("{{\"custom_id\":\"{id}\",\"prompt\":\"{prompt}\",\"max_tokens\":2}}\n")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("it is there")
}

#[test]
fn another_input_does_not_cost_the_answers() {
    let case = Case::new(line("a1", "x") + &line("a2", "y"));
    case.run(&[]).expect(0);
    let before = read(&case.output());
    fs::write(case.input(), line("b1", "z")).expect("written");
    case.run(&[]).expect_error(&[
        "all 2 results in ",
        "out.jsonl match no line of ",
        "(a1, a2)",
        "Their custom_ids are not in this input",
        "--keep",
        "--overwrite",
        "-o",
        &format!("--output {} {} --keep", case.output().display(), case.input().display()),
    ]);
    assert_eq!(read(&case.output()), before);
    let kept = case.run(&["--keep"]).expect(0);
    assert!(
        kept.stderr.contains("2 earlier results match no line of this input and were kept"),
        "{}",
        kept.stderr
    );
    assert!(read(&case.output()).starts_with(&before));
    assert_eq!(case.answers().len(), 3);
    case.run(&["--overwrite"]).expect(0);
    assert_eq!(case.answers().len(), 1);
    case.run(&["--keep", "--overwrite"]).expect(2);
}

#[test]
fn another_model_does_not_cost_the_answers() {
    let case = Case::new(line("a", "x"));
    case.run(&[]).expect(0);
    let before = read(&case.output());
    let other = Case { model: "dummy:smollm2-135m".to_owned(), ..case };
    let refused = other.run(&[]).expect_error(&[
        "answered by dummy:tiny; this run uses dummy:smollm2-135m",
        "(--keep: it will have two of one custom_id)",
    ]);
    assert!(!refused.stderr.contains("For example"), "{}", refused.stderr);
    assert_eq!(read(&other.output()), before);
}

#[test]
fn a_stream_does_not_cost_the_answers() {
    let case = Case::new(line("a", "x"));
    case.run(&[]).expect(0);
    let before = read(&case.output());
    let mut shell = Command::new("bash");
    let script = format!("\"$0\" run <(printf '%s' '{}') -m {TINY} -o \"$1\"", line("b", "y"));
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_glinthawk")]).arg(case.output());
    let finished = Finished::of(&mut shell).expect(0);
    assert!(finished.stderr.contains("1 earlier result matches no line"), "{}", finished.stderr);
    assert!(read(&case.output()).starts_with(&before));
    assert_eq!(case.answers().len(), 2);
}

#[test]
fn an_unusable_stream_does_not_empty_the_output() {
    let case = Case::new(line("a", "x"));
    case.run(&[]).expect(0);
    let before = read(&case.output());
    let streams =
        [("printf 'prompt,n\nx,1\n'", "CSV"), ("false", "standard input has no requests")];
    for (producer, complaint) in streams {
        let mut shell = Command::new("bash");
        let script = format!("{producer} | \"$0\" run - -m {TINY} -o \"$1\" --overwrite");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_glinthawk")]).arg(case.output());
        let finished = Finished::of(&mut shell).expect(1);
        assert!(finished.stderr.contains(complaint), "{}", finished.stderr);
        assert_eq!(read(&case.output()), before, "{producer}");
    }
}

#[test]
fn every_input_has_an_output_of_its_own() {
    let case = Case::new("");
    let cases = [
        ("a.jsonl", "a.out.jsonl"),
        ("a.txt", "a.txt.out.jsonl"),
        ("a.json", "a.json.out.jsonl"),
        ("b", "b.out.jsonl"),
    ];
    for (input, output) in cases {
        fs::write(case.path(input), line(input, "x")).expect("written");
        Finished::of(glinthawk(["run", "-m", TINY]).arg(case.path(input))).expect(0);
        assert!(read(&case.path(output)).contains(input), "{output}");
    }
}

#[test]
fn nothing_to_do_and_nothing_asked_are_said() {
    let case = Case::new(line("a", "x") + "not JSON\n");
    case.run(&[]).expect(3);
    let again = case.run(&[]).expect(3).stderr;
    assert!(
        again.contains("nothing to do") && again.contains("1 line answered, 1 failed"),
        "{again}"
    );
    assert!(again.contains("line 2: not valid JSON"), "{again}");
    let empty = Case::new("\n\n");
    let said = empty.run(&[]).expect(0).stderr;
    assert!(said.contains("in.jsonl has no requests"), "{said}");
    // Nothing is loaded for that: no engine has contexts in a byte.
    case.run(&["--context-memory", "1"]).expect(3);
    empty.run(&["--context-memory", "1"]).expect(0);
    fs::write(case.input(), line("a", "x") + &line("b", "y")).expect("written");
    case.run(&["--context-memory", "1"]).expect(1);
}

#[test]
fn reasons_of_failures_are_told() {
    let mut input = line("good", "x");
    for _ in 0..30 {
        input += "{\"prompt\":\"a\",\"temperatur\":0}\n";
    }
    for _ in 0..20 {
        input += "oops\n";
    }
    input += &line("good", "again").repeat(5);
    input += "{\"prompt\":\"\"}\n{\"prompt\":[]}\n{\"prompt\":\"a\",\"n\":0}\n";
    let case = Case::new(input);
    let said = case.run(&[]).expect(3).stderr;
    for part in [
        "1 line answered, 58 failed\n",
        "  line 2 and 29 more: unknown field `temperatur`\n",
        "  line 32 and 19 more: not valid JSON: ",
        "  line 52 and 4 more: an earlier line has the same custom_id `good`\n",
        "  3 lines failed for 3 other reasons\n",
    ] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    // The same for a run that finds them in its output.
    let again = case.run(&[]).expect(3).stderr;
    assert!(again.contains("  line 2 and 29 more: unknown field `temperatur`\n"), "{again}");
}

#[test]
fn inputs_that_are_no_lines_of_json_are_named() {
    let case = Case::new("");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(case.path(name), bytes).expect("written");
        case.path(name).to_str().expect("a path of text").to_owned()
    };
    let cases = [
        (write("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0"), ["gzip", "zcat "]),
        (write("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\0"), ["zstd", "zstdcat "]),
        (write("a.zip", b"PK\x03\x04\x14\0"), ["zip", "unzip -p "]),
        (write("a.parquet", b"PAR1\x15\x04"), ["Parquet", "{\"prompt\": \"…\"}"]),
        (write("a.csv", b"id,prompt\n1,hello\n"), ["CSV", "csv.DictReader"]),
        (write("a.json", b"[{\"prompt\":\"a\"}]"), ["JSON array", "jq -c"]),
        ("https://example.com/a.jsonl".to_owned(), ["address", "curl "]),
        ("s3://bucket/a.jsonl".to_owned(), ["address", "aws s3 cp "]),
        (case.path("").to_str().expect("text").to_owned(), ["folder", "cat "]),
    ];
    for (input, parts) in cases {
        Finished::of(&mut glinthawk(["run", &input, "-m", TINY])).expect_error(&parts);
    }
    // The remedy keeps what was typed beside the input.
    let packed = case.path("a.jsonl.gz");
    let (packed, output) = (packed.to_str().expect("text"), case.output());
    let output = output.to_str().expect("text");
    Finished::of(&mut glinthawk(["run", packed, "-m", TINY, "-o", output]))
        .expect_error(&[&format!("zcat {packed} | "), &format!(" run - -m {TINY} -o {output}")]);
    let left = fs::read_dir(case.folder.path()).expect("a folder").count();
    assert_eq!(left, 7, "no output was made");
    // For a stream, the same is known once its first bytes arrive.
    let stream = fs::File::open(case.path("a.jsonl.gz")).expect("it is there");
    let mut cat = Command::new("cat").stdin(stream).stdout(Stdio::piped()).spawn().expect("cat");
    let mut command = glinthawk(["run", "-", "-m", TINY]);
    command.stdin(cat.stdout.take().expect("piped"));
    let refused = Finished::of(&mut command).expect_error(&["standard input", "gzip", "zcat"]);
    assert!(refused.stdout.is_empty());
    cat.wait().expect("cat ends");
}

#[test]
fn files_that_collide_are_refused_before_anything_is_opened() {
    let case = Case::new(line("a", "x"));
    case.run(&[]).expect(0);
    let (input, output) = (read(&case.input()), read(&case.output()));
    fs::hard_link(case.input(), case.path("hard.jsonl")).expect("linked");
    symlink(case.output(), case.path("soft.json")).expect("linked");
    fs::write(case.path("plan.toml"), "a plan").expect("written");
    let at = |name: &str| case.path(name).to_str().expect("a path of text").to_owned();
    let (here, there, hard, soft) =
        (at("in.jsonl"), at("out.jsonl"), at("hard.jsonl"), at("soft.json"));
    let (plan, new) = (at("plan.toml"), at("new.json"));
    let cases: &[(&[&str], [&str; 2])] = &[
        (&["-o", &here], ["the input ", "the output "]),
        (&["-o", &hard, "--overwrite"], ["the input ", "the output "]),
        (&["-o", &there, "--stats", &here], ["the input ", "--stats "]),
        (&["-o", &there, "--stats", &there], ["the output ", "--stats "]),
        (&["-o", &there, "--stats", &soft], ["the output ", "--stats "]),
        (&["-o", &there, "--trace", &there], ["the output ", "--trace "]),
        (&["-o", &there, "--stats", &new, "--trace", &new], ["--stats ", "--trace "]),
        (&["-o", &plan, "--plan", &plan, "--overwrite"], ["the output ", "--plan "]),
    ];
    for (options, parts) in cases {
        let mut command = glinthawk(["run", &here]);
        if !options.contains(&"--plan") {
            command.args(["-m", TINY]);
        }
        let refused = Finished::of(command.args(*options));
        refused.expect_complaint(2, &[parts[0], parts[1], "are the same file"]);
        assert_eq!((read(&case.input()), read(&case.output())), (input.clone(), output.clone()));
        assert_eq!(read(&case.path("plan.toml")), "a plan");
        assert!(!case.path("new.json").exists(), "{options:?}");
    }
    // Standard input and output may be files too.
    let mut shell = Command::new("bash");
    shell.args(["-c", "\"$0\" run \"$1\" -m dummy:tiny -o - >> \"$1\""]);
    shell.arg(env!("CARGO_BIN_EXE_glinthawk")).arg(case.input());
    Finished::of(&mut shell).expect_complaint(2, &["the input ", "the output "]);
    assert_eq!(read(&case.input()), input);
    // A device may be several things at once.
    case.run(&["--stats", "/dev/null", "--trace", "/dev/null"]).expect(0);
}

#[test]
fn a_models_own_files_are_not_written() {
    let Some(model) = glinthawk_model::testing::default_model() else { return };
    let case = Case::new(line("a", "x"));
    let link = case.path("stats.json");
    symlink(&model, &link).expect("linked");
    let mut command = glinthawk(["run", "-o"]);
    command.arg(case.output()).arg(case.input()).arg("--stats").arg(link);
    Finished::of(&mut command).expect_complaint(2, &["--stats ", "the model's "]);
}

#[test]
fn statistics_of_an_earlier_run_stay_until_there_are_new_ones() {
    let case = Case::new(line("a", "x"));
    case.run_with_stats(&[]).0.expect(0);
    let before = read(&case.path("stats.json"));
    fs::write(case.input(), line("b", "x")).expect("written");
    let stats = case.path("stats.json");
    Finished::of(case.command(&["--stats"]).arg(stats)).expect_error(&["--keep"]);
    assert_eq!(read(&case.path("stats.json")), before);
}

/// A run that has answered some lines of a stream and waits for more.
fn waiting(case: &Case) -> Child {
    let mut command = glinthawk(["run", "-", "-m", &case.model, "-o"]);
    command.arg(case.output()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let input = child.stdin.as_mut().expect("piped");
    let requests = mixed_requests(5, 3, 8);
    std::io::Write::write_all(input, requests.as_bytes()).expect("it reads");
    while lines_in(&case.output()) < 5 {
        sleep(LOOK);
    }
    child
}

#[test]
fn what_another_program_writes_to_the_output_is_told_and_left_alone() {
    let case = Case::new("");
    let mut child = waiting(&case);
    let mut output = fs::OpenOptions::new().append(true).open(case.output()).expect("it is there");
    std::io::Write::write_all(&mut output, b"a note\n").expect("written");
    drop(child.stdin.take());
    let said = Finished::wait(child).expect(1).stderr;
    assert!(said.contains("another program wrote 7 bytes to "), "{said}");
    assert!(said.contains("out.jsonl during this run"), "{said}");
    assert!(read(&case.output()).contains("\na note\n"));
    assert_eq!(lines_in(&case.output()), 6);
}

#[test]
fn an_output_that_disappears_ends_the_job() {
    let case = Case::new("");
    let (output, moved) = (case.output(), case.path("moved.jsonl"));
    // The run ends although its input does not: it watches its output.
    let child = waiting(&case);
    fs::rename(&output, &moved).expect("moved");
    let said = Finished::wait(child).expect_error(&["was moved to", "moved.jsonl"]).stderr;
    assert!(!said.contains("results in"), "{said}");
    assert_eq!(lines_in(&moved), 5);

    let child = waiting(&case);
    fs::remove_file(&output).expect("deleted");
    let said = Finished::wait(child).expect_error(&["was deleted", "out.jsonl.saved-"]).stderr;
    let saved = fs::read_dir(case.folder.path()).expect("a folder").flatten();
    let saved =
        saved.map(|entry| entry.path()).find(|path| path.display().to_string().contains("saved-"));
    assert_eq!(lines_in(&saved.unwrap_or_else(|| panic!("{said}"))), 5);

    let child = waiting(&case);
    fs::write(&output, "").expect("emptied");
    Finished::wait(child).expect_error(&["was cut short", "the same command"]);
}
