//! The CPU as a backend: one type for each trait, so that callers are not generic over instruction
//! sets. The device's memory is the host's, so nothing is copied, and a kernel that returns is done.

use crate::portable::{PortableContext, PortableWeights};
use crate::sample::sample;
use crate::source::{ContextSpec, SliceSpec, WeightSource, check_shape};
use crate::tables::Tables;
#[cfg(target_arch = "x86_64")]
use crate::x86::{X86Context, X86Weights};
use crate::{
    AttendRow, Backend, ComputeError, ContextKernels, ContextType, Isa, ShardIn, ShardOut, Threads,
    WeightKernels,
};
use glinthawk_flight::{Buffer, Generated, Pool, Sample};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Rows whose logits are held at once, to bound their memory for any batch.
const LOGIT_ROWS_MAX: usize = 64;

/// Some threads of this machine's CPU.
#[derive(Clone)]
pub struct CpuBackend {
    /// The instruction set of all kernels.
    pub isa: Isa,
    /// The threads they run on.
    pub threads: Arc<Threads>,
    /// Where buffers come from.
    pub pool: Arc<Pool>,
}

impl Backend for CpuBackend {
    const WORKS_AHEAD: usize = 1;
    type Mark = Instant;
    type Buffer = Buffer;
    type Weights = CpuWeights;
    type Context = CpuContext;

    fn weights(
        &self,
        model: &Model,
        spec: &SliceSpec,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CpuWeights, ComputeError> {
        CpuWeights::load(model, spec, self.isa, Arc::clone(&self.threads), progress)
    }

    fn page_positions(&self) -> &'static [u32] {
        self.isa.page_positions()
    }

    fn context(
        &self,
        config: &ModelConfig,
        spec: &ContextSpec,
    ) -> Result<CpuContext, ComputeError> {
        CpuContext::new(config, spec, self.isa, Arc::clone(&self.threads))
    }

    fn take(&self, len_bytes: usize) -> Result<Buffer, ComputeError> {
        Ok(self.pool.take(len_bytes))
    }

    fn give(&self, buffer: Buffer) {
        self.pool.give(buffer);
    }

    fn to_device(&self, buffer: Buffer) -> Result<Buffer, ComputeError> {
        Ok(buffer)
    }

    fn to_host(&self, buffer: Buffer) -> Result<Buffer, ComputeError> {
        Ok(buffer)
    }

    fn mark(&self) -> Result<Instant, ComputeError> {
        Ok(Instant::now())
    }

    fn is_done(&self, _mark: &Instant) -> Result<bool, ComputeError> {
        Ok(true)
    }

    fn elapsed(&self, from: &Instant, to: &Instant) -> Result<Duration, ComputeError> {
        Ok(to.saturating_duration_since(*from))
    }
}

/// Tier 1's work on a CPU.
pub struct CpuWeights {
    kernels: Weights,
    threads: Arc<Threads>,
    vocab: usize,
    logits: Vec<f32>,
    /// Of the last `classify`.
    tokens: Vec<Generated>,
}

enum Weights {
    Portable(PortableWeights),
    #[cfg(target_arch = "x86_64")]
    X86(X86Weights),
}

/// Tier 2's work on a CPU.
pub struct CpuContext {
    kernels: Context,
    tables: Tables,
    query_width: usize,
}

enum Context {
    Portable(PortableContext),
    #[cfg(target_arch = "x86_64")]
    X86(X86Context),
}

macro_rules! each {
    ($backend:expr, $kind:ident, $inner:ident => $call:expr) => {
        match $backend {
            $kind::Portable($inner) => $call,
            #[cfg(target_arch = "x86_64")]
            $kind::X86($inner) => $call,
        }
    };
}

impl CpuWeights {
    pub(crate) fn load(
        source: &dyn WeightSource,
        spec: &SliceSpec,
        isa: Isa,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        isa.require()?;
        check_shape(source.config())?;
        let mut progress = spec.progress(source.config(), progress);
        let own = Arc::clone(&threads);
        let kernels = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                Weights::X86(X86Weights::load(source, spec, isa, own, &mut progress)?)
            }
            _ => Weights::Portable(PortableWeights::load(source, spec, own, &mut progress)?),
        };
        Ok(Self::over(kernels, threads, source.config().vocab))
    }

    fn over(kernels: Weights, threads: Arc<Threads>, vocab: usize) -> Self {
        Self { kernels, threads, vocab, logits: Vec::new(), tokens: Vec::new() }
    }

    /// The same weights for another thread of execution, with threads and a slab of its own.
    pub fn beside(&self, threads: Arc<Threads>, slab_rows: usize) -> Result<Self, ComputeError> {
        let own = Arc::clone(&threads);
        let kernels = match &self.kernels {
            Weights::Portable(inner) => Weights::Portable(inner.beside(own, slab_rows)?),
            #[cfg(target_arch = "x86_64")]
            Weights::X86(inner) => Weights::X86(inner.beside(own, slab_rows)?),
        };
        Ok(Self::over(kernels, threads, self.vocab))
    }

    /// Logits of slab rows: (rows, vocab).
    pub fn logits(&mut self, rows: &[usize], logits: &mut [f32]) {
        each!(&mut self.kernels, Weights, inner => inner.classify(rows, logits));
    }

    /// The likeliest token of each slab row, the lowest id among equals.
    pub fn likeliest(&mut self, rows: &[usize]) -> Vec<u32> {
        let mut tokens = vec![0; rows.len()];
        each!(&mut self.kernels, Weights, inner => inner.classify_greedy(rows, &mut tokens));
        tokens
    }

    /// Draws a token for each slab row from all its logits.
    fn draw(&mut self, rows: &[usize], samples: &[&Sample]) -> Vec<Generated> {
        let mut logits = std::mem::take(&mut self.logits);
        logits.resize(rows.len() * self.vocab, 0.0);
        self.logits(rows, &mut logits);
        let drawn: Vec<_> =
            logits.chunks_exact_mut(self.vocab).map(|logits| Mutex::new((logits, None))).collect();
        self.threads.for_each(rows.len(), |index| {
            let mut slot = drawn[index].lock().expect("no panic while sampling");
            slot.1 = Some(sample(slot.0, samples[index]));
        });
        let token = |slot: Mutex<(_, Option<Generated>)>| {
            slot.into_inner().expect("no panic while sampling").1.expect("every row was sampled")
        };
        let tokens = drawn.into_iter().map(token).collect();
        self.logits = logits;
        tokens
    }
}

/// Whether only the likeliest token is asked for.
fn is_plain_greedy(sample: &Sample) -> bool {
    sample.sampling.temperature == 0.0
        && sample.sampling.repetition_penalty == 1.0
        && sample.biases.is_empty()
        && sample.sampling.logprobs.is_none()
}

/// A byte that makes ordinary numbers when repeated as bf16, int8 or f32.
const FILL: u8 = 0x3e;

impl CpuContext {
    /// Room for the pages of every layer. Untouched pages cost no resident memory.
    pub(crate) fn new(
        config: &ModelConfig,
        spec: &ContextSpec,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        isa.require()?;
        check_shape(config)?;
        spec.check_pages(isa.page_positions(), isa.name())?;
        let kernels = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                Context::X86(X86Context::new(config, spec, isa, threads)?)
            }
            _ => Context::Portable(PortableContext::new(config, spec, threads)?),
        };
        let parts = match &kernels {
            Context::Portable(_) => 1,
            #[cfg(target_arch = "x86_64")]
            Context::X86(_) => X86Context::page_parts(spec.page_positions),
        };
        let tables = Tables::new(spec.page_positions, parts);
        Ok(Self { kernels, tables, query_width: config.query_width() })
    }

    /// Attends on these threads from now on.
    pub fn use_threads(&mut self, threads: Arc<Threads>) -> Result<(), ComputeError> {
        match &mut self.kernels {
            Context::Portable(inner) => inner.use_threads(threads),
            #[cfg(target_arch = "x86_64")]
            Context::X86(inner) => inner.use_threads(threads)?,
        }
        Ok(())
    }

    /// Bytes of `positions` positions in all of the slice's layers.
    pub fn bytes(
        config: &ModelConfig,
        layers: usize,
        context_type: ContextType,
        positions: u32,
    ) -> usize {
        context_type.head_bytes(config.head_dim, positions as usize) * config.kv_heads * layers
    }
}

impl WeightKernels for CpuWeights {
    type Buffer = Buffer;

    fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) -> Result<(), ComputeError> {
        each!(&mut self.kernels, Weights, inner => inner.embed(slab, tokens));
        Ok(())
    }

    fn put_residual(&mut self, slab: Range<usize>, residual: &Buffer) -> Result<(), ComputeError> {
        each!(&mut self.kernels, Weights, inner => inner.put_residual(slab, residual.f32()));
        Ok(())
    }

    fn get_residual(
        &mut self,
        slab: Range<usize>,
        residual: &mut Buffer,
    ) -> Result<(), ComputeError> {
        each!(&mut self.kernels, Weights, inner => inner.get_residual(slab, residual.f32_mut()));
        Ok(())
    }

    fn pre_attention(
        &mut self,
        layer: usize,
        shards: &mut [ShardOut<'_, Buffer>],
    ) -> Result<(), ComputeError> {
        each!(&mut self.kernels, Weights, inner => inner.pre_attention(layer, shards));
        Ok(())
    }

    fn post_attention(
        &mut self,
        layer: usize,
        shards: &[ShardIn<'_, Buffer>],
    ) -> Result<(), ComputeError> {
        each!(&mut self.kernels, Weights, inner => inner.post_attention(layer, shards));
        Ok(())
    }

    fn middle(
        &mut self,
        layer: usize,
        back: &[ShardIn<'_, Buffer>],
        out: &mut [ShardOut<'_, Buffer>],
    ) -> Result<(), ComputeError> {
        match &mut self.kernels {
            Weights::Portable(inner) => {
                inner.post_attention(layer, back);
                inner.pre_attention(layer + 1, out);
            }
            #[cfg(target_arch = "x86_64")]
            Weights::X86(inner) => inner.middle(layer, back, out),
        }
        Ok(())
    }

    fn classify(&mut self, rows: &[usize], samples: &[Sample]) -> Result<(), ComputeError> {
        assert_eq!(rows.len(), samples.len(), "one sample per row");
        let (greedy, drawn): (Vec<usize>, Vec<usize>) =
            (0..rows.len()).partition(|&index| is_plain_greedy(&samples[index]));
        let slab_rows =
            |picks: &[usize]| -> Vec<usize> { picks.iter().map(|&index| rows[index]).collect() };
        let likeliest = self.likeliest(&slab_rows(&greedy)).into_iter();
        let likeliest =
            likeliest.map(|token| Generated { token, logprob: 0.0, alternatives: Vec::new() });
        let mut tokens: Vec<(usize, Generated)> = greedy.into_iter().zip(likeliest).collect();
        for picks in drawn.chunks(LOGIT_ROWS_MAX) {
            let samples: Vec<&Sample> = picks.iter().map(|&index| &samples[index]).collect();
            tokens.extend(picks.iter().copied().zip(self.draw(&slab_rows(picks), &samples)));
        }
        tokens.sort_unstable_by_key(|(index, _)| *index);
        self.tokens = tokens.into_iter().map(|(_, token)| token).collect();
        Ok(())
    }

    fn tokens(&mut self) -> Result<Vec<Generated>, ComputeError> {
        Ok(std::mem::take(&mut self.tokens))
    }
}

impl ContextKernels for CpuContext {
    type Buffer = Buffer;

    fn bind(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), ComputeError> {
        self.tables.bind(slot, first, pages)
    }

    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) -> Result<(), ComputeError> {
        let bound = self.tables.rows(rows);
        each!(&mut self.kernels, Context, inner => inner.attend(layer, &bound, qkv, attended));
        let width = self.query_width;
        // Nothing of what the buffer was used for before may go further: not even a row that nobody looks at may hold NaN.
        for (row, values) in rows.iter().zip(attended.bf16_mut().chunks_exact_mut(width)) {
            if !row.asked {
                values.fill(bf16::ZERO);
            }
        }
        Ok(())
    }

    fn fill(&mut self) {
        each!(&mut self.kernels, Context, inner => inner.fill(FILL));
    }
}
