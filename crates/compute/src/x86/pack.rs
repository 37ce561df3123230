//! Weights packed once at load into panels of 16 outputs, [panel][k / 2][16 outputs][2 k]: the order
//! of an AMX right tile, of `vdpbf16ps`, and easily taken apart by everything older.

use super::tiles::{PANEL, STEP};
use crate::memory::{Arena, Memory, SharedMut};
use crate::source::WeightSource;
use crate::{ComputeError, Threads};
use glinthawk_model::Tensor;
use half::bf16;
use std::sync::Mutex;

/// Panels that a thread reads from the model at a time.
const READ_PANELS: usize = 4;

/// A matrix in panels.
pub(super) struct Panels {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// (panels, steps, 16, 16, 2); outputs and inputs beyond the matrix are zero
    values: Memory<bf16>,
}

/// Which rows of which tensors become panels, in order. Every tensor starts a panel of its own.
pub(super) enum Sources<'a> {
    /// One below the other.
    Stacked(&'a [(Tensor, usize)]),
    /// Likewise, with the panels of each head (this many per head) in the order of [`head_order`].
    Heads(&'a [(Tensor, usize)], usize),
    /// A panel of the first, a panel of the second, and so on; both of the same height.
    Interleaved([Tensor; 2], usize),
}

impl Panels {
    pub(super) fn read(
        arena: &mut Arena,
        source: &dyn WeightSource,
        threads: &Threads,
        sources: Sources<'_>,
        inputs: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        // (tensor, its rows, its first panel, panels between its panels, panels of a head)
        let stacked = |tensors: &[(Tensor, usize)], head: usize| {
            let mut first = 0;
            let place = |&(tensor, rows): &(Tensor, usize)| {
                let part = (tensor, rows, first, 1, head);
                first += rows.div_ceil(PANEL);
                part
            };
            tensors.iter().map(place).collect::<Vec<_>>()
        };
        let parts = match sources {
            Sources::Stacked(tensors) => stacked(tensors, 1),
            Sources::Heads(tensors, head) => stacked(tensors, head),
            Sources::Interleaved([one, other], rows) => {
                vec![(one, rows, 0, 2, 1), (other, rows, 1, 2, 1)]
            }
        };
        let panels: usize = parts.iter().map(|part| part.1.div_ceil(PANEL)).sum();
        let padded = inputs.next_multiple_of(STEP);
        let mut values = arena.zeroed("weights", panels * PANEL * padded)?;
        let shared = SharedMut::new(&mut values);
        for (tensor, rows, first, stride, head) in parts {
            let failure = Mutex::new(None);
            threads.for_each(rows.div_ceil(PANEL * READ_PANELS), |chunk| {
                let start = chunk * PANEL * READ_PANELS;
                let range = start..(start + PANEL * READ_PANELS).min(rows);
                let mut read = vec![bf16::ZERO; range.len() * inputs];
                if let Err(error) = source.read_rows(tensor, range, &mut read) {
                    *failure.lock().expect("no panic while held") = Some(error);
                    return;
                }
                for (index, rows) in read.chunks(PANEL * inputs).enumerate() {
                    let panel = chunk * READ_PANELS + index;
                    let in_order = panel - panel % head + head_order(panel % head, head);
                    let panel = first + stride * in_order;
                    // SAFETY: every panel is written once, from one chunk.
                    let into = unsafe { shared.part(panel * PANEL * padded, PANEL * padded) };
                    pack_panel(rows, inputs, into);
                }
            });
            if let Some(error) = failure.into_inner().expect("no panic while held") {
                return Err(error);
            }
            progress((rows * inputs * size_of::<bf16>()) as u64);
        }
        Ok(Self { outputs: panels * PANEL, inputs, values })
    }

    /// Panels of 16 outputs.
    pub(super) fn panels(&self) -> usize {
        self.outputs / PANEL
    }

    /// Steps of 32 inputs.
    pub(super) fn steps(&self) -> usize {
        self.inputs.div_ceil(STEP)
    }

    /// First value of a panel.
    pub(super) fn panel(&self, panel: usize) -> *const bf16 {
        let values = self.steps() * STEP * PANEL;
        self.values[panel * values..][..values].as_ptr()
    }

    /// Where the next panel begins. May lie past the end: for prefetches only.
    pub(super) fn after(&self, panel: usize) -> *const bf16 {
        self.values.as_ptr().wrapping_add((panel + 1) * self.steps() * STEP * PANEL)
    }

    /// Copies one output's weights, widened: how an embedding is looked up in the classifier.
    pub(super) fn unpack_row(&self, output: usize, into: &mut [f32]) {
        assert_eq!(into.len(), self.inputs, "width of a row");
        let values = self.steps() * STEP * PANEL;
        let panel = &self.values[output / PANEL * values..][..values];
        let pairs = panel.chunks_exact(2 * PANEL).map(|step| &step[2 * (output % PANEL)..][..2]);
        for (into, pair) in into.chunks_mut(2).zip(pairs) {
            for (into, value) in into.iter_mut().zip(pair) {
                *into = value.to_f32();
            }
        }
    }
}

/// Where panel `panel` of a head's `panels` panels stands in the packed weights. Panels that are
/// rotated together stand together: one of the first half, then its partner of the second. If half a
/// head is not a whole number of panels, the order does not change.
pub(super) fn head_order(panel: usize, panels: usize) -> usize {
    if panels.is_multiple_of(2) { 2 * (panel % (panels / 2)) + panel / (panels / 2) } else { panel }
}

/// `rows` is (up to 16, inputs), `into` a zeroed panel.
fn pack_panel(rows: &[bf16], inputs: usize, into: &mut [bf16]) {
    for (output, row) in rows.chunks_exact(inputs).enumerate() {
        for (pair, step) in row.chunks(2).zip(into.chunks_exact_mut(2 * PANEL)) {
            step[2 * output..][..pair.len()].copy_from_slice(pair);
        }
    }
}
