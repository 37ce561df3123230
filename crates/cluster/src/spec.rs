//! What a cluster is to be, before its workers are there.

use crate::control::Link;
use crate::layout::{Crowd, Layout};
use glinthawk_compute::Isa;
use glinthawk_model::{Model, ModelIdentity};
use std::sync::Arc;
use std::time::Duration;

/// What a cluster is to be.
pub struct ClusterSpec<'a> {
    /// Its shape. Workers settle the size of pages.
    pub layout: Layout,
    /// The prompts to come, where workers from elsewhere settle how many strands there are.
    pub crowd: Option<Crowd>,
    /// Says what the shape is once workers are known, if that is left to them.
    pub settle: Option<Settle<'a>>,
    /// The model.
    pub model: &'a Arc<Model>,
    /// Identity of its weights, which a worker's own disk must match.
    pub identity: ModelIdentity,
    /// The name by which workers look for it on their own disks.
    pub model_name: String,
    /// The best instruction set that a node on a CPU may use; `None` leaves each its own best.
    pub isa: Option<Isa>,
    /// Rows of each flight on a GPU's own lane beside slower ones.
    pub own_batch: u32,
    /// Memory for contexts of each attention worker, at most what a GPU has left; `None` takes what each offers.
    pub context_memory_bytes: Option<u64>,
    /// The same for Tier-1 nodes, if it is another.
    pub own_memory_bytes: Option<u64>,
    /// Workers that wait for a place beside those that have one.
    pub spares: usize,
    /// How long a pipeline waits for another worker in a lost Tier-1 node's place, and the job for a lane.
    pub replace_within: Duration,
    /// Ends one of the dispatcher's own processes, by its id, that is given up.
    pub end_process: Option<EndProcess>,
    /// Artificial link between the tiers.
    pub link: Link,
    /// Whether nodes record timelines.
    pub trace: bool,
}

/// Ends a local process, by its id.
pub type EndProcess = Box<dyn Fn(u32) + Send>;

/// The shape that workers should take, if it is not as was said.
pub type Settle<'a> = &'a dyn Fn(&[Offered]) -> Option<Layout>;

/// A worker that has joined and has no role yet.
#[derive(Clone, Copy, Debug)]
pub struct Offered {
    /// The tier it wants to be in.
    pub tier: Option<u8>,
    /// Its kernel threads.
    pub threads: usize,
    /// Memory it has for contexts, in bytes.
    pub memory_bytes: u64,
    /// Whether it is on a GPU.
    pub has_gpu: bool,
}
