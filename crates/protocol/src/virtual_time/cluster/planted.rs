//! Bugs that a simulation is given, to see that its checks find them. The state machines themselves have none of this.

use super::super::kernels::Values;
use super::super::setting::{Costs, Planted};
use super::Cluster;
use crate::dispatcher::DispatcherEvent;
use crate::message::Parcel;
use crate::prompt::Completion;

/// Later than every epoch of a real step.
const DISGUISED: u64 = 1 << 62;

impl<C: Costs> Cluster<'_, C> {
    fn has(&self, bug: Planted) -> bool {
        self.topology.planted == Some(bug)
    }

    /// What a Tier-2 node is sent is newer than all it knows, so that its check passes whatever it is.
    pub(super) fn disguise(&mut self, mut parcel: Parcel<Values>) -> Parcel<Values> {
        if let Parcel::Attend(attend, _) = &mut parcel
            && self.has(Planted::EpochsUnchecked)
        {
            let epoch = DISGUISED + self.disguised.len() as u64;
            self.disguised.push(std::mem::replace(&mut attend.step.epoch, epoch));
        }
        parcel
    }

    /// Its answer is for the step that was meant.
    pub(super) fn unmask(&self, parcel: &mut Parcel<Values>) {
        if let Parcel::Attended(attended, _) = parcel
            && let Some(number) = attended.step.epoch.checked_sub(DISGUISED)
        {
            attended.step.epoch = self.disguised[number as usize];
        }
    }

    pub(super) fn plant_leak(&mut self, event: &DispatcherEvent) {
        if let DispatcherEvent::Relaunch(step) = event
            && self.has(Planted::PageLeaked)
        {
            self.dispatcher.leak_page(step.shard.lane);
        }
    }

    pub(super) fn retired(&self, completion: Completion) -> Vec<Completion> {
        let is_twice = self.has(Planted::RetiredTwice) && self.dispatcher.stats().prompts_lost > 0;
        vec![completion; if is_twice { 2 } else { 1 }]
    }

    /// What the dispatcher takes for the time.
    pub(super) fn dispatcher_ns(&self) -> u64 {
        if self.has(Planted::NoClock) { 0 } else { self.now_ns }
    }
}
