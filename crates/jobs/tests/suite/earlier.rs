//! Nothing that was answered is removed unless the user says so: another input, another model and a
//! changed request stop a job before it changes anything.

use crate::common::Case;
use glinthawk_jobs::{
    Earlier, Input, JobError, JobOptions, JobStanding, Output, PreparedJob, ServedModel,
};
use std::fs;
use std::sync::Arc;

fn line(id: &str, prompt: &str) -> String {
    format!("{{\"custom_id\":\"{id}\",\"prompt\":\"{prompt}\"}}\n")
}

fn prepare(case: &Case, earlier: Earlier, model: &ServedModel) -> Result<PreparedJob, JobError> {
    let options = JobOptions { output: Output::File(case.output()), earlier };
    PreparedJob::new(case.open_input(), &options, Some(Arc::new(model.clone())))
}

/// After a first run on `before`, a second on `after` runs only what is new, and the output is as
/// if it had been the first. Of the results from before only errors may go: `superseded`.
fn check_changed(before: &str, after: &str, resumed: u64, superseded: u64) {
    let case = Case::new(before);
    case.run().unwrap();
    fs::write(case.input(), after).unwrap();
    let summary = case.run().unwrap();
    let counts = (summary.resumed, summary.superseded, summary.unmatched);
    assert_eq!(counts, (resumed, superseded, 0), "{before} then {after}");
    let fresh = Case::new(after);
    fresh.run().unwrap();
    assert_eq!(case.sorted(), fresh.sorted(), "{before} then {after}");
}

/// After a first run on `before`, a second on `after` stops before it changes anything; with `Keep`
/// it runs, and every result from before is still there.
fn check_refused(before: &str, after: &str, unmatched: u64) {
    let mut case = Case::new(before);
    case.run().unwrap();
    let written = case.output_text();
    fs::write(case.input(), after).unwrap();
    let error = case.run().unwrap_err();
    assert!(matches!(error, JobError::Unmatched(_)), "{error}");
    let begin = match (unmatched, written.lines().count() as u64) {
        (1, 1) => "the only result in ".to_owned(),
        (count, all) if count == all => format!("all {count} results in "),
        (count, all) => format!("{count} of the {all} results in "),
    };
    assert!(error.to_string().starts_with(&begin), "{error}");
    assert_eq!(case.output_text(), written, "{before} then {after}");
    case.earlier = Earlier::Keep;
    let summary = case.run().unwrap();
    assert_eq!(summary.unmatched, unmatched, "{before} then {after}");
    assert!(case.output_text().starts_with(&written), "{before} then {after}");
    let fresh = Case::new(after);
    fresh.run().unwrap();
    for line in fresh.sorted() {
        assert!(case.sorted().contains(&line), "{before} then {after}: {line}");
    }
}

#[test]
fn lines_that_come_or_change_places_are_no_trouble() {
    let (a, b, c) = (line("a", "x"), line("b", "y"), line("c", "z"));
    check_changed(&[&*a, &b, &c].concat(), &[&*c, &b, &a].concat(), 3, 0);
    check_changed(&a, &[&*a, &b].concat(), 1, 0);
    check_changed(&a, "{ \"prompt\":\"x\",  \"custom_id\":\"a\"}", 1, 0);
    // A duplicate's error line is tied to its place.
    check_changed(&[&*a, &a, &a].concat(), &[&*a, &a].concat(), 2, 1);
    check_changed(&[&*a, &a].concat(), &[&*a, &b, &a].concat(), 1, 1);
    // A line that was bad and is mended, with or without a custom id of its own.
    check_changed("{\"prompt\":\"\"}", "{\"prompt\":\"x\"}", 0, 1);
    check_changed(&format!("{a}{{\"custom_id\":"), &[&*a, &b].concat(), 1, 1);
}

#[test]
fn answers_that_no_line_asks_for_stop_the_job() {
    let (a, b, c) = (line("a", "x"), line("b", "y"), line("c", "z"));
    let all = [&*a, &b, &c].concat();
    check_refused(&all, &[&*a, &line("b", "changed"), &c].concat(), 1);
    check_refused(&all, &[&*a, &c].concat(), 1);
    check_refused(&all, &line("d", "another input"), 3);
    check_refused("{\"prompt\":\"x\"}", "{\"prompt\":", 1);
    check_refused(&a, "", 1);
    // An error line of another input counts like any other result.
    check_refused("{\"custom_id\":\"q\",\"prompt\":\"\"}", &a, 1);
}

#[test]
fn unmatched_answers_are_told_apart() {
    let told = |before: &str, model: &str, after: &str| {
        let mut case = Case::new(before);
        case.model.name = model.to_owned();
        case.run().unwrap();
        case.model.name = "bytes".to_owned();
        fs::write(case.input(), after).unwrap();
        case.run().unwrap_err().to_string()
    };
    let (a, b) = (line("a", "x"), line("b", "y"));
    let text = told(&a, "bytes", &b);
    assert!(
        text.contains("the only result in ") && text.contains(" matches no line of "),
        "{text}"
    );
    assert!(text.contains("(a), so nothing was run. Its custom_id is not in"), "{text}");
    let text = told(&[&*a, &b].concat(), "bytes", &[&*a, &line("b", "z")].concat());
    assert!(text.contains("1 of the 2 results") && text.contains("(b), so"), "{text}");
    let causes = ["the request", "the model's files", "--max-context", "--context-type", "--isa"];
    assert!(causes.iter().all(|cause| text.contains(cause)), "{text}");
    let text = told(&[&*a, &b].concat(), "other", &a);
    assert!(
        text.contains(
            "1 of their custom_ids is not in this input; for the other one, the model has"
        ),
        "{text}"
    );
    assert!(text.contains("They were answered by other; this run uses bytes. "), "{text}");
    for way in ["--keep", "--overwrite", "-o"] {
        assert!(text.contains(way), "{text}");
    }
    // A custom id is a user's text, and a terminal is not to obey it.
    let text = told(&line("red\\u001b[31m", "x"), "bytes", &a);
    assert!(text.contains("red\\u{1b}[31m"), "{text}");
}

#[test]
fn another_model_or_limit_does_not_cost_the_answers() {
    let lines = line("a", "x") + &line("b", "y") + &line("a", "again");
    let mut case = Case::new(lines);
    case.run().unwrap();
    let before = case.output_text();
    case.model.context_max += 1;
    assert!(matches!(case.run().unwrap_err(), JobError::Unmatched(_)));
    case.model.context_max -= 1;
    case.model.identity = "other weights".to_owned();
    assert!(matches!(case.run().unwrap_err(), JobError::Unmatched(_)));
    assert_eq!(case.output_text(), before);
    case.earlier = Earlier::Keep;
    let summary = case.run().unwrap();
    assert_eq!((summary.resumed, summary.unmatched), (1, 2), "the duplicate's error is the same");
    assert!(case.output_text().starts_with(&before));
    assert_eq!(case.run().unwrap().resumed, 3, "the new results are found among the old");
}

#[test]
fn another_model_at_the_last_moment_is_noticed() {
    let case = Case::new(line("a", "x") + &line("b", "y"));
    case.run().unwrap();
    let before = case.output_text();
    let prepared = prepare(&case, Earlier::Continue, &case.model).unwrap();
    assert_eq!(prepared.standing(), Some(JobStanding { lines: 2, done: 2 }));
    let mut other = case.model.clone();
    other.identity = "another instruction set".to_owned();
    let error = prepared.start(Arc::new(other)).err().unwrap();
    assert!(matches!(error, JobError::Unmatched(_)), "{error}");
    assert_eq!(case.output_text(), before);
}

#[test]
fn a_job_that_is_never_started_changes_nothing() {
    let case = Case::new(line("a", "x"));
    let prepared = prepare(&case, Earlier::Continue, &case.model).unwrap();
    assert!(case.output().exists(), "so that no other run takes the same output");
    drop(prepared);
    assert!(!case.output().exists());
    case.run().unwrap();
    let damaged = case.output_text() + "{\"id\":\"batch_req_";
    fs::write(case.output(), &damaged).unwrap();
    for earlier in [Earlier::Continue, Earlier::Keep, Earlier::Overwrite] {
        drop(prepare(&case, earlier, &case.model).unwrap());
        assert_eq!(case.output_text(), damaged);
    }
}

#[test]
fn a_stream_removes_no_answers() {
    let case = Case::new(line("a", "x") + &line("b", ""));
    case.run().unwrap();
    let pipe = case.folder.path().join("pipe");
    // Not by a command: the moment between its fork and its exec would hold the locks of other tests' outputs.
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let after = line("b", "mended") + &line("c", "z");
    let feeder = {
        let pipe = pipe.clone();
        std::thread::spawn(move || fs::write(pipe, after).unwrap())
    };
    let summary = case.run_input(&Input::File(pipe)).unwrap();
    feeder.join().unwrap();
    assert_eq!((summary.succeeded, summary.unmatched, summary.superseded), (2, 1, 1));
    let mut custom_ids: Vec<String> = case.output_text().lines().map(custom_id).collect();
    custom_ids.sort();
    assert_eq!(custom_ids, ["a", "b", "c"], "b's error has made way for its answer");
}

fn custom_id(line: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(line).unwrap();
    value["custom_id"].as_str().unwrap().to_owned()
}
