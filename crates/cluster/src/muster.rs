//! Gathering workers and giving them roles: the dispatcher's side of a cluster's start.

use crate::budget::{Budget, Placed};
use crate::casting::{Casting, new_pass};
use crate::complaints::Complaints;
use crate::control::{Control, NO_OFFER, Offer};
use crate::error::ClusterError;
use crate::kinds::Kinds;
use crate::layout::Layout;
use crate::net::{Config, Controller, Encryption, Event, LostReason, Peer, Token};
use crate::remote::{Cast, Linked, Node, OFFER_PATIENCE, RemoteFabric, Waiting};
use crate::spec::{ClusterSpec, Offered};
use glinthawk_compute::Isa;
use glinthawk_flight::{Buffer, Pool};
use glinthawk_protocol::Place;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between two looks at the caller's interrupt while nothing happens.
const TICK: Duration = Duration::from_millis(100);

/// Idle buffers the dispatcher keeps.
const POOL_BUFFERS: usize = 64;

/// A dispatcher that listens for workers.
pub struct Muster {
    controller: Controller,
    members: BTreeMap<Peer, Waiting>,
    complaints: Complaints,
}

/// The connections between nodes, by their passes.
type Links = BTreeMap<u64, Linked>;

/// A running cluster.
pub struct Mustered {
    /// Its nodes.
    pub fabric: RemoteFabric,
    /// Its shape, with what its workers settled.
    pub layout: Layout,
    /// Pages of every lane.
    pub lane_pages: Vec<u32>,
    /// What each node's kernels run on.
    pub kinds: Kinds,
    /// Kernel threads of the first Tier-1 node.
    pub threads: usize,
    /// Least memory for contexts of any attention worker, in bytes.
    pub context_memory_bytes: u64,
}

impl Muster {
    /// Listens for workers that have the token; returns the address bound.
    pub fn listen(
        address: &str,
        token: Token,
        encryption: Encryption,
    ) -> Result<(Self, SocketAddr), ClusterError> {
        let pool = Arc::new(Pool::new(POOL_BUFFERS));
        let config = Config { encryption, ..Config::new("dispatcher", token, pool) };
        let controller = Controller::start(config)
            .map_err(ClusterError::io("cannot start the network thread"))?;
        let refused = format!("cannot listen for workers at {address}");
        let bound = controller.listen(address).map_err(ClusterError::io(refused))?;
        let complaints = Complaints::new();
        Ok((Self { controller, members: BTreeMap::new(), complaints }, bound))
    }

    /// Waits for the layout's workers, gives them their roles, and serves them weights until all
    /// are ready. `tick` is called now and then with the number that has joined (and `true` once
    /// they load); its error ends the waiting.
    pub fn assemble(
        mut self,
        mut spec: ClusterSpec<'_>,
        tick: &mut dyn FnMut(usize, bool) -> Result<(), ClusterError>,
    ) -> Result<Mustered, ClusterError> {
        let mut layout = spec.layout.clone();
        let layers = spec.model.config().layers;
        if layout.slices > layers {
            return Err(ClusterError::Slices { slices: layout.slices, layers });
        }
        let (tier1_needed, tier2_needed) = layout.nodes();
        let needed = tier1_needed + tier2_needed;
        while self.offers() < needed + spec.spares {
            tick(self.offers(), false)?;
            let event = self.controller.recv(TICK);
            self.gather(event);
            self.hurry();
            self.measure(&spec);
        }
        if let Some(settled) = spec.settle.and_then(|settle| settle(&self.offered())) {
            layout = settled;
        }
        let (tier1, tier2) = self.cast(&layout)?;
        layout.page_positions = self.settle_pages(&layout, &tier1, &tier2)?;
        let has_gpu = |peer: &Peer| self.offer(*peer).gpu.is_some();
        let is_ahead = tier1.iter().all(has_gpu) && !tier2.iter().flatten().any(has_gpu);
        let is_hybrid = layout.pipelines == 1 && layout.tier1_attends && layout.tier2 > 0;
        layout.own_batch = (is_hybrid && is_ahead).then_some(spec.own_batch);
        let layout = self.with_strands(layout, &spec, &tier1, &tier2);
        let mut placed = Vec::new();
        for (index, (&peer, workers)) in tier1.iter().zip(&tier2).enumerate() {
            let (pipeline, slice) = (index / layout.slices, index % layout.slices);
            let first = layout.lanes_of_strand(pipeline, 0).start;
            let first_remote = first + u32::from(layout.tier1_attends);
            let (offer, lane) = (self.offer(peer), (first_remote > first).then_some(first));
            placed.push(Placed { offer, slice, has_weights: true, lane });
            placed.extend((first_remote..).zip(workers).map(|(lane, &peer)| {
                let (offer, lane) = (self.offer(peer), Some(lane));
                Placed { offer, slice, has_weights: false, lane }
            }));
        }
        let config = spec.model.config();
        let wanted = spec.context_memory_bytes;
        let wanted = [spec.own_memory_bytes.or(wanted), wanted];
        let budget = Budget::new(&layout, config, wanted, &placed)?;
        let Budget { lane_pages, memory_bytes_min } = budget;
        let cast = places(&layout, &tier1, &tier2);
        let mut kinds = BTreeMap::new();
        for (&place, &peer) in &cast {
            kinds.insert(place, self.kind(peer, spec.isa)?);
        }
        let casting = Casting {
            layout: layout.clone(),
            lane_pages: lane_pages.clone(),
            model: Arc::clone(spec.model),
            model_name: spec.model_name.clone(),
            identity: spec.identity,
            kinds,
            memory_wanted: wanted,
            link: spec.link,
            trace: spec.trace,
        };
        let (nodes, links) = self.send_roles(&casting, &cast)?;
        let threads = self.offer(tier1[0]).threads as usize;
        let kinds = casting.node_kinds();
        self.members.retain(|peer, _| !nodes.contains_key(peer));
        let mut fabric = RemoteFabric::new(Cast {
            controller: self.controller,
            casting,
            nodes,
            links,
            waiting: self.members,
            replace_within: spec.replace_within,
            end_process: spec.end_process.take(),
        });
        fabric.load(tick)?;
        let context_memory_bytes = memory_bytes_min;
        Ok(Mustered { fabric, layout, lane_pages, kinds, threads, context_memory_bytes })
    }

    fn offered(&self) -> Vec<Offered> {
        let offers = self.members.values().filter_map(|member| member.offer.as_ref());
        let offered = offers.map(|offer| Offered {
            tier: offer.tier,
            threads: offer.threads as usize,
            memory_bytes: offer.memory_bytes,
            has_gpu: offer.gpu.is_some(),
        });
        offered.collect()
    }

    /// How many strands the workers compute in: devices have one.
    fn with_strands(
        &self,
        layout: Layout,
        spec: &ClusterSpec<'_>,
        tier1: &[Peer],
        tier2: &[Vec<Peer>],
    ) -> Layout {
        let wanted = spec.context_memory_bytes;
        let memory = |peer: &Peer, wanted: Option<u64>| {
            wanted.unwrap_or_else(|| self.offer(*peer).memory_bytes)
        };
        let own = tier1.iter().filter(|_| layout.tier1_attends);
        let own = own.map(|peer| memory(peer, spec.own_memory_bytes.or(wanted)));
        let others = tier2.iter().flatten().map(|peer| memory(peer, wanted));
        let memory = own.chain(others).min();
        let threads = tier1.iter().map(|&peer| self.offer(peer).threads as usize).min();
        let mut all = tier1.iter().chain(tier2.iter().flatten());
        match (spec.crowd, threads, memory) {
            (None, _, _) => layout,
            (Some(crowd), Some(threads), Some(memory))
                if all.all(|&peer| self.offer(peer).gpu.is_none()) =>
            {
                layout.with_strands(spec.model.config(), threads, memory, crowd)
            }
            _ => Layout { strands: 1, ..layout },
        }
    }

    fn offers(&self) -> usize {
        self.members.values().filter(|member| member.offer.is_some()).count()
    }

    fn offer(&self, peer: Peer) -> &Offer {
        self.members[&peer].offer.as_ref().expect("only members with an offer are cast")
    }

    fn gather(&mut self, event: Option<Event>) {
        match event {
            None => {}
            Some(Event::Joined { peer, address, .. }) => {
                let (address, joined) = (address.ip(), Instant::now());
                self.members.insert(peer, Waiting { address, joined, offer: None });
            }
            Some(Event::Lost { peer, reason }) => self.left(peer, &reason),
            Some(Event::Message { peer, message, .. }) => {
                let Some(member) = self.members.get_mut(&peer) else { return };
                match Control::read(&message) {
                    Ok(Control::Offer(offer)) if member.offer.is_none() => match offer.fault() {
                        None => member.offer = Some(offer),
                        Some(fault) => self.dismiss(peer, fault),
                    },
                    _ => self.dismiss(peer, NO_OFFER),
                }
            }
        }
    }

    /// Sends workers away that joined and offer nothing: they take places.
    fn hurry(&mut self) {
        let is_late =
            |member: &Waiting| member.offer.is_none() && member.joined.elapsed() >= OFFER_PATIENCE;
        let late = self.members.iter().filter(|(_, member)| is_late(member));
        for peer in late.map(|(peer, _)| *peer).collect::<Vec<Peer>>() {
            self.dismiss(peer, "it offered nothing");
        }
    }

    /// Sends workers away that would be in Tier 2 and have no memory for one context: with them nothing could begin.
    fn measure(&mut self, spec: &ClusterSpec<'_>) {
        let (layout, config) = (&spec.layout, spec.model.config());
        if spec.settle.is_some() || spec.context_memory_bytes.is_some() {
            return; // what they have to hold is not known yet, or somebody has said it
        }
        let lane = u32::from(layout.tier1_attends);
        let too_small = |(&peer, member): (&Peer, &Waiting)| {
            let offer = member.offer.as_ref()?;
            let attends = offer.tier == Some(2) && offer.gpu.is_none();
            let pages = layout.pages(config, (0, lane), offer.memory_bytes);
            Some((peer, pages.err().filter(|_| attends)?.to_string()))
        };
        for (peer, reason) in self.members.iter().filter_map(too_small).collect::<Vec<_>>() {
            self.dismiss(peer, &reason);
        }
    }

    fn left(&mut self, peer: Peer, reason: &LostReason) {
        if self.members.remove(&peer).is_some() && self.complaints.may_write(Instant::now()) {
            tracing::warn!(%peer, %reason, "a worker left before the cluster was complete");
        }
    }

    fn dismiss(&mut self, peer: Peer, reason: &str) {
        self.members.remove(&peer);
        self.controller.dismiss(peer);
        if self.complaints.may_write(Instant::now()) {
            tracing::warn!(%peer, reason, "sent a worker away");
        }
    }

    /// Which workers are Tier 1, by slice, and which are Tier 2, by slice and lane, pipeline after pipeline. Wishes are
    /// granted; the rest are assigned by strength, the strongest to Tier 1.
    fn cast(&self, layout: &Layout) -> Result<(Vec<Peer>, Vec<Vec<Peer>>), ClusterError> {
        let (tier1_needed, tier2_needed) = layout.nodes();
        let mut cast: [Vec<Peer>; 2] = [Vec::new(), Vec::new()];
        let mut open: Vec<Peer> = Vec::new();
        for (&peer, member) in &self.members {
            match member.offer.as_ref().map(|offer| offer.tier) {
                Some(Some(tier)) => cast[usize::from(tier != 1)].push(peer),
                Some(None) => open.push(peer),
                None => {}
            }
        }
        let strength = |peer: Peer| {
            let Offer { gpu, kind, .. } = self.offer(peer);
            (gpu.is_some(), Isa::of_kind(kind).unwrap_or(Isa::Portable))
        };
        open.sort_by_key(|peer| Reverse((strength(*peer), self.offer(*peer).threads)));
        let wanted = tier1_needed.saturating_sub(cast[0].len()).min(open.len());
        let rest = open.split_off(wanted);
        cast[0].extend(open);
        cast[1].extend(rest);
        // The same kinds of nodes have the same roles every time: results are found again by them.
        for peers in &mut cast {
            peers.sort_by_key(|peer| (self.offer(*peer).local, Reverse(strength(*peer)), *peer));
        }
        let [mut tier1, mut tier2] = cast;
        if tier1.len() < tier1_needed || tier2.len() < tier2_needed {
            let (tier1, tier2) = (tier1.len(), tier2.len());
            return Err(ClusterError::Workers { tier1, tier2, tier1_needed, tier2_needed });
        }
        // Those that are left over wait for a place.
        tier1.truncate(tier1_needed);
        tier2.truncate(tier2_needed);
        let lanes = layout.tier2.max(1);
        let mut by_slice: Vec<Vec<Peer>> = tier2.chunks(lanes).map(<[Peer]>::to_vec).collect();
        by_slice.resize(tier1_needed, Vec::new());
        Ok((tier1, by_slice))
    }

    /// Positions of a page that all attending workers can use: those wanted, or what the first of them likes best.
    fn settle_pages(
        &self,
        layout: &Layout,
        tier1: &[Peer],
        tier2: &[Vec<Peer>],
    ) -> Result<u32, ClusterError> {
        let own = tier1.iter().filter(|_| layout.tier1_attends);
        let attending = own.chain(tier2.iter().flatten()).map(|&peer| self.offer(peer));
        let sizes: Vec<&[u32]> = attending.map(|offer| &offer.page_positions[..]).collect();
        if sizes.iter().all(|sizes| sizes.contains(&layout.page_positions)) {
            return Ok(layout.page_positions);
        }
        common_size(&sizes).ok_or(ClusterError::PageSizes)
    }

    /// What a worker's kernels are to run on: its GPU, or its own best, unless the user wants less of all CPUs.
    fn kind(&self, peer: Peer, best: Option<Isa>) -> Result<String, ClusterError> {
        let Offer { gpu, kind, .. } = self.offer(peer);
        if gpu.is_some() {
            return Ok(kind.clone());
        }
        let own = Isa::of_kind(kind)?;
        Ok(best.map_or(own, |best| own.min(best)).kind())
    }

    /// Gives every place to its worker, and makes neighbours known to each other.
    fn send_roles(
        &self,
        casting: &Casting,
        cast: &BTreeMap<Place, Peer>,
    ) -> Result<(BTreeMap<Peer, Node>, Links), ClusterError> {
        let (mut nodes, mut links, mut callers) = (BTreeMap::new(), Links::new(), BTreeMap::new());
        let mut dials = BTreeMap::new();
        for &place in cast.keys() {
            // Tier-2 nodes dial their Tier-1 node, and that dials the next slice.
            let slice = place.slice + usize::from(place.lane.is_none());
            let dialled = Place { slice, lane: None, ..place };
            if let Some(&peer) = cast.get(&dialled) {
                let pass = new_pass()?;
                links.insert(pass, Linked::new([place, dialled]));
                dials.insert(place, (self.address(peer), pass));
                callers.entry(dialled).or_insert_with(Vec::new).push((place.lane, pass));
            }
        }
        for (&place, &peer) in cast {
            let callers = callers.remove(&place).unwrap_or_default();
            let role = casting.role(place, dials.remove(&place), callers);
            self.controller.send(peer, Control::Role(Box::new(role)).message(Buffer::default()))?;
            let node = Node::new(casting, place, self.address(peer), self.offer(peer).local);
            nodes.insert(peer, node);
        }
        Ok((nodes, links))
    }

    /// Where neighbours find a worker.
    fn address(&self, peer: Peer) -> String {
        SocketAddr::new(self.members[&peer].address, self.offer(peer).port).to_string()
    }
}

/// The workers by their places.
fn places(layout: &Layout, tier1: &[Peer], tier2: &[Vec<Peer>]) -> BTreeMap<Place, Peer> {
    let mut places = BTreeMap::new();
    for (index, (&peer, workers)) in tier1.iter().zip(tier2).enumerate() {
        let (pipeline, slice) = (index / layout.slices, index % layout.slices);
        places.insert(Place { pipeline, slice, lane: None }, peer);
        let lanes = layout.lanes_of_strand(pipeline, 0).skip(usize::from(layout.tier1_attends));
        for (lane, &worker) in lanes.zip(workers) {
            places.insert(Place { pipeline, slice, lane: Some(lane) }, worker);
        }
    }
    places
}

/// The first of the first list that is in all lists.
fn common_size(sizes: &[&[u32]]) -> Option<u32> {
    let in_all = |size: &&u32| sizes.iter().all(|usable| usable.contains(size));
    sizes.first()?.iter().find(in_all).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_of_a_size_that_all_can_use() {
        assert_eq!(common_size(&[&[16, 8], &[16]]), Some(16));
        assert_eq!(common_size(&[&[64, 16, 8], &[8, 16]]), Some(16), "what the first likes best");
        assert_eq!(common_size(&[&[64], &[16]]), None);
    }
}
