//! An output that is moved, deleted or cut short while a job writes it: noticed, and what can be kept
//! is kept. One that another program adds to: told, and left alone. And what a job does to files beside its output: nothing.

use crate::common::{Case, backwards, complete, sorted, submit};
use glinthawk_jobs::{Earlier, Job, JobError, JobOptions, Next, Output, PreparedJob};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_first_line_that_was_spoilt_is_done_again() {
    let case = Case::new("{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n{\"prompt\":\"c\"}\n");
    case.run().unwrap();
    let (whole, results) = (case.output_text(), case.sorted());
    fs::write(case.output(), format!("{{\"foreign\": \"par{whole}")).unwrap();
    case.run().unwrap();
    assert_eq!(case.sorted(), results);
    fs::write(case.output(), "{\"foreign\": \"par\n").unwrap();
    assert!(matches!(case.run(), Err(JobError::NotOurs { line: 1, .. })));
}

/// Half of a job: four of eight lines have their result.
fn half_done() -> (Case, Job) {
    let lines = (0..8).map(|number| format!("{{\"prompt\":\"p{number}\"}}\n"));
    let case = Case::new(lines.collect::<String>());
    let mut job = case.open().unwrap();
    let mut finished = 0;
    while finished < 4 {
        if let Next::Prompt(prompt) = job.next(Duration::from_millis(20)).unwrap() {
            let id = submit(&mut job);
            let completion = complete(&mut job, id, &prompt, backwards, 0);
            job.finish(&completion).unwrap();
            finished += 1;
        }
    }
    (case, job)
}

/// Goes on with the job until it fails; nothing if only its end tells.
fn work_on(job: &mut Job) -> Option<JobError> {
    loop {
        match job.next(Duration::from_millis(20)) {
            Ok(Next::Prompt(prompt)) => {
                let id = submit(job);
                let completion = complete(job, id, &prompt, backwards, 0);
                if let Err(error) = job.finish(&completion) {
                    return Some(error);
                }
            }
            Ok(Next::Later) => {}
            Ok(Next::Exhausted) => return None,
            Err(error) => return Some(error),
        }
    }
}

/// The error that ends a job after `harm` was done to its output.
fn end_after(harm: impl Fn(&Path)) -> (Case, JobError) {
    let (case, mut job) = half_done();
    harm(&case.output());
    let error = work_on(&mut job);
    let closed = job.close();
    let error = error.unwrap_or_else(|| closed.expect_err("the output is not what was written"));
    (case, error)
}

/// All files but the input.
fn files(case: &Case) -> Vec<PathBuf> {
    let entries = fs::read_dir(case.folder.path()).unwrap();
    entries.map(|entry| entry.unwrap().path()).filter(|path| *path != case.input()).collect()
}

#[test]
fn a_moved_output_is_found() {
    let (case, error) = end_after(|path| fs::rename(path, path.with_extension("moved")).unwrap());
    let JobError::OutputMoved { now, .. } = &error else { panic!("{error}") };
    assert_eq!(files(&case), std::slice::from_ref(now));
    fs::rename(now, case.output()).unwrap();
    assert!(case.run().unwrap().resumed >= 4);
    assert_eq!(case.sorted().len(), 8);
}

#[test]
fn a_deleted_output_is_saved() {
    let (case, error) = end_after(|path| fs::remove_file(path).unwrap());
    let JobError::OutputDeleted { saved, .. } = &error else { panic!("{error}") };
    assert_eq!(files(&case), std::slice::from_ref(saved));
    fs::rename(saved, case.output()).unwrap();
    assert!(case.run().unwrap().resumed >= 4);
    assert_eq!(case.sorted().len(), 8);
}

#[test]
fn an_output_whose_folder_is_deleted_is_saved_elsewhere() {
    let (case, mut job) = half_done();
    fs::remove_dir_all(case.folder.path()).unwrap();
    let error = work_on(&mut job).unwrap_or_else(|| job.close().unwrap_err());
    let JobError::OutputDeleted { saved, .. } = &error else { panic!("{error}") };
    assert!(sorted(saved).len() >= 4);
    fs::remove_file(saved).unwrap();
}

#[test]
fn an_output_that_another_file_replaced_is_saved() {
    let (case, error) = end_after(|path| {
        fs::write(path.with_extension("new"), "my notes").unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    });
    let JobError::OutputDeleted { saved, .. } = &error else { panic!("{error}") };
    assert!(sorted(saved).len() >= 4);
    assert_eq!(case.output_text(), "my notes");
}

#[test]
fn an_output_that_was_cut_short_is_told() {
    for left_bytes in [0, 100] {
        let (case, error) = end_after(|path| {
            fs::OpenOptions::new().write(true).open(path).unwrap().set_len(left_bytes).unwrap();
        });
        let JobError::OutputCut { lost_bytes, .. } = &error else { panic!("{error}") };
        assert!(*lost_bytes > 100, "{error}");
        if left_bytes == 0 {
            case.run().unwrap();
            assert_eq!(case.sorted().len(), 8, "the same command runs the lost lines again");
        }
    }
}

fn append(path: &Path, text: &str) {
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[test]
fn what_another_program_adds_is_told_and_left_alone() {
    let foreign = "{\"note\":\"not a result\"}\n";
    let (case, mut job) = half_done();
    append(&case.output(), foreign);
    assert!(work_on(&mut job).is_none());
    let summary = job.close().unwrap();
    assert_eq!((summary.complete, summary.foreign_bytes), (true, foreign.len() as u64));
    assert!(case.output_text().contains(foreign));
    assert_eq!(case.output_text().lines().count(), 9);

    // A job that would otherwise rewrite its output.
    let case = Case::new("{\"prompt\":\"\"}\n{\"prompt\":\"x\"}\n");
    assert_eq!(case.run().unwrap().foreign_bytes, 0);
    fs::write(case.input(), "{\"prompt\":\"mended\"}\n{\"prompt\":\"x\"}\n").unwrap();
    let mut job = case.open().unwrap();
    append(&case.output(), foreign);
    assert!(work_on(&mut job).is_none());
    let summary = job.close().unwrap();
    assert_eq!((summary.superseded, summary.foreign_bytes), (0, foreign.len() as u64));
    assert!(case.output_text().contains(foreign));
}

#[test]
fn what_another_program_adds_before_the_job_starts_stops_it() {
    let case = Case::new("{\"prompt\":\"x\"}\n{\"prompt\":\"y\"}\n");
    case.run().unwrap();
    // A torn line, which would be cut off.
    let whole = case.output_text();
    fs::write(case.output(), &whole[..whole.len() - 5]).unwrap();
    let options = JobOptions { output: Output::File(case.output()), earlier: Earlier::Continue };
    let model = Arc::new(case.model.clone());
    let prepared = PreparedJob::new(case.open_input(), &options, Some(Arc::clone(&model))).unwrap();
    append(&case.output(), "precious\n");
    let error = prepared.start(model).err().unwrap();
    assert!(matches!(error, JobError::OutputChanged { .. }), "{error}");
    assert!(case.output_text().ends_with("precious\n"));
}

#[test]
fn a_displaced_output_stops_a_job_that_writes_nothing() {
    let (case, mut job) = half_done();
    while !matches!(job.next(Duration::from_millis(1)).unwrap(), Next::Exhausted) {}
    fs::remove_file(case.output()).unwrap();
    let error = loop {
        if let Err(error) = job.next(Duration::from_millis(1)) {
            break error;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(error, JobError::OutputDeleted { .. }), "{error}");
    job.close().unwrap();
    assert_eq!(files(&case).len(), 1, "saved once");
}

#[test]
fn a_rewrite_keeps_permissions_and_touches_no_other_file() {
    let case = Case::new("{\"prompt\":\"\"}\n{\"prompt\":\"x\"}\n");
    case.run().unwrap();
    fs::set_permissions(case.output(), fs::Permissions::from_mode(0o640)).unwrap();
    // A file of the user under a name that a temporary one might have.
    let precious = case.folder.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    let rewrite = case.folder.path().join("out.jsonl.rewrite");
    symlink(&precious, &rewrite).unwrap();
    fs::write(case.input(), "{\"prompt\":\"mended\"}\n{\"prompt\":\"x\"}\n").unwrap();
    assert_eq!(case.run().unwrap().superseded, 1);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    assert!(rewrite.is_symlink());
    assert_eq!(fs::metadata(case.output()).unwrap().mode() & 0o777, 0o640);
    assert_eq!(files(&case).len(), 3, "nothing is left behind");
}

#[test]
fn a_rewrite_that_fails_leaves_everything_as_it_was() {
    let case = Case::new("{\"prompt\":\"\"}\n{\"prompt\":\"x\"}\n");
    case.run().unwrap();
    let before = case.output_text();
    fs::write(case.input(), "{\"prompt\":\"mended\"}\n{\"prompt\":\"x\"}\n").unwrap();
    let mut job = case.open().unwrap();
    assert!(work_on(&mut job).is_none());
    // A folder in the output's place: what is written beside it cannot take that place.
    let moved = case.folder.path().join("moved");
    fs::rename(case.output(), &moved).unwrap();
    fs::create_dir(case.output()).unwrap();
    let error = job.close().unwrap_err();
    assert!(matches!(error, JobError::OutputMoved { .. }), "{error}");
    assert!(fs::read_to_string(moved).unwrap().starts_with(&before));
    assert_eq!(files(&case).len(), 2, "nothing is left behind");
}
