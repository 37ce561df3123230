//! A long input runs in memory that does not grow with it, except for 16-byte keys. Alone in its
//! binary, because it measures its process.

#[path = "suite/common.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod common;

use common::{Case, backwards, complete, submit};
use glinthawk_jobs::Next;
use std::fmt::Write as _;
use std::time::Duration;

const LINES: usize = 100_000;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Half of the lines are good; together they are some 60 MB.
fn input() -> String {
    let filler = "x".repeat(1000);
    let mut input = String::new();
    for number in 0..LINES {
        match number % 4 {
            0 => writeln!(input, r#"{{"custom_id":"{number}-{filler}","prompt":"hi"}}"#),
            1 => writeln!(input, r#"{{"prompt":"{number}","user":"{filler}"}}"#),
            2 => writeln!(input, r#"{{"prompt":"{number}","typo":"{}"}}"#, &filler[..200]),
            _ => writeln!(input, "{number} is no request"),
        }
        .unwrap();
    }
    input
}

#[test]
fn memory_does_not_grow_with_the_input() {
    let case = Case::new(input());
    let mut job = case.open().unwrap();
    let mut early_bytes = None;
    loop {
        match job.next(Duration::from_millis(20)).unwrap() {
            Next::Prompt(prompt) => {
                let id = submit(&mut job);
                let completion = complete(&mut job, id, &prompt, backwards, 0);
                job.finish(&completion).unwrap();
            }
            Next::Later => {}
            Next::Exhausted => break,
        }
        if early_bytes.is_none() && job.progress().lines_done > LINES as u64 / 10 {
            early_bytes = Some(resident_bytes());
        }
    }
    let grown_bytes = resident_bytes().saturating_sub(early_bytes.unwrap());
    // 16-byte keys in a hash table, once half grown and once whole, are less than 8 MB.
    assert!(grown_bytes < 16 << 20, "grew by {grown_bytes} bytes over {LINES} lines");
    let progress = job.progress();
    assert_eq!((progress.lines_done, progress.lines_total), (LINES as u64, Some(LINES as u64)));
    let summary = job.close().unwrap();
    assert_eq!((summary.succeeded, summary.failed), (LINES as u64 / 2, LINES as u64 / 2));

    let again = case.run().unwrap();
    assert_eq!((again.resumed, again.complete), (LINES as u64, true));
    assert_eq!(case.output_text().lines().count(), LINES);
}
