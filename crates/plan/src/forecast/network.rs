//! What a forecast's parcels cross: links of attention workers, ports of Tier-1 nodes, hops between slices.

use super::Deployment;
use crate::calculus::RowTraffic;
use crate::shape::Shape;
use glinthawk_flight::{CONTEXT_ROW_BYTES, HEADER_BYTES};
use glinthawk_protocol::{NodeAddress, Parcel};

/// What a message crosses.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// Nothing: dispatcher and first slice are neighbours.
    Near,
    /// From a slice's Tier-1 node to an attention worker of its, or back.
    Tiers { slice: usize, worker: usize, back: bool },
    /// From a slice to the next.
    Hop { slice: usize },
    /// From the last slice to the dispatcher beside the first: delay without weight.
    Home,
}

impl Way {
    /// The way of a parcel.
    pub fn of(deployment: &Deployment, to: NodeAddress, parcel: &Parcel<()>) -> Self {
        let tiers = |slice: usize, back: bool| {
            let lane = parcel.step().shard.lane as usize;
            Self::Tiers { slice, worker: slice * deployment.lanes() + lane, back }
        };
        match (to, parcel) {
            (NodeAddress::Tier2(slice, _), _) => tiers(slice, false),
            (NodeAddress::Tier1(slice), Parcel::Attended(..)) => tiers(slice, true),
            (NodeAddress::Tier1(0), _) => Self::Near,
            (NodeAddress::Tier1(slice), _) => Self::Hop { slice: slice - 1 },
            (NodeAddress::Dispatcher, _) if deployment.slices.len() == 1 => Self::Near,
            (NodeAddress::Dispatcher, _) => Self::Home,
        }
    }

    /// Bytes of a message with `rows` rows.
    pub fn bytes(self, shape: &Shape, rows: usize) -> f64 {
        let traffic = RowTraffic::ResidualHome;
        let payload = match self {
            Self::Tiers { back: false, .. } => traffic.out_bytes(shape),
            Self::Tiers { back: true, .. } => traffic.back_bytes(shape),
            Self::Hop { .. } => traffic.hop_bytes(shape),
            Self::Near | Self::Home => 0.0,
        };
        HEADER_BYTES as f64 + rows as f64 * (CONTEXT_ROW_BYTES as f64 + payload)
    }
}

/// When everything that messages cross is free.
pub(super) struct Network {
    /// Each attention worker's link, out and back; (slice, lane), row-major.
    links_free_seconds: Vec<[f64; 2]>,
    /// Each Tier-1 node's port to Tier 2, out and back.
    ports_free_seconds: Vec<[f64; 2]>,
    /// Each slice's link to the next.
    hops_free_seconds: Vec<f64>,
}

impl Network {
    pub fn new(slices: usize, lanes: usize) -> Self {
        Self {
            links_free_seconds: vec![[0.0; 2]; slices * lanes],
            ports_free_seconds: vec![[0.0; 2]; slices],
            hops_free_seconds: vec![0.0; slices],
        }
    }

    /// When what leaves now arrives: `bytes` bytes, in `count` messages one after another.
    pub fn cross(
        &mut self,
        deployment: &Deployment,
        way: Way,
        now_seconds: f64,
        bytes: f64,
        count: f64,
    ) -> f64 {
        let Deployment { delay_seconds, bandwidth, port, hop, .. } = deployment;
        match way {
            Way::Near => now_seconds,
            Way::Home => now_seconds + hop.rtt_seconds / 2.0,
            Way::Hop { slice } => {
                let free = &mut self.hops_free_seconds[slice];
                *free = free.max(now_seconds) + bytes / hop.bandwidth;
                *free + hop.rtt_seconds / 2.0
            }
            // What leaves one end arrives at the other at once: the slower end decides.
            Way::Tiers { slice, worker, back } => {
                let near = &mut self.ports_free_seconds[slice][usize::from(back)];
                let far = &mut self.links_free_seconds[worker][usize::from(back)];
                let begins = if back { far.max(now_seconds) } else { near.max(now_seconds) };
                *near = near.max(begins) + bytes / port;
                *far = far.max(begins) + bytes / bandwidth;
                near.max(*far) + count * delay_seconds
            }
        }
    }
}
