//! What a candidate reaches at most, in closed form.
//!
//! This is [`Program::bound`](crate::program::Program::bound) for like nodes: no simulation of the same candidate
//! exceeds it, which is what makes pruning by it sound.

use crate::configuration::Rules;
use crate::kernels::Kernels;
use crate::program::Bottleneck;
use crate::space::{Candidate, Site, Space};

/// Kernel times of a pool for every batch.
#[derive(Debug)]
pub(crate) struct Table {
    pre: Vec<f64>,
    post: Vec<f64>,
    fused: Vec<f64>,
    classify: Vec<f64>,
    attention: Vec<f64>,
}

impl Table {
    pub fn of(kernels: &Kernels, rows_max: usize, context: f64) -> Self {
        let over = |time: &dyn Fn(usize) -> f64| (0..=rows_max).map(time).collect();
        Self {
            pre: over(&|rows| kernels.pre(rows)),
            post: over(&|rows| kernels.post(rows)),
            fused: over(&|rows| kernels.fused(rows)),
            classify: over(&|rows| kernels.classify(rows)),
            attention: over(&|rows| kernels.attention(rows, context)),
        }
    }
}

impl Space {
    /// Rows per second that no simulation of the candidate exceeds, and what sets the limit.
    pub fn estimate(&self, site: &Site, candidate: &Candidate) -> (f64, Bottleneck) {
        let (rows, nodes) = (candidate.rows(), site.tier1 as f64);
        let paper = self.settings.rules == Rules::Paper;
        let single_tier = candidate.tier2 == 0;
        let (most, last) = (site.slices[0] as f64, site.slices[site.tier1 - 1] as f64);
        let (shape, traffic, layers) =
            (&self.job.shape, self.settings.traffic, self.job.shape.layers as f64);
        let local = self.tier1.attention[candidate.local_rows];
        let (pre, post) = (self.tier1.pre[rows], self.tier1.post[rows]);
        let (fused, classify) = if paper {
            (pre + post, 0.0)
        } else {
            (self.tier1.fused[rows], self.tier1.classify[rows])
        };
        let compute = |layers: f64| pre + post + (layers - 1.0) * fused + layers * local;
        // The heaviest node: one with the most layers, or the last one, which classifies.
        let tier1 = if site.tier1 > 1 {
            compute(most).max(compute(last) + classify)
        } else {
            compute(last) + classify
        };
        let link = &self.cluster.tier1.link;
        let hop = traffic.hop_bytes(shape) * rows as f64 / link.bandwidth;
        let (hop_busy, hop_pass) = match (paper, single_tier) {
            (true, true) => (hop, nodes * (hop + link.rtt / 2.0)),
            (true, false) => (0.0, 0.0),
            _ if site.tier1 == 1 => (0.0, 0.0),
            _ => (hop, (nodes - 1.0) * hop + nodes * link.rtt / 2.0),
        };
        let weights = nodes * (pre + post) + (layers - nodes) * fused + classify + hop_pass;
        let mut slowest = (0.0, Bottleneck::Tier1Compute);
        let mut consider = |seconds: f64, what| {
            if seconds > slowest.0 {
                slowest = (seconds, what);
            }
        };
        consider(tier1, Bottleneck::Tier1Compute);
        consider(hop_busy, Bottleneck::HopLink);
        if single_tier {
            consider((weights + layers * local) / candidate.flights as f64, Bottleneck::Latency);
            return (rows as f64 / slowest.0, slowest.1);
        }
        let attend = self.tier2[candidate.pool].attention[candidate.batch];
        let shard = candidate.batch as f64;
        let (out, back) = (shard * traffic.out_bytes(shape), shard * traffic.back_bytes(shape));
        let (near, far) =
            (self.cluster.inter.bandwidth, self.cluster.tier2[candidate.pool].link.bandwidth);
        let copies = candidate.tier2 as f64;
        let sent = copies * out / near;
        let extra = (out / far - out / near).max(0.0);
        let reply = if paper { copies * back / near } else { (back / near).max(back / far) };
        consider(most * attend, Bottleneck::Tier2Compute);
        consider(most * sent.max(copies * back / near), Bottleneck::InterTierLink);
        if !paper {
            consider(most * (out / near + extra).max(back / far), Bottleneck::Tier2Link);
        }
        let remote = sent + extra + reply + self.cluster.inter.rtt + attend;
        let fan = if paper { local + remote } else { local.max(remote) };
        consider((weights + layers * fan) / candidate.flights as f64, Bottleneck::Latency);
        (rows as f64 / slowest.0, slowest.1)
    }
}
