//! What a job is expected to take.

use crate::expected::Expected;
use crate::opened::Opened;
use crate::planned::Planned;
use crate::resolved::Resolved;
use serde::Serialize;

/// What a job is expected to take.
#[derive(Clone, Debug, Serialize)]
pub struct Outlook {
    /// Where the forecast comes from.
    pub source: &'static str,
    /// From the first prompt to the last token.
    pub seconds: f64,
    /// Prompt and generated tokens per second.
    pub tokens_per_second: f64,
    /// Prompt tokens that are not computed, because another prompt begins with them, where a profile says so.
    pub prompt_tokens_shared: Option<u64>,
    /// Dollars, where the plan knows the rent.
    pub usd: Option<f64>,
}

impl Outlook {
    /// Forecasts a job from a profile that was taken here, else from its plan; `None` where neither says anything.
    pub fn of(
        expected: &Expected,
        opened: &Opened,
        resolved: &Resolved,
        planned: Option<&Planned>,
    ) -> Option<Self> {
        let tokens = expected.tokens();
        let (source, seconds, shared) = match (resolved.deployment(opened), planned) {
            (Some(deployment), _) => {
                let forecast = expected.forecast(&deployment);
                let shared = forecast.tokens_shared.round() as u64;
                ("a profile of this machine", forecast.seconds, Some(shared))
            }
            (None, Some(planned)) => {
                ("the plan", tokens / planned.plan.forecast.tokens_per_second, None)
            }
            (None, None) => return None,
        };
        let usd = planned.and_then(Planned::usd_per_second).map(|rate| rate * seconds);
        let (tokens_per_second, prompt_tokens_shared) = (tokens / seconds, shared);
        Some(Self { source, seconds, tokens_per_second, prompt_tokens_shared, usd })
    }
}
