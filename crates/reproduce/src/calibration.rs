//! The unpublished kernel profiles, replaced by rooflines with five efficiencies fitted to five numbers of the paper.

use crate::prototype::{Experiment, Nodes, experiments, nodes};
use glinthawk_plan::Evaluation;
use glinthawk_plan::KernelTimes;
use glinthawk_plan::PlanError;
use glinthawk_plan::calculus::{NetworkLink, RowTraffic};
use glinthawk_plan::catalogue::{Catalogue, DeviceKind, Efficiency};
use glinthawk_plan::shape::{GIB, Shape};
use glinthawk_plan::simulate;
use glinthawk_plan::{Cluster, DevicePool};
use glinthawk_plan::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use glinthawk_plan::{PlannedJob, Settings, Space};
use glinthawk_plan::{best_at, search};
use std::sync::Arc;

/// The paper's numbers the rooflines are fitted to; everything else is held out or follows from these.
pub(crate) struct Anchors;

impl Anchors {
    /// One layer at batch 1 on a T4 (sec:kvc_strawman): the T4's memory.
    pub const LAYER_SECONDS: f64 = 5.6e-3;
    /// 16 T4 + 48 CPU (table:inter_bw): the T4's matrix products.
    pub const T4_BOUND: f64 = 1992.0;
    /// 16 T4 + 16 CPU (table:inter_bw): the CPU's attention.
    pub const CPU_BOUND: f64 = 1138.0;
    /// Time per token of 16 T4 + 48 CPU over that of 16 T4 (fig:e2e_tot): the GPUs' attention.
    pub const TIME_PER_TOKEN: f64 = 5.2;
    /// 4 A100 + 8 RTX 6000 (table:inter_bw): the matrix products of A100 and H100.
    pub const A100_BOUND: f64 = 1705.0;
}

/// Which number the GPUs' attention is fitted to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AttentionAnchor {
    /// Time per token of 16 T4 + 48 CPU over that of 16 T4.
    TimePerToken(f64),
    /// Throughput per GPU at 16K tokens over that of 80 T4.
    LongSequences(f64),
}

/// Nodes of one kind, and the cluster of the published data that has them alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub device: &'static str,
    pub nodes: usize,
    pub cluster: Option<&'static str>,
}

/// Two kinds of hardware that the paper paired in simulation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub name: &'static str,
    /// The cluster of the published data that has both.
    pub cluster: &'static str,
    pub tier1: Part,
    pub tier2: Part,
}

const fn part(device: &'static str, nodes: usize, cluster: &'static str) -> Part {
    Part { device, nodes, cluster: Some(cluster) }
}

const A100: Part = part("a100-40", 4, "single_a100");

/// The simulated rows of table:inter_bw.
pub(crate) const PAIRS: [Pair; 3] = [
    Pair {
        name: "4 A100 + 8 RTX 6000",
        cluster: "double_a100_rtx6000",
        tier1: A100,
        tier2: part("rtx6000", 8, "single_rtx6000"),
    },
    Pair {
        name: "4 A100 + 4 A6000",
        cluster: "double_a100_a6000",
        tier1: A100,
        tier2: part("a6000", 4, "single_a6000"),
    },
    Pair {
        name: "2 H100 + 20 T4",
        cluster: "double_h100_t4",
        tier1: part("h100-80", 2, "single_h100"),
        tier2: part("t4", 20, "single_t4"),
    },
];

/// The paper's testbed with fitted efficiencies.
#[derive(Clone, Debug)]
pub struct Testbed {
    /// The model.
    pub shape: Shape,
    /// Devices with their fitted efficiencies.
    pub devices: Vec<DeviceKind>,
    /// Whether a single tier hops after every slice or after every layer.
    pub(crate) rules: Rules,
    /// The prototype's published configurations.
    pub(crate) experiments: Vec<Experiment>,
}

/// Oversubscription of context memory in the paper's search (app:simulation).
pub(crate) const OVERSUBSCRIPTION: f64 = 3.0;
/// The range the paper had to reduce it to for single tiers.
pub(crate) const OVERSUBSCRIPTION_ALONE: [f64; 2] = [2.0, 2.5];
/// The natural round trip of the testbed.
pub(crate) const RTT_MS: f64 = 2.0;
/// The longest context; the paper's simulator attends to it always.
pub(crate) const LONGEST: f64 = 2048.0;

/// A T4's memory in the paper's search.
const T4_MEMORY_GIB: f64 = 16.0;
pub(crate) const CPU: &str = "epyc-7v12-16";
const LARGE: [&str; 2] = ["a100-40", "h100-80"];

impl Testbed {
    /// Fits the five efficiencies in turn; each anchor decides one of them.
    pub fn calibrated() -> Result<Self, PlanError> {
        Self::calibrated_to(AttentionAnchor::TimePerToken(Anchors::TIME_PER_TOKEN), Rules::Paper)
    }

    pub(crate) fn calibrated_to(
        attention: AttentionAnchor,
        rules: Rules,
    ) -> Result<Self, PlanError> {
        let (shape, mut devices) = (Shape::llama2_70b(), Catalogue::built_in().devices);
        // The paper's search reckons with all of a T4's 16 GB, and so places 70B on 9 of them.
        let t4 = devices.iter_mut().find(|device| device.name == "t4");
        t4.expect("the catalogue has the paper's devices").memory_gib.value = T4_MEMORY_GIB;
        let mut testbed = Self { shape, devices, rules, experiments: experiments()? };
        testbed.fit_products();
        testbed.fit_cpu_attention();
        testbed.fit_gpu_attention(attention);
        testbed.fit_large_products();
        Ok(testbed)
    }

    /// A device by name.
    pub fn device(&self, name: &str) -> &DeviceKind {
        self.devices
            .iter()
            .find(|device| device.name == name)
            .expect("the catalogue has the paper's devices")
    }

    /// A published experiment by the end of its name.
    pub(crate) fn experiment(&self, name: &str) -> &Experiment {
        self.experiments
            .iter()
            .find(|experiment| experiment.name.ends_with(name))
            .expect("in the published data")
    }

    /// The kernels of a device.
    pub fn kernels(&self, name: &str) -> Arc<KernelTimes> {
        Arc::new(KernelTimes::analytic(self.device(name), &self.shape))
    }

    /// Simulated tokens per second of an experiment whose rows attend to `context` positions.
    pub(crate) fn rate(&self, experiment: &Experiment, context: f64) -> f64 {
        simulate(&self.configuration(experiment, context)).tokens_per_second
    }

    fn set(&mut self, matches: impl Fn(&str) -> bool, apply: impl Fn(&mut Efficiency)) {
        let devices = self.devices.iter_mut().filter(|device| matches(&device.name));
        devices.for_each(|device| apply(&mut device.efficiency));
    }

    /// Two points of t(B) = load + B · multiply give bandwidth and matrix efficiency of the T4; all GPUs take them.
    fn fit_products(&mut self) {
        let anchor = self.experiment("16xT4_48xCPU_B246");
        let (rows, layers) = (anchor.rows as f64, (self.shape.layers / anchor.tier1) as f64);
        let at_rows = rows / (Anchors::T4_BOUND * layers);
        let multiply = (at_rows - Anchors::LAYER_SECONDS) / (rows - 1.0);
        let load = Anchors::LAYER_SECONDS - multiply;
        let t4 = self.device("t4");
        let bandwidth = self.shape.layer_bytes() / load / (t4.bandwidth_gb_s.value * 1e9);
        let matrix = self.shape.layer_bytes() / multiply / (t4.matrix_tflops.value * 1e12);
        self.set(
            |name| name != CPU,
            |efficiency| {
                (efficiency.weights_bandwidth, efficiency.context_bandwidth) =
                    (bandwidth, bandwidth);
                efficiency.matrix = matrix;
            },
        );
    }

    fn fit_cpu_attention(&mut self) {
        let anchor = self.experiment("16xT4_16xCPU_B112").clone();
        self.set(|name| name == CPU, |efficiency| efficiency.vector = 1.0);
        bisect(Anchors::CPU_BOUND, |share| {
            self.set(|name| name == CPU, |efficiency| efficiency.context_bandwidth = share);
            self.rate(&anchor, LONGEST)
        });
    }

    /// The vector efficiency of a T4 that attends to its own contexts; all GPUs take it.
    fn fit_gpu_attention(&mut self, anchor: AttentionAnchor) {
        let (single, two, target, context) = match anchor {
            AttentionAnchor::TimePerToken(ratio) => {
                // Little's law: time per token = rows in the air / tokens per second.
                let (single, two) =
                    (self.experiment("16xT4_B14"), self.experiment("16xT4_48xCPU_B246"));
                let target = ratio * single.in_air() / two.in_air();
                (single.clone(), two.clone(), target, LONGEST)
            }
            AttentionAnchor::LongSequences(ratio) => {
                let (single, two) =
                    (self.experiment("16K/L70B_80xT4_B3"), self.experiment("9xT4_144xCPU_B32"));
                let target = single.tier1 as f64 / two.tier1 as f64 / ratio;
                (single.clone(), two.clone(), target, 16384.0)
            }
        };
        let two_tier = self.rate(&two, context);
        bisect(target * two_tier, |share| {
            self.set(|name| name != CPU, |efficiency| efficiency.vector = share);
            self.rate(&single, context)
        });
    }

    /// The matrix efficiency of an A100; the H100 takes it.
    fn fit_large_products(&mut self) {
        bisect(Anchors::A100_BOUND, |share| {
            self.set(|name| LARGE.contains(&name), |efficiency| efficiency.matrix = share);
            self.pairing(&PAIRS[0]).map_or(0.0, |best| best.tokens_per_second)
        });
    }

    /// An experiment of the prototype under the paper's rules, attending to `context` positions.
    pub(crate) fn configuration(&self, experiment: &Experiment, context: f64) -> Configuration {
        let each = self.shape.layers.div_ceil(experiment.tier1);
        let (tier1, cpu) = (self.kernels("t4"), self.kernels(CPU));
        let slices = (0..experiment.tier1).map(|index| Slice {
            layers: if index + 1 == experiment.tier1 {
                self.shape.layers - index * each
            } else {
                each
            },
            tier1: tier1.clone(),
            local_rows: if experiment.tier2 == 0 { experiment.rows } else { 0 },
            tier2: if experiment.tier2 == 0 {
                Vec::new()
            } else {
                vec![Group {
                    kernels: cpu.clone(),
                    nodes: experiment.tier2,
                    rows: experiment.batch,
                }]
            },
        });
        Configuration {
            shape: self.shape.clone(),
            slices: slices.collect(),
            flights: experiment.flights(),
            contexts: Contexts::Fixed(context),
            hop: NetworkLink::new(RTT_MS, 8.0),
            inter: NetworkLink::new(RTT_MS + experiment.induced_ms, 8.0),
            tier2_bandwidth: 1e9,
            traffic: RowTraffic::StateObject,
            rules: self.rules,
            disturbance: Disturbance::default(),
            seed: 0,
        }
    }

    /// Nodes of a device as the paper's search was told about them: its memory and links, our kernels.
    fn pool(&self, device: &str, nodes: usize, given: Nodes) -> DevicePool {
        DevicePool {
            name: device.to_owned(),
            kernels: self.kernels(device),
            nodes,
            memory: given.memory_gib * GIB,
            link: given.link,
            price_usd: self.device(device).price_usd.as_ref().map(|figure| figure.value),
            usd_per_hour: None,
        }
    }

    fn space(&self, cluster: Cluster, factor: f64, local_share: f64, batch_max: usize) -> Space {
        let settings = Settings {
            batch_max,
            rules: self.rules,
            traffic: RowTraffic::StateObject,
            local_shares: vec![local_share],
            ..Settings::default()
        };
        Space::new(cluster, PlannedJob::longest(&self.shape, LONGEST, factor), settings)
    }

    /// The testbed's T4 and CPU nodes on 8 Gbps, context memory oversubscribed by `factor`, batches to 4,096.
    fn ethernet_space(&self, tier1: usize, tier2: usize, factor: f64) -> Space {
        let given = |tier| nodes("double_t4_amd64", tier).expect("in the published data");
        let inter = given(1).link;
        let tier1 = self.pool("t4", tier1, given(1));
        let tier2 = if tier2 > 0 { vec![self.pool(CPU, tier2, given(2))] } else { Vec::new() };
        self.space(Cluster { tier1, tier2, inter }, factor, 0.0, 4096)
    }

    /// What our search picks on K T4 with K' CPU nodes each, where a node that holds contexts seats `contexts`.
    pub(crate) fn optimum(
        &self,
        tier1: usize,
        tier2: usize,
        contexts: usize,
    ) -> Option<Evaluation> {
        let site_of = |space: &Space| {
            let mut sites = space.sites().ok()?.into_iter();
            sites.find(|site| (site.tier1, site.tier2) == (tier1, tier2))
        };
        let site = site_of(&self.ethernet_space(tier1, tier1 * tier2, 1.0))?;
        let seats = if tier2 == 0 { site.seats_tier1 } else { site.seats_tier2 };
        let factor = (contexts as f64 + 0.5) / seats as f64;
        let space = self.ethernet_space(tier1, tier1 * tier2, factor);
        best_at(&space, &site_of(&space)?, 1.0)
    }

    /// The best batch for a pair as the paper simulated it, with rows in Tier 1's spare memory too.
    pub(crate) fn pairing(&self, pair: &Pair) -> Option<Evaluation> {
        let (first, second) = (pair.tier1, pair.tier2);
        let given = |tier| nodes(pair.cluster, tier).expect("in the published data");
        let tier1 = self.pool(first.device, first.nodes, given(1));
        let tier2 = vec![self.pool(second.device, second.nodes, given(2))];
        // The data gives 200 Gbps and 2 ms between the tiers of every pair.
        let cluster = Cluster { tier1, tier2, inter: NetworkLink::new(RTT_MS, 200.0) };
        let space = self.space(cluster, OVERSUBSCRIPTION, 1.0, 512);
        let wanted = (first.nodes, second.nodes / first.nodes);
        let site = space.sites().ok()?.into_iter().find(|s| (s.tier1, s.tier2) == wanted)?;
        best_at(&space, &site, 1.0)
    }

    /// Tokens per second of the best single-tier pipeline of up to as many nodes as the part has; 0 if the model
    /// does not fit.
    pub(crate) fn alone(&self, part: &Part, factor: f64) -> f64 {
        let given = match part.cluster {
            Some(cluster) => nodes(cluster, 1).expect("in the published data"),
            None => nodes("double_t4_amd64", 2).expect("in the published data"),
        };
        let inter = given.link;
        let tier1 = self.pool(part.device, part.nodes, given);
        let cluster = Cluster { tier1, tier2: Vec::new(), inter };
        let space = self.space(cluster, factor, 1.0, 512);
        search(&space, true).map_or(0.0, |found| found.best.tokens_per_second)
    }
}

/// Calls a rising function of a share in (0, 1] until it just reaches `target`, the last time with that share;
/// with 1 where it never does.
fn bisect(target: f64, mut reached: impl FnMut(f64) -> f64) {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..30 {
        let middle = (low + high) / 2.0;
        if reached(middle) < target { low = middle } else { high = middle }
    }
    reached(high);
}
