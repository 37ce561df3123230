//! For the tests of this workspace: the real model, fetched as a user would.

use crate::catalogue::{self, DEFAULT_MODEL, ResolvedModel};
use std::path::PathBuf;

/// The default model's file. If it cannot be fetched, prints why and returns `None`, so that the
/// test that needs it can end there; with `GLINTHAWK_REQUIRE_MODEL=1` it panics instead.
pub fn default_model() -> Option<PathBuf> {
    let reason = match catalogue::resolve(DEFAULT_MODEL, &mut |_| {}) {
        Ok(ResolvedModel::Path(path)) => return Some(path),
        Ok(other) => format!("{DEFAULT_MODEL} is {other:?}, not a file"),
        Err(error) => error.to_string(),
    };
    let required = std::env::var_os("GLINTHAWK_REQUIRE_MODEL").is_some_and(|value| value == "1");
    assert!(!required, "the test needs a model and GLINTHAWK_REQUIRE_MODEL is set: {reason}");
    eprintln!("skipped: the test needs a model: {reason}");
    None
}
