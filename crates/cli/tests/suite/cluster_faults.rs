//! A cluster whose processes are killed goes on with the lanes that are left, and starts them again. One
//! that is interrupted ends completely and keeps what it had finished. The same job continues in any
//! topology with identical bytes.

use crate::cluster_support::{CLUSTER, Dispatcher, LINES, Process, Running, Story, expect_gone};
use crate::common::{Case, Random, mixed_requests};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::os::unix::process::CommandExt;

impl Story {
    /// Starts the cluster; returns it and its workers once it has `lines` lines.
    fn start(&self, lines: usize) -> (Running, Vec<Process>) {
        let mut running = Running::start(&mut self.case.command(&CLUSTER));
        running.wait_for_lines(&self.case.output(), lines);
        let workers = running.process().children();
        assert_eq!(workers.len(), 4, "two slices with a Tier-2 node each");
        (running, workers)
    }

    /// What is there is a part of what is to be there, in whole lines.
    fn expect_part(&self, lines: usize) -> usize {
        let written = self.case.results();
        assert!(written.iter().all(|line| self.expected.contains(line)));
        assert!((lines..LINES).contains(&written.len()), "{} lines", written.len());
        written.len()
    }

    fn expect_resumed(&self, options: &[&str]) {
        let resumed = self.case.run(options).expect(0);
        assert!(resumed.stderr.contains("by an earlier run"), "{}", resumed.stderr);
        assert!(self.case.results() == self.expected, "{options:?}: other results");
    }
}

#[test]
fn each_killed_worker_is_started_again_and_the_job_goes_on() {
    let story = Story::new();
    let (mut running, mut workers) = story.start(10);
    workers.sort();
    // Each of the four in turn, in the order they were started.
    for (victim, name) in ["tier1-0", "tier1-1", "tier2-0-0", "tier2-1-0"].iter().enumerate() {
        let lines = 10 + 40 * victim + Random(victim as u64).below(30) as usize;
        running.wait_for_lines(&story.case.output(), lines);
        assert!(workers[victim].is_there(), "{name} has not been killed yet");
        workers[victim].kill();
    }
    let finished = running.finish().expect(0);
    assert!(finished.stderr.contains("tier1-0 is gone"), "{}", finished.stderr);
    assert!(finished.stderr.contains("has a node again after"), "{}", finished.stderr);
    assert!(story.case.results() == story.expected, "other results: {}", finished.stderr);
    expect_gone(&workers);
}

#[test]
fn a_killed_tier2_node_costs_its_contexts_only() {
    let story = Story::new();
    // Three lanes on each of two slices; one node of two lanes dies, each on another slice.
    let cluster =
        ["--tier1", "2", "--tier2", "3", "--batch", "4", "--flights", "2", "--delay", "2ms"];
    let stats = story.case.path("stats.json");
    let options = [&cluster[..], &["--stats", stats.to_str().expect("a path of ours")]].concat();
    let mut running = Running::start(&mut story.case.command(&options));
    running.wait_for_lines(&story.case.output(), 10);
    let mut workers = running.process().children();
    assert_eq!(workers.len(), 8, "two slices with three Tier-2 nodes each");
    workers.sort();
    workers[2].kill(); // tier2-0-0
    running.wait_for_lines(&story.case.output(), 40);
    workers[6].kill(); // tier2-1-1
    let finished = running.finish().expect(0);
    assert!(finished.stderr.contains("tier2-0-0 is gone"), "{}", finished.stderr);
    assert!(story.case.results() == story.expected, "other results");
    let stats: serde_json::Value =
        serde_json::from_slice(&fs::read(stats).expect("statistics")).expect("JSON");
    assert_eq!(stats["failures"], 2);
    expect_gone(&workers);
}

#[test]
fn a_killed_tier1_node_costs_its_steps_only() {
    let story = Story::new();
    // Two pipelines of two slices, each with a Tier-2 node: Tier 1 is started first, pipeline by pipeline.
    let stats = story.case.path("stats.json");
    let stats = ["--pipelines", "2", "--stats", stats.to_str().expect("a path of ours")];
    let mut running = Running::start(&mut story.case.command(&[&CLUSTER[..], &stats].concat()));
    running.wait_for_lines(&story.case.output(), 10);
    let mut workers = running.process().children();
    assert_eq!(workers.len(), 8, "two pipelines of four nodes");
    workers.sort();
    workers[3].kill(); // pipeline1-tier1-1
    let finished = running.finish().expect(0);
    let said = "pipeline1-tier1-1 is gone";
    assert!(finished.stderr.contains(said), "{}", finished.stderr);
    assert!(story.case.results() == story.expected, "other results");
    let stats: serde_json::Value =
        serde_json::from_slice(&fs::read(stats[3]).expect("statistics")).expect("JSON");
    assert_eq!((&stats["failures"], &stats["pipelines"]), (&1.into(), &2.into()));
    assert_eq!(stats["prompts_lost"], 0, "contexts are on Tier 2");
    expect_gone(&workers);
}

#[test]
fn a_killed_dispatcher_takes_its_workers_along() {
    let story = Story::new();
    let (running, workers) = story.start(20);
    running.process().kill();
    assert_eq!(running.finish().code, None);
    expect_gone(&workers);
    story.expect_part(20);
    story.expect_resumed(&[]);
}

#[test]
fn workers_end_though_nobody_reads_their_log() {
    // What a worker logs goes to its dispatcher. A log that cannot be written must not keep it alive.
    let story = Story::new();
    let options = ["--tier1", "1", "--tier2", "2", "--batch", "8", "--flights", "2"];
    let mut running = Running::start(story.case.command(&options).env("GLINTHAWK_LOG", "info"));
    running.wait_for_lines(&story.case.output(), 5);
    let workers = running.process().children();
    running.process().kill();
    running.finish();
    expect_gone(&workers);
}

#[test]
fn workers_from_elsewhere_end_with_a_killed_dispatcher() {
    let case = Case::new(mixed_requests(LINES as u64, 4, 16));
    let options = ["--workers", "2", "--batch", "8", "--delay", "2ms"];
    let mut dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &options);
    let workers = [dispatcher.worker(&[]), dispatcher.worker(&[])];
    dispatcher.running.wait_for_lines(&case.output(), 10);
    dispatcher.running.process().kill();
    dispatcher.running.finish();
    for worker in workers {
        let ended = worker.finish().expect(1);
        assert!(ended.stderr.contains("gone"), "{}", ended.stderr);
    }
}

#[test]
fn an_interrupted_cluster_ends_in_good_order() {
    let story = Story::new();
    let mut lines = 0;
    for whole_group in [false, true] {
        let mut command = story.case.command(&CLUSTER);
        let mut running = Running::start(command.process_group(0));
        running.wait_for_lines(&story.case.output(), lines + 20);
        let dispatcher = running.process();
        let workers = dispatcher.children();
        assert_eq!(workers.len(), 4);
        if whole_group {
            let group = Pid::from_raw(dispatcher.id() as i32).expect("an id");
            kill_process_group(group, Signal::INT).expect("the group is ours");
        } else {
            running.signal(Signal::INT);
        }
        let stopped = running.finish().expect(1);
        assert!(stopped.stderr.contains("the same command continues"), "{}", stopped.stderr);
        assert!(!stopped.stderr.contains("error"), "{}", stopped.stderr);
        assert!(!stopped.stderr.contains("did not leave"), "{}", stopped.stderr);
        expect_gone(&workers);
        lines = story.expect_part(lines + 20);
    }
    story.expect_resumed(&["--tier1", "1", "--tier2", "2"]);
}
