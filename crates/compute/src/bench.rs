//! Measures the machine's ceilings and the kernels below them, for `glinthawk bench kernels`.
//! Nothing here judges: it returns times, and what they were spent on.

mod prefill;
mod stages;

pub use prefill::PrefillBench;
pub use stages::{AttentionBench, StageBench, TimedStage, copy_to_device, copy_to_host};

use crate::memory::Memory;
use crate::{
    AttendRow, Backend, ComputeError, ContextKernels, ContextSpec, ContextType, CpuContext,
    CpuWeights, Isa, ShardIn, ShardOut, SliceSpec, Threads, WeightKernels,
};
use glinthawk_flight::Buffer;
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Memory read for the bandwidth: more than any last-level cache hides.
const READ_BYTES: usize = 1 << 30;

const CPU: &str = "a CPU's kernels do not fail";

/// Seconds of some work, until the device has done all of it.
pub fn timed<B: Backend, T>(
    backend: &B,
    work: impl FnOnce() -> Result<T, ComputeError>,
) -> Result<(f64, T), ComputeError> {
    let started = Instant::now();
    let done = work()?;
    let end = backend.mark()?;
    while !backend.is_done(&end)? {
        std::hint::spin_loop();
    }
    Ok((started.elapsed().as_secs_f64(), done))
}

/// What one pass of a kernel took and did.
#[derive(Clone, Copy, Debug)]
pub struct KernelTiming {
    /// Wall time.
    pub seconds: f64,
    /// Multiplications and additions; a multiply-add counts as two.
    pub operations: f64,
    /// Bytes of weights or context that had to be read.
    pub bytes: f64,
}

/// The machine's ceilings, with all threads of a pool.
pub struct Ceilings {
    isa: Isa,
    threads: Arc<Threads>,
    memory: Memory<u64>,
}

impl Ceilings {
    /// Allocates the memory to read.
    pub fn new(isa: Isa, threads: Arc<Threads>) -> Result<Self, ComputeError> {
        isa.require()?;
        let mut memory = Memory::zeroed("the read benchmark", READ_BYTES / size_of::<u64>())?;
        // Untouched memory would all be the same page of zeros.
        memory.fill(1);
        Ok(Self { isa, threads, memory })
    }

    /// Operations per second from registers alone.
    pub fn operations_per_second(&self) -> f64 {
        operations_per_second(self.isa, &self.threads)
    }

    /// Bytes per second read in order, every thread its own part.
    pub fn bytes_per_second(&self) -> f64 {
        let started = Instant::now();
        self.threads.run(|thread, count| {
            let share = self.memory.len() / count;
            black_box(read(self.isa, &self.memory[thread * share..][..share]));
        });
        READ_BYTES as f64 / started.elapsed().as_secs_f64()
    }
}

/// Operations per second from registers alone, on all threads. The machine must have the instruction set.
pub fn operations_per_second(isa: Isa, threads: &Threads) -> f64 {
    const ROUNDS: usize = 20_000;
    let started = Instant::now();
    threads.run(|_, _| peak(isa, ROUNDS));
    (operations_per_round(isa) * ROUNDS * threads.count()) as f64 / started.elapsed().as_secs_f64()
}

fn operations_per_round(isa: Isa) -> usize {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable {
        return crate::x86::peak_operations(isa);
    }
    assert_eq!(isa, Isa::Portable);
    2 * PORTABLE_SUMS
}

const PORTABLE_SUMS: usize = 64;

fn peak(isa: Isa, rounds: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable {
        // SAFETY: the constructor made sure that the machine has the instruction set.
        return unsafe { crate::x86::peak(isa, rounds) };
    }
    assert_eq!(isa, Isa::Portable);
    let mut sums = [1.0f32; PORTABLE_SUMS];
    let factors = black_box([0.5f32; PORTABLE_SUMS]);
    for _ in 0..rounds {
        for (sum, factor) in sums.iter_mut().zip(factors) {
            *sum = *sum * factor + factor;
        }
    }
    black_box(sums);
}

fn read(isa: Isa, values: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable {
        // SAFETY: the constructor made sure that the machine has the instruction set.
        return unsafe { crate::x86::read(isa, values) };
    }
    assert_eq!(isa, Isa::Portable);
    values.iter().fold(0, |sum, &value| sum ^ value)
}

/// Some layers of a model, for the time of Tier 1's kernels.
pub struct WeightBench {
    config: ModelConfig,
    layers: usize,
    weights: CpuWeights,
    qkv: Buffer,
    attended: Buffer,
    positions: Vec<u32>,
}

impl WeightBench {
    /// Loads layers of a model, and its classifier if asked for.
    pub fn new(
        model: &Model,
        layers: Range<usize>,
        classifies: bool,
        rows_max: usize,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let config = model.config().clone();
        let count = layers.len();
        let whole = SliceSpec::whole(model.config(), rows_max);
        let spec = SliceSpec { layers, embeds: false, classifies, ..whole };
        let mut weights = CpuWeights::load(model, &spec, isa, threads, &mut |_, _| {})?;
        weights.put_residual(0..rows_max, &residual(rows_max, config.hidden))?;
        let buffer = |width: usize| Buffer::zeroed(rows_max * width * size_of::<bf16>());
        let (qkv, attended) = (buffer(config.qkv_width()), buffer(config.query_width()));
        Ok(Self {
            layers: count,
            weights,
            qkv,
            attended,
            positions: (0..rows_max as u32).collect(),
            config,
        })
    }

    /// All layers once, everything but attention, for a batch of `rows` rows.
    pub fn layers(&mut self, rows: usize) -> KernelTiming {
        let started = Instant::now();
        for layer in 0..self.layers {
            let positions = &self.positions[..rows];
            self.weights
                .pre_attention(
                    layer,
                    &mut [ShardOut { slab: 0..rows, positions, qkv: &mut self.qkv }],
                )
                .expect(CPU);
            self.weights
                .post_attention(
                    layer,
                    &[ShardIn { slab: 0..rows, attended: &self.attended, first: 0 }],
                )
                .expect(CPU);
        }
        Self::timing(started, self.config.layer_parameters() * self.layers, rows)
    }

    /// The classifier and the likeliest token of `rows` rows.
    pub fn classify(&mut self, rows: usize) -> KernelTiming {
        let slab_rows: Vec<usize> = (0..rows).collect();
        let started = Instant::now();
        self.weights.likeliest(&slab_rows);
        Self::timing(started, self.config.hidden * self.config.vocab, rows)
    }

    fn timing(started: Instant, parameters: usize, rows: usize) -> KernelTiming {
        KernelTiming {
            seconds: started.elapsed().as_secs_f64(),
            operations: (2 * parameters * rows) as f64,
            bytes: (parameters * size_of::<bf16>()) as f64,
        }
    }
}

/// Ordinary numbers for the residual slab: (rows, hidden).
fn residual(rows: usize, hidden: usize) -> Buffer {
    let mut residual = Buffer::zeroed(rows * hidden * size_of::<f32>());
    for (index, value) in residual.f32_mut().iter_mut().enumerate() {
        *value = (index % 13) as f32 - 6.0;
    }
    residual
}

/// A context of one layer, with so many pages of the size that the kernels like best.
fn one_layer(
    config: &ModelConfig,
    pages: usize,
    context_type: ContextType,
    isa: Isa,
    threads: Arc<Threads>,
) -> Result<CpuContext, ComputeError> {
    let spec = ContextSpec {
        layers: 1,
        pages,
        page_positions: isa.page_positions()[0],
        context_type,
        slots: 0,
        context_max: 0,
        batch_rows: 0,
    };
    CpuContext::new(config, &spec, isa, threads)
}

/// One layer's context, for the time of attention.
pub struct ContextBench {
    config: ModelConfig,
    context_type: ContextType,
    context: CpuContext,
    pages: usize,
    page_positions: u32,
}

impl ContextBench {
    /// Fills as many of one layer's pages as would fit in `bytes` bytes of bf16, so that the rows
    /// are the same for every context type.
    pub fn new(
        config: &ModelConfig,
        bytes: usize,
        context_type: ContextType,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let page_positions = isa.page_positions()[0];
        let page_bytes = CpuContext::bytes(config, 1, ContextType::Bf16, page_positions);
        let pages = (bytes / page_bytes).max(1);
        let mut context = one_layer(config, pages, context_type, isa, threads)?;
        context.fill();
        Ok(Self { config: config.clone(), context_type, context, pages, page_positions })
    }

    /// One decode row for each context of `positions` positions that fits, `rows_max` at most.
    /// Their pages are scattered, as they are after contexts have grown side by side.
    pub fn decode(&mut self, positions: usize, rows_max: usize) -> KernelTiming {
        let pages_each = positions.div_ceil(self.page_positions as usize);
        let rows = (self.pages / pages_each).min(rows_max);
        for row in 0..rows {
            let pages: Vec<u32> = (0..pages_each).map(|page| (page * rows + row) as u32).collect();
            self.context.bind(row as u32, 0, &pages).expect(CPU);
        }
        let position = positions as u32 - 1;
        let batch: Vec<AttendRow> =
            (0..rows as u32).map(|slot| AttendRow { slot, position, asked: true }).collect();
        let qkv = Buffer::zeroed(rows * self.config.qkv_width() * size_of::<bf16>());
        let mut attended = Buffer::zeroed(rows * self.config.query_width() * size_of::<bf16>());
        let position_bytes = CpuContext::bytes(&self.config, 1, self.context_type, 1);
        let started = Instant::now();
        self.context.attend(0, &batch, &qkv, &mut attended).expect(CPU);
        KernelTiming {
            seconds: started.elapsed().as_secs_f64(),
            operations: (4 * rows * positions * self.config.query_width()) as f64,
            bytes: (rows * positions * position_bytes) as f64,
        }
    }
}
