//! Runs the protocol for real: kernels, threads and processes under the state machines of
//! `glinthawk-protocol`. One process is a cluster whose messages are function calls.
#![forbid(unsafe_code)]

mod engine;
mod error;
mod pump;
mod stats;
mod tier1;
mod tier2;

pub use engine::{Engine, EngineConfig, EngineEvent};
pub use error::ClusterError;
pub use pump::run_job;
pub use stats::{NodeStats, Stats};
pub use tier1::{Outgoing, Tier1Worker};
pub use tier2::Tier2Worker;
