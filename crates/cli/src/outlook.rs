//! What `run` knows of a job before it begins: how long its lines are, which batch is best for it here, what it
//! will take; and what it says of that afterwards.

use crate::args::{BATCH_DEFAULT, ClusterArgs, EngineArgs};
use crate::planned::Planned;
use crate::progress::say;
use crate::setup::{self, Opened};
use crate::{profile, units};
use glinthawk_cluster::{Crowd, Layout, RunStats, allowed_cores};
use glinthawk_jobs::{RequestLength, Standing, Survey};
use glinthawk_plan::{
    Deployment, Forecast, Kernels, Length, Link, Place, Profile, Shape, Workload, even_slices,
    forecast,
};
use serde::Serialize;
use std::sync::Arc;

/// Lines that are read to learn how long prompts are.
pub const LINES_SURVEYED: u64 = 2000;
/// Prompts of a job that a forecast is given; more of the same take proportionally longer.
const PROMPTS_FORECAST: usize = 50_000;
/// Parameters times tokens from which on a job takes longer than a brief profile of the machine, by far.
const WORK_PROFILED: f64 = 2e13;
/// Batches that are weighed against each other.
const BATCHES: [u32; 6] = [32, 64, 128, 256, 512, 1024];
/// A gain below this is not worth another batch than the usual one.
const GAIN_MIN: f64 = 0.02;

/// What a job is expected to take.
#[derive(Clone, Debug, Serialize)]
pub struct Outlook {
    /// Where the forecast comes from.
    pub source: &'static str,
    /// From the first prompt to the last token.
    pub seconds: f64,
    /// Prompt and generated tokens per second.
    pub tokens_per_second: f64,
    /// Dollars, where the plan knows the rent.
    pub usd: Option<f64>,
}

/// The lengths of a job's prompts.
pub struct Expected {
    /// Those of some prompts.
    workload: Workload,
    /// How many prompts there are: a request with `n` choices is `n` prompts.
    prompts: usize,
}

impl Expected {
    /// From a survey of the job's input, and how much of it is done already; `None` where no line
    /// of it is left that can be run.
    pub fn of(survey: &Survey, standing: Option<Standing>) -> Option<Self> {
        let lengths: Vec<Length> = survey.lengths.iter().flat_map(prompts).collect();
        // The lines that are left are taken to be like those that were read.
        let left = standing.map_or(survey.lines, |standing| standing.lines - standing.done);
        let share = left as f64 / survey.lines_read as f64;
        let prompts = (lengths.len() as f64 * share).round() as usize;
        if prompts == 0 {
            return None;
        }
        Some(Self { workload: Workload::new("input", lengths).ok()?, prompts })
    }

    /// What matters of it for the engine's shape.
    pub fn crowd(&self) -> Crowd {
        let tokens = (self.tokens() / self.prompts as f64) as usize;
        Crowd { prompts: self.prompts, tokens }
    }

    /// Prompt and generated tokens of all prompts.
    fn tokens(&self) -> f64 {
        let read = self.workload.lengths().len() as f64;
        (self.workload.rows() + read) * self.prompts as f64 / read
    }

    /// What all prompts take.
    fn forecast(&self, deployment: &Deployment) -> Forecast {
        let lengths = self.workload.lengths();
        let prompts = self.prompts.min(PROMPTS_FORECAST);
        // The prompts that were read stand for all.
        let all = (0..prompts).map(|prompt| lengths[prompt % lengths.len()]).collect();
        let all = Workload::new(&self.workload.name, all).expect("lengths that were valid");
        let mut forecast = forecast(deployment, &all, None);
        let scale = self.prompts as f64 / prompts as f64;
        forecast.seconds *= scale;
        forecast.tokens *= scale;
        forecast
    }
}

/// Chooses another batch than the usual one for a job in this process, where the options leave it open and a profile of
/// this machine promises more of it. Takes a profile first where there is none and the job is worth it.
///
/// On one machine that is the whole plan: tiers that share its cores and memory would only add messages.
pub fn choose_batch(
    expected: &Expected,
    opened: &Opened,
    (engine, cluster): (&EngineArgs, &ClusterArgs),
) -> anyhow::Result<Option<u32>> {
    if engine.batch.is_some() || engine.flights.is_some() || !cluster.is_one_process() {
        return Ok(None);
    }
    let (config, crowd) = (opened.model.config(), expected.crowd());
    let shape = Shape::of(opened.model.name(), config);
    if deployment(crowd, opened, (engine, cluster)).is_none() {
        if shape.model_bytes() / 2.0 * expected.tokens() < WORK_PROFILED {
            return Ok(None);
        }
        say("there is no profile of this machine for such a model yet: taking a brief one");
        let lanes = setup::layout(engine, cluster, opened, crowd)?.local_lanes;
        profile::keep_brief(&opened.model, engine, setup::threads(engine.threads)? / lanes)?;
    }
    let mut rates = Vec::new();
    for batch in BATCHES {
        let engine = EngineArgs { batch: Some(batch), ..engine.clone() };
        let Some(deployment) = deployment(crowd, opened, (&engine, cluster)) else { continue };
        let profiled = deployment.tier1.knots().last().copied().unwrap_or(0);
        if batch as usize <= profiled {
            rates.push((batch, expected.forecast(&deployment).tokens_per_second()));
        }
    }
    let Some((batch, gain)) = better_batch(&rates) else { return Ok(None) };
    say(format_args!(
        "batches of {batch} rows instead of {BATCH_DEFAULT}: {:.0}% more tokens/s by a profile of this machine",
        100.0 * gain
    ));
    Ok(Some(batch))
}

/// The batch with the best rate, and what it gains over the usual one, where that is worth it.
fn better_batch(rates: &[(u32, f64)]) -> Option<(u32, f64)> {
    let (_, usual) = rates.iter().find(|(batch, _)| *batch == BATCH_DEFAULT)?;
    let (batch, best) = rates.iter().copied().max_by(|one, other| one.1.total_cmp(&other.1))?;
    let gain = best / usual - 1.0;
    (gain >= GAIN_MIN).then_some((batch, gain))
}

impl Outlook {
    /// Forecasts a job from a profile that was taken here, else from its plan; `None` where neither says anything.
    pub fn of(
        expected: &Expected,
        opened: &Opened,
        options: (&EngineArgs, &ClusterArgs),
        planned: Option<&Planned>,
    ) -> Option<Self> {
        let tokens = expected.tokens();
        let (source, seconds) = match (deployment(expected.crowd(), opened, options), planned) {
            (Some(deployment), _) => {
                ("a profile of this machine", expected.forecast(&deployment).seconds)
            }
            (None, Some(planned)) => ("the plan", tokens / planned.plan.forecast.tokens_per_second),
            (None, None) => return None,
        };
        let usd = planned.and_then(Planned::usd_per_second).map(|rate| rate * seconds);
        Some(Self { source, seconds, tokens_per_second: tokens / seconds, usd })
    }

    /// Says it before the job.
    pub fn announce(&self) {
        say(format_args!(
            "forecast from {}: {} if completions are as long as they may be, {:.0} tokens/s{}",
            self.source,
            units::seconds(self.seconds),
            self.tokens_per_second,
            self.dollars(self.seconds),
        ));
    }

    /// Says how it came out.
    pub fn compare(&self, stats: &RunStats) {
        let off = 100.0 * (self.tokens_per_second / stats.tokens_per_second - 1.0);
        say(format_args!(
            "forecast {} at {:.0} tokens/s, took {} at {:.0} tokens/s: {off:+.1}%{}",
            units::seconds(self.seconds),
            self.tokens_per_second,
            units::seconds(stats.wall_s),
            stats.tokens_per_second,
            self.dollars(stats.wall_s),
        ));
    }

    fn dollars(&self, seconds: f64) -> String {
        self.usd.map_or(String::new(), |usd| format!(", ${:.2}", usd / self.seconds * seconds))
    }
}

/// The prompts of one request.
pub fn prompts(request: &RequestLength) -> impl Iterator<Item = Length> + use<> {
    let (prompt, output) = (request.prompt_tokens as usize, request.output_tokens as usize);
    std::iter::repeat_n(Length { prompt, output }, request.choices as usize)
}

/// The engine as a forecast sees it; `None` where it is not all on this machine, or the machine has no profile.
fn deployment(
    crowd: Crowd,
    opened: &Opened,
    (engine, cluster): (&EngineArgs, &ClusterArgs),
) -> Option<Deployment> {
    if cluster.listen.is_some() {
        return None;
    }
    let config = opened.model.config();
    let alone = cluster.tier1.is_none() && cluster.tier2.is_none();
    let layout = setup::layout(engine, cluster, opened, crowd).ok()?;
    let Layout { slices, remote_lanes, local_lanes, batch, flights, chunk, .. } = layout;
    let (cores, processes) = (allowed_cores().len(), slices * (1 + remote_lanes));
    let threads = match alone {
        true => setup::threads(engine.threads).ok()? / local_lanes,
        false => (cores / processes).max(1),
    };
    let from = profile::provenance(setup::isa(engine.isa).ok()?, threads);
    let kept = Profile::read(&profile::cached(config, &from).ok()?).ok()?;
    let kernels = Arc::new(Kernels::Measured(Box::new(kept)));
    let memory_bytes = match alone {
        true => setup::memory_bytes(engine, opened, 1).ok()? / local_lanes as u64,
        false => setup::memory_bytes(engine, opened, slices * layout.lanes()).ok()?,
    };
    Some(Deployment {
        shape: Shape::of(opened.model.name(), config),
        slices: even_slices(config.layers, slices),
        tier2: remote_lanes,
        local_lane: local_lanes > 0,
        batch,
        flights,
        chunk,
        context_max: layout.context_max,
        lane_pages: layout.pages(config, 0, memory_bytes).ok()?,
        whole_flights: layout.whole_flights,
        greedy: true,
        tier1: Arc::clone(&kernels),
        tier2_kernels: kernels,
        delay: cluster.delay.unwrap_or_default().as_secs_f64(),
        bandwidth: cluster.bandwidth.map_or(f64::INFINITY, |rate| rate as f64),
        port: f64::INFINITY,
        hop: Link { rtt: 0.0, bandwidth: f64::INFINITY },
        place: match alone {
            true => Place::OneProcess { lanes: local_lanes },
            false if processes >= cores => Place::SharedCores(cores),
            false => Place::OwnMachines,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_batch_must_be_worth_it() {
        assert_eq!(better_batch(&[]), None);
        assert_eq!(better_batch(&[(512, 9.0)]), None);
        assert_eq!(better_batch(&[(128, 99.0), (256, 100.0), (512, 101.9)]), None);
        let (batch, gain) = better_batch(&[(128, 90.0), (256, 100.0), (512, 115.0)]).expect("15%");
        assert_eq!(batch, 512);
        assert!((gain - 0.15).abs() < 1e-9);
        assert_eq!(better_batch(&[(32, 130.0), (256, 100.0)]).map(|best| best.0), Some(32));
    }
}
