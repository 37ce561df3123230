//! Choosing for a job: the front is what brute force finds, deadlines are met, and a plan says what its forecast says.

use glinthawk_plan::{
    Choice, Cluster, FRONT_STEP, Length, Objective, Plan, PlanError, PlannedJob, Random,
    SearchLimits, Settings, Shape, Space, Trial, Workload, forecast, front, propose,
};
use std::path::Path;

const ALL: SearchLimits =
    SearchLimits { per_site: usize::MAX, forecasts: usize::MAX, events: u64::MAX };
const CHUNK: usize = 16;

/// A random cluster of a few nodes, small enough to forecast every candidate, and a job for it.
fn small(seed: u64) -> (Space, Workload) {
    let mut random = Random::new(seed);
    let mut between = |least: u64, most: u64| (least + random.below(most - least + 1)) as usize;
    let shape = Shape { layers: between(2, 4), ..Shape::llama2_70b() };
    let device = |index| ["t4", "a100-40", "rtx6000"][index];
    // Some clusters are rented, some bought, of some no price is known.
    let price = match seed % 3 {
        0 => ("usd_per_hour", between(1, 4), between(1, 4)),
        1 => ("price_usd", between(500, 5000), between(500, 2000)),
        _ => ("rtt_ms", 1, 1),
    };
    let cost = |value: usize| match price.0 {
        "rtt_ms" => String::new(),
        field => format!("{field} = {value}\n"),
    };
    let text = format!(
        "[tier1]\ndevice = \"{}\"\nnodes = {}\nbandwidth_gbps = 20\nrtt_ms = 0.2\n{}\
         [[tier2]]\ndevice = \"epyc-7v12-16\"\nmemory_gib = {}\nnodes = {}\nbandwidth_gbps = {}\nrtt_ms = 1\n{}\
         [inter_tier]\nbandwidth_gbps = {}\nrtt_ms = {}\n",
        device(between(0, 2)),
        between(1, 2),
        cost(price.1),
        between(1, 8),
        between(1, 4),
        between(1, 10),
        cost(price.2),
        between(2, 40),
        between(0, 3),
    );
    let cluster = Cluster::parse("test", &text, Path::new("."), &shape).expect("a valid cluster");
    let lengths = (0..between(6, 16))
        .map(|_| Length { prompt: between(1, 60), output: between(1, 12), ..Length::default() })
        .collect();
    let workload = Workload::new("random", lengths).expect("valid");
    let settings = Settings { batch_max: 256, ..Settings::default() };
    (Space::new(cluster, PlannedJob::of(&shape, &workload, CHUNK), settings), workload)
}

fn dominates(one: &Trial, other: &Trial) -> bool {
    one.spend <= other.spend
        && one.seconds() <= other.seconds()
        && (one.spend < other.spend || one.seconds() < other.seconds())
}

fn objectives(space: &Space, fastest: f64) -> Vec<Objective> {
    let priced = space.cluster.tier1.price_usd.or(space.cluster.tier1.usd_per_hour).is_some()
        && space.cluster.tier2.iter().all(|pool| pool.price_usd.or(pool.usd_per_hour).is_some());
    let mut all = vec![Objective::Throughput, Objective::Deadline { seconds: 1.3 * fastest }];
    all.extend(priced.then_some(Objective::Cost));
    all
}

#[test]
fn the_front_is_what_brute_force_finds() {
    let mut bounded = 0;
    for seed in 0..12 {
        let (space, workload) = small(seed);
        let choice = || Choice::new(&space, &workload, CHUNK).expect("it fits");
        let brute = choice().search(Objective::Throughput, ALL, false).expect("found");
        assert_eq!(brute.trials.len(), brute.work.candidates);
        for objective in objectives(&space, brute.best.seconds()) {
            let everything = choice().search(objective, ALL, false).expect("found").best;
            let pruned = choice().search(objective, ALL, true).expect("found");
            let same = (pruned.best.seconds(), pruned.best.spend);
            assert_eq!(
                same,
                (everything.seconds(), everything.spend),
                "seed {seed}, {objective:?}"
            );
            bounded += pruned.work.bounded;
            let listed = front(&pruned.trials, &pruned.best);
            for trial in &brute.trials {
                for own in &listed {
                    assert!(!dominates(trial, own), "seed {seed}: {trial:?} dominates {own:?}");
                }
                let near = |own: &&Trial| {
                    own.spend <= trial.spend && own.seconds() <= FRONT_STEP * trial.seconds()
                };
                assert!(listed.iter().any(near), "seed {seed}: nothing comes near {trial:?}");
            }
            assert!(listed.windows(2).all(|pair| pair[0].spend <= pair[1].spend));
        }
    }
    assert!(bounded > 0, "bounds prune something somewhere");
}

#[test]
fn a_limited_search_finds_nearly_the_best_and_lists_nothing_that_it_knows_to_be_worse() {
    for seed in 0..12 {
        let (space, workload) = small(seed);
        let choice = Choice::new(&space, &workload, CHUNK).expect("it fits");
        let all = choice.search(Objective::Throughput, ALL, true).expect("found");
        let limits = SearchLimits { forecasts: 16, ..SearchLimits::default() };
        let some = choice.search(Objective::Throughput, limits, true).expect("found");
        assert!(some.work.forecast <= 16);
        let off = some.best.seconds() / all.best.seconds();
        assert!(off < 1.1, "seed {seed}: {off}");
        let listed = front(&some.trials, &some.best);
        for own in &listed {
            assert!(!some.trials.iter().any(|trial| dominates(trial, own)), "seed {seed}");
        }
        assert!(listed.iter().any(|own| own.candidate == some.best.candidate));
    }
}

#[test]
fn deadlines_are_met_or_the_fastest_is_named() {
    let mut unproven = 0;
    for seed in 0..6 {
        let (space, workload) = small(seed);
        let choice = Choice::new(&space, &workload, CHUNK).expect("it fits");
        let fastest = choice.search(Objective::Throughput, ALL, true).expect("found").best;
        for part in [1.0, 1.1, 1.5, 3.0] {
            let seconds = part * fastest.seconds();
            let objective = Objective::Deadline { seconds };
            for limits in [ALL, SearchLimits::default()] {
                let best = choice.search(objective, limits, true).expect("it can be met").best;
                assert!(best.seconds() <= seconds, "seed {seed}");
                assert!(best.spend <= fastest.spend, "seed {seed}");
            }
        }
        let seconds = 0.9 * fastest.seconds();
        let missed = choice.search(Objective::Deadline { seconds }, ALL, true).unwrap_err();
        let parts = ["no configuration meets", "the fastest found takes", "rules out all"];
        let says = |part: &str| matches!(&missed, PlanError::Deadline(text) if text.contains(part));
        assert!(parts.into_iter().all(says), "{missed}");
        // One forecast proves nothing about what no bound rules out.
        let choice = Choice::new(&space, &workload, CHUNK).expect("it fits");
        let one = SearchLimits { forecasts: 1, ..ALL };
        let open = choice.search(Objective::Deadline { seconds }, one, true).unwrap_err();
        let open = open.to_string();
        let proven = open.contains("rules out all");
        assert_ne!(proven, open.contains("not proven"), "{open}");
        unproven += usize::from(!proven);
    }
    assert!(unproven > 0, "one forecast leaves something open somewhere");
}

#[test]
fn no_candidate_has_more_flights_than_the_job_fills() {
    for seed in 0..6 {
        let (space, workload) = small(seed);
        let choice = Choice::new(&space, &workload, CHUNK).expect("it fits");
        let (prompts, rows) = (workload.lengths().len(), space.job.rows_per_seat);
        for site in choice.sites() {
            for candidate in choice.candidates(site) {
                let lanes = candidate.tier2 + usize::from(candidate.local_rows > 0);
                let seats = lanes * candidate.batch * candidate.flights;
                // Whole rows on every shard are a row too many on each at most.
                let most = rows * prompts as f64 + (lanes * candidate.flights) as f64;
                assert!(seats as f64 <= most, "{candidate:?} for {prompts} prompts");
                assert!(
                    candidate.tier2 == 0 || [0, candidate.batch].contains(&candidate.local_rows)
                );
            }
        }
    }
}

#[test]
fn a_plan_says_what_the_forecast_of_its_file_says() {
    for seed in 0..6 {
        let (space, workload) = small(seed);
        let objective = Objective::Throughput;
        let proposal = propose(&space, objective, &workload, CHUNK, ALL).expect("found");
        let plan = Plan::parse("plan.toml", &proposal.plan().to_toml()).expect("a plan");
        assert_eq!(&plan, proposal.plan());
        let shape = &space.job.shape;
        let deployment = plan.deployment("plan.toml", &space.cluster, shape).expect("it fits");
        let again = forecast(&deployment, &workload, None);
        assert_eq!(again.seconds, plan.forecast.job_seconds);
        let longest = workload.lengths().iter().map(|length| length.prompt + length.output).max();
        assert_eq!(Some(plan.max_context), longest);
        let better = |other: &Trial| other.seconds() < proposal.best.seconds();
        let beaten = proposal.neighbours.iter().filter_map(|other| other.trial.as_ref());
        assert!(!beaten.into_iter().any(better), "{:?}", proposal.neighbours);
        let text = proposal.render();
        for word in ["best", "limited by", "neighbours and why they lose", "front of", "analytic"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }
}
