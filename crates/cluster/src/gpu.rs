//! The fabric of one GPU that holds the whole model and all contexts: a step is one call, on the caller's thread.

use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent};
use crate::layout::Layout;
use crate::report::{NodeReport, peak_memory_bytes};
use crate::span::Tracer;
use glinthawk_compute::Threads;
use glinthawk_compute::cuda::{CudaDevice, CudaModel, StepLimits};
use glinthawk_model::Model;
use glinthawk_protocol::{Home, Launch};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// A GPU and the steps that wait for it.
pub struct GpuFabric {
    model: CudaModel,
    launches: VecDeque<(Launch, Instant)>,
    report: NodeReport,
    tracer: Tracer,
}

impl GpuFabric {
    /// What a GPU's buffers are made for under a layout; `pages` pages of context.
    pub fn limits(layout: &Layout, pages: u32) -> StepLimits {
        StepLimits {
            rows: layout.rows_max(),
            slots: layout.slots() as usize,
            pages: pages as usize,
            context: layout.context_max as usize,
        }
    }

    /// Puts a model on a GPU (reporting bytes done and in all).
    pub fn load(
        model: &Model,
        layout: &Layout,
        pages: u32,
        device: &CudaDevice,
        threads: usize,
        trace: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ClusterError> {
        assert_eq!((layout.slices, layout.lanes()), (1, 1), "a GPU has the whole model to itself");
        let threads = Arc::new(Threads::new(threads)?);
        let limits = Self::limits(layout, pages);
        Ok(Self {
            model: CudaModel::load(model, device, limits, &threads, progress)?,
            launches: VecDeque::new(),
            report: NodeReport::new("tier1-0".to_owned(), 1),
            tracer: Tracer::new(trace),
        })
    }
}

impl Fabric for GpuFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        self.launches.push_back((launch, Instant::now()));
        Ok(())
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        let Some((launch, arrived)) = self.launches.pop_front() else { return Ok(()) };
        let started = Instant::now();
        let tokens = self.model.step(&launch.rows, &launch.samples)?;
        let rows = launch.rows.len();
        self.report.record(rows, started, std::iter::once(arrived));
        self.tracer.record(started, 0, launch.step.shard.flight, 1, rows);
        events.push(FabricEvent::Home(Home { step: launch.step, tokens }));
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let (spans, peak_memory_bytes) = (self.tracer.spans(), peak_memory_bytes());
        Ok(vec![NodeReport { spans, peak_memory_bytes, ..self.report.clone() }])
    }
}
