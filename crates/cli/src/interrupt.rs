//! Ctrl-C and termination: the first asks the job to end cleanly, the second ends the process.

use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Has a file that may not grow any further be an error of the write. Without this, the system ends the process.
pub fn survive_file_limits() {
    // If this fails, all is as it was.
    _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
}

/// A flag that is set by the first interrupt.
pub fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(1);
        }
    })
    .context("cannot watch for Ctrl-C")?;
    Ok(interrupted)
}
