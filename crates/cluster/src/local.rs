//! The in-process fabric: every node on one set of threads, messages as function calls.

use crate::error::ClusterError;
use crate::fabric::Fabric;
use crate::layout::Layout;
use crate::report::{NodeReport, peak_memory_bytes};
use crate::tier1::{Outgoing, Tier1Place, Tier1Worker};
use crate::tier2::Tier2Worker;
use glinthawk_compute::{CpuContext, CpuWeights, Isa, SliceSpec, Threads};
use glinthawk_flight::Pool;
use glinthawk_model::Model;
use glinthawk_protocol::{Home, Launch, Tier1Node, Tier2Node};
use std::sync::Arc;
use std::time::Instant;

/// What the kernels of a process run on.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Instruction set.
    pub isa: Isa,
    /// Threads.
    pub threads: usize,
}

/// All nodes of a cluster in one process.
pub struct LocalFabric {
    tier1: Vec<Tier1Worker<CpuWeights>>,
    /// (slice, lane), row-major
    tier2: Vec<Tier2Worker<CpuContext>>,
    lanes: usize,
    outgoing: Vec<Outgoing>,
    threads: Arc<Threads>,
    pinned: bool,
}

impl LocalFabric {
    /// Loads all slices (reporting bytes done and in all) and gives every lane `pages` pages.
    pub fn load(
        model: &Model,
        layout: &Layout,
        pages: u32,
        kernels: Kernels,
        trace: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ClusterError> {
        let config = model.config();
        let threads = Arc::new(Threads::new(kernels.threads)?);
        let pool =
            Arc::new(Pool::new(4 * layout.flights as usize * layout.lanes() * layout.slices));
        let (mut tier1, mut tier2) = (Vec::new(), Vec::new());
        for slice in 0..layout.slices {
            let place = Tier1Place::new(layout, slice, trace);
            let weights = load_slice(model, layout, &place, kernels.isa, &threads, progress)?;
            let layers = layout.layers(config.layers, slice).len();
            let node = Tier1Node::new(layers as u32, layout.rows_max(), layout.merge());
            let (pool_1, threads_1) = (Arc::clone(&pool), Arc::clone(&threads));
            tier1.push(Tier1Worker::new(node, weights, place, config, pool_1, threads_1));
            for lane in 0..layout.lanes() {
                let context = CpuContext::new(
                    config,
                    layers,
                    pages as usize,
                    layout.context_type,
                    kernels.isa,
                    Arc::clone(&threads),
                )?;
                let node = Tier2Node::new(layout.slots(), pages);
                let (name, width) = (format!("tier2-{slice}-{lane}"), config.query_width());
                tier2.push(Tier2Worker::new(name, node, context, width, Arc::clone(&pool), trace));
            }
        }
        Ok(Self {
            tier1,
            tier2,
            lanes: layout.lanes(),
            outgoing: Vec::new(),
            threads,
            pinned: false,
        })
    }

    fn route(&mut self, slice: usize, homes: &mut Vec<Home>) -> Result<(), ClusterError> {
        for outgoing in std::mem::take(&mut self.outgoing) {
            match outgoing {
                Outgoing::Attend(attend, qkv) => {
                    let index = slice * self.lanes + attend.shard.lane as usize;
                    self.tier2[index].take(attend, qkv, Instant::now())?;
                }
                Outgoing::Hop(launch, residual) => {
                    self.tier1[slice + 1].arrive(launch, Some(residual), Instant::now());
                }
                Outgoing::Home(home) => homes.push(home),
            }
        }
        Ok(())
    }
}

impl Fabric for LocalFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        self.tier1[0].arrive(launch, None, Instant::now());
        Ok(())
    }

    fn advance(&mut self, homes: &mut Vec<Home>) -> Result<(), ClusterError> {
        if !self.pinned {
            // Not before: threads that the caller starts for other things would inherit the core.
            self.threads.pin_caller();
            self.pinned = true;
        }
        for slice in (0..self.tier1.len()).rev() {
            for lane in 0..self.lanes {
                if let Some((attended, output)) = self.tier2[slice * self.lanes + lane].compute() {
                    self.tier1[slice].attended(attended, output, Instant::now());
                }
            }
            if self.tier1[slice].compute(&mut self.outgoing) {
                return self.route(slice, homes);
            }
        }
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let tier1 = self.tier1.iter().map(Tier1Worker::report);
        let tier2 = self.tier2.iter().map(Tier2Worker::report);
        let reports = tier1.chain(tier2);
        let peak_memory_bytes = peak_memory_bytes();
        Ok(reports.map(|report| NodeReport { peak_memory_bytes, ..report }).collect())
    }
}

/// Loads the weights of one slice.
pub(crate) fn load_slice(
    model: &Model,
    layout: &Layout,
    place: &Tier1Place,
    isa: Isa,
    threads: &Arc<Threads>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CpuWeights, ClusterError> {
    let spec = SliceSpec {
        layers: layout.layers(model.config().layers, place.slice),
        embeds: place.first,
        classifies: place.last,
        slab_rows: layout.slab_rows(),
    };
    Ok(CpuWeights::load(model, spec, isa, Arc::clone(threads), progress)?)
}
