//! The planner: its bound is sound, pruning changes nothing but the time, impossible clusters say what they need.

use glinthawk_plan::{
    Bottleneck, Cluster, PlannedJob, RowTraffic, Rules, Settings, Shape, Space, Workload, search,
    simulate,
};
use std::path::Path;

fn cluster_text(tier1: (&str, usize), tier2: (&str, usize)) -> String {
    format!(
        "[tier1]\ndevice = \"{}\"\nnodes = {}\nbandwidth_gbps = 8\nrtt_ms = 2\n\
         [[tier2]]\ndevice = \"{}\"\nnodes = {}\nbandwidth_gbps = 8\nrtt_ms = 2\n\
         [inter_tier]\nbandwidth_gbps = 8\nrtt_ms = 2\n",
        tier1.0, tier1.1, tier2.0, tier2.1
    )
}

fn space(tier1: (&str, usize), tier2: (&str, usize), settings: Settings) -> Space {
    let shape = Shape::llama2_70b();
    let cluster = Cluster::parse("test", &cluster_text(tier1, tier2), Path::new("."), &shape)
        .expect("a valid cluster");
    Space::new(cluster, PlannedJob::longest(&shape, 2048.0, 3.0), settings)
}

/// Eight layers on up to 4 Tier-1 and 8 Tier-2 nodes with little memory: small enough to simulate every candidate.
fn small_space(settings: Settings) -> Space {
    let shape = Shape { layers: 8, ..Shape::llama2_70b() };
    let text = cluster_text(("t4", 4), ("epyc-7v12-16", 8))
        .replace("nodes = 8", "memory_gib = 1.0\nnodes = 8");
    let cluster = Cluster::parse("test", &text, Path::new("."), &shape).expect("a valid cluster");
    Space::new(cluster, PlannedJob::longest(&shape, 2048.0, 3.0), settings)
}

fn paper_settings(batch_max: usize) -> Settings {
    Settings {
        batch_max,
        rules: Rules::Paper,
        traffic: RowTraffic::StateObject,
        local_shares: vec![0.0],
        ..Settings::default()
    }
}

#[test]
fn estimate_is_the_programs_bound() {
    let listing = Settings { rules: Rules::Listing, ..paper_settings(4096) };
    for settings in [Settings::default(), paper_settings(4096), listing] {
        let space = space(("t4", 24), ("rtx6000", 70), settings);
        for site in space.sites().expect("it fits").iter().step_by(5) {
            let candidates = space.candidates(site);
            for candidate in candidates.iter().step_by(1 + candidates.len() / 5) {
                let mut short = *candidate;
                short.flights = short.flights.min(2);
                let (bound, bottleneck) = space.estimate(site, &short);
                let report = simulate(&space.configuration(site, &short));
                let ratio = bound / report.bound_tokens_per_second;
                assert!((ratio - 1.0).abs() < 1e-9, "{short:?}: {bound} against {report:?}");
                assert_eq!(bottleneck, report.bottleneck, "{short:?}");
                assert!(report.tokens_per_second <= bound * (1.0 + 1e-9));
            }
        }
    }
}

#[test]
fn pruned_and_unpruned_searches_find_the_same() {
    for settings in [paper_settings(40), Settings { batch_max: 40, ..Settings::default() }] {
        // A space remembers what was simulated in it: each search gets its own.
        let pruned = search(&small_space(settings.clone()), true).expect("it fits");
        let whole = search(&small_space(settings.clone()), false).expect("it fits");
        assert_eq!((&pruned.best, &pruned.site), (&whole.best, &whole.site));
        assert_eq!(whole.effort.simulated, whole.effort.candidates);
        let (some, all) = (pruned.effort.simulated, whole.effort.simulated);
        assert!(some * 10 < all, "{some} of {all}");
    }
}

#[test]
fn impossible_clusters_say_what_would_be_needed() {
    let error =
        space(("t4", 9), ("epyc-7v12-16", 9), Settings::default()).sites().unwrap_err().to_string();
    assert_eq!(
        error,
        "the model does not fit: llama2-70b has 128.5 GiB of weights; tier1 has 9 nodes of 14.8 GiB. \
         10 such nodes would hold it; with 9 nodes each needs 14.8 GiB"
    );
    let shape = Shape::llama2_70b();
    let text = "[tier1]\ndevice = \"h200\"\nnodes = 1\nbandwidth_gbps = 8\nrtt_ms = 2\nmemory_gib = 128.6\n";
    let cluster = Cluster::parse("test", text, Path::new("."), &shape).expect("valid");
    let workload = Workload::uniform(1000, 1000, 4).expect("valid");
    let space = Space::new(cluster, PlannedJob::of(&shape, &workload, 1), Settings::default());
    let error = space.sites().unwrap_err().to_string();
    assert!(
        error.starts_with("no context memory is left: ")
            && error.contains("2016 tokens) needs 0.62 GiB"),
        "{error}"
    );
}

#[test]
fn hybrid_plans_are_never_worse() {
    let remote = Settings { local_shares: vec![0.0], batch_max: 200, ..Settings::default() };
    let hybrid = Settings { local_shares: vec![0.0, 0.5, 1.0], ..remote.clone() };
    let best = |settings| {
        let space = small_space(settings);
        search(&space, true).expect("it fits").best
    };
    let (remote, hybrid) = (best(remote), best(hybrid));
    assert!(hybrid.tokens_per_second >= remote.tokens_per_second);
    assert!(hybrid.candidate.local_rows > 0 || hybrid.bottleneck != Bottleneck::Tier2Compute);
}

#[test]
fn chunked_input_needs_fewer_seats_for_the_same_rows() {
    let shape = Shape { layers: 8, ..Shape::llama2_70b() };
    let nodes = |text: String| {
        text.replace("nodes = 8", "memory_gib = 0.25\nnodes = 8")
            .replace("nodes = 4", "memory_gib = 3.8\nnodes = 4")
    };
    let workload = Workload::uniform(512, 64, 100).expect("valid");
    let best = |chunk: usize| {
        let text = nodes(cluster_text(("t4", 4), ("epyc-7v12-16", 8)));
        let cluster =
            Cluster::parse("test", &text, Path::new("."), &shape).expect("a valid cluster");
        let settings = Settings { batch_max: 256, local_shares: vec![0.0], ..Settings::default() };
        let space = Space::new(cluster, PlannedJob::of(&shape, &workload, chunk), settings);
        search(&space, true).expect("it fits").best.tokens_per_second
    };
    assert!(best(64) > 1.2 * best(1));
}
