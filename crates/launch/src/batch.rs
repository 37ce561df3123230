//! The best batch for a job in this process.

use crate::error::LaunchError;
use crate::expected::Expected;
use crate::news::{LaunchNews, Tell};
use crate::opened::Opened;
use crate::profiler::{ProfileEffort, take_profile};
use crate::profiles::keep_profile;
use crate::resolved::Resolved;
use crate::specification::Specification;
use glinthawk_plan::Shape;

/// Parameters times tokens from which on a job takes longer than a brief profile of the machine, by far.
const WORK_PROFILED: f64 = 2e13;
/// Batches that are weighed against each other, on CPUs and on a GPU.
const BATCHES: [u32; 6] = [32, 64, 128, 256, 512, 1024];
const GPU_BATCHES: [u32; 5] = [512, 1024, 2048, 4096, 8192];
/// A gain below this is not worth another batch than the usual one.
const GAIN_MIN: f64 = 0.02;

/// A batch that promises more than the usual one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BetterBatch {
    /// Rows of a flight on each lane.
    pub batch: u32,
    /// The usual ones.
    pub usual: u32,
    /// How many more tokens per second, as a part of the usual ones.
    pub gain: f64,
}

/// Finds a better batch than the usual one for a job in this process, where the specification leaves it open and a
/// profile of this machine promises more of it. Takes a profile first where there is none and the job is worth it; a
/// GPU would be done before its profile.
///
/// On one machine that is the whole plan: tiers that share its cores and memory would only add messages.
pub fn better_batch(
    expected: &Expected,
    opened: &Opened,
    specification: &Specification,
    tell: Tell<'_>,
) -> Result<Option<BetterBatch>, LaunchError> {
    let open = specification.batch.is_none() && specification.flights.is_none();
    if !open || !specification.topology.is_one_process() {
        return Ok(None);
    }
    let crowd = expected.crowd();
    // What cannot be resolved cannot be launched either, and that is where it is reported.
    let Ok(usual) = Resolved::new(specification, opened, crowd) else { return Ok(None) };
    if usual.deployment(opened).is_none() {
        let shape = Shape::of(opened.model.name(), opened.model.config());
        let work = shape.model_bytes() / 2.0 * expected.tokens();
        if opened.device.is_some() || work < WORK_PROFILED {
            return Ok(None);
        }
        tell(LaunchNews::NoProfile);
        let profile =
            take_profile(opened, usual.isa, usual.lane_threads(), &ProfileEffort::brief(), tell)?;
        keep_profile(opened.model.config(), &profile)?;
    }
    let mut rates = Vec::new();
    let batches = if opened.device.is_some() { &GPU_BATCHES[..] } else { &BATCHES };
    for &batch in batches {
        let specification = Specification { batch: Some(batch), ..specification.clone() };
        let resolved = Resolved::new(&specification, opened, crowd).ok();
        let deployment = resolved.and_then(|resolved| resolved.deployment(opened));
        let Some(deployment) = deployment else { continue };
        let profiled = deployment.tier1.knots().last().copied().unwrap_or(0);
        if batch as usize <= profiled {
            rates.push((batch, expected.forecast(&deployment).tokens_per_second()));
        }
    }
    Ok(best(&rates, usual.layout.batch))
}

/// The batch with the best rate, and what it gains over the usual one, where that is worth it.
fn best(rates: &[(u32, f64)], usual: u32) -> Option<BetterBatch> {
    let (_, rate) = rates.iter().find(|(batch, _)| *batch == usual)?;
    let (batch, best) = rates.iter().copied().max_by(|one, other| one.1.total_cmp(&other.1))?;
    let gain = best / rate - 1.0;
    (gain >= GAIN_MIN).then_some(BetterBatch { batch, usual, gain })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_batch_must_be_worth_it() {
        assert_eq!(best(&[], 256), None);
        assert_eq!(best(&[(512, 9.0)], 256), None);
        assert_eq!(best(&[(128, 99.0), (256, 100.0), (512, 101.9)], 256), None);
        let found = best(&[(128, 90.0), (256, 100.0), (512, 115.0)], 256).expect("15%");
        assert_eq!(found.batch, 512);
        assert!((found.gain - 0.15).abs() < 1e-9);
        assert_eq!(best(&[(32, 130.0), (256, 100.0)], 256).map(|best| best.batch), Some(32));
    }
}
