//! What whoever launches is told meanwhile.

use crate::promise::Promise;
use glinthawk_cluster::Kinds;
use glinthawk_compute::ComputeError;
use glinthawk_model::catalogue::PullProgress;
use glinthawk_plan::PlanError;
use std::net::SocketAddr;

/// How far something is that takes a while, or something to know.
#[derive(Debug)]
pub enum LaunchNews<'a> {
    /// The model is being fetched.
    Pulling(PullProgress<'a>),
    /// The weights are being hashed: bytes done, and in all.
    Checking(u64, u64),
    /// The weights are being loaded: bytes done, and in all.
    Loading(u64, u64),
    /// The dispatcher begins to wait for this many workers from elsewhere at this address.
    Listening(SocketAddr, usize),
    /// What the workers that joined will be, and what would be second best.
    Settled(Promise, Option<Promise>),
    /// Workers have joined: how many, of how many.
    Joined(usize, usize),
    /// Workers have loaded their weights: how many, of how many.
    Ready(usize, usize),
    /// The nodes compute on different kinds, so results depend on where they are computed.
    MixedKinds(&'a Kinds),
    /// Kernels are being timed: measurements done, and in all.
    Profiling(u64, u64),
    /// A profile that was kept for such a model cannot be read.
    DamagedProfile(&'a PlanError),
    /// A brief profile is about to be taken, because there is none of this machine for such a model.
    NoProfile,
    /// The CPU is used: there is a driver, but its GPU is of no use.
    NoGpu(&'a ComputeError),
}

/// Takes the news.
pub type Tell<'a> = &'a (dyn Fn(LaunchNews<'_>) + Sync);
