//! After any interruption: exactly one result line for each input line, with the same bytes as an
//! uninterrupted run.

use crate::common::{Case, seeded, sorted};
use glinthawk_jobs::{Earlier, Input, JobError, JobOptions, Next, Output, PreparedJob};
use glinthawk_protocol::virtual_time;
use std::fs;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

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

/// Each seed stops a job again and again. The disk has kept what it liked of the last writes: it was full, or zeros are
/// where bytes should be.
#[test]
fn torn_writes_at_any_byte_are_survived() {
    let whole = mixed_case(40);
    whole.run().unwrap();
    for seed in 0..16 {
        let torn = mixed_case(40);
        let mut random = seed;
        let mut below = |limit: usize| {
            random = virtual_time::model::mix(random, 77);
            random as usize % limit
        };
        while torn.run_some(1 + below(12)).unwrap().is_none() {
            let mut bytes = fs::read(torn.output()).unwrap();
            bytes.truncate(bytes.len() - below(bytes.len().min(400)));
            let zeros = if below(3) == 0 { below(200) } else { 0 };
            bytes.resize(bytes.len() + zeros, 0);
            fs::write(torn.output(), bytes).unwrap();
        }
        assert_eq!(torn.sorted(), whole.sorted(), "seed {seed}");
    }
}

#[test]
fn a_finished_job_is_not_run_again() {
    let case = mixed_case(50);
    case.run().unwrap();
    let before = case.output_text();
    assert!(case.prompts().is_empty());
    let summary = case.run().unwrap();
    assert_eq!((summary.resumed, summary.unmatched, summary.prompt_tokens), (45, 0, 0));
    assert_eq!(case.output_text(), before, "not even `created` changes");
}

#[test]
fn overwrite_starts_anew() {
    let mut case = mixed_case(10);
    case.run().unwrap();
    let before = case.sorted();
    case.earlier = Earlier::Overwrite;
    assert_eq!(case.run().unwrap().resumed, 0);
    assert_eq!(case.sorted(), before);
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
        let output = Output::File(folder.join(output));
        let options = JobOptions { output, earlier: Earlier::Overwrite };
        let input = Input::File(folder.join(input)).open();
        let model = Arc::new(case.model.clone());
        let job = input.and_then(|input| PreparedJob::new(input, &options, Some(model)));
        job.err().unwrap().to_string()
    };
    assert!(open("missing.jsonl", "out.jsonl").starts_with("cannot open input "));
    assert!(open(".", "out.jsonl").contains("is a folder"));
    assert!(!folder.join("out.jsonl").exists());
    assert!(open("in.jsonl", "none/out.jsonl").ends_with("none does not exist"));
    assert!(open("in.jsonl", "in.jsonl").ends_with("are the same file"));
    assert!(open("in.jsonl", ".").starts_with("cannot open output "));
    assert_eq!(fs::read_to_string(case.input()).unwrap(), mixed_input(10));
}

#[test]
fn a_device_takes_results_and_resumes_nothing() {
    let case = mixed_case(10);
    let job = case.open_to("/dev/null".into(), &Input::File(case.input())).unwrap();
    assert!(!job.close().unwrap().complete);
}

#[test]
fn a_full_disk_ends_the_job() {
    let case = Case::new("{\"prompt\":\"\"}\n");
    let mut job = case.open_to("/dev/full".into(), &Input::File(case.input())).unwrap();
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
    // The third line is mended: its error makes way, and the file is written anew.
    let mended = mixed_input(10).replacen("\"prompt\":\"\"", "\"prompt\":\"x\"", 1);
    fs::write(case.input(), mended).unwrap();
    assert_eq!(case.run().unwrap().superseded, 1);
    assert!(case.output().is_symlink());
    assert_eq!(sorted(&target).len(), 9);
    assert_eq!(fs::read_dir(case.folder.path()).unwrap().count(), 3, "nothing is left behind");
}
