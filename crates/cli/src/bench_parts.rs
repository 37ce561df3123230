//! `bench kernels`, `bench net` and `bench planner`: parts of the system, each by itself.

use crate::args::KernelBenchArgs;
use crate::units;
use anyhow::Context;
use glinthawk_cluster::net::{BenchOptions, bench};
use glinthawk_cluster::peak_memory_bytes;
use glinthawk_compute::bench::{Ceilings, ContextBench, KernelTiming, PrefillBench, WeightBench};
use glinthawk_compute::{ContextType, Isa, Threads};
use glinthawk_launch::{isa, layers_timed, threads};
use glinthawk_model::{Model, ModelConfig};
use glinthawk_plan::bench::{large_cluster, paper_search, timed};
use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Context memory of the attention benchmark: more than fits in any last-level cache.
const CONTEXT_BYTES: usize = 1 << 30;

/// Decode rows of the attention benchmark at most.
const CONTEXT_ROWS_MAX: usize = 512;

/// Prints every kernel as a fraction of the limit that binds it.
pub fn kernels(args: &KernelBenchArgs) -> anyhow::Result<ExitCode> {
    let isa = isa(args.isa)?;
    let threads = Arc::new(Threads::new(threads(args.threads)?)?);
    threads.pin_caller();
    let ceilings = Ceilings::new(isa, Arc::clone(&threads))?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "instruction set {}, {}, medians of {}",
        isa.name(),
        units::counted(threads.count() as u64, "thread"),
        units::counted(args.runs as u64, "run")
    )?;
    for shape in &args.shapes {
        let model = Model::dummy(shape)?;
        let config = model.config();
        let layers = layers_timed(config);
        let rows_max = args.batches.iter().copied().max().context("--batches is empty")?;
        let mut products =
            WeightBench::new(&model, 0..layers, false, rows_max, isa, Arc::clone(&threads))?;
        for &rows in &args.batches {
            let [share] = measure(args.runs, &ceilings, [&mut || products.layers(rows)]);
            writeln!(out, "{shape}, products, {rows} rows: {share}")?;
        }
        drop(products);
        let context =
            |kind| ContextBench::new(config, CONTEXT_BYTES, kind, isa, Arc::clone(&threads));
        let (mut bf16, mut int8) = (context(ContextType::Bf16)?, context(ContextType::Int8)?);
        for &positions in args.contexts.iter().filter(|positions| **positions <= config.context_max)
        {
            let [bf16, int8] = measure(
                args.runs,
                &ceilings,
                [&mut || bf16.decode(positions, CONTEXT_ROWS_MAX), &mut || {
                    int8.decode(positions, CONTEXT_ROWS_MAX)
                }],
            );
            writeln!(out, "{shape}, attention, {positions} positions: {bf16}")?;
            let ratio = bf16.seconds / int8.seconds;
            writeln!(
                out,
                "{shape}, int8 attention, {positions} positions: {int8}; {ratio:.2} times as fast as bf16"
            )?;
        }
        drop((bf16, int8));
        prefill(args, shape, config, &ceilings, isa, &threads, &mut out)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The rows of prefill attention of one shape.
fn prefill(
    args: &KernelBenchArgs,
    shape: &str,
    config: &ModelConfig,
    ceilings: &Ceilings,
    isa: Isa,
    threads: &Arc<Threads>,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let fits = |positions: &&usize| **positions <= config.context_max;
    let Some(&longest) = args.contexts.iter().filter(fits).max() else { return Ok(()) };
    let rows_max = args.chunks.iter().copied().max().unwrap_or(1);
    let kind = ContextType::Bf16;
    let mut bench = PrefillBench::new(config, longest, rows_max, kind, isa, Arc::clone(threads))?;
    for &positions in args.contexts.iter().filter(fits) {
        for &rows in args.chunks.iter().filter(|rows| **rows <= positions) {
            let [share] = measure(args.runs, ceilings, [&mut || bench.chunk(rows, positions)]);
            writeln!(
                out,
                "{shape}, prefill attention, {rows} rows at {positions} positions: {share}"
            )?;
        }
    }
    Ok(())
}

/// A kernel beside the limits measured at the same time; all are medians.
struct Share {
    seconds: f64,
    best: f64,
    last: KernelTiming,
    /// Operations and bytes per second at best.
    peak: f64,
    bandwidth: f64,
}

/// Measures kernels and limits in turns.
fn measure<const N: usize>(
    runs: usize,
    ceilings: &Ceilings,
    mut kernels: [&mut dyn FnMut() -> KernelTiming; N],
) -> [Share; N] {
    kernels.iter_mut().for_each(|kernel| _ = kernel());
    let (mut operations, mut bytes) = (Vec::new(), Vec::new());
    let mut last = kernels.each_mut().map(|kernel| kernel());
    let mut seconds = [const { Vec::new() }; N];
    for _ in 0..runs.max(1) {
        operations.push(ceilings.operations_per_second());
        bytes.push(ceilings.bytes_per_second());
        last = kernels.each_mut().map(|kernel| kernel());
        seconds.iter_mut().zip(&last).for_each(|(seconds, last)| seconds.push(last.seconds));
    }
    let (peak, bandwidth) = (median(operations), median(bytes));
    let mut last = last.into_iter();
    seconds.map(|seconds| Share {
        best: seconds.iter().copied().fold(f64::INFINITY, f64::min),
        seconds: median(seconds),
        last: last.next().expect("one for each kernel"),
        peak,
        bandwidth,
    })
}

impl fmt::Display for Share {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, best, last, peak, bandwidth } = self;
        let (operations, bytes) = (last.operations / seconds, last.bytes / seconds);
        let (binding, share) = if last.operations / peak > last.bytes / bandwidth {
            ("operations", operations / peak)
        } else {
            ("bytes", bytes / bandwidth)
        };
        write!(
            formatter,
            "{:.3} ms (best {:.3}), {:.0} of {:.0} GFLOP/s, {:.1} of {:.1} GB/s: {:.0}% of the {binding} that bind it",
            seconds * 1e3,
            best * 1e3,
            operations / 1e9,
            peak / 1e9,
            bytes / 1e9,
            bandwidth / 1e9,
            share * 100.0,
        )
    }
}

/// The median.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints what the network controller adds to bare TCP.
pub fn net(rows: u32, shape: &str) -> anyhow::Result<ExitCode> {
    let known = || ModelConfig::shape_names().collect::<Vec<_>>().join(", ");
    let config = ModelConfig::shape(shape)
        .with_context(|| format!("no shape \"{shape}\"; known: {}", known()))?;
    let figures = bench(&BenchOptions {
        rows: rows as usize,
        row_bytes_out: 2 * config.qkv_width(),
        row_bytes_back: 2 * config.query_width(),
        round_trips: 1800,
        pause: Duration::ZERO,
        touched: false,
        evicts: false,
        under_way: 1,
        stream_messages: 6000,
    })?;
    let mut out = std::io::stdout().lock();
    let microseconds = |duration: std::time::Duration| duration.as_secs_f64() * 1e6;
    let (bytes_out, bytes_back) = figures.wire_bytes;
    writeln!(out, "{shape}, {rows} rows: {bytes_out} bytes out, {bytes_back} back")?;
    writeln!(
        out,
        "round trip: {:.1} µs bare TCP, {:.1} µs as flights: {:.1} µs added to a message (medians)",
        microseconds(figures.bare_round_trip),
        microseconds(figures.flight_round_trip),
        microseconds(figures.added_per_message),
    )?;
    writeln!(
        out,
        "throughput: {:.2} GB/s bare vectored writes, {:.2} GB/s as flights: {:.0}% (median of turns)",
        figures.bare_bytes_per_second / 1e9,
        figures.flight_bytes_per_second / 1e9,
        figures.throughput_share * 100.0,
    )?;
    writeln!(
        out,
        "over TLS: round trip {:.1} µs, throughput {:.2} GB/s: {:.0}% of plain flights (median of turns)",
        microseconds(figures.tls_round_trip),
        figures.tls_bytes_per_second / 1e9,
        figures.tls_share * 100.0,
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Prints how fast the planner searches and simulates.
pub fn planner() -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let (found, seconds) = paper_search()?;
    let candidate = &found.best.candidate;
    writeln!(
        out,
        "the paper's search, 80 T4 and 80 CPU nodes: {seconds:.2} s, {} of {} configurations simulated; best \
         {:.0} tokens/s with {} x {}, B = {}",
        found.effort.simulated,
        found.effort.candidates,
        found.best.tokens_per_second,
        candidate.tier1,
        candidate.tier2,
        candidate.batch,
    )?;
    for (name, tier1, tier2, flights) in [
        ("100 Tier-1, 500 Tier-2 nodes", 100, 5, 300),
        ("1,000 Tier-1, 20,000 Tier-2 nodes", 1000, 20, 600),
    ] {
        writeln!(out, "{}", timed(name, &large_cluster(tier1, tier2, flights)).render())?;
    }
    writeln!(out, "peak memory {}", units::bytes(peak_memory_bytes()))?;
    Ok(ExitCode::SUCCESS)
}
