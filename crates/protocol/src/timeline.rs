//! The timeline of a run, real or simulated, in Chrome's trace format (Perfetto, chrome://tracing): a process for each
//! tier, a thread for each node.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Writes a timeline.
pub struct Timeline<W: Write> {
    out: W,
    is_empty: bool,
}

impl<W: Write> Timeline<W> {
    /// Begins a timeline.
    pub fn new(mut out: W) -> io::Result<Self> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(Self { out, is_empty: true })
    }

    fn event(&mut self, event: Arguments) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_empty) { "" } else { "," };
        write!(self.out, "{comma}\n{{{event}}}")
    }

    /// Names the node with this index; its name has no characters that JSON escapes.
    pub fn node(&mut self, tier: u8, index: usize, name: &str) -> io::Result<()> {
        self.event(format_args!(
            "\"ph\":\"M\",\"pid\":{tier},\"tid\":{index},\"name\":\"thread_name\",\"args\":{{\"name\":\"{name}\"}}"
        ))?;
        self.event(format_args!(
            "\"ph\":\"M\",\"pid\":{tier},\"name\":\"process_name\",\"args\":{{\"name\":\"Tier {tier}\"}}"
        ))
    }

    /// Adds what a node did from `start_us` on for `length_us` microseconds; `details` is what is in an object of JSON.
    pub fn span(
        &mut self,
        (tier, index): (u8, usize),
        name: Arguments,
        (start_us, length_us): (f64, f64),
        details: Arguments,
    ) -> io::Result<()> {
        self.event(format_args!(
            "\"ph\":\"X\",\"pid\":{tier},\"tid\":{index},\"name\":\"{name}\",\"ts\":{start_us:.3},\"dur\":{length_us:.3},\
             \"args\":{{{details}}}"
        ))
    }

    /// Ends the timeline.
    pub fn finish(mut self) -> io::Result<()> {
        writeln!(self.out, "\n]}}")
    }
}
