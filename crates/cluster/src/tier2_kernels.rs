//! Tier 2's kernels under a driver: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::meter::{Batch, Meter};
use crate::payload::{Activations, Payload};
use crate::report::NodeReport;
use glinthawk_compute::{AttendRow, Backend, ComputeError, ContextKernels};
use glinthawk_protocol::{Compute, Tier2Work};
use std::time::Instant;

/// A lane's pages and attention.
pub(crate) struct Tier2Kernels<B: Backend> {
    backend: B,
    context: B::Context,
    query_width: usize,
    page_positions: u32,
    meter: Meter<B>,
}

impl<B: Backend> Tier2Kernels<B> {
    /// Kernels over `context`, whose pages have so many positions and whose attention output is `query_width` values
    /// wide.
    pub fn new(
        name: String,
        backend: B,
        context: B::Context,
        (query_width, page_positions): (usize, u32),
        trace: bool,
    ) -> Self {
        let meter = Meter::new(backend.clone(), name, 2, trace);
        Self { backend, context, query_width, page_positions, meter }
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        self.meter.report()
    }

    fn failed(&self, work: &Tier2Work<Payload<B::Buffer>>, source: ComputeError) -> ClusterError {
        let (layer, rows) = (work.attend.layer, work.attend.rows.len());
        let kernel = format!("attention of layer {layer}, {rows} rows");
        ClusterError::kernel(self.meter.name(), kernel, source)
    }

    fn submit(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ComputeError> {
        let Tier2Work { attend, payload } = work;
        let batch = Batch {
            layer: attend.layer,
            flight: attend.step.shard.flight,
            shards: 1,
            rows: attend.rows.len(),
            waited: payload.since.elapsed(),
        };
        let begun = self.backend.mark()?;
        let from_message = matches!(payload.activations, Activations::Host(_));
        let qkv = payload.take(&self.backend)?;
        for row in attend.shared.iter().chain(&attend.rows) {
            let first = (row.position / self.page_positions) as usize;
            self.context.bind(row.slot, first, &[row.page])?;
        }
        let rows = attend.rows.iter();
        let rows = rows.map(|row| AttendRow { slot: row.slot, position: row.position });
        let rows: Vec<AttendRow> = rows.collect();
        let mut attended = self.backend.take(rows.len() * self.query_width * 2)?;
        self.context.attend(attend.layer as usize, &rows, &qkv, &mut attended)?;
        self.backend.give(qkv);
        // Where q, k, v came from, the output goes.
        payload.activations = match from_message {
            true => Activations::Host(self.backend.to_host(attended)?),
            false => Activations::Device(attended),
        };
        self.meter.submitted(begun, batch)
    }
}

impl<B: Backend> Compute<Tier2Work<Payload<B::Buffer>>> for Tier2Kernels<B> {
    type Error = ClusterError;

    fn start(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        self.submit(work).map_err(|error| self.failed(work, error))
    }

    fn finish(&mut self, work: &mut Tier2Work<Payload<B::Buffer>>) -> Result<(), ClusterError> {
        self.meter.settle().map_err(|error| self.failed(work, error))?;
        work.payload.since = Instant::now();
        Ok(())
    }
}
