//! What the rest of a node learns about the network: peers, what happened to them, and why a message cannot
//! be sent.

use super::config::Identity;
use glinthawk_flight::{Message, WireError};
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A connection of this controller. Numbers are never reused, so a node that returns is another
/// peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(pub(super) u32);

impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "peer {}", self.0)
    }
}

/// What happened on the network, in the order it happened. A peer's messages come after its
/// `Joined` (or after `connect` returned it) and before its `Lost`.
#[derive(Debug)]
pub enum Event {
    /// A node dialled us and is one of ours.
    Joined {
        /// The connection.
        peer: Peer,
        /// Who it is.
        identity: Identity,
        /// Where it dialled from.
        address: SocketAddr,
    },
    /// A message arrived, whole and checked.
    Message {
        /// Who sent it.
        peer: Peer,
        /// The message.
        message: Message,
        /// When its last byte was received.
        received_at: Instant,
    },
    /// The peer is gone, in good order or not: the one place where a node's death is learned.
    Lost {
        /// The connection that was.
        peer: Peer,
        /// How it ended.
        reason: LostReason,
    },
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    /// It left in good order.
    #[error("said goodbye")]
    Goodbye,
    /// The connection was closed between two messages.
    #[error("closed the connection without goodbye")]
    Closed,
    /// The connection was closed within a message.
    #[error("closed the connection after {bytes} of a message's {needed} bytes")]
    Cut {
        /// Bytes of the message that arrived.
        bytes: usize,
        /// Bytes of the message, as far as they were known.
        needed: usize,
    },
    /// The socket failed.
    #[error("connection broke: {0}")]
    Broken(String),
    /// It sent something that is not a message.
    #[error("sent garbage: {0}")]
    Garbled(#[from] WireError),
    /// It was not heard.
    #[error("not heard for {0:.1?}")]
    Silent(Duration),
    /// It did not read, or next to nothing.
    #[error("took hardly a byte for {0:.1?}")]
    Stalled(Duration),
    /// This node's own network thread ended.
    #[error("the network thread ended")]
    Stopped,
}

/// Why a message cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The peer is gone; its `Lost` is or was among the events.
    #[error("{0} is gone")]
    Gone(Peer),
    /// The message is beyond what was agreed with the peer.
    #[error("message for {peer}: {source}")]
    OverLimit {
        /// The addressee.
        peer: Peer,
        /// The limit.
        source: WireError,
    },
    /// The controller was shut down.
    #[error("the network controller is shut down")]
    Stopped,
}
