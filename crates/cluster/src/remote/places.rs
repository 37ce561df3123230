//! Places that lose their node and are given to another worker. The dispatcher's process alone decides; the neighbours
//! of a place are told whom to dial and whom to await.

use super::{Accusation, Linked, Node, RemoteFabric, Unsent};
use crate::casting::new_pass;
use crate::control::{Control, Offer};
use crate::error::ClusterError;
use crate::fabric::FabricEvent;
use crate::net::{Peer, Timing};
use glinthawk_flight::Message;
use glinthawk_protocol::Place;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long a worker that has joined may take to say what it offers.
pub(crate) const OFFER_PATIENCE: Duration = Duration::from_secs(10);

/// How long the contexts of a worker that leaves may take to end. What is left then is computed again elsewhere.
const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// How much later than its neighbours the dispatcher may learn itself that a Tier-1 node is lost.
const NOTICED_WITHIN: Duration = Duration::from_secs(2);

/// Tier-1 nodes that one node may report lost though the dispatcher hears them, before it is the one to blame.
const ACCUSATIONS_MAX: u32 = 2;

/// A place without a node that is ready.
pub(super) struct Vacancy {
    since: Instant,
    /// Who was there, and what became of it.
    name: String,
    reason: String,
    /// Whether it said so itself: another worker may fail for the same reason.
    is_failure: bool,
}

impl RemoteFabric {
    /// Gives a node up.
    pub(super) fn give_up(&mut self, peer: Peer, reason: String) {
        let Some(node) = self.nodes.get(&peer) else { return };
        let name = node.name.clone();
        self.lose(peer, ClusterError::Lost { name, reason });
    }

    /// Takes a node's place away, whatever became of it: a Tier-2 node's lanes are closed, and while a Tier-1 node is
    /// missing, its pipeline rests.
    pub(super) fn lose(&mut self, peer: Peer, error: ClusterError) {
        let Some(node) = self.nodes.remove(&peer) else { return };
        self.gone.insert(peer);
        self.controller.dismiss(peer);
        let place = node.place;
        self.hosts.remove(&place);
        self.links.retain(|_, linked| !linked.ends.contains(&place));
        self.unsent.retain(|_, unsent| unsent.peer != peer);
        self.retract_roles();
        let closed = self.roster.lose(place);
        self.close(&closed);
        let is_failure = matches!(error, ClusterError::Failed { .. });
        let reason = match &error {
            ClusterError::Lost { reason, .. } | ClusterError::Failed { reason, .. } => {
                reason.clone()
            }
            other => other.to_string(),
        };
        if node.leaves_by.is_some() {
            let name = node.name.clone();
            self.happened.push(FabricEvent::NodeLeft { name, lanes: closed });
        } else {
            self.end_process(node.local);
            match self.vacant.contains_key(&place) {
                true => tracing::warn!("a worker that was to be {} is gone: {reason}", node.name),
                false => self.happened.push(FabricEvent::NodeLost { lanes: closed, error }),
            }
        }
        let vacancy = Vacancy { since: Instant::now(), name: node.name, reason, is_failure };
        self.vacant.entry(place).or_insert(vacancy);
        // Those that only waited for the lost one wait no longer.
        self.begin_all();
    }

    /// Workers whose role waits for a neighbour that is gone wait for a place again.
    fn retract_roles(&mut self) {
        let links = &self.links;
        for (_, Unsent { peer, waiting, .. }) in
            self.unsent.extract_if(.., |pass, _| !links.contains_key(pass))
        {
            if let Some(node) = self.nodes.remove(&peer) {
                self.hosts.remove(&node.place);
                self.roster.lose(node.place);
                self.waiting.insert(peer, waiting);
            }
        }
    }

    /// Tells the Tier-1 nodes of lanes to forget them.
    fn close(&mut self, lanes: &[u32]) {
        for &lane in lanes {
            self.watch.forget(lane);
            let pipeline = self.casting.layout.pipeline_of(lane);
            let lost = Control::LaneLost(lane, self.roster.generation(lane));
            let tier1 = self.nodes.iter().filter(|(_, node)| node.place.lane.is_none());
            for (&peer, _) in tier1.filter(|(_, node)| node.place.pipeline == pipeline) {
                self.tell(peer, &lost);
            }
        }
    }

    /// A node has lost a neighbour, whom the dispatcher may still hear. A Tier-1 node is believed of its Tier-2 nodes.
    /// Otherwise the neighbour may be lost indeed, which the dispatcher will hear too. If it does not, a Tier-2 node loses its
    /// own place, and a Tier-1 node costs the other its place.
    pub(super) fn link_lost(&mut self, peer: Peer, pass: u64, reason: String) {
        let [one, other] = self.links[&pass].ends;
        let Some(own) = self.nodes.get(&peer).map(|node| node.place) else { return };
        let other = if one == own { other } else { one };
        let Some(&host) = self.hosts.get(&other) else { return };
        let accused = match (own.lane, other.lane) {
            (None, Some(_)) => return self.give_up(host, reason),
            (Some(_), _) => peer,
            (None, None) => host,
        };
        let accusation = Accusation { by: peer, pass, reason, since: Instant::now() };
        if let Some(node) = self.nodes.get_mut(&accused)
            && node.accused.as_ref().is_none_or(|one| !self.links.contains_key(&one.pass))
        {
            node.accused = Some(accusation);
        }
    }

    /// Gives up nodes that lost a neighbour, if the dispatcher hears both. Of two Tier-1 nodes, the one that speaks is
    /// believed, but not again and again.
    fn judge(&mut self) {
        let is_due = |accused: &mut Accusation| accused.since.elapsed() >= NOTICED_WITHIN;
        let due = self
            .nodes
            .iter_mut()
            .filter_map(|(peer, node)| Some((*peer, node.accused.take_if(is_due)?)));
        for (accused, Accusation { by, pass, reason, .. }) in due.collect::<Vec<_>>() {
            if !self.links.contains_key(&pass) {
                // The neighbour is known to be lost.
                continue;
            }
            let Some(accuser) = self.nodes.get_mut(&by) else { continue };
            accuser.accusations += 1;
            let is_believed = accuser.accusations <= ACCUSATIONS_MAX;
            self.give_up(if is_believed { accused } else { by }, reason);
        }
    }

    /// Gives up nodes that are ready and do not come to the neighbour that waits for them. If only their connection broke before
    /// they were known there, nobody else would say so.
    fn give_up_strangers(&mut self) {
        // As long as a node may be silent. Usually they meet at once.
        let patience = Timing::default().silence;
        let nodes = &self.nodes;
        let is_ready = |host: &Peer| nodes.get(host).is_some_and(|node| node.said_ready);
        let mut late = Vec::new();
        for linked in self.links.values_mut().filter(|linked| !linked.is_met) {
            let hosts = linked.ends.map(|place| self.hosts.get(&place));
            let [Some(dialler), Some(dialled)] = hosts else { continue };
            if !is_ready(dialler) || !is_ready(dialled) {
                continue;
            }
            if linked.both_ready.get_or_insert_with(Instant::now).elapsed() >= patience {
                late.push((*dialler, nodes[dialled].name.clone()));
            }
        }
        for (dialler, name) in late {
            self.give_up(dialler, format!("it has not come to {name} for {patience:.0?}"));
        }
    }

    /// A worker without a role may offer itself, once. One that says anything else is no worker.
    pub(super) fn overhear(&mut self, peer: Peer, message: &Message) {
        let Some(waiting) = self.waiting.get_mut(&peer) else { return };
        match Control::read(message) {
            Ok(Control::Offer(offer)) if waiting.offer.is_none() => match offer.fault() {
                None => {
                    waiting.offer = Some(offer);
                    tracing::info!(%peer, "a worker has joined and waits for a place");
                }
                Some(fault) => self.dismiss(peer, fault),
            },
            _ => self.dismiss(peer, &format!("{} that is no offer", message.kind())),
        }
    }

    /// Sends a worker away that has no role.
    fn dismiss(&mut self, peer: Peer, reason: &str) {
        self.waiting.remove(&peer);
        self.controller.dismiss(peer);
        self.gone.insert(peer);
        if self.complaints.may_write(Instant::now()) {
            tracing::warn!(%peer, reason, "sent a peer away that has no role");
        }
    }

    /// Gives vacant places to workers that wait, and gives up waiting where nobody came in time.
    pub(super) fn look_after_places(&mut self) -> Result<(), ClusterError> {
        self.hurry_leaving();
        self.look_for_idle_nodes();
        self.give_places()?;
        self.give_up_waiting()
    }

    /// Gives vacant places to workers that wait.
    pub(super) fn give_places(&mut self) -> Result<(), ClusterError> {
        let is_late = |joined: Instant| joined.elapsed() >= OFFER_PATIENCE;
        let late =
            self.waiting.iter().filter(|(_, one)| one.offer.is_none() && is_late(one.joined));
        for peer in late.map(|(peer, _)| *peer).collect::<Vec<Peer>>() {
            self.dismiss(peer, "it offered nothing");
        }
        self.judge();
        self.give_up_strangers();
        while let Some((place, peer)) = self.match_made() {
            self.give(place, peer)?;
        }
        Ok(())
    }

    /// A place that is wanted, and a worker for it.
    fn match_made(&self) -> Option<(Place, Peer)> {
        if self.vacant.is_empty() {
            return None;
        }
        // A neighbour that has no role yet cannot be told of another.
        let knows_its_role = |peer: &Peer| self.unsent.values().all(|unsent| unsent.peer != *peer);
        self.roster.wanted().into_iter().find_map(|place| {
            let mut hosts =
                self.roster.neighbours(place).filter_map(|place| self.hosts.get(&place));
            if !hosts.all(knows_its_role) {
                return None;
            }
            let fits = |offer: &Offer| self.casting.fits(place, offer);
            let mut waiting = self.waiting.iter();
            let fitting = waiting.find(|(_, one)| one.offer.as_ref().is_some_and(fits));
            fitting.map(|(peer, _)| (place, *peer))
        })
    }

    /// Gives a place to a worker, and makes its neighbours known to each other.
    fn give(&mut self, place: Place, peer: Peer) -> Result<(), ClusterError> {
        let Some(waiting) = self.waiting.remove(&peer) else { return Ok(()) };
        let Some(Offer { port, local, .. }) = waiting.offer else { return Ok(()) };
        let address = SocketAddr::new(waiting.address, port).to_string();
        let (mut dial, mut callers) = (None, Vec::new());
        for other in self.roster.neighbours(place) {
            let Some(&host) = self.hosts.get(&other) else { continue };
            let pass = new_pass()?;
            // Tier-2 nodes dial their Tier-1 node, and that dials the next slice.
            let dials = place.lane.is_some() || other.lane.is_none() && other.slice > place.slice;
            let ends = if dials { [place, other] } else { [other, place] };
            self.links.insert(pass, Linked::new(ends));
            if dials {
                self.tell(host, &Control::Await(place.lane, pass));
                dial = Some((self.nodes[&host].address.clone(), pass));
            } else {
                self.tell(host, &Control::Dial(address.clone(), pass));
                callers.push((other.lane, pass));
            }
        }
        let awaited = dial.as_ref().map(|(_, pass)| *pass);
        let role = Box::new(self.casting.role(place, dial, callers));
        match awaited {
            Some(pass) => _ = self.unsent.insert(pass, Unsent { peer, role, waiting }),
            None => self.tell(peer, &Control::Role(role)),
        }
        self.roster.load(place);
        self.hosts.insert(place, peer);
        let node = Node::new(&self.casting, place, address, local);
        tracing::info!(node = node.name, "another worker loads");
        self.nodes.insert(peer, node);
        Ok(())
    }

    /// The neighbour that a worker will dial knows it by its pass.
    pub(super) fn send_role(&mut self, pass: u64) {
        if let Some(Unsent { peer, role, .. }) = self.unsent.remove(&pass) {
            self.tell(peer, &Control::Role(role));
        }
    }

    /// A node has met the neighbour that dials it.
    pub(super) fn met(&mut self, pass: u64) {
        if let Some(linked) = self.links.get_mut(&pass) {
            linked.is_met = true;
            self.begin_all();
        }
    }

    /// A worker that was given a place says that it is ready.
    pub(super) fn ready(&mut self, peer: Peer) {
        if let Some(node) = self.nodes.get_mut(&peer) {
            node.said_ready = true;
            self.begin_all();
        }
    }

    /// Workers that are ready, and know their neighbours, begin.
    fn begin_all(&mut self) {
        let is_unmet = |place: &Place| {
            self.links.values().any(|linked| !linked.is_met && linked.ends.contains(place))
        };
        let begins = |node: &Node| node.said_ready && !node.is_ready && !is_unmet(&node.place);
        let beginning = self.nodes.iter().filter(|(_, node)| begins(node));
        for peer in beginning.map(|(peer, _)| *peer).collect::<Vec<Peer>>() {
            self.begin(peer);
        }
    }

    fn begin(&mut self, peer: Peer) {
        let Some(node) = self.nodes.get_mut(&peer) else { return };
        node.is_ready = true;
        let (name, place) = (node.name.clone(), node.place);
        let back = self.roster.ready(place);
        if place.lane.is_none() {
            for (lane, generation) in self.roster.generations_lost(place.pipeline) {
                self.tell(peer, &Control::LaneLost(lane, generation));
            }
        }
        // At the start of the cluster, nothing was lost before.
        if let Some(vacancy) = self.vacant.remove(&place) {
            let after = vacancy.since.elapsed();
            self.happened.push(FabricEvent::NodeBack { name, after, back });
        }
    }

    /// While the cluster first loads: fails where nobody came in time, or where one failed and nobody else waits.
    pub(super) fn check_vacancies(&self) -> Result<(), ClusterError> {
        for (place, Vacancy { since, name, reason, is_failure }) in &self.vacant {
            let is_over = since.elapsed() >= self.replace_within;
            if !self.roster.is_loading(*place) && (*is_failure || is_over) {
                let (name, reason) = (name.clone(), reason.clone());
                return Err(match is_failure {
                    true => ClusterError::Failed { name, reason },
                    false => ClusterError::Lost { name, reason },
                });
            }
        }
        Ok(())
    }

    /// Where nobody came in time, lanes are closed whose contexts only waited. If none is left, the job ends.
    fn give_up_waiting(&mut self) -> Result<(), ClusterError> {
        let within = self.replace_within;
        let is_over = |vacancy: &Vacancy| vacancy.since.elapsed() >= within;
        let over = self.vacant.iter().filter(|(place, vacancy)| {
            place.lane.is_none() && is_over(vacancy) && !self.roster.is_loading(**place)
        });
        let pipelines: Vec<usize> = over.map(|(place, _)| place.pipeline).collect();
        for pipeline in pipelines {
            let lanes = self.roster.close(pipeline);
            self.close(&lanes);
            if !lanes.is_empty() {
                self.happened.push(FabricEvent::LanesClosed(lanes));
            }
        }
        let is_loading = self.vacant.keys().any(|place| self.roster.is_loading(*place));
        let first = self.vacant.values().min_by_key(|vacancy| vacancy.since);
        match first.filter(|first| is_over(first) && self.roster.all_closed() && !is_loading) {
            None => Ok(()),
            Some(Vacancy { name, reason, .. }) => {
                Err(ClusterError::Lost { name: name.clone(), reason: reason.clone() })
            }
        }
    }

    /// A worker wants to leave. Contexts of a Tier-2 node end there by themselves for a while; a Tier-1 node's place is
    /// free at once.
    pub(super) fn begin_leaving(&mut self, peer: Peer) {
        let Some(node) = self.nodes.get_mut(&peer) else { return };
        node.leaves_by = Some(Instant::now() + LEAVE_WITHIN);
        tracing::warn!("{} leaves when its contexts have ended", node.name);
        match node.place.lane {
            Some(first) => {
                let lanes = self.casting.layout.lanes_of_worker(first).collect();
                self.happened.push(FabricEvent::LanesLeaving(lanes));
            }
            None => self.let_go(peer),
        }
    }

    fn hurry_leaving(&mut self) {
        let is_late = |node: &Node| node.leaves_by.is_some_and(|by| Instant::now() >= by);
        let late = self.nodes.iter().filter(|(_, node)| is_late(node));
        for peer in late.map(|(peer, _)| *peer).collect::<Vec<Peer>>() {
            self.let_go(peer);
        }
    }

    /// These lanes are leaving, and have no context left.
    pub(super) fn end_leaving(&mut self, drained: &[u32]) {
        let is_drained = |first: u32| {
            self.casting.layout.lanes_of_worker(first).all(|lane| drained.contains(&lane))
        };
        let leaving = self.nodes.iter().filter(|(_, node)| {
            node.leaves_by.is_some() && node.place.lane.is_some_and(is_drained)
        });
        for peer in leaving.map(|(peer, _)| *peer).collect::<Vec<Peer>>() {
            self.let_go(peer);
        }
    }

    /// Lets a worker leave.
    fn let_go(&mut self, peer: Peer) {
        self.tell(peer, &Control::Leave);
        self.give_up(peer, "it left".to_owned());
    }
}
