//! A prompt's output does not depend on who computes it: the same bytes from one process and from
//! clusters of every shape, over links of every quality.

use crate::common::{Case, mixed_requests};
use glinthawk_model::testing;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;

/// Contexts of these lengths only, so that memory can be ample or tight.
const MAX_CONTEXT: [&str; 2] = ["--max-context", "192"];

/// One way to run the same input.
struct Topology {
    name: &'static str,
    /// Processes that compute, and how many nodes they are.
    nodes: usize,
    options: &'static [&'static str],
}

/// Of a model with three layers: two slices are uneven, three have one each.
const TOPOLOGIES: [Topology; 17] = [
    Topology { name: "1x0", nodes: 2, options: &["--tier1", "1", "--tier2", "0"] },
    Topology { name: "2x0", nodes: 4, options: &["--tier1", "2", "--tier2", "0"] },
    Topology { name: "1x1", nodes: 2, options: &["--tier1", "1", "--tier2", "1"] },
    Topology { name: "1x3", nodes: 4, options: &["--tier1", "1", "--tier2", "3"] },
    Topology { name: "2x1", nodes: 4, options: &["--tier1", "2", "--tier2", "1"] },
    Topology { name: "3x2", nodes: 9, options: &["--tier1", "3", "--tier2", "2"] },
    Topology {
        name: "hybrid 1x1",
        nodes: 3,
        options: &["--tier1", "1", "--tier2", "1", "--hybrid", "--context-memory", "200KiB,16MiB"],
    },
    Topology {
        name: "hybrid 2x2",
        nodes: 8,
        options: &["--tier1", "2", "--tier2", "2", "--hybrid", "--context-memory", "200KiB,16MiB"],
    },
    Topology { name: "2 of 1x0", nodes: 4, options: &["--pipelines", "2"] },
    Topology { name: "2 of 1x1", nodes: 4, options: &["--pipelines", "2", "--tier2", "1"] },
    Topology {
        name: "2 of 2x1",
        nodes: 8,
        options: &["--pipelines", "2", "--tier1", "2", "--tier2", "1"],
    },
    Topology {
        name: "2 of hybrid 1x1, whole flights",
        nodes: 6,
        options: &[
            "--pipelines",
            "2",
            "--tier2",
            "1",
            "--hybrid",
            "--merge",
            "flights",
            "--context-memory",
            "200KiB,16MiB",
        ],
    },
    Topology {
        name: "one small flight",
        nodes: 3,
        options: &[
            "--tier1",
            "1",
            "--tier2",
            "2",
            "--flights",
            "1",
            "--batch",
            "24",
            "--chunk",
            "5",
        ],
    },
    Topology {
        name: "whole flights",
        nodes: 4,
        options: &["--tier1", "1", "--tier2", "3", "--merge", "flights"],
    },
    Topology {
        name: "delay",
        nodes: 3,
        options: &["--tier1", "1", "--tier2", "2", "--delay", "2ms"],
    },
    Topology {
        name: "bandwidth",
        nodes: 4,
        options: &["--tier1", "2", "--tier2", "1", "--bandwidth", "50mbit"],
    },
    Topology {
        name: "tight memory",
        nodes: 3,
        options: &["--tier1", "1", "--tier2", "2", "--context-memory", "100KiB"],
    },
];

fn run(case: &Case, options: &[&str]) -> (Vec<String>, Value) {
    let (finished, stats) =
        case.run_with_stats(&[&MAX_CONTEXT[..], &["--overwrite"], options].concat());
    finished.expect(0);
    (case.results(), stats)
}

/// Every topology gives the bytes of one process, and each of its nodes had a part in it.
fn check<'a>(case: &Case, context_type: &str, topologies: impl IntoIterator<Item = &'a Topology>) {
    let run = |options: &[&str]| run(case, &[options, &["--context-type", context_type]].concat());
    let (expected, _) = run(&["--context-memory", "64MiB"]);
    for Topology { name, nodes, options } in topologies {
        let (results, stats) = run(options);
        assert_eq!(stats["context_type"], context_type);
        assert!(results == expected, "{name}: other results than one process");
        let shares = stats["nodes"].as_array().expect("a list of nodes");
        // A process reports for each of its strands.
        let is_whole = !shares.is_empty() && shares.len().is_multiple_of(*nodes);
        assert!(is_whole, "{name}: {} reports of {nodes} nodes", shares.len());
        for share in shares {
            assert!(share["batches"].as_u64() > Some(0), "{name}: {} was idle", share["name"]);
        }
        let recomputed = stats["prompts_recomputed"].as_u64().expect("a count");
        // Hybrids use Tier 2 because Tier 1 has little memory.
        let is_tight = *name == "tight memory";
        assert!((recomputed > 0) == is_tight || name.contains("hybrid"), "{name}: {recomputed}");
    }
}

/// Eight prompts that grow to eleven pages each: tight memory cannot hold them together. They could stop before.
fn long_requests() -> String {
    let line = |seed: u32| {
        format!(
            "{{\"custom_id\":\"long-{seed}\",\"prompt\":\"once\",\"seed\":{seed},\"ignore_eos\":true,\"stop\":\"~never~\",\"max_tokens\":170}}\n"
        )
    };
    (0..8).map(line).collect()
}

#[test]
fn outputs_are_identical_in_every_topology() {
    let case = Case::new(long_requests() + &mixed_requests(292, 4, 24));
    check(&case, "bf16", &TOPOLOGIES);
    assert_eq!(case.answers().len(), 300);
}

#[test]
fn outputs_of_int8_contexts_are_identical_in_every_topology() {
    let case = Case::new(long_requests() + &mixed_requests(92, 4, 24));
    let names = ["1x3", "2x1", "hybrid 1x1", "tight memory"];
    check(&case, "int8", TOPOLOGIES.iter().filter(|topology| names.contains(&topology.name)));
    assert_eq!(case.answers().len(), 100);
}

#[test]
fn a_trace_shows_every_node_at_work() {
    let case = Case::new(mixed_requests(100, 4, 8));
    let trace = case.path("trace.json");
    let trace = trace.to_str().expect("a path of text");
    let memory = ["--context-memory", "100KiB,16MiB"];
    let hybrid = ["--tier1", "2", "--tier2", "1", "--hybrid", "--trace", trace];
    case.run(&[&hybrid[..], &memory, &MAX_CONTEXT].concat()).expect(0);
    let text = fs::read(trace).expect("there is a trace");
    let trace: Value = serde_json::from_slice(&text).expect("a trace is JSON");
    let events = trace["traceEvents"].as_array().expect("a list of events");
    let of = |phase: &'static str| events.iter().filter(move |event| event["ph"] == phase);
    let threads = of("M").filter(|event| event["name"] == "thread_name");
    let names: BTreeMap<u64, &str> = threads
        .map(|event| (event["tid"].as_u64().expect("an id"), event["args"]["name"].as_str()))
        .map(|(id, name)| (id, name.expect("a name")))
        .collect();
    let nodes = ["tier1-0", "tier1-1", "tier2-0-0", "tier2-0-1", "tier2-1-0", "tier2-1-1"];
    let mut seen: Vec<&str> = names.values().copied().collect();
    seen.sort_unstable();
    assert_eq!(seen, nodes);
    // A node computes one batch at a time: its spans, in order of their start, do not overlap.
    let mut spans: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    for event in of("X") {
        let time = |field: &str| event[field].as_f64().expect("a time");
        let node = event["tid"].as_u64().expect("an id");
        spans.entry(node).or_default().push((time("ts"), time("ts") + time("dur")));
    }
    assert_eq!(spans.keys().collect::<Vec<_>>(), names.keys().collect::<Vec<_>>());
    for (node, mut spans) in spans {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let overlaps = spans.windows(2).any(|pair| pair[0].1 > pair[1].0 + 0.001);
        assert!(!overlaps, "{} is in two places at once", names[&node]);
    }
}

/// Greedy, sampled, stopped and long.
const REAL_REQUESTS: &str = r#"
{"custom_id":"chat","messages":[{"role":"user","content":"Name a colour."}],"seed":3,"logprobs":true,"top_logprobs":2,"max_tokens":6}
{"custom_id":"stop","prompt":"One, two, three,","temperature":0,"stop":[" five"],"max_tokens":6}
{"custom_id":"long","prompt":"There is a town by the sea where all of the boats come in and","temperature":0.9,"n":2,"frequency_penalty":0.5,"ignore_eos":true,"max_tokens":8}
"#;

#[test]
fn a_real_model_says_the_same_from_uneven_slices() {
    let Some(model) = testing::default_model() else { return };
    let model = model.to_str().expect("a path of text").to_owned();
    let case = Case { model, ..Case::new(REAL_REQUESTS) };
    // Thirty layers in four slices: 8, 8, 7 and 7.
    let options = &["--tier1", "4", "--tier2", "1", "--context-memory", "32MiB"];
    check(&case, "bf16", &[Topology { name: "4x1", nodes: 8, options }]);
    assert_eq!(case.answers().len(), 3);
}
