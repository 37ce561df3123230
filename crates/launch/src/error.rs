//! Why there is no engine.

use glinthawk_cluster::net::BenchError;
use glinthawk_cluster::{ClusterError, TOKEN_VARIABLE};
use glinthawk_compute::{ComputeError, size};
use glinthawk_model::catalogue::CatalogueError;
use glinthawk_model::{ChatError, ModelError, TokenizerError};
use glinthawk_plan::PlanError;
use glinthawk_protocol::Rejection;
use std::io;
use std::path::PathBuf;

/// Why an engine could not be specified, launched or measured.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// What was to be measured was not computed.
    #[error(
        "the model picks no token, because its logits are NaN or minus infinity: its weights may be damaged"
    )]
    NothingPicked,
    /// The number of workers is not that of the nodes.
    #[error(
        "--workers {workers} does not fit: {}--tier1 {tier1} and --tier2 {tier2} need {}",
        if *pipelines > 1 { format!("--pipelines {pipelines}, ") } else { String::new() },
        counted(pipelines * tier1 * (1 + tier2), "worker")
    )]
    Workers {
        /// Workers to wait for.
        workers: usize,
        /// Pipelines.
        pipelines: usize,
        /// Tier-1 nodes of each.
        tier1: usize,
        /// Tier-2 nodes for each of them.
        tier2: usize,
    },
    /// An option of Tier 2 where there is none.
    #[error("{0} does nothing without a Tier 2: give --tier2 1 or more too")]
    NoTier2(&'static str),
    /// An option for workers from elsewhere where there are none.
    #[error("{0} does nothing without --listen: local processes need none")]
    NotListening(&'static str),
    /// An option for clusters, and there is one process.
    #[error("{0} does nothing in one process: give --tier1, --tier2 or --listen")]
    NoCluster(&'static str),
    /// Cores of local processes where there are none.
    #[error(
        "--cores does nothing without processes on this machine: give --tier1 or --tier2, and no --listen"
    )]
    NoProcesses,
    /// A device for workers from elsewhere.
    #[error(
        "--device does nothing with --listen: a worker from elsewhere has a --device of its own"
    )]
    DeviceOfWorkers,
    /// A list of devices that is not that of the nodes.
    #[error(
        "--device lists {}: give one for each of {}, or one for each of {}, Tier 1 first",
        counted(*devices, "device"), counted(*tier1, "Tier-1 node"), counted(*nodes, "node")
    )]
    Devices {
        /// Devices listed.
        devices: usize,
        /// Tier-1 nodes.
        tier1: usize,
        /// All nodes.
        nodes: usize,
    },
    /// More cores than there are.
    #[error("--cores asks for {} in all, and there are {here}", counted(*wanted, "core"))]
    TooManyCores {
        /// Cores of all processes.
        wanted: usize,
        /// Cores here.
        here: usize,
    },
    /// More GPUs than there are.
    #[error(
        "a node is to be on cuda:{ordinal}, and this machine has {}: give fewer Tier-1 nodes, or list their devices, \
         such as --device cuda:0,cuda:0",
        counted(*count, "GPU")
    )]
    GpuMissing {
        /// The one that is not there.
        ordinal: usize,
        /// How many are.
        count: usize,
    },
    /// A list of devices that leaves one open.
    #[error("a list of devices has cpu or cuda:N for each node, not auto")]
    AutoInList,
    /// Sizes of memory for tiers that do not both attend.
    #[error("two sizes of --context-memory are for the Tier-1 and Tier-2 nodes of a --hybrid")]
    ContextMemories,
    /// Threads for a cluster.
    #[error(
        "--threads does nothing here: local nodes get cores by what they have to do (--cores), and a worker from elsewhere has a --threads \
         of its own"
    )]
    ThreadsOfCluster,
    /// More threads than are of use.
    #[error(
        "--threads {threads} is too many: this process may use {}, so give at most {most}",
        counted(*cores, "core")
    )]
    TooManyThreads {
        /// Threads asked for.
        threads: usize,
        /// Cores of this process.
        cores: usize,
        /// The most threads for them.
        most: usize,
    },
    /// A longer context than the model's.
    #[error("--max-context {wanted} is more than the model was made for: {context_max} tokens")]
    ContextMax {
        /// Tokens asked for.
        wanted: u32,
        /// The model's.
        context_max: usize,
    },
    /// More Tier-1 nodes than layers.
    #[error("--tier1 {tier1} is more than the model's {}", counted(*layers, "layer"))]
    Layers {
        /// Tier-1 nodes asked for.
        tier1: usize,
        /// The model's layers.
        layers: usize,
    },
    /// More nodes than a dispatcher has connections for.
    #[error("{nodes} nodes were asked for, and a cluster has at most {nodes_max}")]
    Nodes {
        /// Nodes asked for.
        nodes: usize,
        /// The most there can be.
        nodes_max: usize,
    },
    /// The cluster has no secret.
    #[error(
        "{TOKEN_VARIABLE} is not set. It holds the cluster's secret, the same on the dispatcher and on every worker, \
         so that no stranger joins: make one with `openssl rand -hex 32` and export {TOKEN_VARIABLE}=... on all of \
         them, or put it in a file and give --secret-file"
    )]
    NoToken,
    /// The cluster's secret is not text.
    #[error("{TOKEN_VARIABLE} is not text: use letters and digits")]
    BadToken,
    /// The file of the cluster's secret cannot be read.
    #[error("cannot read the secret in {}", path.display())]
    SecretFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{} is longer than {most} bytes: it holds no secret", path.display())]
    LongSecret {
        /// The file.
        path: PathBuf,
        /// The most bytes of a secret.
        most: usize,
    },
    /// The cluster's secret is too short.
    #[error(
        "the secret in {place} has {characters} characters and can be guessed: {least} is the least, and `openssl rand \
         -hex 32` makes a good one"
    )]
    ShortSecret {
        /// Where it is.
        place: String,
        /// How long it is.
        characters: usize,
        /// How long it must be.
        least: usize,
    },
    /// Contexts were promised more memory than there is.
    #[error(
        "--context-memory asks for {}, and this machine has {} free",
        size(*wanted_bytes),
        size(*free_bytes)
    )]
    ContextMemory {
        /// What was asked for.
        wanted_bytes: u64,
        /// What is free.
        free_bytes: u64,
    },
    /// The system does not say how much memory is free.
    #[error("cannot tell how much memory is free: give --context-memory")]
    FreeMemory,
    /// The system does not say how many cores there are.
    #[error("cannot count this machine's cores")]
    Cores(#[source] io::Error),
    /// Local processes cannot be started.
    #[error("cannot find this program's own file")]
    Executable(#[source] io::Error),
    /// Profiles cannot be kept.
    #[error(
        "cannot create {}: set GLINTHAWK_CACHE to a folder that can be written to",
        folder.display()
    )]
    ProfileFolder {
        /// The folder for them.
        folder: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The engine refused a prompt of a measurement.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// The model cannot be found or fetched.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// The model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its chat template cannot be read.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The device or its kernels cannot be used.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// The cluster did not come about, or broke.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The network could not be measured.
    #[error(transparent)]
    Network(#[from] BenchError),
    /// A plan or a profile is wrong, or could not be written.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl LaunchError {
    /// Whether what was asked for cannot be meant, on any machine like this one and for any model.
    pub fn is_bad_usage(&self) -> bool {
        matches!(
            self,
            Self::Workers { .. }
                | Self::Nodes { .. }
                | Self::NoTier2(_)
                | Self::NotListening(_)
                | Self::NoCluster(_)
                | Self::NoProcesses
                | Self::TooManyCores { .. }
                | Self::DeviceOfWorkers
                | Self::Devices { .. }
                | Self::AutoInList
                | Self::ContextMemories
                | Self::ThreadsOfCluster
                | Self::TooManyThreads { .. }
        )
    }
}

/// `1 core`, `2 cores`.
pub(crate) fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}
