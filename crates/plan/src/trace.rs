//! The timeline of a simulation.

use glinthawk_protocol::Timeline;
use std::collections::BTreeSet;
use std::io::{self, Write};

/// The most spans kept; the timeline of a long run shows only its beginning.
const SPANS_MAX: usize = 200_000;

/// Who was busy, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceSpan {
    tier: u8,
    node: u32,
    name: &'static str,
}

impl TraceSpan {
    pub(crate) fn tier1(node: u32) -> Self {
        Self { tier: 1, node, name: "weights" }
    }

    pub(crate) fn tier1_attention(node: u32) -> Self {
        Self { tier: 1, node, name: "attention" }
    }

    pub(crate) fn tier2(node: u32) -> Self {
        Self { tier: 2, node, name: "attention" }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    span: TraceSpan,
    start_seconds: f64,
    seconds: f64,
    flight: u32,
    stage: u32,
}

/// A timeline.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    entries: Vec<Entry>,
}

impl Trace {
    pub(crate) fn push(
        &mut self,
        span: TraceSpan,
        start_seconds: f64,
        seconds: f64,
        flight: u32,
        stage: u32,
    ) {
        if self.entries.len() < SPANS_MAX {
            self.entries.push(Entry { span, start_seconds, seconds, flight, stage });
        }
    }

    /// Spans recorded.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Writes the timeline.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut timeline = Timeline::new(out)?;
        let nodes = self.entries.iter().map(|entry| (entry.span.tier, entry.span.node as usize));
        for (tier, node) in nodes.collect::<BTreeSet<_>>() {
            timeline.node(tier, node, &format!("tier{tier}-{node}"))?;
        }
        for Entry { span, start_seconds, seconds, flight, stage } in &self.entries {
            timeline.span(
                (span.tier, span.node as usize),
                format_args!("{} f{flight} s{stage}", span.name),
                (start_seconds * 1e6, seconds * 1e6),
                format_args!("\"flight\":{flight},\"stage\":{stage}"),
            )?;
        }
        timeline.finish()
    }
}
