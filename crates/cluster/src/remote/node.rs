//! Workers as the dispatcher knows them: those that have a place, those that wait for one, and who knows whom.

use crate::casting::Casting;
use crate::control::{LocalProcess, Offer, Role};
use crate::net::Peer;
use glinthawk_protocol::Place;
use std::net::IpAddr;
use std::time::Instant;

/// A worker that has a role.
pub(crate) struct Node {
    /// Its name in statistics and errors.
    pub name: String,
    /// Its place.
    pub place: Place,
    /// Where neighbours find it.
    pub address: String,
    /// The process, if it is one of this dispatcher's own.
    pub local: Option<LocalProcess>,
    /// Whether it says that it can begin.
    pub said_ready: bool,
    /// Whether it can begin: it says so, and its neighbours have met.
    pub is_ready: bool,
    /// Tier-1 nodes that it reported lost and that were there.
    pub accusations: u32,
    /// What a Tier-1 node says of it.
    pub accused: Option<Accusation>,
    /// When it has to have left, if it is leaving.
    pub leaves_by: Option<Instant>,
}

impl Node {
    /// A worker that is to load.
    pub(crate) fn new(
        casting: &Casting,
        place: Place,
        address: String,
        local: Option<LocalProcess>,
    ) -> Self {
        Self {
            name: casting.name(place),
            place,
            address,
            local,
            said_ready: false,
            is_ready: false,
            accusations: 0,
            accused: None,
            leaves_by: None,
        }
    }
}

/// A node says that its connection to a neighbour is gone.
pub(crate) struct Accusation {
    pub by: Peer,
    /// The connection's.
    pub pass: u64,
    pub reason: String,
    pub since: Instant,
}

/// Two neighbours that were told of each other.
pub(crate) struct Linked {
    /// The one that dials, and the other.
    pub ends: [Place; 2],
    /// Whether the one that was dialled knows the other.
    pub is_met: bool,
    /// Since when both are ready.
    pub both_ready: Option<Instant>,
}

impl Linked {
    /// Neighbours that have not met: the one that dials, and the other.
    pub(crate) fn new(ends: [Place; 2]) -> Self {
        Self { ends, is_met: false, both_ready: None }
    }
}

/// A worker whose role waits for a neighbour.
pub(super) struct Unsent {
    pub peer: Peer,
    pub role: Box<Role>,
    pub waiting: Waiting,
}

/// A worker without a role.
pub(crate) struct Waiting {
    pub address: IpAddr,
    pub joined: Instant,
    pub offer: Option<Offer>,
}
