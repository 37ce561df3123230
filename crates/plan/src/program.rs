//! A configuration compiled to what the event loop runs: stages on Tier-1 nodes, lanes, and their routes to Tier
//! 2.

use crate::bound::{Bottleneck, Demand, Line, Load, Local};
use crate::configuration::{Configuration, Contexts, Group, Rules, Slice};
use crate::kernels::KernelTimes;
use crate::random::{Random, mix};
use std::sync::Arc;

/// Sampled service times kept per lane and slice; a draw picks one of them.
const SAMPLES: usize = 256;

/// The products of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Products {
    Pre,
    Fused,
    Post,
    PostAndClassify,
    /// The paper's stage: post and pre, not fused.
    PreAndPost,
}

/// How long a kind of stage takes.
#[derive(Clone, Debug)]
pub(crate) struct StageTime {
    kernels: Arc<KernelTimes>,
    products: Products,
    /// Seconds of attention inside the stage.
    attention_seconds: f64,
}

impl StageTime {
    /// Seconds for a batch of `rows` rows.
    pub fn seconds(&self, rows: usize) -> f64 {
        let kernels = &self.kernels;
        let products = match self.products {
            Products::Pre => kernels.pre_seconds(rows),
            Products::Fused => kernels.fused_seconds(rows),
            Products::Post => kernels.post_seconds(rows),
            Products::PostAndClassify => {
                kernels.post_seconds(rows) + kernels.classify_seconds(rows)
            }
            Products::PreAndPost => kernels.pre_seconds(rows) + kernels.post_seconds(rows),
        };
        products + self.attention_seconds
    }
}

/// One service on a Tier-1 node and what follows it.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    /// The Tier-1 node.
    pub node: u32,
    /// Which of the program's times it takes.
    pub time: u32,
    /// Whether the rows then go to their attention workers.
    pub attends: bool,
    /// Seconds of a row on the link to the next node.
    pub hop_row_seconds: f64,
    /// Delay to the next node.
    pub hop_delay_seconds: f64,
}

/// One position in every slice's list of attention workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    /// Rows of a flight on it.
    pub rows: usize,
    /// Whether the worker is the Tier-1 node itself.
    pub local: bool,
}

/// A lane's route from a slice's Tier-1 node to its worker and back, in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Way {
    /// On the Tier-1 node's outgoing link, which its lanes share.
    pub send_seconds: f64,
    /// On the Tier-2 node's incoming link.
    pub send_far_seconds: f64,
    /// Attention.
    pub attend_seconds: f64,
    /// Attention drawn from the workload; empty if every draw is `attend`.
    pub attend_samples_seconds: Vec<f64>,
    /// On the Tier-1 node's incoming link, which its lanes share.
    pub reply_seconds: f64,
    /// On the Tier-2 node's outgoing link.
    pub reply_far_seconds: f64,
}

impl Way {
    fn transfer_seconds(&self) -> f64 {
        self.send_seconds.max(self.send_far_seconds)
            + self.reply_seconds.max(self.reply_far_seconds)
    }
}

/// A configuration's stages, lanes and ways.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub stages: Vec<Stage>,
    pub times: Vec<StageTime>,
    pub nodes: usize,
    /// The same on every slice. The paper's algorithms send whole flights: one lane, whose node stands for all of a slice.
    pub lanes: Vec<Lane>,
    /// (node, lane), row-major
    pub ways: Vec<Way>,
    /// Rows in one Tier-1 batch at most.
    pub rows: usize,
    pub flights: usize,
    /// One-way delay between the tiers.
    pub delay_seconds: f64,
    /// Whether the dispatcher is given its prompts one by one, so that a shard's first step has one row.
    pub one_by_one: bool,
    pub jitter: f64,
    pub seed: u64,
}

impl Program {
    pub fn of(configuration: &Configuration) -> Self {
        let rows = configuration.rows();
        let layers: usize = configuration.slices.iter().map(|slice| slice.layers).sum();
        assert_eq!(layers, configuration.shape.layers, "the slices cover the model's layers");
        assert!(rows > 0 && configuration.flights > 0, "there is something to run");
        let nodes = configuration.slices.len();
        let lanes = lanes_of(configuration.rules, &configuration.slices[0]);
        let mut program = Self {
            stages: Vec::with_capacity(layers + nodes),
            times: Vec::new(),
            nodes,
            ways: Vec::with_capacity(nodes * lanes.len()),
            lanes,
            rows,
            flights: configuration.flights,
            delay_seconds: configuration.inter.rtt_seconds / 2.0,
            one_by_one: configuration.rules == Rules::Full,
            jitter: configuration.disturbance.jitter,
            seed: configuration.seed,
        };
        for (node, slice) in configuration.slices.iter().enumerate() {
            let lanes = lanes_of(configuration.rules, slice);
            assert_eq!(lanes, program.lanes, "a flight has the same lanes on every slice");
            match configuration.rules {
                Rules::Paper | Rules::Listing => {
                    program.push_paper_stages(configuration, node, slice)
                }
                Rules::Full => program.push_stages(configuration, node, slice),
            }
            program.push_ways(configuration, slice);
        }
        program
    }

    /// The index of a time; slices with the same kernels share theirs.
    fn time(&mut self, slice: &Slice, products: Products, attention_seconds: f64) -> u32 {
        let same = |time: &StageTime| {
            Arc::ptr_eq(&time.kernels, &slice.tier1)
                && time.products == products
                && time.attention_seconds == attention_seconds
        };
        let index = self.times.iter().position(same).unwrap_or_else(|| {
            self.times.push(StageTime {
                kernels: slice.tier1.clone(),
                products,
                attention_seconds,
            });
            self.times.len() - 1
        });
        index as u32
    }

    fn push_paper_stages(&mut self, configuration: &Configuration, node: usize, slice: &Slice) {
        let local = configuration.contexts.attention_seconds(&slice.tier1, slice.local_rows);
        let single_tier = slice.is_single_tier();
        let hop_bytes = configuration.traffic.hop_bytes(&configuration.shape);
        let time = self.time(slice, Products::PreAndPost, local);
        for layer in 1..=slice.layers {
            let sends = layer == slice.layers || configuration.rules == Rules::Listing;
            let hops = single_tier && sends;
            self.stages.push(Stage {
                node: node as u32,
                time,
                attends: !single_tier,
                hop_row_seconds: if hops { hop_bytes / configuration.hop.bandwidth } else { 0.0 },
                hop_delay_seconds: if hops { configuration.hop.rtt_seconds / 2.0 } else { 0.0 },
            });
        }
    }

    fn push_stages(&mut self, configuration: &Configuration, node: usize, slice: &Slice) {
        let single_tier = slice.is_single_tier();
        let last_slice = node + 1 == configuration.slices.len();
        let alone = configuration.slices.len() == 1;
        // The last slice sends token ids to the dispatcher beside slice 0: delay without weight.
        let hop_bytes =
            if last_slice { 0.0 } else { configuration.traffic.hop_bytes(&configuration.shape) };
        let inside = if single_tier {
            configuration.contexts.attention_seconds(&slice.tier1, slice.local_rows)
        } else {
            0.0
        };
        for layer in 0..=slice.layers {
            let ends = layer == slice.layers;
            let time = match layer {
                0 => self.time(slice, Products::Pre, inside),
                _ if ends && last_slice => self.time(slice, Products::PostAndClassify, 0.0),
                _ if ends => self.time(slice, Products::Post, 0.0),
                _ => self.time(slice, Products::Fused, inside),
            };
            self.stages.push(Stage {
                node: node as u32,
                time,
                attends: !ends && !single_tier,
                hop_row_seconds: if ends { hop_bytes / configuration.hop.bandwidth } else { 0.0 },
                hop_delay_seconds: if ends && !alone {
                    configuration.hop.rtt_seconds / 2.0
                } else {
                    0.0
                },
            });
        }
    }

    fn push_ways(&mut self, configuration: &Configuration, slice: &Slice) {
        let contexts = &configuration.contexts;
        let (near, far) = (configuration.inter.bandwidth, configuration.tier2_bandwidth);
        let (shape, traffic) = (&configuration.shape, configuration.traffic);
        if configuration.rules.is_paper() || slice.is_single_tier() {
            let rows = slice.remote_rows() as f64;
            let slowest = slice
                .tier2
                .iter()
                .map(|group| contexts.attention_seconds(&group.kernels, group.rows));
            self.ways.push(Way {
                send_seconds: rows * traffic.out_bytes(shape) / near,
                attend_seconds: slowest.fold(0.0, f64::max),
                reply_seconds: rows * traffic.back_bytes(shape) / near,
                ..Way::default()
            });
            return;
        }
        if slice.local_rows > 0 {
            let attend = contexts.attention_seconds(&slice.tier1, slice.local_rows);
            self.ways.push(Way { attend_seconds: attend, ..Way::default() });
        }
        for group in slice.tier2.iter().filter(|group| group.rows > 0) {
            let out = traffic.out_bytes(shape) * group.rows as f64;
            let back = traffic.back_bytes(shape) * group.rows as f64;
            let attend = contexts.attention_seconds(&group.kernels, group.rows);
            for _ in 0..group.nodes {
                let worker = self.ways.len() as u64;
                let slowdown = straggler_factor(configuration, worker);
                self.ways.push(Way {
                    send_seconds: out / near,
                    send_far_seconds: out / far,
                    attend_seconds: slowdown * attend,
                    attend_samples_seconds: sample_attention(
                        configuration,
                        group,
                        worker,
                        slowdown,
                    ),
                    reply_seconds: back / near,
                    reply_far_seconds: back / far,
                });
            }
        }
    }

    /// Whether every service takes exactly the time that the bound assumes.
    pub fn is_deterministic(&self) -> bool {
        self.jitter == 0.0 && self.ways.iter().all(|way| way.attend_samples_seconds.is_empty())
    }

    /// The attention worker of a node's lane.
    pub fn way(&self, node: usize, lane: usize) -> &Way {
        &self.ways[node * self.lanes.len() + lane]
    }

    /// How many stages of each node attend.
    fn attends(&self) -> Vec<f64> {
        let mut attends = vec![0.0; self.nodes];
        for stage in self.stages.iter().filter(|stage| stage.attends) {
            attends[stage.node as usize] += 1.0;
        }
        attends
    }

    /// Seconds of a lane's step on links and in delays, if nothing waits.
    fn lane_network_seconds(&self, lane: usize, attends: &[f64]) -> f64 {
        let Lane { rows, local } = self.lanes[lane];
        let hops: f64 = self
            .stages
            .iter()
            .map(|stage| stage.hop_row_seconds * rows as f64 + stage.hop_delay_seconds)
            .sum();
        let ways = attends.iter().enumerate().filter(|_| !local);
        let ways = ways.map(|(node, times)| {
            times * (self.way(node, lane).transfer_seconds() + 2.0 * self.delay_seconds)
        });
        hops + ways.sum::<f64>()
    }

    /// Seconds of a step on links and in delays if nothing waits, averaged over rows.
    pub fn network_seconds(&self) -> f64 {
        let attends = self.attends();
        let lanes = self.lanes.iter().enumerate();
        let seconds =
            lanes.map(|(lane, own)| own.rows as f64 * self.lane_network_seconds(lane, &attends));
        seconds.sum::<f64>() / self.rows as f64
    }

    /// Rows per second no run can exceed, and what sets the limit.
    pub fn bound(&self) -> (f64, Bottleneck) {
        let attends = self.attends();
        let least = self.lanes.iter().map(|lane| lane.rows).min().expect("there is a lane");
        let knots = self.times.iter().map(|time| {
            Line::below(|rows| time.seconds(rows), least, self.rows, &time.kernels.knots())
        });
        let lines: Vec<Line> = knots.collect();
        let mut local = None;
        let mut away = f64::INFINITY;
        for (lane, own) in self.lanes.iter().enumerate() {
            let attention: f64 = attends
                .iter()
                .enumerate()
                .map(|(node, times)| times * self.way(node, lane).attend_seconds)
                .sum();
            let step = self.lane_network_seconds(lane, &attends) + attention;
            away = away.min(step);
            if own.local && attends.iter().any(|&times| times > 0.0) {
                local = Some((lane, Local { rows: own.rows as f64, step_seconds: step }));
            }
        }
        let mut loads: Vec<Load> = (0..self.nodes)
            .map(|node| {
                let attention = local.map_or(0.0, |(lane, local)| {
                    attends[node] * self.way(node, lane).attend_seconds / local.rows
                });
                Load::new(1.0, attention)
            })
            .collect();
        let mut hops = vec![0.0; self.nodes];
        for stage in &self.stages {
            loads[stage.node as usize].add(lines[stage.time as usize], 1.0);
            hops[stage.node as usize] += stage.hop_row_seconds;
        }
        let demand = Demand {
            rows: self.rows as f64,
            rows_least: least as f64,
            flights: self.flights as f64,
            loads: &loads,
            away_seconds: away,
            remote: self.remote(&attends),
            local: local.map(|(_, local)| local),
            hop_row_seconds: hops.into_iter().fold(0.0, f64::max),
        };
        demand.limit()
    }

    /// The most rows per second that can reach Tier 2: lanes go at their own pace, on links that they
    /// share.
    fn remote(&self, attends: &[f64]) -> Option<(f64, Bottleneck)> {
        let remote = || self.lanes.iter().enumerate().filter(|(_, lane)| !lane.local);
        if attends.iter().all(|&times| times == 0.0) {
            return None;
        }
        let slowest = |seconds: &dyn Fn(&Way) -> f64| {
            let of = |(lane, own): (usize, &Lane)| {
                let times = attends.iter().enumerate();
                let busiest = times.map(|(node, times)| times * seconds(self.way(node, lane)));
                own.rows as f64 / busiest.fold(0.0, f64::max)
            };
            remote().map(of).sum::<f64>()
        };
        let shared = |seconds: &dyn Fn(&Way) -> f64| {
            let rows: f64 = remote().map(|(_, lane)| lane.rows as f64).sum();
            let least = |(node, times): (usize, &f64)| {
                let sum: f64 = remote().map(|(lane, _)| seconds(self.way(node, lane))).sum();
                times * sum / rows
            };
            1.0 / attends.iter().enumerate().map(least).fold(0.0, f64::max)
        };
        let limits = [
            (slowest(&|way| way.attend_seconds), Bottleneck::Tier2Compute),
            (shared(&|way| way.send_seconds.max(way.reply_seconds)), Bottleneck::InterTierLink),
            (
                slowest(&|way| way.send_far_seconds.max(way.reply_far_seconds)),
                Bottleneck::Tier2Link,
            ),
        ];
        limits.into_iter().min_by(|left, right| left.0.total_cmp(&right.0))
    }
}

/// The lanes of a slice: its own memory first, then every Tier-2 node.
fn lanes_of(rules: Rules, slice: &Slice) -> Vec<Lane> {
    if rules.is_paper() || slice.is_single_tier() {
        return vec![Lane { rows: slice.rows(), local: slice.is_single_tier() }];
    }
    let own = (slice.local_rows > 0).then_some(Lane { rows: slice.local_rows, local: true });
    let groups = slice.tier2.iter().filter(|group| group.rows > 0);
    let remote =
        groups.flat_map(|group| vec![Lane { rows: group.rows, local: false }; group.nodes]);
    own.into_iter().chain(remote).collect()
}

fn straggler_factor(configuration: &Configuration, worker: u64) -> f64 {
    let disturbance = &configuration.disturbance;
    let mut random = Random::new(mix(configuration.seed ^ 0x57A6) ^ worker);
    if random.unit() < disturbance.straggler_share {
        1.0 + disturbance.straggler_extra
    } else {
        1.0
    }
}

fn sample_attention(
    configuration: &Configuration,
    group: &Group,
    worker: u64,
    slowdown: f64,
) -> Vec<f64> {
    let Contexts::Sampled(workload) = &configuration.contexts else { return Vec::new() };
    let mut random = Random::new(mix(configuration.seed ^ 0xC0) ^ worker);
    let mean_of = |random: &mut Random| {
        (0..group.rows).map(|_| workload.draw_context(random)).sum::<f64>() / group.rows as f64
    };
    (0..SAMPLES)
        .map(|_| slowdown * group.kernels.attention_seconds(group.rows, mean_of(&mut random)))
        .collect()
}
