//! A worker process: joins a dispatcher, is told its role, and executes until it is told goodbye.
//! The calling thread computes, or oversees the strands that do; the network controller has another one.

use crate::complaints::Complaints;
use crate::control::{Control, GpuOffer, LocalProcess, Offer, Role};
use crate::error::ClusterError;
use crate::neighbours::Neighbours;
use crate::net::{Config, Controller, Encryption, Event, LINES_MAX, Peer, Token};
use crate::news::WorkerNews;
use crate::processes::keep_to_cores;
use crate::role;
use crate::station::{PATIENCE, Station, dial, keep_introduction, lines_of};
use glinthawk_compute::cuda::{CudaBackend, CudaDevice, CudaModel, pinned_pool};
use glinthawk_compute::{CpuBackend, Isa, Threads, allowed_cores};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_protocol::network_cores;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Idle buffers a worker keeps.
const POOL_BUFFERS: usize = 256;

/// How a worker is started.
#[derive(Clone)]
pub struct WorkerOptions {
    /// The dispatcher's address.
    pub join: String,
    /// The cluster's secret.
    pub token: Token,
    /// Which of its connections are TLS.
    pub encryption: Encryption,
    /// The tier it wants to be in.
    pub tier: Option<u8>,
    /// Its place among the local processes of its tier.
    pub place: Option<u32>,
    /// The GPU that it computes on; none is the CPU.
    pub gpu: Option<CudaDevice>,
    /// The best instruction set it may use.
    pub isa: Isa,
    /// Kernel threads.
    pub threads: usize,
    /// Its cores, and those that loading may use beside, if it shares a machine with processes that wait meanwhile.
    pub cores: Option<[Vec<usize>; 2]>,
    /// Memory for contexts, in bytes. A GPU has at most what weights and buffers leave.
    pub memory_bytes: u64,
    /// Whether it looks for the dispatcher for as long as it takes.
    pub patient: bool,
    /// Set when it has a role, and can leave it in order.
    pub has_role: Arc<AtomicBool>,
    /// Set by somebody who wants it to leave its role in order.
    pub leaving: Arc<AtomicBool>,
    /// Hears what it does.
    pub news: fn(WorkerNews<'_>),
}

/// Runs a worker to its end.
pub fn work(options: &WorkerOptions) -> Result<(), ClusterError> {
    let pool = Arc::new(match &options.gpu {
        Some(gpu) => pinned_pool(gpu, POOL_BUFFERS),
        None => Pool::new(POOL_BUFFERS),
    });
    let name = format!("worker-{}", std::process::id());
    let config = Config {
        encryption: options.encryption,
        ..Config::new(&name, options.token.clone(), Arc::clone(&pool))
    };
    let controller = Arc::new(
        Controller::start(config).map_err(ClusterError::io("cannot start the network thread"))?,
    );
    allow_files();
    // A neighbour may have its role before this worker has.
    controller.allow_lines(LINES_MAX);
    (options.news)(WorkerNews::Dialling(&options.join));
    let patience = if options.patient { Duration::MAX } else { PATIENCE };
    let dispatcher = dial(&controller, &options.join, patience)?;
    let port = controller
        .listen((own_address(&controller, dispatcher), 0))
        .map_err(ClusterError::io("cannot listen for other workers"))?
        .port();
    let offer = Offer {
        tier: options.tier,
        local: options.place.map(|place| LocalProcess { place, id: std::process::id() }),
        threads: options.threads as u32,
        kind: match &options.gpu {
            Some(gpu) => gpu.kind(),
            None => options.isa.kind(),
        },
        gpu: options.gpu.as_ref().map(GpuOffer::of).transpose()?,
        page_positions: match &options.gpu {
            Some(_) => vec![CudaModel::PAGE_POSITIONS],
            None => options.isa.page_positions().to_vec(),
        },
        memory_bytes: options.memory_bytes,
        port,
    };
    controller.send(dispatcher, Control::Offer(offer).message(Buffer::default()))?;
    let mut stash = VecDeque::new();
    let Some(role) = wait_for_role(&controller, dispatcher, &mut stash)? else {
        (options.news)(WorkerNews::NotNeeded);
        return Ok(());
    };
    options.has_role.store(true, Ordering::Relaxed);
    controller.allow_lines(lines_of(role.layout.strands));
    (options.news)(WorkerNews::Joined(&role));
    let threads = Arc::new(kernel_threads(options, &role, &controller)?);
    let station = Arc::new(Station {
        controller,
        dispatcher,
        neighbours: Neighbours::new(&role),
        leaving: Arc::clone(&options.leaving),
        said_leaving: AtomicBool::new(false),
        role,
        threads: Arc::clone(&threads),
        news: options.news,
        stash: Mutex::new(stash),
        complaints: Mutex::new(Complaints::new()),
    });
    let outcome = match &options.gpu {
        Some(gpu) => {
            let loaders = loaders(options, threads)?;
            role::run(&station, CudaBackend::new(gpu.clone(), loaders, pool))
        }
        None => {
            let isa = Isa::of_kind(&station.role.kind)?;
            let backend = CpuBackend { isa, threads, pool };
            match station.role.layout.strands {
                1 => role::run(&station, backend),
                _ => role::run_strands(&station, backend, options.threads),
            }
        }
    };
    if let Err(error) = &outcome {
        // If this does not get through either, the lost connection says enough.
        _ = station.tell_dispatcher(&Control::Failed(error.to_string()));
    }
    station.controller.shutdown();
    options.has_role.store(false, Ordering::Relaxed);
    outcome
}

/// Lets this process open as many files as it may. Every strand has a connection with each of its neighbours.
fn allow_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If it is refused and files run out, connections are refused for that reason.
    _ = setrlimit(Resource::Nofile, limit);
}

/// The threads of a worker's kernels. A Tier-2 node on many cores leaves some of them to its network threads: a kernel
/// thread that shares its core with one of these keeps all others waiting.
fn kernel_threads(
    options: &WorkerOptions,
    role: &Role,
    controller: &Controller,
) -> Result<Threads, ClusterError> {
    let mut cores = allowed_cores();
    let shares_all = options.gpu.is_none() && cores.len() == options.threads;
    let attends_only = role.lane.is_some() && role.layout.strands == 1;
    let left = network_cores(cores.len());
    if shares_all && attends_only && !role.layout.shares_cores && left > 0 {
        controller.keep_to(cores.split_off(cores.len() - left));
        keep_to_cores(&cores)?;
        return Ok(Threads::new(cores.len())?);
    }
    Ok(Threads::new(options.threads)?)
}

/// The threads that load weights onto a GPU: one on each core that it may use. They sleep once that is done.
fn loaders(options: &WorkerOptions, own: Arc<Threads>) -> Result<Arc<Threads>, ClusterError> {
    let Some([cores, more]) = &options.cores else { return Ok(own) };
    let all: Vec<usize> = cores.iter().chain(more).copied().collect();
    keep_to_cores(&all)?;
    let loaders = Threads::new(all.len());
    keep_to_cores(cores)?;
    Ok(Arc::new(loaders?))
}

/// The role, or `None` if the job ended without this worker.
fn wait_for_role(
    controller: &Controller,
    dispatcher: Peer,
    stash: &mut VecDeque<Event>,
) -> Result<Option<Role>, ClusterError> {
    loop {
        match controller.recv(PATIENCE) {
            Some(Event::Message { peer, message, .. }) if peer == dispatcher => {
                return match Control::read(&message)? {
                    Control::Role(role) if role.makes_sense() => Ok(Some(*role)),
                    Control::Leave => Ok(None),
                    _ => Err(ClusterError::Control("a role that makes no sense".to_owned())),
                };
            }
            Some(Event::Lost { peer, reason }) if peer == dispatcher => {
                return Err(ClusterError::DispatcherLost(reason.to_string()));
            }
            // A neighbour may have its role already, and be here first.
            Some(event) => keep_introduction(controller, stash, event),
            None => {}
        }
    }
}

/// The address at which neighbours find this worker: the unspecified one of the dispatcher's
/// family, or the loopback if the dispatcher is on it too.
fn own_address(controller: &Controller, dispatcher: Peer) -> IpAddr {
    let peers = controller.stats();
    let address =
        peers.iter().find(|stats| stats.peer == dispatcher).map(|stats| stats.address.ip());
    match address {
        Some(address) if address.is_loopback() => address,
        Some(IpAddr::V6(_)) => IpAddr::from(std::net::Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::from(std::net::Ipv4Addr::UNSPECIFIED),
    }
}
