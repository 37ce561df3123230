//! Times a layer without its attention, and its products one by one beside the fastest algorithms that the library has
//! for them. For `bench kernels`.

use super::choice::{self, in_turns};
use super::device::CudaDevice;
use super::layers::{Layers, Rows};
use super::module::Module;
use super::product::{Operands, Shape};
use super::weights::{address, allocate};
use crate::source::SliceSpec;
use crate::{ComputeError, Threads};
use cudarc::driver::CudaSlice;
use glinthawk_flight::Row;
use glinthawk_model::Model;
use half::bf16;
use std::sync::Arc;

/// Layers that are computed in turn: of each product, more weights than any cache holds.
const LAYERS_TIMED: usize = 8;
/// Algorithms that the library is asked for.
const PROPOSALS: usize = 64;
/// Timings of the layer and of each product, in turns.
const ROUNDS: usize = 9;

/// The names of a layer's products.
pub const PRODUCTS: [&str; 4] = ["q/k/v", "output", "gate and up", "down"];

/// Times of a layer with some number of rows, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct LayerTiming {
    /// All of the layer but its attention.
    pub layer: f64,
    /// Its products, each alone.
    pub products: [f64; 4],
    /// The fastest algorithm for each.
    pub fastest: [f64; 4],
}

/// Some layers of a model on a device.
pub struct LayerBench {
    device: CudaDevice,
    layers: Layers,
    /// (rows, hidden)
    residual: CudaSlice<f32>,
    /// (rows, query_width)
    attended: CudaSlice<bf16>,
    /// (rows, qkv_width)
    rotated: CudaSlice<bf16>,
    /// (rows, 4)
    rows: CudaSlice<u32>,
}

impl LayerBench {
    /// The first layers of a model, for up to `rows_max` rows.
    pub fn new(
        model: &Model,
        device: &CudaDevice,
        rows_max: usize,
        threads: &Threads,
    ) -> Result<Self, ComputeError> {
        let config = model.config();
        let layers = LAYERS_TIMED.min(config.layers);
        let (embeds, classifies) = (false, false);
        let (slab_rows, batch_rows) = (rows_max, rows_max);
        let spec = SliceSpec { layers: 0..layers, embeds, classifies, slab_rows, batch_rows };
        let module = Arc::new(Module::new(device, config)?);
        let context_max = config.context_max.min(rows_max.max(1));
        let quiet = &mut |_| ();
        let layers = Layers::load(device, &module, model, &spec, context_max, threads, quiet)?;
        let rows = (0..rows_max).flat_map(|row| [0, (row % context_max) as u32, 0, 0]);
        let rows: Vec<u32> = rows.collect();
        let failed = || device.failed("describe rows to it");
        let mut bench = Self {
            residual: allocate(device, "the residual", rows_max * config.hidden)?,
            attended: allocate(device, "activations", rows_max * config.query_width())?,
            rotated: allocate(device, "activations", rows_max * config.qkv_width())?,
            rows: device.stream.clone_htod(&rows).map_err(failed())?,
            device: device.clone(),
            layers,
        };
        let (residual, attended) = bench.places();
        bench.layers.tune(rows_max, attended, residual, None)?;
        Ok(bench)
    }

    fn places(&self) -> (u64, u64) {
        (address(&self.residual, &self.device), address(&self.attended, &self.device))
    }

    /// Times a layer of `rows` rows.
    pub fn time(&mut self, rows: usize) -> Result<LayerTiming, ComputeError> {
        let (residual, attended) = self.places();
        let described = address(&self.rows, &self.device);
        let rotated = address(&self.rotated, &self.device);
        debug_assert!(rows * size_of::<Row>() <= self.rows.len() * size_of::<u32>());
        let count = LAYERS_TIMED.min(self.layers.config.layers);
        let operands: Vec<[(Shape, Operands); 4]> =
            (0..count).map(|layer| self.layers.layer_products(layer, attended, residual)).collect();
        // Of each product its own algorithm, then the fastest.
        let mut timed = Vec::new();
        for number in 0..PRODUCTS.len() {
            let shape = operands[0][number].0;
            let layers: Vec<Operands> = operands.iter().map(|all| all[number].1).collect();
            timed.push((number, self.layers.products.chosen(shape, rows)));
            let products = &mut self.layers.products;
            timed.push((number, choice::fastest(products, shape, rows, &layers, PROPOSALS)?));
        }
        let layers = &mut self.layers;
        let mut seconds = in_turns(&self.device, timed.len() + 1, ROUNDS, &mut |turn| {
            (0..count).try_for_each(|layer| {
                if let Some((number, algorithm)) = timed.get(turn) {
                    let (shape, operands) = operands[layer][*number];
                    return layers.products.run(shape, rows, operands, algorithm);
                }
                layers.project(layer, rows, residual)?;
                layers.rotate(layer, described, (0, rows), rotated, 0)?;
                layers.feed_forward(layer, rows, Rows { residual, attended })
            })
        })?;
        seconds.iter_mut().for_each(|seconds| *seconds /= count as f64);
        let products = std::array::from_fn(|number| seconds[2 * number]);
        // What was found fastest may prove slower than the chosen one; and both may be one algorithm.
        let fastest = |number: usize| match timed[2 * number] == timed[2 * number + 1] {
            true => seconds[2 * number],
            false => seconds[2 * number].min(seconds[2 * number + 1]),
        };
        let layer = seconds[timed.len()];
        Ok(LayerTiming { layer, products, fastest: std::array::from_fn(fastest) })
    }
}
