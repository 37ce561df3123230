//! `bench`: a fixed job, end to end.

use crate::args::BenchArgs;
use crate::bench_parts::median;
use crate::progress::with_bars;
use crate::units;
use anyhow::bail;
use glinthawk_cluster::Crowd;
use glinthawk_compute::Threads;
use glinthawk_compute::bench::operations_per_second;
use glinthawk_launch::{
    Expected, FixedJob, Opened, Outlook, Resolved, Specification, launch, tell_damaged_profiles,
};
use glinthawk_plan::Shape;
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

/// How often the machine's peak is measured before a run, and again after it.
const PEAKS: usize = 15;

/// Runs the same prompts several times; the median counts.
pub fn bench(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    if args.prefix > args.input {
        bail!("--prefix {} is longer than --input {}", args.prefix, args.input);
    }
    let specification = Specification { drafts: !args.no_drafts, ..args.engine.specification() };
    let opened = with_bars(|tell| Opened::open(&specification, tell))?;
    with_bars(|tell| tell_damaged_profiles(opened.model.config(), tell));
    let crowd = Crowd {
        prompts: args.prompts as usize,
        input: args.input as usize,
        output: args.output as usize,
        alike: specification.sharing
            && Crowd::are_alike(
                args.prefix as usize,
                (args.input - args.prefix + args.output) as usize,
            ),
    };
    let resolved = Resolved::new(&specification, &opened, crowd)?;
    let never = AtomicBool::new(false);
    let mut engine = with_bars(|tell| launch(&opened, &resolved, &never, tell))?.engine;
    if args.input + args.output > engine.context_max() {
        bail!(
            "{} + {} tokens do not fit a context of {}",
            args.input,
            args.output,
            engine.context_max()
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
    let BenchArgs { prompts, input, prefix, output, .. } = *args;
    let job = FixedJob { prompts, input, prefix, output };
    let operations = job.operations(&Shape::of(opened.model.name(), opened.model.config()));
    let threads = Threads::new(resolved.threads)?;
    let peak = |_| operations_per_second(resolved.isa, &threads);
    let peaks = || (0..PEAKS).map(peak).collect::<Vec<_>>();
    let (mut rates, mut shares) = (Vec::new(), Vec::new());
    for run in 0..args.runs {
        let mut around = peaks();
        let elapsed_s = job.run(&mut engine, opened.served.vocab, run)?;
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
    let rate = median(rates);
    writeln!(
        out,
        "median: {rate:.0} tokens/s, prompt and generated together; {:.1}% of the peak around the run in products with weights",
        100.0 * median(shares),
    )?;
    let outlook =
        Expected::alike(&job).and_then(|expected| Outlook::of(&expected, &opened, &resolved, None));
    if let Some(Outlook { source, tokens_per_second, .. }) = outlook {
        let off = 100.0 * (tokens_per_second / rate - 1.0);
        let drafts = if args.no_drafts { "" } else { ", which knows no drafts" };
        writeln!(
            out,
            "forecast from {source}{drafts}: {tokens_per_second:.0} tokens/s, {off:+.1}%"
        )?;
    }
    Ok(ExitCode::SUCCESS)
}
