//! What this machine has, beside what was asked for.

use crate::error::LaunchError;
use glinthawk_compute::Isa;

/// The most threads per core that may be asked for: more only get in each other's way.
const THREADS_PER_CORE_MAX: usize = 4;

/// The instruction set asked for, or the best of this machine.
pub fn isa(wanted: Option<Isa>) -> Result<Isa, LaunchError> {
    let isa = wanted.unwrap_or_else(Isa::detect);
    isa.require()?;
    Ok(isa)
}

/// As many threads as asked for, or as there are cores.
pub fn threads(wanted: Option<u32>) -> Result<usize, LaunchError> {
    let cores = std::thread::available_parallelism().map_err(LaunchError::Cores)?.get();
    let threads = wanted.map_or(cores, |threads| threads as usize);
    let most = cores * THREADS_PER_CORE_MAX;
    if threads > most {
        return Err(LaunchError::TooManyThreads { threads, cores, most });
    }
    Ok(threads)
}

/// Memory that this process and those it starts may still take.
pub fn free_memory_bytes() -> Result<u64, LaunchError> {
    glinthawk_cluster::free_memory_bytes().ok_or(LaunchError::FreeMemory)
}

/// Fails if contexts were promised more memory than is free. The system would give it as long as it is not used, and then
/// end the process.
pub fn check_free_memory(wanted_bytes: u64) -> Result<(), LaunchError> {
    // Where the system does not say what is free, the user knows better.
    match free_memory_bytes() {
        Ok(free_bytes) if wanted_bytes > free_bytes => {
            Err(LaunchError::ContextMemory { wanted_bytes, free_bytes })
        }
        _ => Ok(()),
    }
}
