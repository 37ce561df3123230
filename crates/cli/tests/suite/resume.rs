//! A job that is stopped, killed or out of disk continues where it was. In the end there is exactly
//! one line for each input line, with the bytes of an undisturbed run.

use crate::common::{Case, Finished, Random, glinthawk, lines_in, mixed_requests, results};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// The plain kernels, on one thread, a few prompts at a time: slow enough to be caught half-way.
const SLOW: [&str; 6] = ["--isa", "portable", "--threads", "1", "--batch", "8"];

/// Pause between two looks at a growing file.
const LOOK: Duration = Duration::from_millis(1);

/// 300 lines; every tenth is bad in one way or another.
fn three_hundred_lines() -> String {
    let good = mixed_requests(270, 3, 16);
    let mut good = good.lines();
    let mut input = String::new();
    for number in 0..300 {
        input += match number % 50 {
            9 => "not JSON",
            19 => r#"{"custom_id":"request-3","prompt":"the same id again"}"#,
            29 => r#"{"prompt":"a typo","max_tokns":3}"#,
            39 => r#"{"custom_id":"no-url","method":"POST","body":{}}"#,
            49 => r#"{"prompt":""}"#,
            _ => good.next().expect("270 good lines"),
        };
        input += "\n";
    }
    input
}

fn start(command: &mut Command) -> Child {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    child.expect("the binary starts")
}

fn signal(child: &Child, signal: Signal) {
    let id = Pid::from_child(child);
    kill_process(id, signal).expect("the process is ours");
}

/// Waits until the output has this many lines; `false` if the run ended before.
fn wait_for_lines(case: &Case, child: &mut Child, lines: usize) -> bool {
    while lines_in(&case.output()) < lines {
        if child.try_wait().expect("it can be asked").is_some() {
            return false;
        }
        sleep(LOOK);
    }
    true
}

#[test]
fn a_killed_job_ends_as_if_it_had_not_been() {
    let case = Case::new(three_hundred_lines());
    case.run(&SLOW).expect(3);
    let expected = case.results();
    assert_eq!(expected.len(), 300);
    let mut killed_halfway = 0;
    for seed in 0..5 {
        let mut random = Random(seed);
        fs::remove_file(case.output()).expect("the output of the last round");
        loop {
            let done = lines_in(&case.output());
            let mut child = start(&mut case.command(&SLOW));
            // Once in a while before it could do anything at all.
            let target = if random.below(4) == 0 { 0 } else { done + random.below(90) as usize };
            if !wait_for_lines(&case, &mut child, target) {
                Finished::wait(child).expect(3);
                break;
            }
            child.kill().expect("it is ours");
            child.wait().expect("it was killed");
            killed_halfway += usize::from((1..300).contains(&lines_in(&case.output())));
        }
        assert!(case.results() == expected, "seed {seed}: other results");
    }
    assert!(killed_halfway >= 10, "killed half-way only {killed_halfway} times");
}

#[test]
fn an_interrupted_job_says_how_to_go_on_and_does() {
    let case = Case::new(three_hundred_lines());
    case.run(&SLOW).expect(3);
    let expected = case.results();
    fs::remove_file(case.output()).expect("there is an output");
    for interrupt in [Signal::INT, Signal::TERM] {
        let mut child = start(&mut case.command(&SLOW));
        let target = lines_in(&case.output()) + 40;
        assert!(wait_for_lines(&case, &mut child, target), "it has 300 lines to do");
        signal(&child, interrupt);
        let stopped = Finished::wait(child).expect(1);
        assert!(stopped.stderr.contains("the same command continues"), "{}", stopped.stderr);
        assert!((target..300).contains(&results_so_far(&case)));
    }
    let resumed = case.run(&SLOW).expect(3);
    assert!(resumed.stderr.contains("by an earlier run"), "{}", resumed.stderr);
    assert!(case.results() == expected);
    // The same command would begin anew.
    let mut child = start(case.command(&SLOW).arg("--overwrite"));
    // The results of before are gone once there are fewer.
    while lines_in(&case.output()) == 300 {
        assert!(child.try_wait().expect("it is ours").is_none(), "it has 300 lines to do");
        sleep(Duration::from_millis(1));
    }
    signal(&child, Signal::INT);
    let stopped = Finished::wait(child).expect(1);
    assert!(stopped.stderr.contains("without --overwrite continues"), "{}", stopped.stderr);
    case.run(&SLOW).expect(3);
    assert!(case.results() == expected);
}

/// Lines of an output that may hold nothing but whole ones.
fn results_so_far(case: &Case) -> usize {
    case.results().len()
}

#[test]
fn an_interrupt_ends_a_job_that_waits_for_its_input() {
    let case = Case::new("");
    let mut command = glinthawk(["run", "-", "--model", &case.model, "--output"]);
    let mut child = start(command.arg(case.output()).stdin(Stdio::piped()));
    while !case.output().exists() {
        sleep(LOOK);
    }
    let input = child.stdin.take();
    signal(&child, Signal::INT);
    Finished::wait(child).expect(1);
    drop(input);
}

#[test]
fn a_torn_line_is_repaired() {
    let case = Case::new(mixed_requests(9, 3, 8));
    case.run(&[]).expect(0);
    let expected = case.results();
    let whole = fs::read(case.output()).expect("there is an output");
    let last_line = whole[..whole.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
    // Without its break; in the middle of the last line; after its first byte; of the first line.
    for length in [whole.len() - 1, (last_line + whole.len()) / 2, last_line + 1, 30] {
        fs::write(case.output(), &whole[..length]).expect("the output is torn");
        case.run(&[]).expect(0);
        assert!(case.results() == expected, "torn at byte {length} of {}", whole.len());
    }
}

#[test]
fn a_finished_job_has_nothing_left_to_do() {
    let case = Case::new(three_hundred_lines());
    case.run(&[]).expect(3);
    let whole = fs::read(case.output()).expect("there is an output");
    let (again, stats) = case.run_with_stats(&[]);
    again.expect(3);
    assert_eq!(stats["prompts"], 0);
    assert!(fs::read(case.output()).expect("still there") == whole);
}

#[test]
fn overwrite_starts_anew() {
    let case = Case::new(mixed_requests(7, 3, 8));
    let (first, stats) = case.run_with_stats(&[]);
    first.expect(0);
    let expected = case.results();
    let (second, again) = case.run_with_stats(&["--overwrite"]);
    assert!(!second.expect(0).stderr.contains("earlier run"));
    assert_eq!(again["prompts"], stats["prompts"]);
    assert!(case.results() == expected);
    // Also a file that is not ours, which is otherwise left alone.
    fs::write(case.output(), "my diary\n").expect("written");
    case.run(&[]).expect_error(&["out.jsonl", "line 1", "--overwrite"]);
    assert_eq!(fs::read_to_string(case.output()).expect("left alone"), "my diary\n");
    case.run(&["--overwrite"]).expect(0);
    assert!(case.results() == expected);
}

#[test]
fn a_mistake_in_the_options_does_not_cost_the_results() {
    let case = Case::new(mixed_requests(3, 3, 8));
    case.run(&[]).expect(0);
    let whole = fs::read(case.output()).expect("there is an output");
    for options in
        [["--isa", "sse9"], ["--max-context", "999999"], ["--stats", "no/such/folder/stats.json"]]
    {
        let failed = case.run(&[&options[..], &["--overwrite"]].concat());
        assert!(matches!(failed.code, Some(1 | 2)), "{options:?}: {}", failed.stderr);
        assert!(fs::read(case.output()).expect("still there") == whole, "{options:?}");
    }
}

#[test]
fn results_of_another_context_type_are_not_reused() {
    let case = Case::new(mixed_requests(12, 3, 8));
    let run = |options: &[&str], prompts: u64| {
        let (finished, stats) = case.run_with_stats(options);
        finished.expect(0);
        assert_eq!(stats["prompts"].as_u64() > Some(0), prompts > 0, "{options:?}");
        assert_eq!(case.results().len(), if options.contains(&"--keep") { 24 } else { 12 });
    };
    run(&["--context-type", "bf16"], 12);
    run(&["--context-type", "bf16"], 0);
    case.run(&["--context-type", "int8"]).expect_error(&[
        "all 12 results",
        "--context-type",
        "--keep",
    ]);
    run(&["--context-type", "int8", "--keep"], 12);
    run(&["--context-type", "int8", "--keep"], 0);
    run(&["--context-type", "int8", "--overwrite"], 12);
}

#[test]
fn two_runs_do_not_write_one_output() {
    let case = Case::new(mixed_requests(3, 3, 8));
    let mut first = glinthawk(["run", "-", "--model", &case.model, "--output"]);
    let mut first = start(first.arg(case.output()).stdin(Stdio::piped()));
    while !case.output().exists() {
        sleep(LOOK);
    }
    // The first run locks the file a moment after it has made it; from then on it is its own.
    let refused = loop {
        let second = case.run(&[]);
        if second.code == Some(1) {
            break second;
        }
        assert_eq!(second.code, Some(0));
        sleep(LOOK);
    };
    refused.expect_error(&["out.jsonl", "another run"]);
    drop(first.stdin.take());
    Finished::wait(first);
}

#[test]
fn a_full_disk_is_said_and_survived() {
    let case = Case::new(three_hundred_lines());
    case.run(&[]).expect(3);
    let expected = case.results();
    fs::remove_file(case.output()).expect("there is an output");
    // A limit on the size of files, in blocks of 512 or 1024 bytes, stands for a full disk.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 20; exec \"$@\"", "sh"]);
    limited.arg(env!("CARGO_BIN_EXE_glinthawk")).args(case.command(&[]).get_args());
    Finished::of(&mut limited).expect_error(&["cannot write output", "out.jsonl", "too large"]);
    let written = fs::read_to_string(case.output()).expect("there is an output");
    let whole = &written[..written.rfind('\n').expect("whole lines") + 1];
    assert!(results(whole).iter().all(|line| expected.contains(line)));
    let resumed = case.run(&[]).expect(3);
    assert!(resumed.stderr.contains("by an earlier run"), "{}", resumed.stderr);
    assert!(case.results() == expected);
}
