//! Seconds of a layer's stages on a device: measured, or from a roofline that is marked as one.

use crate::catalogue::DeviceKind;
use crate::profile::{Overheads, Profile, interpolate};
use crate::shape::Shape;
use glinthawk_protocol::network_cores;

/// Where kernel times come from.
#[derive(Clone, Debug, PartialEq)]
pub enum KernelTimes {
    /// A profile measured on the device.
    Measured(Box<Profile>),
    /// A roofline with efficiency factors.
    Analytic(Roofline),
}

/// Kernel times from peaks: weights are loaded, then multiplied, and the two do not overlap;
/// attention takes the longer of loading the context and computing on it, which do overlap.
///
/// A row that generates loads its whole context for itself and computes on it at the vector rate. The rows of a
/// prefill chunk share one load, and their scores and sums are products of matrices: they run at the matrix rate, as
/// they do in this project's kernels (tiles of rows and heads over one page) and in every fused attention on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    shape: Shape,
    /// Bytes per second while weights are streamed.
    weights_bandwidth: f64,
    /// Operations per second in matrix products.
    matrix: f64,
    /// Bytes per second while contexts are streamed.
    context_bandwidth: f64,
    /// Operations per second in attention.
    vector: f64,
    /// Where the efficiencies come from; none where they are assumed.
    source: Option<String>,
}

impl Roofline {
    /// The roofline of `device` for a model of `shape`.
    pub fn of(device: &DeviceKind, shape: &Shape) -> Self {
        let (bandwidth, efficiency) = (device.bandwidth_gb_s.value * 1e9, &device.efficiency);
        Self {
            shape: shape.clone(),
            weights_bandwidth: bandwidth * efficiency.weights_bandwidth,
            matrix: device.matrix_tflops.value * 1e12 * efficiency.matrix,
            context_bandwidth: bandwidth * efficiency.context_bandwidth,
            vector: device.vector_tflops.value * 1e12 * efficiency.vector,
            source: device.efficiency_source.clone(),
        }
    }

    fn product_seconds(&self, rows: usize, parameters: f64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let load = parameters * self.shape.value_bytes as f64 / self.weights_bandwidth;
        load + 2.0 * parameters * rows as f64 / self.matrix
    }

    fn attention_seconds(&self, rows: usize, context: f64) -> f64 {
        let load = context * self.shape.context_bytes_per_layer() / self.context_bandwidth;
        let compute = self.shape.attention_flops(context) / self.vector;
        rows as f64 * load.max(compute)
    }

    /// The last `rows` rows of a prompt of `context` positions; each sees only what is before it.
    fn prefill_seconds(&self, rows: usize, context: f64) -> f64 {
        let load = context * self.shape.context_bytes_per_layer() / self.context_bandwidth;
        let seen = rows as f64 * (context - (rows as f64 - 1.0) / 2.0);
        load.max(self.shape.attention_flops(seen) / self.matrix.max(self.vector))
    }
}

impl KernelTimes {
    /// The roofline of `device` for a model of `shape`.
    pub fn analytic(device: &DeviceKind, shape: &Shape) -> Self {
        Self::Analytic(Roofline::of(device, shape))
    }

    /// Seconds of the stage before attention for `rows` rows.
    pub fn pre_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) => interpolate(&profile.pre, rows),
            Self::Analytic(roofline) => {
                roofline.product_seconds(rows, roofline.shape.pre_parameters())
            }
        }
    }

    /// Seconds of the stage after attention.
    pub fn post_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) => interpolate(&profile.post, rows),
            Self::Analytic(roofline) => {
                roofline.product_seconds(rows, roofline.shape.post_parameters())
            }
        }
    }

    /// Seconds of a layer's post and the next layer's pre, fused.
    pub fn fused_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) => interpolate(&profile.fused, rows),
            Self::Analytic(_) => self.pre_seconds(rows) + self.post_seconds(rows),
        }
    }

    /// The same in a step that a device is given at once.
    pub fn fused_at_once_seconds(&self, rows: usize) -> f64 {
        let Self::Measured(profile) = self else { return self.fused_seconds(rows) };
        match profile.fused_at_once.last().is_some_and(|last| rows <= last.batch) {
            true => interpolate(&profile.fused_at_once, rows),
            false => self.fused_seconds(rows),
        }
    }

    /// Seconds of the final norm, classifier and sampling.
    pub fn classify_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) => interpolate(&profile.classify, rows),
            Self::Analytic(roofline) => {
                roofline.product_seconds(rows, roofline.shape.classify_parameters())
            }
        }
    }

    /// Seconds of the final norm, classifier and a draw from all logits.
    pub fn logits_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) if !profile.logits.is_empty() => {
                interpolate(&profile.logits, rows)
            }
            _ => self.classify_seconds(rows),
        }
    }

    /// Seconds of one layer's attention for the last `rows` rows of one prompt of `context` positions.
    pub fn prefill_seconds(&self, rows: usize, context: f64) -> f64 {
        match self {
            Self::Measured(profile) => profile.prefill_seconds(rows, context),
            Self::Analytic(roofline) => roofline.prefill_seconds(rows, context),
        }
    }

    /// Whether the kernels run on a device beside the host, which is free for messages meanwhile.
    pub fn on_device(&self) -> bool {
        matches!(self, Self::Measured(profile) if !profile.to_host.is_empty())
    }

    /// The cores that a process which only attends with them leaves to the network.
    pub fn network_cores(&self) -> usize {
        match self {
            Self::Measured(profile) if !self.on_device() => {
                network_cores(profile.provenance.threads)
            }
            _ => 0,
        }
    }

    /// How much the time of a kernel varied while it was measured, as a part of it.
    pub fn spread(&self) -> f64 {
        let Self::Measured(profile) = self else { return 0.0 };
        let parts = profile.fused.iter().map(|point| point.spread / point.seconds);
        parts.sum::<f64>() / profile.fused.len() as f64
    }

    /// Seconds in which q, k and v of `rows` rows are copied to the host; zero where the kernels work there.
    pub fn to_host_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) if !profile.to_host.is_empty() => {
                interpolate(&profile.to_host, rows)
            }
            _ => 0.0,
        }
    }

    /// Seconds in which attention's output of `rows` rows is copied to the device; zero likewise.
    pub fn to_device_seconds(&self, rows: usize) -> f64 {
        match self {
            Self::Measured(profile) if !profile.to_device.is_empty() => {
                interpolate(&profile.to_device, rows)
            }
            _ => 0.0,
        }
    }

    /// The engine's work around the kernels; zero if it was not measured.
    pub fn overheads(&self) -> Overheads {
        match self {
            Self::Measured(profile) => profile.overheads,
            Self::Analytic(_) => Overheads::default(),
        }
    }

    /// Seconds of one layer's attention for `rows` rows over `context` positions each.
    pub fn attention_seconds(&self, rows: usize, context: f64) -> f64 {
        match self {
            Self::Measured(profile) => profile.attention_seconds(rows, context),
            Self::Analytic(roofline) => roofline.attention_seconds(rows, context),
        }
    }

    /// Batches between which the times of the products are linear; empty if they are linear throughout.
    pub fn knots(&self) -> Vec<usize> {
        let Self::Measured(profile) = self else { return Vec::new() };
        let curves = [&profile.pre, &profile.post, &profile.fused, &profile.classify];
        let batches = curves.into_iter().flatten().map(|point| point.batch);
        let mut knots: Vec<usize> = batches.collect();
        knots.sort_unstable();
        knots.dedup();
        knots
    }

    /// Rows of a prefill chunk up to which its attention was measured; without a limit if none was.
    pub fn chunk_max(&self) -> usize {
        let Self::Measured(profile) = self else { return usize::MAX };
        let rows = profile.prefill.iter().filter_map(|curve| Some(curve.points.last()?.batch));
        rows.max().unwrap_or(usize::MAX)
    }

    /// `measured` with its provenance, or `analytic`: every report says which.
    pub fn provenance(&self) -> String {
        match self {
            Self::Measured(profile) => {
                let from = &profile.provenance;
                format!("measured on {} ({}, {})", from.machine, from.instruction_set, from.date)
            }
            Self::Analytic(roofline) => match &roofline.source {
                Some(source) => format!("analytic (a roofline; efficiencies {source})"),
                None => {
                    "analytic (a roofline with assumed efficiency, not a measurement)".to_owned()
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{Catalogue, Efficiency};

    #[test]
    fn roofline_of_a_t4_at_full_efficiency() {
        let shape = Shape::llama2_70b();
        let mut device = Catalogue::built_in().get("t4").expect("built in").clone();
        device.efficiency =
            Efficiency { weights_bandwidth: 1.0, matrix: 1.0, context_bandwidth: 1.0, vector: 1.0 };
        let kernels = KernelTimes::analytic(&device, &shape);
        let (load, multiply) = (1_711_276_032.0 / 320e9, 1_711_276_032.0 / 65e12);
        assert!((kernels.fused_seconds(1) - load - multiply).abs() < 1e-12);
        assert!((kernels.fused_seconds(100) - load - 100.0 * multiply).abs() < 1e-12);
        assert_eq!(kernels.fused_seconds(0), 0.0);
        // 2,048 positions are 8 MiB: at these peaks loading them takes longer than computing on them.
        assert!(
            (kernels.attention_seconds(1, 2048.0) - 8.0 * 1024.0 * 1024.0 / 320e9).abs() < 1e-12
        );
    }

    #[test]
    fn rows_of_a_prefill_chunk_share_the_load_of_their_context() {
        let shape = Shape::llama2_70b();
        let catalogue = Catalogue::built_in();
        for name in ["t4", "a100-40", "epyc-7v12-16"] {
            let kernels = KernelTimes::analytic(catalogue.get(name).expect("built in"), &shape);
            let apart = kernels.attention_seconds(256, 2048.0 - 127.5);
            let together = kernels.prefill_seconds(256, 2048.0);
            assert!(together < apart, "{name}: {together} against {apart}");
            // One row alone shares nothing with anybody, and loads what a generating row loads.
            assert!(
                kernels.prefill_seconds(1, 2048.0) <= kernels.attention_seconds(1, 2048.0),
                "{name}"
            );
            // The whole prompt at once takes no more than in two halves: a half is loaded again.
            let halves =
                kernels.prefill_seconds(128, 1920.0) + kernels.prefill_seconds(128, 2048.0);
            assert!(together <= halves * (1.0 + 1e-9), "{name}: {together} against {halves}");
        }
    }
}
