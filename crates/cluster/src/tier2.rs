//! A Tier-2 node with its kernels: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::report::NodeReport;
use crate::span::Tracer;
use glinthawk_compute::{AttendRow, ContextKernels};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_protocol::{Attend, Attended, Tier2Node};
use std::sync::Arc;
use std::time::Instant;

/// What waits with rows: their q, k, v, and when they arrived.
pub(crate) type Payload = (Buffer, Instant);

/// The node's state machine and its pages.
pub struct Tier2Worker<C> {
    node: Tier2Node<Payload>,
    kernels: C,
    query_width: usize,
    pool: Arc<Pool>,
    report: NodeReport,
    tracer: Tracer,
}

impl<C: ContextKernels<Buffer = Buffer>> Tier2Worker<C> {
    /// A worker over `kernels`, whose attention output is `query_width` values wide.
    pub fn new(
        name: String,
        node: Tier2Node<Payload>,
        kernels: C,
        query_width: usize,
        pool: Arc<Pool>,
        trace: bool,
    ) -> Self {
        let report = NodeReport::new(name, 2);
        let tracer = Tracer::new(trace);
        Self { node, kernels, query_width, pool, report, tracer }
    }

    /// Takes rows with their q, k, v, (rows, query_width + 2·kv_width) bf16, that arrived at the given
    /// time. Those of an abandoned step are dropped before they touch a page.
    pub fn take(
        &mut self,
        attend: Attend,
        qkv: Buffer,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        self.node.take(attend, (qkv, arrived))?;
        Ok(())
    }

    /// Appends and attends the next rows that wait; `None` if none do.
    pub fn compute(&mut self) -> Option<(Attended, Buffer)> {
        let (attend, (qkv, arrived)) = self.node.start()?;
        let started = Instant::now();
        let rows: Vec<AttendRow<'_>> = attend
            .rows
            .iter()
            .map(|row| AttendRow { position: row.position, pages: self.node.pages(row) })
            .collect();
        let mut attended = self.pool.take(rows.len() * self.query_width * 2);
        self.kernels.attend(attend.layer as usize, &rows, &qkv, &mut attended);
        self.pool.give(qkv);
        let rows = attend.rows.len();
        self.report.record(rows, started, std::iter::once(arrived));
        self.tracer.record(started, attend.layer, attend.step.shard.flight, 1, rows);
        Some((self.node.computed(), attended))
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }
}
