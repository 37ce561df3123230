//! The suite every backend runs: agreement with `portable` on random shapes, and bits that depend
//! on a row alone. Cases are data; one function checks each kind.

mod context;
mod cuda;
mod model;
mod weights;

use crate::Isa;

/// Every path this machine has, except the oracle itself.
fn fast_paths() -> Vec<Isa> {
    Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect()
}

/// Fails if a value is off by more than `tolerance` times the largest expected value.
#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    assert!(largest.is_finite() && largest > 0.0, "{what}: expected values are useless");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * largest,
            "{what}: value {index} is {found}, expected {expected} (of {largest})"
        );
    }
}
