//! What a model runs on.

use crate::news::{LaunchNews, Tell};
use glinthawk_compute::ComputeError;
use glinthawk_compute::cuda::{CudaDevice, has_driver};
use std::fmt;
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

impl Device {
    /// The GPU to use; `None` is the CPU. If there is a driver and `Auto` cannot use its GPU, that is news.
    pub fn open(self, tell: Tell<'_>) -> Result<Option<CudaDevice>, ComputeError> {
        match self {
            Self::Cpu => Ok(None),
            Self::Auto if !has_driver() => Ok(None),
            Self::Cuda(ordinal) => CudaDevice::open(ordinal).map(Some),
            Self::Auto => {
                Ok(CudaDevice::open(0).inspect_err(|error| tell(LaunchNews::NoGpu(error))).ok())
            }
        }
    }
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
