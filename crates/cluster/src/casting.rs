//! What the roles of a cluster are made of, at its start and when a place is given to another worker.

use crate::budget::{Budget, Placed};
use crate::control::{Link, Offer, Role};
use crate::error::ClusterError;
use crate::kinds::{Kinds, NodeKind};
use crate::layout::Layout;
use crate::neighbours::Caller;
use glinthawk_compute::Isa;
use glinthawk_model::{Model, ModelIdentity};
use glinthawk_protocol::{Place, RosterShape};
use std::collections::BTreeMap;
use std::sync::Arc;

/// See the module's head.
pub(crate) struct Casting {
    pub layout: Layout,
    /// Pages of every lane.
    pub lane_pages: Vec<u32>,
    pub model: Arc<Model>,
    pub model_name: String,
    pub identity: ModelIdentity,
    /// What the kernels at each place run on: results depend on it.
    pub kinds: BTreeMap<Place, String>,
    /// Memory for contexts of each attention worker of Tier 1 and of Tier 2, if somebody has said.
    pub memory_wanted: [Option<u64>; 2],
    pub link: Link,
    pub trace: bool,
}

impl Casting {
    pub(crate) fn shape(layout: &Layout) -> RosterShape {
        RosterShape {
            pipelines: layout.pipelines,
            slices: layout.slices,
            workers: layout.attention_workers() as u32,
            tier1_attends: layout.tier1_attends,
            strands: layout.strands as u32,
        }
    }

    pub(crate) fn name(&self, place: Place) -> String {
        self.layout.node_name(place.pipeline, place.slice, place.lane)
    }

    pub(crate) fn role(
        &self,
        place: Place,
        dial: Option<(String, u64)>,
        callers: Vec<Caller>,
    ) -> Role {
        Role {
            pipeline: place.pipeline,
            slice: place.slice,
            lane: place.lane,
            layout: self.layout.clone(),
            lane_pages: self.lane_pages.clone(),
            model: self.model_name.clone(),
            identity: self.identity,
            config: self.model.config().clone(),
            kind: self.kinds[&place].clone(),
            dial,
            callers,
            link: self.link,
            trace: self.trace,
        }
    }

    /// Every node's kind.
    pub(crate) fn node_kinds(&self) -> Kinds {
        Kinds::new(self.kinds.iter().map(|(place, kind)| NodeKind {
            name: self.name(*place),
            kind: kind.clone(),
            has_weights: place.lane.is_none(),
            attends: place.lane.is_some() || self.layout.tier1_attends,
        }))
    }

    /// Whether a worker can take a place so that no result differs: it computes the same bits, and has the memory that
    /// the dispatcher counts with.
    pub(crate) fn fits(&self, place: Place, offer: &Offer) -> bool {
        let tier = if place.lane.is_none() { 1 } else { 2 };
        let own = self.layout.lanes_of_strand(place.pipeline, 0).start;
        let lane = place.lane.or(self.layout.tier1_attends.then_some(own));
        let kind = &self.kinds[&place];
        let computes = match (offer.gpu, Isa::of_kind(kind)) {
            (None, Ok(wanted)) => Isa::of_kind(&offer.kind).is_ok_and(|best| best >= wanted),
            (Some(_), Err(_)) => offer.kind == *kind,
            _ => false,
        };
        let placed = Placed { offer, slice: place.slice, has_weights: place.lane.is_none(), lane };
        let config = self.model.config();
        let has_memory = || {
            let budget = Budget::new(&self.layout, config, self.memory_wanted, &[placed]);
            let lanes = lane.into_iter().flat_map(|first| self.layout.lanes_of_worker(first));
            budget.is_ok_and(|budget| {
                lanes
                    .map(|lane| lane as usize)
                    .all(|lane| budget.lane_pages[lane] >= self.lane_pages[lane])
            })
        };
        offer.tier.is_none_or(|wish| wish == tier)
            && computes
            && (lane.is_none() || offer.page_positions.contains(&self.layout.page_positions))
            && has_memory()
    }
}

/// A number that nobody can guess: the two ends of a connection know each other by it.
pub(crate) fn new_pass() -> Result<u64, ClusterError> {
    let random = ring::rand::generate(&ring::rand::SystemRandom::new());
    let bytes: [u8; 8] = random
        .map_err(|_| ClusterError::Control("the system has no randomness".to_owned()))?
        .expose();
    Ok(u64::from_le_bytes(bytes))
}
