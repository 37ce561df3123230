//! Activations on a GPU, and their way from and to the host. Copies have streams of their own, so that those of one work
//! overlap the kernels of another; the host's memory is pinned, so that the device copies by itself.

use super::device::CudaDevice;
use super::weights::{address, allocate};
use crate::ComputeError;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, result};
use glinthawk_flight::{Buffer, DeviceMemory, Pool};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Activations on a GPU.
pub struct CudaBuffer {
    pub(super) memory: CudaSlice<u8>,
    pub(super) len_bytes: usize,
}

/// A point in a GPU's work: of its kernels, and of its copies to the host.
pub struct CudaMark {
    computed: CudaEvent,
    copied: Option<Arc<CudaEvent>>,
}

/// Memory for activations on both sides.
pub(super) struct Travel {
    device: CudaDevice,
    pool: Arc<Pool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Memory on the device, each after its last use. Oldest first.
    idle: Vec<(CudaSlice<u8>, Arc<CudaEvent>)>,
    /// Buffers of the host that are being copied from.
    leaving: VecDeque<(Buffer, CudaEvent)>,
    /// After the last copy to the host.
    copied: Option<Arc<CudaEvent>>,
}

impl Travel {
    pub(super) fn new(device: &CudaDevice, pool: Arc<Pool>) -> Self {
        Self { device: device.clone(), pool, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn is_over(&self, event: &CudaEvent) -> Result<bool, ComputeError> {
        let failed = || self.device.failed("finish its work");
        self.device.context.bind_to_thread().map_err(failed())?;
        event.try_is_complete().map_err(failed())
    }

    /// Memory that nothing on the device uses any more, so that any stream may have it at once.
    pub(super) fn take(&self, len_bytes: usize) -> Result<CudaBuffer, ComputeError> {
        let mut best: Option<(usize, usize)> = None;
        let mut state = self.state();
        for (index, (memory, last_used)) in state.idle.iter().enumerate() {
            let better = best.is_none_or(|(len, _)| memory.len() < len);
            if memory.len() >= len_bytes && better && self.is_over(last_used)? {
                best = Some((memory.len(), index));
            }
        }
        if let Some((_, index)) = best {
            return Ok(CudaBuffer { memory: state.idle.remove(index).0, len_bytes });
        }
        drop(state);
        // Powers of two, so that batches of almost the same size share memory.
        let room = len_bytes.max(1).next_power_of_two();
        let memory = allocate(&self.device, "activations", room)?;
        // It is made in the order of the kernels.
        let wait = || self.device.failed("wait for its memory");
        self.device.copies_in.join(&self.device.stream).map_err(wait())?;
        Ok(CudaBuffer { memory, len_bytes })
    }

    pub(super) fn give(&self, buffer: CudaBuffer) {
        // Where this fails, so does whatever is done next, which says so.
        if let Ok(event) = self.device.stream.record_event(None) {
            self.state().idle.push((buffer.memory, Arc::new(event)));
        }
    }

    pub(super) fn to_device(&self, buffer: Buffer) -> Result<CudaBuffer, ComputeError> {
        let there = self.take(buffer.len_bytes())?;
        let what = format!("copy {} bytes to it", buffer.len_bytes());
        let failed = || self.device.failed(&what);
        let copies = &self.device.copies_in;
        let (at, from) = (address(&there.memory, &self.device), buffer.bytes());
        if !from.is_empty() {
            self.device.context.bind_to_thread().map_err(failed())?;
            // SAFETY: `there` holds as many bytes and is used by nothing else. `leaving` keeps the buffer until they
            // are copied.
            let copied = unsafe { result::memcpy_htod_async(at, from, copies.cu_stream()) };
            copied.map_err(failed())?;
        }
        let copied = copies.record_event(None).map_err(failed())?;
        self.device.stream.wait(&copied).map_err(failed())?;
        let mut state = self.state();
        state.leaving.push_back((buffer, copied));
        while let Some((_, copied)) = state.leaving.front()
            && self.is_over(copied)?
        {
            let (buffer, _) = state.leaving.pop_front().expect("it was there");
            self.pool.give(buffer);
        }
        Ok(there)
    }

    pub(super) fn to_host(&self, buffer: CudaBuffer) -> Result<Buffer, ComputeError> {
        let mut here = self.pool.take(buffer.len_bytes);
        let what = format!("copy {} bytes from it", buffer.len_bytes);
        let failed = || self.device.failed(&what);
        let copies = &self.device.copies_out;
        copies.join(&self.device.stream).map_err(failed())?;
        if buffer.len_bytes > 0 {
            let from = address(&buffer.memory, &self.device);
            // SAFETY: `here` has as many bytes as are copied, and its owner keeps it until a later mark is done. What is
            // copied is not written again before the event below.
            let copied =
                unsafe { result::memcpy_dtoh_async(here.bytes_mut(), from, copies.cu_stream()) };
            copied.map_err(failed())?;
        }
        let copied = Arc::new(copies.record_event(None).map_err(failed())?);
        let mut state = self.state();
        state.idle.push((buffer.memory, Arc::clone(&copied)));
        state.copied = Some(copied);
        Ok(here)
    }

    pub(super) fn mark(&self) -> Result<CudaMark, ComputeError> {
        let computed = self.device.stream.record_event(Some(CU_EVENT_DEFAULT));
        let computed = computed.map_err(self.device.failed("mark its work"))?;
        Ok(CudaMark { computed, copied: self.state().copied.clone() })
    }

    pub(super) fn is_done(&self, mark: &CudaMark) -> Result<bool, ComputeError> {
        let copied = mark.copied.as_ref().map_or(Ok(true), |copied| self.is_over(copied));
        Ok(copied? && self.is_over(&mark.computed)?)
    }

    pub(super) fn elapsed(&self, from: &CudaMark, to: &CudaMark) -> Result<Duration, ComputeError> {
        let elapsed = from.computed.elapsed_ms(&to.computed);
        let elapsed = elapsed.map_err(self.device.failed("time its work"))?;
        Ok(Duration::from_secs_f64(f64::from(elapsed).max(0.0) / 1e3))
    }
}

/// A pool of pinned memory.
pub fn pinned_pool(device: &CudaDevice, buffers_max: usize) -> Pool {
    let context = Arc::clone(&device.context);
    Pool::of_device(buffers_max, move |len_bytes| {
        let memory = Pinned::new(&context, len_bytes.next_power_of_two())?;
        Some(Box::new(memory))
    })
}

/// Memory of the host that the device reads and writes by itself.
struct Pinned {
    at: NonNull<u8>,
    len_bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: it is memory that belongs to this value alone.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read it.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(context: &Arc<CudaContext>, len_bytes: usize) -> Option<Self> {
        context.bind_to_thread().ok()?;
        // SAFETY: the driver gives as many bytes, and all of them are set before anything reads them.
        let at = unsafe {
            let at = NonNull::new(result::malloc_host(len_bytes, 0).ok()?.cast::<u8>())?;
            at.write_bytes(0, len_bytes);
            at
        };
        Some(Self { at, len_bytes, context: Arc::clone(context) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Where the context is gone, so is the memory.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `malloc_host` gave it, and nothing else frees it.
            _ = unsafe { result::free_host(self.at.as_ptr().cast()) };
        }
    }
}

impl DeviceMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `at` has as many bytes, set when it was made.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len_bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len_bytes) }
    }
}
