//! Nodes that heartbeat and do nothing: the dispatcher asks for steps that do not come home, and gives up who does not
//! answer.

use super::RemoteFabric;
use crate::control::Control;
use crate::fabric::FabricEvent;
use glinthawk_protocol::{Finding, Place, StepId, Watch};
use std::time::Duration;

/// How long a step may take at least, whatever others took, and how long at most. A node that is asked answers between
/// two batches, so it is given up only if one batch takes that long.
const PATIENCE_MIN: Duration = Duration::from_secs(10);
const PATIENCE_MAX: Duration = Duration::from_secs(120);

pub(super) fn watch() -> Watch {
    Watch::new(PATIENCE_MIN.as_nanos() as u64..=PATIENCE_MAX.as_nanos() as u64)
}

impl RemoteFabric {
    pub(super) fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    pub(super) fn look_for_idle_nodes(&mut self) {
        let roster = &self.roster;
        match self.watch.look(self.now_ns(), |lane| roster.is_open(lane)) {
            None => {}
            Some(Finding::Overdue(step)) => self.ask_for(step),
            Some(Finding::Silent(places, waited_ns)) => {
                for place in places {
                    self.give_up_idle(place, "it has not answered", waited_ns);
                }
            }
            Some(Finding::Withheld(tier1, lane, waited_ns)) => {
                let place = self.roster.place_of(lane, tier1.slice);
                self.give_up_idle(place, "it has not attended", waited_ns);
            }
            Some(Finding::Astray(step)) => self.happened.push(FabricEvent::Astray(step)),
        }
    }

    fn ask_for(&mut self, step: StepId) {
        let way = self.roster.way(step.shard.lane);
        for host in way.iter().filter_map(|place| self.hosts.get(place)) {
            self.tell(*host, &Control::Ask(step.shard.lane));
        }
        self.watch.ask(step, way.into_iter(), self.now_ns());
    }

    fn give_up_idle(&mut self, place: Place, what: &str, waited_ns: u64) {
        if let Some(&peer) = self.hosts.get(&place) {
            let seconds = Duration::from_nanos(waited_ns).as_secs_f64();
            self.give_up(peer, format!("{what} for {seconds:.0} s, though it is there"));
        }
    }
}
