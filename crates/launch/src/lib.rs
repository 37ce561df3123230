//! From a description of an engine to a running one. A [`Specification`] says what to run and on what. It is made from
//! the binary's arguments or from a plan, and what it leaves open is decided once, by [`Resolved::new`]. The result is
//! launched ([`launch`]) and forecast ([`Outlook`]): what is forecast is what runs.
//!
//! Prints nothing: whoever launches is told how far it is ([`LaunchNews`]).
#![forbid(unsafe_code)]

mod batch;
mod cores;
mod device;
mod error;
mod expected;
mod fixed_job;
mod joined;
mod kernel_curves;
mod launch;
mod machine;
mod memory;
mod news;
mod opened;
mod outlook;
mod overheads;
mod planned;
mod profiler;
mod profiles;
mod promise;
mod resolved;
mod rough;
mod secret;
mod specification;
mod sweep;

pub use batch::{BetterShape, JobShape, better_shape};
pub use device::Device;
pub use error::LaunchError;
pub use expected::{Expected, LINES_SURVEYED, lengths};
pub use fixed_job::FixedJob;
pub use launch::{Running, launch};
pub use machine::{check_free_memory, free_memory_bytes, isa, threads};
pub use news::{LaunchNews, Tell};
pub use opened::{Opened, open_text};
pub use outlook::Outlook;
pub use planned::Planned;
pub use profiler::{ProfileEffort, layers_timed, take_profile};
pub use profiles::{keep_profile, tell_damaged_profiles};
pub use promise::Promise;
pub use resolved::{BATCH_DEFAULT, GPU_NODE_BATCH, Resolved};
pub use secret::{cluster_secret, encryption};
pub use specification::{CHUNK_DEFAULT, Specification, Topology, flights_default};
