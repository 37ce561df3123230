//! A configuration compiled to what the event loop runs: steps on Tier-1 nodes, each with a fan of shards.

use crate::configuration::{Configuration, Contexts, Rules, Slice};
use crate::random::{Random, mix};

/// Sampled service times kept per shard; a draw picks one of them.
const SAMPLES: usize = 256;

/// One service on a Tier-1 node and what follows it.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// The Tier-1 node.
    pub node: u32,
    /// Seconds it is busy.
    pub seconds: f64,
    /// Whether the rows then go to their attention workers.
    pub attends: bool,
    /// Seconds on the link to the next node.
    pub hop: f64,
    /// Delay to the next node.
    pub hop_delay: f64,
}

/// A shard's way to a Tier-2 node and back; `copies` identical nodes stand behind one worker.
#[derive(Clone, Debug)]
pub(crate) struct ShardPath {
    pub worker: u32,
    pub copies: u32,
    /// Seconds of one copy on the Tier-1 node's outgoing link.
    pub send: f64,
    /// Seconds the Tier-2 node's slower incoming link adds.
    pub send_extra: f64,
    /// Seconds of attention.
    pub attend: f64,
    /// Seconds of attention drawn from the workload; empty where every draw is `attend`.
    pub samples: Vec<f64>,
    /// Seconds of one copy on the Tier-1 node's incoming link.
    pub reply: f64,
    /// Seconds of one copy on the Tier-2 node's outgoing link.
    pub reply_node: f64,
}

/// Where a slice's rows attend.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fan {
    /// Seconds of attention on the Tier-1 node itself.
    pub local: f64,
    pub shards: Vec<ShardPath>,
}

/// What limits throughput.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// A Tier-1 node's kernels.
    Tier1Compute,
    /// A Tier-2 node's attention.
    Tier2Compute,
    /// A Tier-1 node's links to Tier 2.
    InterTierLink,
    /// A Tier-2 node's own links.
    Tier2Link,
    /// The link between slices.
    HopLink,
    /// Too few flights to cover the way there and back: more context memory would help.
    Latency,
}

impl Bottleneck {
    /// The bottleneck in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Tier1Compute => "Tier-1 compute",
            Self::Tier2Compute => "Tier-2 attention",
            Self::InterTierLink => "the Tier-1 node's inter-tier link",
            Self::Tier2Link => "the Tier-2 node's link",
            Self::HopLink => "the link between Tier-1 nodes",
            Self::Latency => "latency (too few flights fit into context memory)",
        }
    }
}

/// A configuration's steps, fans and sizes.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub steps: Vec<Step>,
    /// One per Tier-1 node.
    pub fans: Vec<Fan>,
    pub workers: usize,
    pub rows: usize,
    pub flights: usize,
    /// One-way delay between the tiers.
    pub delay: f64,
    /// Whole flights are sent, then received, as in the paper; else shards stream.
    pub whole_flights: bool,
    pub jitter: f64,
    pub seed: u64,
}

/// Seconds of an unhindered pass, by what they are spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pass {
    pub tier1: f64,
    pub tier2: f64,
    pub network: f64,
}

impl Pass {
    pub fn total(&self) -> f64 {
        self.tier1 + self.tier2 + self.network
    }
}

impl Program {
    pub fn of(configuration: &Configuration) -> Self {
        let rows = configuration.rows();
        let layers: usize = configuration.slices.iter().map(|slice| slice.layers).sum();
        assert_eq!(layers, configuration.shape.layers, "the slices cover the model's layers");
        assert!(rows > 0 && configuration.flights > 0, "there is something to run");
        let mut program = Self {
            steps: Vec::with_capacity(layers + configuration.slices.len()),
            fans: Vec::with_capacity(configuration.slices.len()),
            workers: 0,
            rows,
            flights: configuration.flights,
            delay: configuration.inter.rtt / 2.0,
            whole_flights: configuration.rules == Rules::Paper,
            jitter: configuration.disturbance.jitter,
            seed: configuration.seed,
        };
        for (node, slice) in configuration.slices.iter().enumerate() {
            assert_eq!(slice.rows(), rows, "every slice sees every row of a flight");
            match configuration.rules {
                Rules::Paper => program.push_paper_steps(configuration, node, slice),
                Rules::Full => program.push_steps(configuration, node, slice),
            }
            let fan = program.fan(configuration, slice);
            program.fans.push(fan);
        }
        program
    }

    fn push_paper_steps(&mut self, configuration: &Configuration, node: usize, slice: &Slice) {
        let local = slice.tier1.attention(slice.local_rows, configuration.contexts.mean());
        let single_tier = slice.is_single_tier();
        let hop_bytes = configuration.traffic.hop_bytes(&configuration.shape) * self.rows as f64;
        for layer in 1..=slice.layers {
            let hops = single_tier && layer == slice.layers;
            self.steps.push(Step {
                node: node as u32,
                seconds: slice.tier1.pre(self.rows) + slice.tier1.post(self.rows) + local,
                attends: !single_tier,
                hop: if hops { hop_bytes / configuration.hop.bandwidth } else { 0.0 },
                hop_delay: if hops { configuration.hop.rtt / 2.0 } else { 0.0 },
            });
        }
    }

    fn push_steps(&mut self, configuration: &Configuration, node: usize, slice: &Slice) {
        let single_tier = slice.is_single_tier();
        let last_slice = node + 1 == configuration.slices.len();
        let alone = configuration.slices.len() == 1;
        // The last slice sends token ids to the dispatcher beside slice 0: delay without weight.
        let hop_bytes = if last_slice || alone {
            0.0
        } else {
            configuration.traffic.hop_bytes(&configuration.shape)
        };
        let local = slice.tier1.attention(slice.local_rows, configuration.contexts.mean());
        for layer in 0..=slice.layers {
            let ends = layer == slice.layers;
            let mut seconds = match layer {
                0 => slice.tier1.pre(self.rows),
                _ if ends => slice.tier1.post(self.rows),
                _ => slice.tier1.fused(self.rows),
            };
            if ends && last_slice {
                seconds += slice.tier1.classify(self.rows);
            }
            if !ends && single_tier {
                seconds += local;
            }
            self.steps.push(Step {
                node: node as u32,
                seconds,
                attends: !ends && !single_tier,
                hop: if ends {
                    hop_bytes * self.rows as f64 / configuration.hop.bandwidth
                } else {
                    0.0
                },
                hop_delay: if ends && !alone { configuration.hop.rtt / 2.0 } else { 0.0 },
            });
        }
    }

    fn fan(&mut self, configuration: &Configuration, slice: &Slice) -> Fan {
        let shape = &configuration.shape;
        let local = match configuration.rules {
            Rules::Full if !slice.is_single_tier() => {
                slice.tier1.attention(slice.local_rows, configuration.contexts.mean())
            }
            _ => 0.0,
        };
        let mut shards = Vec::new();
        for group in slice.tier2.iter().filter(|group| group.rows > 0) {
            let out = configuration.traffic.out_bytes(shape) * group.rows as f64;
            let back = configuration.traffic.back_bytes(shape) * group.rows as f64;
            let (near, far) = (configuration.inter.bandwidth, configuration.tier2_bandwidth);
            let (entries, copies) =
                if configuration.is_uneven() { (group.nodes, 1) } else { (1, group.nodes) };
            for _ in 0..entries {
                let worker = self.workers as u32;
                self.workers += 1;
                let slowdown = straggler_factor(configuration, worker);
                shards.push(ShardPath {
                    worker,
                    copies: copies as u32,
                    send: out / near,
                    send_extra: (out / far - out / near).max(0.0),
                    attend: slowdown
                        * group.kernels.attention(group.rows, configuration.contexts.mean()),
                    samples: sample_attention(configuration, group, worker, slowdown),
                    reply: back / near,
                    reply_node: back / far,
                });
            }
        }
        Fan { local, shards }
    }

    /// Whether every service takes the time the bound reckons with.
    pub fn is_deterministic(&self) -> bool {
        let mut shards = self.fans.iter().flat_map(|fan| &fan.shards);
        self.jitter == 0.0 && shards.all(|shard| shard.samples.is_empty())
    }

    /// Seconds of a pass in which nothing waits, split by what they are spent on.
    pub fn unhindered(&self) -> Pass {
        let mut pass = Pass::default();
        let fans: Vec<Pass> = self.fans.iter().map(|fan| self.fan_unhindered(fan)).collect();
        for step in &self.steps {
            pass.tier1 += step.seconds;
            pass.network += step.hop + step.hop_delay;
            if step.attends {
                let fan = &fans[step.node as usize];
                pass.tier1 += fan.tier1;
                pass.tier2 += fan.tier2;
                pass.network += fan.network;
            }
        }
        pass
    }

    fn fan_unhindered(&self, fan: &Fan) -> Pass {
        let mut sent = 0.0;
        let mut slowest = Pass { tier1: fan.local, ..Pass::default() };
        for shard in &fan.shards {
            let copies = f64::from(shard.copies);
            sent += copies * shard.send;
            let reply = if self.whole_flights {
                copies * shard.reply
            } else {
                shard.reply.max(shard.reply_node)
            };
            let network = sent + shard.send_extra + reply + 2.0 * self.delay;
            if network + shard.attend > slowest.total() {
                slowest = Pass { tier1: 0.0, tier2: shard.attend, network };
            }
        }
        slowest
    }

    /// Rows per second no run can exceed, and what sets the limit: the busiest resource, or Little's law.
    pub fn bound(&self) -> (f64, Bottleneck) {
        let nodes = self.fans.len();
        let (mut compute, mut hops, mut attends) =
            (vec![0.0; nodes], vec![0.0; nodes], vec![0.0; nodes]);
        for step in &self.steps {
            let node = step.node as usize;
            compute[node] += step.seconds + if step.attends { self.fans[node].local } else { 0.0 };
            hops[node] += step.hop;
            attends[node] += f64::from(u8::from(step.attends));
        }
        let mut slowest = (self.unhindered().total() / self.flights as f64, Bottleneck::Latency);
        let mut consider = |seconds: f64, what| {
            if seconds > slowest.0 {
                slowest = (seconds, what);
            }
        };
        for node in 0..nodes {
            consider(compute[node], Bottleneck::Tier1Compute);
            consider(hops[node], Bottleneck::HopLink);
            let (mut out, mut back) = (0.0, 0.0);
            for shard in &self.fans[node].shards {
                let copies = f64::from(shard.copies);
                out += copies * shard.send;
                back += copies * shard.reply;
                consider(attends[node] * shard.attend, Bottleneck::Tier2Compute);
                // The paper's algorithm knows only the Tier-1 node's end of the link.
                if !self.whole_flights {
                    let slower = (shard.send + shard.send_extra).max(shard.reply_node);
                    consider(attends[node] * slower, Bottleneck::Tier2Link);
                }
            }
            consider(attends[node] * f64::max(out, back), Bottleneck::InterTierLink);
        }
        (self.rows as f64 / slowest.0, slowest.1)
    }
}

fn straggler_factor(configuration: &Configuration, worker: u32) -> f64 {
    let disturbance = &configuration.disturbance;
    let mut random = Random::new(mix(configuration.seed ^ 0x57A6) ^ u64::from(worker));
    if random.unit() < disturbance.straggler_share {
        1.0 + disturbance.straggler_extra
    } else {
        1.0
    }
}

fn sample_attention(
    configuration: &Configuration,
    group: &crate::configuration::Group,
    worker: u32,
    slowdown: f64,
) -> Vec<f64> {
    let Contexts::Sampled(workload) = &configuration.contexts else { return Vec::new() };
    let mut random = Random::new(mix(configuration.seed ^ 0xC0) ^ u64::from(worker));
    let mean_of = |random: &mut Random| {
        (0..group.rows).map(|_| workload.draw_context(random)).sum::<f64>() / group.rows as f64
    };
    (0..SAMPLES)
        .map(|_| slowdown * group.kernels.attention(group.rows, mean_of(&mut random)))
        .collect()
}
