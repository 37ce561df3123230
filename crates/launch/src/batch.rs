//! The best batch and number of flights for a job on this machine.

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
/// Flights for each Tier-1 node of a cluster that are weighed against each other.
const FLIGHTS: [u32; 4] = [1, 2, 3, 4];
/// A gain below this is not worth another shape than the usual one.
const GAIN_MIN: f64 = 0.02;

/// Rows of a flight on each lane, and flights.
pub type BatchAndFlights = (u32, u32);

/// A shape that promises more than the usual one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BetterShape {
    /// The shape.
    pub better: BatchAndFlights,
    /// The usual one.
    pub usual: BatchAndFlights,
    /// How many more tokens per second, as a part of the usual ones.
    pub gain: f64,
}

/// Finds a better batch and number of flights than the usual ones for a job on this machine, where the specification
/// leaves both open and a profile promises more. Takes a profile first where there is none and the job is worth it; a
/// GPU would be done before its profile.
///
/// Which processes there are is not weighed: on one machine, tiers that share its cores and memory only add messages.
pub fn better_shape(
    expected: &Expected,
    opened: &Opened,
    specification: &Specification,
    tell: Tell<'_>,
) -> Result<Option<BetterShape>, LaunchError> {
    let open = specification.batch.is_none() && specification.flights.is_none();
    let alone = specification.topology.is_one_process();
    if !open || specification.topology.listen.is_some() || (opened.has_gpu() && !alone) {
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
        let threads = usual.strand_threads();
        let profile = take_profile(opened, usual.isa, threads, &ProfileEffort::brief(), tell)?;
        keep_profile(opened.model.config(), &profile)?;
    }
    let rate = |(batch, flights): BatchAndFlights| {
        let (batch, flights) = (Some(batch), Some(flights));
        let specification = Specification { batch, flights, ..specification.clone() };
        let deployment = Resolved::new(&specification, opened, crowd).ok()?.deployment(opened)?;
        let profiled = deployment.tier1.knots().last().copied().unwrap_or(0);
        let is_known = deployment.batch as usize <= profiled;
        is_known.then(|| expected.forecast(&deployment).tokens_per_second())
    };
    let usual_shape = (usual.layout.batch, usual.layout.flights);
    let mut shapes = vec![usual_shape];
    // Flights on shared cores meet less often than a forecast thinks.
    if !alone && !usual.shares_cores {
        let slices = usual.layout.slices as u32;
        shapes.extend(FLIGHTS.map(|flights| (usual_shape.0, flights * slices)));
    }
    let flights = best(&shapes, usual_shape, rate).map_or(usual_shape.1, |best| best.better.1);
    let batches = if opened.device.is_some() { &GPU_BATCHES[..] } else { &BATCHES };
    shapes.retain(|(_, one)| *one == flights);
    shapes.extend(batches.iter().map(|&batch| (batch, flights)));
    shapes.push(usual_shape);
    Ok(best(&shapes, usual_shape, rate))
}

/// The shape with the best rate, and what it gains over the usual one, where that is worth it.
fn best(
    shapes: &[BatchAndFlights],
    usual: BatchAndFlights,
    rate: impl Fn(BatchAndFlights) -> Option<f64>,
) -> Option<BetterShape> {
    let usual_rate = rate(usual)?;
    let others = shapes.iter().filter(|shape| **shape != usual);
    let rates = others.filter_map(|&shape| Some((shape, rate(shape)?)));
    let (better, best) = rates.max_by(|one, other| one.1.total_cmp(&other.1))?;
    let gain = best / usual_rate - 1.0;
    (gain >= GAIN_MIN).then_some(BetterShape { better, usual, gain })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_shape_must_be_worth_it() {
        let check = |rates: &[(BatchAndFlights, f64)], expected: Option<BatchAndFlights>| {
            let shapes: Vec<_> = rates.iter().map(|(shape, _)| *shape).collect();
            let rate = |shape| rates.iter().find(|(one, _)| *one == shape).map(|(_, rate)| *rate);
            let found = best(&shapes, (256, 3), rate);
            assert_eq!(found.map(|found| found.better), expected, "{rates:?}");
            found.map_or(0.0, |found| found.gain)
        };
        check(&[], None);
        check(&[((512, 3), 9.0)], None);
        check(&[((128, 3), 99.0), ((256, 3), 100.0), ((512, 3), 101.9)], None);
        let rates = [((128, 3), 90.0), ((256, 3), 100.0), ((512, 2), 115.0)];
        assert!((check(&rates, Some((512, 2))) - 0.15).abs() < 1e-9);
        check(&[((32, 3), 130.0), ((256, 3), 100.0)], Some((32, 3)));
    }
}
