//! The space of configurations of a cluster: which (K, K', B, local rows, flights) exist, what each costs at most.
//!
//! The estimate here is [`Program::bound`](crate::program::Program::bound) in closed form for like nodes: no
//! simulation of the same candidate exceeds it, which is what makes pruning by it sound.

use std::sync::Arc;

use crate::admission::Admission;
use crate::calculus::Traffic;
use crate::cluster::{Cluster, Pool};
use crate::configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use crate::error::PlanError;
use crate::kernels::Kernels;
use crate::program::Bottleneck;
use crate::shape::{GIB, Shape, even_slices};
use crate::workload::Workload;

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model.
    pub shape: Shape,
    /// Positions a row attends to on average.
    pub context: f64,
    /// How prompts are admitted.
    pub admission: Admission,
    /// Rows a seated prompt contributes to a step on average; above 1 where input goes in chunks.
    pub rows_per_seat: f64,
}

impl Job {
    /// A workload whose input goes in chunks of `chunk` tokens.
    pub fn of(shape: &Shape, workload: &Workload, chunk: usize) -> Self {
        Self {
            shape: shape.clone(),
            context: workload.context_mean(),
            admission: Admission::expected(workload, chunk),
            rows_per_seat: workload.rows_per_seat(chunk),
        }
    }

    /// The paper's reckoning: every row attends to the longest context, memory is oversubscribed by a factor.
    pub fn longest(shape: &Shape, context_max: f64, factor: f64) -> Self {
        Self {
            shape: shape.clone(),
            context: context_max,
            admission: Admission::Oversubscribed { context_max, factor },
            rows_per_seat: 1.0,
        }
    }
}

/// What to search over.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Most rows in a Tier-1 batch.
    pub batch_max: usize,
    /// Most Tier-2 nodes per Tier-1 node, where the cluster has more.
    pub tier2_max: usize,
    /// Which machine to simulate.
    pub rules: Rules,
    /// What travels between the tiers.
    pub traffic: Traffic,
    /// Shares of the Tier-1 nodes' spare memory to try for contexts in a two-tier plan.
    pub local_shares: Vec<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_max: 4096,
            tier2_max: usize::MAX,
            rules: Rules::Full,
            traffic: Traffic::ResidualHome,
            local_shares: vec![0.0, 0.5, 1.0],
        }
    }
}

/// One point of the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Tier-1 nodes (K).
    pub tier1: usize,
    /// Tier-2 nodes per Tier-1 node (K'); 0 is single-tier.
    pub tier2: usize,
    /// Which kind of Tier-2 node.
    pub pool: usize,
    /// Rows per Tier-2 node and flight (B); rows per flight in a single tier.
    pub batch: usize,
    /// Rows per flight that attend on Tier 1.
    pub local_rows: usize,
    /// Flights in the air.
    pub flights: usize,
}

impl Candidate {
    /// Rows of a Tier-1 batch.
    pub fn rows(&self) -> usize {
        self.tier2 * self.batch + self.local_rows
    }
}

/// All candidates with the same nodes: one price, many batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// K.
    pub tier1: usize,
    /// K'.
    pub tier2: usize,
    /// Kind of Tier-2 node.
    pub pool: usize,
    /// Layers of each slice.
    pub slices: Vec<usize>,
    /// Prompts a Tier-1 node's spare memory seats.
    pub seats_tier1: usize,
    /// Prompts a Tier-2 node seats.
    pub seats_tier2: usize,
}

impl Site {
    /// A fixed order among sites that are equally good.
    pub(crate) fn order(&self) -> (usize, usize, usize) {
        (self.tier1, self.tier2, self.pool)
    }
}

/// Kernel times of a pool for every batch.
#[derive(Debug)]
struct Table {
    pre: Vec<f64>,
    post: Vec<f64>,
    fused: Vec<f64>,
    classify: Vec<f64>,
    attention: Vec<f64>,
}

impl Table {
    fn of(kernels: &Kernels, rows_max: usize, context: f64) -> Self {
        let over = |time: &dyn Fn(usize) -> f64| (0..=rows_max).map(time).collect();
        Self {
            pre: over(&|rows| kernels.pre(rows)),
            post: over(&|rows| kernels.post(rows)),
            fused: over(&|rows| kernels.fused(rows)),
            classify: over(&|rows| kernels.classify(rows)),
            attention: over(&|rows| kernels.attention(rows, context)),
        }
    }
}

/// A cluster, a job and settings: everything that defines the space.
#[derive(Debug)]
pub struct Space {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// The settings.
    pub settings: Settings,
    tier1: Table,
    tier2: Vec<Table>,
}

impl Space {
    /// The space of `cluster` for `job`.
    pub fn new(cluster: Cluster, job: Job, settings: Settings) -> Self {
        let table = |pool: &Pool| Table::of(&pool.kernels, settings.batch_max, job.context);
        let (tier1, tier2) = (table(&cluster.tier1), cluster.tier2.iter().map(table).collect());
        Self { cluster, job, settings, tier1, tier2 }
    }

    /// All sites that hold the weights and at least one context, or what would be needed.
    pub fn sites(&self) -> Result<Vec<Site>, PlanError> {
        let most = self.cluster.tier1.nodes.min(self.job.shape.layers);
        let fitting: Vec<Site> = (1..=most).filter_map(|nodes| self.single_tier(nodes)).collect();
        if fitting.is_empty() {
            return Err(PlanError::ModelTooBig(self.what_weights_need()));
        }
        let mut sites = Vec::new();
        for single in &fitting {
            for (pool, nodes) in self.cluster.tier2.iter().enumerate() {
                let per_node = (nodes.nodes / single.tier1).min(self.settings.tier2_max);
                let layers = single.slices[0] as f64;
                let token_bytes = layers * self.job.shape.context_bytes_per_layer();
                let seats_tier2 = self.job.admission.seats(nodes.memory, token_bytes);
                let with = |tier2| Site { tier2, pool, seats_tier2, ..single.clone() };
                sites.extend((1..=per_node).filter(|_| seats_tier2 > 0).map(with));
            }
            if single.seats_tier1 > 0 {
                sites.push(single.clone());
            }
        }
        if sites.is_empty() {
            return Err(PlanError::NoContext(self.what_contexts_need(&fitting)));
        }
        Ok(sites)
    }

    fn single_tier(&self, nodes: usize) -> Option<Site> {
        let (shape, memory) = (&self.job.shape, self.cluster.tier1.memory);
        let slices = self.layout(nodes)?;
        let mut seats = usize::MAX;
        for (index, &layers) in slices.iter().enumerate() {
            let free = memory - shape.slice_bytes(layers, index == 0, index + 1 == nodes);
            if free < 0.0 {
                return None;
            }
            let token_bytes = layers as f64 * shape.context_bytes_per_layer();
            seats = seats.min(self.job.admission.seats(free, token_bytes));
        }
        Some(Site { tier1: nodes, tier2: 0, pool: 0, slices, seats_tier1: seats, seats_tier2: 0 })
    }

    /// Layers per slice; the paper gives every slice ⌈N/K⌉ and the last one the rest.
    fn layout(&self, nodes: usize) -> Option<Vec<usize>> {
        let layers = self.job.shape.layers;
        if self.settings.rules == Rules::Full {
            return Some(even_slices(layers, nodes));
        }
        let each = layers.div_ceil(nodes);
        let last = layers.checked_sub(each * (nodes - 1)).filter(|&rest| rest > 0)?;
        let mut slices = vec![each; nodes];
        slices[nodes - 1] = last;
        Some(slices)
    }

    fn what_weights_need(&self) -> String {
        let (shape, pool) = (&self.job.shape, &self.cluster.tier1);
        let fits = |memory: f64, nodes: usize| {
            let slices = even_slices(shape.layers, nodes);
            let heaviest = (0..nodes)
                .map(|index| shape.slice_bytes(slices[index], index == 0, index + 1 == nodes));
            heaviest.fold(0.0, f64::max) <= memory
        };
        let nodes = (1..=shape.layers).find(|&nodes| fits(pool.memory, nodes));
        let have = pool.nodes.min(shape.layers);
        let slices = even_slices(shape.layers, have);
        let heaviest =
            (0..have).map(|index| shape.slice_bytes(slices[index], index == 0, index + 1 == have));
        let per_node = heaviest.fold(0.0, f64::max);
        let more = match nodes {
            Some(nodes) => format!("{nodes} such nodes would hold it"),
            None => {
                "no number of such nodes holds it: one layer with its table is larger".to_owned()
            }
        };
        format!(
            "{} has {:.1} GiB of weights; tier1 has {} nodes of {:.1} GiB. {more}; with {} nodes each needs {:.1} GiB",
            shape.name,
            shape.model_bytes() / GIB,
            pool.nodes,
            pool.memory / GIB,
            pool.nodes,
            per_node / GIB
        )
    }

    fn what_contexts_need(&self, fitting: &[Site]) -> String {
        let largest = fitting.last().expect("there is a fitting site");
        let tokens = self.job.admission.tokens_least();
        let bytes = tokens * largest.slices[0] as f64 * self.job.shape.context_bytes_per_layer();
        format!(
            "the weights of {} fit on {} Tier-1 nodes, but one prompt's context ({tokens:.0} tokens) needs {:.2} GiB \
             beside them or on a Tier-2 node; give tier1 or tier2 that much more memory_gib, or shorten the contexts",
            self.job.shape.name,
            largest.tier1,
            bytes / GIB
        )
    }

    /// The candidates of a site.
    pub fn candidates(&self, site: &Site) -> Vec<Candidate> {
        let seats_of =
            |rows: usize| ((rows as f64 / self.job.rows_per_seat).ceil() as usize).max(1);
        let mut candidates = Vec::new();
        let mut push = |batch, local_rows, flights| {
            let candidate = Candidate {
                tier1: site.tier1,
                tier2: site.tier2,
                pool: site.pool,
                batch,
                local_rows,
                flights,
            };
            if candidate.rows() <= self.settings.batch_max {
                candidates.push(candidate);
            }
        };
        if site.tier2 == 0 {
            for rows in
                (1..=self.settings.batch_max).take_while(|&rows| seats_of(rows) <= site.seats_tier1)
            {
                push(rows, rows, site.seats_tier1 / seats_of(rows));
            }
            return candidates;
        }
        let most = self.settings.batch_max / site.tier2;
        for batch in (1..=most).take_while(|&batch| seats_of(batch) <= site.seats_tier2) {
            let flights = site.seats_tier2 / seats_of(batch);
            let local_seats = (site.seats_tier1 / flights) as f64;
            let mut previous = None;
            for share in &self.settings.local_shares {
                let local = (local_seats * share * self.job.rows_per_seat).floor() as usize;
                if previous != Some(local) {
                    push(batch, local, flights);
                }
                previous = Some(local);
            }
        }
        candidates
    }

    /// Rows per second that no simulation of the candidate exceeds, and what sets the limit.
    pub fn estimate(&self, site: &Site, candidate: &Candidate) -> (f64, Bottleneck) {
        let (rows, nodes) = (candidate.rows(), site.tier1 as f64);
        let paper = self.settings.rules == Rules::Paper;
        let single_tier = candidate.tier2 == 0;
        let (most, last) = (site.slices[0] as f64, site.slices[site.tier1 - 1] as f64);
        let (shape, traffic, layers) =
            (&self.job.shape, self.settings.traffic, self.job.shape.layers as f64);
        let local = self.tier1.attention[candidate.local_rows];
        let (pre, post) = (self.tier1.pre[rows], self.tier1.post[rows]);
        let (fused, classify) = if paper {
            (pre + post, 0.0)
        } else {
            (self.tier1.fused[rows], self.tier1.classify[rows])
        };
        let compute = |layers: f64| pre + post + (layers - 1.0) * fused + layers * local;
        // The heaviest node: one with the most layers, or the last one, which classifies.
        let tier1 = if site.tier1 > 1 {
            compute(most).max(compute(last) + classify)
        } else {
            compute(last) + classify
        };
        let link = &self.cluster.tier1.link;
        let hop = traffic.hop_bytes(shape) * rows as f64 / link.bandwidth;
        let (hop_busy, hop_pass) = match (paper, single_tier) {
            (true, true) => (hop, nodes * (hop + link.rtt / 2.0)),
            (true, false) => (0.0, 0.0),
            _ if site.tier1 == 1 => (0.0, 0.0),
            _ => (hop, (nodes - 1.0) * hop + nodes * link.rtt / 2.0),
        };
        let weights = nodes * (pre + post) + (layers - nodes) * fused + classify + hop_pass;
        let mut slowest = (0.0, Bottleneck::Tier1Compute);
        let mut consider = |seconds: f64, what| {
            if seconds > slowest.0 {
                slowest = (seconds, what);
            }
        };
        consider(tier1, Bottleneck::Tier1Compute);
        consider(hop_busy, Bottleneck::HopLink);
        if single_tier {
            consider((weights + layers * local) / candidate.flights as f64, Bottleneck::Latency);
            return (rows as f64 / slowest.0, slowest.1);
        }
        let attend = self.tier2[candidate.pool].attention[candidate.batch];
        let shard = candidate.batch as f64;
        let (out, back) = (shard * traffic.out_bytes(shape), shard * traffic.back_bytes(shape));
        let (near, far) =
            (self.cluster.inter.bandwidth, self.cluster.tier2[candidate.pool].link.bandwidth);
        let copies = candidate.tier2 as f64;
        let sent = copies * out / near;
        let extra = (out / far - out / near).max(0.0);
        let reply = if paper { copies * back / near } else { (back / near).max(back / far) };
        consider(most * attend, Bottleneck::Tier2Compute);
        consider(most * sent.max(copies * back / near), Bottleneck::InterTierLink);
        if !paper {
            consider(most * (out / near + extra).max(back / far), Bottleneck::Tier2Link);
        }
        let remote = sent + extra + reply + self.cluster.inter.rtt + attend;
        let fan = if paper { local + remote } else { local.max(remote) };
        consider((weights + layers * fan) / candidate.flights as f64, Bottleneck::Latency);
        (rows as f64 / slowest.0, slowest.1)
    }

    /// The candidate as the simulator takes it.
    pub fn configuration(&self, site: &Site, candidate: &Candidate) -> Configuration {
        let slice = |&layers: &usize| Slice {
            layers,
            tier1: self.cluster.tier1.kernels.clone(),
            local_rows: candidate.local_rows,
            tier2: if candidate.tier2 == 0 {
                Vec::new()
            } else {
                let kernels: Arc<Kernels> = self.cluster.tier2[candidate.pool].kernels.clone();
                vec![Group { kernels, nodes: candidate.tier2, rows: candidate.batch }]
            },
        };
        Configuration {
            shape: self.job.shape.clone(),
            slices: site.slices.iter().map(slice).collect(),
            flights: candidate.flights,
            contexts: Contexts::Fixed(self.job.context),
            hop: self.cluster.tier1.link,
            inter: self.cluster.inter,
            tier2_bandwidth: self
                .cluster
                .tier2
                .get(candidate.pool)
                .map_or(f64::INFINITY, |pool| pool.link.bandwidth),
            traffic: self.settings.traffic,
            rules: self.settings.rules,
            disturbance: Disturbance::default(),
            seed: 0,
        }
    }
}
