//! The timeline of a simulation in Chrome's trace format; it opens in any viewer of that format.

use std::fmt::Write;

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

    /// The timeline as a JSON array of complete events: a process per tier, a thread per node.
    pub fn to_json(&self) -> String {
        let mut text = String::from("[\n");
        for (index, entry) in self.entries.iter().enumerate() {
            let comma = if index == 0 { "" } else { ",\n" };
            let Entry { span, start_seconds, seconds, flight, stage } = entry;
            write!(
                text,
                "{comma}{{\"name\":\"{} f{flight} s{stage}\",\"cat\":\"{}\",\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{:.3},\"dur\":{:.3}}}",
                span.name, span.name, span.tier, span.node, start_seconds * 1e6, seconds * 1e6
            )
            .expect("writing to a string does not fail");
        }
        text.push_str("\n]\n");
        text
    }
}
