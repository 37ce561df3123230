//! From what was resolved to a running engine.

use crate::cores::thread_kernels;
use crate::error::LaunchError;
use crate::joined::promises;
use crate::news::{LaunchNews, Tell};
use crate::opened::Opened;
use crate::resolved::Resolved;
use crate::secret::{cluster_secret, encryption, random};
use glinthawk_cluster::net::Token;
use glinthawk_cluster::{
    ClusterError, ClusterSpec, EndProcess, Engine, Fabric, GpuFabric, Kernels, Kinds, Layout,
    LocalFabric, LocalWorker, Muster, Offered, Processes, Restarts,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a pipeline waits for another worker in a lost Tier-1 node's place, unless somebody says.
const REPLACE_WITHIN: Duration = Duration::from_secs(60);

/// An engine and the local processes it runs on, if any: they end after it.
pub struct Running {
    _restarts: Option<Restarts>,
    /// The engine.
    pub engine: Engine,
    /// What its kernels run on, which decides the bits of its results.
    pub kinds: Kinds,
    _processes: Option<Processes>,
}

/// Launches an engine: here, in local processes, or with workers from elsewhere, until it is interrupted.
pub fn launch(
    opened: &Opened,
    resolved: &Resolved,
    interrupted: &AtomicBool,
    tell: Tell<'_>,
) -> Result<Running, LaunchError> {
    match resolved.topology.is_one_process() {
        true => launch_here(opened, resolved, tell),
        false => launch_cluster(opened, resolved, interrupted, tell),
    }
}

/// Loads the engine in this process.
fn launch_here(
    opened: &Opened,
    resolved: &Resolved,
    tell: Tell<'_>,
) -> Result<Running, LaunchError> {
    let Resolved { layout, isa, threads, trace, .. } = resolved;
    let decided = "one process knows its memory";
    let memory_bytes = resolved.memory_bytes.expect(decided);
    let pages = resolved.lane_pages(opened)?.expect(decided);
    let kernels = Kernels { isa: *isa, threads: *threads };
    let show = &mut |done, total| tell(LaunchNews::Loading(done, total));
    let model = &opened.model;
    let fabric: Box<dyn Fabric> = match &opened.device {
        Some(gpu) => Box::new(GpuFabric::load(model, layout, pages, gpu, *threads, *trace, show)?),
        None => Box::new(LocalFabric::load(model, layout, pages, kernels, *trace, show)?),
    };
    let kinds = opened.kinds(*isa, &resolved.topology)?;
    let setting = resolved.setting(opened, layout, &kinds, *threads, memory_bytes);
    let lane_pages = vec![pages; layout.lanes()];
    let engine = Engine::new(fabric, model.config(), layout, lane_pages, setting);
    Ok(Running { _restarts: None, engine, kinds, _processes: None })
}

/// Gathers a cluster, starting its workers first unless they come from elsewhere.
fn launch_cluster(
    opened: &Opened,
    resolved: &Resolved,
    interrupted: &AtomicBool,
    tell: Tell<'_>,
) -> Result<Running, LaunchError> {
    let Resolved { layout, topology, memory_bytes, .. } = resolved;
    let token = match topology.listen {
        Some(_) => cluster_secret(topology.secret_file.as_deref())?,
        None => random(),
    };
    let address = topology.listen.as_deref().unwrap_or("127.0.0.1:0");
    let (muster, bound) =
        Muster::listen(address, Token::new(&token), encryption(topology.insecure))?;
    let (tier1, tier2) = layout.nodes();
    let workers = tier1 + tier2 + topology.spares as usize;
    let own_memory_bytes = topology.own_memory_bytes();
    let mut processes = match topology.listen {
        Some(_) => {
            tell(LaunchNews::Listening(bound, workers));
            None
        }
        None => {
            let executable = std::env::current_exe().map_err(LaunchError::Executable)?;
            let memory_bytes = memory_bytes.expect("local workers are given theirs");
            let workers = opened.local.iter().zip(&resolved.cores).enumerate();
            let workers = workers.map(|(node, ((device, gpu), cores))| LocalWorker {
                tier: if node < tier1 { 1 } else { 2 },
                device: device.to_string(),
                cores: *cores,
                memory_bytes: match gpu {
                    _ if own_memory_bytes.is_some() && node < tier1 => own_memory_bytes,
                    Some(_) => resolved.memory_wanted_bytes,
                    None => Some(memory_bytes),
                },
            });
            let workers: Vec<LocalWorker> = workers.collect();
            Some(Processes::start(&executable, &workers, bound, &token)?)
        }
    };
    let settle = |workers: &[Offered]| settle(opened, resolved, workers, tell);
    let spec = ClusterSpec {
        layout: layout.clone(),
        crowd: topology.listen.is_some().then_some(resolved.crowd),
        settle: if topology.is_open() { Some(&settle) } else { None },
        model: &opened.model,
        identity: opened.weights_identity(tell),
        model_name: resolved.model.clone(),
        isa: resolved.isa_wanted,
        own_batch: resolved.own_batch,
        context_memory_bytes: resolved.memory_wanted_bytes,
        own_memory_bytes,
        spares: topology.spares as usize,
        replace_within: topology.replace_within.unwrap_or(REPLACE_WITHIN),
        end_process: processes.as_ref().map(|processes| Box::new(processes.end()) as EndProcess),
        link: topology.link(),
        trace: resolved.trace,
    };
    let mut restarts = None;
    let mustered = muster.assemble(spec, &mut |count, loading| {
        if interrupted.load(Ordering::Relaxed) {
            return Err(ClusterError::Interrupted);
        }
        tell(match loading {
            true => LaunchNews::Ready(count, workers),
            false => LaunchNews::Joined(count, workers),
        });
        let Some(processes) = &mut processes else { return Ok(()) };
        // One that ends before it has a role would end again.
        if loading && restarts.is_none() {
            restarts = Some(processes.restart()?);
        }
        processes.check()
    })?;
    if mustered.kinds.are_mixed() {
        tell(LaunchNews::MixedKinds(&mustered.kinds));
    }
    let kinds = mustered.kinds;
    let memory_bytes = mustered.context_memory_bytes;
    let (fabric, layout) = (Box::new(mustered.fabric), &mustered.layout);
    let setting = resolved.setting(opened, layout, &kinds, mustered.threads, memory_bytes);
    let engine = Engine::new(fabric, opened.model.config(), layout, mustered.lane_pages, setting);
    Ok(Running { _restarts: restarts, engine, kinds, _processes: processes })
}

/// The shape that promises most on these workers, where nobody has said what they should be.
fn settle(
    opened: &Opened,
    resolved: &Resolved,
    workers: &[Offered],
    tell: Tell<'_>,
) -> Option<Layout> {
    let config = opened.model.config();
    let kernels = thread_kernels(config, opened.model.name(), resolved.isa);
    let Resolved { layout, crowd, .. } = resolved;
    let flights = resolved.flights_wanted.then_some(layout.flights);
    let promises = promises(layout, config, &Arc::new(kernels), *crowd, flights, workers);
    let (best, others) = promises.split_first()?;
    tell(LaunchNews::Settled(best.1, others.first().map(|(_, promise)| *promise)));
    Some(best.0.clone())
}
