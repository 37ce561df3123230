//! The network fabric, as the dispatcher sees it: launches out, tokens home, nodes that may die.

use crate::complaints::{Complaints, words};
use crate::control::Control;
use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent, WAIT};
use crate::layout::Layout;
use crate::net::{Controller, Event, LostReason, Peer};
use crate::report::NodeReport;
use crate::wire;
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_protocol::{Home, Launch, ShardId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How long nodes have to say what they did.
const REPORT_PATIENCE: Duration = Duration::from_secs(5);

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
    /// Those that are not: what they still say counts no more.
    gone: BTreeSet<Peer>,
    /// The newest step of each shard, with the log-probabilities that each of its tokens was asked for.
    awaited: HashMap<ShardId, (u64, Vec<u8>)>,
    /// Tokens that there are.
    vocab: usize,
    /// Whether nodes were asked for their reports.
    reporting: bool,
    /// Arrived while something else was waited for.
    stash: VecDeque<Event>,
    lanes_lost: BTreeSet<u32>,
    happened: Vec<FabricEvent>,
    complaints: Complaints,
}

/// What a node may say to the dispatcher.
enum Said {
    Home(Home),
    Reports(Vec<NodeReport>),
    Failed(String),
    LaneLied(u32, String),
    /// Nothing that still matters.
    OldNews,
}

/// A worker that has a role.
pub(crate) struct Node {
    /// Its name in statistics and errors.
    pub name: String,
    /// Its pipeline.
    pub pipeline: usize,
    /// Its slice.
    pub slice: usize,
    /// Its lane of the first strand, if it is a Tier-2 node.
    pub lane: Option<u32>,
}

impl RemoteFabric {
    pub(crate) fn new(
        controller: Controller,
        layout: &Layout,
        vocab: usize,
        firsts: Vec<Peer>,
        nodes: BTreeMap<Peer, Node>,
    ) -> Self {
        Self {
            controller,
            layout: layout.clone(),
            firsts,
            nodes,
            gone: BTreeSet::new(),
            awaited: HashMap::new(),
            vocab,
            reporting: false,
            stash: VecDeque::new(),
            lanes_lost: BTreeSet::new(),
            happened: Vec::new(),
            complaints: Complaints::new(),
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
            Event::Message { peer, .. } | Event::Lost { peer, .. } if self.gone.contains(&peer) => {
            }
            Event::Message { peer, message, .. } if !self.nodes.contains_key(&peer) => {
                self.overhear(peer, &message);
            }
            Event::Message { peer, message, .. } => match self.read(peer, &message) {
                Ok(Said::Home(home)) => self.happened.push(FabricEvent::Home(home)),
                Ok(Said::Reports(reports)) => return Ok(Some((peer, reports))),
                Ok(Said::Failed(reason)) => {
                    let name = name_of(&self.nodes, peer);
                    let (peer, error) = self.cause(peer, ClusterError::Failed { name, reason });
                    self.lose(peer, error)?;
                }
                Ok(Said::LaneLied(lane, lie)) => {
                    let slice = self.nodes[&peer].slice;
                    let has_lane =
                        |first: u32| self.layout.lanes_of_worker(first).any(|one| one == lane);
                    let is_it =
                        |node: &Node| node.lane.is_some_and(has_lane) && node.slice == slice;
                    let liar = self.nodes.iter().find(|(_, node)| is_it(node));
                    if let Some((&liar, _)) = liar {
                        self.dismiss(liar, &lie)?;
                    }
                }
                Ok(Said::OldNews) => {}
                Err(lie) => self.dismiss(peer, &lie)?,
            },
            Event::Joined { peer, .. } => {
                if self.complaints.may_write(Instant::now()) {
                    tracing::warn!(%peer, "a worker came too late to have a role");
                }
            }
            Event::Lost { peer, .. } if !self.nodes.contains_key(&peer) => {}
            Event::Lost { peer, reason } => {
                let (name, reason) = (name_of(&self.nodes, peer), reason.to_string());
                self.lose(peer, ClusterError::Lost { name, reason })?;
            }
        }
        Ok(None)
    }

    /// What a node says, if one in its role may say it now; else what is wrong with it.
    fn read(&self, peer: Peer, message: &Message) -> Result<Said, String> {
        let node = &self.nodes[&peer];
        match message.kind() {
            Kind::Home => self.read_home(node, message),
            Kind::Control => match Control::read(message).map_err(|error| error.to_string())? {
                Control::Reported(reports) if self.reporting => {
                    let known = self.names_of(node);
                    let is_its = |report: &NodeReport| known.contains(&report.name);
                    match reports.iter().all(is_its) && reports.len() <= known.len() {
                        true => Ok(Said::Reports(reports)),
                        false => Err("reports of other nodes".to_owned()),
                    }
                }
                Control::Failed(reason) => Ok(Said::Failed(words(&reason))),
                Control::LaneLied(lane, lie)
                    if node.lane.is_none()
                        && self.layout.lanes_of(node.pipeline).contains(&lane) =>
                {
                    Ok(Said::LaneLied(lane, words(&lie)))
                }
                _ => Err("control that it may not send".to_owned()),
            },
            kind => Err(format!("{kind} that is not for the dispatcher")),
        }
    }

    /// Tokens of a step: from the last slice of its pipeline, and as many as its launch asked for.
    fn read_home(&self, node: &Node, message: &Message) -> Result<Said, String> {
        let step = message.step();
        let is_last = node.lane.is_none() && node.slice + 1 == self.layout.slices;
        if !is_last || node.pipeline != self.layout.pipeline_of(step.shard.lane) {
            return Err("tokens that another node makes".to_owned());
        }
        let home = wire::read_home(message).map_err(|error| error.to_string())?;
        let (epoch, asked) = match self.awaited.get(&step.shard) {
            Some((epoch, asked)) if *epoch >= step.epoch => (*epoch, asked),
            _ => return Err("tokens of a step that was not launched".to_owned()),
        };
        if epoch > step.epoch {
            return Ok(Said::OldNews);
        }
        let is_known = |token: u32| (token as usize) < self.vocab;
        let fits = home.tokens.len() == asked.len()
            && home.tokens.iter().zip(asked).all(|(generated, asked)| {
                is_known(generated.token)
                    && generated.alternatives.len() <= usize::from(*asked)
                    && generated.alternatives.iter().all(|(token, _)| is_known(*token))
            });
        if fits { Ok(Said::Home(home)) } else { Err("tokens that were not asked for".to_owned()) }
    }

    /// The names under which the strands of a worker report: those of its Tier-1 node and of their lanes on it.
    fn names_of(&self, node: &Node) -> Vec<String> {
        let Node { pipeline, slice, .. } = *node;
        let own = self.layout.lanes_of_strand(pipeline, 0).start;
        let first = node.lane.or(self.layout.tier1_attends.then_some(own));
        let lanes = first.into_iter().flat_map(|first| self.layout.lanes_of_worker(first));
        let mut names: Vec<String> =
            lanes.map(|lane| self.layout.node_name(pipeline, slice, Some(lane))).collect();
        if node.lane.is_none() {
            let strands = 0..self.layout.strands;
            names.extend(strands.map(|strand| self.layout.strand_name(pipeline, slice, strand)));
        }
        names
    }

    /// A worker without a role may have offered itself, and waits. One that says anything else is no worker.
    fn overhear(&mut self, peer: Peer, message: &Message) {
        if let Ok(Control::Offer(_)) = Control::read(message) {
            return;
        }
        self.controller.dismiss(peer);
        self.gone.insert(peer);
        if self.complaints.may_write(Instant::now()) {
            tracing::warn!(%peer, kind = %message.kind(), "sent a peer away that has no role");
        }
    }

    /// A lie costs the liar its place.
    fn dismiss(&mut self, peer: Peer, lie: &str) -> Result<(), ClusterError> {
        self.controller.dismiss(peer);
        let reason = format!("it was sent away for {lie}");
        let name = name_of(&self.nodes, peer);
        self.lose(peer, ClusterError::Lost { name, reason })
    }

    /// Gives a node up: a Tier-2 node takes its lane along, a Tier-1 node its pipeline. It is an error if it was the
    /// last one.
    fn lose(&mut self, peer: Peer, error: ClusterError) -> Result<(), ClusterError> {
        let Some(Node { pipeline, lane, .. }) = self.nodes.remove(&peer) else { return Err(error) };
        self.gone.insert(peer);
        let mut lanes: Vec<u32> = match lane {
            Some(first) => self.layout.lanes_of_worker(first).collect(),
            None => {
                let useless = self.nodes.extract_if(.., |_, node| node.pipeline == pipeline);
                self.gone.extend(useless.map(|(peer, _)| peer));
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
                Event::Message { peer, .. } if !self.nodes.contains_key(&peer) => {}
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
        let asked = launch.samples.iter().map(|sample| sample.sampling.logprobs.unwrap_or(0));
        self.awaited.insert(launch.step.shard, (launch.step.epoch, asked.collect()));
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
        // Every strand of a process reports by itself.
        let mut missing: BTreeMap<Peer, (String, usize)> = BTreeMap::new();
        self.reporting = true;
        for (&peer, node) in &self.nodes {
            // One that cannot be asked is lost, and its report is missing.
            _ = self.controller.send(peer, Control::Report.message(Buffer::default()));
            missing.insert(peer, (node.name.clone(), self.layout.strands));
        }
        let mut reports: Vec<NodeReport> = Vec::new();
        let started = Instant::now();
        while missing.keys().any(|peer| self.nodes.contains_key(peer))
            && started.elapsed() < REPORT_PATIENCE
        {
            let Some(event) = self.hear(WAIT) else { continue };
            // A node that is lost now has done its work: all it takes along is its report.
            if let Ok(Some((peer, of_strand))) = self.take(event)
                && let Some((_, strands)) = missing.get_mut(&peer)
            {
                reports.extend(of_strand);
                *strands -= 1;
                missing.retain(|_, (_, strands)| *strands > 0);
            }
        }
        self.reporting = false;
        if !missing.is_empty() {
            let missing: Vec<String> = missing.into_values().map(|(name, _)| name).collect();
            let nodes = missing.join(", ");
            tracing::warn!(nodes, "did not report: the statistics are without them");
        }
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

/// The name of a peer's role.
pub(crate) fn name_of(nodes: &BTreeMap<Peer, Node>, peer: Peer) -> String {
    nodes.get(&peer).map_or_else(|| peer.to_string(), |node| node.name.clone())
}
