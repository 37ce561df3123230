//! How parcels travel: the core that sends, the link, the wait for the receiver's core, the core that receives.

use super::super::network::Way;
use super::super::{Deployment, Place};
use super::{After, Event, Machine};
use glinthawk_protocol::{NodeAddress, Parcel, ShardId};

/// How long a message waits for the network threads at its ends, if strands compute on all cores of their processes: 0.4 to
/// 0.8 ms on 16 cores.
const STRANDS_WAIT_SECONDS: f64 = 0.6e-3;

/// A parcel under way.
pub(super) struct Transit {
    pub(super) to: NodeAddress,
    pub(super) parcel: Parcel<()>,
    pub(super) bytes: f64,
    /// Messages of the real engine that it stands for.
    pub(super) count: f64,
    pub(super) way: Way,
    pub(super) to_core: usize,
}

impl Machine<'_> {
    /// The process that hosts a node; none is the dispatcher.
    pub(super) fn process_of(&self, node: NodeAddress) -> Option<usize> {
        let Deployment { slices, tier2, local_lane, .. } = self.deployment;
        let local = usize::from(*local_lane);
        match node {
            NodeAddress::Dispatcher => None,
            _ if self.in_one_process() => Some(0),
            NodeAddress::Tier1(slice) => Some(slice),
            NodeAddress::Tier2(slice, lane) if (lane as usize) < local => Some(slice),
            NodeAddress::Tier2(slice, lane) => {
                Some(slices.len() + slice * tier2 + lane as usize - local)
            }
        }
    }

    /// Sends a parcel; one within a process is there at once.
    pub(super) fn send(&mut self, from: Option<usize>, to: NodeAddress, parcel: Parcel<()>) {
        let rows = self.shard(parcel.step().shard).rows;
        let receiver = self.process_of(to);
        if from == receiver || self.in_one_process() {
            if receiver.is_some() {
                return self.handle(to, parcel);
            }
            // The dispatcher's own work takes time here too.
            let work = self.dispatching_seconds(rows);
            let way = Way::Near;
            let transit = Transit { to, parcel, bytes: 0.0, count: 1.0, way, to_core: 0 };
            let transit = self.transit(transit);
            return self.urgent(0, work, After::Received(transit));
        }
        let way = Way::of(self.deployment, to, &parcel);
        let count = match way {
            Way::Tiers { slice, .. } => self.grains[slice],
            _ => 1.0,
        };
        let bytes = count * way.bytes(&self.deployment.shape, rows);
        match way {
            Way::Tiers { back: true, .. } => self.forecast.tier2_bytes += bytes,
            _ if from.is_some() => self.forecast.tier1_bytes += bytes,
            _ => {}
        }
        let from_core =
            from.map_or_else(|| self.dispatcher_core(), |process| self.sending_core(process));
        let to_core =
            receiver.map_or_else(|| self.dispatcher_core(), |process| self.receiving_core(process));
        let seconds = self.end_seconds(way, parcel.step().shard, bytes, count);
        let transit = self.transit(Transit { to, parcel, bytes, count, way, to_core });
        self.urgent(from_core, seconds, After::Sent(transit));
    }

    /// Seconds of either end of a shard's messages. While its attention worker's cores read contexts, copies take longer.
    fn end_seconds(&self, way: Way, shard: ShardId, bytes: f64, count: f64) -> f64 {
        let Deployment { tier1, tier2_kernels, .. } = self.deployment;
        let overheads = tier1.overheads();
        let worker = match way {
            Way::Tiers { slice, .. } if !tier2_kernels.on_device() => {
                self.process_of(NodeAddress::Tier2(slice, shard.lane))
            }
            _ => None,
        };
        let byte = match worker.is_some_and(|worker| self.processes[worker].work.is_some()) {
            true => overheads.byte_beside_reading_seconds.max(overheads.byte_seconds),
            false => overheads.byte_seconds,
        };
        let message = match self.deployment.place {
            // Here every message is between two kernels. Processes that are bound to one of several cores rest in between.
            Place::SharedCores(1) => {
                overheads.message_beside_kernels_seconds.max(overheads.message_seconds)
            }
            _ => overheads.message_seconds,
        };
        count * message + byte * bytes
    }

    fn dispatching_seconds(&self, rows: usize) -> f64 {
        let overheads = self.deployment.tier1.overheads();
        overheads.step_seconds + overheads.row_seconds * rows as f64
    }

    fn transit(&mut self, transit: Transit) -> usize {
        let index = self.transits_free.pop().unwrap_or(self.transits.len());
        if index == self.transits.len() {
            self.transits.push(None);
        }
        self.transits[index] = Some(transit);
        index
    }

    fn under_way(&self, index: usize) -> &Transit {
        self.transits[index].as_ref().expect("a parcel under way")
    }

    pub(super) fn sent(&mut self, index: usize) {
        let Transit { bytes, count, way, parcel, .. } = self.under_way(index);
        let (bytes, count, way, shard) = (*bytes, *count, *way, parcel.step().shard);
        let at = self.network.cross(self.deployment, way, self.now_seconds, bytes, count);
        let copied = count * self.copy_seconds(way, shard);
        self.schedule(at + copied, Event::Arrived(index));
    }

    /// Seconds in which a shard is copied out of Tier 1's device or into it, beside the device's kernels.
    fn copy_seconds(&mut self, way: Way, shard: ShardId) -> f64 {
        let (rows, kernels) = (self.shard(shard).rows, &self.deployment.tier1);
        match way {
            Way::Tiers { back: false, .. } => kernels.to_host_seconds(rows),
            Way::Tiers { back: true, .. } => kernels.to_device_seconds(rows),
            _ => 0.0,
        }
    }

    /// A message waits until its receiver's core has woken or another process leaves it. The wait is usually short and
    /// sometimes longer. If it always took the same time, identical nodes would stay in step for ever.
    pub(super) fn arrived(&mut self, index: usize) {
        let overheads = self.deployment.tier1.overheads();
        if overheads.wake_seconds == 0.0 && overheads.crowded_seconds == 0.0 {
            return self.admitted(index);
        }
        let &Transit { to, to_core: core, count, .. } = self.under_way(index);
        let receiver = self.process_of(to);
        let others = self.processes.iter().enumerate().any(|(index, process)| {
            process.core == core && Some(index) != receiver && process.work.is_some()
        });
        let mut mean = match (self.cores[core].is_idle(), others) {
            (true, _) => count * overheads.wake_seconds,
            (false, true) => count * overheads.crowded_seconds,
            (false, false) => 0.0,
        };
        if self.deployment.strands > 1 && self.deployment.place == Place::OwnMachines {
            mean += count * STRANDS_WAIT_SECONDS;
        }
        let wait = -mean * (1.0 - self.random.unit()).ln();
        self.schedule(self.now_seconds + wait, Event::Admitted(index));
    }

    pub(super) fn admitted(&mut self, index: usize) {
        let Transit { parcel, bytes, count, way, to_core, .. } = self.under_way(index);
        let mut seconds = self.end_seconds(*way, parcel.step().shard, *bytes, *count);
        let core = *to_core;
        if let Parcel::Home(home) = parcel {
            seconds += self.dispatching_seconds(home.tokens.len());
        }
        self.urgent(core, seconds, After::Received(index));
    }
}
