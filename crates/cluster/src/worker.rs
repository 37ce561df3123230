//! A worker process: joins a dispatcher, is told its role, and executes until it is told goodbye.
//! The calling thread is its compute thread; the network controller has the other one.

use crate::control::{Control, Link, Offer, Role};
use crate::error::ClusterError;
use crate::net::{Config, ConnectError, Controller, Event, LinkShape, LostReason, Peer, Token};
use crate::report::{NodeReport, peak_memory_bytes};
use crate::weights::model_of;
use crate::{node1, node2};
use glinthawk_compute::{Isa, Threads};
use glinthawk_flight::{Buffer, Kind, Message, Pool};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a worker tries to reach its dispatcher or its neighbour.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two tries.
const RETRY: Duration = Duration::from_millis(100);

/// Idle buffers a worker keeps.
const POOL_BUFFERS: usize = 256;

/// How a worker is started.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The dispatcher's address.
    pub join: String,
    /// The cluster's secret.
    pub token: Token,
    /// The tier it wants to be in.
    pub tier: Option<u8>,
    /// Its place among the local processes of its tier.
    pub place: Option<u32>,
    /// The best instruction set it may use.
    pub isa: Isa,
    /// Kernel threads.
    pub threads: usize,
    /// Memory for contexts, in bytes.
    pub memory_bytes: u64,
}

/// What every role needs.
pub(crate) struct Station {
    pub controller: Controller,
    pub dispatcher: Peer,
    pub role: Role,
    pub isa: Isa,
    pub threads: Arc<Threads>,
    pub pool: Arc<Pool>,
    /// Events that came while something else was waited for.
    pub stash: Mutex<VecDeque<Event>>,
}

/// Runs a worker to its end.
pub fn work(options: &WorkerOptions) -> Result<(), ClusterError> {
    let pool = Arc::new(Pool::new(POOL_BUFFERS));
    let name = format!("worker-{}", std::process::id());
    let controller =
        Controller::start(Config::new(&name, options.token.clone(), Arc::clone(&pool)))
            .map_err(ClusterError::io("cannot start the network thread"))?;
    let dispatcher = dial(&controller, &options.join)?;
    let port = controller
        .listen((own_address(&controller, dispatcher), 0))
        .map_err(ClusterError::io("cannot listen for other workers"))?
        .port();
    let offer = Offer {
        tier: options.tier,
        place: options.place,
        threads: options.threads as u32,
        isa: options.isa.name().to_owned(),
        memory_bytes: options.memory_bytes,
        port,
    };
    controller.send(dispatcher, Control::Offer(offer).message(Buffer::default()))?;
    let mut stash = VecDeque::new();
    let role = wait_for_role(&controller, dispatcher, &mut stash)?;
    let threads = Arc::new(Threads::new(options.threads)?);
    let isa: Isa = role.isa.parse()?;
    let station = Arc::new(Station {
        controller,
        dispatcher,
        role,
        isa,
        threads,
        pool,
        stash: Mutex::new(stash),
    });
    let outcome = run(&station);
    if let Err(error) = &outcome {
        // If this does not get through either, the lost connection tells.
        let _ = station.tell_dispatcher(&Control::Failed(error.to_string()));
    }
    station.controller.shutdown();
    outcome
}

fn run(station: &Arc<Station>) -> Result<(), ClusterError> {
    let model = model_of(station)?;
    match station.role.lane {
        None => node1::run(station, &model),
        Some(lane) => node2::run(station, lane),
    }
}

fn wait_for_role(
    controller: &Controller,
    dispatcher: Peer,
    stash: &mut VecDeque<Event>,
) -> Result<Role, ClusterError> {
    loop {
        match controller.recv(PATIENCE) {
            Some(Event::Message { peer, message, .. }) if peer == dispatcher => {
                if let Control::Role(role) = Control::read(&message)? {
                    return Ok(*role);
                }
            }
            Some(Event::Lost { peer, reason }) if peer == dispatcher => {
                return Err(ClusterError::DispatcherLost(reason.to_string()));
            }
            // A neighbour may have its role already, and be here first.
            Some(event) => stash.push_back(event),
            None => {}
        }
    }
}

/// Dials until somebody answers, for a while.
fn dial(controller: &Controller, address: &str) -> Result<Peer, ClusterError> {
    let started = Instant::now();
    loop {
        match controller.connect(address) {
            Ok((peer, _)) => return Ok(peer),
            Err(ConnectError::Unreachable { .. }) if started.elapsed() < PATIENCE => {
                std::thread::sleep(RETRY)
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The address at which neighbours find this worker: the unspecified one of the dispatcher's
/// family, or the loopback where the dispatcher is on it too.
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

/// What a role does with an event.
pub(crate) enum Heard {
    /// A message of the data plane.
    Message(Peer, Message, Instant),
    /// The dispatcher wants the report.
    ReportWanted,
    /// The job is over.
    Over,
    /// Nothing the role need know.
    Nothing,
}

impl Station {
    /// The next event, waiting for at most `wait`.
    pub(crate) fn hear(&self, wait: Duration) -> Result<Option<Heard>, ClusterError> {
        let stashed = self.stash.lock().expect("no panic with the stash").pop_front();
        match stashed.or_else(|| self.controller.recv(wait)) {
            None => Ok(None),
            Some(event) => self.understand(event).map(Some),
        }
    }

    fn understand(&self, event: Event) -> Result<Heard, ClusterError> {
        match event {
            Event::Joined { .. } => Ok(Heard::Nothing),
            Event::Message { peer, message, .. }
                if message.kind() == Kind::Control && peer == self.dispatcher =>
            {
                match Control::read(&message)? {
                    Control::Report => Ok(Heard::ReportWanted),
                    other => Err(ClusterError::Control(format!("a worker was sent {other:?}"))),
                }
            }
            Event::Message { peer, message, received_at } => {
                Ok(Heard::Message(peer, message, received_at))
            }
            Event::Lost { peer, reason: LostReason::Goodbye } if peer == self.dispatcher => {
                Ok(Heard::Over)
            }
            // Neighbours leave when the dispatcher does; its goodbye is on the way.
            Event::Lost { reason: LostReason::Goodbye, .. } => Ok(Heard::Nothing),
            Event::Lost { peer, reason } if peer == self.dispatcher => {
                Err(ClusterError::DispatcherLost(reason.to_string()))
            }
            Event::Lost { peer, reason } => Err(ClusterError::Lost {
                name: format!("at the other end of {peer}"),
                reason: reason.to_string(),
            }),
        }
    }

    pub(crate) fn tell_dispatcher(&self, control: &Control) -> Result<(), ClusterError> {
        Ok(self.controller.send(self.dispatcher, control.message(Buffer::default()))?)
    }

    /// Dials the neighbour of the role and says who is calling.
    pub(crate) fn dial_neighbour(
        &self,
        introduction: Option<u32>,
    ) -> Result<Option<Peer>, ClusterError> {
        let Some(address) = &self.role.dial else { return Ok(None) };
        let peer = dial(&self.controller, address)?;
        self.controller.send(peer, Control::Introduce(introduction).message(Buffer::default()))?;
        Ok(Some(peer))
    }

    /// Makes the way to a node of the other tier as slow as it was asked for.
    pub(crate) fn shape(&self, peer: Peer) {
        let Link { delay, bytes_per_second } = self.role.link;
        if delay > Duration::ZERO || bytes_per_second.is_some() {
            self.controller.shape(peer, LinkShape { delay, bytes_per_second });
        }
    }

    /// Sends this process's reports, its traffic with the first.
    pub(crate) fn send_reports(&self, mut reports: Vec<NodeReport>) -> Result<(), ClusterError> {
        reports[0].set_traffic(&self.controller.stats());
        reports[0].peak_memory_bytes = peak_memory_bytes();
        self.tell_dispatcher(&Control::Reported(reports))
    }
}
