//! The processes of a forecast: the nodes they host, over kernels that compute nothing.

use super::Deployment;
use glinthawk_protocol::{
    Compute, Driver, Generated, Stage, Tier1Node, Tier1Work, Tier2Node, Tier2Work,
};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Kernels that compute nothing: a forecast only asks how long they would take.
pub(super) struct NoKernels {
    /// Whether the slice classifies.
    last: bool,
}

impl Compute<Tier1Work<()>> for NoKernels {
    type Error = Infallible;

    fn start(&mut self, work: &mut Tier1Work<()>) -> Result<(), Infallible> {
        if self.last && work.stage == Stage::Exit {
            let token = Generated { token: 0, logprob: 0.0, alternatives: Vec::new() };
            for task in &mut work.tasks {
                task.tokens = Some(vec![token.clone(); task.launch.samples.len()]);
            }
        }
        Ok(())
    }
}

impl Compute<Tier2Work<()>> for NoKernels {
    type Error = Infallible;

    fn start(&mut self, _work: &mut Tier2Work<()>) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A process's nodes.
pub(super) type Nodes = Driver<(), NoKernels, NoKernels>;

/// What each process hosts: every slice's Tier-1 node, with a lane of its own if it attends, then the Tier-2 nodes
/// slice by slice. One layer stands for `grain` of them.
pub(super) fn processes(deployment: &Deployment, grain: usize) -> Vec<Nodes> {
    let slices = deployment.slices.len();
    let (lanes, local) = (deployment.lanes() as u32, u32::from(deployment.local_lane));
    let rows_max = deployment.rows_max();
    let attends_first = deployment.tier2 == 0 || !deployment.tier1.on_device();
    let attention = |last: bool, lanes: std::ops::Range<u32>| -> BTreeMap<_, _> {
        // Nobody asks for pages, so there are no tables.
        lanes
            .map(|lane| {
                (lane, (Tier2Node::new(0, 0, deployment.page_positions), NoKernels { last }))
            })
            .collect()
    };
    let mut processes: Vec<_> = (0..slices)
        .map(|slice| {
            let layers = deployment.slices[slice].div_ceil(grain) as u32;
            let kernels = NoKernels { last: slice + 1 == slices };
            let node = Tier1Node::new(layers, rows_max, deployment.merge());
            let lanes = attention(kernels.last, 0..local);
            Driver { slice, tier1: Some((node, kernels)), lanes, attends_first, works_max: 1 }
        })
        .collect();
    for slice in 0..slices {
        processes.extend((local..lanes).map(|lane| {
            let lanes = attention(false, lane..lane + 1);
            Driver { slice, tier1: None, lanes, attends_first, works_max: 1 }
        }));
    }
    processes
}
