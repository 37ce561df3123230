//! The fabric of one GPU that holds the whole model and all contexts: a step is one call. The GPU is given the next step
//! while it works on one, so that it goes on at once when that ends, and the host plans and writes meanwhile.

use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent};
use crate::layout::Layout;
use crate::report::{NodeReport, peak_memory_bytes};
use crate::span::{Span, Tracer};
use glinthawk_compute::cuda::{CudaDevice, CudaModel, StepLimits, Stepped};
use glinthawk_compute::{ComputeError, Threads};
use glinthawk_model::Model;
use glinthawk_protocol::{Home, Launch};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// A GPU and the steps that wait for it.
pub struct GpuFabric {
    model: CudaModel,
    launches: VecDeque<(Launch, Instant)>,
    /// The steps that the GPU was given, and when they arrived.
    submitted: VecDeque<(Launch, Instant)>,
    report: NodeReport,
    tracer: Tracer,
}

impl GpuFabric {
    /// What a GPU's buffers are made for under a layout; `pages` pages of context.
    pub fn limits(layout: &Layout, pages: u32) -> StepLimits {
        StepLimits {
            rows: layout.rows_max(),
            slots: layout.lane_shape(0).slots() as usize,
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
            submitted: VecDeque::new(),
            report: NodeReport::new("tier1-0".to_owned(), 1),
            tracer: Tracer::new(trace),
        })
    }

    /// Gives the GPU as many steps as it can be given.
    fn submit(&mut self) -> Result<(), ClusterError> {
        while self.submitted.len() < CudaModel::AHEAD
            && let Some((launch, arrived)) = self.launches.pop_front()
        {
            let submitted = self.model.submit(&launch.rows, &launch.shared, &launch.samples);
            submitted.map_err(|error| self.failed(&launch, error))?;
            self.submitted.push_back((launch, arrived));
        }
        Ok(())
    }

    fn failed(&self, launch: &Launch, source: ComputeError) -> ClusterError {
        let (node, source) = (self.report.name.clone(), Box::new(source));
        ClusterError::Kernel {
            node,
            kernel: format!("a step of {} rows", launch.rows.len()),
            source,
        }
    }
}

impl Fabric for GpuFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        self.launches.push_back((launch, Instant::now()));
        self.submit()
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        let Some((launch, arrived)) = self.submitted.pop_front() else { return Ok(()) };
        let stepped = self.model.tokens().map_err(|error| self.failed(&launch, error))?;
        let Stepped { tokens, busy } = stepped;
        let (rows, flight, now) = (launch.rows.len(), launch.step.shard.flight, Instant::now());
        let started = now.checked_sub(busy).unwrap_or(now);
        self.report.record(rows, busy, 1, started.saturating_duration_since(arrived));
        let (length_ns, rows) = (busy.as_nanos() as u64, rows as u32);
        let span = Span { start_ns: 0, length_ns, layer: 0, flight, shards: 1, rows };
        self.tracer.record(started, span);
        self.submit()?;
        events.push(FabricEvent::Home(Home { step: launch.step, tokens }));
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let (spans, peak_memory_bytes) = (self.tracer.spans(), peak_memory_bytes());
        Ok(vec![NodeReport { spans, peak_memory_bytes, ..self.report.clone() }])
    }
}
