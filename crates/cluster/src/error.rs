//! What can go wrong while a cluster runs.

use crate::net::{ConnectError, SendError};
use glinthawk_compute::{ComputeError, size};
use glinthawk_jobs::JobError;
use glinthawk_model::ModelError;
use glinthawk_protocol::Tier2Error;
use std::io;

/// Why a cluster could not be started or go on.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Loading weights or making room for contexts failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A kernel failed.
    #[error("{node} failed in {kernel}: {source}")]
    Kernel {
        /// The node.
        node: String,
        /// What it was computing.
        kernel: String,
        /// What the device said.
        source: Box<ComputeError>,
    },
    /// Reading the model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Reading requests or writing results failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A Tier-2 node was sent rows that make no sense.
    #[error("a Tier-2 node refused its rows: {0}")]
    Refused(#[from] Tier2Error),
    /// No size of pages is usable by all attending workers.
    #[error(
        "the workers' kernels have no size of pages in common: give their instruction set with --isa"
    )]
    PageSizes,
    /// The memory for contexts does not hold one context of the longest length.
    #[error(
        "one context of {context_max} tokens takes {}, and an attention worker has {}: give at least \
         --context-memory {}{}",
        size(*needed_bytes), size(*given_bytes), at_least(*needed_bytes), shorter(*context_fits)
    )]
    ContextMemory {
        /// Longest context, in tokens.
        context_max: u32,
        /// What it takes.
        needed_bytes: u64,
        /// What there is.
        given_bytes: u64,
        /// The longest context that would fit.
        context_fits: u64,
    },
    /// Weights and buffers that do not fit on a GPU.
    #[error(
        "weights and buffers take {} beside contexts, and the GPU has {} free, {} too little: {remedy}",
        size(*needed_bytes), size(*free_bytes), size(needed_bytes.saturating_sub(*free_bytes))
    )]
    GpuMemory {
        /// What they take.
        needed_bytes: u64,
        /// What there is.
        free_bytes: u64,
        /// What would fit.
        remedy: String,
    },
    /// Contexts that a GPU does not keep.
    #[error("a GPU keeps contexts in bf16 only: leave --context-type out, or use --device cpu")]
    GpuContextType,
    /// More slices than layers.
    #[error("{slices} Tier-1 nodes for a model of {layers} layers: at most one node a layer")]
    Slices {
        /// Tier-1 nodes asked for.
        slices: usize,
        /// Layers there are.
        layers: usize,
    },
    /// The workers that joined do not make the cluster that was asked for.
    #[error(
        "{tier1_needed} Tier-1 and {tier2_needed} Tier-2 nodes are needed, and the workers that joined can be {tier1} \
         and {tier2}: start them with another --tier, or without one"
    )]
    Workers {
        /// Workers that would be Tier 1.
        tier1: usize,
        /// Workers that would be Tier 2.
        tier2: usize,
        /// Tier-1 nodes asked for.
        tier1_needed: usize,
        /// Tier-2 nodes asked for.
        tier2_needed: usize,
    },
    /// A control message or table that cannot be read.
    #[error("unreadable message: {0}")]
    Control(String),
    /// A worker says that it cannot go on.
    #[error(
        "worker {name} failed: {reason}; what is finished is in the output, the same command continues"
    )]
    Failed {
        /// The worker.
        name: String,
        /// What it said.
        reason: String,
    },
    /// A worker is gone.
    #[error(
        "worker {name} is gone: {reason}; what is finished is in the output, the same command continues"
    )]
    Lost {
        /// The worker.
        name: String,
        /// How the connection ended.
        reason: String,
    },
    /// This worker has a bug.
    #[error("the worker's thread panicked")]
    Panicked,
    /// The dispatcher is gone.
    #[error("the dispatcher is gone: {0}")]
    DispatcherLost(String),
    /// The user asked to end.
    #[error("interrupted")]
    Interrupted,
    /// Nothing answers at a node's address.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A message could not be sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// A socket, a thread or a process could not be created.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

/// The smallest size that an option can give in whole KiB or MiB and that holds this many bytes: `5KiB`.
fn at_least(bytes: u64) -> String {
    match bytes.div_ceil(1 << 10) {
        kib @ 0..1024 => format!("{kib}KiB"),
        kib => format!("{}MiB", kib.div_ceil(1 << 10)),
    }
}

/// The other way out: a shorter context, if one fits.
fn shorter(context_fits: u64) -> String {
    match context_fits {
        0 => String::new(),
        fits => format!(", or a shorter --max-context ({fits} tokens would fit)"),
    }
}

impl ClusterError {
    pub(crate) fn kernel(node: &str, kernel: String, source: ComputeError) -> Self {
        Self::Kernel { node: node.to_owned(), kernel, source: Box::new(source) }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_told_with_what_would_do() {
        let told = |given_bytes, needed_bytes| {
            let error = ClusterError::ContextMemory {
                context_max: 64,
                needed_bytes,
                given_bytes,
                context_fits: 0,
            };
            error.to_string()
        };
        let text = told(1, 5000);
        assert!(text.contains("takes 4.9 KiB, and an attention worker has 1 byte"), "{text}");
        assert!(text.ends_with("give at least --context-memory 5KiB"), "{text}");
        let text = told(1023, (3 << 20) + 1);
        assert!(text.contains("has 1023 bytes") && text.ends_with(" 4MiB"), "{text}");
    }
}
