//! Tier 2's kernels under a driver: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::meter::{Batch, Meter};
use crate::payload::{Activations, Payload};
use crate::report::NodeReport;
use glinthawk_compute::{AttendRow, Backend, ComputeError, ContextKernels, CpuBackend};
use glinthawk_protocol::{Compute, DRAFTS_MAX, Row, Tier2Work};
use std::sync::Arc;
use std::time::Instant;

/// A lane's pages and attention.
pub(crate) struct Tier2Kernels<B: Backend> {
    backend: B,
    context: B::Context,
    query_width: usize,
    page_positions: u32,
    /// The model's last layer, if it is in the slice.
    last_layer: Option<u32>,
    meter: Meter<B>,
}

impl<B: Backend> Tier2Kernels<B> {
    /// Kernels over `context`, whose pages have so many positions and whose attention output is `query_width` values
    /// wide. `last_layer` is the model's last, if it is in the slice.
    pub fn new(
        name: String,
        backend: B,
        context: B::Context,
        (query_width, page_positions): (usize, u32),
        last_layer: Option<u32>,
        trace: bool,
    ) -> Self {
        let meter = Meter::new(backend.clone(), name, 2, trace);
        Self { backend, context, query_width, page_positions, last_layer, meter }
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
        let rows = asked_rows(&attend.rows, self.last_layer == Some(attend.layer));
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

impl Tier2Kernels<CpuBackend> {
    /// Goes on with the threads and buffers of another strand.
    pub fn go_to(&mut self, backend: &CpuBackend) -> Result<(), ClusterError> {
        let gone = self.context.use_threads(Arc::clone(&backend.threads));
        self.backend = backend.clone();
        gone.map_err(|error| {
            ClusterError::kernel(self.meter.name(), "going to other threads".to_owned(), error)
        })
    }
}

/// Rows to attend. Of a prompt's rows, only the last can end in a token, or all of them if they are drafts and the row
/// before those. So nobody asks for the others of many after the model's last attention.
fn asked_rows(rows: &[Row], is_last_layer: bool) -> Vec<AttendRow> {
    let follows =
        |before: &Row, row: &Row| (before.slot, before.position + 1) == (row.slot, row.position);
    let mut asked = Vec::with_capacity(rows.len());
    for prompt in rows.chunk_by(follows) {
        let are_few = prompt.len() <= 1 + DRAFTS_MAX;
        asked.extend(prompt.iter().enumerate().map(|(index, row)| AttendRow {
            slot: row.slot,
            position: row.position,
            asked: !is_last_layer || are_few || index + 1 == prompt.len(),
        }));
    }
    asked
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_last_layer_only_last_rows_of_prompts_are_asked_for() {
        let places = |slot, positions: std::ops::Range<u32>| {
            positions.map(move |position| Row { slot, position, page: 0, token: 0 })
        };
        let many = 1 + DRAFTS_MAX as u32 + 1;
        let rows: Vec<Row> = places(3, 7..7 + many)
            .chain(places(3, 8 + many..9 + many))
            .chain(places(1, 0..1))
            .chain(places(2, 9..8 + many))
            .collect();
        let asked = |last| asked_rows(&rows, last).iter().map(|row| row.asked).collect::<Vec<_>>();
        assert!(asked(false).iter().all(|asked| *asked));
        let (first, others) = (&asked(true)[..many as usize], &asked(true)[many as usize..]);
        assert!(first.iter().rev().skip(1).all(|asked| !asked) && first[many as usize - 1]);
        assert!(
            others.iter().all(|asked| *asked),
            "a row behind a gap or alone, and what may be drafts"
        );
    }
}
