//! A Tier-1 node on the network: weights here, attention elsewhere (or here too).

use crate::control::Control;
use crate::error::ClusterError;
use crate::local::load_slice;
use crate::net::Peer;
use crate::news::WorkerNews;
use crate::node2::attention_worker;
use crate::payload::Payload;
use crate::station::{Heard, IDLE, Station};
use crate::tier1::{Outgoing, Tier1Place, Tier1Worker};
use crate::tier2::Tier2Worker;
use crate::wire;
use glinthawk_compute::CpuBackend;
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_model::Model;
use glinthawk_protocol::{Launch, Tier1Node};
use std::time::{Duration, Instant};

struct Node<'a> {
    station: &'a Station,
    worker: Tier1Worker<CpuBackend>,
    /// This node's own lane, if the plan gives it one: lane 0.
    local: Option<Tier2Worker<CpuBackend>>,
    /// The attention worker of each lane; `None` is this node itself.
    lanes: Vec<Option<Peer>>,
    previous: Option<Peer>,
    next: Option<Peer>,
}

/// Runs a Tier-1 node to its end.
pub(crate) fn run(station: &Station, model: &Model) -> Result<(), ClusterError> {
    let role = &station.role;
    let layout = &role.layout;
    let place = Tier1Place::new(layout, role.slice, role.trace);
    let mut said = false;
    let progress = &mut |_, total| {
        if !std::mem::replace(&mut said, true) {
            (station.news)(WorkerNews::Loading(model, total));
        }
    };
    let kernels = load_slice(model, layout, &place, &station.backend, progress)?;
    let layers = layout.layers(role.config.layers, role.slice).len();
    let node = Tier1Node::new(layers as u32, layout.rows_max(), layout.merge());
    let worker = Tier1Worker::new(node, station.backend.clone(), kernels, place, &role.config);
    let local = (layout.local_lanes > 0).then(|| attention_worker(station, 0)).transpose()?;
    station.backend.threads.pin_caller();
    let next = station.dial_neighbour(None)?;
    let mut node =
        Node { station, worker, local, lanes: vec![None; layout.lanes()], previous: None, next };
    node.meet_neighbours(place.first)?;
    let ready = station.ready()?;
    node.serve()?;
    station.done(node.worker.report(), ready);
    Ok(())
}

impl Node<'_> {
    /// Waits until every lane and the slice before have introduced themselves.
    fn meet_neighbours(&mut self, first: bool) -> Result<(), ClusterError> {
        let own = usize::from(self.local.is_some());
        while self.lanes[own..].iter().any(Option::is_none) || (!first && self.previous.is_none()) {
            match self.station.hear(IDLE)? {
                Some(Heard::Message(peer, message, _)) => self.introduce(peer, &message)?,
                Some(Heard::Lost(_, error)) => return Err(error),
                Some(Heard::Over) => {
                    return Err(ClusterError::DispatcherLost("it left".to_owned()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn introduce(&mut self, peer: Peer, message: &Message) -> Result<(), ClusterError> {
        match Control::read(message)? {
            Control::Introduce(None) => self.previous = Some(peer),
            Control::Introduce(Some(lane)) if (lane as usize) < self.lanes.len() => {
                self.lanes[lane as usize] = Some(peer);
                self.station.shape(peer);
            }
            other => {
                return Err(ClusterError::Control(format!(
                    "{peer} introduced itself with {other:?}"
                )));
            }
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), ClusterError> {
        let mut outgoing = Vec::new();
        loop {
            while let Some(heard) = self.station.hear(Duration::ZERO)? {
                if self.take(heard)? {
                    return Ok(());
                }
            }
            self.worker.start()?;
            if self.worker.finish(&mut outgoing)? {
                for outgoing in outgoing.drain(..) {
                    self.send(outgoing)?;
                }
                continue;
            }
            if let Some(local) = &mut self.local {
                local.start()?;
                if let Some((attended, output)) = local.finish()? {
                    self.worker.attended(attended, output, Instant::now())?;
                    continue;
                }
            }
            if let Some(heard) = self.station.hear(IDLE)?
                && self.take(heard)?
            {
                return Ok(());
            }
        }
    }

    fn send(&mut self, outgoing: Outgoing<Buffer>) -> Result<(), ClusterError> {
        let controller = &self.station.controller;
        match outgoing {
            Outgoing::Attend(attend, Payload::Host(qkv)) => {
                let peer = self.lanes[attend.step.shard.lane as usize];
                let peer = peer.expect("every lane that is not local introduced itself");
                // Of a node that is gone, the controller says so in a moment.
                _ = controller.send(peer, wire::attend(&attend, qkv));
            }
            Outgoing::Attend(attend, qkv) => {
                let local = self.local.as_mut().expect("the lanes here are this node's own");
                local.take(attend, qkv, Instant::now())?;
            }
            Outgoing::Hop(launch, residual) => {
                let next = self.next.expect("a slice that is not the last dialled the next");
                controller.send(next, wire::hop(&launch, residual))?;
            }
            Outgoing::Home(home) => controller.send(self.station.dispatcher, wire::home(&home))?,
        }
        Ok(())
    }

    /// Takes an event; `true` ends the node.
    fn take(&mut self, heard: Heard) -> Result<bool, ClusterError> {
        match heard {
            Heard::Message(peer, message, arrived) => self.take_message(peer, message, arrived)?,
            Heard::ReportWanted => {
                let local = self.local.as_ref().map(Tier2Worker::report);
                let reports = std::iter::once(self.worker.report()).chain(local);
                self.station.send_reports(reports.collect())?;
            }
            Heard::LaneLost(lane) => self.worker.lose_lane(lane),
            Heard::Lost(peer, error) => {
                match self.lanes.iter().position(|lane| *lane == Some(peer)) {
                    Some(lane) => self.worker.lose_lane(lane as u32),
                    None => return Err(error),
                }
            }
            Heard::Over => return Ok(true),
            Heard::Nothing => {}
        }
        Ok(false)
    }

    fn take_message(
        &mut self,
        peer: Peer,
        message: Message,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        let config = &self.station.role.config;
        let row_bytes = match message.kind() {
            Kind::Launch if peer == self.station.dispatcher => 0,
            Kind::Hop if Some(peer) == self.previous => config.hidden * 4,
            Kind::Attended if self.lanes.contains(&Some(peer)) => config.query_width() * 2,
            kind => {
                return Err(ClusterError::Control(format!(
                    "a Tier-1 node was sent {kind} by {peer}"
                )));
            }
        };
        let (got, needed) = (message.payload().len_bytes(), message.rows() * row_bytes);
        if got != needed {
            return Err(ClusterError::Control(format!(
                "{} with {got} bytes, not {needed}",
                message.kind()
            )));
        }
        match message.kind() {
            Kind::Launch => {
                let launch = self.checked(wire::read_launch(&message)?)?;
                self.worker.arrive(launch, None, arrived)?;
            }
            Kind::Hop => {
                let launch = self.checked(wire::read_launch(&message)?)?;
                self.worker.arrive(launch, Some(message.into_payload()), arrived)?;
            }
            _ => {
                let attended = wire::read_attended(&message);
                self.worker.attended(attended, Payload::Host(message.into_payload()), arrived)?;
            }
        }
        Ok(())
    }

    /// A launch that fits this node's slab and vocabulary.
    fn checked(&self, launch: Launch) -> Result<Launch, ClusterError> {
        let role = &self.station.role;
        let fits = launch.step.shard.flight < role.layout.flights
            && (launch.step.shard.lane as usize) < role.layout.lanes()
            && launch.rows.len() <= role.layout.batch as usize
            && launch.rows.iter().all(|row| (row.token as usize) < role.config.vocab);
        let wrong = || {
            ClusterError::Control(format!(
                "a launch of {:?} is beyond the layout",
                launch.step.shard
            ))
        };
        if fits { Ok(launch) } else { Err(wrong()) }
    }
}
