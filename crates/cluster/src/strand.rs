//! The strands of a process: what it computes side by side, each on threads of its own over the same weights. No core
//! waits for the slowest at the end of every kernel, and while one attends, which waits for memory, another multiplies.

use crate::error::ClusterError;
use crate::processes::keep_to_cores;
use crate::turns::{TakesTurns, Turns};
use glinthawk_compute::{CpuBackend, Isa, Threads, allowed_cores};
use glinthawk_flight::Pool;
use std::sync::Arc;

/// How the threads of a process are shared out to its strands.
pub(crate) struct ThreadShares {
    isa: Isa,
    /// Threads of each strand.
    each: usize,
    /// The cores of all strands, if every thread has one to itself.
    cores: Option<Vec<usize>>,
    /// If the strands are single threads, they change cores in turns.
    turns: Option<Arc<Turns>>,
}

impl ThreadShares {
    /// Shares of `threads` threads. Strands that are more have a thread each, and the system shares out the cores.
    pub(crate) fn new(isa: Isa, threads: usize, strands: usize) -> Result<Self, ClusterError> {
        let each = (threads / strands).max(1);
        let cores = Some(allowed_cores()).filter(|cores| cores.len() == each * strands);
        let turning = cores.clone().filter(|_| each == 1 && strands > 1);
        let turns = turning.map(Turns::start).transpose()?;
        Ok(Self { isa, each, cores, turns })
    }

    /// The kernels of a strand, made on its own thread, whose cores they inherit. It keeps what else is returned.
    pub(crate) fn take(
        &self,
        strand: usize,
        pool: Arc<Pool>,
    ) -> Result<(CpuBackend, Option<TakesTurns>), ClusterError> {
        let own = self.cores.as_ref().map(|cores| &cores[strand * self.each..][..self.each]);
        if let Some(cores) = own {
            // A refusal costs speed, never correctness.
            _ = keep_to_cores(cores);
        }
        let threads = Arc::new(Threads::new(self.each)?);
        threads.pin_caller();
        let turns = self.turns.as_ref().zip(own).map(|(turns, own)| turns.join(own[0]));
        Ok((CpuBackend { isa: self.isa, threads, pool }, turns))
    }
}
