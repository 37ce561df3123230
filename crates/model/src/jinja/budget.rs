//! What a template may use: one number for time, memory and output, and one for the stack.

use super::{Error, ErrorKind};
use std::cell::Cell;

/// How deep calls and expressions may be nested while a template runs.
const DEPTH_MAX: u32 = 300;

/// How deep lists and dictionaries may be nested in each other.
pub(super) const NESTING_MAX: u16 = 64;

/// What one step costs, in bytes: about what a step moves.
pub(super) const STEP: usize = 32;

/// Work that is left, in bytes made or looked at. Every step and every byte of a value costs, so
/// that neither a loop nor one operation on a long text gets away.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: Cell<u64>,
    depth: Cell<u32>,
}

impl Budget {
    pub(crate) fn of_bytes(bytes: u64) -> Self {
        Self { bytes: Cell::new(bytes), depth: Cell::new(0) }
    }

    /// Pays for work before it is done.
    pub(super) fn spend(&self, bytes: usize) -> Result<(), Error> {
        match self.bytes.get().checked_sub(bytes as u64) {
            Some(left) => {
                self.bytes.set(left);
                Ok(())
            }
            None => {
                // What follows an error is not free either.
                self.bytes.set(0);
                Err(Error::new(ErrorKind::Exhausted, "it takes too much time or memory"))
            }
        }
    }

    /// Pays for `count` things of `bytes` bytes each.
    pub(super) fn spend_times(&self, count: usize, bytes: usize) -> Result<(), Error> {
        self.spend(count.saturating_mul(bytes))
    }

    /// Runs one level further down.
    pub(super) fn nested<T>(&self, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.spend(STEP)?;
        if self.depth.get() == DEPTH_MAX {
            let message = format!("calls and expressions more than {DEPTH_MAX} levels deep");
            return Err(Error::new(ErrorKind::Exhausted, message));
        }
        self.depth.set(self.depth.get() + 1);
        let result = body();
        self.depth.set(self.depth.get() - 1);
        result
    }
}
