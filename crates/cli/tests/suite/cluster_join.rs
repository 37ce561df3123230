//! Workers from elsewhere join in any order, with or without the model. Strangers that connect to
//! the port are sent away without disturbing anything.

use crate::cluster_support::{Dispatcher, LOOK, Running, TOKEN, TOKEN_VARIABLE, worker};
use crate::common::{Case, Random, glinthawk, lines_in, mixed_requests};
use glinthawk_model::testing;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;

/// Two slices with a Tier-2 node each.
const TWO_BY_ONE: [&str; 4] = ["--tier1", "2", "--workers", "4"];

/// Slow enough, without using a core, to be met half-way.
const UNHURRIED: [&str; 6] = ["--batch", "8", "--flights", "2", "--delay", "1ms"];

fn expected(case: &Case) -> Vec<String> {
    case.run(&[]).expect(0);
    let results = case.results();
    fs::remove_file(case.output()).expect("the output of one process");
    results
}

fn finish(case: &Case, dispatcher: Running, workers: Vec<Running>, expected: &[String]) {
    dispatcher.finish().expect(0);
    for worker in workers {
        worker.finish().expect(0);
    }
    assert!(case.results() == expected, "other results than one process");
    fs::remove_file(case.output()).expect("the output of the cluster");
}

#[test]
fn workers_join_in_any_order() {
    let case = Case::new(mixed_requests(60, 4, 16));
    let expected = expected(&case);
    const ORDERS: [[&[&str]; 4]; 4] = [
        [&["--tier", "1"], &["--tier", "1"], &["--tier", "2"], &["--tier", "2"]],
        [&["--tier", "2"], &["--tier", "1"], &["--tier", "2"], &["--tier", "1"]],
        [&["--tier", "2"], &["--tier", "2"], &[], &[]],
        [&[], &[], &[], &[]],
    ];
    for address in ["127.0.0.1:0", "[::1]:0"] {
        if TcpListener::bind(address).is_err() {
            eprintln!("skipped: no {address} here");
            continue;
        }
        for order in ORDERS {
            let dispatcher = Dispatcher::listen(&case, address, &TWO_BY_ONE);
            let join = |options: &&[&str]| {
                let worker = dispatcher.worker(options);
                sleep(Duration::from_millis(20)); // so that they mostly come in this order
                worker
            };
            let workers: Vec<Running> = order.iter().map(join).collect();
            finish(&case, dispatcher.running, workers, &expected);
        }
    }
}

/// Threads that compute side by side in every process, of a Tier 1 with four threads and a Tier 2 with three.
#[test]
fn threads_of_workers_compute_side_by_side() {
    let case = Case::new(mixed_requests(300, 4, 16));
    let expected = expected(&case);
    let stats = case.path("stats.json");
    let path = stats.to_str().expect("a plain path");
    let shapes: [&[&str]; 3] = [
        &["--tier1", "1", "--tier2", "0"],
        &["--tier1", "2", "--tier2", "1", "--flights", "2"],
        &["--tier1", "1", "--tier2", "1", "--hybrid", "--flights", "1"],
    ];
    for (shape, (tier1, tier2)) in shapes.into_iter().zip([(1, 0), (2, 2), (1, 1)]) {
        let options = [shape, &["--stats", path]].concat();
        let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &options);
        let join = |tier: &'static str, threads: &'static str| {
            dispatcher.worker(&["--tier", tier, "--threads", threads])
        };
        let mut workers: Vec<Running> = (0..tier1).map(|_| join("1", "4")).collect();
        workers.extend((0..tier2).map(|_| join("2", "3")));
        finish(&case, dispatcher.running, workers, &expected);
        let stats: Value =
            serde_json::from_str(&fs::read_to_string(&stats).expect("statistics")).expect("JSON");
        let shares = stats["nodes"].as_array().expect("a list of nodes");
        let of_tier1 = shares
            .iter()
            .filter(|share| share["name"].as_str().is_some_and(|name| name.starts_with("tier1")));
        let strands = of_tier1.count() / tier1;
        assert!(strands > 1, "{shape:?}: {shares:?}");
    }
}

#[test]
fn workers_may_be_there_before_the_dispatcher() {
    let case = Case::new(mixed_requests(20, 4, 16));
    let expected = expected(&case);
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = address.expect("a free port").to_string();
    let start = |_| Running::start(&mut worker(&address, &[]));
    let workers: Vec<Running> = (0..4).map(start).collect();
    let dispatcher = Dispatcher::listen(&case, &address, &TWO_BY_ONE);
    finish(&case, dispatcher.running, workers, &expected);
}

/// Checks the first words of each line that a worker said.
#[track_caller]
fn expect_said(stderr: &str, expected: &[&str]) {
    let begins = |(line, expected): (&str, &&str)| line.starts_with(*expected);
    let lines = stderr.lines();
    assert!(lines.clone().count() == expected.len() && lines.zip(expected).all(begins), "{stderr}");
}

#[test]
fn a_worker_says_what_it_does() {
    let case = Case::new(mixed_requests(20, 4, 16));
    let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &["--tier1", "1", "--tier2", "1"]);
    let workers = [dispatcher.worker(&["--tier", "1"]), dispatcher.worker(&["--tier", "2"])];
    dispatcher.running.finish().expect(0);
    let [tier1, tier2] = workers.map(|worker| worker.finish().expect(0).stderr);
    let loading = "loading ";
    expect_said(&tier1, &["dialling 127.", "joined as tier1-0, ", loading, "ready", "done: "]);
    let contexts = "16.0 MiB for contexts";
    expect_said(&tier2, &["dialling 127.", "joined as tier2-0-0, ", contexts, "ready", "done: "]);
    assert!(tier1.contains("one of 1 Tier-1 node: layers 1 to "), "{tier1}");
    // Local processes are as quiet as if there were none.
    let local = case.run(&["--tier1", "1", "--tier2", "1", "--overwrite"]).expect(0);
    assert!(!local.stderr.contains("tier"), "{}", local.stderr);
}

#[test]
fn a_worker_that_stays_serves_one_job_after_another() {
    let case = Case::new(mixed_requests(20, 4, 16));
    let expected = expected(&case);
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = address.expect("a free port").to_string();
    let start = |_| Running::start(&mut worker(&address, &["--stay"]));
    let mut workers: Vec<Running> = (0..2).map(start).collect();
    for _ in 0..2 {
        let dispatcher = Dispatcher::listen(&case, &address, &["--tier1", "1", "--workers", "2"]);
        finish(&case, dispatcher.running, Vec::new(), &expected);
    }
    for mut worker in workers.drain(..) {
        assert!(!worker.has_ended(), "it did not stay");
        worker.signal(rustix::process::Signal::TERM);
        let ended = worker.finish();
        assert_eq!(ended.code, Some(0), "without a role, it ends at once: {}", ended.stderr);
        assert_eq!(ended.stderr.matches("joined as tier").count(), 2, "{}", ended.stderr);
        assert!(ended.stderr.contains("done: "), "{}", ended.stderr);
    }
}

#[test]
fn too_many_of_one_tier_are_said() {
    let case = Case::new(mixed_requests(3, 4, 8));
    let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &["--tier1", "1", "--workers", "2"]);
    let workers = [dispatcher.worker(&["--tier", "2"]), dispatcher.worker(&["--tier", "2"])];
    let failed = dispatcher.running.finish().expect(1);
    let wanted =
        "error: 1 Tier-1 and 1 Tier-2 nodes are needed, and the workers that joined can be 0 and 2";
    assert!(failed.stderr.contains(wanted), "{}", failed.stderr);
    for worker in workers {
        let left = worker.finish().expect(1);
        assert!(left.stderr.contains("the dispatcher is gone"), "{}", left.stderr);
    }
}

#[test]
fn a_worker_without_memory_is_sent_away() {
    let case = Case::new(mixed_requests(20, 4, 16));
    let expected = expected(&case);
    let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &["--tier1", "1", "--workers", "2"]);
    let small =
        ["worker", "--join", &dispatcher.address, "--tier", "2", "--context-memory", "1KiB"];
    let small = Running::start(glinthawk(small).env(TOKEN_VARIABLE, TOKEN));
    small.finish().expect(1);
    let workers = [dispatcher.worker(&["--tier", "2"]), dispatcher.worker(&["--tier", "1"])];
    let finished = dispatcher.running.finish().expect(0);
    assert!(finished.stderr.contains("an attention worker has 1.0 KiB"), "{}", finished.stderr);
    for worker in workers {
        worker.finish().expect(0);
    }
    assert!(case.results() == expected, "other results than one process");
}

#[test]
fn strangers_are_sent_away_and_the_job_goes_on() {
    let case = Case::new(mixed_requests(120, 4, 16));
    let expected = expected(&case);
    let options = [&["--tier1", "1", "--workers", "2"], &UNHURRIED[..]].concat();
    let mut dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &options);

    let mut silent = vec![throw_garbage(&dispatcher.address, 0)];
    refused_worker(&dispatcher.address);
    let tier2 = dispatcher.worker(&["--tier", "2"]);
    silent.push(throw_garbage(&dispatcher.address, 1));
    let tier1 = dispatcher.worker(&["--tier", "1"]);
    // While they load, and while they work.
    let surplus = dispatcher.worker(&[]);
    silent.push(throw_garbage(&dispatcher.address, 2));
    dispatcher.running.wait_for_lines(&case.output(), 1);
    refused_worker(&dispatcher.address);
    let late = dispatcher.worker(&[]);
    for seed in 3..20 {
        silent.push(throw_garbage(&dispatcher.address, seed));
    }
    assert!(lines_in(&case.output()) < 120, "all was over before it was disturbed");

    let finished = dispatcher.running.finish().expect(0);
    assert!(!finished.stderr.contains('\u{1b}'), "colours in a log: {}", finished.stderr);
    for reason in ["wrong cluster secret", "not a glinthawk hello"] {
        assert!(finished.stderr.contains(reason), "\"{reason}\" is missing: {}", finished.stderr);
    }
    // Whichever two were there first got the places.
    let ended = [tier2, tier1, surplus, late].map(|worker| worker.finish().expect(0).stderr);
    let (working, left): (Vec<_>, Vec<_>) =
        ended.into_iter().partition(|said| said.contains("joined as"));
    assert_eq!((working.len(), left.len()), (2, 2), "two of four get a place");
    assert!(left.iter().all(|said| said.contains("needed no further worker")), "{left:?}");
    assert!(case.results() == expected, "other results than one process");
}

/// A worker with another secret learns why it cannot join.
fn refused_worker(address: &str) {
    let mut command = worker(address, &[]);
    let mut refused =
        Running::start(command.env(TOKEN_VARIABLE, "another secret of the tests")).finish();
    let dialling = format!("dialling {address}\n");
    refused.stderr = refused.stderr.strip_prefix(&dialling).expect("it dials first").to_owned();
    refused.expect_error(&[address, "wrong cluster secret"]);
}

/// Random bytes of several lengths and a broken connection after each; and a connection that says
/// nothing, which is returned.
fn throw_garbage(address: &str, seed: u64) -> TcpStream {
    let mut random = Random(seed);
    for length in [1, 7, 64, 1000, 100_000] {
        let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
        let mut stream = TcpStream::connect(address).expect("the dispatcher listens");
        // It hangs up as soon as it sees what this is.
        _ = stream.write_all(&bytes);
    }
    TcpStream::connect(address).expect("the dispatcher listens")
}

#[test]
fn a_worker_without_the_model_is_given_its_weights() {
    let Some(model) = testing::default_model() else { return };
    let requests = r#"{"custom_id":"greedy","prompt":"The sea is","temperature":0,"max_tokens":6}
{"custom_id":"sampled","prompt":"The hills are","seed":4,"max_tokens":6}
"#;
    let case = Case::new(requests);
    // Only the dispatcher can use a relative path: its workers are in other folders, and one of
    // these has a file of that name that is not the model.
    std::os::unix::fs::symlink(&model, case.path("model.gguf")).expect("the model is linked");
    let case = Case { model: "model.gguf".to_owned(), ..case };
    let memory = ["--context-memory", "16MiB", "--max-context", "128"];
    let run = |options: &[&str]| {
        let mut command = case.command(&[&memory, options].concat());
        command.current_dir(case.folder.path()).arg("--stats").arg(case.path("stats.json"));
        command
    };
    Running::start(&mut run(&[])).finish().expect(0);
    let expected = case.results();
    fs::remove_file(case.output()).expect("the output of one process");

    let dispatcher =
        Dispatcher::start(&mut run(&["--listen", "127.0.0.1:0", "--tier1", "2", "--workers", "4"]));
    let elsewhere = TempDir::new().expect("a folder");
    let other = TempDir::new().expect("a folder");
    fs::write(other.path().join("model.gguf"), "another model").expect("written");
    let join = |folder: &TempDir, tier: &str| {
        let mut command = worker(&dispatcher.address, &["--tier", tier]);
        Running::start(command.current_dir(folder).env("GLINTHAWK_CACHE", folder.path()))
    };
    let workers =
        vec![join(&elsewhere, "1"), join(&other, "1"), join(&elsewhere, "2"), join(&other, "2")];
    finish(&case, dispatcher.running, workers, &expected);

    let stats = fs::read(case.path("stats.json")).expect("there are statistics");
    let stats: Value = serde_json::from_slice(&stats).expect("statistics are JSON");
    let received = |node: &Value| node["received"]["control"]["bytes"].as_u64().expect("a count");
    let nodes = stats["nodes"].as_array().expect("a list of nodes");
    let bytes: Vec<u64> = nodes.iter().map(received).collect();
    // 135 million weights of two bytes; the embeddings are the classifier, at both ends.
    let (embeddings, all) = (49_152 * 576 * 2, 134_515_008 * 2);
    let tier1 = bytes[0] + bytes[1];
    assert!(tier1 > all + embeddings, "Tier 1 was sent {tier1} bytes");
    assert!(tier1 < (all + embeddings) * 101 / 100, "Tier 1 was sent {tier1} bytes");
    assert!(bytes[2] + bytes[3] < 100_000, "Tier 2 needs no weights: {bytes:?}");
}

#[test]
fn a_dispatcher_that_gives_up_waiting_says_so() {
    let case = Case::new(mixed_requests(3, 4, 8));
    let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &TWO_BY_ONE);
    let mut worker = dispatcher.worker(&[]);
    sleep(LOOK);
    assert!(!worker.has_ended());
    dispatcher.running.signal(rustix::process::Signal::INT);
    let stopped = dispatcher.running.finish().expect(1);
    assert!(stopped.stderr.contains("error: interrupted"), "{}", stopped.stderr);
    drop(worker); // may not have found the dispatcher in time, and would look for it for a while
}
