//! The space of configurations of a cluster: which (K, K', B, local rows, flights) exist.

use crate::admission::Admission;
use crate::calculus::RowTraffic;
use crate::candidate::{Candidate, Evaluation};
use crate::cluster::{Cluster, DevicePool};
use crate::configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use crate::error::PlanError;
use crate::kernels::KernelTimes;
use crate::shape::{GIB, Shape};
use crate::table::Table;
use crate::workload::Workload;
use glinthawk_model::even_slices;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// What is to be run.
#[derive(Clone, Debug)]
pub struct PlannedJob {
    /// The model.
    pub shape: Shape,
    /// What rows attend to.
    pub contexts: Contexts,
    /// How prompts are admitted.
    pub admission: Admission,
    /// Rows a seated prompt contributes to a step on average; above 1 if input goes in chunks.
    pub rows_per_seat: f64,
}

impl PlannedJob {
    /// A workload whose input goes in chunks of `chunk` tokens.
    pub fn of(shape: &Shape, workload: &Workload, chunk: usize) -> Self {
        Self {
            shape: shape.clone(),
            contexts: Contexts::Mixed(workload.mixture(chunk)),
            admission: Admission::expected(workload, chunk),
            rows_per_seat: workload.rows_per_seat(chunk),
        }
    }

    /// The paper's assumptions: every row attends to the longest context, and memory is oversubscribed by a
    /// factor.
    pub fn longest(shape: &Shape, context_max: f64, factor: f64) -> Self {
        Self {
            shape: shape.clone(),
            contexts: Contexts::Fixed(context_max),
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
    /// Most Tier-2 nodes per Tier-1 node, if the cluster has more.
    pub tier2_max: usize,
    /// Which machine to simulate.
    pub rules: Rules,
    /// What travels between the tiers.
    pub traffic: RowTraffic,
    /// Fractions of the Tier-1 nodes' spare memory to try for contexts in a two-tier plan.
    pub local_shares: Vec<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_max: 4096,
            tier2_max: usize::MAX,
            rules: Rules::Full,
            traffic: RowTraffic::ResidualHome,
            local_shares: vec![0.0, 1.0],
        }
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

/// A cluster, a job and settings: everything that defines the space.
#[derive(Debug)]
pub struct Space {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: PlannedJob,
    /// The settings.
    pub settings: Settings,
    pub(crate) tier1: Table,
    pub(crate) tier2: Vec<Table>,
    /// What was simulated so far: no candidate is simulated twice.
    pub(crate) simulated: Mutex<HashMap<Candidate, Evaluation>>,
}

impl Space {
    /// The space of `cluster` for `job`.
    pub fn new(cluster: Cluster, job: PlannedJob, settings: Settings) -> Self {
        let table = |pool: &DevicePool| Table::of(&pool.kernels, settings.batch_max, &job.contexts);
        let (tier1, tier2) = (table(&cluster.tier1), cluster.tier2.iter().map(table).collect());
        Self { cluster, job, settings, tier1, tier2, simulated: Mutex::default() }
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
        format!(
            "{} has {:.1} GiB of weights; tier1 has {} nodes of {:.1} GiB. {}; with {} nodes each needs {:.1} GiB",
            shape.name,
            shape.model_bytes() / GIB,
            pool.nodes,
            pool.memory / GIB,
            shape.nodes_needed(pool.memory),
            pool.nodes,
            shape.heaviest_slice(pool.nodes.min(shape.layers)) / GIB
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

    /// The candidates of a site: every batch up to 66 rows per node, larger ones in steps of about 3%.
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
            for rows in batches(self.settings.batch_max)
                .take_while(|&rows| seats_of(rows) <= site.seats_tier1)
            {
                push(rows, rows, site.seats_tier1 / seats_of(rows));
            }
            return candidates;
        }
        let most = self.settings.batch_max / site.tier2;
        for batch in batches(most).take_while(|&batch| seats_of(batch) <= site.seats_tier2) {
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

    /// The candidate as the simulator takes it.
    pub fn configuration(&self, site: &Site, candidate: &Candidate) -> Configuration {
        let slice = |&layers: &usize| Slice {
            layers,
            tier1: self.cluster.tier1.kernels.clone(),
            local_rows: candidate.local_rows,
            tier2: if candidate.tier2 == 0 {
                Vec::new()
            } else {
                let kernels: Arc<KernelTimes> = self.cluster.tier2[candidate.pool].kernels.clone();
                vec![Group { kernels, nodes: candidate.tier2, rows: candidate.batch }]
            },
        };
        Configuration {
            shape: self.job.shape.clone(),
            slices: site.slices.iter().map(slice).collect(),
            flights: candidate.flights,
            contexts: self.job.contexts.clone(),
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

/// The batches that are tried. Throughput is flat around its peak: smaller steps would find no more.
fn batches(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |&batch| Some(batch + (batch / 33).max(1)))
        .take_while(move |&batch| batch <= most)
}
