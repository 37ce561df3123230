//! The nodes elsewhere that a worker's nodes have connections with. They may be replaced while it works.

use crate::control::Role;
use crate::net::Peer;
use glinthawk_protocol::NodeAddress;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Who introduces itself to a node: a lane of the first strand, or (`None`) the slice before. And the pass that the
/// dispatcher gave both.
pub(crate) type Caller = (Option<u32>, u64);

/// The neighbours that a strand's nodes send to or hear from, as they were at some moment.
#[derive(Clone, Default)]
pub(crate) struct Peers(BTreeMap<NodeAddress, Peer>);

impl Peers {
    pub(crate) fn get(&self, node: NodeAddress) -> Option<Peer> {
        self.0.get(&node).copied()
    }

    pub(crate) fn node_at(&self, peer: Peer) -> Option<NodeAddress> {
        self.0.iter().find(|(_, known)| **known == peer).map(|(node, _)| *node)
    }
}

/// The neighbours of a process, by the nodes of the first strand that they have.
pub(crate) struct Neighbours {
    table: Mutex<Table>,
    /// Counts changes.
    version: AtomicU64,
}

struct Table {
    /// Each with the pass of its connection.
    peers: BTreeMap<NodeAddress, (Peer, u64)>,
    /// Who is still to introduce itself. No other node knows these passes.
    callers: Vec<Caller>,
    /// The pass of the newest connection that this process is to make.
    dialling: u64,
}

impl Neighbours {
    pub(crate) fn new(role: &Role) -> Self {
        let callers = role.callers.clone();
        let table = Table { peers: BTreeMap::new(), callers, dialling: 0 };
        Self { table: Mutex::new(table), version: AtomicU64::new(0) }
    }

    /// Changes the table, then the version: who has seen the new version sees the new table.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.look();
        let outcome = change(&mut table);
        self.version.fetch_add(1, Ordering::Release);
        outcome
    }

    fn look(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panic with the neighbours")
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn insert(&self, node: NodeAddress, peer: Peer, pass: u64) {
        self.change(|table| table.peers.insert(node, (peer, pass)));
    }

    /// Whom a peer is, and the pass of its connection.
    pub(crate) fn known(&self, peer: Peer) -> Option<(NodeAddress, u64)> {
        let table = self.look();
        let known = table.peers.iter().find(|(_, (known, _))| *known == peer);
        known.map(|(node, (_, pass))| (*node, *pass))
    }

    pub(crate) fn remove(&self, peer: Peer) -> Option<(NodeAddress, u64)> {
        let known = self.known(peer)?;
        self.change(|table| table.peers.remove(&known.0));
        Some(known)
    }

    /// Awaits a caller, in place of the one that introduced itself so before, whose connection is returned.
    pub(crate) fn expect(&self, role: &Role, caller: Caller) -> Option<Peer> {
        let node = node_of(role, caller.0)?;
        self.change(|table| {
            table.callers.retain(|(known, _)| *known != caller.0);
            table.callers.push(caller);
            table.peers.remove(&node).map(|(peer, _)| peer)
        })
    }

    /// Whether somebody is still to introduce itself.
    pub(crate) fn awaits_callers(&self) -> bool {
        !self.look().callers.is_empty()
    }

    /// The neighbour that a peer says it is, if the dispatcher has told this process so. A pass is good for once.
    pub(crate) fn introduce(&self, role: &Role, peer: Peer, caller: Caller) -> Option<NodeAddress> {
        let node = node_of(role, caller.0)?;
        self.change(|table| {
            let place = table.callers.iter().position(|awaited| *awaited == caller)?;
            table.callers.swap_remove(place);
            table.peers.insert(node, (peer, caller.1));
            Some(node)
        })
    }

    /// A connection is to be made to the node that this process dials, in place of the one it has, which is returned.
    pub(crate) fn begin_dial(&self, node: NodeAddress, pass: u64) -> Option<Peer> {
        self.change(|table| {
            table.dialling = pass;
            table.peers.remove(&node).map(|(peer, _)| peer)
        })
    }

    /// It is made; `false` if another has been asked for meanwhile.
    pub(crate) fn end_dial(&self, node: NodeAddress, peer: Peer, pass: u64) -> bool {
        self.change(|table| {
            let is_newest = table.dialling == pass;
            if is_newest {
                table.peers.insert(node, (peer, pass));
            }
            is_newest
        })
    }

    /// The neighbours as a strand sees them.
    pub(crate) fn of_strand(&self, role: &Role, strand: usize) -> Peers {
        let lane_of = |first: u32| {
            let lane = role.layout.lanes_of_worker(first).nth(strand);
            lane.expect("every strand has a lane on every worker")
        };
        let of_strand = |node: &NodeAddress| match *node {
            NodeAddress::Tier2(slice, first) => NodeAddress::Tier2(slice, lane_of(first)),
            node => node,
        };
        let table = self.look();
        Peers(table.peers.iter().map(|(node, (peer, _))| (of_strand(node), *peer)).collect())
    }
}

/// The node that introduces itself so, if one can.
fn node_of(role: &Role, caller: Option<u32>) -> Option<NodeAddress> {
    match caller {
        None => role.slice.checked_sub(1).map(NodeAddress::Tier1),
        Some(lane) => Some(NodeAddress::Tier2(role.slice, lane)),
    }
}
