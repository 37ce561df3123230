//! Kernel times of a pool, one for each batch, so that a search looks them up.

use crate::kernels::Kernels;

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
}

impl Table {
    pub fn of(kernels: &Kernels, rows_max: usize, context: f64) -> Self {
        let over = |time: &dyn Fn(usize) -> f64| (0..=rows_max).map(time).collect();
        Self {
            pre: over(&|rows| kernels.pre(rows)),
            post: over(&|rows| kernels.post(rows)),
            fused: over(&|rows| kernels.fused(rows)),
            classify: over(&|rows| kernels.classify(rows)),
            attention: over(&|rows| kernels.attention(rows, context)),
            knots: kernels.knots(),
        }
    }
}
