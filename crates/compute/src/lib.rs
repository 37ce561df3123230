//! The kernels. Two traits named for the paper's split: [`WeightKernels`] is Tier 1's work
//! (everything that touches weights), [`ContextKernels`] is Tier 2's (append and attend). A [`Backend`]
//! makes both for the device it stands for. `portable` is the oracle; every faster path is tested
//! against it.

pub mod bench;
#[cfg(test)]
mod conformance;
mod context_type;
mod cpu;
pub mod cuda;
mod error;
mod families;
mod isa;
mod math;
mod memory;
mod portable;
mod rope;
pub mod sample;
mod source;
mod tables;
mod threads;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use context_type::ContextType;
pub use cpu::{CpuBackend, CpuContext, CpuWeights};
pub use error::{ComputeError, size};
pub use isa::Isa;
pub use source::{ContextSpec, SliceSpec};
pub use threads::{Threads, allowed_cores};

use glinthawk_flight::{Buffer, Generated, Sample};
use glinthawk_model::{Model, ModelConfig};
use std::ops::Range;
use std::time::Duration;

/// What a node computes on: a device, and the activations on it.
///
/// Its kernels may return before their work is done. Kernels run in the order of the calls, and each sees the copies
/// that were asked for before it. A `mark` is a point in that order: once it `is_done`, so is everything that was asked
/// for before it. Only then may a copy on the host be read.
pub trait Backend: Clone + Send {
    /// How many works may be asked for before the first of them is done.
    const WORKS_AHEAD: usize;
    /// A point in the device's work.
    type Mark: Send;
    /// Activations on the device.
    type Buffer: Send;
    /// Tier 1's kernels.
    type Weights: WeightKernels<Buffer = Self::Buffer>;
    /// Tier 2's kernels.
    type Context: ContextKernels<Buffer = Self::Buffer>;

    /// Puts a slice of a model on the device. `progress` is told the bytes done and the total.
    fn weights(
        &self,
        model: &Model,
        spec: &SliceSpec,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self::Weights, ComputeError>;

    /// Positions that a page of contexts may have on the device, the best first.
    fn page_positions(&self) -> &'static [u32];

    /// Makes room on the device for contexts.
    fn context(
        &self,
        config: &ModelConfig,
        spec: &ContextSpec,
    ) -> Result<Self::Context, ComputeError>;

    /// Activations of `len_bytes` bytes with unspecified content.
    fn take(&self, len_bytes: usize) -> Result<Self::Buffer, ComputeError>;

    /// Hands activations back.
    fn give(&self, buffer: Self::Buffer);

    /// Copies activations that arrived with a message to the device.
    fn to_device(&self, buffer: Buffer) -> Result<Self::Buffer, ComputeError>;

    /// Copies activations that leave with a message to the host.
    fn to_host(&self, buffer: Self::Buffer) -> Result<Buffer, ComputeError>;

    /// A point after all that was asked for.
    fn mark(&self) -> Result<Self::Mark, ComputeError>;

    /// Whether everything before a mark is done.
    fn is_done(&self, mark: &Self::Mark) -> Result<bool, ComputeError>;

    /// How long the device's kernels took from one mark, once it came to it, to another that is done.
    fn elapsed(&self, from: &Self::Mark, to: &Self::Mark) -> Result<Duration, ComputeError>;
}

/// A shard's rows on their way into attention.
pub struct ShardOut<'a, B> {
    /// The shard's rows in the residual slab.
    pub slab: Range<usize>,
    /// Position of each row in its prompt.
    pub positions: &'a [u32],
    /// Receives q, k, v side by side, rotary embedding applied: (rows, query_width + 2·kv_width) bf16.
    pub qkv: &'a mut B,
}

/// Rows of a shard on their way back from attention, in one piece.
pub struct ShardIn<'a, B> {
    /// The rows in the residual slab.
    pub slab: Range<usize>,
    /// Attention output of the shard: (rows, query_width) bf16.
    pub attended: &'a B,
    /// Where the first of these rows stands in it.
    pub first: usize,
}

/// Tier 1's work for one slice of layers. The residual slab, (slab_rows, hidden) f32, lives on the
/// device inside the implementation; `layer` counts from the slice's first.
pub trait WeightKernels: Send {
    /// Activations on the device.
    type Buffer;

    /// Writes the tokens' embeddings into the slab.
    fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) -> Result<(), ComputeError>;

    /// Overwrites slab rows with a residual from the previous slice: (rows, hidden) f32.
    fn put_residual(
        &mut self,
        slab: Range<usize>,
        residual: &Self::Buffer,
    ) -> Result<(), ComputeError>;

    /// Reads slab rows for the next slice: (rows, hidden) f32.
    fn get_residual(
        &mut self,
        slab: Range<usize>,
        residual: &mut Self::Buffer,
    ) -> Result<(), ComputeError>;

    /// F1: norm, q/k/v projection (bias, head norms), rotary embedding, for all shards as one batch.
    fn pre_attention(
        &mut self,
        layer: usize,
        shards: &mut [ShardOut<'_, Self::Buffer>],
    ) -> Result<(), ComputeError>;

    /// F3: output projection, residual, norm, feed-forward, residual, for all shards as one batch.
    fn post_attention(
        &mut self,
        layer: usize,
        shards: &[ShardIn<'_, Self::Buffer>],
    ) -> Result<(), ComputeError>;

    /// Post-attention of `layer`, then pre-attention of the next, for the same rows.
    fn middle(
        &mut self,
        layer: usize,
        back: &[ShardIn<'_, Self::Buffer>],
        out: &mut [ShardOut<'_, Self::Buffer>],
    ) -> Result<(), ComputeError> {
        self.post_attention(layer, back)?;
        self.pre_attention(layer + 1, out)
    }

    /// Final norm and classifier of single slab rows, and a token for each as its sample asks.
    fn classify(&mut self, rows: &[usize], samples: &[Sample]) -> Result<(), ComputeError>;

    /// The tokens of the last `classify`, in order, once it is done.
    fn tokens(&mut self) -> Result<Vec<Generated>, ComputeError>;
}

/// One row to attend.
#[derive(Clone, Copy, Debug)]
pub struct AttendRow {
    /// The page table of its context.
    pub slot: u32,
    /// Its position, from 0.
    pub position: u32,
    /// Whether someone asks for its attention. If not, its k and v are stored all the same.
    pub asked: bool,
}

/// Tier 2's work: the pages of keys and values of a slice's layers, and attention over them.
///
/// Every slot has a page table. A page may be in several tables, and is then only read: the rows of a
/// batch that store on a page are all of one slot, and no row of another slot sees the page.
pub trait ContextKernels: Send {
    /// Activations on the device.
    type Buffer;

    /// Enters pages into a slot's table, from its page number `first` on. What followed is forgotten.
    fn bind(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), ComputeError>;

    /// F2: first stores every row's k, v at its position, then attends every row that is asked for to positions
    /// `0..=position` of its slot (or the sliding window's). `qkv` is (rows, query_width +
    /// 2·kv_width) bf16, `attended` is (rows, query_width) bf16. Rows that are not asked for are zero there, or attended too.
    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow],
        qkv: &Self::Buffer,
        attended: &mut Self::Buffer,
    ) -> Result<(), ComputeError>;

    /// Writes to all pages, for benchmarks: an operating system gives memory only when it is written to. A device's is
    /// there from the start.
    fn fill(&mut self) {}
}
