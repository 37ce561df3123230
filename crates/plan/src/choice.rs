//! Which configuration a job should run on: many are ranked by a quick estimate, the promising ones are forecast, and
//! everything that is said or chosen comes from the forecasts.
//!
//! What is not forecast is left out for one of two reasons, which are counted: its bound shows that it cannot be better
//! than what was found, or its estimate is worse than those of all that were forecast.
//!
//! The search goes by rough forecasts where a job is large. They err on the fast side, so whatever looks better than the
//! best is forecast again layer by layer, until the best has been: the best is never rough.

mod front;
mod objective;
mod ranked;

pub use front::{FRONT_STEP, Trial, front};
pub use objective::Objective;
pub use ranked::{Chosen, SearchLimits, Work};

use crate::bound::Bottleneck;
use crate::candidate::Candidate;
use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::forecast::{forecast, forecast_roughly};
use crate::kernels::KernelTimes;
use crate::plan::{ContextBudget, PLAN_VERSION, Plan, PlanForecast};
use crate::quick::{Quick, lanes};
use crate::space::{Site, Space};
use crate::workload::Workload;
use glinthawk_protocol::{PAGE_POSITIONS, lane_pages};
use std::collections::HashMap;
use std::sync::Mutex;

/// Flights for each Tier-1 node that are tried; with one, only one slice has work at a time.
const FLIGHTS: [f64; 11] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0];
/// Batches that are tried, as parts of the one that seats all prompts at once.
const BATCHES: [f64; 4] = [0.125, 0.25, 0.5, 1.0];
/// A job and the configurations it could run on.
pub struct Choice<'a> {
    space: &'a Space,
    workload: &'a Workload,
    chunk: usize,
    /// What costs are counted in.
    pub prices: Prices,
    sites: Vec<Site>,
    quick: Quick<'a>,
    /// No candidate is forecast twice.
    known: Mutex<HashMap<Candidate, Trial>>,
}

impl<'a> Choice<'a> {
    /// The job of `workload` in chunks on `space`; an error where no nodes hold the model and a context.
    pub fn new(space: &'a Space, workload: &'a Workload, chunk: usize) -> Result<Self, PlanError> {
        Ok(Self {
            space,
            workload,
            chunk,
            prices: Prices::of(&space.cluster),
            sites: space.sites()?,
            quick: Quick::new(space, workload, chunk),
            known: Mutex::default(),
        })
    }

    /// All choices of nodes.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// What can run on a site: no more seats than the job fills and memory holds, and the same rows for every
    /// attention worker.
    pub fn candidates(&self, site: &Site) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let prompts = self.workload.lengths().len();
        let batch_max = self.space.settings.batch_max;
        let hybrids: &[bool] = match site.tier2 {
            0 => &[true],
            _ if site.seats_tier1 > 0 => &[false, true],
            _ => &[false],
        };
        for &local in hybrids {
            let base = Candidate {
                tier1: site.tier1,
                tier2: site.tier2,
                pool: site.pool,
                batch: 1,
                local_rows: usize::from(local),
                flights: 1,
            };
            let lanes = lanes(&base);
            let seated = prompts.min(lanes * Quick::seats(site, &base));
            let rows = self.space.job.rows_per_seat.max(1.0);
            for flights in FLIGHTS.map(|each| (each * site.tier1 as f64).ceil() as usize) {
                for part in BATCHES.into_iter().chain([rows]) {
                    let each = (part * seated as f64 / (lanes * flights) as f64).ceil() as usize;
                    let batch = each.clamp(1, (batch_max / lanes).max(1));
                    let local_rows = if local { batch } else { 0 };
                    let candidate = Candidate { batch, local_rows, flights, ..base };
                    let fits = lanes * flights <= prompts.max(lanes * site.tier1)
                        && lanes * batch <= batch_max;
                    if fits && !candidates.contains(&candidate) {
                        candidates.push(candidate);
                    }
                }
            }
        }
        candidates.retain(|candidate| self.holds_a_context(site, candidate));
        candidates
    }

    /// Bytes for contexts of each attention worker.
    fn context_bytes(&self, site: &Site, candidate: &Candidate) -> f64 {
        let (shape, cluster) = (&self.space.job.shape, &self.space.cluster);
        let free = |(index, &layers): (usize, &usize)| {
            cluster.tier1.memory - shape.slice_bytes(layers, index == 0, index + 1 == site.tier1)
        };
        let tier1 = site.slices.iter().enumerate().map(free).fold(f64::INFINITY, f64::min);
        match (candidate.tier2, candidate.local_rows) {
            (0, _) => tier1,
            (_, 0) => cluster.tier2[candidate.pool].memory,
            _ => tier1.min(cluster.tier2[candidate.pool].memory),
        }
    }

    fn holds_a_context(&self, site: &Site, candidate: &Candidate) -> bool {
        let page_bytes = self.space.job.shape.page_bytes(site.slices[0]);
        let held = (self.context_bytes(site, candidate).max(0.0).floor() / page_bytes) as u64;
        lane_pages(held, self.context_max() as u32, 1, PAGE_POSITIONS).is_some()
    }

    /// Positions of the longest prompt with its completion.
    fn context_max(&self) -> usize {
        let positions = self.workload.lengths().iter().map(|length| length.rows() + 1).max();
        positions.expect("a workload has prompts").max(2)
    }

    /// The plan that runs a candidate, with nothing expected of it yet.
    fn plan(&self, site: &Site, candidate: &Candidate) -> Plan {
        let (shape, cluster) = (&self.space.job.shape, &self.space.cluster);
        let Candidate { tier1, tier2, pool, batch, local_rows, flights } = *candidate;
        let bytes = self.context_bytes(site, candidate);
        let budget = |used: bool| match used {
            true => ContextBudget {
                bytes: bytes as u64,
                pages: (bytes / shape.page_bytes(1)) as u64,
                seats: batch * flights,
            },
            false => ContextBudget { bytes: 0, pages: 0, seats: 0 },
        };
        let of = |name: &str, kernels: &KernelTimes| format!("{name}: {}", kernels.provenance());
        let mut kernels = vec![of(&cluster.tier1.name, &cluster.tier1.kernels)];
        if tier2 > 0 {
            kernels.push(of(&cluster.tier2[pool].name, &cluster.tier2[pool].kernels));
        }
        Plan {
            version: PLAN_VERSION,
            model: shape.name.clone(),
            tier1,
            tier2,
            pool,
            batch: if tier2 == 0 { 0 } else { batch },
            local_rows,
            flights,
            chunk: self.chunk,
            max_context: self.context_max(),
            slices: site.slices.clone(),
            tier1_context: budget(local_rows > 0),
            tier2_context: budget(tier2 > 0),
            forecast: PlanForecast {
                tokens_per_second: 0.0,
                seconds_per_token: 0.0,
                bottleneck: Bottleneck::Latency,
                job_seconds: 0.0,
                job_usd: None,
                kernels,
            },
        }
    }

    /// Forecasts the job on a candidate, roughly if it is large, from the plan as it would be written.
    pub fn trial(&self, site: &Site, candidate: &Candidate) -> Trial {
        if let Some(known) = self.known.lock().expect("no panic with the lock").get(candidate) {
            return known.clone();
        }
        self.forecast(site, candidate, true)
    }

    /// The same trial, forecast as `simulate` does.
    pub fn refined(&self, trial: &Trial) -> Trial {
        if !trial.is_rough {
            return trial.clone();
        }
        let Candidate { tier1, tier2, pool, .. } = trial.candidate;
        let same = |site: &&Site| site.order() == (tier1, tier2, pool);
        let site = self.sites.iter().find(same).expect("a trial has a site");
        self.forecast(site, &trial.candidate, false)
    }

    fn forecast(&self, site: &Site, candidate: &Candidate, roughly: bool) -> Trial {
        let mut plan = self.plan(site, candidate);
        let (shape, cluster) = (&self.space.job.shape, &self.space.cluster);
        let deployment = plan.deployment("plan", cluster, shape);
        let deployment = deployment.expect("a candidate fits its cluster");
        let forecast = match roughly {
            true => forecast_roughly(&deployment, self.workload),
            false => forecast(&deployment, self.workload, None),
        };
        let is_rough = roughly && forecast.layers_as_one > 1;
        let cost = self.prices.cost(candidate.tier1, candidate.tier2, candidate.pool);
        let spend = self.prices.unit.spend(cost, forecast.seconds);
        let rented = self.prices.unit == CostUnit::UsdPerHour;
        plan.forecast = PlanForecast {
            tokens_per_second: forecast.tokens_per_second(),
            seconds_per_token: forecast.step_seconds / forecast.steps.max(1) as f64,
            bottleneck: forecast.bottleneck(&deployment),
            job_seconds: forecast.seconds,
            job_usd: rented.then_some(spend),
            kernels: plan.forecast.kernels,
        };
        let trial = Trial { candidate: *candidate, plan, forecast, cost, spend, is_rough };
        self.known.lock().expect("no panic with the lock").insert(*candidate, trial.clone());
        trial
    }

    /// The candidate of a site with the best estimate.
    pub fn likeliest(&self, site: &Site) -> Option<Candidate> {
        let estimated = |candidate: Candidate| (self.quick.seconds(site, &candidate), candidate);
        let estimates = self.candidates(site).into_iter().map(estimated);
        estimates.min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, candidate)| candidate)
    }
}
