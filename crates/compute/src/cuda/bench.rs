//! Times a layer without its attention, and its products one by one beside the fastest algorithms that the library has
//! for them. For `bench kernels`.

use super::device::CudaDevice;
use super::layers::Layers;
use super::module::Module;
use super::product::{Operands, Shape};
use super::weights::{address, allocate};
use crate::source::SliceSpec;
use crate::{ComputeError, Threads};
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::CudaSlice;
use glinthawk_flight::Row;
use glinthawk_model::Model;
use half::bf16;
use std::sync::Arc;

/// Layers that are computed in turn: more weights than any cache holds.
const LAYERS_TIMED: usize = 3;
/// Algorithms that the library is asked for.
const PROPOSALS: usize = 64;
/// Those of them that are timed more than once.
const FINALISTS: usize = 4;
/// Passes over the layers in one timing; the fastest timing counts.
const PASSES: usize = 4;
const TIMINGS: usize = 5;

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
        // Numbers of a usual size: zeros are multiplied with less power, so faster.
        let noise =
            |at: usize| (at.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 32768.0 - 1.0;
        let residual: Vec<f32> = (0..rows_max * config.hidden).map(noise).collect();
        let attended = (0..rows_max * config.query_width()).map(|at| bf16::from_f32(noise(at)));
        let attended: Vec<bf16> = attended.collect();
        let failed = || device.failed("copy activations to it");
        let mut bench = Self {
            residual: device.stream.clone_htod(&residual).map_err(failed())?,
            attended: device.stream.clone_htod(&attended).map_err(failed())?,
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

    fn layer_count(&self) -> usize {
        LAYERS_TIMED.min(self.layers.config.layers)
    }

    /// Times a layer of `rows` rows.
    pub fn time(&mut self, rows: usize) -> Result<LayerTiming, ComputeError> {
        let (residual, attended) = self.places();
        let described = address(&self.rows, &self.device);
        let rotated = address(&self.rotated, &self.device);
        debug_assert!(rows * size_of::<Row>() <= self.rows.len() * size_of::<u32>());
        let layer = self.fastest_of(TIMINGS, &mut |bench, layer| {
            bench.layers.project(layer, rows, residual)?;
            bench.layers.rotate(layer, described, (0, rows), rotated, 0)?;
            bench.layers.feed_forward(layer, rows, attended, residual)
        })?;
        let (mut products, mut fastest) = ([0.0; 4], [0.0; 4]);
        for number in 0..PRODUCTS.len() {
            let (shape, _) = self.layers.layer_products(0, attended, residual)[number];
            let chosen = self.layers.products.chosen(shape, rows);
            let mut others = Vec::new();
            for algorithm in self.layers.products.candidates(shape, rows, PROPOSALS)? {
                // Some that are proposed cannot be run after all.
                if let Ok(seconds) = self.time_product(number, rows, &algorithm, 1) {
                    others.push((seconds, algorithm));
                }
            }
            others.sort_by(|one, other| one.0.total_cmp(&other.0));
            fastest[number] = f64::INFINITY;
            for (_, algorithm) in others.iter().take(FINALISTS) {
                let seconds = self.time_product(number, rows, algorithm, TIMINGS)?;
                fastest[number] = fastest[number].min(seconds);
            }
            products[number] = self.time_product(number, rows, &chosen, TIMINGS)?;
        }
        Ok(LayerTiming { layer, products, fastest })
    }

    fn time_product(
        &mut self,
        number: usize,
        rows: usize,
        algorithm: &cublasLtMatmulAlgo_t,
        timings: usize,
    ) -> Result<f64, ComputeError> {
        let (residual, attended) = self.places();
        self.fastest_of(timings, &mut |bench, layer| {
            let all: [(Shape, Operands); 4] =
                bench.layers.layer_products(layer, attended, residual);
            let (shape, operands) = all[number];
            bench.layers.products.run(shape, rows, operands, algorithm)
        })
    }

    /// Seconds of one layer's work, once the device is warm.
    fn fastest_of(
        &mut self,
        timings: usize,
        work: &mut dyn FnMut(&mut Self, usize) -> Result<(), ComputeError>,
    ) -> Result<f64, ComputeError> {
        let (start, end) = (self.device.event()?, self.device.event()?);
        let device = self.device.clone();
        let failed = || device.failed("time its kernels");
        let layers = self.layer_count();
        work(self, 0)?;
        let mut fastest = f64::INFINITY;
        for _ in 0..timings {
            start.record(&device.stream).map_err(failed())?;
            for turn in 0..PASSES * layers {
                work(self, turn % layers)?;
            }
            end.record(&device.stream).map_err(failed())?;
            let elapsed_ms = start.elapsed_ms(&end).map_err(failed())?;
            fastest = fastest.min(f64::from(elapsed_ms) / 1000.0 / (PASSES * layers) as f64);
        }
        Ok(fastest)
    }
}
