//! The forecast that `run` makes before a job, and what it says of it afterwards.

use crate::args::{ClusterArgs, EngineArgs};
use crate::planned::Planned;
use crate::progress::say;
use crate::setup::{self, Opened};
use crate::{profile, units};
use glinthawk_cluster::{Layout, RunStats, allowed_cores};
use glinthawk_jobs::{Generation, Input};
use glinthawk_plan::{
    Deployment, Kernels, Length, Place, Profile, Shape, Workload, even_slices, forecast,
};
use glinthawk_protocol::PromptId;
use serde::Serialize;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

/// Lines that are read to learn how long prompts are.
const LINES_MAX: usize = 2000;
/// Tokens a completion is taken to have where its request does not say how many it may have.
const OUTPUT_DEFAULT: u32 = 256;

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

impl Outlook {
    /// Forecasts a job from a profile that was taken here, else from its plan; `None` where neither says anything.
    pub fn of(
        input: &Input,
        opened: &Opened,
        options: (&EngineArgs, &ClusterArgs),
        planned: Option<&Planned>,
    ) -> Option<Self> {
        let Input::File(path) = input else { return None };
        let (workload, lines) = workload(path, opened)?;
        // The lines that were read stand for all.
        let scale = lines as f64 / workload.lengths().len() as f64;
        let tokens = (workload.rows() + workload.lengths().len() as f64) * scale;
        let deployment = deployment(opened, options);
        let (source, seconds) = match (deployment, planned) {
            (Some(deployment), _) => {
                let lengths = workload.lengths();
                let all = (0..lines).map(|line| lengths[line % lengths.len()]).collect();
                let all = Workload::new(&workload.name, all).ok()?;
                ("a profile of this machine", forecast(&deployment, &all, None).seconds)
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

/// The lengths of some lines, and how many lines there are.
fn workload(path: &Path, opened: &Opened) -> Option<(Workload, usize)> {
    let mut lengths = Vec::new();
    let mut lines = 0;
    for line in BufReader::new(File::open(path).ok()?).split(b'\n') {
        let line = line.ok()?;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        lines += 1;
        if lines <= LINES_MAX
            && let Some(length) = length(&line, opened)
        {
            lengths.push(length);
        }
    }
    Some((Workload::new(&path.display().to_string(), lengths).ok()?, lines))
}

/// A request's lengths; `None` where it cannot be run, and takes no time.
fn length(line: &[u8], opened: &Opened) -> Option<Length> {
    let mut value: Value = serde_json::from_slice(line).ok()?;
    let mut body = match value.get_mut("body") {
        Some(body) => body.take(),
        None => value,
    };
    let fields = body.as_object_mut()?;
    fields.remove("custom_id");
    let says =
        ["max_tokens", "max_completion_tokens"].iter().any(|name| fields.contains_key(*name));
    let plain = fields.contains_key("prompt");
    let prompt = Generation::new(Arc::clone(&opened.served), &body).ok()?.prompt(PromptId(0));
    let output = match says || plain {
        true => prompt.tokens_max,
        false => prompt.tokens_max.min(OUTPUT_DEFAULT),
    };
    Some(Length { prompt: prompt.tokens.len(), output: output as usize })
}

/// The engine as a forecast sees it; `None` where it is not all on this machine, or the machine has no profile.
fn deployment(
    opened: &Opened,
    (engine, cluster): (&EngineArgs, &ClusterArgs),
) -> Option<Deployment> {
    if cluster.listen.is_some() {
        return None;
    }
    let config = opened.model.config();
    let alone = cluster.tier1.is_none() && cluster.tier2.is_none();
    let layout = setup::layout(engine, cluster, opened).ok()?;
    let Layout { slices, remote_lanes, local_lane, batch, flights, chunk, .. } = layout;
    let (cores, processes) = (allowed_cores().len(), slices * (1 + remote_lanes));
    let threads = match alone {
        true => setup::threads(engine.threads).ok()?,
        false => (cores / processes).max(1),
    };
    let from = profile::provenance(setup::isa(engine.isa).ok()?, threads);
    let kept = Profile::read(&profile::cached(config, &from).ok()?).ok()?;
    let kernels = Arc::new(Kernels::Measured(Box::new(kept)));
    let memory_bytes = match engine.context_memory {
        Some(bytes) => bytes,
        None => setup::free_memory_bytes().ok()? / 2 / (slices * layout.lanes()) as u64,
    };
    Some(Deployment {
        shape: Shape::of(opened.model.name(), config),
        slices: even_slices(config.layers, slices),
        tier2: remote_lanes,
        local_lane,
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
        place: match alone {
            true => Place::OneProcess,
            false if processes >= cores => Place::SharedCores(cores),
            false => Place::OwnMachines,
        },
    })
}
