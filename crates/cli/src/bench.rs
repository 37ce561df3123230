//! `bench`: a fixed job, end to end.

use crate::args::BenchArgs;
use crate::bench_parts::median;
use crate::{setup, units};
use anyhow::bail;
use glinthawk_cluster::{Crowd, Engine, EngineEvent};
use glinthawk_compute::Threads;
use glinthawk_compute::bench::operations_per_second;
use glinthawk_plan::Shape;
use glinthawk_protocol::Prompt;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// How often the machine's peak is measured before a run, and again after it.
const PEAKS: usize = 15;

/// Runs the same prompts several times; the median counts.
pub fn bench(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let opened = setup::open(&args.engine)?;
    let crowd =
        Crowd { prompts: args.prompts as usize, tokens: (args.input + args.output) as usize };
    let mut engine = setup::load(&args.engine, &opened, crowd)?;
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
        "{}: {} of {} in, {} out",
        opened.model.name(),
        units::counted(u64::from(args.prompts), "prompt"),
        units::counted(u64::from(args.input), "token"),
        args.output
    )?;
    let job = FixedJob { prompts: args.prompts, input: args.input, output: args.output };
    let operations = job.operations(&Shape::of(opened.model.name(), opened.model.config()));
    let isa = setup::isa(args.engine.isa)?;
    let threads = Threads::new(setup::threads(args.engine.threads)?)?;
    let peaks = || (0..PEAKS).map(|_| operations_per_second(isa, &threads)).collect::<Vec<_>>();
    let (mut rates, mut shares) = (Vec::new(), Vec::new());
    for run in 0..args.runs {
        let mut around = peaks();
        let elapsed_s = run_once(&mut engine, job, opened.served.vocab, run)?;
        around.extend(peaks());
        let peak = median(around);
        let (rate, share) = (tokens as f64 / elapsed_s, operations / elapsed_s / peak);
        writeln!(
            out,
            "run {}: {}, {:.1}% of {:.0} GFLOP/s, {rate:.0} tokens/s",
            run + 1,
            units::seconds(elapsed_s),
            100.0 * share,
            peak / 1e9,
        )?;
        rates.push(rate);
        shares.push(share);
    }
    writeln!(
        out,
        "median: {:.0} tokens/s, prompt and generated together; {:.1}% of the peak around the run in products with weights",
        median(rates),
        100.0 * median(shares),
    )?;
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

impl FixedJob {
    /// Operations of all products with weights. Every token except the last of each prompt goes through all layers,
    /// and every generated token through the classifier.
    fn operations(self, shape: &Shape) -> f64 {
        let layers = shape.layers as f64 * (shape.pre_parameters() + shape.post_parameters());
        let rows = f64::from(self.input + self.output - 1);
        let each = rows * layers + f64::from(self.output) * shape.classify_parameters();
        2.0 * f64::from(self.prompts) * each
    }
}

/// Runs a job and returns its seconds. The number `run` makes its prompts differ from those of earlier
/// runs.
pub fn run_once(engine: &mut Engine, job: FixedJob, vocab: u32, run: u32) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut submitted = 0;
    let mut finished = 0;
    while finished < job.prompts {
        while submitted < job.prompts && engine.wants_prompts() {
            let prompt = prompt(job, vocab, run * job.prompts + submitted);
            engine.submit(prompt)?;
            submitted += 1;
        }
        for event in engine.advance()? {
            match event {
                EngineEvent::Finished(_) => finished += 1,
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
        tokens: (0..job.input).map(|position| token(position) as u32).collect(),
        tokens_max: job.output,
        ..Prompt::default()
    }
}
