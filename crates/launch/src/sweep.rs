//! Means and spreads of kernels that are timed in turns.

use glinthawk_plan::profile::{Curve, Point};
use std::time::{Duration, Instant};

/// Kernels shorter than this are timed several at a time.
const SAMPLE: Duration = Duration::from_millis(2);

/// How many neighbouring batches on either side show how much the machine was slowed.
const NEIGHBOURS: usize = 3;

/// How long kernels are timed, and how often.
#[derive(Clone, Copy)]
pub(crate) struct Turns {
    /// For all batches together.
    pub time: Duration,
    /// The fewest samples of each batch, even if time runs out.
    pub samples_min: usize,
    /// The most repetitions in one sample.
    pub times_max: usize,
    /// Whether the first run only warms up.
    pub warm: bool,
}

/// Means and spreads of kernels over batches. The batches take turns, so that a slow moment of the machine spoils
/// one sample of each instead of all samples of one. `run` runs a batch several times and returns the mean.
pub(crate) fn sweep<const KERNELS: usize, E>(
    batches: &[usize],
    turns: Turns,
    mut run: impl FnMut(usize, usize, usize) -> Result<f64, E>,
) -> Result<[Curve; KERNELS], E> {
    let started = Instant::now();
    let mut all: Vec<[Vec<f64>; KERNELS]> =
        batches.iter().map(|_| std::array::from_fn(|_| Vec::new())).collect();
    let mut taken = 0;
    while !batches.is_empty() && (taken < turns.samples_min || started.elapsed() < turns.time) {
        for (&rows, samples) in batches.iter().zip(&mut all) {
            for (kernel, samples) in samples.iter_mut().enumerate() {
                // Run once to warm the caches and to see how many repetitions fill a sample.
                let first = run(rows, kernel, 1)?.max(1e-9);
                let times = (SAMPLE.as_secs_f64() / first).ceil() as usize;
                let times = times.clamp(1, turns.times_max);
                let again = times > 1 || turns.warm;
                samples.push(if again { run(rows, kernel, times)? } else { first });
            }
        }
        taken += 1;
    }
    Ok(std::array::from_fn(|kernel| {
        let samples = all.iter_mut().map(|samples| std::mem::take(&mut samples[kernel])).collect();
        points(batches, samples)
    }))
}

/// A job takes the mean time of its kernels, but the mean of a few samples is unreliable on a shared machine. So a
/// batch gets its best sample, times the average ratio of sample to best sample among neighbouring batches.
fn points(batches: &[usize], mut samples: Vec<Vec<f64>>) -> Curve {
    samples.iter_mut().for_each(|samples| samples.sort_by(f64::total_cmp));
    let over_best =
        |samples: &Vec<f64>| samples.iter().sum::<f64>() / samples.len() as f64 / samples[0];
    let point = |(index, &batch): (usize, &usize)| {
        let around = index.saturating_sub(NEIGHBOURS)..(index + NEIGHBOURS + 1).min(batches.len());
        let slowed =
            samples[around.clone()].iter().map(over_best).sum::<f64>() / around.len() as f64;
        let samples = &samples[index];
        let at = |part: f64| samples[((samples.len() - 1) as f64 * part).round() as usize];
        Point { batch, seconds: samples[0] * slowed, spread: (at(0.75) - at(0.25)) / 2.0 }
    };
    batches.iter().enumerate().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_moment_is_shared_among_its_neighbours() {
        let batches: Vec<usize> = (1..=7).collect();
        // Each batch takes twice as long as the one before, and one sample in seven is three times too
        // slow.
        let mut samples: Vec<Vec<f64>> =
            batches.iter().map(|batch| vec![f64::from(1 << batch); 2]).collect();
        samples[3][1] *= 3.0;
        let curve = points(&batches, samples);
        // The batch in the middle has all seven as neighbours, and one of them took twice its best
        // on average.
        let expected = 16.0 * (6.0 + 2.0) / 7.0;
        assert!((curve[3].seconds - expected).abs() < 1e-9, "{}", curve[3].seconds);
        assert!((curve[0].seconds - 2.0 * (3.0 + 2.0) / 4.0).abs() < 1e-9, "{}", curve[0].seconds);
        assert_eq!(curve[3].spread, 16.0);
    }
}
