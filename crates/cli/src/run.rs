//! `run`: the main job.

use crate::args::RunArgs;
use crate::outlook::{Expected, LINES_SURVEYED, Outlook, choose_batch};
use crate::planned::Planned;
use crate::progress::{JobProgress, say};
use crate::{EXIT_LINES_FAILED, interrupt, setup, units};
use anyhow::Context;
use glinthawk_cluster::{Crowd, RunStats, run_job, write_trace};
use glinthawk_jobs::{Input, Job, JobOptions, JobSummary, Output};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Runs a job, or continues it.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let output = output(args);
    let options = JobOptions { output: output.clone(), overwrite: args.overwrite };
    // Before the model: an input that cannot be read is told at once. Everything reads this one.
    let mut input = input(args).open()?;
    // A job of hours must not end with statistics that cannot be written.
    let stats_file = Report::create(args.stats.as_deref())?;
    let trace_file = Report::create(args.cluster.trace.as_deref())?;
    let planned = Planned::read(args.plan.as_deref())?;
    let (mut engine_args, cluster_args) = match &planned {
        Some(planned) => planned.options(args)?,
        None => (args.engine.clone(), args.cluster.clone()),
    };
    let opened = setup::open(&engine_args)?;
    if let Some(planned) = &planned {
        planned.check_layers(opened.model.config().layers)?;
    }
    let interrupted = interrupt::flag()?;
    let survey = input.survey(&opened.served, LINES_SURVEYED)?;
    let expected = survey.as_ref().and_then(Expected::of);
    if let Some(expected) = expected.as_ref().filter(|_| planned.is_none()) {
        match choose_batch(expected, &opened, (&engine_args, &cluster_args)) {
            Ok(Some(batch)) => engine_args.batch = Some(batch),
            Ok(None) => {}
            Err(error) => {
                say(format_args!("going on without a profile of this machine: {error:#}"))
            }
        }
    }
    let outlook = expected.as_ref().and_then(|expected| {
        Outlook::of(expected, &opened, (&engine_args, &cluster_args), planned.as_ref())
    });
    let crowd = expected.as_ref().map_or(Crowd::UNKNOWN, Expected::crowd);
    let mut cluster = setup::start(&engine_args, &cluster_args, &opened, crowd, &interrupted)?;
    let engine = &mut cluster.engine;
    // Last, because it may empty the output: nothing is lost to a bad option.
    let mut job = Job::open(input, &options, Arc::clone(&opened.served))?;
    if let Some(outlook) = &outlook {
        outlook.announce();
    }
    let mut progress = JobProgress::new(output == Output::Stdout);
    let outcome =
        run_job(engine, &mut job, &interrupted, &mut |engine, job| progress.show(engine, job));
    progress.clear();
    // Whatever happened, results that are there are made durable before anything is said.
    let closed = job.close();
    outcome?;
    let summary = closed?;
    let (stats, nodes) = engine.stats()?;
    report(&summary, &stats, &output);
    // Of a job that goes on from an earlier one, or was interrupted, the forecast was about more than this run.
    let whole = summary.complete && summary.resumed == 0 && stats.prompts > 0;
    if let Some(outlook) = outlook.as_ref().filter(|_| whole) {
        outlook.compare(&stats);
    }
    if let Some(file) = stats_file {
        let stats = Statistics { run: &stats, forecast: outlook.as_ref() };
        file.write(|out| {
            serde_json::to_writer_pretty(&mut *out, &stats)?;
            writeln!(out)
        })?;
    }
    if let Some(file) = trace_file {
        file.write(|out| write_trace(out, &nodes))?;
    }
    if !summary.complete {
        if interrupted.load(Ordering::Relaxed) {
            say(match output {
                Output::File(_) => "interrupted; the same command continues where it stopped",
                Output::Stdout => "interrupted; with an output file it could be continued",
            });
        }
        return Ok(ExitCode::FAILURE);
    }
    Ok(if summary.failed > 0 { ExitCode::from(EXIT_LINES_FAILED) } else { ExitCode::SUCCESS })
}

/// What `--stats` holds: the run, and what was expected of it.
#[derive(Serialize)]
struct Statistics<'a> {
    #[serde(flatten)]
    run: &'a RunStats,
    forecast: Option<&'a Outlook>,
}

fn input(args: &RunArgs) -> Input {
    if is_dash(&args.input) { Input::Stdin } else { Input::File(args.input.clone()) }
}

fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn output(args: &RunArgs) -> Output {
    match &args.output {
        Some(path) if is_dash(path) => Output::Stdout,
        Some(path) => Output::File(path.clone()),
        None if is_dash(&args.input) => Output::Stdout,
        None => Output::File(default_output(&args.input)),
    }
}

fn default_output(input: &Path) -> PathBuf {
    input.with_extension("out.jsonl")
}

/// A file that something about the run is written to once it is over.
struct Report<'a> {
    file: File,
    path: &'a Path,
}

impl<'a> Report<'a> {
    fn create(path: Option<&'a Path>) -> anyhow::Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        let file =
            File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Some(Self { file, path }))
    }

    fn write(
        self,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let mut out = BufWriter::new(self.file);
        let written = content(&mut out).and_then(|()| out.flush());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn report(summary: &JobSummary, stats: &RunStats, output: &Output) {
    let mut parts = vec![format!("{} answered", units::counted(summary.succeeded, "line"))];
    if summary.failed > 0 {
        parts.push(format!("{} failed", units::count(summary.failed)));
    }
    if summary.resumed > 0 {
        parts.push(format!("{} of them by an earlier run", units::count(summary.resumed)));
    }
    if summary.stale > 0 {
        parts.push(format!("{} removed", units::counted(summary.stale, "outdated result")));
    }
    say(parts.join(", "));
    if stats.prompts > 0 {
        say(format_args!(
            "{} prompt and {} generated tokens in {}: {:.0} tokens/s",
            units::count(stats.prompt_tokens),
            units::count(stats.generated_tokens),
            units::seconds(stats.wall_s),
            stats.tokens_per_second,
        ));
    }
    if let Output::File(path) = output {
        say(format_args!("results in {}", path.display()));
    }
}
