//! `devices`: what there is to run on.

use crate::units;
use glinthawk_compute::cuda::gpus;
use glinthawk_compute::{Isa, allowed_cores};
use std::process::ExitCode;

/// Lists what this machine has.
pub fn list() -> anyhow::Result<ExitCode> {
    let sets: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
    let cores = units::counted(allowed_cores().len() as u64, "core");
    println!("cpu      {cores}, kernels for {}", sets.join(", "));
    match gpus() {
        Ok(found) if found.is_empty() => println!("no GPU: the driver finds none"),
        Ok(found) => {
            for gpu in found {
                let (major, minor) = gpu.capability;
                println!(
                    "cuda:{}   {}, compute capability {major}.{minor}, {} of {} free{}",
                    gpu.ordinal,
                    gpu.name,
                    units::bytes(gpu.memory_free_bytes),
                    units::bytes(gpu.memory_bytes),
                    gpu.problem
                        .map_or(String::new(), |problem| format!("; cannot be used: {problem}")),
                );
            }
        }
        Err(error) => println!("no GPU: {error}"),
    }
    Ok(ExitCode::SUCCESS)
}
