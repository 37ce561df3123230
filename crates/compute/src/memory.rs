//! Big zeroed blocks for weights, pages and scratch: aligned for tiles and huge pages, and costing
//! no resident memory until they are touched.

use crate::ComputeError;
use bytemuck::{Pod, Zeroable};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

/// Sixteen numbers that fill a cache line. A vector that lies in two lines takes longer to load.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; LINE_BYTES / size_of::<f32>()]);

/// Blocks of at least this size are aligned to huge pages and ask for them.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;
/// The allocator's own alignment. Asking for more would make it zero, and so touch, the whole block.
const BASE_ALIGN_BYTES: usize = 16;
/// What an arena asks for at a time.
const ARENA_BYTES: usize = 64 << 20;

/// Memory from the allocator, from its first aligned byte on.
struct Allocation {
    base: NonNull<u8>,
    layout: Layout,
    first: *mut u8,
}

// SAFETY: plain owned memory; who may touch which part is up to the `Memory` values over it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn zeroed(what: &'static str, bytes: usize) -> Result<Self, ComputeError> {
        let overflow = || ComputeError::Memory { what, bytes: usize::MAX };
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { LINE_BYTES };
        let padded =
            bytes.checked_next_multiple_of(align).and_then(|bytes| bytes.checked_add(align));
        let padded = padded.ok_or_else(overflow)?;
        let layout = Layout::from_size_align(padded, BASE_ALIGN_BYTES).map_err(|_| overflow())?;
        // SAFETY: the layout's size is at least `align`, so not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or(ComputeError::Memory { what, bytes })?;
        // SAFETY: the allocation is `align` bytes longer than needed.
        let first = unsafe { base.as_ptr().add(base.align_offset(align)) };
        if align == HUGE_PAGE_BYTES {
            ask_for_huge_pages(first, padded - align);
        }
        Ok(Self { base, layout, first })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(first: *mut u8, bytes: usize) {
    use rustix::mm::{Advice, madvise};
    // SAFETY: the range lies inside our own allocation, and this advice changes no content.
    // A refusal costs speed only.
    _ = unsafe { madvise(first.cast(), bytes, Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_first: *mut u8, _bytes: usize) {}

/// A zeroed, aligned block of `len` values.
pub(crate) struct Memory<T: Pod> {
    allocation: Arc<Allocation>,
    /// Bytes from the allocation's first.
    offset: usize,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod> Memory<T> {
    /// A block of `len` zeroed values for `what`.
    pub(crate) fn zeroed(what: &'static str, len: usize) -> Result<Self, ComputeError> {
        let allocation = Arc::new(Allocation::zeroed(what, bytes_of::<T>(what, len)?)?);
        Ok(Self { allocation, offset: 0, len, values: PhantomData })
    }

    /// First value; for kernels that write disjoint parts from several threads.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        // SAFETY: the offset lies inside the allocation.
        unsafe { self.allocation.first.add(self.offset).cast() }
    }
}

fn bytes_of<T>(what: &'static str, len: usize) -> Result<usize, ComputeError> {
    len.checked_mul(size_of::<T>()).ok_or(ComputeError::Memory { what, bytes: usize::MAX })
}

impl<T: Pod> std::ops::Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values, zeroed (valid for Pod) and aligned, that belong to this block alone.
        unsafe {
            std::slice::from_raw_parts(self.allocation.first.add(self.offset).cast(), self.len)
        }
    }
}

impl<T: Pod> std::ops::DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

/// Puts blocks side by side, so that small ones have huge pages too.
#[derive(Default)]
pub(crate) struct Arena {
    /// Where the next block goes, bytes of it used, and bytes in all.
    current: Option<(Arc<Allocation>, usize, usize)>,
}

impl Arena {
    /// A block of `len` zeroed values for `what`.
    pub(crate) fn zeroed<T: Pod>(
        &mut self,
        what: &'static str,
        len: usize,
    ) -> Result<Memory<T>, ComputeError> {
        let overflow = ComputeError::Memory { what, bytes: usize::MAX };
        let bytes =
            bytes_of::<T>(what, len)?.checked_next_multiple_of(LINE_BYTES).ok_or(overflow)?;
        let fits = self.current.as_ref().is_some_and(|(_, used, room)| room - used >= bytes);
        if !fits {
            let room = bytes.max(ARENA_BYTES);
            self.current = Some((Arc::new(Allocation::zeroed(what, room)?), 0, room));
        }
        let (allocation, used, _) = self.current.as_mut().expect("made above");
        let memory =
            Memory { allocation: Arc::clone(allocation), offset: *used, len, values: PhantomData };
        *used += bytes;
        Ok(memory)
    }
}

/// A mutable slice whose disjoint parts are written by several threads at once.
pub(crate) struct SharedMut<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: `range` hands out parts, and its callers promise that they do not overlap.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { pointer: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Pointer to `len` values from `start`, for callers that share them more finely than in
    /// slices.
    pub(crate) fn place(&self, start: usize, len: usize) -> *mut T {
        assert!(
            start <= self.len && len <= self.len - start,
            "place {start}+{len} of {}",
            self.len
        );
        self.pointer.wrapping_add(start)
    }

    /// The values from `start`, `len` of them.
    ///
    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)] // the point of the type: disjointness is the caller's promise
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: inside the slice, and not overlapping by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeroed_and_aligned() {
        for len in [0, 3, 3 << 20] {
            let mut memory = Memory::<u32>::zeroed("test", len).unwrap();
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|&value| value == 0));
            assert_eq!(
                memory.as_mut_ptr() as usize
                    % if len > 1 << 20 { HUGE_PAGE_BYTES } else { LINE_BYTES },
                0
            );
        }
        assert!(Memory::<u32>::zeroed("test", usize::MAX / 2).is_err());
        assert!(Arena::default().zeroed::<u32>("test", usize::MAX / 4).is_err());
    }

    #[test]
    fn blocks_of_an_arena_do_not_overlap() {
        let mut arena = Arena::default();
        let mut blocks: Vec<Memory<u32>> =
            [5, 0, 17, 40 << 20, 3].map(|len| arena.zeroed("test", len).unwrap()).into();
        for (value, block) in (1..).zip(&mut blocks) {
            assert_eq!(block.as_ptr() as usize % LINE_BYTES, 0);
            assert!(block.iter().all(|&old| old == 0));
            block.fill(value);
        }
        drop(arena);
        assert!((1..).zip(&blocks).all(|(value, block)| block.iter().all(|&found| found == value)));
    }
}
