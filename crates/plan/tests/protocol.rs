//! The simulator against the protocol itself: the real dispatcher and nodes, driven in virtual time with the same
//! kernel times and links, reach the throughput that the planner foresees.

use glinthawk_flight::Row;
use glinthawk_model::even_slices;
use glinthawk_plan::{
    Catalogue, Configuration, Contexts, Disturbance, Group, KernelTimes, NetworkLink, RowTraffic,
    Rules, Shape, Slice, simulate,
};
use glinthawk_protocol::virtual_time::{self, Costs, SimulatedCluster};
use glinthawk_protocol::{DispatcherConfig, Merge, Prompt, Stage};
use std::sync::Arc;

/// The most that the two may differ by.
const TOLERANCE: f64 = 0.05;
/// Steps of every prompt; the rate is taken between a short and a long run, so that neither start nor end counts.
const STEPS: [u32; 2] = [12, 36];

/// The planner's times and links, as the virtual-time driver asks for them.
struct Planned<'a>(&'a Configuration);

impl Planned<'_> {
    fn ns(seconds: f64) -> u64 {
        (seconds * 1e9).round() as u64
    }
}

impl Costs for Planned<'_> {
    fn tier1_ns(&mut self, slice: usize, stage: Stage, rows: usize) -> u64 {
        let kernels = &self.0.slices[slice].tier1;
        Self::ns(match stage {
            Stage::Enter => kernels.pre_seconds(rows),
            Stage::Middle(_) => kernels.fused_seconds(rows),
            Stage::Exit if slice + 1 == self.0.slices.len() => {
                kernels.post_seconds(rows) + kernels.classify_seconds(rows)
            }
            Stage::Exit => kernels.post_seconds(rows),
        })
    }

    fn tier2_ns(&mut self, slice: usize, _lane: u32, rows: &[Row]) -> u64 {
        let kernels = &self.0.slices[slice].tier2[0].kernels;
        Self::ns(kernels.attention_seconds(rows.len(), self.0.contexts.mean()))
    }

    fn link_ns(&mut self, link: virtual_time::Wire, rows: usize) -> (u64, u64) {
        let Configuration { shape, traffic, hop, inter, tier2_bandwidth, .. } = self.0;
        let rows = rows as f64;
        let (occupied, latency) = match link {
            virtual_time::Wire::Launch => (0.0, 0.0),
            virtual_time::Wire::Home if self.0.slices.len() == 1 => (0.0, 0.0),
            virtual_time::Wire::Home => (0.0, hop.rtt_seconds / 2.0),
            virtual_time::Wire::Hop(_) => {
                (rows * traffic.hop_bytes(shape) / hop.bandwidth, hop.rtt_seconds / 2.0)
            }
            virtual_time::Wire::Out(..) => {
                (rows * traffic.out_bytes(shape) / tier2_bandwidth, inter.rtt_seconds / 2.0)
            }
            virtual_time::Wire::Back(..) => {
                (rows * traffic.back_bytes(shape) / tier2_bandwidth, inter.rtt_seconds / 2.0)
            }
        };
        (Self::ns(occupied), Self::ns(latency))
    }
}

/// Virtual seconds in which the protocol takes every prompt through `steps` steps.
fn protocol_seconds(configuration: &Configuration, steps: u32) -> f64 {
    let group = &configuration.slices[0].tier2[0];
    let (lanes, batch, flights) = (group.nodes, group.rows as u32, configuration.flights as u32);
    let pages = flights * batch * (steps + 1).div_ceil(16);
    let topology = SimulatedCluster {
        slice_layers: configuration.slices.iter().map(|slice| slice.layers as u32).collect(),
        tier1_rows_max: configuration.rows(),
        works_max: 1,
        dispatcher: DispatcherConfig {
            flights,
            slices: configuration.slices.len() as u32,
            pipelines: 1,
            weights_positions: configuration.shape.weights_positions(),
            batch,
            own_lane: None,
            filled_first: None,
            chunk: 1,
            lane_pages: vec![pages; lanes],
            page_positions: 16,
            context_max: steps + 1,
            oversubscription: 1.0,
            merge: Merge::Ready,
            nodes_apart: true,
            run_ahead: false,
            drafts: None,
            sharing: false,
        },
        faults: Vec::new(),
        load_ns: 0,
        replace_within_ns: 0,
        patience_ns: 0..=0,
        planted: None,
    };
    let prompts = (0..configuration.rows() * configuration.flights).map(|id| {
        let tokens = vec![id as u32 % 7];
        let prompt = Prompt { tokens, tokens_max: steps, ..Prompt::default() };
        (0, prompt)
    });
    let report = virtual_time::run(&topology, prompts.collect(), &mut Planned(configuration));
    let report = report.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(report.stats.preemptions, 0);
    report.end_ns as f64 * 1e-9
}

/// K slices of a model of twelve layers with K' nodes of B rows each.
fn configuration(
    (nodes, lanes, batch, flights): (usize, usize, usize, usize),
    (rtt_ms, gbps): (f64, f64),
) -> Configuration {
    let shape = Shape { layers: 12, ..Shape::llama2_70b() };
    let catalogue = Catalogue::built_in();
    let kernels =
        |name| Arc::new(KernelTimes::analytic(catalogue.get(name).expect("built in"), &shape));
    let (tier1, tier2) = (kernels("t4"), kernels("epyc-7v12-16"));
    let slice = |layers| Slice {
        layers,
        tier1: tier1.clone(),
        local_rows: 0,
        tier2: vec![Group { kernels: tier2.clone(), nodes: lanes, rows: batch }],
    };
    Configuration {
        slices: even_slices(shape.layers, nodes).into_iter().map(slice).collect(),
        flights,
        contexts: Contexts::Fixed(600.0),
        hop: NetworkLink::new(rtt_ms, gbps),
        // The driver has a link for every Tier-2 node and no other limit on the Tier-1 node's.
        inter: NetworkLink { bandwidth: f64::INFINITY, ..NetworkLink::new(rtt_ms, gbps) },
        tier2_bandwidth: NetworkLink::new(rtt_ms, gbps).bandwidth,
        traffic: RowTraffic::ResidualHome,
        rules: Rules::Full,
        disturbance: Disturbance::default(),
        seed: 0,
        shape,
    }
}

/// Tokens per second by the protocol and by the simulator.
fn rates(configuration: &Configuration) -> (f64, f64) {
    let [short, long] = STEPS.map(|steps| protocol_seconds(configuration, steps));
    let rows = (configuration.rows() * configuration.flights) as f64;
    let protocol = rows * f64::from(STEPS[1] - STEPS[0]) / (long - short);
    (protocol, simulate(configuration).tokens_per_second)
}

#[test]
fn protocol_and_simulator_agree_on_throughput() {
    let mut errors: Vec<(f64, String)> = Vec::new();
    for nodes in 1..=3 {
        for lanes in 1..=3 {
            for batch in [4, 32] {
                for flights in [1, 2, 5, 12] {
                    for link in [(0.2, 40.0), (10.0, 40.0), (2.0, 2.0)] {
                        let shape = (nodes, lanes, batch, flights);
                        let (protocol, simulated) = rates(&configuration(shape, link));
                        let what = format!(
                            "K, K', B, flights = {shape:?}, ms and Gbps = {link:?}: {protocol:.1} by the protocol, \
                             {simulated:.1} simulated"
                        );
                        errors.push((simulated / protocol - 1.0, what));
                    }
                }
            }
        }
    }
    errors.sort_by(|(left, _), (right, _)| right.abs().total_cmp(&left.abs()));
    println!("worst of {}: {:?}", errors.len(), errors[0]);
    errors.retain(|(error, _)| error.abs() > TOLERANCE);
    assert!(errors.is_empty(), "{errors:#?}");
}
