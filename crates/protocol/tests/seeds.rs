//! Seeded virtual-time runs of the whole protocol: random shapes, lengths, delays and memory. Every
//! prompt gets exactly one completion, and it is the one the simulated model gives without a cluster.
//!
//! `GLINTHAWK_SEEDS=20000` runs more of them, `GLINTHAWK_SEED=17` replays one.

use glinthawk_flight::Row;
use glinthawk_protocol::virtual_time::{Costs, Link, Topology, model, run};
use glinthawk_protocol::{DispatcherConfig, Merge, Prompt, PromptId, Sampling, Tier1Work};

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

struct RandomCosts(Random);

impl Costs for RandomCosts {
    fn tier1_ns(&mut self, _slice: usize, _work: &Tier1Work, rows: usize) -> u64 {
        self.0.within(1, 50) + rows as u64
    }

    fn tier2_ns(&mut self, _slice: usize, lane: u32, rows: &[Row]) -> u64 {
        self.0.within(1, 40 * (1 + u64::from(lane))) + rows.len() as u64
    }

    fn link_ns(&mut self, _link: Link, rows: usize) -> (u64, u64) {
        (rows as u64, self.0.within(0, 300))
    }
}

fn scenario(random: &mut Random) -> (Topology, Vec<(u64, Prompt)>) {
    let lanes = random.within(1, 4) as usize;
    let context_max = random.within(20, 120) as u32;
    let pages_min = u64::from(context_max.div_ceil(16));
    let topology = Topology {
        slice_layers: (0..random.within(1, 3)).map(|_| random.within(1, 3) as u32).collect(),
        tier1_rows_max: random.within(1, 64) as usize,
        dispatcher: DispatcherConfig {
            flights: random.within(1, 4) as u32,
            rows_per_lane: random.within(1, 24) as u32,
            chunk: random.within(1, 40) as u32,
            lane_pages: (0..lanes)
                .map(|_| random.within(pages_min, pages_min * 8) as u32)
                .collect(),
            context_max,
            oversubscription: random.within(1, 8) as f32,
            merge: if random.within(0, 3) == 0 { Merge::WholeFlights } else { Merge::Ready },
        },
    };
    let prompts = (0..random.within(1, 40)).map(|id| {
        let given = random.within(1, u64::from(context_max) - 1);
        let prompt = Prompt {
            id: PromptId(id),
            tokens: (0..given).map(|_| random.within(0, model::VOCAB - 1) as u32).collect(),
            tokens_max: random.within(1, 100) as u32,
            stop_ids: if random.within(0, 3) == 0 { Vec::new() } else { vec![0, 7] },
            sampling: Sampling { seed: random.next(), ..Sampling::default() },
            watched: false,
        };
        (random.within(0, 2000), prompt)
    });
    let prompts = prompts.collect();
    (topology, prompts)
}

/// Runs one seed; returns (preemptions, virtual end time).
fn check(seed: u64) -> (u64, u64) {
    let mut random = Random(seed);
    let (topology, prompts) = scenario(&mut random);
    let layers = topology.slice_layers.iter().sum();
    let report = run(&topology, prompts.clone(), &mut RandomCosts(random));
    let report = report.unwrap_or_else(|failure| panic!("GLINTHAWK_SEED={seed}: {failure:?}"));
    assert_eq!(report.completions.len(), prompts.len(), "GLINTHAWK_SEED={seed}");
    for (_, prompt) in &prompts {
        let completion = &report.completions[&prompt.id];
        let tokens: Vec<u32> = completion.tokens.iter().map(|generated| generated.token).collect();
        let expected = model::complete(prompt, layers, topology.dispatcher.context_max);
        assert_eq!((tokens, completion.finish), expected, "GLINTHAWK_SEED={seed}, {:?}", prompt.id);
    }
    let lanes_pages: u32 = topology.dispatcher.lane_pages.iter().sum();
    assert!(report.stats.pages_used_max <= lanes_pages, "GLINTHAWK_SEED={seed}");
    (report.stats.preemptions, report.end_ns)
}

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

#[test]
fn every_prompt_gets_exactly_its_completion() {
    if let Some(seed) = number_from("GLINTHAWK_SEED") {
        check(seed);
        return;
    }
    let seeds = number_from("GLINTHAWK_SEEDS").unwrap_or(1000);
    let preemptions: u64 = (0..seeds).map(|seed| check(seed).0).sum();
    assert!(preemptions > 0, "no seed was tight enough to preempt");
}

#[test]
fn a_seed_replays_exactly() {
    assert_eq!(check(5), check(5));
}
