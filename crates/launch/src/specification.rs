//! What to run and on what, as far as anyone has said.

use crate::device::Device;
use crate::error::LaunchError;
use crate::machine;
use glinthawk_cluster::Link;
use glinthawk_cluster::net::Bounds;
use glinthawk_compute::{ContextType, Isa};
use std::path::PathBuf;
use std::time::Duration;

/// Prefill rows of one prompt in a step, if neither the specification nor a profile say.
pub const CHUNK_DEFAULT: u32 = 256;

/// Flights of a cluster for each of its Tier-1 nodes, so that there is one to compute while others travel.
const FLIGHTS_PER_SLICE: u32 = 3;

/// Flights in the air, unless something else is said. One node that attends itself has nothing to wait for.
pub fn flights_default(tier1: u32, tier2: u32) -> u32 {
    if (tier1, tier2) == (1, 0) { 1 } else { FLIGHTS_PER_SLICE * tier1 }
}

/// What to run and on what. `None` is left open; `Resolved::new` decides it.
#[derive(Clone, Debug)]
pub struct Specification {
    /// The model: a name in the catalogue, a folder or file, a name on the hub, or dummy:SHAPE.
    pub model: String,
    /// Where it runs.
    pub device: Device,
    /// Instruction set of the kernels.
    pub isa: Option<Isa>,
    /// Kernel threads of this process.
    pub threads: Option<u32>,
    /// Which processes it is spread over.
    pub topology: Topology,
    /// Rows of a flight on each lane (B).
    pub batch: Option<u32>,
    /// Flights in the air.
    pub flights: Option<u32>,
    /// Prefill rows of one prompt in a step.
    pub chunk: Option<u32>,
    /// Memory for contexts in each process that attends; of Tier 2, where there are two sizes.
    pub context_memory_bytes: Option<u64>,
    /// How keys and values are stored.
    pub context_type: ContextType,
    /// Positions a context may have.
    pub context_max: Option<u32>,
    /// Whether Tier 1 waits for all shards of a flight before it computes.
    pub whole_flights: bool,
    /// Whether prompts that begin with the same tokens share the context of those.
    pub sharing: bool,
    /// Whether tokens that may come next are computed beside those that are known, where that pays.
    pub drafts: bool,
    /// Whether nodes record timelines.
    pub trace: bool,
}

/// Which processes an engine is spread over; by default, this one alone.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    /// Pipelines, each with all layers; 1 unless something else is said.
    pub pipelines: Option<u32>,
    /// Tier-1 nodes of each (K).
    pub tier1: Option<u32>,
    /// Tier-2 nodes for each of them (K').
    pub tier2: Option<u32>,
    /// Whether Tier-1 nodes attend too, beside their Tier-2 nodes.
    pub hybrid: bool,
    /// Where workers from elsewhere join; `None` starts local processes.
    pub listen: Option<String>,
    /// How many workers join there.
    pub workers: Option<u32>,
    /// How many more join and wait for a place.
    pub spares: u32,
    /// How long a pipeline waits for another worker in a lost Tier-1 node's place.
    pub replace_within: Option<Duration>,
    /// File that holds the secret of such a cluster; `None` takes it from the environment.
    pub secret_file: Option<PathBuf>,
    /// Whether connections to other machines are plain.
    pub insecure: bool,
    /// Devices of the local nodes, Tier 1 first, if there is a list of them.
    pub devices: Vec<Device>,
    /// Memory for contexts of Tier-1 nodes, then of Tier-2 nodes, if there are two sizes.
    pub context_memory: Vec<u64>,
    /// Cores of each local Tier-1 node, and of each Tier-2 node; `None` gives each what it needs.
    pub cores: Option<(u32, u32)>,
    /// Artificial delay between the tiers, each way.
    pub delay: Option<Duration>,
    /// Artificial bandwidth between the tiers, each way, in bytes per second.
    pub bandwidth: Option<u64>,
}

impl Specification {
    /// A model, and everything else left open.
    pub fn new(model: &str) -> Self {
        Self {
            model: model.to_owned(),
            device: Device::default(),
            isa: None,
            threads: None,
            topology: Topology::default(),
            batch: None,
            flights: None,
            chunk: None,
            context_memory_bytes: None,
            context_type: ContextType::default(),
            context_max: None,
            whole_flights: false,
            sharing: true,
            drafts: true,
            trace: false,
        }
    }

    /// Refuses what would do nothing, before anything is opened.
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        let topology = &self.topology;
        let (_, tier2) = topology.nodes()?;
        let of_tier2 = [
            ("--hybrid", topology.hybrid),
            ("--delay", topology.delay.is_some()),
            ("--bandwidth", topology.bandwidth.is_some()),
        ];
        if let Some((option, _)) = of_tier2.iter().find(|(_, given)| *given && tier2 == 0) {
            return Err(LaunchError::NoTier2(option));
        }
        let of_listening = [
            ("--secret-file", topology.secret_file.is_some()),
            ("--insecure", topology.insecure),
            ("--spares", topology.spares > 0),
        ];
        if let Some((option, _)) = of_listening.iter().find(|(_, given)| *given)
            && topology.listen.is_none()
        {
            return Err(LaunchError::NotListening(option));
        }
        if topology.replace_within.is_some() && topology.is_one_process() {
            return Err(LaunchError::NoCluster("--replace-within"));
        }
        let has_processes = !topology.is_one_process() && topology.listen.is_none();
        if topology.cores.is_some() && !has_processes {
            return Err(LaunchError::NoProcesses);
        }
        let is_gpu = |device: &Device| matches!(device, Device::Cuda(_));
        if topology.listen.is_some() && (is_gpu(&self.device) || !topology.devices.is_empty()) {
            return Err(LaunchError::DeviceOfWorkers);
        }
        self.local_devices()?;
        if !topology.context_memory.is_empty()
            && (topology.context_memory.len() > 2 || !topology.hybrid)
        {
            return Err(LaunchError::ContextMemories);
        }
        if !topology.is_one_process() && self.threads.is_some() {
            return Err(LaunchError::ThreadsOfCluster);
        }
        machine::threads(self.threads)?;
        Ok(())
    }

    /// The device to open here: the nodes of a cluster open their own.
    pub(crate) fn device(&self) -> Device {
        if self.topology.is_one_process() { self.device } else { Device::Cpu }
    }

    /// The devices of local processes, Tier 1 first; none for one process, or for workers from elsewhere. A GPU is for
    /// Tier 1, and a list may say otherwise.
    pub(crate) fn local_devices(&self) -> Result<Vec<Device>, LaunchError> {
        let Topology { devices: listed, listen, .. } = &self.topology;
        let (tier1, tier2) = self.topology.nodes()?;
        let alone = self.topology.is_one_process();
        let tier1 = self.topology.pipelines() * tier1;
        let nodes = if alone { 1 } else { tier1 * (1 + tier2) };
        let mut devices = match (self.device, listed.len()) {
            (Device::Cuda(first), 0) => (first..first + tier1).map(Device::Cuda).collect(),
            (_, 0) => Vec::new(),
            (_, count) if !alone && (count == tier1 || count == nodes) => listed.clone(),
            (_, devices) => return Err(LaunchError::Devices { devices, tier1, nodes }),
        };
        if devices.contains(&Device::Auto) {
            return Err(LaunchError::AutoInList);
        }
        if alone || listen.is_some() {
            return Ok(Vec::new());
        }
        devices.resize(nodes, Device::Cpu);
        Ok(devices)
    }
}

impl Topology {
    /// Whether it is this process only.
    pub fn is_one_process(&self) -> bool {
        let Self { pipelines, tier1, tier2, listen, .. } = self;
        pipelines.is_none() && tier1.is_none() && tier2.is_none() && listen.is_none()
    }

    /// Whether workers from elsewhere may become what promises most: nobody has said what they should be.
    pub(crate) fn is_open(&self) -> bool {
        let Self { pipelines, tier1, tier2, hybrid, delay, bandwidth, .. } = self;
        let said = pipelines.is_some() || tier1.is_some() || tier2.is_some();
        let of_tier2 = *hybrid || delay.is_some() || bandwidth.is_some();
        self.listen.is_some() && !said && !of_tier2
    }

    /// Pipelines.
    pub(crate) fn pipelines(&self) -> usize {
        self.pipelines.unwrap_or(1) as usize
    }

    /// Tier-1 nodes of a pipeline, and Tier-2 nodes for each of them.
    pub(crate) fn nodes(&self) -> Result<(usize, usize), LaunchError> {
        let tier1 = self.tier1.unwrap_or(1) as usize;
        let pipelines = self.pipelines();
        let workers = self.workers.map(|workers| workers as usize);
        let tier2 = match (self.tier2, workers) {
            (Some(tier2), _) => tier2 as usize,
            (None, Some(workers)) => (workers / (pipelines * tier1)).saturating_sub(1),
            (None, None) => 0,
        };
        let needed = pipelines.saturating_mul(tier1).saturating_mul(1 + tier2);
        if let Some(workers) = workers.filter(|workers| *workers != needed) {
            return Err(LaunchError::Workers { workers, pipelines, tier1, tier2 });
        }
        let nodes = needed.saturating_add(self.spares as usize);
        match Bounds::default().peers_max {
            nodes_max if nodes > nodes_max => Err(LaunchError::Nodes { nodes, nodes_max }),
            _ => Ok((tier1, tier2)),
        }
    }

    /// Memory for contexts of Tier-1 nodes, if they have a size of their own.
    pub(crate) fn own_memory_bytes(&self) -> Option<u64> {
        self.context_memory.first().copied()
    }

    /// The artificial link between the tiers.
    pub(crate) fn link(&self) -> Link {
        Link { delay: self.delay.unwrap_or_default(), bytes_per_second: self.bandwidth }
    }
}
