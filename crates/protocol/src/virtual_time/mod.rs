//! The virtual-time driver: the real dispatcher and nodes over simulated kernels and links.
//!
//! The simulated model computes on 64-bit numbers, but in the real model's order: what a row
//! becomes depends on every earlier position that its context holds. So a lost, stale or misplaced
//! page shows as a wrong token, and a whole cluster can be checked against [`model::complete`].

mod cluster;
mod kernels;
pub mod model;
mod setting;

pub use cluster::run;
pub use setting::{
    Costs, Failure, Fault, FaultKind, Garble, Mishap, Planted, SimulatedCluster, Stop, VirtualRun,
    Wire,
};
