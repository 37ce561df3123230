//! Kernel times of a pool, one for each batch, so that a search looks them up.

use crate::configuration::Contexts;
use crate::kernels::KernelTimes;

/// Kernel times of a pool for every batch.
#[derive(Debug)]
pub(crate) struct Table {
    pub pre_seconds: Vec<f64>,
    pub post_seconds: Vec<f64>,
    pub fused_seconds: Vec<f64>,
    pub classify_seconds: Vec<f64>,
    pub attention_seconds: Vec<f64>,
    /// Batches between which the times are linear.
    pub knots: Vec<usize>,
    /// Least seconds a row of pre, fused and post in batches of up to so many rows.
    pub least_row_seconds: Vec<[f64; 3]>,
    /// Least seconds of each in any batch.
    pub least_seconds: [f64; 3],
}

impl Table {
    pub fn of(kernels: &KernelTimes, rows_max: usize, contexts: &Contexts) -> Self {
        let over = |time: &dyn Fn(usize) -> f64| (0..=rows_max).map(time).collect();
        let (mut per_row, mut least) = ([f64::INFINITY; 3], [f64::INFINITY; 3]);
        let mut least_row_seconds = vec![per_row];
        for rows in 1..=rows_max {
            let times = [
                kernels.pre_seconds(rows),
                kernels.fused_seconds(rows),
                kernels.post_seconds(rows),
            ];
            per_row = std::array::from_fn(|stage| per_row[stage].min(times[stage] / rows as f64));
            least = std::array::from_fn(|stage| least[stage].min(times[stage]));
            least_row_seconds.push(per_row);
        }
        Self {
            pre_seconds: over(&|rows| kernels.pre_seconds(rows)),
            post_seconds: over(&|rows| kernels.post_seconds(rows)),
            fused_seconds: over(&|rows| kernels.fused_seconds(rows)),
            classify_seconds: over(&|rows| kernels.classify_seconds(rows)),
            attention_seconds: over(&|rows| contexts.attention_seconds(kernels, rows)),
            knots: kernels.knots(),
            least_row_seconds,
            least_seconds: least,
        }
    }
}
