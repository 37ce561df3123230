//! Payload buffers: 64-byte aligned, recycled through a bounded pool, viewed as bytes, bf16 or f32.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use std::sync::Mutex;

const LINE_BYTES: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// Memory that a device can copy from and to while the host goes on. It starts at a multiple of 64 bytes.
pub trait DeviceMemory: Send + Sync {
    /// All of it.
    fn bytes(&self) -> &[u8];
    /// All of it, to be changed.
    fn bytes_mut(&mut self) -> &mut [u8];
}

enum Storage {
    /// A recycled buffer keeps its lines, so that it is zeroed once only.
    Lines(Vec<Line>),
    Device(Box<dyn DeviceMemory>),
}

/// An aligned block of bytes; the payload of a shard or a hop.
pub struct Buffer {
    // At least `len_bytes`.
    storage: Storage,
    len_bytes: usize,
}

impl Default for Buffer {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len_bytes);
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }
}

impl Buffer {
    /// A zeroed buffer of `len_bytes` bytes.
    pub fn zeroed(len_bytes: usize) -> Self {
        let lines = vec![Line::zeroed(); len_bytes.div_ceil(LINE_BYTES)];
        Self { storage: Storage::Lines(lines), len_bytes }
    }

    /// Bytes that it could hold.
    fn capacity(&self) -> usize {
        match &self.storage {
            Storage::Lines(lines) => lines.len() * LINE_BYTES,
            Storage::Device(memory) => memory.bytes().len(),
        }
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The content as bytes.
    pub fn bytes(&self) -> &[u8] {
        let all = match &self.storage {
            Storage::Lines(lines) => bytemuck::cast_slice(lines),
            Storage::Device(memory) => memory.bytes(),
        };
        &all[..self.len_bytes]
    }

    /// The content as mutable bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let all = match &mut self.storage {
            Storage::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Storage::Device(memory) => memory.bytes_mut(),
        };
        &mut all[..self.len_bytes]
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

/// Allocates memory of at least so many bytes; `None` leaves it to the system, whose memory a device copies more slowly.
type Allocate = dyn Fn(usize) -> Option<Box<dyn DeviceMemory>> + Send + Sync;

/// A bounded store of used buffers, so that the steady state allocates nothing.
pub struct Pool {
    free: Mutex<Vec<Buffer>>,
    buffers_max: usize,
    allocate: Option<Box<Allocate>>,
}

impl Pool {
    /// A pool that keeps at most `buffers_max` idle buffers.
    pub fn new(buffers_max: usize) -> Self {
        let free = Mutex::new(Vec::with_capacity(buffers_max));
        Self { free, buffers_max, allocate: None }
    }

    /// A pool of buffers that a device can copy from and to.
    pub fn of_device(
        buffers_max: usize,
        allocate: impl Fn(usize) -> Option<Box<dyn DeviceMemory>> + Send + Sync + 'static,
    ) -> Self {
        Self { allocate: Some(Box::new(allocate)), ..Self::new(buffers_max) }
    }

    /// A buffer of `len_bytes` bytes with unspecified content: the smallest idle one that fits,
    /// so that a small message does not run off with a large buffer; of several, the one given
    /// back last, whose memory a cache may still hold.
    pub fn take(&self, len_bytes: usize) -> Buffer {
        if len_bytes == 0 {
            return Buffer::default();
        }
        self.take_idle(len_bytes).unwrap_or_else(|| {
            let memory = self.allocate.as_ref().and_then(|allocate| allocate(len_bytes));
            match memory {
                Some(memory) => Buffer { storage: Storage::Device(memory), len_bytes },
                None => Buffer::zeroed(len_bytes),
            }
        })
    }

    /// The same, if there is an idle one: no memory is taken for it.
    pub fn take_idle(&self, len_bytes: usize) -> Option<Buffer> {
        let mut free = self.free.lock().expect("no panic while the pool is locked");
        let last_first = free.iter().enumerate().rev();
        let fits = last_first.filter(|(_, buffer)| buffer.capacity() >= len_bytes);
        let (index, _) = fits.min_by_key(|(_, buffer)| buffer.capacity())?;
        let mut buffer = free.remove(index);
        buffer.len_bytes = len_bytes;
        Some(buffer)
    }

    /// Hands a buffer back.
    pub fn give(&self, buffer: Buffer) {
        if buffer.capacity() == 0 {
            return;
        }
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

    #[test]
    fn the_smallest_idle_buffer_that_fits_is_taken() {
        let pool = Pool::new(2);
        let (large, small) = (pool.take(640), pool.take(128));
        let (large_at, small_at) = (large.bytes().as_ptr(), small.bytes().as_ptr());
        pool.give(small);
        pool.give(large);
        pool.give(Buffer::default());
        assert_eq!(pool.take(100).bytes().as_ptr(), small_at);
        assert_eq!(pool.take(100).bytes().as_ptr(), large_at);
    }
}
