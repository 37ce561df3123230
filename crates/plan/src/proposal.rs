//! What `glinthawk plan` says: the best configuration, its neighbours and why they lose, the front, the plan file.

use std::fmt::Write;

use crate::candidate::{Candidate, Evaluation};
use crate::cost::{CostUnit, Prices};
use crate::error::PlanError;
use crate::plan::{ContextBudget, PLAN_VERSION, Plan, PlanForecast};
use crate::report::{Report, simulate};
use crate::search::{
    Effort, FRONT_STEP, Objective, SITE_STEP, best_at, evaluate, fewest_flights, front, runners_up,
    search,
};
use crate::space::{Site, Space, Wish};
use crate::workload::Workload;

/// Runners-up that are shown.
const RUNNERS_UP: usize = 3;
/// Positions in a page.
const PAGE_POSITIONS: f64 = 16.0;

/// A configuration next to the best one.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbour {
    /// What is different about it.
    pub change: String,
    /// How it does; none where it cannot run.
    pub evaluation: Option<Evaluation>,
}

/// The outcome of planning.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// What was optimised.
    pub objective: Objective,
    /// The best configuration, with no more flights than it needs.
    pub best: Evaluation,
    /// The best in detail.
    pub report: Report,
    /// The best that was simulated with other nodes.
    pub runners_up: Vec<Evaluation>,
    /// Configurations next to it.
    pub neighbours: Vec<Neighbour>,
    /// Throughput against cost, cheapest first.
    pub front: Vec<Evaluation>,
    /// What costs are counted in.
    pub unit: CostUnit,
    /// What the search and the front took.
    pub effort: Effort,
    /// The plan to run.
    pub plan: Plan,
    pool_names: Vec<String>,
}

/// Searches `space` and explains the result; `workload` and `chunk` are what the job of the space was made from.
pub fn propose(
    space: &Space,
    objective: Objective,
    workload: Option<&Workload>,
    chunk: usize,
) -> Result<Proposal, PlanError> {
    if objective == Objective::Cost && Prices::of(&space.cluster).unit == CostUnit::Nodes {
        return Err(PlanError::MissingFigure(
            "the cost objective needs price_usd or usd_per_hour for tier1 and every tier2 in the cluster file".to_owned(),
        ));
    }
    let found = search(space, objective, true)?;
    let best = fewest_flights(space, &found.site, &found.best);
    let (mut front, work) = front(space)?;
    // The front's batches are coarser than the search's.
    if let Some(last) = front.last_mut().filter(|last| last.cost == best.cost) {
        *last = best.clone();
    }
    let neighbours = neighbours(space, &found.site, &found.best)?;
    let runners_up = runners_up(space, objective, &best.candidate, RUNNERS_UP);
    let report = simulate(&space.configuration(&found.site, &best.candidate));
    let plan = plan_of(space, &found.site, &best, &report, workload, chunk);
    let pool_names = space.cluster.tier2.iter().map(|pool| pool.name.clone()).collect();
    let (unit, mut effort) = (found.unit, found.effort);
    effort.simulated += work.simulated;
    effort.events += work.events;
    Ok(Proposal {
        objective,
        best,
        report,
        runners_up,
        neighbours,
        front,
        unit,
        effort,
        plan,
        pool_names,
    })
}

/// One step along each axis: nodes of either tier at their best batch, and the batch itself.
fn neighbours(space: &Space, site: &Site, best: &Evaluation) -> Result<Vec<Neighbour>, PlanError> {
    let sites = space.sites()?;
    let at = |tier1: Option<usize>, tier2: Option<usize>| {
        let same_pool =
            |other: &&Site| other.tier2 == 0 || site.tier2 == 0 || other.pool == site.pool;
        let matches = |other: &&Site| Some(other.tier1) == tier1 && Some(other.tier2) == tier2;
        sites
            .iter()
            .find(|other| matches(other) && same_pool(other))
            .and_then(|other| best_at(space, other, SITE_STEP))
    };
    let mut found = Vec::new();
    let Candidate { tier1, tier2, batch, .. } = best.candidate;
    for (step, tier1) in
        [("one Tier-1 node fewer", tier1.checked_sub(1)), ("one Tier-1 node more", Some(tier1 + 1))]
    {
        found.push(Neighbour { change: step.to_owned(), evaluation: at(tier1, Some(tier2)) });
    }
    let fewer = ("one Tier-2 node per Tier-1 node fewer", tier2.checked_sub(1));
    for (step, tier2) in [fewer, ("one Tier-2 node per Tier-1 node more", Some(tier2 + 1))] {
        if tier2.is_some() {
            found.push(Neighbour { change: step.to_owned(), evaluation: at(Some(tier1), tier2) });
        }
    }
    for (change, batch) in [
        ("a batch a tenth smaller", batch * 9 / 10),
        ("a batch a tenth larger", (batch * 11).div_ceil(10)),
    ] {
        let Candidate { pool, local_rows, .. } = best.candidate;
        let local_rows = if tier2 == 0 { batch } else { local_rows };
        let near = space.choose(&Wish { tier1, tier2, pool, batch, local_rows, flights: None });
        let evaluation = near.ok().map(|(site, candidate)| evaluate(space, &site, &candidate));
        found.push(Neighbour { change: change.to_owned(), evaluation });
    }
    Ok(found)
}

/// Seconds a workload takes at a report's throughput: its rows, but never less than its longest prompt needs.
pub fn job_seconds(report: &Report, workload: &Workload, chunk: usize) -> f64 {
    let longest = workload.steps_max(chunk) as f64 * report.time_per_token.total();
    (workload.rows() / report.tokens_per_second).max(longest)
}

fn plan_of(
    space: &Space,
    site: &Site,
    best: &Evaluation,
    report: &Report,
    workload: Option<&Workload>,
    chunk: usize,
) -> Plan {
    let (shape, cluster) = (&space.job.shape, &space.cluster);
    let Candidate { tier1, tier2, pool, batch, local_rows, flights } = best.candidate;
    let page_bytes = PAGE_POSITIONS * shape.context_bytes_per_layer();
    let budget = |bytes: f64, rows: usize| {
        let bytes = bytes.max(0.0);
        let seats = ((rows as f64 / space.job.rows_per_seat).ceil() as usize) * flights;
        ContextBudget { bytes: bytes as u64, pages: (bytes / page_bytes) as u64, seats }
    };
    let free = |(index, &layers): (usize, &usize)| {
        cluster.tier1.memory - shape.slice_bytes(layers, index == 0, index + 1 == tier1)
    };
    let tier1_free = site.slices.iter().enumerate().map(free).fold(f64::INFINITY, f64::min);
    let tier2_memory = if tier2 == 0 { 0.0 } else { cluster.tier2[pool].memory };
    let job_seconds = workload.map(|workload| job_seconds(report, workload, chunk));
    let prices = Prices::of(cluster);
    let rent = (prices.unit == CostUnit::UsdPerHour).then_some(best.cost);
    let mut kernels =
        vec![format!("{}: {}", cluster.tier1.name, cluster.tier1.kernels.provenance())];
    if tier2 > 0 {
        kernels.push(format!(
            "{}: {}",
            cluster.tier2[pool].name,
            cluster.tier2[pool].kernels.provenance()
        ));
    }
    let longest = workload
        .and_then(|workload| workload.lengths().iter().map(|length| length.rows() + 1).max());
    Plan {
        version: PLAN_VERSION,
        model: shape.name.clone(),
        tier1,
        tier2,
        batch: if tier2 == 0 { 0 } else { batch },
        local_rows,
        flights,
        chunk,
        max_context: longest.unwrap_or(shape.context_max),
        slices: site.slices.clone(),
        tier1_context: budget(if local_rows > 0 { tier1_free } else { 0.0 }, local_rows),
        tier2_context: budget(tier2_memory, if tier2 == 0 { 0 } else { batch }),
        forecast: PlanForecast {
            tokens_per_second: report.tokens_per_second,
            seconds_per_token: report.time_per_token.total(),
            bottleneck: report.bottleneck,
            job_seconds,
            job_usd: job_seconds.zip(rent).map(|(seconds, rent)| seconds / 3600.0 * rent),
            kernels,
        },
    }
}

impl Proposal {
    /// A configuration in words.
    pub fn describe(&self, candidate: &Candidate) -> String {
        let Candidate { tier1, tier2, pool, batch, local_rows, flights } = *candidate;
        let rows = candidate.rows();
        match (tier2, local_rows) {
            (0, _) => format!("{tier1} Tier-1, single tier, {rows} rows, {flights} flights"),
            (_, 0) => format!(
                "{tier1} Tier-1 x {tier2} {} each, B = {batch} ({rows} rows), {flights} flights",
                self.pool_names[pool]
            ),
            _ => format!(
                "{tier1} Tier-1 x {tier2} {} each, B = {batch} + {local_rows} local ({rows} rows), {flights} flights",
                self.pool_names[pool]
            ),
        }
    }

    fn line(&self, evaluation: &Evaluation) -> String {
        let rate = evaluation.tokens_per_second;
        format!(
            "{rate:>9.1} tokens/s  {:>10}  {:>18}  {}",
            self.unit.words(evaluation.cost),
            self.unit.efficiency(evaluation.cost, rate),
            self.describe(&evaluation.candidate)
        )
    }

    /// The proposal for a terminal.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let mut say =
            |line: String| writeln!(text, "{line}").expect("writing to a string does not fail");
        say(format!("best      {}", self.line(&self.best)));
        say(format!("limited by {}", self.report.bottleneck.words()));
        for kernels in &self.plan.forecast.kernels {
            say(format!("kernels   {kernels}"));
        }
        if let Some(seconds) = self.plan.forecast.job_seconds {
            let dollars =
                self.plan.forecast.job_usd.map_or(String::new(), |usd| format!(", ${usd:.2}"));
            say(format!("the job   {:.2} h{dollars}", seconds / 3600.0));
        }
        say("\nrunners-up with other nodes".to_owned());
        for evaluation in &self.runners_up {
            say(format!("  {}", self.line(evaluation)));
        }
        say("\nneighbours and why they lose".to_owned());
        for neighbour in &self.neighbours {
            say(format!("  {:<40}{}", neighbour.change, self.why(neighbour)));
        }
        say(format!(
            "\nfront of throughput against cost (steps of {:.0}%)",
            100.0 * (FRONT_STEP - 1.0)
        ));
        for evaluation in &self.front {
            say(format!("  {}", self.line(evaluation)));
        }
        let Effort { candidates, simulated, events } = self.effort;
        say(format!(
            "\n{simulated} of {candidates} configurations simulated, {events} events; the rest cannot win"
        ));
        text
    }

    fn why(&self, neighbour: &Neighbour) -> String {
        let Some(evaluation) = &neighbour.evaluation else {
            return "cannot run: no such nodes, or the model or a context does not fit".to_owned();
        };
        let faster = 100.0 * (evaluation.tokens_per_second / self.best.tokens_per_second - 1.0);
        let dearer = 100.0 * (evaluation.cost_per_rate() / self.best.cost_per_rate() - 1.0);
        format!(
            "{faster:+.1}% throughput, {dearer:+.1}% cost per token; {}",
            evaluation.bottleneck.words()
        )
    }
}
