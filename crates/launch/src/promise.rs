//! What a shape of a cluster promises.

use std::fmt;

/// A shape of a cluster, and the tokens per second that it promises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promise {
    /// Pipelines.
    pub pipelines: usize,
    /// Tier-1 nodes of each.
    pub tier1: usize,
    /// Tier-2 nodes for each of them.
    pub tier2: usize,
    /// Prompt and generated tokens per second.
    pub tokens_per_second: f64,
}

impl fmt::Display for Promise {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pipelines, tier1, tier2, tokens_per_second } = self;
        if *pipelines > 1 {
            write!(formatter, "{pipelines} pipelines of ")?;
        }
        write!(formatter, "{tier1}x{tier2}, {tokens_per_second:.0} tokens/s")
    }
}
