//! One layer's attention of a prompt's rows, chunk by chunk. Keys, values and queries are arbitrary numbers, because
//! a core multiplies equal numbers at a higher clock.

use super::{CPU, KernelTiming, one_layer};
use crate::{AttendRow, ComputeError, ContextKernels, ContextType, CpuContext, Isa, Threads};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use half::bf16;
use std::sync::Arc;
use std::time::Instant;

/// Rows stored at a time while the context is filled.
const FILL_ROWS: usize = 1024;

/// One prompt's context in one layer, for the time of its prefill.
pub struct PrefillBench {
    config: ModelConfig,
    context: CpuContext,
    /// (rows, qkv_width)
    qkv: Buffer,
    attended: Buffer,
}

impl PrefillBench {
    /// Fills a context of `positions` positions, for chunks of up to `rows_max` rows.
    pub fn new(
        config: &ModelConfig,
        positions: usize,
        rows_max: usize,
        context_type: ContextType,
        isa: Isa,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let pages = positions.div_ceil(isa.page_positions()[0] as usize);
        let mut context = one_layer(config, pages, context_type, isa, threads)?;
        // Scattered, as they are after contexts have grown side by side: 7 and the number of pages have no common
        // divisor.
        let stride = if pages.is_multiple_of(7) { 1 } else { 7 };
        let order: Vec<u32> = (0..pages).map(|page| (page * stride % pages) as u32).collect();
        context.bind(0, 0, &order).expect(CPU);
        let rows_max = rows_max.max(FILL_ROWS);
        let buffer = |width: usize| Buffer::zeroed(rows_max * width * size_of::<bf16>());
        let (mut qkv, attended) = (buffer(config.qkv_width()), buffer(config.query_width()));
        let mut state = 1_u32;
        for value in qkv.bf16_mut() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *value = bf16::from_f32(state as i32 as f32 / 2_f32.powi(30));
        }
        let mut bench = Self { config: config.clone(), context, qkv, attended };
        for start in (0..positions).step_by(FILL_ROWS) {
            bench.attend(start, (start + FILL_ROWS).min(positions));
        }
        Ok(bench)
    }

    fn attend(&mut self, start: usize, end: usize) {
        let row = |position| AttendRow { slot: 0, position, asked: true };
        let rows: Vec<AttendRow> = (start as u32..end as u32).map(row).collect();
        self.context.attend(0, &rows, &self.qkv, &mut self.attended).expect(CPU);
    }

    /// The last `rows` rows of a prompt of `positions` tokens. They are written just before, as the product that makes them
    /// does, so that they are in a cache; whatever was measured in between may have pushed them out.
    pub fn chunk(&mut self, rows: usize, positions: usize) -> KernelTiming {
        for value in &mut self.qkv.bf16_mut()[..rows * self.config.qkv_width()] {
            *value = -*value;
        }
        let started = Instant::now();
        self.attend(positions - rows, positions);
        let seconds = started.elapsed().as_secs_f64();
        let seen: usize = (positions - rows..positions).map(|position| position + 1).sum();
        KernelTiming {
            seconds,
            operations: (4 * seen * self.config.query_width()) as f64,
            bytes: (2 * positions * self.config.kv_width() * size_of::<bf16>()) as f64,
        }
    }
}
