//! The timeline of a run's nodes.

use crate::report::NodeReport;
use glinthawk_protocol::Timeline;
use std::io::{self, Write};

/// Writes the nodes' timelines as one.
pub fn write_trace(out: &mut dyn Write, nodes: &[NodeReport]) -> io::Result<()> {
    let origin_ns = nodes.iter().flat_map(|node| &node.spans).map(|span| span.start_ns).min();
    let origin_ns = origin_ns.unwrap_or(0);
    let mut timeline = Timeline::new(out)?;
    for (index, node) in nodes.iter().enumerate() {
        timeline.node(node.tier, index, &node.name)?;
        for span in &node.spans {
            timeline.span(
                (node.tier, index),
                format_args!("layer {}", span.layer),
                ((span.start_ns - origin_ns) as f64 / 1e3, span.length_ns as f64 / 1e3),
                format_args!(
                    "\"flight\":{},\"shards\":{},\"rows\":{}",
                    span.flight, span.shards, span.rows
                ),
            )?;
        }
    }
    timeline.finish()
}
