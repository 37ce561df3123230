//! Kernel times of a pool, one for each batch, so that a search looks them up.

use crate::configuration::Contexts;
use crate::kernels::KernelTimes;

/// Kernel times of a pool for every batch.
#[derive(Debug)]
pub(crate) struct Table {
    pub pre: Vec<f64>,
    pub post: Vec<f64>,
    pub fused: Vec<f64>,
    pub classify: Vec<f64>,
    pub attention: Vec<f64>,
    /// Batches between which the times are linear.
    pub knots: Vec<usize>,
    /// Least seconds a row of pre, fused and post in batches of up to so many rows.
    pub least_per_row: Vec<[f64; 3]>,
    /// Least seconds of each in any batch.
    pub least: [f64; 3],
}

impl Table {
    pub fn of(kernels: &KernelTimes, rows_max: usize, contexts: &Contexts) -> Self {
        let over = |time: &dyn Fn(usize) -> f64| (0..=rows_max).map(time).collect();
        let (mut per_row, mut least) = ([f64::INFINITY; 3], [f64::INFINITY; 3]);
        let mut least_per_row = vec![per_row];
        for rows in 1..=rows_max {
            let times = [kernels.pre(rows), kernels.fused(rows), kernels.post(rows)];
            per_row = std::array::from_fn(|stage| per_row[stage].min(times[stage] / rows as f64));
            least = std::array::from_fn(|stage| least[stage].min(times[stage]));
            least_per_row.push(per_row);
        }
        Self {
            pre: over(&|rows| kernels.pre(rows)),
            post: over(&|rows| kernels.post(rows)),
            fused: over(&|rows| kernels.fused(rows)),
            classify: over(&|rows| kernels.classify(rows)),
            attention: over(&|rows| contexts.attention(kernels, rows)),
            knots: kernels.knots(),
            least_per_row,
            least,
        }
    }
}
