//! The planner: an exhaustive search for the best configuration and for the front of throughput against cost,
//! pruned only where it is safe.
//!
//! A candidate is skipped only when its bound (see [`Space::estimate`]) would not beat what is already found.
//! Sites are visited in a fixed order and in rounds, so the result does not depend on the number of threads.

use rayon::prelude::*;

use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::program::{Bottleneck, Program};
use crate::simulator;
use crate::space::{Candidate, Site, Space};

/// Sites simulated at a time; what prunes is updated between rounds.
const SITES_PER_ROUND: usize = 4;
/// The front's resolution: a configuration must beat the cheaper ones by this factor to be on it.
pub const FRONT_STEP: f64 = 1.01;

/// What to optimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Most tokens per second, then least cost.
    Throughput,
    /// Least cost per token.
    Cost,
    /// Least cost among those that run `rows` rows within `seconds`.
    Deadline {
        /// Seconds allowed.
        seconds: f64,
        /// Rows of the job.
        rows: f64,
    },
}

/// How good a configuration is; larger pairs are better.
type Value = (f64, f64);

impl Objective {
    /// The value of `tokens_per_second` at `cost`. It never falls when tokens per second rise, so the value of a
    /// bound is a bound of the value.
    fn value(self, tokens_per_second: f64, cost: f64) -> Value {
        match self {
            Self::Throughput => (tokens_per_second, -cost),
            Self::Cost => (tokens_per_second / cost, tokens_per_second),
            Self::Deadline { seconds, rows } if tokens_per_second * seconds >= rows => {
                (-cost, tokens_per_second)
            }
            Self::Deadline { .. } => (f64::NEG_INFINITY, tokens_per_second),
        }
    }
}

/// A simulated candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The candidate.
    pub candidate: Candidate,
    /// Simulated tokens per second.
    pub tokens_per_second: f64,
    /// The limit no run exceeds.
    pub bound: f64,
    /// What sets the limit.
    pub bottleneck: Bottleneck,
    /// Cost of its nodes.
    pub cost: f64,
}

impl Evaluation {
    /// Cost for a token per second.
    pub fn cost_per_rate(&self) -> f64 {
        self.cost / self.tokens_per_second
    }
}

/// How much work a search was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Candidates in the space.
    pub candidates: usize,
    /// Candidates simulated.
    pub simulated: usize,
    /// Events processed.
    pub events: u64,
}

impl Effort {
    fn add(&mut self, other: &Self) {
        self.candidates += other.candidates;
        self.simulated += other.simulated;
        self.events += other.events;
    }
}

/// The best configuration and how it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The best.
    pub best: Evaluation,
    /// Its site.
    pub site: Site,
    /// What costs are counted in.
    pub unit: CostUnit,
    /// What it took.
    pub effort: Effort,
}

/// Searches the whole space for the best; `prune: false` simulates every candidate and finds the same.
pub fn search(space: &Space, objective: Objective, prune: bool) -> Result<Found, PlanError> {
    let prices = Prices::of(&space.cluster);
    let cost_of = |site: &Site| prices.cost(site.tier1, site.tier2, site.pool);
    let promise = |site: Site| {
        let candidates = space.candidates(&site);
        let bound = candidates
            .iter()
            .map(|candidate| space.estimate(&site, candidate).0)
            .fold(0.0, f64::max);
        (objective.value(bound, cost_of(&site)), site)
    };
    let mut sites: Vec<(Value, Site)> = space.sites()?.into_par_iter().map(promise).collect();
    sites.sort_by(|(left, first), (right, second)| {
        compare(*right, *left).then_with(|| first.order().cmp(&second.order()))
    });
    let mut effort = Effort::default();
    let mut best: Option<(Value, Evaluation, &Site)> = None;
    for round in sites.chunks(SITES_PER_ROUND) {
        let floor = best.as_ref().map(|(value, ..)| *value);
        let results: Vec<_> = round
            .par_iter()
            .map(|(_, site)| {
                let cost = cost_of(site);
                best_of_site(space, site, cost, |bound, best: Option<f64>| {
                    let own = best.map(|rate| objective.value(rate, cost));
                    let beats = |other: Option<Value>| {
                        other.is_none_or(|other| {
                            compare(objective.value(bound, cost), other).is_gt()
                        })
                    };
                    !prune || (beats(floor) && beats(own))
                })
            })
            .collect();
        for ((found, work), (_, site)) in results.into_iter().zip(round) {
            effort.add(&work);
            let Some(found) = found else { continue };
            let value = objective.value(found.tokens_per_second, found.cost);
            if best.as_ref().is_none_or(|(other, ..)| compare(value, *other).is_gt()) {
                best = Some((value, found, site));
            }
        }
    }
    let (value, best, site) = best.ok_or_else(|| {
        PlanError::NoContext(format!(
            "no batch up to {} rows finds seats",
            space.settings.batch_max
        ))
    })?;
    if let (Objective::Deadline { seconds, rows }, f64::NEG_INFINITY) = (objective, value.0) {
        return Err(missed_deadline(space, seconds, rows));
    }
    Ok(Found { best, site: site.clone(), unit: prices.unit, effort })
}

fn missed_deadline(space: &Space, seconds: f64, rows: f64) -> PlanError {
    let most = search(space, Objective::Throughput, true)
        .map_or(0.0, |found| found.best.tokens_per_second);
    PlanError::Deadline(format!(
        "{rows:.0} rows in {:.2} h need {:.1} tokens/s; the cluster reaches {most:.1}, so {:.2} h",
        seconds / 3600.0,
        rows / seconds,
        rows / most / 3600.0
    ))
}

/// Configurations that none cheaper comes within [`FRONT_STEP`] of, cheapest first.
pub fn front(space: &Space) -> Result<(Vec<Evaluation>, Effort), PlanError> {
    let prices = Prices::of(&space.cluster);
    let mut sites: Vec<(f64, Site)> = space
        .sites()?
        .into_iter()
        .map(|site| (prices.cost(site.tier1, site.tier2, site.pool), site))
        .collect();
    sites.sort_by(|(left, first), (right, second)| {
        left.total_cmp(right).then_with(|| first.order().cmp(&second.order()))
    });
    let mut effort = Effort::default();
    let mut front: Vec<Evaluation> = Vec::new();
    for round in sites.chunks(SITES_PER_ROUND) {
        let floor = front.last().map_or(0.0, |best| best.tokens_per_second);
        let worth =
            |bound: f64, best: Option<f64>| bound > FRONT_STEP * floor.max(best.unwrap_or(0.0));
        let results: Vec<_> =
            round.par_iter().map(|(cost, site)| best_of_site(space, site, *cost, worth)).collect();
        for (found, work) in results {
            effort.add(&work);
            let Some(found) = found else { continue };
            let floor = front.last().map_or(0.0, |best| best.tokens_per_second);
            if found.tokens_per_second > FRONT_STEP * floor {
                if front.last().is_some_and(|other| other.cost == found.cost) {
                    front.pop();
                }
                front.push(found);
            }
        }
    }
    Ok((front, effort))
}

fn compare(left: Value, right: Value) -> std::cmp::Ordering {
    left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1))
}

/// The best candidate of a site. Candidates come by decreasing bound; the first that is not `worth` its simulation,
/// given its bound and the best of the site so far, ends the site.
fn best_of_site(
    space: &Space,
    site: &Site,
    cost: f64,
    worth: impl Fn(f64, Option<f64>) -> bool,
) -> (Option<Evaluation>, Effort) {
    let mut bounded: Vec<(f64, Candidate)> = space
        .candidates(site)
        .into_iter()
        .map(|candidate| (space.estimate(site, &candidate).0, candidate))
        .collect();
    // Fewer flights first among equals: the same throughput with less waiting.
    bounded.sort_by(|(left, first), (right, second)| {
        right.total_cmp(left).then_with(|| (first.flights, first).cmp(&(second.flights, second)))
    });
    let mut effort = Effort { candidates: bounded.len(), ..Effort::default() };
    let mut best: Option<Evaluation> = None;
    for (bound, candidate) in bounded {
        let reached = best.as_ref().map(|best| best.tokens_per_second);
        if !worth(bound, reached) {
            break;
        }
        let (evaluation, events) = simulate_candidate(space, site, &candidate, cost);
        effort.simulated += 1;
        effort.events += events;
        if reached.is_none_or(|reached| evaluation.tokens_per_second > reached) {
            best = Some(evaluation);
        }
    }
    (best, effort)
}

fn simulate_candidate(
    space: &Space,
    site: &Site,
    candidate: &Candidate,
    cost: f64,
) -> (Evaluation, u64) {
    let program = Program::of(&space.configuration(site, candidate));
    let outcome = simulator::run(&program, None);
    let (bound, bottleneck) = program.bound();
    let tokens_per_second = outcome.rows_per_second;
    (
        Evaluation { candidate: *candidate, tokens_per_second, bound, bottleneck, cost },
        outcome.events,
    )
}

/// Simulates one candidate.
pub fn evaluate(space: &Space, site: &Site, candidate: &Candidate) -> Evaluation {
    let cost = Prices::of(&space.cluster).cost(site.tier1, site.tier2, site.pool);
    simulate_candidate(space, site, candidate, cost).0
}

/// The best configuration of one site.
pub fn best_at(space: &Space, site: &Site) -> Option<Evaluation> {
    let cost = Prices::of(&space.cluster).cost(site.tier1, site.tier2, site.pool);
    best_of_site(space, site, cost, |bound, best| bound > best.unwrap_or(0.0)).0
}

/// The fewest flights that lose less than a thousandth of the throughput: the same work with less waiting.
pub fn fewest_flights(space: &Space, site: &Site, best: &Evaluation) -> Evaluation {
    let (mut low, mut high, mut chosen) = (0, best.candidate.flights, best.clone());
    while high - low > 1 {
        let flights = (low + high) / 2;
        let evaluation = evaluate(space, site, &Candidate { flights, ..best.candidate });
        if evaluation.tokens_per_second >= 0.999 * best.tokens_per_second {
            (high, chosen) = (flights, evaluation);
        } else {
            low = flights;
        }
    }
    chosen
}
