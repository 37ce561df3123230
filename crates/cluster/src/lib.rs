//! Runs the protocol for real: kernels, threads, sockets and processes under the state machines of
//! `glinthawk-protocol`. One process is a cluster whose messages are function calls.
#![forbid(unsafe_code)]

mod budget;
mod casting;
mod complaints;
mod control;
mod engine;
mod error;
mod estimate;
mod fabric;
mod gpu;
mod kinds;
mod layout;
mod local;
mod memory;
mod meter;
mod muster;
mod neighbours;
pub mod net;
mod news;
mod nodes;
mod payload;
mod processes;
mod pump;
mod remote;
mod report;
mod role;
mod serve;
mod span;
mod spec;
mod station;
mod stats;
mod strand;
mod tier1_kernels;
mod tier2_kernels;
mod together;
mod trace;
mod turns;
mod weights;
mod wire;
mod worker;

pub use budget::{gpu_remedy, left_beside_slice};
pub use control::{Control, Link, LocalProcess, Offer, Role};
pub use engine::{Counted, Engine, EngineEvent};
pub use error::ClusterError;
pub use estimate::{Estimate, Lines, Pace};
pub use fabric::{Fabric, FabricEvent};
pub use gpu::GpuFabric;
pub use kinds::{Kinds, NodeKind};
pub use layout::{Crowd, Layout, node_name};
pub use local::{Kernels, LocalFabric};
pub use memory::free_memory_bytes;
pub use muster::{Muster, Mustered};
pub use news::WorkerNews;
pub use processes::{LocalWorker, Processes, Restarts, TOKEN_VARIABLE, keep_to_cores};
pub use pump::run_job;
pub use remote::RemoteFabric;
pub use report::{NodeReport, Traffic, peak_memory_bytes};
pub use spec::{ClusterSpec, EndProcess, Offered, Settle};
pub use stats::{NodeShare, RunStats, Setting};
pub use trace::write_trace;
#[doc(hidden)]
pub use wire::read_any;
pub use worker::{WorkerOptions, work};
