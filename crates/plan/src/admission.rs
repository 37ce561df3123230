//! How many prompts a node's context memory seats: by a longest context and an oversubscription, or by expectation.

use crate::workload::{Held, Workload};

/// Deviations of margin above the expected need; 4 makes running out rarer than one in ten thousand.
const MARGIN_DEVIATIONS: f64 = 4.0;

/// The rule by which prompts are admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Admission {
    /// The paper's rule: every prompt counts as the longest context divided by a factor (3 for many prompts, 2 to
    /// 2.5 for few).
    Oversubscribed {
        /// Longest context in tokens.
        context_max: f64,
        /// Oversubscription factor.
        factor: f64,
    },
    /// By what prompts of the workload hold at a random step, with a relative margin that shrinks with
    /// their number.
    Expected(Held),
}

impl Admission {
    /// Admission by expectation, for a workload whose input is processed in chunks.
    pub fn expected(workload: &Workload, chunk: usize) -> Self {
        Self::Expected(workload.held(chunk))
    }

    /// Prompts that `memory` bytes seat at `token_bytes` per token.
    pub fn seats(&self, memory: f64, token_bytes: f64) -> usize {
        let tokens = (memory / token_bytes).max(0.0);
        match self {
            Self::Oversubscribed { context_max, factor } => {
                (tokens * factor / context_max).floor() as usize
            }
            Self::Expected(held) => {
                if tokens < held.most {
                    return 0;
                }
                // The largest n with n·mean + margin·deviation·√n ≤ tokens, a quadratic in √n.
                let margin = MARGIN_DEVIATIONS * held.deviation;
                let root = ((margin * margin + 4.0 * held.mean * tokens).sqrt() - margin)
                    / (2.0 * held.mean);
                ((root * root).floor() as usize).max(1)
            }
        }
    }

    /// Tokens that must fit for even one prompt.
    pub fn tokens_least(&self) -> f64 {
        match self {
            Self::Oversubscribed { context_max, factor } => context_max / factor,
            Self::Expected(held) => held.most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversubscription_divides_the_longest_context() {
        let admission = Admission::Oversubscribed { context_max: 2048.0, factor: 3.0 };
        assert_eq!(admission.seats(2048.0 * 10.0, 1.0), 30);
        assert_eq!(admission.seats(600.0, 1.0), 0);
    }

    #[test]
    fn expectation_oversubscribes_more_where_more_prompts_average_out() {
        let admission = Admission::Expected(Held { mean: 500.0, deviation: 300.0, most: 2048.0 });
        let per_longest = |tokens: f64| admission.seats(tokens, 1.0) as f64 / (tokens / 2048.0);
        assert_eq!(admission.seats(2047.0, 1.0), 0);
        assert!(per_longest(8192.0) < 2.5);
        assert!(
            per_longest(2048.0 * 1000.0) > 3.5 && per_longest(2048.0 * 1000.0) < 2048.0 / 500.0
        );
    }
}
