//! Tier 2's work in plain loops: pages of row-major keys and values, softmax in two passes.

use super::product::dot;
use crate::math::exp;
use crate::memory::{Memory, SharedMut};
use crate::{AttendRow, ComputeError, ContextKernels, Threads};
use glinthawk_flight::{Buffer, PAGE_POSITIONS};
use glinthawk_model::ModelConfig;
use half::bf16;
use std::sync::Arc;

const PAGE: usize = PAGE_POSITIONS as usize;

/// The pages of a slice's layers.
pub(crate) struct PortableContext {
    config: ModelConfig,
    threads: Arc<Threads>,
    pages: usize,
    /// (layers, pages, keys and values, 16 positions, kv_width)
    values: Memory<bf16>,
}

impl PortableContext {
    pub(crate) fn new(
        config: &ModelConfig,
        layers: usize,
        pages: usize,
        threads: Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        let overflow = ComputeError::Memory { what: "context pages", bytes: usize::MAX };
        let len = (2 * PAGE * config.kv_width())
            .checked_mul(layers)
            .and_then(|len| len.checked_mul(pages));
        let values = Memory::zeroed("context pages", len.ok_or(overflow)?)?;
        Ok(Self { config: config.clone(), threads, pages, values })
    }

    pub(crate) fn fill(&mut self, value: bf16) {
        self.values.fill(value);
    }

    /// Where a position's keys (0) or values (1) stand.
    fn place(&self, layer: usize, page: u32, which: usize, position: usize) -> usize {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        (((layer * self.pages + page as usize) * 2 + which) * PAGE + position % PAGE)
            * self.config.kv_width()
    }

    fn attend_head(
        &self,
        layer: usize,
        row: &AttendRow<'_>,
        query: &[f32],
        head: usize,
        out: &mut [bf16],
    ) {
        let (head_dim, group) = (self.config.head_dim, self.config.heads / self.config.kv_heads);
        let end = row.position as usize + 1;
        let start = end - self.config.sliding_window.unwrap_or(end).min(end);
        let column = head / group * head_dim;
        let part = |position: usize, which| {
            let place = self.place(layer, row.pages[position / PAGE], which, position) + column;
            let values = &self.values[place..][..head_dim];
            values.iter().map(|value| value.to_f32())
        };
        let mut key = vec![0.0f32; head_dim];
        let mut weights = Vec::with_capacity(end - start);
        for position in start..end {
            key.iter_mut().zip(part(position, 0)).for_each(|(key, value)| *key = value);
            weights.push(dot(query, &key) / (head_dim as f32).sqrt());
        }
        let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp(*weight - max));
        let total: f32 = weights.iter().sum();
        let mut sums = vec![0.0f32; head_dim];
        for (position, weight) in (start..end).zip(&weights) {
            sums.iter_mut().zip(part(position, 1)).for_each(|(sum, value)| *sum += weight * value);
        }
        for (out, sum) in out.iter_mut().zip(&sums) {
            *out = bf16::from_f32(sum / total);
        }
    }
}

impl ContextKernels for PortableContext {
    type Buffer = Buffer;

    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow<'_>],
        qkv: &Buffer,
        attended: &mut Buffer,
    ) {
        let (query_width, kv_width, head_dim) =
            (self.config.query_width(), self.config.kv_width(), self.config.head_dim);
        let qkv = &qkv.bf16()[..rows.len() * self.config.qkv_width()];
        for (row, values) in rows.iter().zip(qkv.chunks_exact(self.config.qkv_width())) {
            let position = row.position as usize;
            for which in 0..2 {
                let place = self.place(layer, row.pages[position / PAGE], which, position);
                let from = &values[query_width + which * kv_width..][..kv_width];
                self.values[place..][..kv_width].copy_from_slice(from);
            }
        }
        let attended = SharedMut::new(&mut attended.bf16_mut()[..rows.len() * query_width]);
        let heads = self.config.heads;
        let this = &*self;
        self.threads.for_each(rows.len() * heads, |task| {
            let (index, head) = (task / heads, task % heads);
            let query = &qkv[index * this.config.qkv_width() + head * head_dim..][..head_dim];
            let query: Vec<f32> = query.iter().map(|value| value.to_f32()).collect();
            // SAFETY: one part for each row and head.
            let out = unsafe { attended.part(index * query_width + head * head_dim, head_dim) };
            this.attend_head(layer, &rows[index], &query, head, out);
        });
    }
}
