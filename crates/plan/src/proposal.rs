//! What `glinthawk plan` says: the best configuration for a job, its neighbours and why they lose, the front, the plan.

use crate::candidate::Candidate;
use crate::choice::{Choice, Chosen, FRONT_STEP, Objective, SearchLimits, Trial, Work, front};
use crate::cost::CostUnit;
use crate::error::PlanError;
use crate::plan::Plan;
use crate::space::{Site, Space};
use crate::words::{counted, time};
use crate::workload::Workload;
use rayon::prelude::*;
use std::fmt::Write;

/// A configuration next to the best one.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbour {
    /// What is different about it.
    pub change: &'static str,
    /// How its job does; none where it cannot run.
    pub trial: Option<Trial>,
}

/// The outcome of planning.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// The best configuration.
    pub best: Trial,
    /// Configurations next to it.
    pub neighbours: Vec<Neighbour>,
    /// Job time against cost, cheapest first.
    pub front: Vec<Trial>,
    /// What costs are counted in.
    pub unit: CostUnit,
    /// What the search took.
    pub work: Work,
    pool_names: Vec<String>,
}

/// Chooses the best configuration of `space` for the job of `workload` in chunks, and explains it.
pub fn propose(
    space: &Space,
    objective: Objective,
    workload: &Workload,
    chunk: usize,
    limits: SearchLimits,
) -> Result<Proposal, PlanError> {
    let choice = Choice::new(space, workload, chunk)?;
    let unit = choice.prices.unit;
    if objective == Objective::Cost && unit == CostUnit::Nodes {
        return Err(PlanError::MissingFigure(
            "the cost objective needs price_usd or usd_per_hour for tier1 and every tier2 in the cluster file".to_owned(),
        ));
    }
    let Chosen { best, mut trials, work } = choice.search(objective, limits, true)?;
    let neighbours = neighbours(&choice, &best);
    // A neighbour may be better than what it stands beside on the front, and is then on it.
    let found = neighbours.iter().filter_map(|neighbour| neighbour.trial.clone());
    trials.extend(found.filter(|trial| !trials.contains(trial)).collect::<Vec<_>>());
    let front = front(&trials, &best).into_iter().cloned().collect();
    let pool_names = space.cluster.tier2.iter().map(|pool| pool.name.clone()).collect();
    Ok(Proposal { best, neighbours, front, unit, work, pool_names })
}

/// One step along each axis: nodes of either tier in their likeliest configuration, batch and flights.
fn neighbours(choice: &Choice, best: &Trial) -> Vec<Neighbour> {
    let Candidate { tier1, tier2, pool, batch, local_rows, flights } = best.candidate;
    let site_at = |tier1: usize, tier2: usize| {
        let same = |site: &&Site| {
            (site.tier1, site.tier2) == (tier1, tier2) && (tier2 == 0 || site.pool == pool)
        };
        choice.sites().iter().find(same)
    };
    let at = |tier1: Option<usize>, tier2: Option<usize>| {
        let site = site_at(tier1?, tier2?)?;
        Some((site, choice.likeliest(site)?))
    };
    let mut steps = vec![
        ("one Tier-1 node fewer", at(tier1.checked_sub(1), Some(tier2))),
        ("one Tier-1 node more", at(Some(tier1 + 1), Some(tier2))),
        ("one Tier-2 node per Tier-1 node more", at(Some(tier1), Some(tier2 + 1))),
    ];
    if tier2 > 0 {
        steps.push(("one Tier-2 node per Tier-1 node fewer", at(Some(tier1), Some(tier2 - 1))));
    }
    let site = site_at(tier1, tier2).expect("the best has a site");
    let like = |batch: usize, flights: usize| {
        let local_rows = if local_rows > 0 { batch } else { 0 };
        Some((site, Candidate { batch, local_rows, flights, ..best.candidate }))
    };
    if batch > 1 {
        steps.push(("half the batch", like(batch.div_ceil(2), flights)));
    }
    if flights > 1 {
        steps.push(("half the flights", like(batch, flights.div_ceil(2))));
    }
    let tried = steps.into_par_iter().map(|(change, at)| {
        let trial = at.map(|(site, candidate)| choice.trial(site, &candidate));
        // A rough forecast may look better than the best, which is not rough.
        let trial = trial.map(|trial| match trial.seconds() < best.seconds() {
            true => choice.refined(&trial),
            false => trial,
        });
        Neighbour { change, trial }
    });
    tried.collect()
}

impl Proposal {
    /// The plan to run.
    pub fn plan(&self) -> &Plan {
        &self.best.plan
    }

    /// A configuration in words.
    pub fn describe(&self, candidate: &Candidate) -> String {
        let Candidate { tier1, tier2, pool, batch, local_rows, flights } = *candidate;
        let flights = counted(flights, "flight");
        match (tier2, local_rows) {
            (0, _) => format!("{tier1} Tier-1, single tier, B = {batch}, {flights}"),
            (_, local) => format!(
                "{tier1} Tier-1 x {tier2} {}{}, B = {batch}, {flights}",
                self.pool_names[pool],
                if local > 0 { " and themselves" } else { "" },
            ),
        }
    }

    fn line(&self, trial: &Trial) -> String {
        let mut cost = self.unit.words(trial.cost);
        if self.unit == CostUnit::UsdPerHour {
            cost = format!("{}  {cost}", self.unit.spend_words(trial.spend));
        }
        format!(
            "{:>9}  {:>8.0} tokens/s  {cost:>18}  {}{}",
            time(trial.seconds()),
            trial.forecast.tokens_per_second(),
            self.describe(&trial.candidate),
            if trial.is_rough { " (rough)" } else { "" }
        )
    }

    /// The proposal for a terminal.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let mut say =
            |line: String| writeln!(text, "{line}").expect("writing to a string does not fail");
        let plan = self.plan();
        say(format!("best       {}", self.line(&self.best)));
        say(format!("limited by {}", plan.forecast.bottleneck.words()));
        for kernels in &plan.forecast.kernels {
            say(format!("kernels    {kernels}"));
        }
        let dollars = plan.forecast.job_usd.map_or(String::new(), |usd| format!(", ${usd:.2}"));
        say(format!("the job    {:.2} s{dollars}", plan.forecast.job_seconds));
        say("\nneighbours and why they lose".to_owned());
        for neighbour in &self.neighbours {
            say(format!("  {:<40}{}", neighbour.change, self.why(neighbour)));
        }
        say(format!(
            "\nfront of job time against cost (steps of {:.0}%)",
            100.0 * (FRONT_STEP - 1.0)
        ));
        for trial in &self.front {
            say(format!("  {}", self.line(trial)));
        }
        if self.front.iter().any(|trial| trial.is_rough) {
            say("  (rough: several layers simulated as one, up to a third too fast)".to_owned());
        }
        let Work { candidates, forecast, bounded, events } = self.work;
        say(format!(
            "\n{forecast} of {} forecast, {events} events; {bounded} more cannot be better, \
             the rest looks worse",
            counted(candidates, "configuration")
        ));
        text
    }

    fn why(&self, neighbour: &Neighbour) -> String {
        let Some(trial) = &neighbour.trial else {
            return "cannot run: no such nodes, or the model or a context does not fit".to_owned();
        };
        let percent = |other: f64, own: f64| 100.0 * (other / own - 1.0);
        let longer = percent(trial.seconds(), self.best.seconds());
        let dearer = percent(trial.spend, self.best.spend);
        let limit = trial.plan.forecast.bottleneck.words();
        let rough = if trial.is_rough { " (rough)" } else { "" };
        format!("{longer:+.1}% time, {dearer:+.1}% cost; {limit}{rough}")
    }
}
