//! A strand of a worker's nodes on the network: parcels for nodes elsewhere are messages.

use crate::control::{Control, Role};
use crate::error::ClusterError;
use crate::neighbours::Peers;
use crate::net::Peer;
use crate::nodes::{self, Nodes};
use crate::payload::Payload;
use crate::report::NodeReport;
use crate::station::{Heard, IDLE, Station, sent};
use crate::wire;
use glinthawk_compute::Backend;
use glinthawk_flight::{Kind, Message};
use glinthawk_protocol::{Attend, Launch, NodeAddress, Outgoing, Parcel, Started};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a worker looks whether its device is done before it sleeps between two looks, and for how long it sleeps.
const LOOKS: u32 = 64;
const NAP: Duration = Duration::from_micros(20);

/// A strand at work.
pub(crate) struct Server<'a, B: Backend> {
    station: &'a Arc<Station>,
    /// Where its events arrive.
    letter_box: usize,
    strand: usize,
    lanes: Range<u32>,
    backend: B,
    nodes: Nodes<B>,
    /// The neighbours, as they were at this version.
    peers: Peers,
    peers_version: u64,
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

impl<'a, B: Backend> Server<'a, B> {
    /// A strand's server. The only strand of a process receives everything; one of several has a letter box.
    pub(crate) fn new(
        station: &'a Arc<Station>,
        strand: usize,
        backend: B,
        nodes: Nodes<B>,
    ) -> Self {
        let Role { layout, pipeline, .. } = &station.role;
        Self {
            station,
            letter_box: if layout.strands > 1 { 1 + strand } else { 0 },
            strand,
            lanes: layout.lanes_of_strand(*pipeline, strand),
            backend,
            nodes,
            peers: Peers::default(),
            peers_version: u64::MAX,
            dismissed: BTreeSet::new(),
            given: VecDeque::new(),
            outbox: Vec::new(),
            began: Instant::now(),
        }
    }

    /// Takes in everything that is here, starts something, sends what follows from what is done; until the job is over.
    /// Returns what the nodes did.
    pub(crate) fn serve(mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let mut wait = Duration::ZERO;
        let mut looks = 0;
        loop {
            if self.letter_box == 0 {
                self.station.heed_leaving()?;
            }
            while let Some(heard) = self.station.hear(self.letter_box, wait)? {
                if self.take(heard)? {
                    return Ok(nodes::reports(&self.nodes));
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

    /// The neighbours as they are now.
    fn peers(&mut self) -> &Peers {
        let Station { neighbours, role, .. } = &**self.station;
        let version = neighbours.version();
        if version != self.peers_version {
            (self.peers, self.peers_version) = (neighbours.of_strand(role, self.strand), version);
        }
        &self.peers
    }

    fn is_here(&self, node: NodeAddress) -> bool {
        match node {
            NodeAddress::Dispatcher => false,
            NodeAddress::Tier1(slice) => slice == self.nodes.slice && self.nodes.tier1.is_some(),
            NodeAddress::Tier2(_, lane) => self.nodes.lanes.contains_key(&lane),
        }
    }

    fn send(&mut self, outgoing: Outgoing<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        let Outgoing { to, rows, parcel } = outgoing;
        if self.is_here(to) {
            self.nodes.deliver(parcel)?;
            return Ok(());
        }
        // A node that is gone needs nothing. Its steps are launched again when it has another host.
        let Some(peer) = self.peers().get(to) else { return Ok(()) };
        let message = match parcel {
            Parcel::Launch(launch, residual) => wire::hop(&launch, residual.sent()),
            Parcel::Attend(attend, qkv) => wire::attend(&attend, qkv.sent()),
            Parcel::Attended(attended, output) => wire::attended(&attended, rows, output.sent()),
            Parcel::Home(home) => wire::home(&home),
        };
        sent(self.station.controller.send_on(self.letter_box, peer, message))
    }

    /// Takes an event; `true` ends the worker.
    fn take(&mut self, heard: Heard) -> Result<bool, ClusterError> {
        match heard {
            Heard::Message(peer, message, arrived) => self.receive(peer, message, arrived)?,
            Heard::ReportWanted => {
                self.station.send_reports(nodes::reports(&self.nodes), self.strand == 0)?;
            }
            Heard::Asked(lane) if self.lanes.contains(&lane) => {
                let tier1 = self.nodes.tier1.as_ref();
                let held = tier1.map(|(node, _)| node.held(lane)).unwrap_or_default();
                let held = held.into_iter();
                let held = held.map(|(step, layer)| (step.shard.flight, step.epoch, layer));
                self.station.tell_dispatcher(&Control::Answer(lane, held.collect()))?;
            }
            Heard::Asked(_) => {}
            Heard::LaneLost(lane, generation) => self.nodes.lose_lane(lane, Some(generation)),
            Heard::Over => return Ok(true),
            Heard::Nothing => {}
        }
        Ok(false)
    }

    /// Takes a message. What a neighbour may not send costs it its place, and what a stranger sends too.
    fn receive(
        &mut self,
        peer: Peer,
        message: Message,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        if self.dismissed.contains(&peer) {
            return Ok(());
        }
        let Some(sender) = self.peers().node_at(peer) else {
            // A neighbour's introduction may be on its way to the thread that hears it. What came over a line by then belongs to
            // steps that are launched again.
            if self.letter_box > 0 && self.station.neighbours.awaits_callers() {
                return Ok(());
            }
            let what = format!("{} of a peer without a role here", message.kind());
            self.station.dismiss(peer, &what);
            self.dismissed.insert(peer);
            return Ok(());
        };
        let parcel = self.read(sender, message, arrived);
        match parcel.and_then(|parcel| Ok(self.nodes.deliver(parcel)?)) {
            Ok(_) => Ok(()),
            Err(lie) => {
                self.dismissed.insert(peer);
                if let NodeAddress::Tier2(_, lane) = sender {
                    self.nodes.lose_lane(lane, None);
                }
                self.station.send_away(peer, lie)
            }
        }
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
            && self.lanes.contains(&launch.step.shard.lane)
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
