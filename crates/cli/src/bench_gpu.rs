//! `bench kernels --device cuda:N`: a GPU's layer without its attention beside its products, and those beside the fastest
//! algorithms that the library has for them.

use crate::args::KernelBenchArgs;
use anyhow::Context;
use glinthawk_compute::Threads;
use glinthawk_compute::cuda::{CudaDevice, LayerBench, LayerTiming, PRODUCTS};
use glinthawk_launch::threads;
use glinthawk_model::Model;
use std::io::Write;
use std::process::ExitCode;

/// Prints a line for every shape and number of rows.
pub fn kernels(args: &KernelBenchArgs, ordinal: usize) -> anyhow::Result<ExitCode> {
    let device = CudaDevice::open(ordinal)?;
    let threads = Threads::new(threads(args.threads)?)?;
    let rows_max = args.batches.iter().copied().max().context("--batches is empty")?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}, {}: microseconds, and how fast beside the fastest",
        device.name(),
        device.kind()
    )?;
    for shape in &args.shapes {
        let model = Model::dummy(shape)?;
        let mut bench = LayerBench::new(&model, &device, rows_max, &threads)?;
        for &rows in &args.batches {
            writeln!(out, "{shape}, {rows} rows: {}", words(&bench.time(rows)?))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn words(timing: &LayerTiming) -> String {
    let LayerTiming { layer, products, fastest } = timing;
    let each = PRODUCTS.iter().zip(products.iter().zip(fastest));
    let each = each.map(|(name, (seconds, fastest))| {
        format!("{name} {:.1} ({:.1}%)", 1e6 * seconds, 100.0 * fastest / seconds)
    });
    let (sum, best): (f64, f64) = (products.iter().sum(), fastest.iter().sum());
    format!(
        "{}; all products {:.1} ({:.1}%); the layer without attention {:.1}, of which products {:.1}%",
        each.collect::<Vec<_>>().join(", "),
        1e6 * sum,
        100.0 * best / sum,
        1e6 * layer,
        100.0 * sum / layer
    )
}
