//! The nodes of a process: state machines with their kernels, under a driver.

use crate::error::ClusterError;
use crate::layout::Layout;
use crate::payload::Payload;
use crate::report::NodeReport;
use crate::tier1_kernels::{Tier1Kernels, Tier1Place};
use crate::tier2_kernels::Tier2Kernels;
use glinthawk_compute::Backend;
use glinthawk_model::{Model, ModelConfig};
use glinthawk_protocol::{Driver, Stage, Started, Tier1Node, Tier2Node};
use std::collections::BTreeMap;

type PayloadOf<B> = Payload<<B as Backend>::Buffer>;

/// What a process hosts.
pub(crate) type Nodes<B> = Driver<PayloadOf<B>, Tier1Kernels<B>, Tier2Kernels<B>>;

/// A strand of a process that hosts nodes of one slice.
pub(crate) struct Strand<'a> {
    pub place: Tier1Place,
    /// The lane that attends in this process, with its pages.
    pub lane: Option<(u32, u32)>,
    pub layout: &'a Layout,
    pub config: &'a ModelConfig,
}

impl Strand<'_> {
    /// The strand's nodes on a device; a Tier-1 node has weights.
    pub(crate) fn nodes<B: Backend>(
        &self,
        backend: &B,
        weights: Option<B::Weights>,
    ) -> Result<Nodes<B>, ClusterError> {
        let Self { place, lane, layout, config, .. } = *self;
        let mut lanes = BTreeMap::new();
        if let Some((lane, pages)) = lane {
            let id = (place.slice, lane);
            let node = tier2(backend.clone(), id, pages, place.trace, layout, config)?;
            lanes.insert(lane, node);
        }
        Ok(Nodes {
            slice: place.slice,
            tier1: weights.map(|weights| tier1(backend.clone(), weights, place, layout, config)),
            lanes,
            attends_first: B::WORKS_AHEAD == 1 || layout.tier2 == 0,
            works_max: B::WORKS_AHEAD,
        })
    }
}

/// Loads the weights of one slice.
pub(crate) fn load_slice<B: Backend>(
    model: &Model,
    layout: &Layout,
    slice: usize,
    backend: &B,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<B::Weights, ClusterError> {
    let spec = layout.slice(model.config(), slice);
    Ok(backend.weights(model, &spec, progress)?)
}

/// The Tier-1 node at a place.
fn tier1<B: Backend>(
    backend: B,
    weights: B::Weights,
    place: Tier1Place,
    layout: &Layout,
    config: &ModelConfig,
) -> (Tier1Node<PayloadOf<B>>, Tier1Kernels<B>) {
    let layers = layout.layers(config.layers, place.slice).len() as u32;
    let node = Tier1Node::new(layers, layout.rows_max(), layout.merge());
    let name = layout.strand_name(place.pipeline, place.slice, place.strand);
    (node, Tier1Kernels::new(name, backend, weights, place, layout, config))
}

/// The Tier-2 node of a slice and lane, with room for `pages` pages.
fn tier2<B: Backend>(
    backend: B,
    (slice, lane): (usize, u32),
    pages: u32,
    trace: bool,
    layout: &Layout,
    config: &ModelConfig,
) -> Result<(Tier2Node<PayloadOf<B>>, Tier2Kernels<B>), ClusterError> {
    let context = backend.context(config, &layout.contexts(config, (slice, lane), pages))?;
    let name = layout.node_name(layout.pipeline_of(lane), slice, Some(lane));
    let width = config.query_width();
    let page_positions = layout.page_positions;
    let layers = layout.layers(config.layers, slice);
    let last_layer = (layers.end == config.layers).then(|| layers.len() as u32 - 1);
    let pages_shape = (width, page_positions);
    let kernels = Tier2Kernels::new(name, backend, context, pages_shape, last_layer, trace);
    let slots = layout.lane_shape(lane).slots();
    Ok((Tier2Node::new(slots, pages, page_positions), kernels))
}

/// Whether what follows from started work is only for kernels of the same device. Tokens are for the dispatcher.
pub(crate) fn stays<B>(work: &Started<Payload<B>>) -> bool {
    match work {
        Started::Tier1(work) => {
            work.stage != Stage::Exit && work.tasks.iter().all(|task| task.payload.stays())
        }
        Started::Tier2(work) => work.payload.stays(),
    }
}

/// What the nodes did so far, Tier 1 first.
pub(crate) fn reports<B: Backend>(nodes: &Nodes<B>) -> Vec<NodeReport> {
    let tier1 = nodes.tier1.iter().map(|(_, kernels)| kernels.report());
    tier1.chain(nodes.lanes.values().map(|(_, kernels)| kernels.report())).collect()
}
