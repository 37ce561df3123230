//! What can go wrong when kernels are set up, and on a GPU when they run.

use crate::Isa;
use thiserror::Error;

/// Why a backend could not be made.
#[derive(Debug, Error)]
pub enum ComputeError {
    /// The machine lacks the instruction set.
    #[error("instruction set {isa} is not available on this machine (available: {available})")]
    IsaUnavailable {
        /// The one asked for.
        isa: Isa,
        /// Those there are, by name.
        available: String,
    },
    /// The name of no instruction set.
    #[error("unknown instruction set {name:?} (known: portable, avx2, avx512, avx512bf16, amx)")]
    IsaUnknown {
        /// The name as given.
        name: String,
    },
    /// The name of no context type.
    #[error("unknown context type {name:?} (known: bf16, int8)")]
    ContextTypeUnknown {
        /// The name as given.
        name: String,
    },
    /// A model's shape that the kernels do not cover.
    #[error("shape not supported: {what}")]
    Shape {
        /// The field and its value.
        what: String,
    },
    /// The machine does not have that much memory, or no machine has.
    #[error("there is no room in memory for {what}, {}: {}", size(*bytes as u64), advice(what))]
    Memory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked for; `usize::MAX` if the size overflowed.
        bytes: usize,
    },
    /// Pages of a context that come before those below them.
    #[error("page {page} of slot {slot} comes before the pages below it")]
    Hole {
        /// The slot.
        slot: usize,
        /// The page's place in the slot's table.
        page: usize,
    },
    /// A library that a GPU needs is not on this machine.
    #[error("{library} is not on this machine: {hint}, or use --device cpu")]
    CudaMissing {
        /// The library.
        library: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A GPU failed.
    #[error("{device}: cannot {what}: {reason}")]
    Cuda {
        /// The device.
        device: String,
        /// What was being done.
        what: String,
        /// The driver's or compiler's reason.
        reason: String,
    },
    /// A thread of the pool could not be started.
    #[error("cannot start a kernel thread: give fewer with --threads")]
    Thread(#[source] std::io::Error),
    /// The weights could not be read.
    #[error(transparent)]
    Model(#[from] glinthawk_model::ModelError),
}

/// A size for people: `1.5 GiB`, `17 bytes`.
pub fn size(bytes: u64) -> String {
    match bytes {
        1 => return "1 byte".to_owned(),
        0..1024 => return format!("{bytes} bytes"),
        _ => {}
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = ["KiB", "MiB", "GiB", "TiB", "PiB"].into_iter();
    let mut unit = units.next();
    while value >= 1024.0
        && let Some(larger) = units.next()
    {
        value /= 1024.0;
        unit = Some(larger);
    }
    format!("{value:.1} {}", unit.unwrap_or_default())
}

/// What to do if there is no memory for something.
fn advice(what: &str) -> &'static str {
    match what {
        "context pages" | "context scales" => "give less with --context-memory",
        "weights" | "the embedding" => "take a smaller model, or cut it into slices with --tier1",
        _ => "give less with --batch or --flights",
    }
}
