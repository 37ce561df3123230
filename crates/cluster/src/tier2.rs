//! A Tier-2 node with its kernels: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::payload::Payload;
use crate::report::NodeReport;
use crate::span::Tracer;
use glinthawk_compute::{AttendRow, Backend, ComputeError, ContextKernels};
use glinthawk_flight::PAGE_POSITIONS;
use glinthawk_protocol::{Attend, Attended, Tier2Node};
use std::time::Instant;

/// What waits with rows: their q, k, v, whether those came in a message, and when they arrived.
pub(crate) type Waiting<B> = (B, bool, Instant);

/// What leaves a Tier-2 node: attention output.
pub type Answer<B> = (Attended, Payload<B>);

/// The node's state machine and its pages.
pub struct Tier2Worker<B: Backend> {
    node: Tier2Node<Waiting<B::Buffer>>,
    backend: B,
    kernels: B::Context,
    submitted: Option<Submitted<B::Buffer>>,
    query_width: usize,
    report: NodeReport,
    tracer: Tracer,
}

/// Rows that the device was given.
struct Submitted<B> {
    started: Instant,
    arrived: Instant,
    attend: Attend,
    output: Payload<B>,
}

impl<B: Backend> Tier2Worker<B> {
    /// A worker over `kernels`, whose attention output is `query_width` values wide.
    pub fn new(
        name: String,
        node: Tier2Node<Waiting<B::Buffer>>,
        backend: B,
        kernels: B::Context,
        query_width: usize,
        trace: bool,
    ) -> Self {
        let report = NodeReport::new(name, 2);
        let tracer = Tracer::new(trace);
        Self { node, backend, kernels, submitted: None, query_width, report, tracer }
    }

    /// Takes rows with their q, k, v, (rows, query_width + 2·kv_width) bf16, that arrived at the given
    /// time. Those of an abandoned step are dropped before they touch a page.
    pub fn take(
        &mut self,
        attend: Attend,
        qkv: Payload<B::Buffer>,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        let from_message = matches!(qkv, Payload::Host(_));
        let qkv = qkv.on_device(&self.backend);
        let qkv = qkv.map_err(|error| self.failed("the arrival of q, k, v", error))?;
        self.node.take(attend, (qkv, from_message, arrived))?;
        Ok(())
    }

    /// Has the device append and attend the next rows that wait; `false` if none do, or if it has some.
    pub fn start(&mut self) -> Result<bool, ClusterError> {
        let Some((attend, (qkv, from_message, arrived))) = self.node.start() else {
            return Ok(false);
        };
        let started = Instant::now();
        let output = self.submit(&attend, qkv, from_message);
        let output = output.map_err(|error| self.failed(&name(&attend), error))?;
        self.submitted = Some(Submitted { started, arrived, attend, output });
        Ok(true)
    }

    /// If the device is done with its rows, the answer: where q, k, v came from, the output goes.
    /// `None` if it is not done, or has none.
    pub fn finish(&mut self) -> Result<Option<Answer<B::Buffer>>, ClusterError> {
        let Some(Submitted { attend, .. }) = &self.submitted else { return Ok(None) };
        if !self.backend.is_done().map_err(|error| self.failed(&name(attend), error))? {
            return Ok(None);
        }
        let done = self.submitted.take().expect("looked at above");
        let Attend { step, layer, rows } = done.attend;
        self.report.record(rows.len(), done.started, std::iter::once(done.arrived));
        self.tracer.record(done.started, layer, step.shard.flight, 1, rows.len());
        Ok(Some((self.node.computed(), done.output)))
    }

    fn submit(
        &mut self,
        attend: &Attend,
        qkv: B::Buffer,
        from_message: bool,
    ) -> Result<Payload<B::Buffer>, ComputeError> {
        let mut rows = Vec::with_capacity(attend.rows.len());
        for row in &attend.rows {
            let first = (row.position / PAGE_POSITIONS) as usize;
            self.kernels.bind(row.slot, first, &[row.page])?;
            rows.push(AttendRow { slot: row.slot, position: row.position });
        }
        let mut attended = self.backend.take(rows.len() * self.query_width * 2)?;
        self.kernels.attend(attend.layer as usize, &rows, &qkv, &mut attended)?;
        self.backend.give(qkv);
        Ok(match from_message {
            true => Payload::Host(self.backend.to_host(attended)?),
            false => Payload::Device(attended),
        })
    }

    fn failed(&self, kernel: &str, source: ComputeError) -> ClusterError {
        let (node, kernel) = (self.report.name.clone(), kernel.to_owned());
        ClusterError::Kernel { node, kernel, source: Box::new(source) }
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }
}

/// What rows are called where they fail.
fn name(attend: &Attend) -> String {
    format!("attention of layer {}", attend.layer)
}
