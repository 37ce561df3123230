//! The tokenizers library panics on what it does not expect, and strangers write its files. Here panics become errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

thread_local! {
    /// Whether this thread is in guarded work.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Does work in which the library may panic; `None` if it did. What it had begun is thrown away: the library keeps nothing
/// between two texts but a cache, which it leaves alone then.
pub fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    let before = GUARDED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(before);
    done.ok()
}

/// Has panics in guarded work print nothing: they are told as errors.
pub fn silence_guarded_panics() {
    let usual = take_hook();
    set_hook(Box::new(move |panic| {
        if !GUARDED.get() {
            usual(panic);
        }
    }));
}
