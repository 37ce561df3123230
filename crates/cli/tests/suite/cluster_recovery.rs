//! Workers that are lost while a job runs have their places taken by others, and workers leave in order. The job's bytes
//! are those of one undisturbed process.

use crate::cluster_support::{CLUSTER, Dispatcher, Process, Running, Story, expect_gone, worker};
use crate::common::Random;
use crate::liar_support::Liar;
use glinthawk_cluster::Control;
use glinthawk_flight::Kind;
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

#[test]
fn a_spare_takes_the_place_of_a_tier1_node_and_contexts_are_kept() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--spares", "1"]);
    let tier1: Vec<Running> = (0..3).map(|_| join(&dispatcher, "1")).collect();
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    // Whichever of the three waits: two of them have a place, and one of those is killed.
    tier1[0].process().kill();
    dispatcher.running.wait_for_lines(&story.case.output(), 60);
    let another = join(&dispatcher, "1");
    tier1[1].process().kill();
    let (stats, said) = story.expect_done(dispatcher.running);
    assert_eq!(stats["prompts_lost"], 0, "{said}");
    assert_eq!(stats["failures"], stats["nodes_replaced"], "{said}");
    assert!(stats["failures"].as_u64() >= Some(1), "{said}");
    assert!(said.contains("has a node again after"), "{said}");
    // Whoever of the others had no place at the end was not needed.
    another.finish().expect(0);
}

#[test]
fn a_spare_takes_the_place_of_a_node_that_is_lost_while_the_cluster_loads() {
    for tier in [1, 2] {
        let story = Story::new();
        let dispatcher = story.listen(&["--spares", "2"]);
        let lost = Liar::join(&dispatcher.address);
        // With the one that will be lost there are three of each tier: one of each is a spare.
        let tiers = if tier == 1 { ["1", "1", "2", "2", "2"] } else { ["1", "1", "1", "2", "2"] };
        let workers = tiers.map(|tier| join(&dispatcher, tier));
        lost.offer_as(tier, None);
        drop(lost);
        let (stats, said) = story.expect_done(dispatcher.running);
        let counted = (&stats["failures"], &stats["nodes_replaced"]);
        assert_eq!(counted, (&1.into(), &1.into()), "{said}");
        assert!(said.contains("while the cluster loads, "), "{said}");
        workers.into_iter().for_each(|worker| _ = worker.finish().expect(0));
    }
}

#[test]
fn a_spare_that_loads_while_its_neighbour_is_lost_goes_on() {
    let story = Story::new();
    let mut dispatcher = story.listen(&[]);
    let tier1: Vec<Running> = (0..2).map(|_| join(&dispatcher, "1")).collect();
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    tier1[0].process().kill();
    let spare = Liar::join(&dispatcher.address);
    let role = spare.offer(1);
    tier1[1].process().kill();
    // Now both Tier-1 nodes are lost, and the one that loads is told of the other's next host.
    let _another = join(&dispatcher, "1");
    let told = || Control::read(&spare.next(Kind::Control)).expect("control");
    while !matches!((role.slice, told()), (0, Control::Dial(..)) | (1, Control::Await(None, _))) {}
    drop(spare);
    let _third = join(&dispatcher, "1");
    let (stats, said) = story.expect_done(dispatcher.running);
    let counted = (&stats["failures"], &stats["nodes_replaced"]);
    assert_eq!(counted, (&2.into(), &2.into()), "{said}");
}

/// It lives, says so, and never answers.
#[test]
fn a_node_that_hangs_is_found() {
    let story = Story::new();
    let stats = story.case.path("stats.json");
    let stats = ["--stats", stats.to_str().expect("a plain path")];
    let options = ["--tier1", "1", "--tier2", "2", "--batch", "8", "--flights", "2"];
    let options = [&options[..], &stats].concat();
    let dispatcher = Dispatcher::listen(&story.case, "127.0.0.1:0", &options);
    let _tier1 = join(&dispatcher, "1");
    let _tier2 = join(&dispatcher, "2");
    let hangs = Liar::join(&dispatcher.address);
    hangs.be_ready(&hangs.offer(2));
    hangs.next(Kind::Attend);
    let (stats, said) = story.expect_done(dispatcher.running);
    assert_eq!(stats["failures"], 1, "{said}");
    assert!(said.contains("tier2-0-1 is gone (it has not answered for"), "{said}");
}

/// Each loss of its neighbour is reported by the Tier-1 node that stays, and it is not the one to blame.
#[test]
fn a_tier1_node_may_lose_its_neighbour_many_times() {
    let story = Story::new();
    let mut dispatcher = story.listen(&[]);
    let stays = join(&dispatcher, "1");
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    let mut neighbour = join(&dispatcher, "1");
    for time in 1..=4 {
        dispatcher.running.wait_for_lines(&story.case.output(), 20 * time);
        neighbour.process().kill();
        neighbour = join(&dispatcher, "1");
    }
    let (stats, said) = story.expect_done(dispatcher.running);
    assert_eq!(stats["failures"], 4, "{said}");
    let stayed = stays.finish().expect(0);
    assert_eq!(stayed.stderr.matches("joined as").count(), 1, "{}", stayed.stderr);
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
    assert!(said.contains("(lanes opened: 1, steps launched again: "), "{said}");
    assert_eq!(stats["nodes"].as_array().map(Vec::len), Some(8), "{said}");
}

#[test]
fn without_another_worker_the_job_stops_and_continues_later() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--replace-within", "100ms", "--overwrite"]);
    let tier1: Vec<Running> = (0..2).map(|_| join(&dispatcher, "1")).collect();
    let _tier2: Vec<Running> = (0..2).map(|_| join(&dispatcher, "2")).collect();
    dispatcher.running.wait_for_lines(&story.case.output(), 20);
    tier1[0].process().kill();
    let failed = dispatcher.running.finish().expect(1);
    let errors: Vec<&str> =
        failed.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("one error, not: {}", failed.stderr) };
    assert!(error.starts_with("error: worker tier1-"), "{error}");
    assert!(error.contains("the same command continues (without --overwrite"), "{error}");
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

/// A local worker that is asked to leave, or stopped, is started again.
#[test]
fn local_workers_that_leave_or_are_stopped_are_started_again() {
    let story = Story::new();
    let stats = story.case.path("stats.json");
    let options = [&CLUSTER[..], &["--stats", stats.to_str().expect("a plain path")]].concat();
    let mut running = Running::start(&mut story.case.command(&options));
    for (lines, victim, signal) in
        [(20, 3, Signal::TERM), (50, 1, Signal::TERM), (80, 2, Signal::STOP)]
    {
        running.wait_for_lines(&story.case.output(), lines);
        let mut workers = running.process().children();
        workers.sort();
        workers[victim].signal(signal);
    }
    let (stats, said) = story.expect_done(running);
    assert_eq!((&stats["failures"], &stats["nodes_replaced"]), (&1.into(), &3.into()), "{said}");
}

#[test]
fn an_interrupted_cluster_ends_soon_though_a_worker_is_stopped() {
    let story = Story::new();
    let mut running = Running::start(&mut story.case.command(&CLUSTER));
    running.wait_for_lines(&story.case.output(), 20);
    let workers = running.process().children();
    workers[0].signal(Signal::STOP);
    running.signal(Signal::INT);
    let stopped = running.finish().expect(1);
    assert!(stopped.stderr.contains("did not report"), "{}", stopped.stderr);
    assert!(!stopped.stderr.contains("did not leave in time"), "{}", stopped.stderr);
    expect_gone(&workers);
}

#[test]
fn workers_that_were_started_again_end_with_a_killed_dispatcher() {
    let story = Story::new();
    let mut running = Running::start(&mut story.case.command(&CLUSTER));
    running.wait_for_lines(&story.case.output(), 20);
    let dispatcher = running.process();
    let before = dispatcher.children();
    before[0].kill();
    let fresh = loop {
        let is_new = |worker: &Process| !before.contains(worker);
        if let Some(fresh) = dispatcher.children().into_iter().find(is_new) {
            break fresh;
        }
    };
    dispatcher.kill();
    running.finish();
    expect_gone(&[&before[..], &[fresh]].concat());
}
