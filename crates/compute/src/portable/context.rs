//! Tier 2's work in plain loops: pages of row-major keys and values, softmax in two passes. For
//! int8 contexts, a key's scale multiplies its score, and a value's scale multiplies its weight.

use super::product::dot;
use crate::context_type::quantise;
use crate::math::exp;
use crate::memory::{Memory, SharedMut};
use crate::tables::BoundRow;
use crate::{ComputeError, ContextSpec, ContextType, Threads};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use half::bf16;
use std::sync::Arc;

/// The pages of a slice's layers.
pub(crate) struct PortableContext {
    config: ModelConfig,
    threads: Arc<Threads>,
    pages: usize,
    page_positions: usize,
    values: Values,
}

/// Keys and values: (layers, pages, keys and values, positions of a page, kv_width).
enum Values {
    Bf16(Memory<bf16>),
    Int8 {
        codes: Memory<i8>,
        /// (layers, pages, keys and values, positions of a page, kv_heads)
        scales: Memory<f32>,
    },
}

impl PortableContext {
    pub(crate) fn new(
        config: &ModelConfig,
        spec: &ContextSpec,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let overflow = ComputeError::Memory { what: "context pages", bytes: usize::MAX };
        let ContextSpec { layers, pages, .. } = *spec;
        let page_positions = spec.page_positions as usize;
        let positions =
            (2 * page_positions).checked_mul(layers).and_then(|len| len.checked_mul(pages));
        let len = positions.and_then(|positions| positions.checked_mul(config.kv_width()));
        let len = len.ok_or(overflow)?;
        let values = match spec.context_type {
            ContextType::Bf16 => Values::Bf16(Memory::zeroed("context pages", len)?),
            ContextType::Int8 => Values::Int8 {
                codes: Memory::zeroed("context pages", len)?,
                scales: Memory::zeroed("context scales", len / config.head_dim)?,
            },
        };
        Ok(Self { config: config.clone(), threads, pages, page_positions, values })
    }

    pub(crate) fn use_threads(&mut self, threads: Arc<Threads>) {
        self.threads = threads;
    }

    pub(crate) fn fill(&mut self, byte: u8) {
        match &mut self.values {
            Values::Bf16(values) => bytemuck::cast_slice_mut(values).fill(byte),
            Values::Int8 { codes, scales } => {
                bytemuck::cast_slice_mut(codes).fill(byte);
                bytemuck::cast_slice_mut(scales).fill(byte);
            }
        }
    }

    /// Index of the keys (0) or values (1) of a position's first head among all heads' keys and
    /// values.
    fn place(&self, layer: usize, page: u32, which: usize, position: usize) -> usize {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        (((layer * self.pages + page as usize) * 2 + which) * self.page_positions
            + position % self.page_positions)
            * self.config.kv_heads
    }

    /// Stores the keys (0) or values (1) of all heads of a position.
    fn store(&mut self, place: usize, from: &[bf16]) {
        let head_dim = self.config.head_dim;
        match &mut self.values {
            Values::Bf16(values) => {
                values[place * head_dim..][..from.len()].copy_from_slice(from);
            }
            Values::Int8 { codes, scales } => {
                for (place, from) in (place..).zip(from.chunks_exact(head_dim)) {
                    scales[place] = quantise(from, &mut codes[place * head_dim..][..head_dim]);
                }
            }
        }
    }

    /// Reads the keys or values of one head into `into`; returns the scale to multiply them by.
    fn load(&self, place: usize, into: &mut [f32]) -> f32 {
        let first = place * self.config.head_dim;
        match &self.values {
            Values::Bf16(values) => {
                let values = &values[first..][..into.len()];
                into.iter_mut().zip(values).for_each(|(into, value)| *into = value.to_f32());
                1.0
            }
            Values::Int8 { codes, scales } => {
                let codes = &codes[first..][..into.len()];
                into.iter_mut().zip(codes).for_each(|(into, &code)| *into = f32::from(code));
                scales[place]
            }
        }
    }

    fn attend_head(
        &self,
        layer: usize,
        row: &BoundRow<'_>,
        query: &[f32],
        head: usize,
        out: &mut [bf16],
    ) {
        let (head_dim, group) = (self.config.head_dim, self.config.heads / self.config.kv_heads);
        let end = row.position as usize + 1;
        let start = end - self.config.sliding_window.unwrap_or(end).min(end);
        let mut part = vec![0.0f32; head_dim];
        let place = |position: usize, which| {
            self.place(layer, row.pages[position / self.page_positions], which, position)
                + head / group
        };
        let mut weights = Vec::with_capacity(end - start);
        for position in start..end {
            let scale = self.load(place(position, 0), &mut part);
            weights.push(dot(query, &part) * scale / (head_dim as f32).sqrt());
        }
        let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp(*weight - max));
        let total: f32 = weights.iter().sum();
        let mut sums = vec![0.0f32; head_dim];
        for (position, weight) in (start..end).zip(&weights) {
            let weight = weight * self.load(place(position, 1), &mut part);
            sums.iter_mut().zip(&part).for_each(|(sum, value)| *sum += weight * value);
        }
        for (out, sum) in out.iter_mut().zip(&sums) {
            *out = bf16::from_f32(sum / total);
        }
    }

    pub(crate) fn attend(
        &mut self,
        layer: usize,
        rows: &[BoundRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        let (query_width, kv_width, head_dim) =
            (self.config.query_width(), self.config.kv_width(), self.config.head_dim);
        let qkv = &qkv.bf16()[..rows.len() * self.config.qkv_width()];
        for (row, values) in rows.iter().zip(qkv.chunks_exact(self.config.qkv_width())) {
            let position = row.position as usize;
            for which in 0..2 {
                let place =
                    self.place(layer, row.pages[position / self.page_positions], which, position);
                let from = &values[query_width + which * kv_width..][..kv_width];
                self.store(place, from);
            }
        }
        let attended = SharedMut::new(&mut attended.bf16_mut()[..rows.len() * query_width]);
        let heads = self.config.heads;
        let this = &*self;
        self.threads.for_each(rows.len() * heads, |task| {
            let (index, head) = (task / heads, task % heads);
            if !rows[index].asked {
                return;
            }
            let query = &qkv[index * this.config.qkv_width() + head * head_dim..][..head_dim];
            let query: Vec<f32> = query.iter().map(|value| value.to_f32()).collect();
            // SAFETY: one part for each row and head.
            let out = unsafe { attended.part(index * query_width + head * head_dim, head_dim) };
            this.attend_head(layer, &rows[index], &query, head, out);
        });
    }
}
