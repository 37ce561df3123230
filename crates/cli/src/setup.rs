//! From options to a loaded engine.

use crate::args::{ClusterArgs, EngineArgs, MergeArg, Usage};
use crate::progress::{LoadBar, MusterBar};
use crate::{device, models, units};
use anyhow::{Context, anyhow, bail};
use glinthawk_cluster::net::Token;
use glinthawk_cluster::{
    ClusterError, ClusterSpec, Crowd, Engine, GpuFabric, Kernels, Layout, Link, LocalFabric,
    Muster, Processes, Setting, TOKEN_VARIABLE, allowed_cores, free_memory_bytes,
};
use glinthawk_compute::cuda::{CudaDevice, CudaModel};
use glinthawk_compute::{ContextType, CpuContext, Isa};
use glinthawk_flight::PAGE_POSITIONS;
use glinthawk_jobs::ServedModel;
use glinthawk_model::catalogue::ResolvedModel;
use glinthawk_model::{ChatTemplate, Identity, Model, Tokenizer};
use glinthawk_plan::Shape;
use std::env::VarError;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Rows of a GPU's batch: enough that products are limited by operations, not by reading weights.
const GPU_BATCH: u32 = 4096;

/// A model, opened, with what its text needs.
pub struct Opened {
    /// The weights.
    pub model: Model,
    /// Tokenizer, template and limits. Its identity is still empty: a job needs `identified`.
    pub served: Arc<ServedModel>,
    /// The GPU that it will run on; none is the CPU.
    pub device: Option<CudaDevice>,
    weights_identity: OnceLock<Identity>,
}

impl Opened {
    /// The identity of the weights; hashes them unless that was done before.
    fn weights_identity(&self) -> Identity {
        *self.weights_identity.get_or_init(|| {
            let mut bar = LoadBar::checking();
            let identity =
                Identity::of_weights(&self.model, &mut |done, total| bar.show(done, total));
            bar.clear();
            identity
        })
    }

    /// The served model with the identity of everything that decides its results here.
    pub fn identified(&self, isa: Isa, context_type: ContextType) -> Arc<ServedModel> {
        let mut served = ServedModel::clone(&self.served);
        let (tokenizer, template) = (&served.tokenizer, served.template.as_ref());
        let model = Identity::of_model(self.weights_identity(), tokenizer, template);
        // Bits differ between kinds of kernels.
        let kind = self.device.as_ref().map_or_else(|| isa.to_string(), CudaDevice::kind);
        served.identity =
            format!("{model}, {context_type} contexts, {kind}, ends {:?}", served.eos_tokens);
        Arc::new(served)
    }
}

/// Finds and opens the model the options name.
pub fn open(args: &EngineArgs) -> anyhow::Result<Opened> {
    let device = device::choose(args.device)?;
    let resolved = models::resolve(&args.model)?;
    let model = resolved.open()?;
    let served = Arc::new(served(&args.model, args.max_context, &resolved, &model)?);
    Ok(Opened { model, served, device, weights_identity: OnceLock::new() })
}

/// Opens what a model's text needs, and nothing that takes as long as its weights are large.
pub fn open_text(name: &str, max_context: Option<u32>) -> anyhow::Result<ServedModel> {
    let resolved = models::resolve(name)?;
    let model = resolved.open()?;
    served(name, max_context, &resolved, &model)
}

fn served(
    name: &str,
    max_context: Option<u32>,
    resolved: &ResolvedModel,
    model: &Model,
) -> anyhow::Result<ServedModel> {
    let config = model.config();
    let (tokenizer, template) = match resolved {
        ResolvedModel::Path(_) => (Tokenizer::of(model)?, ChatTemplate::of(model)?),
        ResolvedModel::Dummy(_) => (Tokenizer::bytes(config.vocab), None),
    };
    let context_max = match max_context {
        Some(wanted) if wanted as usize > config.context_max => bail!(
            "--max-context {wanted} is more than the model was made for: {} tokens",
            config.context_max
        ),
        Some(wanted) => wanted,
        None => config.context_max as u32,
    };
    let mut eos_tokens = config.eos_tokens.clone();
    eos_tokens.extend(tokenizer.eos_tokens());
    eos_tokens.sort_unstable();
    eos_tokens.dedup();
    Ok(ServedModel {
        name: served_name(name),
        identity: String::new(),
        tokenizer,
        template,
        vocab: config.vocab as u32,
        context_max,
        eos_tokens,
    })
}

/// The model's name in results: its file's or folder's own name, else the name the user gave.
fn served_name(asked: &str) -> String {
    let path = Path::new(asked);
    let own = path
        .canonicalize()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    own.unwrap_or_else(|| asked.to_owned())
}

/// Loads the engine the options describe, in this process.
pub fn load(args: &EngineArgs, opened: &Opened, crowd: Crowd) -> anyhow::Result<Engine> {
    load_local(args, opened, crowd, MergeArg::Ready, false)
}

/// Loads the engine in this process; with `trace`, it records a timeline.
fn load_local(
    args: &EngineArgs,
    opened: &Opened,
    crowd: Crowd,
    merge: MergeArg,
    trace: bool,
) -> anyhow::Result<Engine> {
    if let Some(device) = &opened.device {
        return load_on_gpu(args, opened, device, trace);
    }
    let memory_bytes = memory_bytes(args, opened, 1)?;
    let layout = local_layout(args, opened, crowd, merge, memory_bytes)?;
    let kernels = Kernels { isa: isa(args.isa)?, threads: threads(args.threads)? };
    let lane_bytes = memory_bytes / layout.local_lanes as u64;
    let pages = layout.pages(opened.model.config(), 0, lane_bytes)?;
    let mut bar = LoadBar::new();
    let show = &mut |done, total| bar.show(done, total);
    let fabric = LocalFabric::load(&opened.model, &layout, pages, kernels, trace, show);
    bar.clear();
    let setting = setting(opened, &layout, kernels, memory_bytes);
    Ok(Engine::new(Box::new(fabric?), &layout, vec![pages; layout.local_lanes], setting))
}

/// Loads the engine on a GPU, which holds the whole model and, unless told otherwise, contexts in all that is left.
fn load_on_gpu(
    args: &EngineArgs,
    opened: &Opened,
    device: &CudaDevice,
    trace: bool,
) -> anyhow::Result<Engine> {
    if args.context_type != ContextType::Bf16 {
        bail!("a GPU keeps contexts in bf16 only: leave --context-type out, or use --device cpu");
    }
    let config = opened.model.config();
    let layout = gpu_layout(args, opened);
    let beside = CudaModel::bytes_beside_pages(config, &GpuFabric::limits(&layout, 0)) as u64;
    let free = device.memory_free_bytes()?;
    let Some(left) = free.checked_sub(beside) else {
        bail!(
            "the model takes {} beside its contexts, and the GPU has {} free: use --device cpu, or a smaller --batch",
            units::bytes(beside),
            units::bytes(free)
        );
    };
    let memory_bytes = args.context_memory.unwrap_or(left).min(left);
    let pages = layout.pages(config, 0, memory_bytes)?;
    let threads = threads(args.threads)?;
    let mut bar = LoadBar::new();
    let show = &mut |done, total| bar.show(done, total);
    let fabric = GpuFabric::load(&opened.model, &layout, pages, device, threads, trace, show);
    bar.clear();
    let kernels = Kernels { isa: isa(args.isa)?, threads };
    let setting = Setting {
        backend: "cuda",
        instruction_set: device.kind(),
        ..setting(opened, &layout, kernels, memory_bytes)
    };
    Ok(Engine::new(Box::new(fabric?), &layout, vec![pages], setting))
}

fn gpu_layout(args: &EngineArgs, opened: &Opened) -> Layout {
    Layout {
        slices: 1,
        remote_lanes: 0,
        local_lanes: 1,
        batch: args.batch.unwrap_or(GPU_BATCH),
        flights: args.flights.unwrap_or(1),
        chunk: args.chunk,
        context_max: opened.served.context_max,
        context_type: args.context_type,
        whole_flights: false,
    }
}

/// An engine and the local processes it runs on, if any: they end after it.
pub struct Cluster {
    /// The engine.
    pub engine: Engine,
    /// The instruction set of all its kernels.
    pub isa: Isa,
    _processes: Option<Processes>,
}

/// Starts the engine the options describe: here, in local processes, or with workers from elsewhere.
pub fn start(
    args: &EngineArgs,
    cluster: &ClusterArgs,
    opened: &Opened,
    crowd: Crowd,
    interrupted: &AtomicBool,
) -> anyhow::Result<Cluster> {
    if cluster.is_one_process() {
        let engine = load_local(args, opened, crowd, cluster.merge, cluster.trace.is_some())?;
        return Ok(Cluster { engine, isa: isa(args.isa)?, _processes: None });
    }
    let layout = cluster_layout(args, cluster, opened)?;
    let token = match cluster.listen {
        Some(_) => token()?,
        None => random_token(),
    };
    let address = cluster.listen.as_deref().unwrap_or("127.0.0.1:0");
    let (muster, bound) = Muster::listen(address, Token::new(&token))?;
    let attending = layout.slices * layout.lanes();
    let memory_bytes = match (args.context_memory, &cluster.listen) {
        (None, Some(_)) => None,
        _ => Some(memory_bytes(args, opened, attending)?),
    };
    let mut processes = match cluster.listen {
        Some(_) => None,
        None => {
            let executable =
                std::env::current_exe().context("cannot find this program's own file")?;
            let memory_bytes = memory_bytes.expect("local workers are given theirs");
            Some(Processes::start(&executable, &layout, bound, &token, memory_bytes)?)
        }
    };
    let spec = ClusterSpec {
        layout: layout.clone(),
        model: &opened.model,
        identity: opened.weights_identity(),
        model_name: args.model.clone(),
        isa: isa(args.isa)?,
        context_memory_bytes: memory_bytes,
        link: Link {
            delay: cluster.delay.unwrap_or_default(),
            bytes_per_second: cluster.bandwidth,
        },
        trace: cluster.trace.is_some(),
    };
    let mut bar =
        MusterBar::new(layout.slices * (1 + layout.remote_lanes), bound, cluster.listen.is_some());
    let mustered = muster.assemble(&spec, &mut |count, loading| {
        if interrupted.load(Ordering::Relaxed) {
            return Err(ClusterError::Interrupted);
        }
        bar.show(count, loading);
        processes.as_mut().map_or(Ok(()), Processes::check)
    });
    bar.clear();
    let mustered = mustered?;
    let kernels = Kernels { isa: mustered.isa, threads: mustered.threads };
    let setting = setting(opened, &layout, kernels, mustered.context_memory_bytes);
    let engine = Engine::new(Box::new(mustered.fabric), &layout, mustered.lane_pages, setting);
    Ok(Cluster { engine, isa: kernels.isa, _processes: processes })
}

/// The shape of the engine that the options describe.
pub fn layout(
    args: &EngineArgs,
    cluster: &ClusterArgs,
    opened: &Opened,
    crowd: Crowd,
) -> anyhow::Result<Layout> {
    if cluster.is_one_process() {
        let memory_bytes = memory_bytes(args, opened, 1)?;
        return local_layout(args, opened, crowd, cluster.merge, memory_bytes);
    }
    cluster_layout(args, cluster, opened)
}

fn local_layout(
    args: &EngineArgs,
    opened: &Opened,
    crowd: Crowd,
    merge: MergeArg,
    memory_bytes: u64,
) -> anyhow::Result<Layout> {
    let layout = Layout {
        slices: 1,
        remote_lanes: 0,
        local_lanes: 1,
        batch: args.batch(),
        flights: args.flights.unwrap_or(1),
        chunk: args.chunk,
        context_max: opened.served.context_max,
        context_type: args.context_type,
        whole_flights: merge == MergeArg::Flights,
    };
    let threads = threads(args.threads)?;
    Ok(layout.with_local_lanes(opened.model.config(), threads, memory_bytes, crowd))
}

/// Memory for the contexts of each of this many processes that attend on this machine: as asked for, else half of
/// what the weights leave. A longest context must fit, so it may be more than half.
pub fn memory_bytes(args: &EngineArgs, opened: &Opened, attending: usize) -> anyhow::Result<u64> {
    if let Some(bytes) = args.context_memory {
        return Ok(bytes);
    }
    let config = opened.model.config();
    let weights = Shape::of(opened.model.name(), config).model_bytes() as u64;
    let each = free_memory()?.saturating_sub(weights) / attending as u64;
    let page = CpuContext::page_bytes(config, config.layers, args.context_type) as u64;
    let longest = page * u64::from(opened.served.context_max.div_ceil(PAGE_POSITIONS));
    Ok((each / 2).max(longest.min(each / 10 * 9)))
}

fn cluster_layout(
    args: &EngineArgs,
    cluster: &ClusterArgs,
    opened: &Opened,
) -> anyhow::Result<Layout> {
    let (slices, remote_lanes) = cluster.nodes()?;
    if slices > opened.model.config().layers {
        let layers = units::counted(opened.model.config().layers as u64, "layer");
        bail!("--tier1 {slices} is more than the model's {layers}");
    }
    Ok(Layout {
        slices,
        remote_lanes,
        local_lanes: usize::from(cluster.hybrid || remote_lanes == 0),
        batch: args.batch(),
        flights: args.flights.unwrap_or(3 * slices as u32),
        chunk: args.chunk,
        context_max: opened.served.context_max,
        context_type: args.context_type,
        whole_flights: cluster.merge == MergeArg::Flights,
    })
}

/// A secret for processes of this machine only.
fn random_token() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// What the options describe, for a run that has nothing to do: nothing is loaded, and no memory is taken.
pub fn idle(args: &EngineArgs, cluster: &ClusterArgs, opened: &Opened) -> anyhow::Result<Setting> {
    let isa = isa(args.isa)?;
    if let Some(device) = &opened.device {
        let kernels = Kernels { isa, threads: threads(args.threads)? };
        let setting = setting(opened, &gpu_layout(args, opened), kernels, 0);
        return Ok(Setting { backend: "cuda", instruction_set: device.kind(), ..setting });
    }
    let layout = layout(args, cluster, opened, Crowd::UNKNOWN)?;
    let threads = match cluster.is_one_process() {
        true => threads(args.threads)?,
        false => (allowed_cores().len() / (layout.slices * (1 + layout.remote_lanes))).max(1),
    };
    Ok(setting(opened, &layout, Kernels { isa, threads }, 0))
}

fn setting(opened: &Opened, layout: &Layout, kernels: Kernels, memory_bytes: u64) -> Setting {
    let config = opened.model.config();
    Setting {
        model: opened.served.name.clone(),
        backend: "cpu",
        instruction_set: kernels.isa.name().to_owned(),
        threads: kernels.threads,
        tier1_nodes: layout.slices,
        tier2_nodes: layout.remote_lanes,
        tier1_attends: layout.local_lanes > 0,
        lanes: layout.lanes(),
        batch: layout.batch,
        flights: layout.flights,
        chunk: layout.chunk,
        context_memory_bytes: memory_bytes,
        context_type: layout.context_type.name(),
        page_bytes: CpuContext::page_bytes(config, config.layers, layout.context_type) as u64,
        max_context: layout.context_max,
    }
}

/// The instruction set of this name, or the best of this machine.
pub fn isa(wanted: Option<Isa>) -> anyhow::Result<Isa> {
    let isa = wanted.unwrap_or_else(Isa::detect);
    isa.require()?;
    Ok(isa)
}

/// The most threads per core that may be asked for: more only get in each other's way.
const THREADS_PER_CORE_MAX: usize = 4;

/// As many threads as asked for, or as there are cores.
pub fn threads(wanted: Option<u32>) -> anyhow::Result<usize> {
    let cores =
        std::thread::available_parallelism().context("cannot count this machine's cores")?.get();
    let threads = wanted.map_or(cores, |threads| threads as usize);
    if threads > cores * THREADS_PER_CORE_MAX {
        bail!(Usage(format!(
            "--threads {threads} is too many: this process may use {}, so give at most {}",
            units::counted(cores as u64, "core"),
            cores * THREADS_PER_CORE_MAX
        )));
    }
    Ok(threads)
}

/// Fails if the folder of a file that is to be written later does not exist.
pub fn require_folder(option: &str, path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    match path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        Some(folder) => bail!(
            "cannot create {option} {}: folder {} does not exist",
            path.display(),
            folder.display()
        ),
        None => Ok(()),
    }
}

/// The cluster's secret.
pub fn token() -> anyhow::Result<String> {
    std::env::var(TOKEN_VARIABLE).map_err(|error| match error {
        VarError::NotPresent => anyhow!(
            "{TOKEN_VARIABLE} is not set. It holds the cluster's secret, the same on the dispatcher and on every worker, \
             so that no stranger joins: make one up and export {TOKEN_VARIABLE}=... on all of them"
        ),
        VarError::NotUnicode(_) => anyhow!("{TOKEN_VARIABLE} is not text: use letters and digits"),
    })
}

/// Memory that this process and those it starts may still take.
pub fn free_memory() -> anyhow::Result<u64> {
    free_memory_bytes().context("cannot tell how much memory is free: give --context-memory")
}
