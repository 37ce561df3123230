//! Tier 2's kernels under a driver: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::payload::{Activations, Payload};
use crate::report::NodeReport;
use crate::span::Tracer;
use glinthawk_compute::{AttendRow, Backend, ComputeError, ContextKernels};
use glinthawk_flight::PAGE_POSITIONS;
use glinthawk_protocol::{Compute, Tier2Work};
use std::time::Instant;

/// A lane's pages and attention.
pub(crate) struct Tier2Kernels<B: Backend> {
    backend: B,
    context: B::Context,
    query_width: usize,
    /// When the last rows were begun.
    started: Instant,
    report: NodeReport,
    tracer: Tracer,
}

impl<B: Backend> Tier2Kernels<B> {
    /// Kernels over `context`, whose attention output is `query_width` values wide.
    pub fn new(
        name: String,
        backend: B,
        context: B::Context,
        query_width: usize,
        trace: bool,
    ) -> Self {
        let report = NodeReport::new(name, 2);
        let (started, tracer) = (Instant::now(), Tracer::new(trace));
        Self { backend, context, query_width, started, report, tracer }
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }

    fn submit(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ComputeError> {
        let Tier2Work { attend, payload } = work;
        let from_message = matches!(payload.activations, Activations::Host(_));
        let qkv = payload.take(&self.backend)?;
        let mut rows = Vec::with_capacity(attend.rows.len());
        for row in &attend.rows {
            let first = (row.position / PAGE_POSITIONS) as usize;
            self.context.bind(row.slot, first, &[row.page])?;
            rows.push(AttendRow { slot: row.slot, position: row.position });
        }
        let mut attended = self.backend.take(rows.len() * self.query_width * 2)?;
        self.context.attend(attend.layer as usize, &rows, &qkv, &mut attended)?;
        self.backend.give(qkv);
        // Where q, k, v came from, the output goes.
        payload.activations = match from_message {
            true => Activations::Host(self.backend.to_host(attended)?),
            false => Activations::Device(attended),
        };
        Ok(())
    }
}

impl<B: Backend> Compute<Tier2Work<Payload<B::Buffer>>> for Tier2Kernels<B> {
    type Error = ClusterError;

    fn start(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        self.started = Instant::now();
        self.submit(work).map_err(|error| {
            let kernel = format!("attention of layer {}", work.attend.layer);
            ClusterError::kernel(&self.report.name, kernel, error)
        })
    }

    fn finish(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        let Tier2Work { attend, payload } = work;
        let (rows, flight) = (attend.rows.len(), attend.step.shard.flight);
        self.report.record(rows, self.started, std::iter::once(payload.since));
        self.tracer.record(self.started, attend.layer, flight, 1, rows);
        payload.since = Instant::now();
        Ok(())
    }
}
