//! The network controller: sockets, handshakes, frames and buffers between the nodes of a cluster.
//! It does not know what a message means.
//!
//! There are two threads per node, for any number of peers: one reads and keeps the timers, one writes (`sending.rs`).
//! So what goes out does not wait for what comes in. More threads would take cores from the kernels. Each sleeps in `poll`, and recomputes what to wait for from the connections' state
//! each time, so that there is no registration to forget. For the few dozen peers a node has this costs no more than
//! `epoll`, works on every Unix, and wakes with the timer's own resolution, which injected delays need. An async runtime
//! would add a scheduler between the socket and the few threads there are. A short message with nothing before it is
//! written by the thread that sends it, since waking another takes longer than the write. Threads that exchange much, each
//! with one thread of a peer, have lines (`lines.rs`) that they read and write themselves.
//!
//! **Invariant:** nothing is allocated for a peer before its length was checked against the
//! handshake's limits, and only one fixed-size hello is read before the token was checked. Over TLS
//! the secret was checked before that, from buffers of fixed size.
//!
//! **Invariant:** every queue is bounded, in bytes. A peer that does not read fills its queue,
//! then blocks [`Controller::send`], then is lost.

mod bench;
mod channel;
mod config;
mod connection;
mod controller;
mod event;
mod handshake;
mod lines;
mod link;
mod outlet;
mod reception;
mod sending;
mod shared;
mod stats;
#[cfg(test)]
mod tests;
mod thread;
mod tls;

pub use bench::{BenchError, BenchFigures, BenchOptions, EndCores, RoundTrip, bench, round_trip};
pub use config::{Bounds, Config, Encryption, Identity, LinkShape, NodeId, Timing, Token};
pub use controller::{ConnectError, Controller};
pub use event::{Event, LostReason, Peer, SendError};
pub use handshake::{HELLO_BYTES, HandshakeError, Hello, Status};
pub(crate) use lines::LINES_MAX;
pub use stats::{Counter, PeerStats};
