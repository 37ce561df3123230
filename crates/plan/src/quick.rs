//! What a job takes on a candidate without running it: an estimate to rank by, and a time that no run falls below.

use crate::candidate::Candidate;
use crate::kernels::KernelTimes;
use crate::space::{Site, Space};
use crate::workload::{Length, Workload};
use std::collections::VecDeque;

/// Prompts for each seat that an estimate goes through; the rest of a longer job follows at the same pace.
const PROMPTS_PER_SEAT: usize = 8;

/// Events of a forecast for each visit of a shard to a layer.
const EVENTS_PER_VISIT: f64 = 5.0;

/// A job in chunks on a space.
pub(crate) struct Quick<'a> {
    space: &'a Space,
    /// What is certainly computed of it.
    workload: Workload,
    chunk: usize,
    /// Seconds of one layer's attention of the whole job on Tier 1, then on each kind of Tier-2 node; zero where
    /// nothing certain is known.
    attention_seconds: Vec<f64>,
}

/// Attention workers of each slice.
pub(crate) fn lanes(candidate: &Candidate) -> usize {
    candidate.tier2 + usize::from(candidate.local_rows > 0)
}

impl<'a> Quick<'a> {
    pub fn new(space: &'a Space, workload: &Workload, chunk: usize) -> Self {
        let workload = workload.computed();
        let pools = std::iter::once(&space.cluster.tier1).chain(&space.cluster.tier2);
        let attention_seconds =
            pools.map(|pool| attention_seconds_least(&pool.kernels, &workload, chunk)).collect();
        Self { space, workload, chunk, attention_seconds }
    }

    /// Prompts that the memory of a candidate's lane seats.
    pub fn seats(site: &Site, candidate: &Candidate) -> usize {
        match (candidate.tier2, candidate.local_rows) {
            (0, _) => site.seats_tier1,
            (_, 0) => site.seats_tier2,
            // All attention workers are given as much memory as the one with the least.
            _ => site.seats_tier1.min(site.seats_tier2),
        }
    }

    /// Seconds of the job, step after step.
    pub fn seconds(&self, site: &Site, candidate: &Candidate) -> f64 {
        let lanes = lanes(candidate);
        let rows_max = lanes * candidate.batch * candidate.flights;
        let seats = rows_max.min(lanes * Self::seats(site, candidate)).max(1);
        let times = StepSeconds::of(self.space, site, candidate, rows_max);
        let all = self.workload.lengths();
        let count = all.len().min(PROMPTS_PER_SEAT * seats.max(16));
        let lengths = (0..count).map(|index| all[index * all.len() / count]);
        let rows: f64 = lengths.clone().map(|length| length.rows() as f64).sum();
        let seconds = run(lengths, self.chunk, seats, rows_max, |rows| times.at(rows));
        seconds * self.workload.rows() / rows
    }

    /// Events that a forecast of the candidate takes, roughly.
    pub fn events(&self, site: &Site, candidate: &Candidate) -> f64 {
        let all = self.workload.lengths();
        let lanes = lanes(candidate);
        let seats = lanes * candidate.batch * candidate.flights;
        // Of a long job, a forecast runs through parts.
        let share = (12 * seats.max(16)) as f64 / all.len() as f64;
        let steps: f64 = all.iter().map(|length| length.steps(self.chunk) as f64).sum();
        let shards = (lanes * candidate.flights) as f64;
        let longest = self.workload.steps_max(self.chunk) as f64;
        let full = steps * share.min(1.0) / candidate.batch as f64;
        let shard_steps = (full + shards * longest / 2.0).min(steps);
        EVENTS_PER_VISIT * shard_steps * site.slices.iter().sum::<usize>() as f64
    }

    /// Seconds that no run falls below: the busiest nodes' work in the largest batches, and the longest prompt's way
    /// with nobody before it.
    pub fn seconds_least(&self, site: &Site, candidate: &Candidate) -> f64 {
        let (space, lanes) = (self.space, lanes(candidate));
        let table = &space.tier1;
        let rows = self.workload.rows();
        let layers = site.slices[0] as f64;
        let single_tier = candidate.tier2 == 0;
        let [pre, fused, post] = table.least_row_seconds[lanes * candidate.batch];
        let inside = if single_tier { layers * self.attention_seconds[0] } else { 0.0 };
        let tier1 = rows * (pre + (layers - 1.0) * fused + post) + inside;
        let tier2 = match (single_tier, candidate.local_rows) {
            (false, 0) => layers * self.attention_seconds[1 + candidate.pool] / lanes as f64,
            _ => 0.0,
        };
        tier1.max(tier2).max(self.longest_seconds(site, candidate))
    }

    /// The longest prompt alone: its steps, each through all layers.
    fn longest_seconds(&self, site: &Site, candidate: &Candidate) -> f64 {
        let space = self.space;
        let [pre, fused, post] = space.tier1.least_seconds;
        let (layers, slices) = (space.job.shape.layers as f64, site.tier1 as f64);
        let weights = slices * (pre + post) + (layers - slices) * fused;
        let remote = candidate.tier2 > 0 && candidate.local_rows == 0;
        let between = if remote { layers * space.cluster.inter.rtt_seconds } else { 0.0 };
        let hops =
            if site.tier1 > 1 { slices * space.cluster.tier1.link.rtt_seconds / 2.0 } else { 0.0 };
        self.workload.steps_max(self.chunk) as f64 * (weights + between + hops)
    }
}

/// Seconds of one layer's attention of a whole job at least; zero where kernels were measured, because what they take
/// in one batch says nothing certain about another.
fn attention_seconds_least(kernels: &KernelTimes, workload: &Workload, chunk: usize) -> f64 {
    if let KernelTimes::Measured(_) = kernels {
        return 0.0;
    }
    let of = |length: &Length| {
        let whole = (1..=length.prompt / chunk).map(|count| (chunk, count * chunk));
        let rest = Some((length.prompt % chunk, length.prompt)).filter(|(rows, _)| *rows > 0);
        let prefill =
            whole.chain(rest).map(|(rows, end)| kernels.prefill_seconds(rows, end as f64));
        let generating = (length.rows() - length.prompt) as f64;
        let positions = generating * (length.prompt + 1 + length.rows()) as f64 / 2.0;
        // Linear in positions, whoever attends to them.
        prefill.sum::<f64>() + kernels.attention_seconds(1, positions)
    };
    workload.lengths().iter().map(of).sum()
}

/// Seconds of a step by the rows in the air, known at some and linear between them.
struct StepSeconds {
    known: Vec<(f64, f64)>,
}

impl StepSeconds {
    fn of(space: &Space, site: &Site, candidate: &Candidate, rows_max: usize) -> Self {
        let ladder = std::iter::successors(Some(1), |&rows| Some(rows * 2));
        let below = ladder.take_while(|&rows| rows < rows_max);
        let at = |rows: usize| (rows as f64, step_seconds(space, site, candidate, rows));
        Self { known: below.chain([rows_max]).map(at).collect() }
    }

    fn at(&self, rows: usize) -> f64 {
        let rows = rows as f64;
        let above = self.known.partition_point(|(known, _)| *known < rows);
        let (high, at_high) = self.known[above.min(self.known.len() - 1)];
        if above == 0 || high <= rows {
            return at_high;
        }
        let (low, at_low) = self.known[above - 1];
        at_low + (at_high - at_low) * (rows - low) / (high - low)
    }
}

/// Seconds in which `rows` rows, spread over all flights, go through all layers: what the busiest node or link takes
/// for all flights, or what one flight's way takes. Tier 1 computes a flight at a time: the shards of one flight mostly
/// meet there again, those of two mostly do not.
fn step_seconds(space: &Space, site: &Site, candidate: &Candidate, rows: usize) -> f64 {
    let lanes = lanes(candidate);
    let flights = candidate.flights.min(rows.div_ceil(lanes));
    let (flight, shard) = (rows.div_ceil(flights), rows.div_ceil(flights * lanes));
    let (shape, traffic, cluster) = (&space.job.shape, space.settings.traffic, &space.cluster);
    let (table, layers) = (&space.tier1, shape.layers as f64);
    let (slices, longest) = (site.tier1 as f64, site.slices[0] as f64);
    let fused = table.fused_seconds[flight];
    let ends = table.pre_seconds[flight] + table.post_seconds[flight] - fused;
    let local = if candidate.local_rows > 0 { table.attention_seconds[shard] } else { 0.0 };
    let classify = table.classify_seconds[shard.min(flight)];
    let tier1 = longest * (fused + local) + ends + classify;
    let mut away = layers * local;
    let mut busiest = tier1;
    if candidate.tier2 > 0 {
        let pool = &cluster.tier2[candidate.pool];
        let attend = space.tier2[candidate.pool].attention_seconds[shard];
        let (out, back) = (traffic.out_bytes(shape), traffic.back_bytes(shape));
        let remote = (flight * candidate.tier2) as f64 / lanes as f64;
        let near = remote * out.max(back) / cluster.inter.bandwidth;
        let far = shard as f64 * out.max(back) / pool.link.bandwidth;
        busiest = busiest.max(longest * attend.max(near).max(far));
        let shard_near = shard as f64 * out.max(back) / cluster.inter.bandwidth;
        away = away.max(layers * (attend + cluster.inter.rtt_seconds + 2.0 * far.max(shard_near)));
    }
    let hop = flight as f64 * traffic.hop_bytes(shape) / cluster.tier1.link.bandwidth;
    let hops = (slices - 1.0) * hop + slices * cluster.tier1.link.rtt_seconds / 2.0;
    let way =
        layers * fused + slices * ends + classify + away + if slices > 1.0 { hops } else { 0.0 };
    way.max(flights as f64 * busiest.max(hop))
}

/// Seats prompts and takes steps until all are through: in each, a row of every prompt that generates, and as many
/// rows of prefill as there is room for.
fn run(
    mut lengths: impl Iterator<Item = Length>,
    chunk: usize,
    seats: usize,
    rows_max: usize,
    seconds_of: impl Fn(usize) -> f64,
) -> f64 {
    let (mut seconds, mut seated, mut generating) = (0.0, 0, 0);
    // Rows that are still to come and tokens to generate, of those in prefill.
    let mut prefill: VecDeque<(usize, usize)> = VecDeque::new();
    // How many prompts end in this step, the next one, and so on.
    let mut ends: VecDeque<usize> = VecDeque::new();
    loop {
        while seated < seats {
            let Some(length) = lengths.next() else { break };
            prefill.push_back((length.prompt, length.output));
            seated += 1;
        }
        if seated == 0 {
            return seconds;
        }
        let mut rows = generating;
        let ending = ends.pop_front().unwrap_or(0);
        (seated, generating) = (seated - ending, generating - ending);
        let mut waiting = VecDeque::new();
        while let Some((left, output)) = prefill.pop_front() {
            let taken = left.min(chunk).min(rows_max - rows);
            if taken == 0 {
                prefill.push_front((left, output));
                break;
            }
            rows += taken;
            match (left - taken, output - 1) {
                (0, 0) => seated -= 1,
                (0, more) => {
                    generating += 1;
                    if ends.len() < more {
                        ends.resize(more, 0);
                    }
                    ends[more - 1] += 1;
                }
                (left, _) => waiting.push_back((left, output)),
            }
        }
        while let Some(prompt) = waiting.pop_back() {
            prefill.push_front(prompt);
        }
        seconds += seconds_of(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_as_prompts_take_them() {
        let length = |prompt, output| Length { prompt, output, ..Length::default() };
        for (lengths, chunk, seats, rows_max, steps, rows) in [
            // One prompt: its chunks, then a row for every further token.
            (vec![length(10, 3)], 4, 1, 8, 5, 12),
            (vec![length(1, 1)], 4, 1, 8, 1, 1),
            // Two seats: both at once; one seat: one after the other.
            (vec![length(4, 3); 2], 4, 2, 8, 3, 12),
            (vec![length(4, 3); 2], 4, 1, 8, 6, 12),
            // Room for half of the input at a time.
            (vec![length(4, 3); 2], 4, 2, 4, 5, 12),
        ] {
            let counted = std::cell::Cell::new((0, 0));
            let count = |more: usize| {
                let (steps, rows) = counted.get();
                counted.set((steps + 1, rows + more));
                1.0
            };
            let seconds = run(lengths.into_iter(), chunk, seats, rows_max, count);
            assert_eq!(counted.get(), (steps, rows));
            assert_eq!(seconds, f64::from(steps));
        }
    }
}
