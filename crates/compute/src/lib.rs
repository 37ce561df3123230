//! The kernels. Two traits named for the paper's split: [`WeightKernels`] is Tier 1's work
//! (everything that touches weights), [`ContextKernels`] is Tier 2's (append and attend).
//! `portable` is the oracle; every faster backend is tested against it.

pub mod bench;
#[cfg(test)]
mod conformance;
mod context_type;
mod cpu;
pub mod cuda;
mod error;
mod isa;
mod math;
mod memory;
mod portable;
mod rope;
pub mod sample;
mod source;
mod threads;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use context_type::ContextType;
pub use cpu::{CpuContext, CpuWeights};
pub use error::{ComputeError, size};
pub use isa::Isa;
pub use source::SliceSpec;
pub use threads::{Threads, allowed_cores};

use std::ops::Range;

/// A shard's rows on their way into attention.
pub struct ShardOut<'a, B> {
    /// The shard's rows in the residual slab.
    pub slab: Range<usize>,
    /// Position of each row in its prompt.
    pub positions: &'a [u32],
    /// Receives q, k, v side by side, rotary embedding applied: (rows, query_width + 2·kv_width) bf16.
    pub qkv: &'a mut B,
}

/// A shard's rows on their way back from attention.
pub struct ShardIn<'a, B> {
    /// The shard's rows in the residual slab.
    pub slab: Range<usize>,
    /// Attention output: (rows, query_width) bf16.
    pub attended: &'a B,
}

/// Tier 1's work for one slice of layers. The residual slab, (slab_rows, hidden) f32, lives on the
/// device inside the implementation; `layer` counts from the slice's first.
pub trait WeightKernels: Send {
    /// Activations on the device.
    type Buffer: Send;

    /// Writes the tokens' embeddings into the slab.
    fn embed(&mut self, slab: Range<usize>, tokens: &[u32]);

    /// Overwrites slab rows with a residual from the previous slice: (rows, hidden).
    fn put_residual(&mut self, slab: Range<usize>, residual: &[f32]);

    /// Reads slab rows for the next slice: (rows, hidden).
    fn get_residual(&mut self, slab: Range<usize>, residual: &mut [f32]);

    /// F1: norm, q/k/v projection (bias, head norms), rotary embedding, for all shards as one batch.
    fn pre_attention(&mut self, layer: usize, shards: &mut [ShardOut<'_, Self::Buffer>]);

    /// F3: output projection, residual, norm, feed-forward, residual, for all shards as one batch.
    fn post_attention(&mut self, layer: usize, shards: &[ShardIn<'_, Self::Buffer>]);

    /// Final norm and classifier of single slab rows; logits are (rows, vocab).
    fn classify(&mut self, rows: &[usize], logits: &mut [f32]);

    /// As `classify`, but gives only each row's likeliest token, the lowest id among equals.
    fn classify_greedy(&mut self, rows: &[usize], tokens: &mut [u32]);
}

/// One row to attend: its position and the pages of positions `0..=position`, in order.
#[derive(Clone, Copy)]
pub struct AttendRow<'a> {
    /// Position of the row in its prompt.
    pub position: u32,
    /// Page of every 16 positions, up to and including the row's own.
    pub pages: &'a [u32],
}

/// Tier 2's work: the pages of keys and values of a slice's layers, and attention over them.
pub trait ContextKernels: Send {
    /// Activations on the device.
    type Buffer: Send;

    /// F2: first stores every row's k, v at its position, then attends every row to positions
    /// `0..=position` (or the sliding window's). `qkv` is (rows, query_width + 2·kv_width) bf16,
    /// `attended` is (rows, query_width) bf16.
    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow<'_>],
        qkv: &Self::Buffer,
        attended: &mut Self::Buffer,
    );
}
