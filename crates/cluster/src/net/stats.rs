//! Counters of what went over each connection, by direction and kind.

use super::config::Identity;
use super::event::Peer;
use glinthawk_flight::{Header, KINDS, Kind};
use std::net::SocketAddr;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// Messages of one kind in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Messages.
    pub messages: u64,
    /// Bytes on the wire: header, table and payload.
    pub bytes: u64,
    /// Rows they carried.
    pub rows: u64,
}

impl AddAssign for Counter {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.rows += other.rows;
    }
}

/// What went to and came from one peer, which may be gone by now.
#[derive(Clone, Debug)]
pub struct PeerStats {
    /// The peer.
    pub peer: Peer,
    /// Who it said it was.
    pub identity: Identity,
    /// Where it was.
    pub address: SocketAddr,
    sent: [Counter; KINDS.len()],
    received: [Counter; KINDS.len()],
}

impl PeerStats {
    /// What was sent to the peer, of one kind.
    pub fn sent(&self, kind: Kind) -> Counter {
        self.sent[kind.index()]
    }

    /// What came from the peer, of one kind.
    pub fn received(&self, kind: Kind) -> Counter {
        self.received[kind.index()]
    }

    /// All that was sent to the peer.
    pub fn sent_total(&self) -> Counter {
        total(&self.sent)
    }

    /// All that came from the peer.
    pub fn received_total(&self) -> Counter {
        total(&self.received)
    }
}

fn total(counters: &[Counter]) -> Counter {
    let mut total = Counter::default();
    for counter in counters {
        total += *counter;
    }
    total
}

/// The other side of a [`PeerStats`]: written by the threads that send and receive, read by anyone.
pub(super) struct PeerCounters {
    pub(super) peer: Peer,
    pub(super) identity: Identity,
    pub(super) address: SocketAddr,
    pub(super) sent: [AtomicCounter; KINDS.len()],
    pub(super) received: [AtomicCounter; KINDS.len()],
}

#[derive(Default)]
pub(super) struct AtomicCounter {
    messages: AtomicU64,
    bytes: AtomicU64,
    rows: AtomicU64,
}

impl AtomicCounter {
    pub(super) fn count(&self, header: &Header) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(header.wire_bytes() as u64, Ordering::Relaxed);
        self.rows.fetch_add(header.rows() as u64, Ordering::Relaxed);
    }

    fn read(&self) -> Counter {
        Counter {
            messages: self.messages.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            rows: self.rows.load(Ordering::Relaxed),
        }
    }
}

impl PeerCounters {
    pub(super) fn new(peer: Peer, identity: Identity, address: SocketAddr) -> Self {
        let (sent, received) = Default::default();
        Self { peer, identity, address, sent, received }
    }

    pub(super) fn read(&self) -> PeerStats {
        PeerStats {
            peer: self.peer,
            identity: self.identity.clone(),
            address: self.address,
            sent: self.sent.each_ref().map(AtomicCounter::read),
            received: self.received.each_ref().map(AtomicCounter::read),
        }
    }
}
