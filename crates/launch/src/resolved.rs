//! A specification with nothing left open: what is launched, and what is forecast.

use crate::cores::{Placement, fewest};
use crate::error::LaunchError;
use crate::machine;
use crate::memory::{gpu_memory_bytes, memory_bytes};
use crate::opened::Opened;
use crate::profiles;
use crate::specification::{CHUNK_DEFAULT, Specification, Topology, flights_default};
use glinthawk_cluster::{ClusterError, Crowd, Kinds, Layout, Setting, left_beside_slice};
use glinthawk_compute::cuda::CudaModel;
use glinthawk_compute::{Isa, allowed_cores};
use glinthawk_model::even_slices;
use glinthawk_plan::{Deployment, KernelTimes, NetworkLink, OwnLane, Place, Shape};
use std::sync::Arc;

/// Rows of a flight on each lane, if neither the specification nor a profile say.
pub const BATCH_DEFAULT: u32 = 256;

/// The same for jobs that are mostly prompt: weights are read and classified with a quarter as often for the same rows.
/// Generating prompts would share a larger batch with more others, and gain nothing.
const BATCH_OF_PROMPTS: u32 = 1024;
/// Tokens of a prompt for each generated one from which on a job is mostly prompt.
const MOSTLY_PROMPT: usize = 8;

/// Rows of a GPU's batch: enough that products are limited by operations, not by reading weights.
const GPU_BATCH: u32 = 4096;

/// The same where a GPU is a node of a cluster, which has several flights.
pub const GPU_NODE_BATCH: u32 = 1024;

/// What will run.
pub struct Resolved {
    /// The model, by the name it was asked for.
    pub model: String,
    /// The engine's shape.
    pub layout: Layout,
    /// Instruction set of the kernels on this machine.
    pub isa: Isa,
    /// The best instruction set that any node may use; `None` leaves workers from elsewhere their own best.
    pub isa_wanted: Option<Isa>,
    /// The prompts to come.
    pub crowd: Crowd,
    /// Cores of each local process, Tier 1 first; empty where there is one process, or where workers come from elsewhere.
    pub cores: Vec<usize>,
    /// Kernel threads of the one process, or of each Tier-1 node on this machine.
    pub threads: usize,
    /// Kernel threads of each Tier-2 node on this machine.
    pub tier2_threads: usize,
    /// Whether contexts are expected on Tier-2 nodes.
    pub uses_tier2: bool,
    /// Memory for contexts of each process that attends on a CPU, or of the one process; `None` where every worker says
    /// how much it has.
    pub memory_bytes: Option<u64>,
    /// Rows of each flight on a GPU's own lane beside slower ones.
    pub own_batch: u32,
    /// Memory for contexts that was asked for.
    pub memory_wanted_bytes: Option<u64>,
    /// Whether flights were asked for.
    pub flights_wanted: bool,
    /// Which processes there are.
    pub topology: Topology,
    /// Whether nodes record timelines.
    pub trace: bool,
}

impl Resolved {
    /// Decides what a specification leaves open, for an opened model and the prompts to come.
    pub fn new(
        specification: &Specification,
        opened: &Opened,
        crowd: Crowd,
    ) -> Result<Self, LaunchError> {
        let config = opened.model.config();
        let topology = &specification.topology;
        let alone = topology.is_one_process();
        let (pipelines, (tier1, tier2)) = (topology.pipelines(), topology.nodes()?);
        if tier1 > config.layers {
            return Err(LaunchError::Layers { tier1, layers: config.layers });
        }
        let attends = opened.local.iter().skip(if tier2 == 0 { 0 } else { pipelines * tier1 });
        let mostly_prompt = alone && crowd.input >= MOSTLY_PROMPT * crowd.output;
        let (batch, chunk) = match &opened.device {
            Some(_) => (GPU_BATCH, CHUNK_DEFAULT),
            None if attends.map(|(_, gpu)| gpu.is_some()).min() == Some(true) => {
                (GPU_NODE_BATCH, CHUNK_DEFAULT)
            }
            // A prompt's rows read its context together.
            None if mostly_prompt => (BATCH_OF_PROMPTS, BATCH_OF_PROMPTS),
            None => (BATCH_DEFAULT, CHUNK_DEFAULT),
        };
        let isa = machine::isa(specification.isa)?;
        let layout = Layout {
            pipelines,
            slices: tier1,
            tier2,
            tier1_attends: topology.hybrid || tier2 == 0,
            strands: 1,
            batch: specification.batch.unwrap_or(batch),
            flights: specification.flights.unwrap_or(match opened.has_gpu() && !alone {
                // One GPU of a cluster is given work ahead too.
                true => flights_default(tier1 as u32, tier2.max(1) as u32),
                false => flights_default(tier1 as u32, tier2 as u32),
            }),
            own_batch: None,
            own_first: false,
            chunk: specification.chunk.unwrap_or(chunk),
            context_max: specification.context_max.unwrap_or(config.context_max as u32),
            page_positions: match opened.device {
                Some(_) => CudaModel::PAGE_POSITIONS,
                None => crowd.page_positions(),
            },
            context_type: specification.context_type,
            whole_flights: specification.whole_flights,
            shares_cores: false,
            sharing: specification.sharing,
            drafts: specification.drafts.then(|| isa.rows_per_reading()),
        };
        let wanted = specification.context_memory_bytes;
        let memory_bytes = match (&opened.device, wanted) {
            (Some(device), _) => Some(gpu_memory_bytes(wanted, config, &layout, device)?),
            (None, None) if topology.listen.is_none() => Some(memory_bytes(opened, &layout)?),
            (None, wanted) => wanted,
        };
        let placement = Placement::new(specification, opened, layout, isa, memory_bytes, crowd)?;
        let layout = placement.layout.clone();
        let (tier1_cores, tier2_cores) =
            placement.cores.split_at(layout.nodes().0.min(placement.cores.len()));
        let threads = match fewest(tier1_cores) {
            Some(threads) => threads,
            None => machine::threads(specification.threads)?,
        };
        let tier2_threads = fewest(tier2_cores).unwrap_or(threads);
        Ok(Self {
            model: specification.model.clone(),
            isa,
            isa_wanted: specification.isa,
            crowd,
            cores: placement.cores,
            threads,
            tier2_threads,
            uses_tier2: placement.uses_tier2,
            memory_bytes,
            own_batch: specification.batch.unwrap_or(0).max(GPU_NODE_BATCH),
            memory_wanted_bytes: wanted,
            flights_wanted: specification.flights.is_some(),
            topology: topology.clone(),
            trace: specification.trace,
            layout,
        })
    }

    /// Pages of each lane; `None` where that depends on the workers.
    pub(crate) fn lane_pages(&self, opened: &Opened) -> Result<Option<u32>, ClusterError> {
        // The strands of a process share its memory. The first slice has the most layers, so the fewest pages.
        let strands = self.layout.strands as u64;
        let pages = |bytes: u64| self.layout.pages(opened.model.config(), (0, 0), bytes / strands);
        self.memory_bytes.map(pages).transpose()
    }

    /// Pages of the Tier-1 nodes' own lanes where cores attend on both tiers.
    fn own_pages(&self, opened: &Opened) -> Option<u32> {
        let bytes = self.topology.own_memory_bytes().or(self.memory_bytes)?;
        let bytes = bytes / self.layout.strands as u64;
        self.layout.pages(opened.model.config(), (0, 0), bytes).ok()
    }

    /// What statistics say of an engine that nothing was loaded for.
    pub fn idle(&self, opened: &Opened) -> Setting {
        let kinds = opened.kinds(self.isa, &self.topology);
        let kinds = kinds.expect("the topology was found to make sense");
        self.setting(opened, &self.layout, &kinds, self.threads, 0)
    }

    /// What statistics say of the engine, whose kernels and memory may have come from its workers.
    pub(crate) fn setting(
        &self,
        opened: &Opened,
        layout: &Layout,
        kinds: &Kinds,
        threads: usize,
        memory_bytes: u64,
    ) -> Setting {
        let config = opened.model.config();
        Setting {
            model: opened.served.name.clone(),
            backend: kinds.backend(),
            instruction_set: kinds.to_string(),
            threads,
            pipelines: layout.pipelines,
            tier1_nodes: layout.slices,
            tier2_nodes: layout.tier2,
            tier1_attends: layout.tier1_attends,
            lanes: layout.lanes(),
            batch: layout.batch,
            flights: layout.flights,
            chunk: layout.chunk,
            context_memory_bytes: memory_bytes,
            context_type: layout.context_type.name(),
            page_bytes: layout.model_page_bytes(config),
            max_context: layout.context_max,
        }
    }

    /// Kernel threads of each strand in Tier 1.
    pub(crate) fn strand_threads(&self) -> usize {
        (self.threads / self.layout.strands).max(1)
    }

    /// Kernel times of Tier 1 and of Tier 2, where profiles of them were kept.
    fn kernels(&self, opened: &Opened) -> Option<[Arc<KernelTimes>; 2]> {
        let strands = self.layout.strands;
        let kept = |node: usize, threads: usize| {
            let cores = || profiles::of_cores(self.isa, (threads / strands).max(1));
            let provenance = opened.gpu_of(node).as_ref().map_or_else(cores, profiles::of_device);
            let profile = profiles::kept(opened.model.config(), &provenance)?;
            Some(Arc::new(KernelTimes::Measured(Box::new(profile))))
        };
        let tier1 = kept(0, self.threads)?;
        let tier2 = match self.uses_tier2 {
            false => tier1.clone(),
            true => kept(self.layout.slices, self.tier2_threads)?,
        };
        Some([tier1, tier2])
    }

    /// The lane of GPUs in Tier 1 beside lanes of CPUs.
    fn own_lane(&self, opened: &Opened) -> Option<OwnLane> {
        let config = opened.model.config();
        let batch = self.own_batch;
        let layout = Layout { own_batch: Some(batch), ..self.layout.clone() };
        let free_bytes = opened.gpu_of(0)?.memory_free_bytes().ok()?;
        let left = left_beside_slice(&layout, config, free_bytes)?;
        let wanted = self.topology.own_memory_bytes().or(self.memory_wanted_bytes);
        let pages = layout.pages(config, (0, 0), wanted.unwrap_or(left).min(left)).ok()?;
        Some(OwnLane { batch, pages })
    }

    /// The engine as a forecast sees it; `None` where it is not one pipeline on this machine, where there is no profile,
    /// or where GPUs and CPUs attend side by side in another way than as Tier 1 and Tier 2.
    pub(crate) fn deployment(&self, opened: &Opened) -> Option<Deployment> {
        if self.topology.listen.is_some() || self.layout.pipelines > 1 {
            return None;
        }
        let own_lane = match self.topology.hybrid && opened.has_gpu() {
            true => Some(self.own_lane(opened)?),
            false => None,
        };
        let is_gpu = |(_, gpu): &(_, Option<String>)| gpu.is_some();
        let (first, others) = opened.local.split_at(self.layout.slices.min(opened.local.len()));
        if own_lane.is_some() && (!first.iter().all(is_gpu) || others.iter().any(is_gpu)) {
            return None;
        }
        let config = opened.model.config();
        let [tier1, tier2_kernels] = self.kernels(opened)?;
        let Layout { slices, tier2, tier1_attends, strands, batch, flights, chunk, .. } =
            self.layout;
        let (cores, processes) = (allowed_cores().len(), slices * (1 + tier2));
        let link = self.topology.link();
        Some(Deployment {
            shape: Shape::of(opened.model.name(), config),
            slices: even_slices(config.layers, slices),
            tier2,
            local_lane: tier1_attends,
            own_lane,
            own_first: match self.layout.own_first {
                true => Some(self.own_pages(opened)?),
                false => None,
            },
            strands,
            crowding: [
                (strands as f64 / self.threads as f64).max(1.0),
                (strands as f64 / self.tier2_threads as f64).max(1.0),
            ],
            batch,
            flights,
            chunk,
            context_max: self.layout.context_max,
            lane_pages: self.lane_pages(opened).ok()??,
            page_positions: self.layout.page_positions,
            whole_flights: self.layout.whole_flights,
            greedy: true,
            tier1,
            tier2_kernels,
            delay_seconds: link.delay.as_secs_f64(),
            bandwidth: link.bytes_per_second.map_or(f64::INFINITY, |rate| rate as f64),
            port: f64::INFINITY,
            hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
            place: match self.topology.is_one_process() {
                true => Place::OneProcess,
                false if self.layout.shares_cores => Place::SharedCores(1),
                false if processes >= cores => Place::SharedCores(cores),
                false => Place::OwnMachines,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    fn resolve(change: impl FnOnce(&mut Specification)) -> Result<Resolved, LaunchError> {
        resolve_for(Crowd::ONE, change)
    }

    fn resolve_for(
        crowd: Crowd,
        change: impl FnOnce(&mut Specification),
    ) -> Result<Resolved, LaunchError> {
        let mut specification = Specification {
            device: Device::Cpu,
            context_memory_bytes: Some(64 << 20),
            ..Specification::new("dummy:tiny")
        };
        change(&mut specification);
        let opened = Opened::open(&specification, &|_| ())?;
        Resolved::new(&specification, &opened, crowd)
    }

    /// Tier-1 nodes, Tier-2 nodes for each, lanes, batch and flights.
    fn check(change: impl FnOnce(&mut Specification), expected: (usize, usize, usize, u32, u32)) {
        let layout = resolve(change).expect("it can be launched").layout;
        let Layout { slices, tier2, batch, flights, .. } = layout;
        assert_eq!((slices, tier2, layout.lanes(), batch, flights), expected);
    }

    #[test]
    fn what_is_left_open_is_decided() {
        check(|_| (), (1, 0, 1, 256, 1));
        check(|wanted| wanted.batch = Some(7), (1, 0, 1, 7, 1));
        check(|wanted| wanted.topology.tier1 = Some(2), (2, 0, 1, 256, 1));
        check(|wanted| wanted.topology.tier2 = Some(3), (1, 3, 3, 256, 1));
        let apart = |wanted: &mut Specification| {
            wanted.topology.tier2 = Some(1);
            wanted.topology.cores = Some((1, 1));
        };
        check(apart, (1, 1, 1, 256, 3));
        let hybrid = |wanted: &mut Specification| {
            wanted.topology.tier2 = Some(3);
            wanted.topology.hybrid = true;
            wanted.flights = Some(2);
        };
        check(hybrid, (1, 3, 4, 256, 2));
        let elsewhere = |wanted: &mut Specification| {
            wanted.topology.listen = Some("127.0.0.1:0".to_owned());
            wanted.topology.workers = Some(6);
            wanted.topology.tier1 = Some(2);
        };
        check(elsewhere, (2, 2, 2, 256, 6));
    }

    #[test]
    fn jobs_that_are_mostly_prompt_have_larger_batches_and_chunks() {
        let shape = |input, output, change: fn(&mut Specification)| {
            let crowd = Crowd { prompts: 64, input, output, alike: false };
            let layout = resolve_for(crowd, change).expect("it can be launched").layout;
            (layout.batch, layout.chunk)
        };
        assert_eq!(shape(16, 2, |_| ()), (BATCH_OF_PROMPTS, BATCH_OF_PROMPTS));
        assert_eq!(shape(16, 3, |_| ()), (BATCH_DEFAULT, CHUNK_DEFAULT));
        assert_eq!(shape(16, 2, |wanted| wanted.batch = Some(7)).0, 7);
        assert_eq!(shape(16, 2, |wanted| wanted.chunk = Some(7)), (BATCH_OF_PROMPTS, 7));
        let apart = shape(16, 2, |wanted| wanted.topology.tier2 = Some(1));
        assert_eq!(apart, (BATCH_DEFAULT, CHUNK_DEFAULT));
    }

    #[test]
    fn pages_follow_what_prompts_share() {
        for (alike, positions) in [(false, 32), (true, 16)] {
            for tier2 in [0, 2] {
                let crowd = Crowd { alike, ..Crowd::UNKNOWN };
                let change = |wanted: &mut Specification| wanted.topology.tier2 = Some(tier2);
                let layout = resolve_for(crowd, change).expect("it can be launched").layout;
                assert_eq!(layout.page_positions, positions);
            }
        }
    }

    /// The devices of local processes with these options.
    fn check_devices(given: &str, (tier1, tier2): (u32, u32), expected: &str) {
        let given: Vec<Device> = given.split(',').map(|one| one.parse().expect("valid")).collect();
        let specification = Specification {
            device: given[0],
            topology: Topology {
                tier1: Some(tier1),
                tier2: Some(tier2),
                devices: if given.len() > 1 { given } else { Vec::new() },
                ..Topology::default()
            },
            ..Specification::new("dummy:tiny")
        };
        let devices = match specification.local_devices() {
            Ok(devices) => devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            Err(error) => error.to_string(),
        };
        assert!(devices.starts_with(expected), "{devices}");
    }

    #[test]
    fn local_nodes_have_devices() {
        check_devices("auto", (1, 1), "cpu,cpu");
        check_devices("cuda:0", (1, 1), "cuda:0,cpu");
        check_devices("cuda:1", (2, 1), "cuda:1,cuda:2,cpu,cpu");
        check_devices("cuda:0,cuda:0", (2, 1), "cuda:0,cuda:0,cpu,cpu");
        check_devices("cpu,cuda:0", (1, 1), "cpu,cuda:0");
        check_devices("cuda:0,cuda:1", (1, 2), "--device lists 2 devices: give one for each of 1");
        check_devices("cuda:0,auto", (2, 0), "a list of devices has");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let refused = |change: fn(&mut Specification)| resolve(change).err().expect("refused");
        assert!(refused(|wanted| wanted.topology.hybrid = true).is_bad_usage());
        let crowd = refused(|wanted| wanted.topology.tier2 = Some(1000));
        assert_eq!(crowd.to_string(), "1001 nodes were asked for, and a cluster has at most 256");
        assert!(crowd.is_bad_usage());
        let sizes = |wanted: &mut Specification| wanted.topology.context_memory = vec![1 << 30; 2];
        assert!(refused(sizes).is_bad_usage());
        assert!(refused(|wanted| wanted.threads = Some(100_000)).is_bad_usage());
        assert!(!refused(|wanted| wanted.topology.tier1 = Some(200)).is_bad_usage());
        assert!(!refused(|wanted| wanted.context_max = Some(u32::MAX)).is_bad_usage());
    }
}
