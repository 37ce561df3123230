//! The driver of nodes: what one process hosts of a cluster, and the way of every message through it. It is the
//! same in one process, on a network, in virtual time and in forecasts. They differ in three things: what computes, the
//! transport that carries parcels, and the clock, which puts time between the start of work and its end.

use crate::message::{NodeAddress, Parcel};
use crate::tier1::{Tier1Node, Tier1Work};
use crate::tier2::{Tier2Error, Tier2Node, Tier2Work};
use std::collections::BTreeMap;

/// What computes work of one tier: `T` is [`Tier1Work`] or [`Tier2Work`].
pub trait Compute<T> {
    /// Why work can fail.
    type Error;

    /// Begins work: turns its payloads into what is sent on. A device may go on by itself.
    fn start(&mut self, work: &mut T) -> Result<(), Self::Error>;

    /// Ends work that is done.
    fn finish(&mut self, _work: &mut T) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Work that has been started.
#[derive(Debug)]
pub enum Started<P> {
    /// A batch of the Tier-1 node.
    Tier1(Tier1Work<P>),
    /// Rows on a lane.
    Tier2(Tier2Work<P>),
}

/// A parcel on its way.
#[derive(Debug)]
pub struct Outgoing<P> {
    /// Its receiver, here or elsewhere.
    pub to: NodeAddress,
    /// Rows of its step.
    pub rows: usize,
    /// What travels.
    pub parcel: Parcel<P>,
}

/// Nodes of one slice with their kernels.
pub struct Driver<P, W, C> {
    /// The slice.
    pub slice: usize,
    /// The slice's Tier-1 node, if it is here.
    pub tier1: Option<(Tier1Node<P>, W)>,
    /// The slice's Tier-2 nodes that are here, by lane.
    pub lanes: BTreeMap<u32, (Tier2Node<P>, C)>,
    /// Which tier starts first. Where all attention is here it does, and Tier 1's batches are larger. So it does where one
    /// thing is computed at a time: a Tier-1 node that always has work for other lanes would never attend for its own.
    /// A device that goes on by itself does both, and others wait for what Tier 1 sends.
    pub attends_first: bool,
    /// Works that a node may have started at a time: more than one where a device goes on by itself.
    pub works_max: usize,
}

impl<P, E, W, C> Driver<P, W, C>
where
    W: Compute<Tier1Work<P>, Error = E>,
    C: Compute<Tier2Work<P>, Error = E>,
{
    /// Takes in a parcel for one of the nodes here. `false`: it is old news. An error: it makes no sense, and nothing
    /// of it was done.
    ///
    /// # Panics
    /// If the parcel is for a node that is not here.
    pub fn deliver(&mut self, parcel: Parcel<P>) -> Result<bool, Tier2Error> {
        match (parcel, &mut self.tier1) {
            (Parcel::Launch(launch, payload), Some((node, _))) => Ok(node.arrive(launch, payload)),
            (Parcel::Attended(attended, payload), Some((node, _))) => {
                Ok(node.attended(attended, payload))
            }
            (Parcel::Attend(attend, payload), _) => {
                self.lane(attend.step.shard.lane).0.take(attend, payload)
            }
            (parcel, _) => panic!("a parcel of {:?} is for a node elsewhere", parcel.step()),
        }
    }

    /// Forgets the steps of a lane whose contexts are gone; see [`Tier1Node::lose_lane`].
    pub fn lose_lane(&mut self, lane: u32, generation: Option<u64>) {
        if let Some((node, _)) = &mut self.tier1 {
            node.lose_lane(lane, generation);
        }
    }

    fn lane(&mut self, lane: u32) -> &mut (Tier2Node<P>, C) {
        self.lanes.get_mut(&lane).expect("the lane is here")
    }

    /// Starts the next work of a node here that is free. Call it after everything that arrived was delivered, and again
    /// at [`Driver::patient_until_ns`].
    pub fn start(&mut self, now_ns: u64) -> Result<Option<Started<P>>, E> {
        let attends_first = self.attends_first;
        let first = if attends_first { self.start_tier2()? } else { self.start_tier1(now_ns)? };
        match first {
            None if attends_first => self.start_tier1(now_ns),
            None => self.start_tier2(),
            work => Ok(work),
        }
    }

    /// Takes the next work of every lane here that has some, for a caller that computes them side by side: it has each
    /// started by the kernels beside it, and then ends them all.
    pub fn take_lanes(&mut self) -> Vec<(Tier2Work<P>, &mut C)> {
        let works_max = self.works_max;
        let lanes = self.lanes.values_mut();
        lanes.filter_map(|(node, kernels)| Some((node.start(works_max)?, kernels))).collect()
    }

    /// Until when the Tier-1 node here waits for the rest of a flight, if it does.
    pub fn patient_until_ns(&self) -> Option<u64> {
        self.tier1.as_ref().and_then(|(node, _)| node.patient_until_ns())
    }

    fn start_tier1(&mut self, now_ns: u64) -> Result<Option<Started<P>>, E> {
        let Some((node, kernels)) = &mut self.tier1 else { return Ok(None) };
        let Some(mut work) = node.start(now_ns, self.works_max) else { return Ok(None) };
        kernels.start(&mut work)?;
        Ok(Some(Started::Tier1(work)))
    }

    fn start_tier2(&mut self) -> Result<Option<Started<P>>, E> {
        for (node, kernels) in self.lanes.values_mut() {
            if let Some(mut work) = node.start(self.works_max) {
                kernels.start(&mut work)?;
                return Ok(Some(Started::Tier2(work)));
            }
        }
        Ok(None)
    }

    /// Ends work that was started and is done, and appends the parcels that follow. The transport delivers those for
    /// nodes here like all others.
    pub fn finish(
        &mut self,
        work: Started<P>,
        now_ns: u64,
        outbox: &mut Vec<Outgoing<P>>,
    ) -> Result<(), E> {
        let slice = self.slice;
        let mut send = |rows: usize, parcel: Parcel<P>| {
            let to = match &parcel {
                Parcel::Launch(..) => NodeAddress::Tier1(slice + 1),
                Parcel::Attend(attend, _) => NodeAddress::Tier2(slice, attend.step.shard.lane),
                Parcel::Attended(..) => NodeAddress::Tier1(slice),
                Parcel::Home(_) => NodeAddress::Dispatcher,
            };
            outbox.push(Outgoing { to, rows, parcel });
        };
        match work {
            Started::Tier1(mut work) => {
                let (node, kernels) = self.tier1.as_mut().expect("it started the work");
                kernels.finish(&mut work)?;
                node.computed(work, now_ns, send);
            }
            Started::Tier2(mut work) => {
                let (node, kernels) = self.lane(work.attend.step.shard.lane);
                kernels.finish(&mut work)?;
                send(work.attend.rows.len(), node.computed(work));
            }
        }
        Ok(())
    }
}
