//! What the host tells the device: words that are gathered in pinned memory and sent in one copy.

use super::device::CudaDevice;
use super::weights::{address, allocate};
use crate::ComputeError;
use cudarc::driver::{CudaSlice, PinnedHostSlice};

/// Words on their way to the device. They stay there until their place is needed again, which waits for all work.
pub(super) struct Staged {
    device: CudaDevice,
    host: PinnedHostSlice<u32>,
    there: CudaSlice<u32>,
    /// Words placed, and of those, sent.
    used: usize,
    sent: usize,
}

/// Pinned memory of the host, with unspecified content.
pub(super) fn pinned<T: cudarc::driver::DeviceRepr>(
    device: &CudaDevice,
    len: usize,
) -> Result<PinnedHostSlice<T>, ComputeError> {
    // SAFETY: what is read was written before.
    let memory = unsafe { device.context.alloc_pinned_with_flags(len, 0) };
    memory.map_err(device.failed("allocate a pinned buffer"))
}

impl Staged {
    /// Room for `words` words.
    pub(super) fn new(device: &CudaDevice, words: usize) -> Result<Self, ComputeError> {
        Ok(Self {
            device: device.clone(),
            host: pinned(device, words)?,
            there: allocate(device, "a step's inputs", words)?,
            used: 0,
            sent: 0,
        })
    }

    /// Makes room for `words` words that are on the device together.
    pub(super) fn begin(&mut self, words: usize) -> Result<(), ComputeError> {
        // A batch may begin with numbers of 64 bits.
        let start = self.used.next_multiple_of(4);
        if start + words <= self.host.len() {
            (self.used, self.sent) = (start, start);
            return Ok(());
        }
        self.device.synchronize()?;
        self.restart(words)
    }

    /// Makes room for `words` words anew, where nothing that was sent is needed any more.
    pub(super) fn restart(&mut self, words: usize) -> Result<(), ComputeError> {
        if words > self.host.len() {
            *self = Self::new(&self.device, words.next_power_of_two())?;
        }
        (self.used, self.sent) = (0, 0);
        Ok(())
    }

    /// Places words; returns where they will stand on the device.
    pub(super) fn place(
        &mut self,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<u64, ComputeError> {
        let start = self.used;
        let host = self.host.as_mut_slice().map_err(self.device.failed("use a pinned buffer"))?;
        for word in words {
            host[self.used] = word;
            self.used += 1;
        }
        Ok(address(&self.there, &self.device) + (start * size_of::<u32>()) as u64)
    }

    /// Sends what was placed since the last time.
    pub(super) fn send(&mut self) -> Result<(), ComputeError> {
        let failed = || self.device.failed("send a step to it");
        let words = self.sent..self.used;
        if words.is_empty() {
            return Ok(());
        }
        let from = &self.host.as_slice().map_err(failed())?[words.clone()];
        let mut into = self.there.slice_mut(words);
        self.device.stream.memcpy_htod(from, &mut into).map_err(failed())?;
        self.sent = self.used;
        Ok(())
    }
}
