//! What a node's kernels did and for how long. A device may be done with a batch long after the host: its time is
//! counted when it is known.

use crate::report::NodeReport;
use crate::span::{Span, Tracer};
use glinthawk_compute::{Backend, ComputeError};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A batch of shards, as the report counts it.
#[derive(Clone, Copy)]
pub(crate) struct Batch {
    /// Layer within the slice.
    pub layer: u32,
    /// Flight of the first shard.
    pub flight: u32,
    /// Shards merged.
    pub shards: usize,
    /// Their rows.
    pub rows: usize,
    /// How long the shards waited for the kernels, together.
    pub waited: Duration,
}

/// Counts the batches of one node.
pub(crate) struct Meter<B: Backend> {
    backend: B,
    report: NodeReport,
    tracer: Tracer,
    /// Batches that the device may not be done with: the marks before and after each.
    pending: VecDeque<(B::Mark, B::Mark, Batch)>,
}

impl<B: Backend> Meter<B> {
    pub(crate) fn new(backend: B, name: String, tier: u8, trace: bool) -> Self {
        let (report, tracer) = (NodeReport::new(name, tier), Tracer::new(trace));
        Self { backend, report, tracer, pending: VecDeque::new() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.report.name
    }

    /// Takes note of a batch that was begun at a mark, and of which everything is asked for.
    pub(crate) fn submitted(&mut self, begun: B::Mark, batch: Batch) -> Result<(), ComputeError> {
        let end = self.backend.mark()?;
        self.pending.push_back((begun, end, batch));
        Ok(())
    }

    /// Counts what is done.
    pub(crate) fn settle(&mut self) -> Result<(), ComputeError> {
        while let Some((begun, end, batch)) = self.pending.front()
            && self.backend.is_done(end)?
        {
            let busy = self.backend.elapsed(begun, end)?;
            self.report.record(batch.rows, busy, batch.shards, batch.waited);
            let Batch { layer, flight, shards, rows, .. } = *batch;
            let (shards, rows) = (shards as u32, rows as u32);
            let length_ns = busy.as_nanos() as u64;
            let span = Span { start_ns: 0, length_ns, layer, flight, shards, rows };
            self.tracer.record(Instant::now() - busy, span);
            self.pending.pop_front();
        }
        Ok(())
    }

    /// Counters so far.
    pub(crate) fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }
}
