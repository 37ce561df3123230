//! The network fabric, as the dispatcher sees it: launches out, tokens home, nodes that come and go.

mod node;
mod places;
mod watching;

use crate::casting::Casting;
use crate::complaints::{Complaints, words};
use crate::control::{Control, LocalProcess};
use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent, WAIT};
use crate::net::{Controller, Event, Peer};
use crate::report::NodeReport;
use crate::spec::EndProcess;
use crate::station::sent;
use crate::weights::serve_weights;
use crate::wire;
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_model::Tensor;
use glinthawk_protocol::{Held, Home, Launch, Place, Roster, ShardId, StepId, TOKEN_NONE, Watch};
use node::{Accusation, Unsent};
pub(crate) use node::{Linked, Node, Waiting};
pub(crate) use places::OFFER_PATIENCE;
use places::Vacancy;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Steps of a lane that a node may have: there are never as many flights.
const HELD_MAX: usize = 4096;

/// How long nodes have to say what they did.
const REPORT_PATIENCE: Duration = Duration::from_secs(3);

/// Worker processes: those that have roles, and those that wait for one.
pub struct RemoteFabric {
    controller: Controller,
    casting: Casting,
    roster: Roster,
    /// The nodes that are ready or load, and where.
    nodes: BTreeMap<Peer, Node>,
    hosts: BTreeMap<Place, Peer>,
    /// The connections between nodes, by their passes.
    links: BTreeMap<u64, Linked>,
    /// Roles that are sent once a neighbour knows whom to await, by the pass.
    unsent: BTreeMap<u64, Unsent>,
    /// Workers without a role.
    waiting: BTreeMap<Peer, Waiting>,
    /// Places without a node that is ready.
    vacant: BTreeMap<Place, Vacancy>,
    /// How long a pipeline waits for a missing Tier-1 node, and the job for a lane.
    replace_within: Duration,
    /// Ends local processes that are given up.
    end_process: Option<EndProcess>,
    /// Peers that are given up: what they still say counts no more.
    gone: BTreeSet<Peer>,
    /// The newest step of each shard, with the log-probabilities that each of its tokens was asked for.
    awaited: HashMap<ShardId, (u64, Vec<u8>)>,
    /// Whether nodes were asked for their reports.
    reporting: bool,
    /// Whether nothing more can be computed.
    has_failed: bool,
    happened: Vec<FabricEvent>,
    complaints: Complaints,
    /// Finds nodes that do nothing.
    watch: Watch,
    /// When its clock began.
    began: Instant,
}

/// What a node may say to the dispatcher.
enum Said {
    Home(Home),
    Reports(Vec<NodeReport>),
    Failed(String),
    Fetch(Tensor, Option<(usize, usize)>),
    Ready,
    LinkLost(u64, String),
    Answer(Vec<Held>),
    Awaiting(u64),
    Met(u64),
    Leaving,
    /// Nothing that still matters.
    OldNews,
}

/// A cluster whose roles are given out.
pub(crate) struct Cast {
    pub controller: Controller,
    pub casting: Casting,
    pub nodes: BTreeMap<Peer, Node>,
    pub links: BTreeMap<u64, Linked>,
    /// Workers that are left over.
    pub waiting: BTreeMap<Peer, Waiting>,
    pub replace_within: Duration,
    pub end_process: Option<EndProcess>,
}

impl RemoteFabric {
    pub(crate) fn new(cast: Cast) -> Self {
        let Cast { controller, casting, nodes, links, waiting, replace_within, end_process } = cast;
        Self {
            controller,
            roster: Roster::loading(Casting::shape(&casting.layout)),
            casting,
            hosts: nodes.iter().map(|(peer, node)| (node.place, *peer)).collect(),
            nodes,
            links,
            unsent: BTreeMap::new(),
            waiting,
            vacant: BTreeMap::new(),
            replace_within,
            end_process,
            gone: BTreeSet::new(),
            awaited: HashMap::new(),
            reporting: false,
            has_failed: false,
            happened: Vec::new(),
            complaints: Complaints::new(),
            watch: watching::watch(),
            began: Instant::now(),
        }
    }

    /// Serves weights until all nodes are ready. A node that is lost meanwhile is replaced, in time; one that says that
    /// it cannot load ends the job if nobody waits for its place.
    pub(crate) fn load(
        &mut self,
        tick: &mut dyn FnMut(usize, bool) -> Result<(), ClusterError>,
    ) -> Result<(), ClusterError> {
        let mut told = 0;
        while !self.roster.is_complete() {
            tick(self.nodes.values().filter(|node| node.is_ready).count(), true)?;
            if let Some(event) = self.controller.recv(WAIT) {
                self.take(event)?;
            }
            self.give_places()?;
            for event in &self.happened[told..] {
                if let FabricEvent::NodeLost {
                    error:
                        ClusterError::Lost { name, reason } | ClusterError::Failed { name, reason },
                    ..
                } = event
                {
                    let within = self.replace_within;
                    tracing::warn!(
                        "while the cluster loads, {name} is gone: {reason}; another worker can take its place \
                         within {within:.0?}"
                    );
                }
            }
            told = self.happened.len();
            self.check_vacancies()?;
        }
        Ok(())
    }

    /// Takes an event; returns a worker's reports if it carried them.
    fn take(&mut self, event: Event) -> Result<Option<(Peer, Vec<NodeReport>)>, ClusterError> {
        match event {
            // What a node that is given up said last no longer counts.
            Event::Message { peer, .. } | Event::Lost { peer, .. } if self.gone.contains(&peer) => {
            }
            Event::Joined { peer, address, .. } => {
                let waiting =
                    Waiting { address: address.ip(), joined: Instant::now(), offer: None };
                self.waiting.insert(peer, waiting);
            }
            Event::Message { peer, message, .. } if !self.nodes.contains_key(&peer) => {
                self.overhear(peer, &message);
            }
            Event::Message { peer, message, .. } => match self.read(peer, &message) {
                Ok(Said::Home(home)) => {
                    self.watch.home(home.step, self.now_ns());
                    self.happened.push(FabricEvent::Home(home));
                }
                Ok(Said::Reports(reports)) => return Ok(Some((peer, reports))),
                Ok(Said::Failed(reason)) => {
                    let name = self.nodes[&peer].name.clone();
                    self.lose(peer, ClusterError::Failed { name, reason });
                }
                Ok(Said::Fetch(tensor, rows)) => {
                    let model = &self.casting.model;
                    if let Err(error) = serve_weights(&self.controller, model, peer, (tensor, rows))
                    {
                        self.give_up(peer, error.to_string());
                    }
                }
                Ok(Said::Ready) => self.ready(peer),
                Ok(Said::LinkLost(pass, reason)) => self.link_lost(peer, pass, reason),
                Ok(Said::Answer(held)) => self.watch.answered(self.nodes[&peer].place, &held),
                Ok(Said::Awaiting(pass)) => self.send_role(pass),
                Ok(Said::Met(pass)) => self.met(pass),
                Ok(Said::Leaving) => self.begin_leaving(peer),
                Ok(Said::OldNews) => {}
                Err(lie) => self.give_up(peer, format!("it was sent away for {lie}")),
            },
            Event::Lost { peer, reason } => {
                if let Some(waiting) = self.waiting.remove(&peer) {
                    self.end_process(waiting.offer.and_then(|offer| offer.local));
                }
                if self.nodes.contains_key(&peer) {
                    self.give_up(peer, reason.to_string());
                }
            }
        }
        Ok(None)
    }

    /// What a node says, if one in its role may say it now; else what is wrong with it.
    fn read(&self, peer: Peer, message: &Message) -> Result<Said, String> {
        let node = &self.nodes[&peer];
        let control = match message.kind() {
            Kind::Home if node.is_ready => return self.read_home(node.place, message),
            Kind::Control => Control::read(message).map_err(|error| error.to_string())?,
            kind => return Err(format!("{kind} that is not for the dispatcher")),
        };
        match control {
            Control::Failed(reason) => Ok(Said::Failed(words(&reason))),
            Control::Ready if !node.said_ready => Ok(Said::Ready),
            Control::Fetch { tensor, rows } if !node.is_ready && node.place.lane.is_none() => {
                Ok(Said::Fetch(tensor, rows))
            }
            Control::Reported(reports) if self.reporting => {
                let known = self.names_of(node.place);
                let is_its = |report: &NodeReport| known.contains(&report.name);
                match reports.iter().all(is_its) && reports.len() <= known.len() {
                    true => Ok(Said::Reports(reports)),
                    false => Err("reports of other nodes".to_owned()),
                }
            }
            Control::LinkLost(pass, reason) => match self.links.get(&pass) {
                None => Ok(Said::OldNews),
                Some(linked) if linked.ends.contains(&node.place) => {
                    Ok(Said::LinkLost(pass, words(&reason)))
                }
                Some(_) => Err("news of a connection that is not its own".to_owned()),
            },
            Control::Answer(lane, held) if held.len() <= HELD_MAX => {
                let step = |(flight, epoch, layer)| {
                    (StepId { shard: ShardId { flight, lane }, epoch }, layer)
                };
                Ok(Said::Answer(held.into_iter().map(step).collect()))
            }
            Control::Awaiting(pass) if node.place.lane.is_none() => Ok(Said::Awaiting(pass)),
            Control::Met(pass) if node.place.lane.is_none() => Ok(Said::Met(pass)),
            Control::Leaving if node.leaves_by.is_none() => Ok(Said::Leaving),
            _ => Err("control that it may not send".to_owned()),
        }
    }

    /// Tokens of a step: from the last slice of its pipeline, and as many as its launch asked for.
    fn read_home(&self, place: Place, message: &Message) -> Result<Said, String> {
        let step = message.step();
        let layout = &self.casting.layout;
        let is_last = place.lane.is_none() && place.slice + 1 == layout.slices;
        if !is_last || place.pipeline != layout.pipeline_of(step.shard.lane) {
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
        let is_known = |token: u32| (token as usize) < self.casting.model.config().vocab;
        let fits = home.tokens.len() == asked.len()
            && home.tokens.iter().zip(asked).all(|(generated, asked)| {
                (is_known(generated.token) || generated.token == TOKEN_NONE)
                    && generated.alternatives.len() <= usize::from(*asked)
                    && generated.alternatives.iter().all(|(token, _)| is_known(*token))
            });
        if fits { Ok(Said::Home(home)) } else { Err("tokens that were not asked for".to_owned()) }
    }

    /// The names under which the strands of a worker report: those of its Tier-1 node and of their lanes on it.
    fn names_of(&self, place: Place) -> Vec<String> {
        let Place { pipeline, slice, lane } = place;
        let layout = &self.casting.layout;
        let own = layout.lanes_of_strand(pipeline, 0).start;
        let first = lane.or(layout.tier1_attends.then_some(own));
        let lanes = first.into_iter().flat_map(|first| layout.lanes_of_worker(first));
        let mut names: Vec<String> =
            lanes.map(|lane| layout.node_name(pipeline, slice, Some(lane))).collect();
        if lane.is_none() {
            let strands = 0..layout.strands;
            names.extend(strands.map(|strand| layout.strand_name(pipeline, slice, strand)));
        }
        names
    }

    fn end_process(&self, local: Option<LocalProcess>) {
        if let (Some(end), Some(process)) = (&self.end_process, local) {
            end(process.id);
        }
    }

    /// A node that cannot be told is lost itself, and that is heard next.
    fn tell(&self, peer: Peer, control: &Control) {
        _ = self.controller.send(peer, control.message(Buffer::default()));
    }
}

impl Fabric for RemoteFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        let lane = launch.step.shard.lane;
        let asked = launch.samples.iter().map(|sample| sample.sampling.logprobs.unwrap_or(0));
        self.awaited.insert(launch.step.shard, (launch.step.epoch, asked.collect()));
        if !self.roster.is_open(lane) {
            // It is launched again when the lane goes on, or the dispatcher hears that it is lost.
            return Ok(());
        }
        self.watch.launch(launch.step, self.now_ns());
        let pipeline = self.casting.layout.pipeline_of(lane);
        let first = self.hosts[&Place { pipeline, slice: 0, lane: None }];
        sent(self.controller.send(first, wire::launch(&launch)))
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        let mut wait = if self.happened.is_empty() { WAIT } else { Duration::ZERO };
        while let Some(event) = self.controller.recv(wait) {
            self.take(event)?;
            wait = Duration::ZERO;
        }
        let looked_after = self.look_after_places();
        self.has_failed = looked_after.is_err();
        events.append(&mut self.happened);
        looked_after
    }

    fn drained(&mut self, lanes: &[u32]) {
        self.end_leaving(lanes);
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        // Every strand of a process reports by itself.
        let mut missing: BTreeMap<Peer, (String, usize)> = BTreeMap::new();
        self.reporting = true;
        for (&peer, node) in self.nodes.iter().filter(|(_, node)| node.is_ready) {
            // One that cannot be asked is lost, and its report is missing.
            self.tell(peer, &Control::Report);
            missing.insert(peer, (node.name.clone(), self.casting.layout.strands));
        }
        let mut reports: Vec<NodeReport> = Vec::new();
        let started = Instant::now();
        while missing.keys().any(|peer| self.nodes.contains_key(peer))
            && started.elapsed() < REPORT_PATIENCE
        {
            let Some(event) = self.controller.recv(WAIT) else { continue };
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
            // Nobody should wait for them a second time.
            missing.keys().for_each(|peer| self.give_up(*peer, "it did not report".to_owned()));
            let missing: Vec<String> = missing.into_values().map(|(name, _)| name).collect();
            let nodes = missing.join(", ");
            tracing::warn!(nodes, "did not report: the statistics are without them");
        }
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

impl Drop for RemoteFabric {
    /// Workers that were not needed leave in order. If the job has failed, they hear of that with the connection's end.
    fn drop(&mut self) {
        if !self.has_failed && !std::thread::panicking() {
            self.waiting.keys().for_each(|peer| self.tell(*peer, &Control::Leave));
        }
    }
}
