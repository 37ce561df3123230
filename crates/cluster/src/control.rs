//! What dispatcher and workers tell each other besides rows: offers, roles, weights, reports.

use crate::error::ClusterError;
use crate::layout::Layout;
use crate::report::NodeReport;
use glinthawk_compute::cuda::CudaDevice;
use glinthawk_compute::{ComputeError, Isa};
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_model::{ModelConfig, ModelIdentity, Tensor};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A control message; anything larger than a few values travels as its payload.
#[derive(Debug, Serialize, Deserialize)]
pub enum Control {
    /// Worker → dispatcher: what it has.
    Offer(Offer),
    /// Dispatcher → worker: what it is to be.
    Role(Box<Role>),
    /// Worker → dispatcher: rows of a matrix (or, with no rows, a vector) it has no file for.
    Fetch {
        /// The tensor.
        tensor: Tensor,
        /// First row and end; `None` for a vector.
        rows: Option<(usize, usize)>,
    },
    /// Dispatcher → worker: what was asked for last, as payload.
    Fetched,
    /// Dispatcher → worker: what was asked for last cannot be read.
    NotFetched(String),
    /// Worker → Tier-1 node it dialled: "I am your lane" (of the first strand), or (`None`) "I am the slice before you", with the pass
    /// that the dispatcher gave both.
    Introduce(Option<u32>, u64),
    /// Worker → dispatcher: weights loaded, pages there.
    Ready,
    /// Worker → dispatcher: cannot go on, and why.
    Failed(String),
    /// Dispatcher → Tier-1 node: this lane's contexts are gone; forget its steps, up to those of this generation.
    LaneLost(u32, u64),
    /// Dispatcher → Tier-1 node: a new neighbour will introduce itself so, in place of the one before.
    Await(Option<u32>, u64),
    /// Tier-1 node → dispatcher: it knows whom to await with this pass.
    Awaiting(u64),
    /// Tier-1 node → dispatcher: the one with this pass has introduced itself.
    Met(u64),
    /// Dispatcher → worker: the neighbour that it dials has a new host at this address, where it shows this pass.
    Dial(String, u64),
    /// Worker → dispatcher: the connection of this pass is gone or cannot be made, and why.
    LinkLost(u64, String),
    /// Dispatcher → worker: a step of this lane does not come home; is it here?
    Ask(u32),
    /// Worker → dispatcher: the steps of this lane that its Tier-1 node has, by flight and epoch, each with the layer that
    /// it attends in.
    Answer(u32, Vec<(u32, u64, Option<u32>)>),
    /// Worker → dispatcher: it wants to leave when nothing of it is needed any more.
    Leaving,
    /// Dispatcher → worker: nothing of it is needed any more.
    Leave,
    /// Dispatcher → worker: say what you did.
    Report,
    /// Worker → dispatcher: the reports of a strand of its nodes.
    Reported(Vec<NodeReport>),
}

/// What a worker brings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// The tier it wants to be in; `None` leaves it to the dispatcher.
    pub tier: Option<u8>,
    /// Which of the dispatcher's own processes it is; `None` if it comes from elsewhere.
    pub local: Option<LocalProcess>,
    /// Kernel threads.
    pub threads: u32,
    /// What its kernels run on: the kind of its best instruction set, or of its GPU.
    pub kind: String,
    /// The GPU's memory; `None` on a CPU.
    pub gpu: Option<GpuOffer>,
    /// Positions that its pages may have, the best first.
    pub page_positions: Vec<u32>,
    /// Memory it has for contexts, in bytes.
    pub memory_bytes: u64,
    /// Port at which it accepts its neighbours.
    pub port: u16,
}

/// A process that the dispatcher has started itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LocalProcess {
    /// Its place among those of its tier.
    pub place: u32,
    /// Its process id.
    pub id: u32,
}

/// What is wrong with anything else than an offer.
pub(crate) const NO_OFFER: &str = "it made no offer that makes sense";

/// Sizes of pages, and characters of a kind, that an offer may name.
const OFFER_ITEMS_MAX: usize = 64;

impl Offer {
    /// Why it cannot be taken, if so.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let kind_is_known = match self.gpu {
            Some(_) => self.kind.len() <= OFFER_ITEMS_MAX && !self.kind.contains(char::is_control),
            None => Isa::of_kind(&self.kind).is_ok(),
        };
        let makes_sense = matches!(self.tier, None | Some(1 | 2))
            && (1..=OFFER_ITEMS_MAX).contains(&self.page_positions.len())
            && !self.page_positions.contains(&0)
            && self.threads > 0
            && self.port > 0;
        match (makes_sense, kind_is_known) {
            (true, true) => None,
            (true, false) => Some("its kernels are not of this version of Glinthawk"),
            (false, _) => Some(NO_OFFER),
        }
    }
}

/// A GPU that a worker brings, perhaps together with others.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GpuOffer {
    /// What tells it from every other GPU.
    pub uuid: [u8; 16],
    /// Its free memory: for weights, and for contexts what they leave.
    pub free_bytes: u64,
}

impl GpuOffer {
    pub(crate) fn of(device: &CudaDevice) -> Result<Self, ComputeError> {
        // What an earlier job gave back is free once all work is done.
        device.synchronize()?;
        Ok(Self { uuid: device.uuid()?, free_bytes: device.memory_free_bytes()? })
    }
}

/// What a worker is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Role {
    /// Its pipeline.
    pub pipeline: usize,
    /// Its slice.
    pub slice: usize,
    /// Its lane on that slice, of the first strand; `None` makes it the slice's Tier-1 node.
    pub lane: Option<u32>,
    /// The cluster's shape.
    pub layout: Layout,
    /// Pages of every lane.
    pub lane_pages: Vec<u32>,
    /// The model's name, to look for on the worker's own disk.
    pub model: String,
    /// What the weights found there must be.
    pub identity: ModelIdentity,
    /// The model's shape.
    pub config: ModelConfig,
    /// What its kernels are to run on.
    pub kind: String,
    /// The node to dial: the slice's Tier-1 node, or the next slice's. And the pass to show there.
    pub dial: Option<(String, u64)>,
    /// Who dials this node, as they introduce themselves, with their passes. No other node knows these.
    pub callers: Vec<(Option<u32>, u64)>,
    /// Artificial link between the tiers.
    pub link: Link,
    /// Whether to record a timeline.
    pub trace: bool,
}

impl Role {
    /// Its name in statistics.
    pub fn name(&self) -> String {
        self.layout.node_name(self.pipeline, self.slice, self.lane)
    }

    /// Whether its parts fit each other.
    pub(crate) fn makes_sense(&self) -> bool {
        let layout = &self.layout;
        self.slice < layout.slices
            && layout.slices <= self.config.layers
            && self.pipeline < layout.pipelines
            && layout.pipelines.checked_mul(layout.lanes()) == Some(self.lane_pages.len())
            && layout.lanes() > 0
            && self.lane.is_none_or(|lane| {
                layout.lanes_of_strand(self.pipeline, 0).contains(&lane) && self.dial.is_some()
            })
            && [layout.batch, layout.flights, layout.page_positions, layout.context_max]
                .iter()
                .all(|count| *count > 0)
    }
}

/// An artificial link between the tiers, both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Every message arrives this much later.
    pub delay: Duration,
    /// What the link carries.
    pub bytes_per_second: Option<u64>,
}

impl Control {
    /// The message that says this.
    pub fn message(&self, payload: Buffer) -> Message {
        let bytes = postcard::to_stdvec(self).expect("control messages always encode");
        Message::control(bytes, payload)
    }

    /// What a message says.
    pub fn read(message: &Message) -> Result<Self, ClusterError> {
        if message.kind() != Kind::Control {
            return Err(ClusterError::Control(format!("{} where control was due", message.kind())));
        }
        postcard::from_bytes(message.table())
            .map_err(|error| ClusterError::Control(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_another_version_are_told_from_nonsense() {
        let offer = Offer {
            tier: None,
            local: None,
            threads: 1,
            kind: Isa::Portable.kind(),
            gpu: None,
            page_positions: vec![16],
            memory_bytes: 0,
            port: 1,
        };
        assert_eq!(offer.fault(), None);
        let older = Offer { kind: "amx-r1".to_owned(), ..offer.clone() };
        assert!(older.fault().expect("refused").contains("version"));
        assert_eq!(Offer { threads: 0, ..older }.fault(), Some(NO_OFFER));
    }
}
