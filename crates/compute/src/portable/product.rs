//! outputs[n][r] = Σ_k weights[n][k] · inputs[r][k], over row-major bf16 weights.

use crate::memory::{Memory, SharedMut};
use crate::source::WeightSource;
use crate::{ComputeError, Threads};
use glinthawk_model::Tensor;
use half::bf16;
use std::sync::Mutex;

/// Running sums of a dot product: enough for any vector width, added in one fixed order.
const SUMS: usize = 16;
/// Weight rows that a thread reads from the model at a time.
const READ_ROWS: usize = 64;
/// Weight rows that a thread multiplies at a time.
const PRODUCT_ROWS: usize = 16;

/// A matrix as the model stores it.
pub(super) struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// (outputs, inputs)
    values: Memory<bf16>,
}

impl Matrix {
    /// The given tensors, (outputs, inputs) each, one below the other.
    pub(super) fn read(
        source: &dyn WeightSource,
        threads: &Threads,
        tensors: &[(Tensor, usize)],
        inputs: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        let outputs = tensors.iter().map(|tensor| tensor.1).sum();
        let mut values = Memory::zeroed("weights", outputs * inputs)?;
        let mut start = 0;
        for &(tensor, rows) in tensors {
            let part = SharedMut::new(&mut values[start * inputs..][..rows * inputs]);
            let failure = Mutex::new(None);
            threads.for_each(rows.div_ceil(READ_ROWS), |chunk| {
                let range = chunk * READ_ROWS..((chunk + 1) * READ_ROWS).min(rows);
                // SAFETY: chunks do not overlap.
                let into = unsafe { part.part(range.start * inputs, range.len() * inputs) };
                if let Err(error) = source.read_rows(tensor, range, into) {
                    *failure.lock().expect("no panic while held") = Some(error);
                }
            });
            if let Some(error) = failure.into_inner().expect("no panic while held") {
                return Err(error);
            }
            start += rows;
            progress((rows * inputs * size_of::<bf16>()) as u64);
        }
        Ok(Self { outputs, inputs, values })
    }

    pub(super) fn row(&self, output: usize) -> &[bf16] {
        &self.values[output * self.inputs..][..self.inputs]
    }

    /// `inputs` is (rows, inputs), `outputs` becomes (outputs, rows).
    pub(super) fn multiply(
        &self,
        threads: &Threads,
        inputs: &[f32],
        rows: usize,
        outputs: &mut Vec<f32>,
    ) {
        assert_eq!(inputs.len(), rows * self.inputs, "inputs of a product");
        outputs.clear();
        outputs.resize(self.outputs * rows, 0.0);
        let outputs = SharedMut::new(outputs);
        threads.for_each(self.outputs.div_ceil(PRODUCT_ROWS), |chunk| {
            let mut weights = vec![0.0f32; self.inputs];
            for output in chunk * PRODUCT_ROWS..((chunk + 1) * PRODUCT_ROWS).min(self.outputs) {
                for (weight, value) in weights.iter_mut().zip(self.row(output)) {
                    *weight = f32::from_bits(u32::from(value.to_bits()) << 16);
                }
                // SAFETY: one part for each output.
                let sums = unsafe { outputs.part(output * rows, rows) };
                for (sum, input) in sums.iter_mut().zip(inputs.chunks_exact(self.inputs)) {
                    *sum = dot(input, &weights);
                }
            }
        });
    }
}

/// Σ a·b in one fixed order.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths of a dot product");
    let mut sums = [0.0f32; SUMS];
    let (a, b) = (a.chunks_exact(SUMS), b.chunks_exact(SUMS));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}
