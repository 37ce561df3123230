//! What a run measured.

use super::Machine;
use crate::bound::Bottleneck;
use crate::program::Lane;

/// Sums over the measured steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Steps and their nanoseconds, by lane.
    pub(super) steps: Vec<(u64, u64)>,
    /// Nanoseconds of shards in Tier-1 batches and in attention.
    pub(super) tier1_ns: u64,
    pub(super) tier2_ns: u64,
}

/// What a run measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Rows per second; never above the bound if nothing is random.
    pub rows_per_second: f64,
    /// Mean seconds of a step: the time per token.
    pub step_seconds: f64,
    /// Seconds of a step in Tier-1 batches.
    pub tier1_seconds: f64,
    /// Seconds of a step in attention on Tier 2.
    pub tier2_seconds: f64,
    /// Fraction of time that each Tier-1 node is busy.
    pub tier1_busy: Vec<f64>,
    /// The same for each Tier-2 node, slice by slice.
    pub tier2_busy: Vec<f64>,
    /// The same for each Tier-1 node's outgoing inter-tier link.
    pub link_busy: Vec<f64>,
    /// Events processed.
    pub events: u64,
    /// What no run exceeds.
    pub bound: f64,
    /// The limit that the bound names.
    pub bottleneck: Bottleneck,
}

impl Machine<'_> {
    pub(super) fn start_measuring(&mut self) {
        for node in &mut self.tier1 {
            (node.busy_ns, node.out_ns) = (0, 0);
        }
        self.tier2.iter_mut().for_each(|worker| worker.busy_ns = 0);
        self.tally = Tally { steps: vec![(0, 0); self.lanes], ..Tally::default() };
    }

    pub(super) fn outcome(&self, seconds: f64) -> Outcome {
        let program = self.program;
        let lanes = program.lanes.iter().zip(&self.tally.steps);
        // Little's law, lane by lane: it is steadier than counting what comes home within a window.
        let rate = |(lane, &(steps, ns)): (&Lane, &(u64, u64))| {
            if steps == 0 {
                return 0.0;
            }
            (program.flights * lane.rows) as f64 * steps as f64 / (ns as f64 * 1e-9)
        };
        let mut rows_per_second: f64 = lanes.map(rate).sum();
        let (bound, bottleneck) = program.bound();
        // A short run may drain what a transient piled up, but a settled one cannot beat its busiest resource.
        if program.is_deterministic() {
            rows_per_second = rows_per_second.min(bound);
        }
        let share = |ns: u64| (ns as f64 * 1e-9 / seconds).min(1.0);
        let remote = |worker: &usize| !program.lanes[worker % self.lanes].local;
        let workers = (0..self.tier2.len()).filter(remote);
        let steps: u64 = self.tally.steps.iter().map(|(steps, _)| steps).sum();
        let per_step = |ns: u64| ns as f64 * 1e-9 / steps as f64;
        Outcome {
            rows_per_second,
            step_seconds: per_step(self.tally.steps.iter().map(|(_, ns)| ns).sum()),
            tier1_seconds: per_step(self.tally.tier1_ns),
            tier2_seconds: per_step(self.tally.tier2_ns),
            tier1_busy: self.tier1.iter().map(|node| share(node.busy_ns)).collect(),
            tier2_busy: workers.map(|worker| share(self.tier2[worker].busy_ns)).collect(),
            link_busy: self.tier1.iter().map(|node| share(node.out_ns)).collect(),
            events: self.handled,
            bound,
            bottleneck,
        }
    }
}
