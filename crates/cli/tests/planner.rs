//! `profile`, `simulate` and `plan` as a user meets them, and plans that `run` takes.

mod common;

use common::{Finished, TINY, glinthawk};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use tempfile::TempDir;

/// A profile of the small shape, taken once.
static PROFILE: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("tiny.json");
    let mut command = glinthawk(["profile", "--brief", "--threads", "1", "--model", TINY, "-o"]);
    Finished::of(command.arg(&path)).expect(0);
    (folder, path)
});

fn profile() -> &'static str {
    PROFILE.1.to_str().expect("a path of text")
}

fn json(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("it is there")).expect("it is JSON")
}

#[test]
fn a_profile_says_where_it_is_from() {
    let profile = json(profile());
    let from = &profile["provenance"];
    assert_eq!(from["threads"], 1);
    assert_eq!(from["version"], env!("CARGO_PKG_VERSION"));
    for field in ["machine", "instruction_set", "date"] {
        assert!(!from[field].as_str().expect("text").is_empty(), "{field}");
    }
    for curve in ["pre", "post", "fused", "classify", "logits"] {
        let points = profile[curve].as_array().expect("a curve");
        assert!(points.len() > 3, "{curve}");
        assert!(points.iter().all(|point| point["seconds"].as_f64() > Some(0.0)), "{curve}");
    }
    assert!(profile["overheads"]["message"].as_f64() > Some(0.0));
}

#[test]
fn a_profile_in_the_cache_is_named_after_the_machine() {
    let cache = TempDir::new().expect("a folder");
    let mut command = glinthawk(["profile", "--brief", "--threads", "1", "--model", TINY]);
    let finished = Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0);
    assert!(finished.stderr.contains("profile in"), "{}", finished.stderr);
    let kept: Vec<_> = fs::read_dir(cache.path().join("profiles")).expect("a folder").collect();
    assert_eq!(kept.len(), 1);
}

#[test]
fn a_configuration_is_simulated_in_detail() {
    let folder = TempDir::new().expect("a folder");
    let trace = folder.path().join("trace.json");
    let trace = trace.to_str().expect("a path of text");
    let base = ["simulate", "--model", TINY, "--profile", profile(), "--batch", "8"];
    let two_tiers = ["--tier1", "2", "--tier2", "2", "--delay", "1ms", "--bandwidth", "1gbit"];
    let job = ["--prompts", "100x10+20", "--json", "--trace", trace];
    let run = |options: &[&str]| {
        let finished = Finished::of(glinthawk(base).args(options).args(job)).expect(0);
        serde_json::from_str::<Value>(&finished.stdout).expect("JSON")
    };
    let (single, two) = (run(&[]), run(&two_tiers));
    assert!(single["settled"]["tokens_per_second"].as_f64() > Some(0.0));
    assert_eq!(single["job"]["tokens"], 3000.0);
    assert_eq!(two["job"]["tier1_seconds"].as_array().map(Vec::len), Some(2));
    // 29 steps cross the delay twice for each layer, whatever the kernels take.
    assert!(two["job"]["seconds"].as_f64() > Some(29.0 * 2.0 * 2.0 * 0.001));
    assert!(two["settled"]["traffic"]["tier1_total"].as_f64() > Some(0.0));
    assert!(json(trace).as_array().is_some_and(|spans| spans.len() > 100));
    let words = Finished::of(glinthawk(base).args(["--prompts", "100x10+20"])).expect(0).stdout;
    for part in ["throughput", "Tier-1 busy", "Tier-1 egress", "the job"] {
        assert!(words.contains(part), "{words}");
    }
}

#[test]
fn what_cannot_be_simulated_is_named() {
    let simulate =
        |options: &[&str]| Finished::of(glinthawk(["simulate", "--model", TINY]).args(options));
    simulate(&[]).expect_error(&["--profile", "--device"]);
    simulate(&["--device", "t5"]).expect_error(&["t5", "t4"]);
    simulate(&["--device", "t4", "--prompts", "many"]).expect_error(&["--prompts many"]);
    simulate(&["--device", "t4", "--tier1", "50"]).expect_error(&["--tier1 50", "layers"]);
    simulate(&["--profile", "nowhere.json"]).expect_error(&["nowhere.json"]);
    let other = Finished::of(&mut glinthawk([
        "simulate",
        "--model",
        "dummy:llama2-7b",
        "--profile",
        profile(),
    ]));
    other.expect_error(&["shape", "llama2-7b"]);
    let folder = TempDir::new().expect("a folder");
    let bad = folder.path().join("bad.json");
    let mut broken = json(profile());
    broken["pre"][1]["seconds"] = Value::from(-1.0);
    fs::write(&bad, broken.to_string()).expect("written");
    simulate(&["--profile", bad.to_str().expect("text")]).expect_error(&["pre[1].seconds"]);
}
