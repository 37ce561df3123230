//! The unpublished kernel profiles, replaced by rooflines with five efficiencies fitted to five numbers of the paper.

use std::sync::Arc;

use crate::calculus::{Link, Traffic};
use crate::catalogue::{Catalogue, Device, Efficiency};
use crate::cluster::{Cluster, Pool};
use crate::configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use crate::error::PlanError;
use crate::kernels::Kernels;
use crate::report::simulate;
use crate::search::{Evaluation, best_at};
use crate::shape::{GIB, Shape};
use crate::space::{Job, Settings, Space};

use super::prototype::{Experiment, experiments};

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

/// The paper's testbed with fitted efficiencies.
#[derive(Clone, Debug)]
pub struct Testbed {
    /// The model.
    pub shape: Shape,
    /// Devices with their fitted efficiencies.
    pub devices: Vec<Device>,
    /// The prototype's published configurations.
    pub(crate) experiments: Vec<Experiment>,
}

/// Oversubscription of context memory in the paper's search.
pub(crate) const OVERSUBSCRIPTION: f64 = 3.0;
/// The natural round trip of the testbed.
pub(crate) const RTT_MS: f64 = 2.0;
/// The longest context; the paper's simulator attends to it always.
pub(crate) const LONGEST: f64 = 2048.0;

const CPU: &str = "epyc-7v12-16";
const LARGE: [&str; 2] = ["a100-40", "h100-80"];

impl Testbed {
    /// Fits the five efficiencies in turn; each anchor decides one of them.
    pub fn calibrated() -> Result<Self, PlanError> {
        Self::calibrated_to(AttentionAnchor::TimePerToken(Anchors::TIME_PER_TOKEN))
    }

    pub(crate) fn calibrated_to(attention: AttentionAnchor) -> Result<Self, PlanError> {
        let (shape, devices) = (Shape::llama2_70b(), Catalogue::built_in().devices);
        let mut testbed = Self { shape, devices, experiments: experiments()? };
        testbed.fit_products();
        testbed.fit_cpu_attention();
        testbed.fit_gpu_attention(attention);
        testbed.fit_large_products();
        Ok(testbed)
    }

    /// A device by name.
    pub fn device(&self, name: &str) -> &Device {
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
    pub fn kernels(&self, name: &str) -> Arc<Kernels> {
        Arc::new(Kernels::analytic(self.device(name), &self.shape))
    }

    fn rate(&self, experiment: &Experiment, context: f64) -> f64 {
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
                let in_air =
                    |experiment: &Experiment| (experiment.flights() * experiment.rows) as f64;
                let target = ratio * in_air(single) / in_air(two);
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
            self.pairing("a100-40", 4, "rtx6000", 2).map_or(0.0, |best| best.tokens_per_second)
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
            hop: Link::new(RTT_MS, 8.0),
            inter: Link::new(RTT_MS + experiment.induced_ms, 8.0),
            tier2_bandwidth: 1e9,
            traffic: Traffic::StateObject,
            rules: Rules::Paper,
            disturbance: Disturbance::default(),
            seed: 0,
        }
    }

    /// Nodes of a device on the network of the paper's simulated pairings: 300 Gbps inside a tier.
    pub(crate) fn pool(&self, name: &str, nodes: usize) -> Pool {
        let device = self.device(name);
        Pool {
            name: name.to_owned(),
            kernels: self.kernels(name),
            nodes,
            memory: device.memory_gib.value * GIB,
            link: Link::new(0.0, 300.0),
            price_usd: device.price_usd.as_ref().map(|figure| figure.value),
            usd_per_hour: None,
        }
    }

    fn space(&self, cluster: Cluster, factor: f64, local_share: f64, batch_max: usize) -> Space {
        let settings = Settings {
            batch_max,
            rules: Rules::Paper,
            traffic: Traffic::StateObject,
            local_shares: vec![local_share],
            ..Settings::default()
        };
        Space::new(cluster, Job::longest(&self.shape, LONGEST, factor), settings)
    }

    /// The testbed's T4 and CPU nodes on 8 Gbps, context memory oversubscribed by `factor`, batches to 4,096.
    pub(crate) fn ethernet_space(&self, tier1: usize, tier2: usize, factor: f64) -> Space {
        let link = Link::new(RTT_MS, 8.0);
        let tier1 = Pool { link, ..self.pool("t4", tier1) };
        let tier2 =
            if tier2 > 0 { vec![Pool { link, ..self.pool(CPU, tier2) }] } else { Vec::new() };
        self.space(Cluster { tier1, tier2, inter: link }, factor, 0.0, 4096)
    }

    /// The best batch for K nodes of one device with K' of another each, as the paper simulated them: 200 Gbps
    /// between the tiers, and rows in Tier 1's spare memory too.
    pub(crate) fn pairing(
        &self,
        tier1: &str,
        nodes: usize,
        tier2: &str,
        each: usize,
    ) -> Option<Evaluation> {
        let tier2 = vec![self.pool(tier2, nodes * each)];
        let cluster =
            Cluster { tier1: self.pool(tier1, nodes), tier2, inter: Link::new(RTT_MS, 200.0) };
        let space = self.space(cluster, OVERSUBSCRIPTION, 1.0, 512);
        let site = space
            .sites()
            .ok()?
            .into_iter()
            .find(|site| (site.tier1, site.tier2) == (nodes, each))?;
        best_at(&space, &site, 1.0)
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
