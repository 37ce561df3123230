//! Prompts that begin alike share the context of what they have in common, and nothing of it shows in their answers.

use crate::common::{Case, lines_in};
use glinthawk_compute::Isa;
use std::fmt::Write;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

/// 48 requests: a third begins with one long text, a third with another that parts from it half-way, and a third with
/// neither. Some have several choices.
fn requests() -> String {
    let first = "a text that many questions are about, long enough for several pages of context";
    let second = format!("{} and goes on in another way from here to its end", &first[..40]);
    (0..48).fold(String::new(), |mut lines, number| {
        let beginning = [first, &second, ""][number % 3];
        let (choices, temperature) = if number % 5 == 0 { (4, 0.8) } else { (1, 0.0) };
        let _ = writeln!(
            lines,
            r#"{{"custom_id":"{number}","prompt":"{beginning} {number}?","max_tokens":{},"n":{choices},"temperature":{temperature},"seed":{number},"ignore_eos":true}}"#,
            4 + number % 9
        );
        lines
    })
}

#[test]
fn answers_are_the_same_with_and_without_sharing() {
    let case = Case::new(requests());
    let (expected, stats) =
        case.results_with_stats(&["--no-prefix-sharing", "--context-memory", "64MiB"]);
    assert_eq!(stats["prompt_tokens_shared"], 0);
    let isas = Isa::available();
    // The best is the default.
    let isas = isas[..isas.len() - 1].iter().map(|isa| format!("--isa {}", isa.name()));
    let settings = [
        "--threads 1",
        "--threads 2",
        "--chunk 1",
        "--chunk 7 --batch 16",
        "--chunk 64",
        "--chunk 1024",
        "--context-type int8",
        "--tier1 1 --tier2 2",
        "--tier1 2 --tier2 1",
        "--tier1 2 --tier2 1 --hybrid",
        "--tier1 1 --tier2 2 --context-memory 100KiB",
    ];
    for setting in settings.map(str::to_owned).into_iter().chain(isas) {
        let options: Vec<&str> = setting.split(' ').collect();
        let own = ["--context-type", "--isa"].contains(&options[0]);
        let without = [&options[..], &["--no-prefix-sharing"]].concat();
        let expected = if own { case.results_with_stats(&without).0 } else { expected.clone() };
        let (results, stats) = case.results_with_stats(&options);
        assert!(results == expected, "{setting}: other answers than without sharing");
        let shared = stats["prompt_tokens_shared"].as_u64().expect("a count");
        assert!(shared > 500, "{setting}: only {shared} tokens were shared");
    }
}

#[test]
fn a_killed_job_goes_on_with_the_same_answers() {
    const SLOW: [&str; 6] = ["--isa", "portable", "--threads", "1", "--batch", "4"];
    let case = Case::new(requests());
    let (expected, _) = case.results_with_stats(&[&SLOW[..], &["--no-prefix-sharing"]].concat());
    std::fs::remove_file(case.output()).expect("there is an output");
    let options = [&SLOW[..], &["--max-context", "192"]].concat();
    for lines in [8, 24] {
        let mut command = case.command(&options);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut child = child.expect("the binary starts");
        while lines_in(&case.output()) < lines {
            assert!(child.try_wait().expect("it can be asked").is_none(), "it has 48 lines to do");
            sleep(Duration::from_millis(1));
        }
        child.kill().expect("it is ours");
        child.wait().expect("it was killed");
    }
    case.run(&options).expect(0);
    assert!(case.results() == expected, "other answers than without sharing");
}

#[test]
fn a_request_says_how_much_of_it_was_cached() {
    let case = Case::new(requests());
    case.results_with_stats(&["--threads", "1", "--batch", "8", "--chunk", "8"]);
    let answers = case.answers();
    let cached = |id: &str| {
        answers[id]["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert_eq!(cached("2"), Some(0), "nobody begins like it");
    assert!(cached("45") >= Some(64), "{:?}", cached("45"));
}
