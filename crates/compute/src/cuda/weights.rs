//! A model's weights on the device, read block by block so that the host never holds more than one.

use super::device::{CudaDevice, Half};
use crate::memory::SharedMut;
use crate::source::{LayerVectors, SliceSpec, WeightSource};
use crate::{ComputeError, Threads};
use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, PinnedHostSlice};
use glinthawk_model::{LayerTensor, Tensor};
use half::{bf16, f16};
use std::sync::Mutex;

/// Values read and sent at a time.
const BLOCK_VALUES: usize = 64 << 20;
/// Rows that a thread reads at a time.
const READ_ROWS: usize = 64;

/// A layer's matrices and vectors.
pub(super) struct Layer {
    /// (qkv_width, hidden)
    pub(super) qkv: CudaSlice<bf16>,
    /// (hidden, query_width)
    pub(super) output: CudaSlice<bf16>,
    /// (2, feed_forward, hidden)
    pub(super) gate_up: CudaSlice<bf16>,
    /// (hidden, feed_forward)
    pub(super) down: CudaSlice<bf16>,
    /// (hidden)
    pub(super) attention_norm: CudaSlice<f32>,
    /// (hidden)
    pub(super) feed_forward_norm: CudaSlice<f32>,
    /// (qkv_width)
    pub(super) qkv_bias: Option<CudaSlice<f32>>,
    /// (2, head_dim)
    pub(super) head_norms: Option<CudaSlice<f32>>,
}

/// A slice of a model.
pub(super) struct Weights {
    pub(super) layers: Vec<Layer>,
    /// (vocab, hidden), where the slice embeds, or classifies by the same matrix
    pub(super) embedding: Option<CudaSlice<bf16>>,
    /// (vocab, hidden), where the slice classifies and it is not the embedding
    classifier: Option<CudaSlice<bf16>>,
    /// (hidden), where the slice classifies
    pub(super) final_norm: Option<CudaSlice<f32>>,
}

/// Where a buffer is on the device.
pub(super) fn address<T>(slice: &CudaSlice<T>, device: &CudaDevice) -> u64 {
    slice.device_ptr(&device.stream).0
}

/// Zeroed memory on the device; an error says what it was for and how much was free.
pub(super) fn allocate<T: DeviceRepr + cudarc::driver::ValidAsZeroBits>(
    device: &CudaDevice,
    what: &str,
    len: usize,
) -> Result<CudaSlice<T>, ComputeError> {
    let bytes = len.saturating_mul(size_of::<T>()) as u64;
    let free = device.memory_free_bytes()?;
    if bytes > free {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let reason = format!("{:.2} GiB are wanted, {:.2} GiB are free", gib(bytes), gib(free));
        return Err(device.error(&format!("allocate {what}"), reason));
    }
    device.stream.alloc_zeros(len).map_err(device.failed(&format!("allocate {what}")))
}

/// Copies a vector to the device.
pub(super) fn upload(device: &CudaDevice, values: &[f32]) -> Result<CudaSlice<f32>, ComputeError> {
    device.stream.clone_htod(values).map_err(device.failed("copy a vector to it"))
}

/// Reads matrices and sends them.
struct Loader<'a> {
    device: &'a CudaDevice,
    source: &'a dyn WeightSource,
    threads: &'a Threads,
    staging: PinnedHostSlice<bf16>,
    progress: &'a mut dyn FnMut(u64),
}

impl Weights {
    pub(super) fn load(
        device: &CudaDevice,
        source: &dyn WeightSource,
        spec: &SliceSpec,
        threads: &Threads,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        let tied = source.config().tied_embeddings;
        let (embeds, classifies) =
            (spec.embeds || tied && spec.classifies, spec.classifies && !tied);
        // SAFETY: every value is written before it is copied from.
        let staging = unsafe { device.context.alloc_pinned_with_flags(BLOCK_VALUES, 0) }
            .map_err(device.failed("allocate a pinned buffer"))?;
        let mut loader = Loader { device, source, threads, staging, progress };
        let embedding = embeds.then(|| loader.matrix(&[Tensor::Embedding])).transpose()?;
        let layers = spec.layers.clone().map(|layer| loader.layer(layer));
        let layers = layers.collect::<Result<_, _>>()?;
        let classifier = classifies.then(|| loader.matrix(&[Tensor::Classifier])).transpose()?;
        let final_norm = match spec.classifies {
            true => Some(upload(device, &source.read_vector(Tensor::FinalNorm)?)?),
            false => None,
        };
        Ok(Self { layers, embedding, classifier, final_norm })
    }

    /// The matrix of the slice that classifies.
    pub(super) fn classifying(&self) -> &CudaSlice<bf16> {
        let matrix = self.classifier.as_ref().or(self.embedding.as_ref());
        matrix.expect("the last slice classifies")
    }
}

impl Loader<'_> {
    fn layer(&mut self, layer: usize) -> Result<Layer, ComputeError> {
        let vectors = LayerVectors::read(self.source, layer)?;
        let tensor = |tensor| Tensor::Layer(layer, tensor);
        let device = self.device;
        let optional = |values: Option<Vec<f32>>| match values {
            Some(values) => upload(device, &values).map(Some),
            None => Ok(None),
        };
        Ok(Layer {
            qkv: self
                .matrix(&[LayerTensor::Query, LayerTensor::Key, LayerTensor::Value].map(tensor))?,
            output: self.matrix(&[tensor(LayerTensor::Output)])?,
            gate_up: self.matrix(&[LayerTensor::Gate, LayerTensor::Up].map(tensor))?,
            down: self.matrix(&[tensor(LayerTensor::Down)])?,
            attention_norm: upload(device, &vectors.attention_norm)?,
            feed_forward_norm: upload(device, &vectors.feed_forward_norm)?,
            qkv_bias: optional(vectors.qkv_bias)?,
            head_norms: optional(vectors.head_norms.map(|norms| norms.concat()))?,
        })
    }

    /// Matrices of equal width, one below the other.
    fn matrix(&mut self, tensors: &[Tensor]) -> Result<CudaSlice<bf16>, ComputeError> {
        let shapes = tensors.iter().map(|tensor| tensor.shape(self.source.config()));
        let values = shapes.map(|(outputs, inputs)| outputs * inputs).sum();
        let mut matrix = allocate(self.device, "weights", values)?;
        let mut start = 0;
        for &tensor in tensors {
            let (outputs, inputs) = tensor.shape(self.source.config());
            let block_rows = (BLOCK_VALUES / inputs).max(1);
            for first in (0..outputs).step_by(block_rows) {
                let rows = first..(first + block_rows).min(outputs);
                let len = rows.len() * inputs;
                self.read(tensor, rows, inputs)?;
                let failed = || self.device.failed("copy weights to it");
                let staged = &self.staging.as_slice().map_err(failed())?[..len];
                let mut into = matrix.slice_mut(start..start + len);
                self.device.stream.memcpy_htod(staged, &mut into).map_err(failed())?;
                // The staging buffer is filled again next.
                self.device.stream.synchronize().map_err(failed())?;
                start += len;
                (self.progress)((len * size_of::<bf16>()) as u64);
            }
        }
        Ok(matrix)
    }

    fn read(
        &mut self,
        tensor: Tensor,
        rows: std::ops::Range<usize>,
        inputs: usize,
    ) -> Result<(), ComputeError> {
        let failed = self.device.failed("use a pinned buffer");
        let staging = self.staging.as_mut_slice().map_err(failed)?;
        let staging = SharedMut::new(&mut staging[..rows.len() * inputs]);
        let failure = Mutex::new(None);
        self.threads.for_each(rows.len().div_ceil(READ_ROWS), |chunk| {
            let start = chunk * READ_ROWS;
            let count = READ_ROWS.min(rows.len() - start);
            // SAFETY: chunks do not overlap.
            let into = unsafe { staging.part(start * inputs, count * inputs) };
            let from = rows.start + start..rows.start + start + count;
            let read = self.source.read_rows(tensor, from, into);
            let converted = match self.device.half {
                Half::Bf16 => Ok(()),
                Half::F16 => to_f16(self.device, tensor, into),
            };
            if let Err(error) = read.and(converted) {
                *failure.lock().expect("no panic while held") = Some(error);
            }
        });
        failure.into_inner().expect("no panic while held").map_or(Ok(()), Err)
    }
}

/// Turns values into f16, in their places; fails for what is beyond its range.
fn to_f16(device: &CudaDevice, tensor: Tensor, values: &mut [bf16]) -> Result<(), ComputeError> {
    for value in values {
        let exact = value.to_f32();
        if exact.abs() > f16::MAX.to_f32() {
            let reason = format!("{tensor:?} has {exact}, which is beyond the range of f16");
            return Err(device.error("hold the model, because it has no bf16", reason));
        }
        *value = bf16::from_bits(f16::from_f32(exact).to_bits());
    }
    Ok(())
}
