//! Workers that are lost while a job runs have their places taken by others, and workers leave in order. The job's bytes
//! are those of one undisturbed process.

mod cluster_support;
mod common;

use cluster_support::{CLUSTER, Dispatcher, Running, Story, worker};
use common::Random;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::net::TcpListener;

impl Story {
    /// A dispatcher that waits for workers, and writes statistics.
    fn listen(&self, options: &[&str]) -> Dispatcher {
        let stats = self.case.path("stats.json");
        let stats = ["--stats", stats.to_str().expect("a plain path")];
        Dispatcher::listen(&self.case, "127.0.0.1:0", &[&CLUSTER, options, &stats].concat())
    }

    /// The job ended with the expected results; returns its statistics and what it said.
    #[track_caller]
    fn expect_done(&self, running: Running) -> (Value, String) {
        let finished = running.finish().expect(0);
        assert!(self.case.results() == self.expected, "other results: {}", finished.stderr);
        let stats = fs::read(self.case.path("stats.json")).expect("statistics");
        (serde_json::from_slice(&stats).expect("JSON"), finished.stderr)
    }
}

/// A worker of a tier.
fn join(dispatcher: &Dispatcher, tier: &str) -> Running {
    Running::start_until(&mut worker(&dispatcher.address, &["--tier", tier]), "dialling").0
}

/// A Tier-1 worker that joins again if it is sent away: one that loads while its neighbour is lost is.
fn join_to_stay(dispatcher: &Dispatcher) -> Running {
    let mut worker = worker(&dispatcher.address, &["--tier", "1", "--stay"]);
    Running::start_until(&mut worker, "dialling").0
}

#[test]
fn a_spare_takes_the_place_of_a_tier1_node_and_contexts_are_kept() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--spares", "1"]);
    let tier1: Vec<Running> = (0..3).map(|_| join_to_stay(&dispatcher)).collect();
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    // Whichever of the three waits: two of them have a place, and one of those is killed.
    tier1[0].process().kill();
    dispatcher.running.wait_for_lines(&story.case.output(), 60);
    let another = join_to_stay(&dispatcher);
    tier1[1].process().kill();
    let (stats, said) = story.expect_done(dispatcher.running);
    assert_eq!(stats["prompts_lost"], 0, "{said}");
    assert_eq!(stats["failures"], stats["nodes_replaced"], "{said}");
    assert!(stats["failures"].as_u64() >= Some(1), "{said}");
    assert!(said.contains("has a node again after"), "{said}");
    drop(another);
}

#[test]
fn a_tier2_node_that_joins_opens_a_lost_lane_again() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--pipelines", "2"]);
    let _tier1: Vec<Running> = (0..4).map(|_| join(&dispatcher, "1")).collect();
    let tier2: Vec<Running> = (0..4).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    tier2[1].process().kill();
    dispatcher.running.wait_for_lines(&story.case.output(), 40);
    let _another = join(&dispatcher, "2");
    let (stats, said) = story.expect_done(dispatcher.running);
    assert_eq!((&stats["failures"], &stats["nodes_replaced"]), (&1.into(), &1.into()), "{said}");
    assert!(said.contains("1 lanes opened"), "{said}");
    assert_eq!(stats["nodes"].as_array().map(Vec::len), Some(8), "{said}");
}

#[test]
fn without_another_worker_the_job_stops_and_continues_later() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--replace-within", "100ms"]);
    let tier1: Vec<Running> = (0..2).map(|_| join(&dispatcher, "1")).collect();
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    tier1[0].process().kill();
    let failed = dispatcher.running.finish().expect(1);
    let errors: Vec<&str> =
        failed.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("one error, not: {}", failed.stderr) };
    assert!(error.starts_with("error: worker tier1-"), "{error}");
    assert!(error.contains("the same command continues"), "{error}");
    let resumed = story.case.run(&[]).expect(0);
    assert!(resumed.stderr.contains("by an earlier run"), "{}", resumed.stderr);
    assert!(story.case.results() == story.expected, "other results");
}

#[test]
fn a_worker_that_is_asked_to_end_leaves_when_its_contexts_have() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--pipelines", "2"]);
    let _tier1: Vec<Running> = (0..4).map(|_| join(&dispatcher, "1")).collect();
    let mut tier2: Vec<Running> = (0..4).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    let leaving = tier2.remove(2);
    leaving.signal(Signal::TERM);
    let left = leaving.finish().expect(0);
    assert!(left.stderr.contains("leaving, when nothing here is needed"), "{}", left.stderr);
    let (stats, said) = story.expect_done(dispatcher.running);
    assert!(said.contains(" has left"), "{said}");
    assert_eq!((&stats["failures"], &stats["prompts_lost"]), (&0.into(), &0.into()), "{said}");
}

#[test]
fn workers_that_stay_serve_the_dispatcher_that_comes_after_a_killed_one() {
    let story = Story::new();
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = address.expect("a free port").to_string();
    let start = |_| Running::start(&mut worker(&address, &["--stay"]));
    let _workers: Vec<Running> = (0..4).map(start).collect();
    let mut dispatcher = Dispatcher::listen(&story.case, &address, &CLUSTER);
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    dispatcher.running.process().kill();
    dispatcher.running.finish();
    let dispatcher = Dispatcher::listen(&story.case, &address, &CLUSTER);
    let resumed = dispatcher.running.finish().expect(0);
    assert!(resumed.stderr.contains("by an earlier run"), "{}", resumed.stderr);
    assert!(story.case.results() == story.expected, "other results");
}

/// Local workers are killed again and again; each is started again.
#[test]
fn local_workers_that_are_killed_are_started_again() {
    let story = Story::new();
    let stats = story.case.path("stats.json");
    let options = [&CLUSTER[..], &["--stats", stats.to_str().expect("a plain path")]].concat();
    let mut running = Running::start(&mut story.case.command(&options));
    let mut random = Random(7);
    for fault in 1..=6 {
        running.wait_for_lines(&story.case.output(), fault * 25);
        let workers = running.process().children();
        if let Some(victim) = workers.get(random.below(4) as usize) {
            victim.kill();
        }
    }
    let (stats, said) = story.expect_done(running);
    assert!(stats["failures"].as_u64() >= Some(3), "{said}");
    assert!(stats["nodes_replaced"].as_u64() >= Some(2), "{said}");
}
