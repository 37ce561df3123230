//! Seeded virtual-time runs of the whole protocol: random shapes, lengths, delays and memory; messages that
//! come late, twice, garbled or not at all; steps that are given up and launched again; watchers that stop
//! prompts; nodes of both tiers that die, hang, leave, or
//! are cut off, and have another host later, perhaps while the first goes on. Every prompt gets exactly one completion,
//! and it is the one the simulated model gives without a cluster. After every event, pages, slots and queues are checked.
//!
//! `GLINTHAWK_SEEDS=20000` runs more of them, `GLINTHAWK_SEED=17` replays one, and `GLINTHAWK_PLANTED=page-leaked` with it
//! plants a bug to be found.

use glinthawk_flight::Row;
use glinthawk_protocol::virtual_time::{
    Costs, Fault, FaultKind, Garble, Mishap, Planted, SimulatedCluster, Stop, VirtualRun, Wire,
    model, run,
};
use glinthawk_protocol::{
    Completion, DispatcherConfig, Finish, LaneShape, Merge, NodeAddress, Prompt, Sampling, Stage,
};
use std::collections::BTreeMap;
use std::panic::catch_unwind;

/// A small seeded generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        model::mix(self.0, 77)
    }

    fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
}

/// What the watcher of a prompt does: after `seen` tokens it keeps `kept` of them.
#[derive(Clone, Copy)]
struct Watcher {
    seen: usize,
    kept: usize,
    after_ns: u64,
}

struct RandomCosts {
    random: Random,
    /// Of 1,000 messages, so many have a mishap.
    mishaps: u64,
    /// How long a message may be late at most.
    late_ns: u64,
    watchers: BTreeMap<usize, Watcher>,
}

impl Costs for RandomCosts {
    fn tier1_ns(&mut self, _slice: usize, _stage: Stage, rows: usize) -> u64 {
        self.random.within(1, 50) + rows as u64
    }

    fn tier2_ns(&mut self, _slice: usize, lane: u32, rows: &[Row]) -> u64 {
        self.random.within(1, 40 * (1 + u64::from(lane))) + rows.len() as u64
    }

    fn link_ns(&mut self, _link: Wire, rows: usize) -> (u64, u64) {
        let late = self.mishaps > 0 && self.random.within(0, 99) == 0;
        (rows as u64, self.random.within(0, if late { self.late_ns } else { 300 }))
    }

    fn mishap(&mut self, link: Wire) -> Option<Mishap> {
        if self.mishaps == 0 || self.random.within(1, 1000) > self.mishaps {
            return None;
        }
        let ns = self.random.within(0, self.late_ns);
        Some(match (self.random.within(0, 3), link) {
            (0, _) => Mishap::Lost { noticed_ns: ns },
            (1, _) => Mishap::GivenUp { after_ns: ns },
            (2, Wire::Out(..)) => {
                let garbles = [Garble::Slot, Garble::Page, Garble::Position, Garble::Order];
                Mishap::Garbled(garbles[self.random.within(0, 3) as usize])
            }
            _ => Mishap::Twice { later_ns: ns },
        })
    }

    fn watch(&mut self, prompt: usize, seen: usize) -> Option<Stop> {
        let watcher = self.watchers.get(&prompt).filter(|watcher| watcher.seen == seen)?;
        Some(Stop { kept: watcher.kept, after_ns: watcher.after_ns })
    }
}

fn tokens(random: &mut Random, count: u64) -> Vec<u32> {
    (0..count).map(|_| random.within(0, model::VOCAB - 1) as u32).collect()
}

fn scenario(random: &mut Random) -> (SimulatedCluster, Vec<(u64, Prompt)>) {
    let lanes = random.within(1, 4) as usize;
    let context_max = random.within(20, 120) as u32;
    let page_positions = random.within(1, 32) as u32;
    let pages_min = u64::from(context_max.div_ceil(page_positions));
    let topology = SimulatedCluster {
        slice_layers: (0..random.within(1, 3)).map(|_| random.within(1, 3) as u32).collect(),
        tier1_rows_max: random.within(1, 64) as usize,
        works_max: random.within(1, 3) as usize,
        dispatcher: DispatcherConfig {
            flights: random.within(1, 4) as u32,
            slices: random.within(1, 3) as u32,
            pipelines: 1,
            weights_positions: random.within(1, 1000),
            batch: random.within(1, 24) as u32,
            own_lane: (random.within(0, 3) == 0).then(|| LaneShape {
                flights: random.within(1, 3) as u32,
                batch: random.within(1, 24) as u32,
            }),
            filled_first: (random.within(0, 3) == 0).then(|| random.within(1, 4) as u32),
            chunk: random.within(1, 40) as u32,
            lane_pages: (0..lanes)
                .map(|_| random.within(pages_min, pages_min * 8) as u32)
                .collect(),
            page_positions,
            context_max,
            oversubscription: random.within(1, 8) as f32,
            merge: [Merge::WholeFlights, Merge::SharedCore, Merge::Ready, Merge::Ready]
                [random.within(0, 3) as usize],
            nodes_apart: true,
            run_ahead: false,
            drafts: (random.within(0, 3) > 0).then(|| random.within(1, 40) as u32),
            sharing: random.within(0, 3) > 0,
        },
        faults: Vec::new(),
        load_ns: random.within(0, 3_000),
        replace_within_ns: random.within(0, 20_000),
        patience_ns: random.within(2_000, 20_000)..=random.within(20_000, 60_000),
        planted: None,
    };
    let beginnings: Vec<Vec<u32>> =
        (0..random.within(1, 4)).map(|_| tokens(random, u64::from(context_max))).collect();
    let prompts = (0..random.within(1, 40)).map(|_| {
        let given = random.within(1, u64::from(context_max) - 1);
        let mut tokens = tokens(random, given);
        // Half of the prompts begin like others, by up to all of their tokens.
        if random.within(0, 1) == 0 {
            let beginning = &beginnings[random.within(0, beginnings.len() as u64 - 1) as usize];
            let alike = random.within(0, given) as usize;
            tokens[..alike].copy_from_slice(&beginning[..alike]);
        }
        let prompt = Prompt {
            tokens,
            tokens_max: random.within(1, 100) as u32,
            stop_ids: if random.within(0, 3) == 0 { Vec::new() } else { vec![0, 7] },
            sampling: Sampling { seed: random.next(), ..Sampling::default() },
            watched: random.within(0, 2) == 0,
            priority: random.within(0, 2) as i32 - 1,
            ..Prompt::default()
        };
        (random.within(0, 2000), prompt)
    });
    let prompts = prompts.collect();
    (topology, prompts)
}

/// Tier-2 nodes that die for good, one of a lane at most; one lane is left.
fn deaths(random: &mut Random, topology: &SimulatedCluster) -> Vec<Fault> {
    let lanes = topology.dispatcher.lane_pages.len() as u32;
    let deaths = (1..lanes).filter_map(|lane| {
        let slice = random.within(0, topology.slice_layers.len() as u64 - 1) as usize;
        let (at_ns, noticed_ns) = (random.within(0, 20_000), random.within(0, 5_000));
        let (node, kind) = (NodeAddress::Tier2(slice, lane), FaultKind::Dies { noticed_ns });
        (random.within(0, 1) == 0).then_some(Fault { node, at_ns, kind, back_ns: None })
    });
    deaths.collect()
}

/// Nodes of any kind die or leave, several times, and come back.
fn faults(random: &mut Random, topology: &SimulatedCluster) -> Vec<Fault> {
    let lanes = topology.dispatcher.lane_pages.len() as u64;
    let count = random.within(1, 12);
    let fault = |_| {
        let slice = random.within(0, topology.slice_layers.len() as u64 - 1) as usize;
        let node = match random.within(0, lanes) {
            0 => NodeAddress::Tier1(slice),
            lane => NodeAddress::Tier2(slice, lane as u32 - 1),
        };
        let kind = match random.within(0, 5) {
            0 => FaultKind::Leaves { within_ns: random.within(0, 20_000) },
            1 => FaultKind::Hangs,
            2 => FaultKind::CutOff {
                for_ns: random.within(0, 20_000),
                noticed_ns: random.within(0, 20_000),
            },
            _ => FaultKind::Dies { noticed_ns: random.within(0, 5_000) },
        };
        let (at_ns, back_ns) = (random.within(0, 40_000), random.within(0, 8_000));
        Fault { node, at_ns, kind, back_ns: Some(back_ns) }
    };
    (0..count).map(fault).collect()
}

/// Half of the watchers stop their prompt, some at once and some when more tokens may have come.
fn watchers(random: &mut Random, prompts: &[(u64, Prompt)]) -> BTreeMap<usize, Watcher> {
    let watched = prompts.iter().enumerate().filter(|(_, (_, prompt))| prompt.watched);
    let watchers = watched.map(|(place, _)| {
        let seen = random.within(1, 20) as usize;
        let kept = random.within(0, seen as u64) as usize;
        let after_ns = if random.within(0, 1) == 0 { 0 } else { random.within(1, 3000) };
        (place, Watcher { seen, kept, after_ns })
    });
    watchers.filter(|(place, _)| place.is_multiple_of(2)).collect()
}

/// What a seed came to.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    end_ns: u64,
    preemptions: u64,
    regrouped: u64,
    relaunches: u64,
    lost: u64,
    stale: u64,
    refused: u64,
    stopped: u64,
    shared: u64,
    drafted: u64,
    drafts_right: u64,
    waits: u64,
    replaced: u64,
    expired: u64,
    drained: u64,
    found: u64,
    doubled: u64,
}

/// What some seed must have met, and how often one did.
type Count = (&'static str, fn(&Outcome) -> u64);

/// The bugs that can be planted, by their names in `GLINTHAWK_PLANTED`.
const PLANTED: [(&str, Planted); 3] = [
    ("epochs-unchecked", Planted::EpochsUnchecked),
    ("retired-twice", Planted::RetiredTwice),
    ("page-leaked", Planted::PageLeaked),
];

/// Says which seed failed, wherever in the protocol it did.
struct Named(u64, Option<Planted>);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to replay: {}", command(self.0, self.1));
        }
    }
}

fn command(seed: u64, planted: Option<Planted>) -> String {
    let planted = PLANTED.iter().find(|(_, bug)| Some(*bug) == planted);
    let planted = planted.map(|(name, _)| format!("GLINTHAWK_PLANTED={name} "));
    let planted = planted.unwrap_or_default();
    let command = "cargo test --release --workspace --test seeds every_prompt";
    format!("{planted}GLINTHAWK_SEED={seed} {command}")
}

fn check(seed: u64) -> Outcome {
    check_with(seed, None)
}

fn check_with(seed: u64, planted: Option<Planted>) -> Outcome {
    let _named = Named(seed, planted);
    let mut random = Random(seed);
    let (mut topology, prompts) = scenario(&mut random);
    topology.planted = planted;
    let watchers = watchers(&mut random, &prompts);
    if seed % 3 == 2 {
        topology.faults = deaths(&mut random, &topology);
    } else if seed % 3 == 1 {
        topology.faults = faults(&mut random, &topology);
    }
    let mishaps = if seed.is_multiple_of(4) { 0 } else { random.within(1, 40) };
    let late_ns = random.within(300, 20_000);
    let mut costs = RandomCosts { random, mishaps, late_ns, watchers: watchers.clone() };
    let report = run(&topology, prompts.clone(), &mut costs);
    let report = report.unwrap_or_else(|failure| panic!("GLINTHAWK_SEED={seed}: {failure:?}"));
    assert_eq!(report.completions.len(), prompts.len(), "GLINTHAWK_SEED={seed}");
    let mut stopped = 0;
    for (place, (_, prompt)) in prompts.iter().enumerate() {
        let watcher = watchers.get(&place).copied();
        stopped += u64::from(check_completion(seed, &topology, (place, prompt), watcher, &report));
    }
    let lanes_pages: u32 = topology.dispatcher.lane_pages.iter().sum();
    assert!(report.stats.pages_used_max <= lanes_pages, "GLINTHAWK_SEED={seed}");
    Outcome {
        end_ns: report.end_ns,
        preemptions: report.stats.preemptions,
        regrouped: report.stats.regrouped,
        relaunches: report.stats.relaunches,
        lost: report.stats.prompts_lost,
        stale: report.stale,
        refused: report.refused,
        stopped,
        shared: report.stats.shared,
        drafted: report.stats.drafted,
        drafts_right: report.stats.drafts_right,
        waits: report.waits,
        replaced: report.replaced,
        expired: report.expired,
        drained: report.drained,
        found: report.found,
        doubled: report.doubled,
    }
}

fn tokens_of(completion: &Completion) -> Vec<u32> {
    completion.tokens.iter().map(|generated| generated.token).collect()
}

/// Checks one prompt's completion; says whether its watcher ended it.
fn check_completion(
    seed: u64,
    topology: &SimulatedCluster,
    (place, prompt): (usize, &Prompt),
    watcher: Option<Watcher>,
    report: &VirtualRun,
) -> bool {
    let what = format!("GLINTHAWK_SEED={seed}, prompt {place}");
    let completion = &report.completions[&place];
    let got = (tokens_of(completion), completion.finish);
    let layers = topology.slice_layers.iter().sum();
    let whole = model::complete(prompt, layers, topology.dispatcher.context_max);
    if prompt.watched {
        let reported = &report.watched[&place];
        assert!(whole.0.starts_with(reported), "{what}: {reported:?} was reported");
        assert!(reported.len() >= got.0.len(), "{what}: {reported:?} was reported");
    }
    // A stop that comes at once comes before the last token, a later one perhaps after it.
    let in_time = watcher.filter(|watcher| watcher.seen < whole.0.len());
    let cut = in_time.map(|watcher| (whole.0[..watcher.kept].to_vec(), Finish::Stop));
    match (cut, in_time) {
        (Some(cut), Some(watcher)) if watcher.after_ns == 0 || got != whole => {
            assert_eq!(got, cut, "{what}");
            true
        }
        _ => {
            assert_eq!(got, whole, "{what}");
            false
        }
    }
}

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

#[test]
fn every_prompt_gets_exactly_its_completion() {
    if let Some(seed) = number_from("GLINTHAWK_SEED") {
        let planted = std::env::var("GLINTHAWK_PLANTED").ok().map(|name| {
            let known = PLANTED.iter().find(|(known, _)| *known == name);
            known.unwrap_or_else(|| panic!("GLINTHAWK_PLANTED={name} is no bug")).1
        });
        check_with(seed, planted);
        return;
    }
    let seeds = number_from("GLINTHAWK_SEEDS").unwrap_or(1000);
    let outcomes: Vec<Outcome> = (0..seeds).map(check).collect();
    let counts: [Count; 16] = [
        ("was tight enough to preempt", |outcome| outcome.preemptions),
        ("moved a prompt to another flight", |outcome| outcome.regrouped),
        ("launched a shard again", |outcome| outcome.relaunches),
        ("lost a lane with prompts on it", |outcome| outcome.lost),
        ("had a stale message", |outcome| outcome.stale),
        ("had rows that a Tier-2 node refused", |outcome| outcome.refused),
        ("had a prompt that its watcher ended", |outcome| outcome.stopped),
        ("had prompts that shared pages", |outcome| outcome.shared),
        ("had a draft that was right", |outcome| outcome.drafts_right),
        ("had a draft that was wrong", |outcome| outcome.drafted - outcome.drafts_right),
        ("had a Tier-1 node wait for the rest of a flight", |outcome| outcome.waits),
        ("had a node that took the place of another", |outcome| outcome.replaced),
        ("closed lanes because nobody came in time", |outcome| outcome.expired),
        ("had a node that left in order", |outcome| outcome.drained),
        ("had a node that hung and was found", |outcome| outcome.found),
        ("had two hosts at one place", |outcome| outcome.doubled),
    ];
    for (what, count) in counts {
        assert!(outcomes.iter().any(|outcome| count(outcome) > 0), "no seed {what}");
    }
}

#[test]
fn a_seed_replays_exactly() {
    let outcome = check(7);
    assert!(outcome.relaunches > 0 && outcome.stale > 0, "{outcome:?}");
    assert_eq!(outcome, check(7));
}

#[test]
fn planted_bugs_are_found() {
    for (name, bug) in PLANTED {
        let fails = |seed: &u64| catch_unwind(|| check_with(*seed, Some(bug))).is_err();
        let found = (0..1000).find(fails).unwrap_or_else(|| panic!("{name} was not found"));
        println!("{name} was found: {}", command(found, Some(bug)));
        assert!(fails(&found), "it replays");
        check(found);
    }
}
