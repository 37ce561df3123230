//! Big zeroed blocks for weights, pages and scratch: aligned for tiles and huge pages, and costing
//! no resident memory until they are touched.

use crate::ComputeError;
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Blocks from this size on are aligned to, and asked to consist of, huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const LINE_BYTES: usize = 64;
/// What the allocator aligns anyway: a larger demand would make it zero, and touch, the whole block.
const BASE_ALIGN_BYTES: usize = 16;

/// A zeroed, aligned block of `len` values.
pub(crate) struct Memory<T: Pod> {
    base: NonNull<u8>,
    layout: Layout,
    offset: usize,
    len: usize,
    values: PhantomData<T>,
}

// SAFETY: a plain owned allocation of `Send` values.
unsafe impl<T: Pod + Send> Send for Memory<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Pod + Sync> Sync for Memory<T> {}

impl<T: Pod> Memory<T> {
    /// A block of `len` zeroed values for `what`.
    pub(crate) fn zeroed(what: &'static str, len: usize) -> Result<Self, ComputeError> {
        let overflow = || ComputeError::Memory { what, bytes: usize::MAX };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(overflow)?;
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { LINE_BYTES };
        let padded = bytes.checked_add(align).ok_or_else(overflow)?;
        let layout = Layout::from_size_align(padded, BASE_ALIGN_BYTES).map_err(|_| overflow())?;
        // SAFETY: the layout's size is at least `align`, so not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or(ComputeError::Memory { what, bytes })?;
        let offset = base.align_offset(align);
        let memory = Self { base, layout, offset, len, values: PhantomData };
        if align == HUGE_PAGE_BYTES {
            memory.ask_for_huge_pages(bytes);
        }
        Ok(memory)
    }

    /// First value; for kernels that write disjoint parts from several threads.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        // SAFETY: the offset lies inside the allocation, which is `align` bytes longer than needed.
        unsafe { self.base.as_ptr().add(self.offset).cast() }
    }

    #[cfg(target_os = "linux")]
    fn ask_for_huge_pages(&self, bytes: usize) {
        use rustix::mm::{Advice, madvise};
        // SAFETY: the range lies inside our own allocation, and this advice changes no content.
        // A refusal costs speed only.
        let _ = unsafe {
            madvise(self.base.as_ptr().add(self.offset).cast(), bytes, Advice::LinuxHugepage)
        };
    }

    #[cfg(not(target_os = "linux"))]
    fn ask_for_huge_pages(&self, _bytes: usize) {}
}

impl<T: Pod> std::ops::Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values, zeroed (valid for Pod) and aligned, inside our own allocation.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.offset).cast(), self.len) }
    }
}

impl<T: Pod> std::ops::DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

impl<T: Pod> Drop for Memory<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
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

    /// Where `len` values from `start` stand, for those who share them more finely than in slices.
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
    }
}
