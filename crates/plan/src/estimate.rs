//! Upper bounds on a candidate, in closed form.
//!
//! This is [`Program::bound`](crate::program::Program::bound) for identical nodes. No simulation of the same
//! candidate exceeds it, so pruning by it is sound.

use crate::bound::{Bottleneck, Demand, Line, Load, Local};
use crate::candidate::Candidate;
use crate::configuration::Rules;
use crate::space::{Site, Space};

impl Space {
    /// Rows per second that no simulation of the candidate exceeds, and what sets the limit.
    pub fn estimate(&self, site: &Site, candidate: &Candidate) -> (f64, Bottleneck) {
        let paper = self.settings.rules.is_paper();
        let single_tier = candidate.tier2 == 0;
        let rows = candidate.rows();
        let layers = self.job.shape.layers as f64;
        // Local rows are a lane of their own, except if there is no other lane and under the paper's rules:
        // then they are inside the stage.
        let local_attention = self.tier1.attention_seconds[candidate.local_rows];
        let inside = if paper || single_tier { local_attention } else { 0.0 };
        let local_lane = !paper && !single_tier && candidate.local_rows > 0;
        let rows_least = match (paper || single_tier, local_lane) {
            (true, _) => rows,
            (false, true) => candidate.batch.min(candidate.local_rows),
            (false, false) => candidate.batch,
        };
        let (hop, hops) = self.hops(site, single_tier);
        let network = |lane_rows: f64| hops.0 * hop * lane_rows + hops.1;
        let mut away = f64::INFINITY;
        let mut remote = None;
        if single_tier {
            away = network(rows as f64);
        } else {
            let (limit, way) = self.remote(site, candidate);
            remote = Some(limit);
            let lane_rows = if paper { rows } else { candidate.batch };
            away = away.min(network(lane_rows as f64) + layers * way);
        }
        let local = local_lane.then(|| {
            let step = network(candidate.local_rows as f64) + layers * local_attention;
            away = away.min(step);
            Local { rows: candidate.local_rows as f64, step_seconds: step }
        });
        let local_seconds = local.map_or(0.0, |local| local_attention / local.rows);
        let loads = self.loads(site, (rows_least, rows), inside, local_seconds);
        let demand = Demand {
            rows: rows as f64,
            rows_least: rows_least as f64,
            flights: candidate.flights as f64,
            loads: &loads,
            away_seconds: away,
            remote,
            local,
            hop_row_seconds: hop,
        };
        demand.limit()
    }

    /// Seconds of a row on a link between slices; for a step, how many links carry weight, and the delays
    /// of all.
    fn hops(&self, site: &Site, single_tier: bool) -> (f64, (f64, f64)) {
        let (link, nodes) = (&self.cluster.tier1.link, site.tier1 as f64);
        let hop = self.settings.traffic.hop_bytes(&self.job.shape) / link.bandwidth;
        match (self.settings.rules, single_tier) {
            (Rules::Paper, true) => (hop, (nodes, nodes * link.rtt_seconds / 2.0)),
            (Rules::Listing, true) => {
                let (layers, most) = (self.job.shape.layers as f64, site.slices[0] as f64);
                (most * hop, (layers / most, layers * link.rtt_seconds / 2.0))
            }
            (Rules::Paper | Rules::Listing, false) => (0.0, (0.0, 0.0)),
            (Rules::Full, _) if site.tier1 == 1 => (0.0, (0.0, 0.0)),
            (Rules::Full, _) => (hop, (nodes - 1.0, nodes * link.rtt_seconds / 2.0)),
        }
    }

    /// The most rows per second that can reach Tier 2, and the seconds of a shard's round trip.
    fn remote(&self, site: &Site, candidate: &Candidate) -> ((f64, Bottleneck), f64) {
        let paper = self.settings.rules.is_paper();
        let (shape, traffic) = (&self.job.shape, self.settings.traffic);
        let pool = &self.cluster.tier2[candidate.pool];
        let (near, far) = (self.cluster.inter.bandwidth, pool.link.bandwidth);
        let most = site.slices[0] as f64;
        let lanes = candidate.tier2 as f64;
        let shard = candidate.batch as f64;
        let attend = self.tier2[candidate.pool].attention_seconds[candidate.batch];
        let (out, back) = (shard * traffic.out_bytes(shape), shard * traffic.back_bytes(shape));
        let mut limits = vec![
            (lanes * shard / (most * attend), Bottleneck::Tier2Compute),
            (shard / (most * out.max(back) / near), Bottleneck::InterTierLink),
        ];
        // The paper's algorithm knows only the Tier-1 node's end of the link, and sends whole flights.
        let transfer = if paper {
            let rows = candidate.rows() as f64 / shard;
            let remote = rows - candidate.local_rows as f64 / shard;
            limits = vec![
                (candidate.rows() as f64 / (most * attend), Bottleneck::Tier2Compute),
                (rows * shard / (most * remote * out.max(back) / near), Bottleneck::InterTierLink),
            ];
            remote * (out + back) / near
        } else {
            limits.push((lanes * shard / (most * out.max(back) / far), Bottleneck::Tier2Link));
            (out + back) / near.min(far)
        };
        let limit = limits.into_iter().min_by(|left, right| left.0.total_cmp(&right.0));
        (limit.expect("there are limits"), transfer + self.cluster.inter.rtt_seconds + attend)
    }

    /// The work of nodes with the most layers, with fewer, and of the last one, which classifies.
    fn loads(&self, site: &Site, rows: (usize, usize), inside: f64, local: f64) -> Vec<Load> {
        let paper = self.settings.rules.is_paper();
        let table = &self.tier1;
        let line = |time: &dyn Fn(usize) -> f64| Line::below(time, rows.0, rows.1, &table.knots);
        let pre = line(&|rows| table.pre_seconds[rows] + inside);
        let post = line(&|rows| table.post_seconds[rows]);
        let fused = if paper {
            line(&|rows| table.pre_seconds[rows] + table.post_seconds[rows] + inside)
        } else {
            line(&|rows| table.fused_seconds[rows] + inside)
        };
        let end = line(&|rows| table.post_seconds[rows] + table.classify_seconds[rows]);
        let load = |nodes: usize, layers: usize, last: bool| {
            let mut load = Load::new(nodes as f64, layers as f64 * local);
            if paper {
                load.add(fused, layers as f64);
            } else {
                load.add(pre, 1.0);
                load.add(fused, layers as f64 - 1.0);
                load.add(if last { end } else { post }, 1.0);
            }
            load
        };
        let (&last, others) = site.slices.split_last().expect("a site has slices");
        let most = others.iter().take_while(|&&layers| layers == others[0]).count();
        let mut loads = vec![load(1, last, true)];
        if most > 0 {
            loads.push(load(most, others[0], false));
        }
        if most < others.len() {
            loads.push(load(others.len() - most, others[most], false));
        }
        loads
    }
}
