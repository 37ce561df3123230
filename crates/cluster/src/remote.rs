//! The network fabric, as the dispatcher sees it: launches out, tokens home, nodes that may die.

use crate::control::Control;
use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent, WAIT};
use crate::layout::Layout;
use crate::net::{Controller, Event, LostReason, Peer};
use crate::report::NodeReport;
use crate::wire;
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_protocol::Launch;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// How long nodes have to say what they did.
const REPORT_PATIENCE: Duration = Duration::from_secs(20);

/// How long to look for the node that is gone when another one fails.
const CAUSE_PATIENCE: Duration = Duration::from_secs(1);

/// Worker processes that have their roles.
pub struct RemoteFabric {
    controller: Controller,
    layout: Layout,
    /// The first slice of each pipeline.
    firsts: Vec<Peer>,
    /// The nodes that are left.
    nodes: BTreeMap<Peer, Node>,
    /// Arrived while something else was waited for.
    stash: VecDeque<Event>,
    lanes_lost: BTreeSet<u32>,
    happened: Vec<FabricEvent>,
}

/// A worker that has a role.
pub(crate) struct Node {
    /// Its name in statistics and errors.
    pub name: String,
    /// Its pipeline.
    pub pipeline: usize,
    /// Its lane, if it is a Tier-2 node.
    pub lane: Option<u32>,
}

impl RemoteFabric {
    pub(crate) fn new(
        controller: Controller,
        layout: &Layout,
        firsts: Vec<Peer>,
        nodes: BTreeMap<Peer, Node>,
    ) -> Self {
        Self {
            controller,
            layout: layout.clone(),
            firsts,
            nodes,
            stash: VecDeque::new(),
            lanes_lost: BTreeSet::new(),
            happened: Vec::new(),
        }
    }

    /// The next event, waiting for at most `wait`.
    fn hear(&mut self, wait: Duration) -> Option<Event> {
        self.stash.pop_front().or_else(|| self.controller.recv(wait))
    }

    /// Takes an event; returns a worker's reports if it carried them.
    fn take(&mut self, event: Event) -> Result<Option<(Peer, Vec<NodeReport>)>, ClusterError> {
        match event {
            // What a node that is given up said last no longer counts.
            Event::Message { peer, .. } | Event::Lost { peer, .. }
                if !self.nodes.contains_key(&peer) => {}
            Event::Message { message, .. } if message.kind() == Kind::Home => {
                self.happened.push(FabricEvent::Home(wire::read_home(&message)?));
            }
            Event::Message { peer, message, .. } => match Control::read(&message)? {
                Control::Reported(reports) => return Ok(Some((peer, reports))),
                Control::Failed(reason) => {
                    let name = name_of(&self.nodes, peer);
                    let (peer, error) = self.cause(peer, ClusterError::Failed { name, reason });
                    self.lose(peer, error)?;
                }
                other => tracing::warn!(%peer, message = ?other, "unexpected message"),
            },
            Event::Joined { peer, .. } => {
                tracing::warn!(%peer, "a worker came too late to have a role")
            }
            Event::Lost { peer, reason } => {
                let (name, reason) = (name_of(&self.nodes, peer), reason.to_string());
                self.lose(peer, ClusterError::Lost { name, reason })?;
            }
        }
        Ok(None)
    }

    /// Gives a node up: a Tier-2 node takes its lane along, a Tier-1 node its pipeline. It is an error if it was the
    /// last one.
    fn lose(&mut self, peer: Peer, error: ClusterError) -> Result<(), ClusterError> {
        let Some(Node { pipeline, lane, .. }) = self.nodes.remove(&peer) else { return Err(error) };
        let mut lanes: Vec<u32> = match lane {
            Some(lane) => vec![lane],
            None => {
                self.nodes.retain(|_, node| node.pipeline != pipeline);
                self.layout.lanes_of(pipeline).collect()
            }
        };
        if self.nodes.is_empty() {
            return Err(error);
        }
        lanes.retain(|lane| self.lanes_lost.insert(*lane));
        let neighbours = self.nodes.iter().filter(|(_, node)| node.pipeline == pipeline);
        for (&peer, _) in neighbours.filter(|(_, node)| node.lane.is_none()) {
            for &lane in &lanes {
                // One that cannot be told is lost itself, and that is heard next.
                _ = self.controller.send(peer, Control::LaneLost(lane).message(Buffer::default()));
            }
        }
        self.happened.push(FabricEvent::LanesLost { lanes, error });
        Ok(())
    }

    fn send(&mut self, peer: Peer, message: Message) -> Result<(), ClusterError> {
        let sent = self.controller.send(peer, message);
        sent.map_err(|error| self.cause(peer, error.into()).1)
    }

    /// Finds the node and the error to report instead of these, which may only be a consequence:
    /// neighbours of a node that died fail too, and sometimes say so before its own connection does.
    fn cause(&mut self, peer: Peer, error: ClusterError) -> (Peer, ClusterError) {
        let started = Instant::now();
        while let Some(event) =
            self.controller.recv(CAUSE_PATIENCE.saturating_sub(started.elapsed()))
        {
            match event {
                // A node that fails says goodbye; a node that died does not.
                Event::Lost { peer, reason }
                    if reason != LostReason::Goodbye && self.nodes.contains_key(&peer) =>
                {
                    let (name, reason) = (name_of(&self.nodes, peer), reason.to_string());
                    return (peer, ClusterError::Lost { name, reason });
                }
                other => self.stash.push_back(other),
            }
        }
        (peer, error)
    }
}

impl Fabric for RemoteFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        let lane = launch.step.shard.lane;
        if self.lanes_lost.contains(&lane) {
            // The dispatcher will hear of it.
            return Ok(());
        }
        let first = self.firsts[self.layout.pipeline_of(lane)];
        self.controller.send(first, wire::launch(&launch)).or_else(|error| {
            let (peer, error) = self.cause(first, error.into());
            self.lose(peer, error)
        })
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        let mut wait = if self.happened.is_empty() { WAIT } else { Duration::ZERO };
        while let Some(event) = self.hear(wait) {
            self.take(event)?;
            wait = Duration::ZERO;
        }
        events.append(&mut self.happened);
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let peers: Vec<Peer> = self.nodes.keys().copied().collect();
        for peer in peers {
            self.send(peer, Control::Report.message(Buffer::default()))?;
        }
        let mut reports = BTreeMap::new();
        let started = Instant::now();
        while let Some(missing) = self.nodes.keys().find(|peer| !reports.contains_key(*peer)) {
            if started.elapsed() > REPORT_PATIENCE {
                let name = name_of(&self.nodes, *missing);
                return Err(ClusterError::Lost { name, reason: "it does not report".to_owned() });
            }
            if let Some(event) = self.hear(WAIT)
                && let Some((peer, report)) = self.take(event)?
            {
                reports.insert(peer, report);
            }
        }
        let mut reports: Vec<NodeReport> = reports.into_values().flatten().collect();
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

/// The name of a peer's role.
pub(crate) fn name_of(nodes: &BTreeMap<Peer, Node>, peer: Peer) -> String {
    nodes.get(&peer).map_or_else(|| peer.to_string(), |node| node.name.clone())
}
