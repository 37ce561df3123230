//! Payload buffers: 64-byte aligned, recycled through a bounded pool, viewed as bytes, bf16 or f32.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use std::sync::Mutex;

const LINE_BYTES: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// An aligned block of bytes; the payload of a shard or a hop.
#[derive(Clone, Default)]
pub struct Buffer {
    lines: Vec<Line>,
    len_bytes: usize,
}

impl Buffer {
    /// A zeroed buffer of `len_bytes` bytes.
    pub fn zeroed(len_bytes: usize) -> Self {
        Self { lines: vec![Line::zeroed(); len_bytes.div_ceil(LINE_BYTES)], len_bytes }
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The content as bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len_bytes]
    }

    /// The content as mutable bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len_bytes]
    }

    /// The content as bf16 values.
    pub fn bf16(&self) -> &[bf16] {
        bytemuck::cast_slice(self.bytes())
    }

    /// The content as mutable bf16 values.
    pub fn bf16_mut(&mut self) -> &mut [bf16] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// The content as f32 values.
    pub fn f32(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes())
    }

    /// The content as mutable f32 values.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

/// A bounded store of used buffers, so that the steady state allocates nothing.
pub struct Pool {
    free: Mutex<Vec<Buffer>>,
    buffers_max: usize,
}

impl Pool {
    /// A pool that keeps at most `buffers_max` idle buffers.
    pub fn new(buffers_max: usize) -> Self {
        Self { free: Mutex::new(Vec::with_capacity(buffers_max)), buffers_max }
    }

    /// A buffer of `len_bytes` bytes with unspecified content, recycled where one fits.
    pub fn take(&self, len_bytes: usize) -> Buffer {
        let lines_needed = len_bytes.div_ceil(LINE_BYTES);
        let mut free = self.free.lock().expect("no panic while the pool is locked");
        let fit = free.iter().rposition(|buffer| buffer.lines.capacity() >= lines_needed);
        let Some(index) = fit else { return Buffer::zeroed(len_bytes) };
        let mut buffer = free.swap_remove(index);
        drop(free);
        buffer.lines.resize(lines_needed, Line::zeroed());
        buffer.len_bytes = len_bytes;
        buffer
    }

    /// Hands a buffer back.
    pub fn give(&self, buffer: Buffer) {
        let mut free = self.free.lock().expect("no panic while the pool is locked");
        if free.len() < self.buffers_max {
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_recycled() {
        let pool = Pool::new(2);
        let mut buffer = pool.take(100);
        assert_eq!(buffer.len_bytes(), 100);
        assert_eq!(buffer.bytes().as_ptr() as usize % LINE_BYTES, 0);
        buffer.bytes_mut()[99] = 7;
        let address = buffer.bytes().as_ptr();
        pool.give(buffer);
        let again = pool.take(64);
        assert_eq!(again.bytes().as_ptr(), address);
        assert_eq!(again.bf16().len(), 32);
        assert_eq!(again.f32().len(), 16);
    }
}
