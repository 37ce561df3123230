//! Faults, and what follows from them, as the dispatcher's process of a real cluster decides it.

use super::super::setting::{Costs, Failure, Fault, FaultKind, Wire};
use super::{Cluster, Event, nodes};
use crate::dispatcher::DispatcherEvent;
use crate::message::NodeAddress;
use crate::roster::Place;
use crate::watch::Finding;

/// A host that offers itself where nobody is wanted yet asks again after this time.
const ASKS_AGAIN_NS: u64 = 500;

/// How often nodes that hang are looked for, and how often at most before that counts as a deadlock.
const LOOKS_EVERY_NS: u64 = 2_000;
const LOOKS_MAX: u64 = 500_000;

/// What follows from a fault.
#[derive(Clone, Copy)]
pub(super) enum Follows {
    /// The others know that a node with this host is gone. Another host offers itself so much later.
    Noticed(NodeAddress, u64, Option<u64>),
    /// A host offers itself for a node.
    Offers(NodeAddress),
    /// It has loaded, if it is still the same.
    Ready(NodeAddress, u64),
    /// Nobody should wait for a missing Tier-1 node any longer.
    Expires,
    /// A node that is leaving has to go.
    MustGo(NodeAddress),
    /// It is time to look whether a node hangs.
    Look,
}

fn place_of(node: NodeAddress) -> Place {
    let (slice, lane) = match node {
        NodeAddress::Tier1(slice) => (slice, None),
        NodeAddress::Tier2(slice, lane) => (slice, Some(lane)),
        NodeAddress::Dispatcher => unreachable!("the dispatcher has no place"),
    };
    Place { pipeline: 0, slice, lane }
}

fn node_at(place: Place) -> NodeAddress {
    match place.lane {
        None => NodeAddress::Tier1(place.slice),
        Some(lane) => NodeAddress::Tier2(place.slice, lane),
    }
}

impl<C: Costs> Cluster<'_, C> {
    pub(super) fn fault(&mut self, number: usize) -> Result<(), Failure> {
        let Fault { node, kind, back_ns, .. } = self.topology.faults[number];
        let place = place_of(node);
        if self.roster.is_hosted(place) != self.nodes.contains_key(&node)
            || !self.roster.is_hosted(place) && !self.roster.is_loading(place)
        {
            return Ok(()); // nobody is there, or nobody who lives
        }
        match (kind, node) {
            // One that loads has nothing to lose, and nobody waits for it in vain.
            _ if self.roster.is_loading(place) => self.lose(node, back_ns),
            (FaultKind::Leaves { within_ns }, NodeAddress::Tier2(_, lane)) => {
                if self.leaving.insert(node, back_ns).is_some() {
                    return Ok(());
                }
                let must_go = Event::Follows(Follows::MustGo(node));
                self.schedule(self.now_ns + within_ns, must_go);
                self.dispatch(Some(DispatcherEvent::LaneLeaving(lane)))
            }
            (FaultKind::Leaves { .. }, _) => self.lose(node, back_ns),
            (FaultKind::Dies { noticed_ns }, _) => {
                self.nodes.remove(&node);
                let noticed = Event::Follows(Follows::Noticed(node, self.host(node), back_ns));
                self.schedule(self.now_ns + noticed_ns, noticed);
                Ok(())
            }
            (FaultKind::CutOff { for_ns, noticed_ns }, _) => {
                self.cut_off.insert(node, self.now_ns + for_ns);
                let noticed = Event::Follows(Follows::Noticed(node, self.host(node), back_ns));
                if noticed_ns < for_ns {
                    self.schedule(self.now_ns + noticed_ns, noticed);
                }
                Ok(())
            }
            (FaultKind::Hangs, _) => {
                self.nodes.remove(&node);
                if self.hanging.is_empty() {
                    self.schedule(self.now_ns, Event::Follows(Follows::Look));
                }
                self.hanging.insert(node, back_ns);
                Ok(())
            }
        }
    }

    /// Whether every prompt has its completion: then nobody looks for nodes any more.
    fn is_over(&self) -> bool {
        self.completions.len() == self.prompts
    }

    /// When what is sent on a link arrives at the earliest: when neither of its ends is cut off.
    pub(super) fn reached_ns(&self, link: Wire) -> u64 {
        let last = self.topology.slice_layers.len() - 1;
        let (one, other) = match link {
            Wire::Launch => (0, NodeAddress::Dispatcher),
            Wire::Hop(slice) => (slice, NodeAddress::Tier1(slice + 1)),
            Wire::Out(slice, lane) | Wire::Back(slice, lane) => {
                (slice, NodeAddress::Tier2(slice, lane))
            }
            Wire::Home => (last, NodeAddress::Dispatcher),
        };
        let ends = [NodeAddress::Tier1(one), other];
        ends.iter().filter_map(|node| self.cut_off.get(node)).copied().max().unwrap_or(0)
    }

    /// Whether a node takes what another sends: one that lost its place is known to those that came before that.
    pub(super) fn is_known(&self, node: NodeAddress, host: u64, to: NodeAddress) -> bool {
        let known = self.ousted.get(&(node, host)).map(|(_, known)| known.get(&to).copied());
        known.is_none_or(|known| known.unwrap_or(0) == self.host(to))
    }

    /// Looks for nodes that hang, as long as there are any.
    fn look(&mut self) -> Result<(), Failure> {
        if self.hanging.is_empty() || self.is_over() {
            return Ok(());
        }
        self.looks += 1;
        if self.looks > LOOKS_MAX {
            return Err(Failure::Deadlock(self.dispatcher.prompt_ids()));
        }
        self.schedule(self.now_ns + LOOKS_EVERY_NS, Event::Follows(Follows::Look));
        let roster = &self.roster;
        match self.watch.look(self.now_ns, |lane| roster.is_open(lane)) {
            None => {}
            Some(Finding::Overdue(step)) => {
                let lane = step.shard.lane;
                let way = self.roster.way(lane);
                self.watch.ask(step, way.iter().copied(), self.now_ns);
                for place in way {
                    if let Some(driver) = self.nodes.get(&node_at(place)) {
                        let held = driver.tier1.as_ref().map(|(tier1, _)| tier1.held(lane));
                        self.watch.answered(place, &held.unwrap_or_default());
                    }
                }
            }
            Some(Finding::Silent(places, _)) => {
                for place in places {
                    self.find(node_at(place))?;
                }
            }
            Some(Finding::Withheld(tier1, lane, _)) => {
                self.find(node_at(self.roster.place_of(lane, tier1.slice)))?;
            }
            Some(Finding::Astray(step)) => {
                self.dispatch(Some(DispatcherEvent::Relaunch(step)))?;
            }
        }
        Ok(())
    }

    /// A node does nothing. Where it lives and is only slow, it begins anew.
    fn find(&mut self, node: NodeAddress) -> Result<(), Failure> {
        self.counts.found += u64::from(self.hanging.contains_key(&node));
        let back_ns = self.hanging.get(&node).copied().unwrap_or(Some(ASKS_AGAIN_NS));
        self.lose(node, back_ns)
    }

    pub(super) fn follow(&mut self, what: Follows) -> Result<(), Failure> {
        match what {
            Follows::Noticed(node, host, back_ns) if host == self.host(node) => {
                // One that is cut off does not know that it lost its place.
                if let Some(driver) = self.nodes.remove(&node) {
                    self.counts.doubled += 1;
                    self.ousted.insert((node, host), (driver, self.hosts.clone()));
                }
                self.lose(node, back_ns)
            }
            Follows::Noticed(..) => Ok(()),
            Follows::Look => self.look(),
            Follows::Offers(node) => {
                let place = place_of(node);
                if self.roster.is_hosted(place) || self.roster.is_loading(place) || self.is_over() {
                    return Ok(());
                }
                if !self.roster.wanted().contains(&place) {
                    let again = Event::Follows(Follows::Offers(node));
                    self.schedule(self.now_ns + ASKS_AGAIN_NS, again);
                    return Ok(());
                }
                self.roster.load(place);
                let ready = Event::Follows(Follows::Ready(node, self.host(node)));
                self.schedule(self.now_ns + self.topology.load_ns, ready);
                Ok(())
            }
            Follows::Ready(node, host) if host == self.host(node) => self.ready(node),
            Follows::Ready(..) => Ok(()),
            Follows::Expires => {
                if !self.roster.rests(0) {
                    return Ok(());
                }
                let lanes = self.roster.close(0);
                self.counts.expired += lanes.len() as u64;
                self.close(&lanes)
            }
            Follows::MustGo(node) => match self.leaving.get(&node) {
                Some(&back_ns) => self.lose(node, back_ns),
                None => Ok(()),
            },
        }
    }

    /// A node is known to be gone.
    fn lose(&mut self, node: NodeAddress, back_ns: Option<u64>) -> Result<(), Failure> {
        self.nodes.remove(&node);
        self.leaving.remove(&node);
        self.hanging.remove(&node);
        self.cut_off.remove(&node);
        *self.hosts.entry(node).or_default() += 1;
        let place = place_of(node);
        let was_hosted = self.roster.is_hosted(place);
        let closed = self.roster.lose(place);
        if let Some(back_ns) = back_ns {
            self.schedule(self.now_ns + back_ns, Event::Follows(Follows::Offers(node)));
        }
        if was_hosted && place.lane.is_none() {
            let expires_ns = self.now_ns + self.topology.replace_within_ns;
            self.schedule(expires_ns, Event::Follows(Follows::Expires));
        }
        self.close(&closed)
    }

    fn close(&mut self, lanes: &[u32]) -> Result<(), Failure> {
        for &lane in lanes {
            self.watch.forget(lane);
            let generation = Some(self.roster.generation(lane));
            for slice in 0..self.topology.slice_layers.len() {
                let tier1 = NodeAddress::Tier1(slice);
                if let Some(driver) = self.nodes.get_mut(&tier1) {
                    driver.lose_lane(lane, generation);
                    self.stir(tier1, self.host(tier1));
                }
            }
            self.dispatch(Some(DispatcherEvent::LaneLost(lane)))?;
        }
        Ok(())
    }

    fn ready(&mut self, node: NodeAddress) -> Result<(), Failure> {
        self.counts.replaced += 1;
        let mut fresh = nodes(self.topology).remove(&node).expect("every node can be made again");
        let back = self.roster.ready(place_of(node));
        for (lane, generation) in self.roster.generations_lost(0) {
            fresh.lose_lane(lane, Some(generation));
        }
        self.nodes.insert(node, fresh);
        for lane in back.opened {
            self.dispatch(Some(DispatcherEvent::LaneOpened(lane)))?;
        }
        let steps = self.launched.values().filter(|step| back.resumed.contains(&step.shard.lane));
        for step in steps.copied().collect::<Vec<_>>() {
            self.dispatch(Some(DispatcherEvent::Relaunch(step)))?;
        }
        Ok(())
    }

    /// Nodes that are leaving go when their lane has no context left.
    pub(super) fn let_drained_go(&mut self) -> Result<(), Failure> {
        let drained = self.dispatcher.lanes_drained();
        let is_drained = |node: &NodeAddress| matches!(node, NodeAddress::Tier2(_, lane) if drained.contains(lane));
        let Some((&node, &back_ns)) = self.leaving.iter().find(|(node, _)| is_drained(node)) else {
            return Ok(());
        };
        self.counts.drained += 1;
        self.lose(node, back_ns)
    }

    /// What holds after every event that concerns the dispatcher.
    pub(super) fn check(&self) {
        self.dispatcher.check();
        for (node, driver) in &self.nodes {
            for (lane, (tier2, _)) in &driver.lanes {
                let shards = self.topology.dispatcher.flights_of(*lane).len();
                assert!(tier2.waiting() <= shards, "{node:?} has more to do than there are shards");
            }
        }
    }
}
