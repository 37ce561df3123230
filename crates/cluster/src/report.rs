//! What one node did: counted where it happens, sent to the dispatcher at the end.

use crate::net::{Counter, PeerStats};
use crate::span::Span;
use glinthawk_flight::KINDS;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Counters of one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// `tier1-0` (slice; in one process with several lanes, slice and lane), `tier2-0-1` (slice, lane).
    pub name: String,
    /// 1 or 2.
    pub tier: u8,
    /// Time its kernels ran.
    pub busy_ns: u64,
    /// Kernel batches run.
    pub batches: u64,
    /// Rows in them.
    pub rows: u64,
    /// Most rows in one.
    pub rows_max: u64,
    /// Time that shards spent in kernels, a batch's time counted for each of its shards.
    pub shard_busy_ns: u64,
    /// Time that shards waited here for the kernels.
    pub shard_wait_ns: u64,
    /// Bytes, messages and rows sent, by kind of message.
    pub sent: BTreeMap<String, Traffic>,
    /// Bytes, messages and rows received, by kind of message.
    pub received: BTreeMap<String, Traffic>,
    /// Peak resident memory of the node's process.
    pub peak_memory_bytes: u64,
    /// What ran when, if a trace was asked for.
    pub spans: Vec<Span>,
}

/// Messages of one kind in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Messages.
    pub messages: u64,
    /// Bytes, framing included.
    pub bytes: u64,
    /// Rows.
    pub rows: u64,
}

impl NodeReport {
    pub(crate) fn new(name: String, tier: u8) -> Self {
        Self { name, tier, ..Self::default() }
    }

    /// Counts a batch of shards that waited so long, all together.
    pub(crate) fn record(&mut self, rows: usize, busy: Duration, shards: usize, waited: Duration) {
        let busy_ns = nanoseconds(busy);
        self.busy_ns += busy_ns;
        self.batches += 1;
        self.rows += rows as u64;
        self.rows_max = self.rows_max.max(rows as u64);
        self.shard_busy_ns += busy_ns * shards as u64;
        self.shard_wait_ns += nanoseconds(waited);
    }

    /// Takes over what went over the network.
    pub(crate) fn set_traffic(&mut self, peers: &[PeerStats]) {
        for kind in KINDS {
            let (mut sent, mut received) = (Counter::default(), Counter::default());
            for peer in peers {
                sent += peer.sent(kind);
                received += peer.received(kind);
            }
            for (counter, table) in [(sent, &mut self.sent), (received, &mut self.received)] {
                if counter.messages > 0 {
                    let Counter { messages, bytes, rows } = counter;
                    table.insert(kind.name().to_owned(), Traffic { messages, bytes, rows });
                }
            }
        }
    }

    /// Bytes sent, of all kinds.
    pub fn bytes_sent(&self) -> u64 {
        self.sent.values().map(|traffic| traffic.bytes).sum()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Peak resident memory of this process in bytes; 0 if the system does not say.
pub fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
