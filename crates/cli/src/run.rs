//! `run`: the main job.

use crate::args::RunArgs;
use crate::progress::JobProgress;
use crate::{EXIT_LINES_FAILED, interrupt, setup, units};
use anyhow::Context;
use glinthawk_cluster::{Engine, run_job};
use glinthawk_jobs::{Input, Job, JobOptions, JobSummary, Output};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Runs a job, or continues it.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let input = if is_dash(&args.input) { Input::Stdin } else { Input::File(args.input.clone()) };
    let output = output(args);
    let options = JobOptions { input, output: output.clone(), overwrite: args.overwrite };
    let opened = setup::open(&args.engine)?;
    let mut job = Job::open(&options, Arc::clone(&opened.served))?;
    let mut engine = setup::load(&args.engine, &opened)?;
    let interrupted = interrupt::flag()?;
    let mut progress = JobProgress::new();
    let outcome =
        run_job(&mut engine, &mut job, &interrupted, &mut |engine, job| progress.show(engine, job));
    progress.clear();
    // Whatever happened, results that are there are made durable before anything is said.
    let closed = job.close();
    outcome?;
    let summary = closed?;
    write_stats(args.stats.as_deref(), &engine)?;
    report(&summary, &engine, &output);
    if !summary.complete {
        if interrupted.load(Ordering::Relaxed) {
            eprintln!("interrupted; the same command continues where it stopped");
        }
        return Ok(ExitCode::FAILURE);
    }
    Ok(if summary.failed > 0 { ExitCode::from(EXIT_LINES_FAILED) } else { ExitCode::SUCCESS })
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

fn write_stats(path: Option<&Path>, engine: &Engine) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(&engine.stats())
        .context("cannot write the statistics as JSON")?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn report(summary: &JobSummary, engine: &Engine, output: &Output) {
    let stats = engine.stats();
    let mut parts = vec![format!("{} lines answered", units::count(summary.succeeded))];
    if summary.failed > 0 {
        parts.push(format!("{} failed", units::count(summary.failed)));
    }
    if summary.resumed > 0 {
        parts.push(format!("{} of them by an earlier run", units::count(summary.resumed)));
    }
    if summary.stale > 0 {
        parts.push(format!("{} outdated results removed", units::count(summary.stale)));
    }
    eprintln!("{}", parts.join(", "));
    eprintln!(
        "{} prompt and {} generated tokens in {}: {:.0} tokens/s",
        units::count(summary.prompt_tokens),
        units::count(summary.completion_tokens),
        units::seconds(stats.wall_s),
        stats.tokens_per_second,
    );
    if let Output::File(path) = output {
        eprintln!("results in {}", path.display());
    }
}
