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

type PayloadOf<B> = Payload<<B as Backend>::Buffer>;

/// What a process hosts.
pub(crate) type Nodes<B> = Driver<PayloadOf<B>, Tier1Kernels<B>, Tier2Kernels<B>>;

/// Loads the weights of one slice.
pub(crate) fn load_slice<B: Backend>(
    model: &Model,
    layout: &Layout,
    place: &Tier1Place,
    backend: &B,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<B::Weights, ClusterError> {
    let spec = layout.slice(model.config(), place.slice);
    Ok(backend.weights(model, &spec, progress)?)
}

/// The Tier-1 node at a place.
pub(crate) fn tier1<B: Backend>(
    backend: B,
    weights: B::Weights,
    place: Tier1Place,
    layout: &Layout,
    config: &ModelConfig,
) -> (Tier1Node<PayloadOf<B>>, Tier1Kernels<B>) {
    let layers = layout.layers(config.layers, place.slice).len() as u32;
    let node = Tier1Node::new(layers, place.rows_max, layout.merge());
    let name = layout.node_name(place.pipeline, place.slice, None);
    (node, Tier1Kernels::new(name, backend, weights, place, layout, config))
}

/// The Tier-2 node of a slice and lane, with room for `pages` pages.
pub(crate) fn tier2<B: Backend>(
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
    let kernels = Tier2Kernels::new(name, backend, context, (width, page_positions), trace);
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
