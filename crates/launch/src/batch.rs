//! The best batch, number of flights and chunk of prefill for a job on this machine.

use crate::error::LaunchError;
use crate::expected::Expected;
use crate::news::{LaunchNews, Tell};
use crate::opened::Opened;
use crate::profiler::{ProfileEffort, take_profile};
use crate::profiles::keep_profile;
use crate::resolved::Resolved;
use crate::specification::Specification;
use glinthawk_cluster::Layout;
use glinthawk_plan::{Deployment, Shape};

/// Parameters times tokens from which on a job takes longer than a brief profile of the machine, by far.
const WORK_PROFILED: f64 = 2e13;
/// Batches that are weighed against each other, on CPUs and on a GPU.
const BATCHES: [u32; 6] = [32, 64, 128, 256, 512, 1024];
const GPU_BATCHES: [u32; 5] = [512, 1024, 2048, 4096, 8192];
/// Flights for each Tier-1 node of a cluster that are weighed against each other.
const FLIGHTS: [u32; 4] = [1, 2, 3, 4];
/// Prefill rows of one prompt in a step that are weighed against each other.
const CHUNKS: [u32; 6] = [64, 128, 256, 512, 1024, 2048];
/// A gain below this is not worth another shape than the usual one.
const GAIN_MIN: f64 = 0.02;
/// The same of another chunk. The times of attention that it depends on vary more than those of products.
const CHUNK_GAIN_MIN: f64 = 0.05;

/// How the rows of a job stand in batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobShape {
    /// Rows of a flight on each lane.
    pub batch: u32,
    /// Flights.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
}

impl JobShape {
    /// The specification with this shape.
    pub fn of(self, specification: Specification) -> Specification {
        let Self { batch, flights, chunk } = self;
        let (batch, flights, chunk) = (Some(batch), Some(flights), Some(chunk));
        Specification { batch, flights, chunk, ..specification }
    }
}

/// A shape that promises more than the usual one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BetterShape {
    /// The shape.
    pub better: JobShape,
    /// The usual one.
    pub usual: JobShape,
    /// How many more tokens per second, as a part of the usual ones.
    pub gain: f64,
}

/// Finds a better shape than the usual one for a job on this machine, in what the specification leaves open, where a
/// profile promises more. Takes a profile first where there is none and the job is worth it; a GPU would be done before
/// its profile.
///
/// Which processes there are is not weighed: on one machine, tiers that share its cores and memory only add messages.
pub fn better_shape(
    expected: &Expected,
    opened: &Opened,
    specification: &Specification,
    tell: Tell<'_>,
) -> Result<Option<BetterShape>, LaunchError> {
    let batch_open = specification.batch.is_none() && specification.flights.is_none();
    let chunk_open = specification.chunk.is_none();
    let alone = specification.topology.is_one_process();
    let elsewhere = specification.topology.listen.is_some();
    if !(batch_open || chunk_open) || elsewhere || (opened.has_gpu() && !alone) {
        return Ok(None);
    }
    let crowd = expected.crowd();
    // What cannot be resolved cannot be launched either, and that is where it is reported.
    let Ok(resolved) = Resolved::new(specification, opened, crowd) else { return Ok(None) };
    if resolved.deployment(opened).is_none() {
        let shape = Shape::of(opened.model.name(), opened.model.config());
        let work = shape.model_bytes() / 2.0 * expected.tokens();
        if opened.device.is_some() || work < WORK_PROFILED {
            return Ok(None);
        }
        tell(LaunchNews::NoProfile);
        let threads = resolved.strand_threads();
        let profile = take_profile(opened, resolved.isa, threads, &ProfileEffort::brief(), tell)?;
        keep_profile(opened.model.config(), &profile)?;
    }
    let Some(deployment) = resolved.deployment(opened) else { return Ok(None) };
    let usual_rate = expected.forecast(&deployment).tokens_per_second();
    let rate = |shape: JobShape| {
        let specification = shape.of(specification.clone());
        let deployment = Resolved::new(&specification, opened, crowd).ok()?.deployment(opened)?;
        let is_known = rows_max(&deployment) <= deployment.tier1.knots().last().copied()?;
        is_known.then(|| expected.forecast(&deployment).tokens_per_second())
    };
    let Layout { batch, flights, chunk, slices, .. } = resolved.layout;
    let usual = JobShape { batch, flights, chunk };
    let mut best = (usual, usual_rate);
    // Flights on shared cores meet less often than a forecast thinks. And one node that attends for itself has nothing to
    // wait for.
    let attends_alone = alone || resolved.layout.own_first && slices == 1;
    if batch_open && !attends_alone && !resolved.layout.shares_cores {
        let flights = FLIGHTS.map(|flights| flights * slices as u32);
        let shapes = flights.map(|flights| JobShape { flights, ..usual });
        best = better(best, shapes, GAIN_MIN, rate);
    }
    if batch_open {
        let batches = if opened.device.is_some() { &GPU_BATCHES[..] } else { &BATCHES };
        let shapes = batches.iter().map(|&batch| JobShape { batch, ..best.0 });
        best = better(best, shapes, GAIN_MIN, rate);
    }
    if chunk_open {
        let rows_max = expected.longest().min(deployment.tier1.chunk_max());
        best = better(best, chunks(best.0, rows_max), CHUNK_GAIN_MIN, rate);
    }
    let (better, gain) = (best.0, best.1 / usual_rate - 1.0);
    Ok((better != usual).then_some(BetterShape { better, usual, gain }))
}

/// The most rows of a flight in Tier 1: those of all lanes that have prompts.
fn rows_max(deployment: &Deployment) -> usize {
    let lanes = if deployment.own_first.is_some() { 1 } else { deployment.lanes() };
    deployment.batch as usize * lanes
}

/// The shape with the best rate, if that is worth another shape than the one so far.
fn better(
    so_far: (JobShape, f64),
    shapes: impl IntoIterator<Item = JobShape>,
    gain_min: f64,
    rate: impl Fn(JobShape) -> Option<f64>,
) -> (JobShape, f64) {
    let others = shapes.into_iter().filter(|shape| *shape != so_far.0);
    let rates = others.filter_map(|shape| Some((shape, rate(shape)?)));
    let best = rates.max_by(|one, other| one.1.total_cmp(&other.1));
    best.filter(|(_, rate)| rate / so_far.1 - 1.0 >= gain_min).unwrap_or(so_far)
}

/// The shape with other chunks, if no chunk has more than so many rows.
fn chunks(shape: JobShape, rows_max: usize) -> Vec<JobShape> {
    let rows = |chunk: u32| (chunk.min(shape.batch) as usize).min(rows_max);
    let mut chunks = CHUNKS.to_vec();
    chunks.dedup_by_key(|chunk| rows(*chunk));
    chunks.retain(|chunk| rows(*chunk) != rows(shape.chunk));
    chunks.into_iter().map(|chunk| JobShape { chunk, ..shape }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: u32, flights: u32, chunk: u32) -> JobShape {
        JobShape { batch, flights, chunk }
    }

    #[test]
    fn another_shape_must_be_worth_it() {
        let usual = shape(256, 3, 256);
        let check = |rates: &[(u32, u32, f64)], expected: (u32, u32)| {
            let shapes = rates.iter().map(|(batch, flights, _)| shape(*batch, *flights, 256));
            let rate = |wanted: JobShape| {
                let same = |(batch, flights, _): &&(u32, u32, f64)| {
                    (*batch, *flights) == (wanted.batch, wanted.flights)
                };
                rates.iter().find(same).map(|(_, _, rate)| *rate).filter(|rate| *rate > 0.0)
            };
            let found = better((usual, 100.0), shapes, GAIN_MIN, rate).0;
            assert_eq!(found, shape(expected.0, expected.1, 256), "{rates:?}");
        };
        check(&[], (256, 3));
        check(&[(128, 3, 99.0), (512, 3, 101.9)], (256, 3));
        check(&[(128, 3, 90.0), (512, 2, 115.0), (1024, 2, 0.0)], (512, 2));
        check(&[(32, 3, 130.0), (256, 3, 150.0)], (32, 3));
    }

    #[test]
    fn chunks_that_make_no_difference_are_not_weighed() {
        let check = |batch: u32, rows_max: usize, expected: &[u32]| {
            let found: Vec<u32> =
                chunks(shape(batch, 1, 256), rows_max).iter().map(|shape| shape.chunk).collect();
            assert_eq!(found, expected, "batches of {batch}, {rows_max} rows");
        };
        check(4096, 10_000, &[64, 128, 512, 1024, 2048]);
        check(512, 10_000, &[64, 128, 512]);
        check(128, 10_000, &[64]);
        check(512, 100, &[64]);
        check(512, 60, &[]);
        check(1024, 300, &[64, 128, 512]);
    }
}
