//! The planner: an exhaustive search for the best configuration and for the front of throughput against cost,
//! pruned only where it is safe.
//!
//! A candidate is skipped only when its bound (see [`Space::estimate`]) would not beat what is already found.
//! Candidates are visited in a fixed order and in rounds, so the result does not depend on the number of threads.

use std::collections::{HashMap, HashSet};

use rayon::prelude::*;

use crate::candidate::{Candidate, Evaluation};
use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::program::Program;
use crate::simulator;
use crate::space::{Site, Space};

/// Candidates simulated at a time; what prunes is updated between rounds.
const ROUND: usize = 8;
/// The front's resolution: a configuration must beat the cheaper ones by this factor to be on it.
pub const FRONT_STEP: f64 = 1.05;
/// How well the best of a site is known where it only serves comparison.
pub const SITE_STEP: f64 = 1.1;

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

    /// Counts a simulation's events; none where its result was known.
    fn count(&mut self, events: Option<u64>) {
        self.simulated += usize::from(events.is_some());
        self.events += events.unwrap_or(0);
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
    let sites = space.sites()?;
    let mut effort = Effort::default();
    let promises: Vec<(Vec<Promise>, usize)> = sites
        .par_iter()
        .map(|site| {
            let cost = prices.cost(site.tier1, site.tier2, site.pool);
            let all = space.candidates(site);
            let count = all.len();
            let kept = if prune { undominated(all) } else { all };
            let promise = |candidate: Candidate| {
                let bound = space.estimate(site, &candidate).0;
                Promise { value: objective.value(bound, cost), site, candidate, cost }
            };
            (kept.into_iter().map(promise).collect(), count)
        })
        .collect();
    effort.candidates = promises.iter().map(|(_, count)| count).sum();
    let mut promises: Vec<Promise> =
        promises.into_iter().flat_map(|(promises, _)| promises).collect();
    promises.par_sort_unstable_by(Promise::order);
    let mut best: Option<(Value, Evaluation, &Site)> = None;
    for round in promises.chunks(ROUND) {
        let floor = best.as_ref().map(|(value, ..)| *value);
        let worth = |promise: &&Promise| {
            !prune || floor.is_none_or(|floor| compare(promise.value, floor).is_gt())
        };
        let worthy: Vec<&Promise> = round.iter().filter(worth).collect();
        if worthy.is_empty() {
            break;
        }
        let found: Vec<_> = worthy
            .par_iter()
            .map(|promise| {
                simulate_candidate(space, promise.site, &promise.candidate, promise.cost)
            })
            .collect();
        for ((evaluation, events), promise) in found.into_iter().zip(worthy) {
            effort.count(events);
            let value = objective.value(evaluation.tokens_per_second, evaluation.cost);
            if best.as_ref().is_none_or(|(other, ..)| compare(value, *other).is_gt()) {
                best = Some((value, evaluation, promise.site));
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

/// A candidate and what it is worth at most.
struct Promise<'a> {
    value: Value,
    site: &'a Site,
    candidate: Candidate,
    cost: f64,
}

impl Promise<'_> {
    /// Best first; among equals fewer flights, the same throughput with less waiting.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let rank =
            |promise: &Self| (promise.site.order(), promise.candidate.flights, promise.candidate);
        compare(other.value, self.value).then_with(|| rank(self).cmp(&rank(other)))
    }
}

/// Leaves out the candidates that another with as many flights and more rows per node makes pointless: every product
/// has more rows to share its weights, attention and transfers take the same time a row, delays are shared by more.
fn undominated(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut largest: HashMap<(usize, usize), Candidate> = HashMap::new();
    for candidate in candidates {
        let remote = if candidate.tier2 == 0 { 0 } else { candidate.local_rows };
        let kept = largest.entry((candidate.flights, remote)).or_insert(candidate);
        if candidate.batch > kept.batch {
            *kept = candidate;
        }
    }
    let mut kept: Vec<Candidate> = largest.into_values().collect();
    kept.sort_unstable();
    kept
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

/// Configurations that none cheaper comes within [`FRONT_STEP`] of, cheapest first; batches in steps of [`SITE_STEP`].
/// Nodes whose bound is not above that of cheaper ones by as much are not looked at.
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
    let bounds: Vec<f64> = sites
        .par_iter()
        .map(|(_, site)| {
            let bound = |candidate: Candidate| space.estimate(site, &candidate).0;
            space.candidates(site).into_iter().map(bound).fold(0.0, f64::max)
        })
        .collect();
    let mut promised = 0.0;
    for ((cost, site), bound) in sites.iter().zip(bounds) {
        if bound <= FRONT_STEP * promised {
            continue;
        }
        promised = bound;
        let floor = FRONT_STEP * front.last().map_or(0.0, |best| best.tokens_per_second);
        let (found, work) = best_of_site(space, site, *cost, floor, SITE_STEP);
        effort.add(&work);
        let Some(found) = found.filter(|found| found.tokens_per_second > floor) else { continue };
        if front.last().is_some_and(|other| other.cost == found.cost) {
            front.pop();
        }
        front.push(found);
    }
    Ok((front, effort))
}

fn compare(left: Value, right: Value) -> std::cmp::Ordering {
    left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1))
}

/// Leaves out batches that are within a factor `step` of a smaller one; candidates come by batch.
fn thinned(candidates: Vec<Candidate>, step: f64) -> Vec<Candidate> {
    let mut next: [f64; 2] = [0.0; 2];
    let mut kept = candidates;
    kept.retain(|candidate| {
        let least = &mut next[usize::from(candidate.tier2 > 0 && candidate.local_rows > 0)];
        let keep = candidate.batch as f64 >= *least;
        if keep {
            *least = step * candidate.batch as f64;
        }
        keep
    });
    kept
}

/// The best candidate of a site among those that reach more than `floor` tokens per second, with batches in steps of a
/// factor `step` and to within that factor: by decreasing bound, in rounds, until no bound is above what is found.
fn best_of_site(
    space: &Space,
    site: &Site,
    cost: f64,
    floor: f64,
    step: f64,
) -> (Option<Evaluation>, Effort) {
    let all = space.candidates(site);
    let mut effort = Effort { candidates: all.len(), ..Effort::default() };
    let mut bounded: Vec<(f64, Candidate)> = thinned(undominated(all), step)
        .into_iter()
        .map(|candidate| (space.estimate(site, &candidate).0, candidate))
        .collect();
    // Fewer flights first among equals: the same throughput with less waiting.
    bounded.sort_by(|(left, first), (right, second)| {
        right.total_cmp(left).then_with(|| (first.flights, first).cmp(&(second.flights, second)))
    });
    let mut best: Option<Evaluation> = None;
    for round in bounded.chunks(ROUND) {
        let reached = best.as_ref().map_or(0.0, |best| step * best.tokens_per_second);
        let worth = |(bound, _): &&(f64, Candidate)| *bound > floor.max(reached);
        let found: Vec<_> = round
            .par_iter()
            .filter(worth)
            .map(|(_, candidate)| simulate_candidate(space, site, candidate, cost))
            .collect();
        if found.is_empty() {
            break;
        }
        for (evaluation, events) in found {
            effort.count(events);
            let reached = best.as_ref().map_or(0.0, |best| best.tokens_per_second);
            if evaluation.tokens_per_second > reached {
                best = Some(evaluation);
            }
        }
    }
    (best, effort)
}

/// Simulates a candidate, if that was not done before; no events where it was.
fn simulate_candidate(
    space: &Space,
    site: &Site,
    candidate: &Candidate,
    cost: f64,
) -> (Evaluation, Option<u64>) {
    if let Some(known) = space.simulated.lock().expect("no panic with the lock").get(candidate) {
        return (known.clone(), None);
    }
    let program = Program::of(&space.configuration(site, candidate));
    let outcome = simulator::run(&program, None);
    let (bound, bottleneck) = (outcome.bound, outcome.bottleneck);
    let tokens_per_second = outcome.rows_per_second;
    let evaluation =
        Evaluation { candidate: *candidate, tokens_per_second, bound, bottleneck, cost };
    space.simulated.lock().expect("no panic with the lock").insert(*candidate, evaluation.clone());
    (evaluation, Some(outcome.events))
}

/// The best of what was simulated so far with other nodes than `best` has, one for each choice of nodes.
pub fn runners_up(
    space: &Space,
    objective: Objective,
    best: &Candidate,
    count: usize,
) -> Vec<Evaluation> {
    let nodes = |candidate: &Candidate| (candidate.tier1, candidate.tier2, candidate.pool);
    let value =
        |evaluation: &Evaluation| objective.value(evaluation.tokens_per_second, evaluation.cost);
    let simulated = space.simulated.lock().expect("no panic with the lock");
    let mut others: Vec<&Evaluation> =
        simulated.values().filter(|other| nodes(&other.candidate) != nodes(best)).collect();
    others.sort_by(|left, right| {
        compare(value(right), value(left)).then_with(|| left.candidate.cmp(&right.candidate))
    });
    let mut seen = HashSet::new();
    others.retain(|other| seen.insert(nodes(&other.candidate)));
    others.into_iter().take(count).cloned().collect()
}

/// Simulates one candidate.
pub fn evaluate(space: &Space, site: &Site, candidate: &Candidate) -> Evaluation {
    let cost = Prices::of(&space.cluster).cost(site.tier1, site.tier2, site.pool);
    simulate_candidate(space, site, candidate, cost).0
}

/// The best configuration of one site; at a `step` above 1 only to within that factor, for less work.
pub fn best_at(space: &Space, site: &Site, step: f64) -> Option<Evaluation> {
    let cost = Prices::of(&space.cluster).cost(site.tier1, site.tier2, site.pool);
    best_of_site(space, site, cost, 0.0, step).0
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
