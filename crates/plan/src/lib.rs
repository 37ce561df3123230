//! Choosing the cluster before paying for it: hardware catalogue, profiles, calculus, simulator, planner, cost.
//!
//! A [`Profile`] or a roofline of a [`catalogue::Device`] gives [`Kernels`]; a [`Configuration`] places them;
//! [`simulate`] runs it in virtual time; the planner searches over configurations of a cluster.

#![forbid(unsafe_code)]

pub mod calculus;
pub mod catalogue;
mod configuration;
mod error;
mod heap;
mod kernels;
pub mod profile;
mod program;
mod random;
mod report;
pub mod shape;
mod simulator;
mod trace;
mod workload;

pub use calculus::{Link, Traffic};
pub use catalogue::{Catalogue, Device};
pub use configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
pub use error::PlanError;
pub use kernels::{Kernels, Roofline};
pub use profile::Profile;
pub use program::Bottleneck;
pub use random::Random;
pub use report::{Report, TokenTime, TrafficRates, simulate, simulate_traced};
pub use shape::{Shape, even_slices};
pub use trace::Trace;
pub use workload::{Held, Length, Workload};
