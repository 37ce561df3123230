//! A long input is processed in memory that does not grow with it. `scripts/million-lines` shows
//! the same for a million lines.

use crate::common::Case;
use serde_json::Value;
use std::fmt::Write;

/// What a line of the input may cost: a hash to find duplicates, twice while its table grows.
const BYTES_PER_LINE_MAX: u64 = 128;

/// Half of the lines are bad.
fn input(lines: u64) -> String {
    let mut input = String::new();
    for number in 1..=lines {
        match number % 8 {
            1 => writeln!(input, r#"{{"custom_id":"{number}","prompt":"hi","temperature":9}}"#),
            3 => writeln!(input, "{number} is no request"),
            5 => writeln!(input, r#"{{"prompt":"hi","typo":{number}}}"#),
            7 => writeln!(input, r#"{{"custom_id":"0","prompt":"a duplicate but for the first"}}"#),
            _ => writeln!(input, r#"{{"custom_id":"{number}","prompt":"hi","max_tokens":1}}"#),
        }
        .expect("writing to a string");
    }
    input
}

/// Runs that many lines; every one has its result. Returns the peak of resident memory.
fn peak_memory_bytes(lines: u64) -> u64 {
    let case = Case::new(input(lines));
    let (finished, stats) = case.run_with_stats(&["--context-memory", "64MiB", "--threads", "1"]);
    finished.expect(3);
    let output = std::fs::read_to_string(case.output()).expect("there is an output");
    let (mut good, mut bad, mut duplicates) = (0, 0, 0);
    for line in output.lines() {
        let line: Value = serde_json::from_str(line).expect("a result line is JSON");
        match line["response"]["status_code"].as_u64() {
            Some(200) => good += 1,
            Some(400) if line["custom_id"] == "0" => duplicates += 1,
            Some(400) => bad += 1,
            _ => panic!("{line}"),
        }
    }
    // The first of the duplicates is none.
    assert_eq!((good, bad, duplicates), (lines / 2 + 1, lines / 8 * 3, lines / 8 - 1));
    stats["peak_memory_bytes"].as_u64().expect("a number of bytes")
}

/// The system hands out memory in pieces of up to 2 MiB, a piece more in one run than in the next. So each input is run a
/// few times, and the growth is what no run is without.
#[test]
fn memory_does_not_grow_with_the_input() {
    let (few, many) = (2_000, 40_000);
    let peaks = |lines| (0..3).map(move |_| peak_memory_bytes(lines));
    let (least, most) = (peaks(many).min().expect("three"), peaks(few).max().expect("three"));
    let grown_bytes = least.saturating_sub(most);
    let allowed_bytes = (many - few) * BYTES_PER_LINE_MAX;
    assert!(
        grown_bytes <= allowed_bytes,
        "{grown_bytes} bytes more for {many} than for {few} lines"
    );
}
