//! The event loop against closed forms: saturation, latency, symmetry, heterogeneity, determinism.

use glinthawk_model::even_slices;
use glinthawk_plan::catalogue::Efficiency;
use glinthawk_plan::{
    Bottleneck, Catalogue, Configuration, Contexts, DeviceKind, Disturbance, Group, KernelTimes,
    NetworkLink, RowTraffic, Rules, Shape, Slice, Workload, simulate, simulate_traced,
};
use std::sync::Arc;

/// K slices with K' nodes of B rows each, on the devices of the catalogue.
fn configuration(
    nodes: usize,
    tier2: usize,
    batch: usize,
    flights: usize,
    rules: Rules,
) -> Configuration {
    let shape = Shape::llama2_70b();
    let catalogue = Catalogue::built_in();
    // These tests are about the event loop: what the catalogue says of efficiencies is no matter.
    let kernels = |name| {
        let device = catalogue.get(name).expect("built in").clone();
        let device = DeviceKind { efficiency: Efficiency::default(), ..device };
        Arc::new(KernelTimes::analytic(&device, &shape))
    };
    let (tier1, attention) = (kernels("t4"), kernels("epyc-7v12-16"));
    let slice = |layers| Slice {
        layers,
        tier1: tier1.clone(),
        local_rows: if tier2 == 0 { batch } else { 0 },
        tier2: if tier2 == 0 {
            Vec::new()
        } else {
            vec![Group { kernels: attention.clone(), nodes: tier2, rows: batch }]
        },
    };
    Configuration {
        slices: even_slices(shape.layers, nodes).into_iter().map(slice).collect(),
        shape,
        flights,
        contexts: Contexts::Fixed(2048.0),
        hop: NetworkLink::new(2.0, 8.0),
        inter: NetworkLink::new(2.0, 8.0),
        tier2_bandwidth: 1e9,
        traffic: RowTraffic::ResidualHome,
        rules,
        disturbance: Disturbance::default(),
        seed: 1,
    }
}

fn close(left: f64, right: f64, tolerance: f64) {
    assert!((left / right - 1.0).abs() <= tolerance, "{left} against {right}");
}

#[test]
fn one_flight_on_one_node_takes_its_kernels_time() {
    let configuration = configuration(1, 0, 8, 1, Rules::Full);
    let kernels = &configuration.slices[0].tier1;
    let layer =
        kernels.pre_seconds(8) + kernels.post_seconds(8) + kernels.attention_seconds(8, 2048.0);
    let report = simulate(&configuration);
    close(report.tokens_per_second, 8.0 / (80.0 * layer + kernels.classify_seconds(8)), 1e-6);
    close(report.time_per_token.total(), 80.0 * layer + kernels.classify_seconds(8), 1e-6);
    close(report.tier1_busy[0], 1.0, 1e-6);
}

#[test]
fn one_flight_in_two_tiers_waits_for_every_leg() {
    let configuration = configuration(2, 1, 30, 1, Rules::Full);
    let (shape, slice) = (&configuration.shape, &configuration.slices[0]);
    let (rows, traffic) = (30.0, configuration.traffic);
    let attention = slice.tier2[0].kernels.attention_seconds(30, 2048.0);
    let legs =
        rows * (traffic.out_bytes(shape) + traffic.back_bytes(shape)) / 1e9 + 2e-3 + attention;
    let weights = 80.0 * (slice.tier1.pre_seconds(30) + slice.tier1.post_seconds(30))
        + slice.tier1.classify_seconds(30);
    let hops = rows * traffic.hop_bytes(shape) / 1e9 + 2e-3;
    close(simulate(&configuration).time_per_token.total(), weights + 80.0 * legs + hops, 1e-6);
}

#[test]
fn enough_flights_saturate_the_bottleneck_and_few_expose_latency() {
    for (rules, reached_least) in [(Rules::Paper, 0.8), (Rules::Full, 0.6)] {
        let starved = simulate(&configuration(16, 3, 82, 8, rules));
        // Flights that start together travel in a bunch and queue behind each other, so the bound is not reached.
        let reached = starved.tokens_per_second / starved.bound_tokens_per_second;
        assert!(reached > reached_least && reached <= 1.0, "{reached}");
        assert_eq!(starved.bottleneck, Bottleneck::Latency);
        let attention = simulate(&configuration(16, 1, 200, 60, rules));
        assert_eq!(attention.bottleneck, Bottleneck::Tier2Compute);
        close(attention.tokens_per_second, attention.bound_tokens_per_second, 0.01);
    }
    let saturated = simulate(&configuration(16, 3, 82, 60, Rules::Paper));
    close(saturated.tokens_per_second, saturated.bound_tokens_per_second, 0.03);
    assert_eq!(saturated.bottleneck, Bottleneck::Tier1Compute);
    assert!(saturated.tier1_busy.iter().copied().fold(0.0, f64::max) > 0.96);
    // Shards that travel alone keep Tier 1 as busy, with batches that are nearly as full.
    let merging = simulate(&configuration(16, 3, 82, 60, Rules::Full));
    assert_eq!(merging.bottleneck, Bottleneck::Tier1Compute);
    assert!(merging.tier1_busy.iter().copied().fold(0.0, f64::max) > 0.96);
    let reached = merging.tokens_per_second / merging.bound_tokens_per_second;
    assert!(reached > 0.96 && reached <= 1.0, "{reached}");
}

#[test]
fn stragglers_cost_throughput_and_a_seed_replays() {
    let even = configuration(8, 4, 60, 24, Rules::Full);
    let mut uneven = even.clone();
    uneven.disturbance = Disturbance { jitter: 0.0, straggler_share: 0.3, straggler_extra: 3.0 };
    let (even, uneven) = (simulate(&even), simulate(&uneven));
    assert!(uneven.tokens_per_second < 0.7 * even.tokens_per_second);
    let mut jittery = configuration(8, 4, 60, 8, Rules::Full);
    jittery.disturbance.jitter = 0.3;
    assert_eq!(simulate(&jittery), simulate(&jittery), "one seed, one result");
}

#[test]
fn a_slow_lane_holds_up_nobody_else() {
    let mut configuration = configuration(4, 2, 80, 24, Rules::Full);
    let t4 = configuration.slices[0].tier1.clone();
    for (slice, layers) in configuration.slices.iter_mut().zip([26, 18, 18, 18]) {
        slice.layers = layers;
        slice.tier2[0].nodes = 1;
        slice.tier2.push(Group { kernels: t4.clone(), nodes: 1, rows: 40 });
    }
    let report = simulate(&configuration);
    assert_eq!((report.rows, report.tier2_busy.len()), (120, 8));
    let passes = |lane: usize| {
        let group = &configuration.slices[0].tier2[lane];
        report.tier2_busy[lane] / (26.0 * group.kernels.attention_seconds(group.rows, 2048.0))
    };
    assert!(passes(1) > 1.1 * passes(0), "{} against {}", passes(1), passes(0));
}

#[test]
fn local_attention_runs_beside_the_remote() {
    let remote = configuration(16, 1, 100, 40, Rules::Full);
    let mut hybrid = remote.clone();
    for slice in &mut hybrid.slices {
        slice.local_rows = 30;
        slice.tier2[0].rows = 70;
    }
    let (remote, hybrid) = (simulate(&remote), simulate(&hybrid));
    assert_eq!(remote.bottleneck, Bottleneck::Tier2Compute);
    // Rows that stay relieve Tier 2, but as a small shard of their own they make small batches.
    let busiest = |shares: &[f64]| shares.iter().copied().fold(0.0, f64::max);
    assert!(busiest(&hybrid.tier2_busy) < 0.8 * busiest(&remote.tier2_busy));
    assert!(
        hybrid.traffic.tier1_total / hybrid.tokens_per_second
            < 0.71 * remote.traffic.tier1_total / remote.tokens_per_second
    );
}

#[test]
fn shorter_contexts_of_a_workload_relieve_tier_2() {
    let longest = configuration(16, 1, 112, 37, Rules::Full);
    let mut sampled = longest.clone();
    let workload = Workload::uniform(200, 400, 10).expect("valid");
    sampled.contexts = Contexts::Sampled(Arc::new(workload));
    let (longest, sampled) = (simulate(&longest), simulate(&sampled));
    assert!(sampled.tokens_per_second > 1.3 * longest.tokens_per_second);
}

#[test]
fn traffic_follows_the_closed_form() {
    let report = simulate(&configuration(16, 3, 82, 50, Rules::Full));
    let shape = Shape::llama2_70b();
    let (out, back) = glinthawk_plan::calculus::egress_bits(
        &shape,
        RowTraffic::ResidualHome,
        16,
        report.tokens_per_second,
    );
    close(report.traffic.tier1_total, out, 1e-9);
    close(report.traffic.tier2_total, back, 1e-9);
    close(report.traffic.tier2_node, back / 48.0, 1e-9);
}

#[test]
fn timeline_names_nodes_and_never_overlaps_on_one() {
    let (report, trace) = simulate_traced(&configuration(2, 2, 8, 3, Rules::Full));
    assert!(trace.len() as u64 > report.events / 8);
    let mut text = Vec::new();
    trace.write(&mut text).expect("memory takes all");
    let timeline: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let events = timeline["traceEvents"].as_array().expect("events");
    let spans = events.iter().filter(|event| event["ph"] == "X");
    let mut ends = std::collections::HashMap::new();
    for span in spans {
        let who = (span["pid"].as_u64(), span["tid"].as_u64());
        let (start, length) =
            (span["ts"].as_f64().expect("a time"), span["dur"].as_f64().expect("a length"));
        let end = ends.entry(who).or_insert(0.0);
        assert!(start >= *end - 0.01, "{who:?} starts at {start} before {end}");
        *end = start + length;
    }
    assert_eq!(ends.len(), 2 + 4);
}
