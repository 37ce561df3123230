//! Activations between two kernels: in a message, or where they are.

use glinthawk_compute::{Backend, ComputeError};
use glinthawk_flight::Buffer;
use std::time::Instant;

/// What travels beside a message.
pub struct Payload<B> {
    pub activations: Activations<B>,
    /// When it was received or, if both kernels are on one device, made.
    pub since: Instant,
}

/// Activations that travel.
pub enum Activations<B> {
    /// From or to another node.
    Host(Buffer),
    /// On this node's device.
    Device(B),
}

impl<B> Payload<B> {
    /// A message's payload that was received at this time.
    pub fn received(buffer: Buffer, since: Instant) -> Self {
        Self { activations: Activations::Host(buffer), since }
    }

    /// Whether the kernels of this device are all that ever sees it.
    pub fn stays(&self) -> bool {
        matches!(self.activations, Activations::Device(_))
    }

    /// Takes the activations out, onto this node's device.
    pub fn take(&mut self, backend: &impl Backend<Buffer = B>) -> Result<B, ComputeError> {
        let nothing = Activations::Host(Buffer::default());
        match std::mem::replace(&mut self.activations, nothing) {
            Activations::Host(buffer) => backend.to_device(buffer),
            Activations::Device(buffer) => Ok(buffer),
        }
    }

    /// The activations as they leave with a message.
    pub fn sent(self) -> Buffer {
        match self.activations {
            Activations::Host(buffer) => buffer,
            Activations::Device(_) => unreachable!("kernels copy what leaves this node"),
        }
    }
}
