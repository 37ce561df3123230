//! The part of a step that touches weights, for a slice of a model: embedding, what is before and after attention in
//! each layer, logits.

use super::choice;
use super::device::CudaDevice;
use super::module::{ACTIVATE_VALUES, Arg, Module, ROTATE_HEADS};
use super::product::{Into, Operands, Products, Shape};
use super::weights::{Layer, Weights, address, allocate, upload};
use crate::rope::Rope;
use crate::source::{SliceSpec, WeightSource, check_shape};
use crate::{ComputeError, Threads};
use cudarc::driver::CudaSlice;
use glinthawk_model::ModelConfig;
use half::bf16;
use std::sync::Arc;

/// Rows whose logits are made at a time.
pub(super) const LOGIT_ROWS: usize = 256;

/// Where the residual of some rows stands, and attention's output for them.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) residual: u64,
    pub(super) attended: u64,
}

/// A slice of a model on a device, and what its layers need beside the residual.
pub(super) struct Layers {
    pub(super) device: CudaDevice,
    pub(super) config: ModelConfig,
    pub(super) module: Arc<Module>,
    pub(super) products: Products,
    weights: Weights,
    /// (positions, 2, head_dim / 2): cosines, then sines
    angles: CudaSlice<f32>,
    /// (rows, hidden)
    normed: CudaSlice<bf16>,
    /// (rows, qkv_width), then (rows, 2, feed_forward)
    wide: CudaSlice<bf16>,
    /// (rows, feed_forward)
    activated: CudaSlice<bf16>,
}

impl Layers {
    /// Bytes that a slice takes, beside its slab.
    pub(super) fn bytes(config: &ModelConfig, spec: &SliceSpec, context_max: usize) -> usize {
        let row = 2 * (config.hidden + config.feed_forward)
            + 2 * config.qkv_width().max(2 * config.feed_forward);
        spec.bytes(config) + spec.batch_rows * row + 4 * context_max * config.head_dim
    }

    /// Puts a slice on a device, for contexts of so many positions. `progress` hears of bytes.
    pub(super) fn load(
        device: &CudaDevice,
        module: &Arc<Module>,
        source: &dyn WeightSource,
        spec: &SliceSpec,
        context_max: usize,
        threads: &Threads,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ComputeError> {
        let config = source.config().clone();
        check_shape(&config)?;
        check_alignment(&config)?;
        let mut rope = Rope::new(&config);
        rope.reach(context_max as u32 - 1);
        let angles: Vec<f32> =
            (0..context_max as u32).flat_map(|at| rope.angles(at).to_vec()).collect();
        let rows = spec.batch_rows;
        let wide = config.qkv_width().max(2 * config.feed_forward);
        let activations = |rows: usize, width: usize| allocate(device, "activations", rows * width);
        Ok(Self {
            weights: Weights::load(device, source, spec, threads, progress)?,
            products: Products::new(device)?,
            angles: upload(device, &angles)?,
            normed: activations(rows.max(LOGIT_ROWS), config.hidden)?,
            wide: activations(rows, wide)?,
            activated: activations(rows, config.feed_forward)?,
            device: device.clone(),
            module: Arc::clone(module),
            config,
        })
    }

    fn at(&self, slice: &CudaSlice<bf16>) -> u64 {
        address(slice, &self.device)
    }

    fn norm(
        &self,
        residual: u64,
        which: u64,
        weight: &CudaSlice<f32>,
        count: usize,
    ) -> Result<(), ComputeError> {
        let args = [residual, which, address(weight, &self.device), self.at(&self.normed)];
        self.module.launch(&self.module.norm_rows, (count as u32, 1, 1), &args.map(Arg::Address))
    }

    /// The residual of `count` rows, which have tokens; `kept` has those that the step before picked, by slot.
    pub(super) fn embed(
        &self,
        rows: u64,
        kept: u64,
        count: usize,
        residual: u64,
    ) -> Result<(), ComputeError> {
        let table = self.weights.embedding.as_ref().expect("the first slice embeds");
        let args = [rows, kept, self.at(table), residual].map(Arg::Address);
        self.module.launch(&self.module.embed, (count as u32, 1, 1), &args)
    }

    /// Norm and q/k/v projection of rows with this residual; [`Self::rotate`] takes the result on.
    pub(super) fn project(
        &mut self,
        layer: usize,
        count: usize,
        residual: u64,
    ) -> Result<(), ComputeError> {
        let weights = &self.weights.layers[layer];
        self.norm(residual, 0, &weights.attention_norm, count)?;
        let operands = Operands {
            weights: self.at(&weights.qkv),
            inputs: self.at(&self.normed),
            outputs: self.at(&self.wide),
        };
        self.products.multiply(shapes(&self.config)[0], count, operands)
    }

    /// Bias, head norms and rotation of `count` projected rows from `first` on, described at `rows`. With pages, k and v
    /// are stored there and `query` gets q; else it gets all three.
    pub(super) fn rotate(
        &self,
        layer: usize,
        rows: u64,
        (first, count): (usize, usize),
        query: u64,
        pages: u64,
    ) -> Result<(), ComputeError> {
        let Layer { qkv_bias, head_norms, .. } = &self.weights.layers[layer];
        let float = |slice: &CudaSlice<f32>| address(slice, &self.device);
        let optional = |slice: &Option<CudaSlice<f32>>| slice.as_ref().map_or(0, float);
        let wide = self.at(&self.wide) + (first * self.config.qkv_width() * 2) as u64;
        let (bias, norms) = (optional(qkv_bias), optional(head_norms));
        let args = [rows, wide, bias, norms, float(&self.angles), query, pages];
        let heads = self.config.heads + 2 * self.config.kv_heads;
        let grid = (count as u32, heads.div_ceil(ROTATE_HEADS) as u32, 1);
        self.module.launch(&self.module.rotate, grid, &args.map(Arg::Address))
    }

    /// Copies the residual of rows, and attention's output for them, from these places to those; a list on the device
    /// names them.
    pub(super) fn take_rows(
        &self,
        rows: u64,
        count: usize,
        from: Rows,
        to: Rows,
    ) -> Result<(), ComputeError> {
        let args = [rows, from.residual, from.attended, to.residual, to.attended];
        self.module.launch(&self.module.take_rows, (count as u32, 1, 1), &args.map(Arg::Address))
    }

    /// Output projection and feed-forward: adds both to the residual.
    pub(super) fn feed_forward(
        &mut self,
        layer: usize,
        count: usize,
        Rows { residual, attended }: Rows,
    ) -> Result<(), ComputeError> {
        let [_, output, gate_up, down] = shapes(&self.config);
        let weights = &self.weights.layers[layer];
        let (normed, wide, activated) =
            (self.at(&self.normed), self.at(&self.wide), self.at(&self.activated));
        let operands = |weights, inputs, outputs| Operands { weights, inputs, outputs };
        let matrix = operands(self.at(&weights.output), attended, residual);
        self.products.multiply(output, count, matrix)?;
        self.norm(residual, 0, &weights.feed_forward_norm, count)?;
        let matrix = operands(self.at(&weights.gate_up), normed, wide);
        self.products.multiply(gate_up, count, matrix)?;
        let blocks = (count * self.config.feed_forward).div_ceil(ACTIVATE_VALUES) as u32;
        let args = [Arg::Address(wide), Arg::Address(activated), Arg::Number(count as u32)];
        self.module.launch(&self.module.activate, (blocks, 1, 1), &args)?;
        let matrix = operands(self.at(&weights.down), activated, residual);
        self.products.multiply(down, count, matrix)
    }

    /// Logits of `count` rows, at most [`LOGIT_ROWS`], of a residual; a list on the device names them, or they are its
    /// first (0).
    pub(super) fn classify(
        &mut self,
        residual: u64,
        rows: u64,
        count: usize,
        logits: u64,
    ) -> Result<(), ComputeError> {
        let norm = self.weights.final_norm.as_ref().expect("the last slice classifies");
        self.norm(residual, rows, norm, count)?;
        let operands = Operands {
            weights: self.at(self.weights.classifying()),
            inputs: self.at(&self.normed),
            outputs: logits,
        };
        self.products.multiply(classifier(&self.config), count, operands)
    }

    /// Chooses the products' algorithms for up to `rows` rows, on buffers that nothing uses yet. Without logits the
    /// slice does not classify.
    pub(super) fn tune(
        &mut self,
        rows: usize,
        attended: u64,
        residual: u64,
        logits: Option<u64>,
    ) -> Result<(), ComputeError> {
        let ModelConfig { hidden, feed_forward, .. } = self.config;
        let (normed, activated) = (self.at(&self.normed), self.at(&self.activated));
        let inputs =
            [(attended, self.config.query_width()), (normed, hidden), (activated, feed_forward)];
        for (at, width) in inputs {
            fill_with_noise(&self.device, at, rows * width)?;
        }
        let layers = 0..self.weights.layers.len();
        let layers: Vec<[(Shape, Operands); 4]> =
            layers.map(|layer| self.layer_products(layer, attended, residual)).collect();
        for (number, shape) in shapes(&self.config).into_iter().enumerate() {
            let operands: Vec<Operands> =
                layers.iter().map(|products| products[number].1).collect();
            choice::tune(&mut self.products, shape, rows, &operands)?;
        }
        if let Some(outputs) = logits {
            let (shape, rows) = (classifier(&self.config), rows.min(LOGIT_ROWS));
            let weights = self.at(self.weights.classifying());
            let operands = Operands { weights, inputs: normed, outputs };
            choice::tune(&mut self.products, shape, rows, &[operands])?;
        }
        Ok(())
    }

    /// The products of a layer, on its own buffers: q/k/v, output, gate and up, down.
    pub(super) fn layer_products(
        &self,
        layer: usize,
        attended: u64,
        residual: u64,
    ) -> [(Shape, Operands); 4] {
        let (normed, wide, activated) =
            (self.at(&self.normed), self.at(&self.wide), self.at(&self.activated));
        let layer = &self.weights.layers[layer];
        let [qkv, output, gate_up, down] = shapes(&self.config);
        let operands = |weights, inputs, outputs| Operands { weights, inputs, outputs };
        [
            (qkv, operands(self.at(&layer.qkv), normed, wide)),
            (output, operands(self.at(&layer.output), attended, residual)),
            (gate_up, operands(self.at(&layer.gate_up), normed, wide)),
            (down, operands(self.at(&layer.down), activated, residual)),
        ]
    }
}

/// The products of a layer: q/k/v, output, gate and up, down.
fn shapes(config: &ModelConfig) -> [Shape; 4] {
    let shape = |outputs, inputs, into| Shape { outputs, inputs, into };
    let (hidden, feed_forward) = (config.hidden, config.feed_forward);
    [
        shape(config.qkv_width(), hidden, Into::Half),
        shape(hidden, config.query_width(), Into::AddF32),
        shape(2 * feed_forward, hidden, Into::Half),
        shape(hidden, feed_forward, Into::AddF32),
    ]
}

/// Fills values with numbers of a usual size: zeros are multiplied with less power, so faster.
fn fill_with_noise(device: &CudaDevice, at: u64, values: usize) -> Result<(), ComputeError> {
    const BLOCK: usize = 1 << 20;
    let noise = |at: usize| (at.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 32768.0 - 1.0;
    let block: Vec<bf16> = (0..values.min(BLOCK)).map(|at| bf16::from_f32(noise(at))).collect();
    let block = device.stream.clone_htod(&block).map_err(device.failed("copy noise to it"))?;
    for start in (0..values).step_by(BLOCK) {
        let bytes = size_of::<bf16>() * (values - start).min(BLOCK);
        device.copy(at + (start * size_of::<bf16>()) as u64, address(&block, device), bytes)?;
    }
    Ok(())
}

fn classifier(config: &ModelConfig) -> Shape {
    Shape { outputs: config.vocab, inputs: config.hidden, into: Into::F32 }
}

/// Fails for shapes whose rows are not aligned for vector loads.
fn check_alignment(config: &ModelConfig) -> Result<(), ComputeError> {
    let widths = [("hidden", config.hidden), ("feed_forward", config.feed_forward)];
    for (name, width) in widths {
        if !width.is_multiple_of(8) {
            let what = format!("{name} {width} is not a multiple of 8, which a GPU needs");
            return Err(ComputeError::Shape { what });
        }
    }
    Ok(())
}
