//! `profile`, `simulate` and `plan` as a user meets them, and plans that `run` takes.

use crate::common::{Case, Finished, TINY, glinthawk, mixed_requests};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
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
fn what_is_read_is_not_written() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("both");
    let both = path.to_str().expect("a path of ours");
    for options in [
        &["plan", "--model", TINY, "--cluster", both, "--workload", "no.csv", "-o", both][..],
        &["plan", "--model", TINY, "--cluster", "no.toml", "--workload", both, "-o", both],
        &["simulate", "--profile", both, "--trace", both],
        &["simulate", "--device", "t4", "--workload", both, "--trace", both],
    ] {
        fs::write(&path, "precious").expect("written");
        let refused = Finished::of(&mut glinthawk(options.iter().copied())).expect(2);
        assert!(refused.stderr.contains("both"), "{}", refused.stderr);
        assert_eq!(fs::read_to_string(&path).expect("there"), "precious", "{options:?}");
    }
}

#[test]
fn a_profile_in_the_cache_is_named_after_the_machine() {
    let cache = TempDir::new().expect("a folder");
    let mut command = glinthawk(["profile", "--brief", "--threads", "1", "--model", TINY]);
    let finished = Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0);
    assert!(finished.stderr.contains("profile in"), "{}", finished.stderr);
    for line in finished.stdout.lines() {
        assert!(line.chars().count() <= 80, "wider than 80 columns: {line}");
    }
    let kept: Vec<_> = fs::read_dir(cache.path().join("profiles")).expect("a folder").collect();
    assert_eq!(kept.len(), 1);

    // With it, `run` forecasts a job, and may choose another batch for it: the bytes are the same.
    let case = Case::new(mixed_requests(40, 20, 12));
    let run = |options: &[&str]| {
        let mut command = case.command(options);
        let command = command.args(["--threads", "1", "--overwrite"]);
        let said = Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0).stderr;
        assert!(said.contains("forecast from a profile of this machine"), "{said}");
        case.results()
    };
    assert_eq!(run(&[]), run(&["--batch", "9"]));

    // A damaged one is named and ignored.
    let path = kept[0].as_ref().expect("a file").path();
    fs::write(&path, "{\"version\": 2}").expect("written");
    let mut command = case.command(&["--threads", "1", "--overwrite"]);
    let said = Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0).stderr;
    assert!(said.contains("ignoring a damaged profile") && said.contains("profiles/"), "{said}");
    assert!(!said.contains("forecast from a profile"), "{said}");
}

#[test]
fn a_profile_chooses_the_rows_of_a_chunk() {
    let cache = TempDir::new().expect("a folder");
    let mut command = glinthawk(["profile", "--brief", "--threads", "1", "--model", TINY]);
    Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0);
    let kept = fs::read_dir(cache.path().join("profiles")).expect("a folder").next();
    let path = kept.expect("one").expect("it can be read").path();
    // If a chunk takes as long however many rows it has, few and large ones are best.
    let mut profile = json(path.to_str().expect("text"));
    for curve in profile["prefill"].as_array_mut().expect("curves") {
        for point in curve["points"].as_array_mut().expect("points") {
            point["seconds"] = 1.0.into();
        }
    }
    fs::write(&path, profile.to_string()).expect("written");
    let tokens = vec!["7"; 600].join(",");
    let case = Case::new(format!("{{\"prompt\":[{tokens}],\"max_tokens\":80}}\n"));
    let says = |options: &[&str]| {
        let mut command = case.command(options);
        let command = command.args(["--threads", "1", "--overwrite"]);
        let said = Finished::of(command.env("GLINTHAWK_CACHE", cache.path())).expect(0).stderr;
        said.contains("512 prefill rows of a prompt at a time instead of 256")
    };
    assert!(says(&["--batch", "512"]));
    assert!(!says(&["--batch", "512", "--chunk", "256"]));
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
    assert!(json(trace)["traceEvents"].as_array().is_some_and(|spans| spans.len() > 100));
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
    let hybrid = simulate(&["--device", "t4", "--hybrid"]).expect(2);
    assert!(hybrid.stderr.contains("give --tier2 1 or more"), "{}", hybrid.stderr);
    simulate(&["--device", "t4", "--prompts", "many"]).expect_error(&["--prompts many"]);
    simulate(&["--device", "t4", "--tier1", "50"]).expect_error(&["--tier1 50", "layers"]);
    simulate(&["--profile", "nowhere.json"]).expect_error(&["nowhere.json"]);
    let mut crowded = glinthawk(["simulate", "--model", "dummy:llama2-7b", "--device", "t4"]);
    let said = Finished::of(&mut crowded).expect(0).stderr;
    let too_many =
        "with 256 contexts of 1,024 tokens on each attention worker, whose memory holds 4:";
    assert!(said.contains(too_many), "{said}");
    let roomy = Finished::of(crowded.args(["--batch", "4"])).expect(0).stderr;
    assert_eq!(roomy, "", "four contexts fit");
    let mut large = glinthawk(["simulate", "--model", "dummy:llama2-70b", "--device", "t4"]);
    Finished::of(&mut large).expect_error(&["does not fit", "t4 of 14.75 GiB", "10 such nodes"]);
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

/// Plans for one Tier-1 and one Tier-2 node with the small shape's profile; the plan's file.
fn plan(case: &Case) -> PathBuf {
    let (cluster, lengths) = (case.path("cluster.toml"), case.path("lengths.csv"));
    let pool = |name: &str| {
        format!(
            "[{name}]\nprofile = \"{}\"\nnodes = 1\nmemory_gib = 0.01\nbandwidth_gbps = 10\nrtt_ms = 0.1\nusd_per_hour = 2\n",
            profile()
        )
    };
    fs::write(&cluster, pool("tier1") + &pool("[tier2]")).expect("written");
    fs::write(&lengths, "prompt_tokens,output_tokens\n20,30\n4,40\n").expect("written");
    let path = case.path("plan.toml");
    let mut command = glinthawk(["plan", "--model", TINY, "--batch-max", "64"]);
    command.arg("--cluster").arg(cluster).arg("--workload").arg(lengths).arg("-o").arg(&path);
    Finished::of(&mut command).expect(0);
    path
}

fn edited(path: &Path, edit: impl FnOnce(&mut toml::Table)) {
    let mut table: toml::Table =
        fs::read_to_string(path).expect("it is there").parse().expect("it is TOML");
    edit(&mut table);
    fs::write(path, table.to_string()).expect("written");
}

fn run_plan(case: &Case, plan: &Path, options: &[&str]) -> Finished {
    let mut command = glinthawk(["run", "--output"]);
    command.arg(case.output()).arg(case.input()).arg("--plan").arg(plan).args(options);
    Finished::of(&mut command)
}

/// Changes whose kernels a plan's forecast is of.
fn set_kernels(plan: &mut toml::Table, kernels: &str) {
    let forecast = plan["forecast"].as_table_mut().expect("a table");
    forecast.insert("kernels".to_owned(), vec![kernels].into());
}

#[test]
fn a_plan_for_other_devices_says_so() {
    let case = Case::new(mixed_requests(4, 4, 8));
    let path = plan(&case);
    edited(&path, |plan| set_kernels(plan, "t4: analytic (a roofline)"));
    let said = run_plan(&case, &path, &["--device", "cpu"]).expect(0).stderr;
    let warning =
        "the plan was made for t4, not for the devices here, so its forecast does not hold\n";
    assert_eq!(said.matches(warning).count(), 1, "{said}");
    assert!(!said.contains("forecast from the plan"), "{said}");
}

#[test]
fn a_plan_runs_to_the_same_bytes() {
    let case = Case::new(mixed_requests(40, 10, 20));
    let path = plan(&case);
    edited(&path, |plan| {
        // Whatever the planner chose here: two tiers, and room for what the requests are.
        for (field, value) in [
            ("tier1", 1),
            ("tier2", 2),
            ("pool", 0),
            ("batch", 5),
            ("local_rows", 0),
            ("max_context", 128),
        ] {
            plan.insert(field.to_owned(), value.into());
        }
        let context = plan["tier2_context"].as_table_mut().expect("a table");
        context.insert("bytes".to_owned(), (1 << 24).into());
        context.insert("seats".to_owned(), 20.into());
        set_kernels(plan, "here: analytic");
    });
    let stats = case.path("stats.json");
    let stats = stats.to_str().expect("text");
    let planned = run_plan(&case, &path, &["--stats", stats]).expect(0);
    let shorter = "contexts hold 128 tokens by the plan, and the model's could hold 1,024";
    assert!(planned.stderr.contains(shorter), "{}", planned.stderr);
    let by_plan = case.results();
    let figures = json(stats);
    assert_eq!((&figures["tier1_nodes"], &figures["tier2_nodes"]), (&1.into(), &2.into()));
    assert_eq!((&figures["batch"], &figures["max_context"]), (&5.into(), &128.into()));
    // No profile of this machine is in the cache for a thread each, or there is one: both forecast.
    assert!(planned.stderr.contains("forecast from"), "{}", planned.stderr);
    assert!(planned.stderr.contains(", $"), "{}", planned.stderr);
    assert!(figures["forecast"]["seconds"].as_f64() > Some(0.0));
    fs::remove_file(case.output()).expect("it was there");
    case.run(&["--max-context", "128"]).expect(0);
    assert_eq!(by_plan, case.results());
}

#[test]
fn plans_that_cannot_be_run_name_the_field() {
    let case = Case::new("{\"prompt\":\"hello\",\"max_tokens\":2}\n");
    type Edit = (&'static str, &'static str, toml::Value, &'static str);
    let cases: [Edit; 6] = [
        ("", "flights", 0.into(), "flights: must be at least 1"),
        ("", "slices", vec![7].into(), "slices: hold 7 layers"),
        ("", "model", "dummy:huge".into(), "huge"),
        ("", "max_context", 1_000_000.into(), "--max-context 1000000"),
        ("", "chunk", 2_000_000_000.into(), "chunk: 2000000000 is more"),
        ("tier1_context", "bytes", 16.into(), "context"),
    ];
    for (table, field, value, expected) in cases {
        let path = plan(&case);
        edited(&path, |plan| {
            for (field, value) in [("tier2", 0), ("batch", 0), ("local_rows", 4)] {
                plan.insert(field.to_owned(), value.into());
            }
            let seats = plan["tier1_context"].as_table_mut().expect("a table");
            seats.insert("seats".to_owned(), 4.into());
            let table = match table {
                "" => plan,
                name => plan[name].as_table_mut().expect("a table"),
            };
            table.insert(field.to_owned(), value);
        });
        run_plan(&case, &path, &[]).expect_error(&[expected]);
    }
    let path = plan(&case);
    edited(&path, |plan| {
        plan.insert("flight".to_owned(), 3.into());
    });
    let unknown = run_plan(&case, &path, &[]).expect(1);
    assert!(unknown.stderr.contains("unknown field `flight`"), "{}", unknown.stderr);
    for option in ["--batch", "--tier1", "--model"] {
        let finished = run_plan(&case, &path, &[option, "1"]).expect(2);
        assert!(finished.stderr.contains("cannot be used with"), "{}", finished.stderr);
    }
}

#[test]
fn a_plan_is_simulated_to_the_time_it_says() {
    let case = Case::new("");
    let path = plan(&case);
    let table: toml::Table = fs::read_to_string(&path).expect("written").parse().expect("TOML");
    let said = table["forecast"]["job_seconds"].as_float().expect("seconds");
    let mut command = glinthawk(["simulate", "--json", "--plan"]);
    command.arg(&path).arg("--cluster").arg(case.path("cluster.toml"));
    command.arg("--workload").arg(case.path("lengths.csv"));
    let finished = Finished::of(&mut command).expect(0);
    // As text: serde_json reads some numbers off by their last bit.
    let seconds = format!("\"seconds\": {said},");
    assert!(finished.stdout.contains(&seconds), "{seconds} {}", finished.stdout);
}

#[test]
fn requests_are_read_as_run_reads_them() {
    // Two choices are two prompts; a chat has its template, which dummy models lack; a bad line takes no time.
    let case = Case::new(
        "{\"prompt\":\"hello\",\"max_tokens\":3,\"n\":2}\n{\"prompt\":\"hi\",\"max_tokens\":5}\n{\"promt\":\"x\"}\n",
    );
    let mut command = glinthawk(["simulate", "--json", "--model", TINY, "--device", "t4"]);
    let finished = Finished::of(command.arg("--workload").arg(case.input())).expect(0);
    let job: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    // Bytes are tokens here.
    assert_eq!(job["job"]["tokens"].as_f64(), Some((2 * (5 + 3) + 2 + 5) as f64));
    assert!(
        finished.stderr.contains("1 line cannot be run and takes no time"),
        "{}",
        finished.stderr
    );
}

#[test]
fn options_of_plan_are_checked() {
    let case = Case::new("");
    plan(&case);
    let run = |options: &[&str]| {
        let mut command = glinthawk(["plan", "--model", TINY]);
        command.arg("--cluster").arg(case.path("cluster.toml"));
        command.arg("--workload").arg(case.path("lengths.csv"));
        Finished::of(command.args(options))
    };
    for hours in ["-3", "0", "nan", "inf", "soon"] {
        let finished = run(&["--objective", "deadline", "--hours", hours]).expect(2);
        assert!(finished.stderr.contains("--hours"), "{}", finished.stderr);
    }
    for option in ["--chunk", "--batch-max"] {
        let finished = run(&[option, "0"]).expect(2);
        assert!(finished.stderr.contains(option), "{}", finished.stderr);
    }
    let missed = run(&["--objective", "deadline", "--hours", "1e-9"]);
    missed.expect_error(&[
        "no configuration meets the deadline",
        "the fastest found takes",
        "3.6 us",
    ]);
    // Hours alone are a deadline; hours with another objective are a mistake.
    run(&["--hours", "1e-9"]).expect_error(&["no configuration meets the deadline"]);
    run(&["--hours", "5"]).expect(0);
    for objective in ["throughput", "cost"] {
        let finished = run(&["--objective", objective, "--hours", "5"]).expect(2);
        assert!(finished.stderr.contains("--objective deadline"), "{}", finished.stderr);
    }
    for name in ["empty.csv", "empty.jsonl"] {
        fs::write(case.path(name), "").expect("written");
        let mut command = glinthawk(["plan", "--model", TINY]);
        command.arg("--cluster").arg(case.path("cluster.toml"));
        let finished = Finished::of(command.arg("--workload").arg(case.path(name)));
        finished.expect_error(&[name, "the file is empty"]);
    }
}

#[test]
fn lengths_beyond_the_context_give_a_plan_that_runs() {
    let case = Case::new("{\"prompt\":\"hello\",\"max_tokens\":2}\n");
    plan(&case);
    fs::write(case.path("lengths.csv"), "prompt_tokens,output_tokens\n20,900000\n4,40\n")
        .expect("written");
    let path = case.path("long.toml");
    let mut command = glinthawk(["plan", "--model", TINY, "--batch-max", "64"]);
    command.arg("--cluster").arg(case.path("cluster.toml"));
    command.arg("--workload").arg(case.path("lengths.csv")).arg("-o").arg(&path);
    let finished = Finished::of(&mut command).expect(0);
    assert!(
        finished.stderr.contains("the completions of 1 prompt cut short"),
        "{}",
        finished.stderr
    );
    run_plan(&case, &path, &[]).expect(0);
}

#[test]
fn impossible_plans_say_what_would_be_needed() {
    let case = Case::new("");
    let (cluster, lengths) = (case.path("cluster.toml"), case.path("lengths.csv"));
    fs::write(&lengths, "prompt_tokens,output_tokens\n1000,1000\n").expect("written");
    let run = |nodes: usize, memory: f64| {
        let text = format!(
            "[tier1]\ndevice = \"t4\"\nnodes = {nodes}\nmemory_gib = {memory}\nbandwidth_gbps = 8\nrtt_ms = 1\n"
        );
        fs::write(&cluster, text).expect("written");
        let mut command = glinthawk(["plan", "--model", "dummy:llama2-7b"]);
        Finished::of(command.arg("--cluster").arg(&cluster).arg("--workload").arg(&lengths))
    };
    run(1, 4.0).expect_error(&["the model does not fit", "GiB"]);
    // 12.6 GiB of weights, 1 GiB for a context of 2,000 tokens.
    run(1, 12.7).expect_error(&["no context memory is left", "GiB"]);
    run(1, 20.0).expect(0);
}
