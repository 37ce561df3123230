//! The search: candidates in the order of their promise, forecast in rounds, until nothing better can be left.

use super::Choice;
use super::front::{Trial, is_covered};
use super::objective::{Objective, Value, compare};
use crate::candidate::Candidate;
use crate::error::PlanError;
use crate::space::Site;
use crate::words::{counted, time};
use rayon::prelude::*;

/// Configurations forecast at a time; what prunes is updated between rounds.
const ROUND: usize = 8;
/// The best by the objective's own estimate that are forecast first.
const FIRST: usize = 6;

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

/// A candidate, what it is estimated to take, and what it takes at least.
struct Promise {
    site: usize,
    candidate: Candidate,
    cost: f64,
    estimate_seconds: f64,
    least_seconds: f64,
}

impl Choice<'_> {
    /// All candidates with their estimates, the best `per_site` of every site.
    fn promises(&self, per_site: usize) -> (Vec<Promise>, usize) {
        let of = |(site, nodes): (usize, &Site)| {
            let cost = self.prices.cost(nodes.tier1, nodes.tier2, nodes.pool);
            let promise = |candidate: Candidate| {
                let estimate_seconds = self.quick.seconds(nodes, &candidate);
                let least_seconds = self.quick.seconds_least(nodes, &candidate);
                Promise { site, candidate, cost, estimate_seconds, least_seconds }
            };
            let mut all: Vec<Promise> = self.candidates(nodes).into_iter().map(promise).collect();
            let count = all.len();
            all.sort_by(|one, other| one.estimate_seconds.total_cmp(&other.estimate_seconds));
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
        let spend = |promise: &Promise| unit.spend(promise.cost, promise.estimate_seconds);
        promises.sort_by(|one, other| {
            let key = |promise: &Promise| (spend(promise), promise.estimate_seconds);
            compare(key(one), key(other)).then_with(|| one.candidate.cmp(&other.candidate))
        });
        let mut fastest = f64::INFINITY;
        let mut ranked: Vec<(f64, Promise)> = Vec::with_capacity(promises.len());
        for promise in promises {
            fastest = fastest.min(promise.estimate_seconds);
            ranked.push((promise.estimate_seconds / fastest, promise));
        }
        let value =
            |promise: &Promise| objective.value(unit, promise.estimate_seconds, promise.cost);
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
                let at_best = objective.value(unit, promise.least_seconds, promise.cost);
                let beaten =
                    best.as_ref().is_some_and(|best| compare(at_best, value(best)).is_le());
                let spend = unit.spend(promise.cost, promise.least_seconds);
                if prune && beaten && is_covered(&trials, promise.least_seconds, spend) {
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
