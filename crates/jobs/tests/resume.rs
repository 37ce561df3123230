//! Whatever happened to the run before: exactly one result line for each input line, the same
//! bytes as an uninterrupted run's.

mod common;

use std::fs;
use std::io::Write;
use std::time::Duration;

use common::{Case, seeded, sorted};
use glinthawk_jobs::{Input, Job, JobError, JobOptions, Next, Output};

/// Good lines, bad lines, duplicates and blanks.
fn mixed_input(lines: usize) -> String {
    let mut input = String::new();
    for number in 1..=lines {
        input += &match number % 10 {
            3 => "{\"prompt\":\"\"}\n".to_owned(),
            5 => format!("{{\"custom_id\":\"c{}\",\"prompt\":\"again\"}}\n", number - 4),
            7 => "not json\n".to_owned(),
            8 => "\n".to_owned(),
            9 => format!("{{\"custom_id\":\"c{number}\",\"prompt\":\"p\",\"n\":3}}\n"),
            _ => format!("{{\"custom_id\":\"c{number}\",\"prompt\":\"p{number}\"}}\n"),
        };
    }
    input
}

fn mixed_case(lines: usize) -> Case {
    let mut case = Case::new(mixed_input(lines));
    case.script = seeded;
    case
}

#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let whole = mixed_case(100);
    let summary = whole.run().unwrap();
    assert!(summary.complete);
    assert_eq!((summary.succeeded, summary.failed, summary.resumed), (60, 30, 0));
    for step in [8, 23, 41] {
        let killed = mixed_case(100);
        let mut runs = 0;
        let summary = loop {
            runs += 1;
            if let Some(summary) = killed.run_some(step).unwrap() {
                break summary;
            }
            // A kill can fall into the middle of a write.
            let length = fs::metadata(killed.output()).unwrap().len();
            let file = fs::OpenOptions::new().append(true).open(killed.output()).unwrap();
            file.set_len(length.saturating_sub(runs % 2 * 37)).unwrap();
        };
        assert!(runs > 1 && summary.complete);
        assert_eq!((summary.succeeded, summary.failed), (60, 30));
        assert!(summary.resumed > 0);
        assert_eq!(killed.sorted(), whole.sorted(), "killed after every {step} prompts");
    }
}

#[test]
fn a_finished_job_is_not_run_again() {
    let case = mixed_case(50);
    case.run().unwrap();
    let before = case.output_text();
    assert!(case.prompts().is_empty());
    let summary = case.run().unwrap();
    assert_eq!((summary.resumed, summary.stale, summary.prompt_tokens), (45, 0, 0));
    assert_eq!(case.output_text(), before, "not even `created` changes");
}

#[test]
fn overwrite_starts_anew() {
    let mut case = mixed_case(10);
    case.run().unwrap();
    let before = case.sorted();
    case.overwrite = true;
    assert_eq!(case.run().unwrap().resumed, 0);
    assert_eq!(case.sorted(), before);
}

/// After a first run on `before`, a second on `after` runs only what is new, and the output is as
/// if it had been the first.
fn check_changed(before: &str, after: &str, resumed: u64, stale: u64) {
    let case = Case::new(before);
    case.run().unwrap();
    fs::write(case.input(), after).unwrap();
    let summary = case.run().unwrap();
    assert_eq!((summary.resumed, summary.stale), (resumed, stale), "{before} then {after}");
    let fresh = Case::new(after);
    fresh.run().unwrap();
    assert_eq!(case.sorted(), fresh.sorted(), "{before} then {after}");
}

#[test]
fn a_changed_request_is_run_again() {
    let line =
        |id: &str, prompt: &str| format!("{{\"custom_id\":\"{id}\",\"prompt\":\"{prompt}\"}}\n");
    let (a, b, c) = (line("a", "x"), line("b", "y"), line("c", "z"));
    let changed = line("b", "changed");
    check_changed(&[&*a, &b, &c].concat(), &[&*a, &changed, &c].concat(), 2, 1);
    check_changed(&[&*a, &b, &c].concat(), &[&*c, &b, &a].concat(), 3, 0);
    check_changed(&[&*a, &b, &c].concat(), &[&*a, &c].concat(), 2, 1);
    check_changed(&a, &[&*a, &b].concat(), 1, 0);
    check_changed(&a, "{ \"prompt\":\"x\",  \"custom_id\":\"a\"}", 1, 0);
    // A duplicate's error line is tied to its place.
    check_changed(&[&*a, &a, &a].concat(), &[&*a, &a].concat(), 2, 1);
    check_changed(&[&*a, &a].concat(), &[&*a, &b, &a].concat(), 1, 1);
    // A line that was bad and is mended, or the other way round.
    check_changed("{\"prompt\":\"\"}", "{\"prompt\":\"x\"}", 0, 1);
    check_changed("{\"prompt\":\"x\"}", "{\"prompt\":", 0, 1);
    check_changed(&a, "", 0, 1);
}

#[test]
fn another_model_or_limit_runs_everything_again() {
    let mut case = mixed_case(10);
    case.run().unwrap();
    case.model.context_max += 1;
    assert_eq!(case.run().unwrap().resumed, 1, "only the duplicate's error stays the same");
    case.model.identity = "other weights".to_owned();
    assert_eq!(case.run().unwrap().resumed, 1);
    case.model.name = "other".to_owned();
    let summary = case.run().unwrap();
    assert_eq!((summary.resumed, summary.stale), (1, 8));
    assert_eq!(case.output_text().lines().count(), 9);
}

/// A run's output is damaged; the next run repairs it.
fn check_repaired(damage: impl Fn(Vec<u8>) -> Vec<u8>) {
    let case = mixed_case(30);
    case.run().unwrap();
    let whole = case.sorted();
    let damaged = damage(fs::read(case.output()).unwrap());
    fs::write(case.output(), &damaged).unwrap();
    case.run().unwrap();
    assert_eq!(case.sorted(), whole, "{}", String::from_utf8_lossy(&damaged));
}

#[test]
fn damage_is_repaired() {
    let cut = |bytes: Vec<u8>, less: usize| bytes[..bytes.len() - less].to_vec();
    check_repaired(|bytes| bytes);
    check_repaired(|_| Vec::new());
    check_repaired(|bytes| cut(bytes, 1));
    check_repaired(|bytes| cut(bytes, 100));
    check_repaired(|bytes| bytes[..1].to_vec());
    check_repaired(|bytes| bytes[..40].to_vec());
    check_repaired(|bytes| [&*bytes, b"\n"].concat());
    check_repaired(|bytes| [&*bytes, b"{\"id\":\"batch_req_00\n{\"id"].concat());
    check_repaired(|bytes| [&*bytes, &[0; 500]].concat());
    check_repaired(|bytes| {
        // A hole in the middle, as after a power cut.
        let middle = bytes.len() / 2;
        [&bytes[..middle], &[0; 300], &bytes[middle + 300..]].concat()
    });
    check_repaired(|bytes| [&*bytes, &bytes].concat());
}

#[test]
fn a_file_that_is_not_ours_is_left_alone() {
    let foreign = [
        "my notes\n",
        "no line break",
        "{\"id\":\"batch_req_1\",\"custom_id\":\"a\",\"response\":null,\"error\":null}\n",
        "{\"prompt\":\"hi\"}\n",
        "\n",
        "{",
    ];
    for text in foreign {
        let case = mixed_case(10);
        fs::write(case.output(), text).unwrap();
        let ours = text == "{";
        match case.run() {
            Err(JobError::NotOurs { line: 1, .. }) => assert!(!ours),
            Ok(_) => assert!(ours, "{text} was taken for a torn line of ours"),
            Err(error) => panic!("{text}: {error}"),
        }
        if !ours {
            assert_eq!(fs::read_to_string(case.output()).unwrap(), text);
        }
    }
    let case = mixed_case(10);
    case.run().unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(case.output()).unwrap();
    file.write_all(b"{\"custom_id\":\"a note\"}\n").unwrap();
    let error = case.run().unwrap_err();
    assert!(matches!(error, JobError::NotOurs { line: 10, .. }), "{error}");
    assert!(error.to_string().contains("--overwrite"));
}

#[test]
fn only_one_run_writes_an_output() {
    let case = mixed_case(10);
    let running = case.open().unwrap();
    assert!(matches!(case.open().err().unwrap(), JobError::Busy { .. }));
    drop(running);
    case.run().unwrap();
}

#[test]
fn a_bad_place_for_input_or_output_is_told() {
    let case = mixed_case(10);
    let folder = case.folder.path();
    let open = |input: &str, output: &str| {
        let options = JobOptions { output: Output::File(folder.join(output)), overwrite: true };
        let input = Input::File(folder.join(input)).open();
        let job = input.and_then(|input| Job::open(input, &options, case.model.clone().into()));
        job.err().unwrap().to_string()
    };
    assert!(open("missing.jsonl", "out.jsonl").starts_with("cannot open input "));
    assert!(open(".", "out.jsonl").starts_with("cannot open input "));
    assert!(!folder.join("out.jsonl").exists());
    assert!(open("in.jsonl", "none/out.jsonl").ends_with("none does not exist"));
    assert!(open("in.jsonl", "in.jsonl").ends_with("is the input file itself"));
    assert!(open("in.jsonl", ".").starts_with("cannot open output "));
    assert_eq!(fs::read_to_string(case.input()).unwrap(), mixed_input(10));
}

#[test]
fn a_device_takes_results_and_resumes_nothing() {
    let case = mixed_case(10);
    let options = JobOptions { output: Output::File("/dev/null".into()), overwrite: false };
    let job = Job::open(case.open_input(), &options, case.model.clone().into()).unwrap();
    assert!(!job.close().unwrap().complete);
}

#[test]
fn a_full_disk_ends_the_job() {
    let case = Case::new("{\"prompt\":\"\"}\n");
    let options = JobOptions { output: Output::File("/dev/full".into()), overwrite: false };
    let mut job = Job::open(case.open_input(), &options, case.model.clone().into()).unwrap();
    let error = loop {
        match job.next(Duration::from_millis(20)) {
            Ok(Next::Later) => {}
            Ok(next) => panic!("{next:?} after an error line that was not written"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.to_string(), "cannot write output /dev/full");
}

#[test]
fn a_link_stays_a_link_and_its_target_is_replaced() {
    let case = mixed_case(10);
    let target = case.folder.path().join("target.jsonl");
    std::os::unix::fs::symlink(&target, case.output()).unwrap();
    case.run().unwrap();
    fs::write(case.input(), mixed_input(5)).unwrap();
    assert!(case.run().unwrap().stale > 0);
    assert!(case.output().is_symlink());
    assert_eq!(sorted(&target).len(), 5);
    assert_eq!(fs::read_dir(case.folder.path()).unwrap().count(), 3, "nothing is left behind");
}
