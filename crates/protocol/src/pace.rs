//! What a Tier-1 node knows of its own pace: how long its batches take, learned from them, and whether it has time to
//! spare.

use std::collections::BTreeMap;

/// Batches after which older ones count less.
const BATCHES_COUNTED: u32 = 256;
/// Leading bits of a number of rows by which batches are told apart.
const ROWS_BITS: u32 = 4;

/// A kind of batch: entering the slice, in the middle, leaving it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// Pre-attention of the first layer.
    Enter,
    /// Post-attention of a layer and pre-attention of the next.
    Middle,
    /// Post-attention of the last layer, and perhaps classification.
    Exit,
}

/// A node's pace.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    times: [BatchTimes; 3],
    /// What the shards of recent batches would have taken, each by itself.
    alone_ns: u64,
    since_ns: u64,
    batches: u32,
}

impl Pace {
    /// Counts a batch that starts now, with shards of so many rows.
    pub fn start(&mut self, kind: BatchKind, now_ns: u64, shards: impl Iterator<Item = usize>) {
        let times = &self.times[kind as usize];
        // Shards are mostly alike.
        let mut last = (0, 0);
        for rows in shards {
            if rows != last.0 {
                last = (rows, times.ns(rows));
            }
            self.alone_ns += last.1;
        }
        if self.batches == 0 {
            self.since_ns = now_ns;
        }
        self.batches += 1;
        if self.batches == BATCHES_COUNTED {
            self.batches /= 2;
            self.alone_ns /= 2;
            self.since_ns += now_ns.saturating_sub(self.since_ns) / 2;
        }
    }

    /// Learns how long a batch took.
    pub fn learn(&mut self, kind: BatchKind, rows: usize, ns: u64) {
        self.times[kind as usize].learn(rows, ns);
    }

    /// Whether there has been time enough to compute every shard by itself. Then nothing is gained by fuller batches.
    pub fn has_time_to_spare(&self, now_ns: u64) -> bool {
        self.alone_ns <= now_ns.saturating_sub(self.since_ns)
    }

    /// What one batch takes less than two of so many rows: at most what the shorter one takes. More rows may have taken less
    /// time than fewer did, such as prompts that end in no token and need no classifier.
    pub fn saved_ns(&self, kind: BatchKind, one: usize, other: usize) -> u64 {
        let times = &self.times[kind as usize];
        let (one_ns, other_ns) = (times.ns(one), times.ns(other));
        let saved_ns = (one_ns + other_ns).saturating_sub(times.ns(one + other));
        saved_ns.min(one_ns).min(other_ns)
    }
}

/// Nanoseconds of batches by their rows, as they were seen.
#[derive(Clone, Debug, Default)]
struct BatchTimes(BTreeMap<u64, u64>);

impl BatchTimes {
    /// Few enough numbers to remember, and near enough to the rows.
    fn rounded(rows: usize) -> u64 {
        let rows = rows as u64;
        let dropped = (u64::BITS - rows.leading_zeros()).saturating_sub(ROWS_BITS);
        rows >> dropped << dropped
    }

    fn learn(&mut self, rows: usize, ns: u64) {
        let known = self.0.entry(Self::rounded(rows)).or_insert(ns);
        *known = (*known * 3 + ns) / 4;
    }

    /// Nanoseconds of a batch: on a line between those that were seen. Beyond them it is in proportion to its rows, so
    /// that merging promises nothing until smaller batches were seen.
    fn ns(&self, rows: usize) -> u64 {
        let rows = Self::rounded(rows);
        let below = self.0.range(..=rows).next_back();
        let above = self.0.range(rows..).next();
        match (below, above) {
            (Some((&fewer, &less)), Some((&more, &most))) if more > fewer => {
                less + most.saturating_sub(less) * (rows - fewer) / (more - fewer)
            }
            (Some((&seen, &ns)), _) | (None, Some((&seen, &ns))) => ns * rows / seen,
            (None, None) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_learned_and_lie_on_lines() {
        let mut times = BatchTimes::default();
        assert_eq!(times.ns(48), 0);
        times.learn(48, 960);
        assert_eq!((times.ns(48), times.ns(16), times.ns(96)), (960, 320, 1920), "in proportion");
        times.learn(16, 640);
        assert_eq!((times.ns(16), times.ns(32), times.ns(8)), (640, 800, 320));
        times.learn(16, 600);
        assert_eq!(times.ns(16), 630, "the latest batches count");
        times.learn(1000, 20_000);
        assert_eq!(times.ns(1001), 20_000, "rows are rounded");
    }

    fn pace(starts: std::ops::Range<u64>, mut pace: Pace) -> Pace {
        for start in starts {
            pace.start(BatchKind::Middle, 5000 + start * 100, [16, 16, 16].into_iter());
        }
        pace
    }

    #[test]
    fn time_to_spare_is_what_shards_by_themselves_would_leave() {
        let mut slow = pace(0..1, Pace::default());
        slow.learn(BatchKind::Middle, 16, 30);
        assert!(pace(1..500, slow.clone()).has_time_to_spare(55_000), "90 of 100");
        slow.learn(BatchKind::Middle, 16, 70);
        assert!(!pace(1..500, slow.clone()).has_time_to_spare(55_000), "120 of 100");
        let idle = pace(10_000..12_000, slow.clone());
        assert!(!idle.has_time_to_spare(1_205_000), "what is long past is forgotten");
        slow.learn(BatchKind::Middle, 48, 48);
        assert_eq!(slow.saved_ns(BatchKind::Middle, 16, 32), 40 + 44 - 48);
        assert_eq!(slow.saved_ns(BatchKind::Exit, 16, 32), 0, "nothing is known of it");
        slow.learn(BatchKind::Exit, 64, 1000);
        slow.learn(BatchKind::Exit, 512, 10);
        assert_eq!(slow.saved_ns(BatchKind::Exit, 64, 448), 1000, "no more than a batch takes");
    }
}
