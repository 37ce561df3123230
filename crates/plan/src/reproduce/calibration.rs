//! The unpublished kernel profiles, replaced by rooflines with four efficiencies fitted to four numbers of the paper.

use std::sync::Arc;

use crate::calculus::{Link, Traffic};
use crate::catalogue::{Catalogue, Device, Efficiency};
use crate::cluster::{Cluster, Pool};
use crate::configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use crate::error::PlanError;
use crate::kernels::Kernels;
use crate::report::simulate;
use crate::search::best_at;
use crate::shape::{GIB, Shape};
use crate::space::{Job, Settings, Site, Space};

use super::prototype::{Experiment, experiments};

/// The paper's numbers the rooflines are fitted to; everything else is held out.
pub(crate) struct Anchors;

impl Anchors {
    /// One layer at batch 1 on a T4 (sec:kvc_strawman).
    pub const LAYER_SECONDS: f64 = 5.6e-3;
    /// 16 T4 + 48 CPU (table:inter_bw): bound by the T4s' matrix products.
    pub const T4_BOUND: f64 = 1992.0;
    /// 16 T4 + 16 CPU (table:inter_bw): bound by the CPUs' attention.
    pub const CPU_BOUND: f64 = 1138.0;
    /// 4 A100 + 8 RTX 6000 (table:inter_bw): bound by the A100s' matrix products.
    pub const A100_BOUND: f64 = 1705.0;
    /// Time per token of 16 T4 + 48 CPU over that of 16 T4 (fig:e2e_tot): bound by the T4s' attention.
    pub const TIME_PER_TOKEN: f64 = 5.2;
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
const LONGEST: f64 = 2048.0;

impl Testbed {
    /// Fits the four efficiencies in turn; each anchor decides one of them.
    pub fn calibrated() -> Result<Self, PlanError> {
        let shape = Shape::llama2_70b();
        let devices = Catalogue::built_in().devices;
        let mut testbed = Self { shape, devices, experiments: experiments()? };
        testbed.fit_products();
        testbed.fit_cpu_attention();
        testbed.fit_gpu_attention(Anchors::TIME_PER_TOKEN);
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

    fn set(&mut self, apply: impl Fn(&mut Efficiency, bool)) {
        for device in &mut self.devices {
            apply(&mut device.efficiency, device.name == "epyc-7v12-16");
        }
    }

    /// Two points of t(B) = load + B · multiply give bandwidth and matrix efficiency of the T4; all GPUs take them.
    fn fit_products(&mut self) {
        let anchor = self.experiment("16xT4_48xCPU_B246");
        let (rows, layers) = (anchor.rows as f64, (self.shape.layers / anchor.tier1) as f64);
        let at_rows = rows / (Anchors::T4_BOUND * layers);
        let multiply = (at_rows - Anchors::LAYER_SECONDS) / (rows - 1.0);
        let load = Anchors::LAYER_SECONDS - multiply;
        let t4 = self.device("t4");
        let weights_bandwidth = self.shape.layer_bytes() / load / (t4.bandwidth_gb_s.value * 1e9);
        let matrix = self.shape.layer_bytes() / multiply / (t4.matrix_tflops.value * 1e12);
        self.set(|efficiency, _| {
            (efficiency.weights_bandwidth, efficiency.matrix) = (weights_bandwidth, matrix)
        });
    }

    fn fit_cpu_attention(&mut self) {
        let anchor = self.experiment("16xT4_16xCPU_B112").clone();
        let share = bisect(Anchors::CPU_BOUND, |share| {
            self.set(|efficiency, cpu| {
                if cpu {
                    (efficiency.context_bandwidth, efficiency.vector) = (share, 1.0)
                }
            });
            simulate(&self.configuration(&anchor, LONGEST)).tokens_per_second
        });
        self.set(|efficiency, cpu| {
            if cpu {
                efficiency.context_bandwidth = share
            }
        });
    }

    /// The vector efficiency of a T4 that attends to its own contexts; all GPUs take it, and stream contexts as
    /// fast as weights.
    fn fit_gpu_attention(&mut self, time_per_token: f64) {
        let (single, two) =
            (self.experiment("16xT4_B14").clone(), self.experiment("16xT4_48xCPU_B246").clone());
        let bandwidth = self.device("t4").efficiency.weights_bandwidth;
        self.set(|efficiency, cpu| {
            if !cpu {
                efficiency.context_bandwidth = bandwidth
            }
        });
        // Little's law: time per token = rows in the air / tokens per second.
        let in_air = |experiment: &Experiment| (experiment.flights() * experiment.rows) as f64;
        let target = in_air(&single) * time_per_token * Anchors::T4_BOUND / in_air(&two);
        let vector = bisect(target, |share| {
            self.set(|efficiency, cpu| {
                if !cpu {
                    efficiency.vector = share
                }
            });
            simulate(&self.configuration(&single, LONGEST)).tokens_per_second
        });
        self.set(|efficiency, cpu| {
            if !cpu {
                efficiency.vector = vector
            }
        });
    }

    /// The matrix efficiency of an A100; the H100 takes it.
    fn fit_large_products(&mut self) {
        let matrix = bisect(Anchors::A100_BOUND, |share| {
            self.set_large(share);
            self.pairing("a100-40", 4, "rtx6000", 2).map_or(0.0, |(_, _, best)| best)
        });
        self.set_large(matrix);
    }

    fn set_large(&mut self, matrix: f64) {
        for device in self
            .devices
            .iter_mut()
            .filter(|device| ["a100-40", "h100-80"].contains(&device.name.as_str()))
        {
            device.efficiency.matrix = matrix;
        }
    }

    /// An experiment of the prototype under the paper's rules, attending to `context` positions.
    pub(crate) fn configuration(&self, experiment: &Experiment, context: f64) -> Configuration {
        let each = self.shape.layers.div_ceil(experiment.tier1);
        let (tier1, cpu) = (self.kernels("t4"), self.kernels("epyc-7v12-16"));
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

    /// Nodes of a device under the paper's network of the pairings: 300 Gbps inside a tier.
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

    /// The best batch for K nodes of one device with K' of another each, as the paper simulated them: the space,
    /// the site and the tokens per second.
    pub(crate) fn pairing(
        &self,
        tier1: &str,
        nodes: usize,
        tier2: &str,
        each: usize,
    ) -> Option<(Space, Site, f64)> {
        let cluster = Cluster {
            tier1: self.pool(tier1, nodes),
            tier2: vec![self.pool(tier2, nodes * each)],
            inter: Link::new(RTT_MS, 200.0),
        };
        let settings = Settings {
            batch_max: 512,
            rules: Rules::Paper,
            traffic: Traffic::StateObject,
            local_shares: vec![1.0],
            ..Settings::default()
        };
        let space =
            Space::new(cluster, Job::longest(&self.shape, LONGEST, OVERSUBSCRIPTION), settings);
        let site = space
            .sites()
            .ok()?
            .into_iter()
            .find(|site| (site.tier1, site.tier2) == (nodes, each))?;
        let best = best_at(&space, &site)?.tokens_per_second;
        Some((space, site, best))
    }
}

/// The share in (0, 1] at which a rising function reaches `target`; 1 where it never does.
fn bisect(target: f64, mut reached: impl FnMut(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..30 {
        let middle = (low + high) / 2.0;
        if reached(middle) < target { low = middle } else { high = middle }
    }
    high
}
