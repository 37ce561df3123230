//! Timelines of nodes, and a run's trace in Chrome's format (chrome://tracing, Perfetto).

use crate::report::NodeReport;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
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

    /// Records a batch that began at `started` and ends now.
    pub(crate) fn record(
        &mut self,
        started: Instant,
        layer: u32,
        flight: u32,
        shards: usize,
        rows: usize,
    ) {
        let Some((origin, origin_ns)) = self.origin else { return };
        if self.spans.len() < SPANS_MAX {
            let start_ns = origin_ns + started.saturating_duration_since(origin).as_nanos() as u64;
            let length_ns = started.elapsed().as_nanos() as u64;
            self.spans.push(Span {
                start_ns,
                length_ns,
                layer,
                flight,
                shards: shards as u32,
                rows: rows as u32,
            });
        }
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.spans.clone()
    }
}

/// Writes the nodes' timelines as one Chrome trace.
pub fn write_trace(out: &mut dyn Write, nodes: &[NodeReport]) -> io::Result<()> {
    let origin_ns = nodes.iter().flat_map(|node| &node.spans).map(|span| span.start_ns).min();
    let origin_ns = origin_ns.unwrap_or(0);
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    for (index, node) in nodes.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let name = &node.name;
        write!(
            out,
            "{comma}\n{{\"ph\":\"M\",\"pid\":{tier},\"tid\":{index},\"name\":\"thread_name\",\
             \"args\":{{\"name\":\"{name}\"}}}},\n{{\"ph\":\"M\",\"pid\":{tier},\"name\":\"process_name\",\
             \"args\":{{\"name\":\"Tier {tier}\"}}}}",
            tier = node.tier,
        )?;
        for span in &node.spans {
            write!(
                out,
                ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{index},\"name\":\"layer {}\",\"ts\":{:.3},\"dur\":{:.3},\
                 \"args\":{{\"flight\":{},\"shards\":{},\"rows\":{}}}}}",
                node.tier,
                span.layer,
                (span.start_ns - origin_ns) as f64 / 1e3,
                span.length_ns as f64 / 1e3,
                span.flight,
                span.shards,
                span.rows,
            )?;
        }
    }
    writeln!(out, "\n]}}")
}
