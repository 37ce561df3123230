//! Activations between two kernels: in a message, or where they are.

use glinthawk_compute::{Backend, ComputeError};
use glinthawk_flight::Buffer;

/// Activations that travel beside a message.
pub enum Payload<B> {
    /// From or to another node.
    Host(Buffer),
    /// On this node's device.
    Device(B),
}

impl<B> Payload<B> {
    /// The activations on this node's device.
    pub(crate) fn on_device(self, backend: &impl Backend<Buffer = B>) -> Result<B, ComputeError> {
        match self {
            Self::Host(buffer) => backend.to_device(buffer),
            Self::Device(buffer) => Ok(buffer),
        }
    }
}
