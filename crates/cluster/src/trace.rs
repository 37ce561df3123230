//! A run's trace in Chrome's format (chrome://tracing, Perfetto).

use crate::report::NodeReport;
use std::io::{self, Write};

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
