//! A Tier-2 node with its kernels: rows and their q, k, v in, attention output out.

use crate::error::ClusterError;
use crate::stats::NodeStats;
use glinthawk_compute::{AttendRow, ContextKernels};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_protocol::{Attend, Attended, ShardId, Tier2Node};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The node's state machine, its pages, and the payloads that wait.
pub struct Tier2Worker<C> {
    node: Tier2Node,
    kernels: C,
    query_width: usize,
    payloads: HashMap<(ShardId, u32), Buffer>,
    pool: Arc<Pool>,
    stats: NodeStats,
}

impl<C: ContextKernels<Buffer = Buffer>> Tier2Worker<C> {
    /// A worker over `kernels`, whose attention output is `query_width` values wide.
    pub fn new(node: Tier2Node, kernels: C, query_width: usize, pool: Arc<Pool>) -> Self {
        Self {
            node,
            kernels,
            query_width,
            payloads: HashMap::new(),
            pool,
            stats: NodeStats::default(),
        }
    }

    /// Takes rows with their q, k, v: (rows, query_width + 2·kv_width) bf16.
    pub fn take(&mut self, attend: Attend, qkv: Buffer) -> Result<(), ClusterError> {
        let key = (attend.shard, attend.layer);
        self.node.take(attend)?;
        self.payloads.insert(key, qkv);
        Ok(())
    }

    /// Appends and attends the next rows that wait; `None` where none do.
    pub fn compute(&mut self) -> Option<(Attended, Buffer)> {
        let attend = self.node.start()?;
        let started = Instant::now();
        let qkv = self.payloads.remove(&(attend.shard, attend.layer)).expect("came with the rows");
        let rows: Vec<AttendRow<'_>> = attend
            .rows
            .iter()
            .map(|row| AttendRow { position: row.position, pages: self.node.pages(row) })
            .collect();
        let mut attended = self.pool.take(rows.len() * self.query_width * 2);
        self.kernels.attend(attend.layer as usize, &rows, &qkv, &mut attended);
        self.pool.give(qkv);
        self.stats.record(attend.rows.len(), started.elapsed());
        Some((self.node.computed(), attended))
    }

    /// Counters so far.
    pub fn stats(&self) -> &NodeStats {
        &self.stats
    }
}
