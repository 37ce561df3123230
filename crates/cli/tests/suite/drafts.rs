//! Tokens that may come next are computed beside those that are known, and nothing of it shows in answers.

use crate::common::Case;
use glinthawk_compute::Isa;
use std::fmt::Write;

/// Requests whose answers repeat themselves, because the model is small and has random weights: some greedy, some not,
/// some with penalties, log-probabilities, stop strings or several choices.
fn requests() -> String {
    let kinds = [
        r#""temperature":0"#,
        r#""temperature":0,"logprobs":3"#,
        r#""temperature":0,"stop":["aa","q","zz"]"#,
        r#""temperature":0.05,"n":2"#,
        r#""temperature":0,"repetition_penalty":1.3"#,
        r#""temperature":0.3,"frequency_penalty":0.2"#,
    ];
    (0..24).fold(String::new(), |mut lines, number| {
        let (kind, ending) = (kinds[number % kinds.len()], number % 4 > 0);
        let _ = writeln!(
            lines,
            r#"{{"custom_id":"{number}","prompt":"what comes after {}?","max_tokens":{},{kind},"seed":{number},"ignore_eos":{ending}}}"#,
            number / 4,
            20 + number * 4
        );
        lines
    })
}

#[test]
fn answers_are_the_same_with_and_without_drafts() {
    let case = Case::new(requests());
    let (expected, stats) = case.results_with_stats(&["--no-drafts", "--context-memory", "64MiB"]);
    assert_eq!((&stats["tokens_drafted"], &stats["drafts_right"]), (&0.into(), &0.into()));
    let generated = stats["generated_tokens"].clone();
    let isas = Isa::available().into_iter().filter(|isa| *isa > Isa::Portable);
    let settings = [
        "--threads 1 --batch 20",
        "--threads 2 --chunk 7",
        "--batch 16 --chunk 1 --no-prefix-sharing",
        "--batch 20 --context-type int8",
        "--batch 20 --tier1 1 --tier2 2",
        "--batch 20 --tier1 2 --tier2 1 --hybrid",
        "--batch 20 --tier1 1 --tier2 2 --context-memory 100KiB",
    ];
    let isas = isas.map(|isa| format!("--isa {} --batch 20", isa.name()));
    for setting in settings.map(str::to_owned).into_iter().chain(isas) {
        let options: Vec<&str> = setting.split(' ').collect();
        let own = options.contains(&"--context-type") || options.contains(&"--isa");
        let without = [&options[..], &["--no-drafts"]].concat();
        let (expected, generated) = match own {
            true => {
                let (expected, stats) = case.results_with_stats(&without);
                (expected, stats["generated_tokens"].clone())
            }
            false => (expected.clone(), generated.clone()),
        };
        let (results, stats) = case.results_with_stats(&options);
        assert!(results == expected, "{setting}: other answers than without drafts");
        assert_eq!(
            stats["generated_tokens"], generated,
            "{setting}: nothing is generated for nothing"
        );
        let count = |field: &str| stats[field].as_u64().expect("a count");
        let (drafted, right) = (count("tokens_drafted"), count("drafts_right"));
        println!("{setting}: {right} of {drafted} drafts were right");
        // Simpler paths compute a row nearly as fast as they read the weights, so that hardly a draft is worth it.
        if Isa::detect() >= Isa::Avx512 && !setting.contains("--isa") {
            assert!(right > 20 && drafted > right, "{setting}: {right} of {drafted} were right");
        }
    }
}
