//! `--device`, and `devices`: what there is to run on.

use crate::progress::say;
use crate::units;
use glinthawk_cluster::allowed_cores;
use glinthawk_compute::cuda::{CudaDevice, gpus, has_driver};
use glinthawk_compute::{ComputeError, Isa};
use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU where there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU, by its number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (text, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err("give auto, cpu, or cuda:N such as cuda:0".to_owned()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(ordinal) => write!(formatter, "cuda:{ordinal}"),
        }
    }
}

/// The GPU to use; `None` is the CPU. If there is a driver and `auto` cannot use its GPU, it says why, once.
pub fn choose(device: Device) -> anyhow::Result<Option<CudaDevice>> {
    match device {
        Device::Cpu => Ok(None),
        Device::Auto if !has_driver() => Ok(None),
        Device::Cuda(ordinal) => Ok(Some(CudaDevice::open(ordinal)?)),
        Device::Auto => Ok(CudaDevice::open(0)
            .inspect_err(|error| match error {
                ComputeError::CudaMissing { library, .. } => {
                    say(format_args!("using the CPU: {library} is not on this machine"));
                }
                other => say(format_args!("using the CPU: {other}")),
            })
            .ok()),
    }
}

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
