//! An exhaustive search for the configuration of most throughput in the settled state, pruned only when it is safe.
//! What a job should run on is another question: see `choice.rs`.
//!
//! A candidate is skipped only when its bound (see [`Space::estimate`]) would not beat what is already found.
//! Candidates are visited in a fixed order and in rounds, so the result does not depend on the number of threads.

use crate::candidate::{Candidate, Evaluation};
use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::program::Program;
use crate::simulator;
use crate::space::{Site, Space};
use rayon::prelude::*;
use std::collections::HashMap;

/// Candidates simulated at a time; the pruning threshold is updated between rounds.
const ROUND: usize = 8;

/// How good a configuration is: tokens per second, then cheapness; larger pairs are better.
type Value = (f64, f64);

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
    /// Counts a simulation's events; none if its result was known.
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

/// Searches the whole space for most tokens per second, then least cost; `prune: false` simulates every candidate and
/// finds the same.
pub fn search(space: &Space, prune: bool) -> Result<Found, PlanError> {
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
                Promise { value: (bound, -cost), site, candidate, cost }
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
            let value = (evaluation.tokens_per_second, -evaluation.cost);
            if best.as_ref().is_none_or(|(other, ..)| compare(value, *other).is_gt()) {
                best = Some((value, evaluation, promise.site));
            }
        }
    }
    let (_, best, site) = best.ok_or_else(|| {
        PlanError::NoContext(format!(
            "no batch up to {} rows finds seats",
            space.settings.batch_max
        ))
    })?;
    Ok(Found { best, site: site.clone(), unit: prices.unit, effort })
}

/// A candidate and an upper bound on its value.
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

/// Simulates a candidate unless that was done before; then it has no events.
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

/// The best configuration of one site; at a `step` above 1 only to within that factor, for less work.
pub fn best_at(space: &Space, site: &Site, step: f64) -> Option<Evaluation> {
    let cost = Prices::of(&space.cluster).cost(site.tier1, site.tier2, site.pool);
    best_of_site(space, site, cost, 0.0, step).0
}
