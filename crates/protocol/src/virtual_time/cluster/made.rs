//! What a simulation is made of: fresh nodes, and rows that make no sense.

use super::super::kernels::{Contexts, Weights};
use super::super::setting::{Garble, SimulatedCluster};
use super::Node;
use crate::dispatcher::DispatcherConfig;
use crate::driver::Driver;
use crate::message::{Attend, NodeAddress};
use crate::tier1::Tier1Node;
use crate::tier2::Tier2Node;
use std::collections::{BTreeMap, HashMap};

/// Every node, as it begins.
pub(super) fn nodes(topology: &SimulatedCluster) -> BTreeMap<NodeAddress, Node> {
    let config = &topology.dispatcher;
    let mut nodes = BTreeMap::new();
    let mut first_layer = 0;
    for (slice, &layers) in topology.slice_layers.iter().enumerate() {
        let works_max = topology.works_max;
        let driver = |tier1, lanes| Driver { slice, tier1, lanes, attends_first: false, works_max };
        let last = slice + 1 == topology.slice_layers.len();
        let node = Tier1Node::new(layers, topology.tier1_rows_max, config.merge);
        let weights = Weights { first_layer, layers, last, slab: HashMap::new() };
        nodes.insert(NodeAddress::Tier1(slice), driver(Some((node, weights)), BTreeMap::new()));
        for (lane, &pages) in (0..).zip(&config.lane_pages) {
            let slots = config.lane_shape(lane).slots();
            let page_positions = config.page_positions;
            let store = vec![0; (layers * pages * page_positions) as usize];
            let tables = vec![Vec::new(); slots as usize];
            let contexts = Contexts { pages, page_positions, store, tables };
            let node = Tier2Node::new(slots, pages, page_positions);
            let lanes = BTreeMap::from([(lane, (node, contexts))]);
            nodes.insert(NodeAddress::Tier2(slice, lane), driver(None, lanes));
        }
        first_layer += layers;
    }
    nodes
}

/// The same rows, so that they make no sense to their node.
pub(super) fn garbled(config: &DispatcherConfig, mut attend: Attend, garble: Garble) -> Attend {
    let pages = config.lane_pages[attend.step.shard.lane as usize];
    let last = attend.rows.last_mut().expect("a step has rows");
    match garble {
        Garble::Slot => last.slot += config.lane_shape(attend.step.shard.lane).slots(),
        Garble::Page => last.page += pages,
        Garble::Position => last.position += pages * config.page_positions,
        Garble::Order => {
            let last = *last;
            attend.rows.push(last);
        }
    }
    attend
}
