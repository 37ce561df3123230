//! Which configuration a job should run on: many are ranked by a quick estimate, the promising ones are forecast, and
//! everything that is said or chosen comes from the forecasts.
//!
//! What is not forecast is left out for one of two reasons, which are counted: its bound shows that it cannot be better
//! than what was found, or its estimate is worse than those of all that were forecast.
//!
//! The search goes by rough forecasts where a job is large. They err on the fast side, so whatever looks better than the
//! best is forecast again layer by layer, until the best has been: the best is never rough.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Mutex;

use glinthawk_protocol::lane_pages;
use rayon::prelude::*;

use crate::bound::Bottleneck;
use crate::candidate::Candidate;
use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::forecast::{Forecast, forecast, forecast_roughly};
use crate::kernels::KernelTimes;
use crate::plan::{ContextBudget, PLAN_VERSION, Plan, PlanForecast};
use crate::quick::{Quick, lanes};
use crate::space::{Site, Space};
use crate::words::{counted, time};
use crate::workload::Workload;

/// The front's resolution: a configuration must be faster than the cheaper ones by this factor to be on it.
pub const FRONT_STEP: f64 = 1.05;
/// Configurations forecast at a time; what prunes is updated between rounds.
const ROUND: usize = 8;
/// Flights for each Tier-1 node that are tried; with one, only one slice has work at a time.
const FLIGHTS: [f64; 11] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0];
/// Batches that are tried, as parts of the one that seats all prompts at once.
const BATCHES: [f64; 4] = [0.125, 0.25, 0.5, 1.0];
/// The best by the objective's own estimate that are forecast first.
const FIRST: usize = 6;

/// What to optimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Least time for the job, then least cost.
    Throughput,
    /// Least cost for the job: dollars where there is a rent, else price times time.
    Cost,
    /// Cheapest that finishes the job within so many seconds.
    Deadline {
        /// Seconds allowed.
        seconds: f64,
    },
}

/// How good a configuration is; larger pairs are better.
type Value = (f64, f64);

fn compare(left: Value, right: Value) -> Ordering {
    left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1))
}

impl Objective {
    /// The value of a job of `seconds` on nodes of `cost`. It never falls when the seconds fall, so the value of a
    /// bound is a bound of the value.
    fn value(self, unit: CostUnit, seconds: f64, cost: f64) -> Value {
        let spend = unit.spend(cost, seconds);
        match self {
            Self::Throughput => (-seconds, -spend),
            Self::Cost => (-cost * seconds, -seconds),
            Self::Deadline { seconds: allowed } if seconds <= allowed => (-spend, -seconds),
            Self::Deadline { .. } => (f64::NEG_INFINITY, -seconds),
        }
    }
}

/// A configuration whose job was forecast.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The configuration.
    pub candidate: Candidate,
    /// The plan to run it.
    pub plan: Plan,
    /// What its job takes.
    pub forecast: Forecast,
    /// Cost of its nodes.
    pub cost: f64,
    /// What the job costs: dollars where there is a rent, else the nodes' price or number.
    pub spend: f64,
    /// Whether the forecast was made roughly, with several layers as one.
    pub is_rough: bool,
}

impl Trial {
    /// From the first prompt to the last token.
    pub fn seconds(&self) -> f64 {
        self.forecast.seconds
    }
}

/// How far a search goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchLimits {
    /// Configurations of the same nodes that may be forecast: the best by their estimates.
    pub per_site: usize,
    /// Configurations that are forecast in all, at most.
    pub forecasts: usize,
    /// Events of the search's forecasts together, after which no more are begun.
    pub events: u64,
}

impl Default for SearchLimits {
    /// A minute or two on two cores for a job of thousands of prompts on tens of nodes, seconds for a smaller one.
    fn default() -> Self {
        Self { per_site: 2, forecasts: 48, events: 60_000_000 }
    }
}

/// How much work a search was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Configurations that were estimated.
    pub candidates: usize,
    /// Configurations that were forecast.
    pub forecast: usize,
    /// Configurations that a bound ruled out.
    pub bounded: usize,
    /// Events of the forecasts.
    pub events: u64,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The best by the objective.
    pub best: Trial,
    /// Everything that was forecast, cheapest first.
    pub trials: Vec<Trial>,
    /// What it took.
    pub work: Work,
}

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

/// A candidate, what it is estimated to take, and what it takes at least.
struct Promise {
    site: usize,
    candidate: Candidate,
    cost: f64,
    estimate: f64,
    least: f64,
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
        lane_pages(held, self.context_max() as u32, 1).is_some()
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

    /// All candidates with their estimates, the best `per_site` of every site.
    fn promises(&self, per_site: usize) -> (Vec<Promise>, usize) {
        let of = |(site, nodes): (usize, &Site)| {
            let cost = self.prices.cost(nodes.tier1, nodes.tier2, nodes.pool);
            let promise = |candidate: Candidate| {
                let estimate = self.quick.seconds(nodes, &candidate);
                let least = self.quick.seconds_least(nodes, &candidate);
                Promise { site, candidate, cost, estimate, least }
            };
            let mut all: Vec<Promise> = self.candidates(nodes).into_iter().map(promise).collect();
            let count = all.len();
            all.sort_by(|one, other| one.estimate.total_cmp(&other.estimate));
            all.truncate(per_site);
            (all, count)
        };
        let found: Vec<_> = self.sites.par_iter().enumerate().map(of).collect();
        let count = found.iter().map(|(_, count)| count).sum();
        (found.into_iter().flat_map(|(promises, _)| promises).collect(), count)
    }

    /// The order of forecasts: the best by the objective, then whatever comes nearest to the front of the estimates.
    fn ordered(&self, objective: Objective, mut promises: Vec<Promise>) -> Vec<Promise> {
        let unit = self.prices.unit;
        let spend = |promise: &Promise| unit.spend(promise.cost, promise.estimate);
        promises.sort_by(|one, other| {
            let key = |promise: &Promise| (spend(promise), promise.estimate);
            compare(key(one), key(other)).then_with(|| one.candidate.cmp(&other.candidate))
        });
        let mut fastest = f64::INFINITY;
        let mut ranked: Vec<(f64, Promise)> = Vec::with_capacity(promises.len());
        for promise in promises {
            fastest = fastest.min(promise.estimate);
            ranked.push((promise.estimate / fastest, promise));
        }
        let value = |promise: &Promise| objective.value(unit, promise.estimate, promise.cost);
        ranked.sort_by(|(_, one), (_, other)| compare(value(other), value(one)));
        let rest = ranked.split_off(FIRST.min(ranked.len()));
        let mut rest: Vec<_> = rest.into_iter().collect();
        rest.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        ranked.into_iter().chain(rest).map(|(_, promise)| promise).collect()
    }

    /// Searches for the best and for the front; `prune: false` forecasts whatever the limits allow.
    pub fn search(
        &self,
        objective: Objective,
        limits: SearchLimits,
        prune: bool,
    ) -> Result<Chosen, PlanError> {
        let unit = self.prices.unit;
        let (promises, candidates) = self.promises(limits.per_site);
        let mut work = Work { candidates, ..Work::default() };
        let value = |trial: &Trial| objective.value(unit, trial.seconds(), trial.cost);
        let mut trials: Vec<Trial> = Vec::new();
        let mut best: Option<Trial> = None;
        let mut searched = 0;
        let mut promises = self.ordered(objective, promises).into_iter().peekable();
        while promises.peek().is_some()
            && work.forecast < limits.forecasts
            && searched < limits.events
        {
            // Rounds have the same forecasts however many cores there are.
            let (mut round, mut events) = (Vec::new(), 0.0);
            let room = ROUND.min(limits.forecasts - work.forecast);
            while round.len() < room
                && (round.is_empty() || events < (limits.events / 4) as f64)
                && let Some(promise) = promises.next()
            {
                let at_best = objective.value(unit, promise.least, promise.cost);
                let beaten =
                    best.as_ref().is_some_and(|best| compare(at_best, value(best)).is_le());
                let spend = unit.spend(promise.cost, promise.least);
                if prune && beaten && is_covered(&trials, promise.least, spend) {
                    work.bounded += 1;
                } else {
                    events += self.quick.events(&self.sites[promise.site], &promise.candidate);
                    round.push(promise);
                }
            }
            let trial =
                |promise: &Promise| self.trial(&self.sites[promise.site], &promise.candidate);
            let found: Vec<Trial> = round.par_iter().map(trial).collect();
            work.forecast += found.len();
            searched += found.iter().map(|trial| trial.forecast.events).sum::<u64>();
            trials.extend(found);
            best = self.best_refined(&mut trials, value, &mut work.events);
        }
        work.events += searched;
        let best = best.ok_or_else(|| {
            let rows = self.space.settings.batch_max;
            PlanError::NoContext(format!(
                "no batch up to {rows} rows finds memory for a context of {} tokens",
                self.context_max()
            ))
        })?;
        trials.sort_by(|one, other| {
            compare((one.spend, one.seconds()), (other.spend, other.seconds()))
                .then_with(|| one.candidate.cmp(&other.candidate))
        });
        if let Objective::Deadline { seconds } = objective
            && best.seconds() > seconds
        {
            return Err(self.missed(seconds, &best));
        }
        Ok(Chosen { best, trials, work })
    }

    /// The best trial, forecast again until it is not rough.
    fn best_refined(
        &self,
        trials: &mut [Trial],
        value: impl Fn(&Trial) -> Value,
        events: &mut u64,
    ) -> Option<Trial> {
        loop {
            // Of equal ones, the first.
            let best = trials.iter_mut().reduce(|best, trial| {
                if compare(value(trial), value(best)).is_gt() { trial } else { best }
            })?;
            if !best.is_rough {
                return Some(best.clone());
            }
            *best = self.refined(best);
            *events += best.forecast.events;
        }
    }

    /// Configurations that were not forecast and that no bound keeps from finishing within `seconds`.
    fn open(&self, seconds: f64) -> usize {
        let known = self.known.lock().expect("no panic with the lock");
        let of = |site: &Site| {
            let is_open = |candidate: &Candidate| {
                !known.contains_key(candidate)
                    && self.quick.seconds_least(site, candidate) <= seconds
            };
            self.candidates(site).iter().filter(|candidate| is_open(candidate)).count()
        };
        self.sites.iter().map(of).sum()
    }

    fn missed(&self, seconds: f64, fastest: &Trial) -> PlanError {
        let (takes, allowed) = (time(fastest.seconds()), time(seconds));
        let fastest = format!("the fastest found takes {takes}, and {allowed} are allowed");
        PlanError::Deadline(match self.open(seconds) {
            0 => format!(
                "no configuration meets the deadline: {fastest}; a bound rules out all that were not forecast. \
                 Allow more hours, or give the cluster more nodes"
            ),
            open => format!(
                "no configuration that was forecast meets the deadline: {fastest}. This is not proven: {} \
                 not forecast, because their estimates are slower, and no bound rules them out. Allow more hours, or \
                 give the cluster more nodes; a cluster file with fewer nodes to choose from leaves fewer of them",
                counted(open, "configuration") + if open == 1 { " was" } else { " were" }
            ),
        })
    }
}

/// Whether a configuration that takes at least `seconds` and `spend` cannot be on the front, nor dominate what is on
/// it: something found is as cheap and as fast, or cheaper and less than a step slower.
fn is_covered(trials: &[Trial], seconds: f64, spend: f64) -> bool {
    trials.iter().any(|found| {
        (found.spend <= spend && found.seconds() <= seconds)
            || (found.spend < spend && found.seconds() <= FRONT_STEP * seconds)
    })
}

/// The front of job time against its cost: from the cheapest on, whatever is faster than all cheaper ones by
/// [`FRONT_STEP`]; and `best`, which no other beats in both.
pub fn front<'a>(trials: &'a [Trial], best: &'a Trial) -> Vec<&'a Trial> {
    let mut listed: Vec<&Trial> = Vec::new();
    let mut sorted: Vec<&Trial> = trials.iter().collect();
    sorted
        .sort_by(|one, other| compare((one.spend, one.seconds()), (other.spend, other.seconds())));
    for trial in sorted {
        if listed.last().is_none_or(|last| FRONT_STEP * trial.seconds() < last.seconds()) {
            listed.push(trial);
        }
    }
    if !listed.iter().any(|trial| trial.candidate == best.candidate) {
        let place = listed.partition_point(|trial| trial.spend <= best.spend);
        listed.insert(place, best);
    }
    listed
}
