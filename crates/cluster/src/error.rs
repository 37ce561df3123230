//! What can go wrong while a cluster runs.

use glinthawk_compute::ComputeError;
use glinthawk_jobs::JobError;
use glinthawk_protocol::Tier2Error;

/// Why a cluster could not be started or go on.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Loading weights or making room for contexts failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A Tier-2 node was sent rows that make no sense.
    #[error("a Tier-2 node refused its rows: {0}")]
    Refused(#[from] Tier2Error),
    /// Reading requests or writing results failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The memory for contexts does not hold one context of the longest length on every lane.
    #[error(
        "one context of {context_max} tokens takes {needed_mib} MiB on each of {lanes} lanes, and there are \
         {given_mib} MiB for all: give more with --context-memory, or --max-context {context_fits} or less"
    )]
    ContextMemory {
        /// Longest context, in tokens.
        context_max: u32,
        /// What it takes.
        needed_mib: u64,
        /// Lanes.
        lanes: usize,
        /// What there is, over all lanes.
        given_mib: u64,
        /// The longest context that would fit.
        context_fits: u64,
    },
}
