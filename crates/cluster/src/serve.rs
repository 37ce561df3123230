//! A worker's nodes on the network: parcels for nodes elsewhere are messages.

use crate::control::Control;
use crate::error::ClusterError;
use crate::net::Peer;
use crate::news::WorkerNews;
use crate::nodes::{self, Nodes};
use crate::payload::Payload;
use crate::station::{Heard, IDLE, Station};
use crate::tier1_kernels::Tier1Place;
use crate::weights::model_of;
use crate::wire;
use glinthawk_compute::Backend;
use glinthawk_flight::{Kind, Message};
use glinthawk_protocol::{Attend, Launch, NodeAddress, Outgoing, Parcel, Started};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a worker looks whether its device is done before it sleeps between two looks, and for how long it sleeps.
const LOOKS: u32 = 64;
const NAP: Duration = Duration::from_micros(20);

struct Server<'a, B: Backend> {
    station: &'a Station,
    backend: B,
    nodes: Nodes<B>,
    /// The nodes elsewhere that send to these or are sent to.
    peers: BTreeMap<NodeAddress, Peer>,
    /// Peers that were sent away, and may have said more by then.
    dismissed: BTreeSet<Peer>,
    /// What the device was given and is not known to be done with, in order.
    given: VecDeque<Given<B>>,
    outbox: Vec<Outgoing<Payload<B::Buffer>>>,
    /// When its clock began.
    began: Instant,
}

/// Work that a device was given.
struct Given<B: Backend> {
    /// What is ended when the device is done; `None` if it was ended when it was given.
    work: Option<Started<Payload<B::Buffer>>>,
    end: B::Mark,
}

/// Runs a worker in its role to its end, on a device.
pub(crate) fn run<B: Backend>(station: &Arc<Station>, backend: B) -> Result<(), ClusterError> {
    let slice = station.role.slice;
    let (tier1, lanes, works_max) = (None, BTreeMap::new(), B::WORKS_AHEAD);
    let nodes = Nodes { slice, tier1, lanes, attends_first: false, works_max };
    let (peers, given, outbox) = (BTreeMap::new(), VecDeque::new(), Vec::new());
    let (dismissed, began) = (BTreeSet::new(), Instant::now());
    let mut server = Server { station, backend, nodes, peers, dismissed, given, outbox, began };
    match station.role.lane {
        None => server.be_tier1(station)?,
        Some(lane) => server.be_tier2(lane)?,
    }
    let ready = station.ready()?;
    server.serve()?;
    station.done(nodes::reports(&server.nodes).swap_remove(0), ready);
    Ok(())
}

impl<B: Backend> Server<'_, B> {
    /// Makes the slice's Tier-1 node, with a lane of its own if the plan gives it one, and waits until every
    /// other lane and the slice before have introduced themselves.
    fn be_tier1(&mut self, station: &Arc<Station>) -> Result<(), ClusterError> {
        let role = &station.role;
        let (layout, slice) = (&role.layout, role.slice);
        let model = model_of(station)?;
        let place = Tier1Place::new(layout, role.pipeline, slice, role.trace);
        let mut said = false;
        let progress = &mut |_, total| {
            if !std::mem::replace(&mut said, true) {
                (station.news)(WorkerNews::Loading(&model, total));
            }
        };
        let weights = nodes::load_slice(&model, layout, &place, &self.backend, progress)?;
        let backend = self.backend.clone();
        self.nodes.tier1 = Some(nodes::tier1(backend, weights, place, layout, &role.config));
        let lanes = layout.lanes_of(role.pipeline);
        let first_remote = lanes.start + layout.local_lanes as u32;
        (lanes.start..first_remote).try_for_each(|lane| self.add_lane(lane))?;
        station.threads.pin_caller();
        self.peers.insert(NodeAddress::Dispatcher, station.dispatcher);
        if let Some(next) = station.dial_neighbour(None)? {
            self.peers.insert(NodeAddress::Tier1(slice + 1), next);
        }
        let lanes = (first_remote..lanes.end).map(|lane| NodeAddress::Tier2(slice, lane));
        let previous = slice.checked_sub(1).map(NodeAddress::Tier1);
        let mut awaited: Vec<NodeAddress> = lanes.chain(previous).collect();
        while !awaited.is_empty() {
            match station.hear(IDLE)? {
                Some(Heard::Message(peer, message, _)) => {
                    match (self.introduced(peer, &message), self.node_at(peer)) {
                        (Ok(node), _) => awaited.retain(|awaited| *awaited != node),
                        (Err(error), Some(_)) => return Err(error),
                        (Err(error), None) => station.dismiss(peer, &error),
                    }
                }
                Some(Heard::Lost(peer, error)) if self.node_at(peer).is_some() => {
                    return Err(error);
                }
                Some(Heard::Over) => {
                    return Err(ClusterError::DispatcherLost("it left".to_owned()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn introduced(&mut self, peer: Peer, message: &Message) -> Result<NodeAddress, ClusterError> {
        let role = &self.station.role;
        let is_awaited = |caller| role.callers.contains(&caller);
        let node = match Control::read(message)? {
            Control::Introduce(None, pass) if is_awaited((None, pass)) => {
                NodeAddress::Tier1(role.slice - 1)
            }
            Control::Introduce(Some(lane), pass) if is_awaited((Some(lane), pass)) => {
                NodeAddress::Tier2(role.slice, lane)
            }
            _ => return Err(ClusterError::Control("no introduction of a neighbour".to_owned())),
        };
        if self.peers.contains_key(&node) {
            return Err(ClusterError::Control("a second introduction".to_owned()));
        }
        if let NodeAddress::Tier2(..) = node {
            self.station.shape(peer);
        }
        self.peers.insert(node, peer);
        Ok(node)
    }

    fn be_tier2(&mut self, lane: u32) -> Result<(), ClusterError> {
        self.add_lane(lane)?;
        self.station.threads.pin_caller();
        let tier1 = self.station.dial_neighbour(Some(lane))?;
        let tier1 = tier1.expect("a Tier-2 node has a Tier-1 node to dial");
        self.station.shape(tier1);
        self.peers.insert(NodeAddress::Tier1(self.nodes.slice), tier1);
        Ok(())
    }

    fn add_lane(&mut self, lane: u32) -> Result<(), ClusterError> {
        let role = &self.station.role;
        let (layout, slice, pages) = (&role.layout, role.slice, role.lane_pages[lane as usize]);
        let backend = self.backend.clone();
        let node = nodes::tier2(backend, (slice, lane), pages, role.trace, layout, &role.config)?;
        let page_bytes = layout.page_bytes(&role.config, slice);
        (self.station.news)(WorkerNews::Contexts(u64::from(pages) * page_bytes));
        self.nodes.lanes.insert(lane, node);
        Ok(())
    }

    /// Takes in everything that is here, starts something, sends what follows from what is done; until the job is over.
    fn serve(&mut self) -> Result<(), ClusterError> {
        let mut wait = Duration::ZERO;
        let mut looks = 0;
        loop {
            while let Some(heard) = self.station.hear(wait)? {
                if self.take(heard)? {
                    return Ok(());
                }
                (wait, looks) = (Duration::ZERO, 0);
            }
            let started = self.start_next()?;
            let finished = self.finish_done()?;
            looks = if started || finished { 0 } else { looks + 1 };
            wait = match self.given.is_empty() {
                _ if looks == 0 => Duration::ZERO,
                true => self.patience().unwrap_or(IDLE).min(IDLE),
                // A device goes on by itself, and the worker with messages.
                false if looks < LOOKS => Duration::ZERO,
                false => NAP,
            };
        }
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// How long the Tier-1 node waits for the rest of a flight, if it does.
    fn patience(&self) -> Option<Duration> {
        let until_ns = self.nodes.patient_until_ns()?;
        Some(Duration::from_nanos(until_ns.saturating_sub(self.now_ns())))
    }

    /// Gives the device its next work, unless it has enough.
    fn start_next(&mut self) -> Result<bool, ClusterError> {
        if self.given.len() >= B::WORKS_AHEAD {
            return Ok(false);
        }
        let Some(work) = self.nodes.start(self.now_ns())? else { return Ok(false) };
        let end = self.backend.mark()?;
        // What only the device's own kernels see next, they see in their order.
        let work = match nodes::stays(&work) {
            true => self.finish(work).map(|()| None)?,
            false => Some(work),
        };
        self.given.push_back(Given { work, end });
        Ok(true)
    }

    /// Ends the works that the device is done with.
    fn finish_done(&mut self) -> Result<bool, ClusterError> {
        let mut finished = false;
        while let Some(Given { end, .. }) = self.given.front()
            && self.backend.is_done(end)?
        {
            finished = true;
            if let Some(Given { work: Some(work), .. }) = self.given.pop_front() {
                self.finish(work)?;
            }
        }
        Ok(finished)
    }

    fn finish(&mut self, work: Started<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        let mut outbox = std::mem::take(&mut self.outbox);
        self.nodes.finish(work, self.now_ns(), &mut outbox)?;
        outbox.drain(..).try_for_each(|outgoing| self.send(outgoing))?;
        self.outbox = outbox;
        Ok(())
    }

    fn send(&mut self, outgoing: Outgoing<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        let Outgoing { to, rows, parcel } = outgoing;
        let Some(&peer) = self.peers.get(&to) else {
            self.nodes.deliver(parcel)?;
            return Ok(());
        };
        let message = match parcel {
            Parcel::Launch(launch, residual) => wire::hop(&launch, residual.sent()),
            Parcel::Attend(attend, qkv) => wire::attend(&attend, qkv.sent()),
            Parcel::Attended(attended, output) => wire::attended(&attended, rows, output.sent()),
            Parcel::Home(home) => wire::home(&home),
        };
        let sent = self.station.controller.send(peer, message);
        // Of a lane that is gone, the controller says so in a moment.
        if matches!(to, NodeAddress::Tier2(..)) { Ok(()) } else { Ok(sent?) }
    }

    /// Takes an event; `true` ends the worker.
    fn take(&mut self, heard: Heard) -> Result<bool, ClusterError> {
        match heard {
            Heard::Message(peer, message, arrived) => self.receive(peer, message, arrived)?,
            Heard::ReportWanted => self.station.send_reports(nodes::reports(&self.nodes))?,
            Heard::LaneLost(lane) => self.nodes.lose_lane(lane),
            Heard::Lost(peer, error) => match self.node_at(peer) {
                Some(NodeAddress::Tier2(_, lane)) => self.nodes.lose_lane(lane),
                Some(_) => return Err(error),
                None => {}
            },
            Heard::Over => return Ok(true),
            Heard::Nothing => {}
        }
        Ok(false)
    }

    /// Takes a message. What a lane's Tier-2 node may not send costs it its place, and what a stranger sends too. A
    /// Tier-2 node that tells lies of its Tier-1 node loses its own place: so it cannot cost more than that.
    fn receive(
        &mut self,
        peer: Peer,
        message: Message,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        if self.dismissed.contains(&peer) {
            return Ok(());
        }
        let Some(sender) = self.node_at(peer) else {
            let what = format!("{} of a peer without a role here", message.kind());
            self.station.dismiss(peer, &what);
            self.dismissed.insert(peer);
            return Ok(());
        };
        let parcel = self.read(sender, message, arrived);
        match (parcel.and_then(|parcel| Ok(self.nodes.deliver(parcel)?)), sender) {
            (Ok(_), _) => Ok(()),
            (Err(error), NodeAddress::Tier2(_, lane)) => {
                self.station.dismiss(peer, &error);
                self.dismissed.insert(peer);
                self.nodes.lose_lane(lane);
                self.station.tell_dispatcher(&Control::LaneLied(lane, error.to_string()))
            }
            (Err(error), _) => Err(error),
        }
    }

    fn node_at(&self, peer: Peer) -> Option<NodeAddress> {
        self.peers.iter().find(|(_, known)| **known == peer).map(|(node, _)| *node)
    }

    /// A message that its sender may send to a node here, and that fits the layout.
    fn read(
        &self,
        sender: NodeAddress,
        message: Message,
        arrived: Instant,
    ) -> Result<Parcel<Payload<B::Buffer>>, ClusterError> {
        let (config, slice) = (&self.station.role.config, self.nodes.slice);
        let row_bytes = match (message.kind(), sender) {
            (Kind::Launch, NodeAddress::Dispatcher) => 0,
            (Kind::Hop, NodeAddress::Tier1(from)) if from + 1 == slice => config.hidden * 4,
            (Kind::Attend, NodeAddress::Tier1(from)) if from == slice => config.qkv_width() * 2,
            (Kind::Attended, NodeAddress::Tier2(_, lane)) if message.step().shard.lane == lane => {
                config.query_width() * 2
            }
            (kind, _) => {
                let name = self.station.role.name();
                return Err(ClusterError::Control(format!("{name} was sent {kind} by {sender:?}")));
            }
        };
        let (got, needed) = (message.payload().len_bytes(), message.rows() * row_bytes);
        if got != needed {
            let kind = message.kind();
            return Err(ClusterError::Control(format!("{kind} with {got} bytes, not {needed}")));
        }
        let parcel = match message.kind() {
            Kind::Attend => {
                let attend = wire::read_attend(&message);
                self.check(self.attends(&attend), &message)?;
                Parcel::Attend(attend, Payload::received(message.into_payload(), arrived))
            }
            Kind::Attended => {
                let attended = wire::read_attended(&message);
                let tier1 = self.nodes.tier1.as_ref();
                let awaited = tier1.and_then(|(node, _)| node.rows_awaited(&attended));
                self.check(awaited.is_none_or(|rows| rows == message.rows()), &message)?;
                Parcel::Attended(attended, Payload::received(message.into_payload(), arrived))
            }
            _ => {
                let launch = wire::read_launch(&message)?;
                self.check(self.fits(&launch), &message)?;
                Parcel::Launch(launch, Payload::received(message.into_payload(), arrived))
            }
        };
        Ok(parcel)
    }

    /// Whether a lane is one of this node's pipeline.
    fn has_lane(&self, lane: u32) -> bool {
        let role = &self.station.role;
        role.layout.lanes_of(role.pipeline).contains(&lane)
    }

    /// Whether rows to attend fit a lane here.
    fn attends(&self, attend: &Attend) -> bool {
        let (role, shard) = (&self.station.role, attend.step.shard);
        let shape = role.layout.lane_shape(shard.lane);
        let layers = role.layout.layers(role.config.layers, role.slice).len();
        self.nodes.lanes.contains_key(&shard.lane)
            && role.layout.flights_of(shard.lane).contains(&shard.flight)
            && attend.rows.len() <= shape.batch as usize
            && (attend.layer as usize) < layers
            && attend
                .rows
                .iter()
                .chain(&attend.shared)
                .all(|row| row.position < role.layout.context_max)
    }

    /// Whether a launch fits the slab, the vocabulary and the contexts.
    fn fits(&self, launch: &Launch) -> bool {
        let role = &self.station.role;
        let shape = role.layout.lane_shape(launch.step.shard.lane);
        role.layout.flights_of(launch.step.shard.lane).contains(&launch.step.shard.flight)
            && self.has_lane(launch.step.shard.lane)
            && launch.rows.len() <= shape.batch as usize
            && launch.rows.iter().all(|row| {
                (row.token as usize) < role.config.vocab && row.position < role.layout.context_max
            })
            && launch.samples.is_sorted_by(|one, next| one.row < next.row)
    }

    fn check(&self, fits: bool, message: &Message) -> Result<(), ClusterError> {
        let (kind, shard) = (message.kind(), message.step().shard);
        let wrong = || ClusterError::Control(format!("{kind} of {shard:?} is beyond the layout"));
        if fits { Ok(()) } else { Err(wrong()) }
    }
}
