//! A histogram of durations in bounded memory: buckets grow by 1/32, so a percentile is within 3%.

const STEPS_PER_OCTAVE: f64 = 22.0;
const BUCKETS: usize = 64 * STEPS_PER_OCTAVE as usize;

/// Durations in nanoseconds, counted in logarithmic buckets.
#[derive(Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0 }
    }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&mut self, duration_ns: u64) {
        let bucket = (duration_ns.max(1) as f64).log2() * STEPS_PER_OCTAVE;
        self.counts[(bucket.round() as usize).min(BUCKETS - 1)] += 1;
        self.total += 1;
    }

    /// The duration that `percent` of all are at most, in seconds; `None` if nothing was counted.
    pub fn percentile_s(&self, percent: f64) -> Option<f64> {
        if self.total == 0 {
            return None;
        }
        let rank = ((percent / 100.0 * self.total as f64).ceil() as u64).clamp(1, self.total);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|&count| {
            seen += count;
            seen >= rank
        });
        bucket.map(|bucket| (bucket as f64 / STEPS_PER_OCTAVE).exp2() / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_three_percent() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile_s(50.0), None);
        for milliseconds in 1..=1000u64 {
            histogram.record(milliseconds * 1_000_000);
        }
        for percent in [5.0, 50.0, 95.0] {
            let exact_s = percent / 100.0;
            let got_s = histogram.percentile_s(percent).unwrap();
            assert!((got_s / exact_s - 1.0).abs() < 0.03, "p{percent}: {got_s} for {exact_s}");
        }
    }
}
