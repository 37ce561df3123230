//! `bench kernels`, `bench net` and `bench planner`: parts of the system, each by itself.

use crate::args::KernelBenchArgs;
use crate::{setup, units};
use anyhow::Context;
use glinthawk_cluster::net::{BenchOptions, bench};
use glinthawk_cluster::peak_memory_bytes;
use glinthawk_compute::Threads;
use glinthawk_compute::bench::{Ceilings, ContextBench, Timing, WeightBench};
use glinthawk_model::{Model, ModelConfig};
use glinthawk_plan::bench::{large_cluster, paper_search, timed};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

/// Context memory of the attention benchmark: more than any last-level cache hides.
const CONTEXT_BYTES: usize = 1 << 30;

/// Decode rows of the attention benchmark at most.
const CONTEXT_ROWS_MAX: usize = 512;

/// Weights of the product benchmark: enough layers to be more than a last-level cache hides.
const WEIGHT_BYTES: usize = 1 << 30;

/// Prints every kernel's share of the ceiling that binds it.
pub fn kernels(args: &KernelBenchArgs) -> anyhow::Result<ExitCode> {
    let isa = setup::isa(args.isa)?;
    let threads = Arc::new(Threads::new(setup::threads(args.threads)?)?);
    threads.pin_caller();
    let ceilings = Ceilings::new(isa, Arc::clone(&threads))?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "instruction set {}, {} threads, medians of {} runs",
        isa.name(),
        threads.count(),
        args.runs
    )?;
    for shape in &args.shapes {
        let model = Model::dummy(shape)?;
        let config = model.config();
        let layer_bytes = 2
            * config.hidden
            * (config.qkv_width() + config.query_width() + 3 * config.feed_forward);
        let layers = (WEIGHT_BYTES / layer_bytes).clamp(1, config.layers);
        let rows_max = args.batches.iter().copied().max().context("--batches is empty")?;
        let mut products =
            WeightBench::new(&model, 0..layers, false, rows_max, isa, Arc::clone(&threads))?;
        for &rows in &args.batches {
            let share = measure(args.runs, &ceilings, || products.layers(rows));
            writeln!(out, "{shape}, products, {rows} rows: {share}")?;
        }
        drop(products);
        let mut context = ContextBench::new(config, CONTEXT_BYTES, isa, Arc::clone(&threads))?;
        for &positions in args.contexts.iter().filter(|positions| **positions <= config.context_max)
        {
            let share =
                measure(args.runs, &ceilings, || context.decode(positions, CONTEXT_ROWS_MAX));
            writeln!(out, "{shape}, attention, {positions} positions: {share}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Alternates kernel and ceilings; medians of all.
fn measure(runs: usize, ceilings: &Ceilings, mut kernel: impl FnMut() -> Timing) -> String {
    kernel();
    let (mut seconds, mut operations, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = kernel();
    for _ in 0..runs.max(1) {
        operations.push(ceilings.operations_per_second());
        bytes.push(ceilings.bytes_per_second());
        last = kernel();
        seconds.push(last.seconds);
    }
    let best = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let best = best(&seconds);
    let (seconds, peak, bandwidth) = (median(seconds), median(operations), median(bytes));
    let of_operations = last.operations / seconds / peak;
    let of_bytes = last.bytes / seconds / bandwidth;
    let (binding, share) = if last.operations / peak > last.bytes / bandwidth {
        ("operations", of_operations)
    } else {
        ("bytes", of_bytes)
    };
    format!(
        "{:.3} ms (best {:.3}), {:.0} of {:.0} GFLOP/s, {:.1} of {:.1} GB/s: {:.0}% of the {binding} that bind it",
        seconds * 1e3,
        best * 1e3,
        last.operations / seconds / 1e9,
        peak / 1e9,
        last.bytes / seconds / 1e9,
        bandwidth / 1e9,
        share * 100.0,
    )
}

fn median(mut values: Vec<f64>) -> f64 {
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
