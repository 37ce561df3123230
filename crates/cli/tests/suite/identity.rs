//! A prompt's output does not depend on what runs beside it: the same bytes for every batch, chunk,
//! number of threads and amount of memory, on every instruction set of this machine.

use crate::common::{Case, mixed_requests};
use glinthawk_compute::Isa;
use glinthawk_model::testing;
use serde_json::Value;

/// One way to run the same input.
#[derive(Debug)]
struct Variant {
    batch: u32,
    chunk: u32,
    threads: u32,
    context_memory: &'static str,
    context_type: &'static str,
}

fn run(case: &Case, isa: Isa, max_context: &str, variant: &Variant) -> (Vec<String>, Value) {
    let (batch, chunk, threads) =
        (variant.batch.to_string(), variant.chunk.to_string(), variant.threads.to_string());
    let options = [
        ["--isa", isa.name()],
        ["--batch", &batch],
        ["--chunk", &chunk],
        ["--threads", &threads],
        ["--context-memory", variant.context_memory],
        ["--context-type", variant.context_type],
        ["--max-context", max_context],
    ];
    let mut options = options.concat();
    options.push("--overwrite");
    let (finished, stats) = case.run_with_stats(&options);
    finished.expect(0);
    assert_eq!(stats["instruction_set"], isa.kind());
    (case.results(), stats)
}

/// All variants give the bytes of the first. Those with less memory than `ample` must have
/// preempted, if more than one prompt was seated at all.
fn check(case: &Case, isa: Isa, max_context: &str, ample: &str, variants: &[Variant]) {
    let (expected, _) = run(case, isa, max_context, &variants[0]);
    for variant in &variants[1..] {
        let (results, stats) = run(case, isa, max_context, variant);
        assert!(results == expected, "{isa}, {variant:?}: other results than {:?}", variants[0]);
        let recomputed = stats["prompts_recomputed"].as_u64().expect("a count");
        if variant.context_memory == ample {
            assert_eq!(recomputed, 0, "{isa}, {variant:?}");
        } else if variant.batch > 1 {
            assert!(recomputed > 0, "{isa}, {variant:?}: memory was not tight");
        }
    }
}

/// Four prompts that grow to six pages each: tight memory cannot hold them together. They could stop before.
fn long_requests() -> String {
    let line = |seed: u32| {
        format!(
            "{{\"custom_id\":\"long-{seed}\",\"prompt\":\"once\",\"seed\":{seed},\"ignore_eos\":true,\"stop\":\"~never~\",\"max_tokens\":80}}\n"
        )
    };
    (0..4).map(line).collect()
}

#[test]
fn outputs_are_identical_whatever_runs_beside_them() {
    let (ample, tight) = ("8MiB", "60KiB");
    let case = Case::new(mixed_requests(16, 4, 24) + &long_requests());
    let mut variants = Vec::new();
    for context_memory in [ample, tight] {
        for threads in [1, 2] {
            for chunk in [256, 16, 1] {
                for batch in [64, 7, 1] {
                    let context_type = "bf16";
                    variants.push(Variant { batch, chunk, threads, context_memory, context_type });
                }
            }
        }
    }
    for isa in Isa::available() {
        check(&case, isa, "128", ample, &variants);
    }
    let answers = case.answers();
    assert_eq!(answers.len(), 20);
    for reason in ["stop", "length"] {
        let ended = answers
            .values()
            .any(|answer| answer.to_string().contains(&format!("\"finish_reason\":\"{reason}\"")));
        assert!(ended, "no completion ended by {reason}");
    }
}

#[test]
fn outputs_are_identical_from_any_number_of_lanes() {
    let case = Case::new(mixed_requests(260, 4, 12) + &long_requests());
    let variant = |threads, batch, context_memory| Variant {
        batch,
        chunk: 16,
        threads,
        context_memory,
        context_type: "bf16",
    };
    let isa = Isa::detect();
    let (expected, stats) = run(&case, isa, "128", &variant(1, 64, "8MiB"));
    assert_eq!((&stats["lanes"], expected.len()), (&Value::from(1), 264));
    for (threads, batch, lanes) in [(2, 64, 2), (3, 64, 3), (4, 64, 4), (2, 63, 1), (6, 100, 6)] {
        let variant = variant(threads, batch, "8MiB");
        let (results, stats) = run(&case, isa, "128", &variant);
        assert!(results == expected, "{variant:?}: other results");
        assert_eq!(stats["lanes"], lanes, "{variant:?}");
        let nodes = stats["nodes"].as_array().expect("nodes").iter();
        // Lanes that came together have one more.
        let of_lanes = nodes.filter(|node| lanes == 1 || node["name"] != "tier1-0");
        assert_eq!(of_lanes.count(), 2 * lanes, "{variant:?}");
    }
}

#[test]
fn outputs_of_int8_contexts_are_identical_whatever_runs_beside_them() {
    let (ample, tight) = ("8MiB", "38KiB");
    let case = Case::new(mixed_requests(16, 4, 24) + &long_requests());
    let variant = |batch, chunk, threads, context_memory| Variant {
        batch,
        chunk,
        threads,
        context_memory,
        context_type: "int8",
    };
    let variants = [
        variant(64, 256, 1, ample),
        variant(64, 16, 2, ample),
        variant(1, 1, 1, ample),
        variant(7, 16, 2, tight),
        variant(64, 256, 1, tight),
    ];
    for isa in Isa::available() {
        check(&case, isa, "128", ample, &variants);
    }
    assert_eq!(case.answers().len(), 20);
}

/// Requests for the default model; the two long completions end with three pages each.
const REAL_REQUESTS: &str = r#"
{"custom_id":"chat","messages":[{"role":"user","content":"Name a colour."}],"seed":3,"logprobs":true,"top_logprobs":2,"max_tokens":6}
{"custom_id":"stop","prompt":"One, two, three,","temperature":0,"stop":[" five"],"max_tokens":6}
{"custom_id":"long","prompt":"There is a town by the sea where all of the boats come in and","temperature":0.9,"n":2,"frequency_penalty":0.5,"ignore_eos":true,"stop":"~never~","max_tokens":60}
"#;

fn real_case(requests: &str) -> Option<Case> {
    let model = testing::default_model()?;
    let model = model.to_str().expect("a path of text").to_owned();
    Some(Case { model, ..Case::new(requests) })
}

#[test]
fn a_real_model_says_the_same_in_any_batch() {
    let short = REAL_REQUESTS.replace("\"max_tokens\":60", "\"max_tokens\":4");
    let Some(case) = real_case(&short) else { return };
    let variants = [
        Variant {
            batch: 64,
            chunk: 256,
            threads: 2,
            context_memory: "64MiB",
            context_type: "bf16",
        },
        Variant { batch: 7, chunk: 16, threads: 1, context_memory: "64MiB", context_type: "bf16" },
    ];
    for isa in Isa::available() {
        check(&case, isa, "48", "64MiB", &variants);
    }
    assert_eq!(case.answers().len(), 3);
}

#[test]
fn a_real_model_says_the_same_in_tight_memory() {
    let Some(case) = real_case(REAL_REQUESTS) else { return };
    // Room for four pages.
    let (ample, tight) = ("64MiB", "3000KiB");
    let variants = [
        Variant { batch: 64, chunk: 256, threads: 2, context_memory: ample, context_type: "bf16" },
        Variant { batch: 7, chunk: 16, threads: 2, context_memory: tight, context_type: "bf16" },
        Variant { batch: 1, chunk: 1, threads: 1, context_memory: ample, context_type: "bf16" },
    ];
    check(&case, Isa::detect(), "80", ample, &variants);
    assert_eq!(case.answers().len(), 3);
}
