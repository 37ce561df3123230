//! Tier 2's kernels under a driver: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::meter::{Batch, Meter};
use crate::payload::{Activations, Payload};
use crate::report::NodeReport;
use glinthawk_compute::{AttendRow, Backend, ComputeError, ContextKernels};
use glinthawk_protocol::{Compute, Row, Tier2Work};
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

/// Rows to attend. Only the last row of a prompt can end in a token, so nobody asks for more than that after the model's
/// last attention.
fn asked_rows(rows: &[Row], is_last_layer: bool) -> Vec<AttendRow> {
    let goes_on = |index: usize| {
        let next = rows.get(index + 1);
        next.is_some_and(|next| {
            (next.slot, next.position) == (rows[index].slot, rows[index].position + 1)
        })
    };
    let row = |(index, row): (usize, &Row)| {
        let Row { slot, position, .. } = *row;
        AttendRow { slot, position, asked: !(is_last_layer && goes_on(index)) }
    };
    rows.iter().enumerate().map(row).collect()
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
        let places = [(3, 7), (3, 8), (3, 9), (1, 0), (2, 9), (2, 11), (4, 5), (5, 6)];
        let rows = places.map(|(slot, position)| Row { slot, position, page: 0, token: 0 });
        let asked = |last| asked_rows(&rows, last).iter().map(|row| row.asked).collect::<Vec<_>>();
        assert_eq!(asked(false), [true; 8]);
        assert_eq!(asked(true), [false, false, true, true, true, true, true, true]);
    }
}
