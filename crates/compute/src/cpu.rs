//! The CPU backends behind one type for each trait, so that callers are not generic over
//! instruction sets.

use crate::portable::{PortableContext, PortableWeights};
use crate::source::{SliceSpec, WeightSource, check_shape};
#[cfg(target_arch = "x86_64")]
use crate::x86::{X86Context, X86Weights};
use crate::{
    AttendRow, ComputeError, ContextKernels, ContextType, Isa, ShardIn, ShardOut, Threads,
    WeightKernels,
};
use glinthawk_flight::Buffer;
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;
use std::sync::Arc;

/// Tier 1's work on a CPU.
pub struct CpuWeights(Weights);

enum Weights {
    Portable(PortableWeights),
    #[cfg(target_arch = "x86_64")]
    X86(X86Weights),
}

/// Tier 2's work on a CPU.
pub struct CpuContext(Context);

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
    /// Reads a slice of a model, packed for `isa`. `progress` is told the bytes done and the total.
    pub fn load(
        model: &Model,
        spec: SliceSpec,
        isa: Isa,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        Self::load_from(model, &spec, isa, threads, progress)
    }

    pub(crate) fn load_from(
        source: &dyn WeightSource,
        spec: &SliceSpec,
        isa: Isa,
        threads: Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        isa.require()?;
        check_shape(source.config())?;
        let total = slice_bytes(source.config(), spec);
        let mut done = 0;
        let mut progress = |bytes| {
            done += bytes;
            progress(done, total);
        };
        #[cfg(target_arch = "x86_64")]
        if isa != Isa::Portable {
            return Ok(Self(Weights::X86(X86Weights::load(
                source,
                spec,
                isa,
                threads,
                &mut progress,
            )?)));
        }
        Ok(Self(Weights::Portable(PortableWeights::load(source, spec, threads, &mut progress)?)))
    }

    /// The same weights for another thread of execution, with threads and a slab of its own.
    pub fn beside(&self, threads: Arc<Threads>, slab_rows: usize) -> Result<Self, ComputeError> {
        Ok(Self(match &self.0 {
            Weights::Portable(inner) => Weights::Portable(inner.beside(threads, slab_rows)?),
            #[cfg(target_arch = "x86_64")]
            Weights::X86(inner) => Weights::X86(inner.beside(threads, slab_rows)?),
        }))
    }
}

/// A byte that makes ordinary numbers when repeated as bf16, int8 or f32.
const FILL: u8 = 0x3e;

/// Bytes of matrices that a slice reads.
fn slice_bytes(config: &ModelConfig, spec: &SliceSpec) -> u64 {
    let layer = config.layer_parameters();
    let table = config.hidden * config.vocab;
    let tables = match (spec.embeds, spec.classifies) {
        (true, true) if config.tied_embeddings => 1,
        (embeds, classifies) => usize::from(embeds) + usize::from(classifies),
    };
    ((layer * spec.layers.len() + table * tables) * size_of::<bf16>()) as u64
}

impl CpuContext {
    /// Room for `pages` pages of every layer. Untouched pages cost no resident memory.
    pub fn new(
        config: &ModelConfig,
        layers: usize,
        pages: usize,
        context_type: ContextType,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        isa.require()?;
        check_shape(config)?;
        #[cfg(target_arch = "x86_64")]
        if isa != Isa::Portable {
            let context = X86Context::new(config, layers, pages, context_type, isa, threads)?;
            return Ok(Self(Context::X86(context)));
        }
        let context = PortableContext::new(config, layers, pages, context_type, threads)?;
        Ok(Self(Context::Portable(context)))
    }

    /// Fills all pages: for benchmarks, which must read memory that is there.
    pub(crate) fn fill(&mut self) {
        each!(&mut self.0, Context, inner => inner.fill(FILL));
    }

    /// Bytes of one page in all of the slice's layers.
    pub fn page_bytes(config: &ModelConfig, layers: usize, context_type: ContextType) -> usize {
        context_type.head_bytes(config.head_dim) * config.kv_heads * layers
    }
}

impl WeightKernels for CpuWeights {
    type Buffer = Buffer;

    fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) {
        each!(&mut self.0, Weights, inner => inner.embed(slab, tokens));
    }

    fn put_residual(&mut self, slab: Range<usize>, residual: &[f32]) {
        each!(&mut self.0, Weights, inner => inner.put_residual(slab, residual));
    }

    fn get_residual(&mut self, slab: Range<usize>, residual: &mut [f32]) {
        each!(&mut self.0, Weights, inner => inner.get_residual(slab, residual));
    }

    fn pre_attention(&mut self, layer: usize, shards: &mut [ShardOut<'_, Buffer>]) {
        each!(&mut self.0, Weights, inner => inner.pre_attention(layer, shards));
    }

    fn post_attention(&mut self, layer: usize, shards: &[ShardIn<'_, Buffer>]) {
        each!(&mut self.0, Weights, inner => inner.post_attention(layer, shards));
    }

    fn classify(&mut self, rows: &[usize], logits: &mut [f32]) {
        each!(&mut self.0, Weights, inner => inner.classify(rows, logits));
    }

    fn classify_greedy(&mut self, rows: &[usize], tokens: &mut [u32]) {
        each!(&mut self.0, Weights, inner => inner.classify_greedy(rows, tokens));
    }
}

impl ContextKernels for CpuContext {
    type Buffer = Buffer;

    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        each!(&mut self.0, Context, inner => inner.attend(layer, rows, qkv, attended));
    }
}
