//! `bench`: a fixed job, end to end.

use crate::args::BenchArgs;
use crate::{setup, units};
use anyhow::bail;
use glinthawk_cluster::{Engine, EngineEvent};
use glinthawk_protocol::{Prompt, PromptId, Sampling};
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Runs the same prompts several times; the median counts.
pub fn bench(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let opened = setup::open(&args.engine)?;
    let mut engine = setup::load(&args.engine, &opened)?;
    if args.input + args.output > engine.positions_max() {
        bail!(
            "{} + {} tokens do not fit a context of {}",
            args.input,
            args.output,
            engine.positions_max()
        );
    }
    let mut out = std::io::stdout().lock();
    let tokens = u64::from(args.prompts) * u64::from(args.input + args.output);
    writeln!(
        out,
        "{}: {} prompts of {} tokens in, {} out",
        opened.model.name(),
        args.prompts,
        args.input,
        args.output
    )?;
    let mut rates = Vec::new();
    for run in 0..args.runs {
        let job = FixedJob { prompts: args.prompts, input: args.input, output: args.output };
        let elapsed_s = run_once(&mut engine, job, opened.served.vocab, run)?;
        let rate = tokens as f64 / elapsed_s;
        writeln!(out, "run {}: {}, {rate:.0} tokens/s", run + 1, units::seconds(elapsed_s))?;
        rates.push(rate);
    }
    rates.sort_by(f64::total_cmp);
    writeln!(out, "median: {:.0} tokens/s, prompt and generated together", rates[rates.len() / 2])?;
    Ok(ExitCode::SUCCESS)
}

/// Prompts that are all alike.
#[derive(Clone, Copy)]
pub struct FixedJob {
    /// How many.
    pub prompts: u32,
    /// Tokens of each.
    pub input: u32,
    /// Tokens generated for each.
    pub output: u32,
}

/// Runs a job and says how many seconds it took; `run` makes its prompts others than an earlier run's.
pub fn run_once(engine: &mut Engine, job: FixedJob, vocab: u32, run: u32) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut submitted = 0;
    let mut finished = 0;
    while finished < job.prompts {
        while submitted < job.prompts && engine.wants_prompts() {
            engine.submit(prompt(job, vocab, run * job.prompts + submitted));
            submitted += 1;
        }
        for event in engine.advance()? {
            match event {
                EngineEvent::Finished(_) => finished += 1,
                EngineEvent::Rejected(_, rejection) => bail!("{rejection}"),
                EngineEvent::Token(..) => {}
            }
        }
    }
    Ok(started.elapsed().as_secs_f64())
}

/// A prompt of tokens without meaning: only their number matters here.
fn prompt(job: FixedJob, vocab: u32, id: u32) -> Prompt {
    let token =
        |position: u32| (u64::from(id) * 7919 + u64::from(position) * 104_729) % u64::from(vocab);
    Prompt {
        id: PromptId(u64::from(id)),
        tokens: (0..job.input).map(|position| token(position) as u32).collect(),
        tokens_max: job.output,
        stop_ids: Vec::new(),
        sampling: Sampling::default(),
        watched: false,
    }
}
