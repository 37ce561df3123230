//! The event loop against the paper's two algorithms written down as they are listed: every pipe a list, every step a
//! search through all of them. (Two corrections: the deepest stage goes first, as the text says, and a pipe's next
//! event is reckoned after its busy time is set.)

use glinthawk_model::even_slices;
use glinthawk_plan::{
    Catalogue, Configuration, Contexts, Disturbance, Group, KernelTimes, NetworkLink, RowTraffic,
    Rules, Shape, Slice, simulate,
};
use std::sync::Arc;

#[derive(Clone, Copy)]
struct Waiting {
    stage: usize,
    since: f64,
    flight: usize,
}

/// Times at which flight 0 returns to the first stage. A layer has six stages in two tiers, three in a single one;
/// every third is a delay.
fn listing(slices: &[usize], delays: &[f64], flights: usize, passes: usize) -> Vec<f64> {
    let each = delays.len();
    let stages = each * slices.iter().sum::<usize>();
    let hosts: Vec<usize> =
        slices.iter().enumerate().flat_map(|(node, &layers)| vec![node; layers]).collect();
    let pipe_of = |stage: usize| each * hosts[stage / each] + stage % each;
    let mut pipes: Vec<Vec<Waiting>> = vec![Vec::new(); each * slices.len()];
    let mut busy_until = vec![0.0f64; pipes.len()];
    pipes[0] = (0..flights).map(|flight| Waiting { stage: 0, since: 0.0, flight }).collect();
    let mut generated = Vec::new();
    while generated.len() < passes {
        let next = |pipe: usize| {
            let earliest =
                pipes[pipe].iter().map(|event| event.since).fold(f64::INFINITY, f64::min);
            if pipe % 3 == 2 { earliest } else { earliest.max(busy_until[pipe]) }
        };
        let pipe = (0..pipes.len())
            .min_by(|&left, &right| next(left).total_cmp(&next(right)))
            .expect("pipes");
        let now = next(pipe);
        let ready = pipes[pipe].iter().enumerate().filter(|(_, event)| event.since <= now);
        let (place, _) = ready
            .min_by(|(_, left), (_, right)| {
                right.stage.cmp(&left.stage).then(left.since.total_cmp(&right.since))
            })
            .expect("something is ready");
        let event = pipes[pipe].remove(place);
        let finish = now + delays[event.stage % each];
        if pipe % 3 != 2 {
            busy_until[pipe] = finish;
        }
        let stage = (event.stage + 1) % stages;
        if stage == 0 && event.flight == 0 {
            generated.push(finish);
        }
        pipes[pipe_of(stage)].push(Waiting { stage, since: finish, flight: event.flight });
    }
    generated
}

#[test]
fn the_event_loop_agrees_with_the_listing() {
    let shape = Shape { layers: 24, ..Shape::llama2_70b() };
    let catalogue = Catalogue::built_in();
    let kernels =
        |name| Arc::new(KernelTimes::analytic(catalogue.get(name).expect("built in"), &shape));
    let (tier1, cpu) = (kernels("t4"), kernels("epyc-7v12-16"));
    for (nodes, tier2, batch, flights, rtt_ms) in [
        (3, 3, 85, 9, 2.0),
        (3, 3, 85, 9, 22.0),
        (3, 3, 39, 18, 52.0),
        (5, 1, 112, 12, 2.0),
        (5, 2, 58, 23, 2.0),
        (8, 4, 20, 10, 100.0),
        (1, 2, 30, 3, 2.0),
    ] {
        let slices = even_slices(shape.layers, nodes);
        let slice = |&layers: &usize| Slice {
            layers,
            tier1: tier1.clone(),
            local_rows: 0,
            tier2: vec![Group { kernels: cpu.clone(), nodes: tier2, rows: batch }],
        };
        let configuration = Configuration {
            shape: shape.clone(),
            slices: slices.iter().map(slice).collect(),
            flights,
            contexts: Contexts::Fixed(2048.0),
            hop: NetworkLink::new(2.0, 8.0),
            inter: NetworkLink::new(rtt_ms, 8.0),
            tier2_bandwidth: 1e9,
            traffic: RowTraffic::StateObject,
            rules: Rules::Paper,
            disturbance: Disturbance::default(),
            seed: 0,
        };
        let (rows, traffic) = (configuration.rows(), configuration.traffic);
        let delays = [
            tier1.pre_seconds(rows) + tier1.post_seconds(rows),
            rows as f64 * traffic.out_bytes(&shape) / 1e9,
            rtt_ms / 2e3,
            cpu.attention_seconds(batch, 2048.0),
            rows as f64 * traffic.back_bytes(&shape) / 1e9,
            rtt_ms / 2e3,
        ];
        let generated = listing(&slices, &delays, flights, 8);
        let between = (generated[7] - generated[2]) / 5.0;
        let listed = (rows * flights) as f64 / between;
        let ours = simulate(&configuration).tokens_per_second;
        let name = format!("{nodes} x {tier2} x {batch}, {flights} flights, {rtt_ms} ms");
        assert!((ours / listed - 1.0).abs() < 0.02, "{name}: {ours} against {listed}");
    }
}

#[test]
fn a_single_tier_that_sends_after_every_layer_agrees_with_the_listing() {
    let shape = Shape { layers: 24, ..Shape::llama2_70b() };
    let catalogue = Catalogue::built_in();
    let kernels = Arc::new(KernelTimes::analytic(catalogue.get("t4").expect("built in"), &shape));
    for (nodes, rows, flights, rtt_ms) in
        [(6, 14, 11, 2.0), (8, 23, 9, 2.0), (8, 16, 14, 2.0), (24, 35, 26, 2.0), (3, 5, 3, 20.0)]
    {
        let slices = even_slices(shape.layers, nodes);
        let slice = |&layers: &usize| Slice {
            layers,
            tier1: kernels.clone(),
            local_rows: rows,
            tier2: Vec::new(),
        };
        let hop = NetworkLink::new(rtt_ms, 8.0);
        let configuration = Configuration {
            shape: shape.clone(),
            slices: slices.iter().map(slice).collect(),
            flights,
            contexts: Contexts::Fixed(2048.0),
            hop,
            inter: hop,
            tier2_bandwidth: 1e9,
            traffic: RowTraffic::StateObject,
            rules: Rules::Listing,
            disturbance: Disturbance::default(),
            seed: 0,
        };
        let compute = kernels.pre_seconds(rows)
            + kernels.post_seconds(rows)
            + kernels.attention_seconds(rows, 2048.0);
        let transfer = rows as f64 * RowTraffic::StateObject.hop_bytes(&shape) / hop.bandwidth;
        let generated = listing(&slices, &[compute, transfer, hop.rtt_seconds / 2.0], flights, 40);
        let between = (generated[39] - generated[19]) / 20.0;
        let listed = (rows * flights) as f64 / between;
        let ours = simulate(&configuration).tokens_per_second;
        let name = format!("{nodes} x {rows}, {flights} flights, {rtt_ms} ms");
        assert!((ours / listed - 1.0).abs() < 0.02, "{name}: {ours} against {listed}");
    }
}
