//! What a node's kernels ran when, if a trace was asked for.

use serde::{Deserialize, Serialize};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The most spans a node keeps: the trace of a long run shows only its beginning.
const SPANS_MAX: usize = 100_000;

/// One kernel batch on a node's timeline.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Span {
    /// Start, nanoseconds of the system's clock, so that nodes line up.
    pub start_ns: u64,
    /// Length in nanoseconds.
    pub length_ns: u64,
    /// Layer within the slice.
    pub layer: u32,
    /// Flight of the batch's first shard.
    pub flight: u32,
    /// Shards merged.
    pub shards: u32,
    /// Rows.
    pub rows: u32,
}

/// Records spans, if it was told to.
pub(crate) struct Tracer {
    origin: Option<(Instant, u64)>,
    spans: Vec<Span>,
}

impl Tracer {
    pub(crate) fn new(enabled: bool) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            origin: enabled.then(|| (Instant::now(), unix.as_nanos() as u64)),
            spans: Vec::new(),
        }
    }

    /// Records a batch that began at `started`.
    pub(crate) fn record(&mut self, started: Instant, span: Span) {
        let Some((origin, origin_ns)) = self.origin else { return };
        if self.spans.len() < SPANS_MAX {
            let start_ns = origin_ns + started.saturating_duration_since(origin).as_nanos() as u64;
            self.spans.push(Span { start_ns, ..span });
        }
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.spans.clone()
    }
}
