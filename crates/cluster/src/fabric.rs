//! What carries a launched step through the layers and home again.

use crate::error::ClusterError;
use crate::report::NodeReport;
use glinthawk_protocol::{Home, Launch};
use std::time::Duration;

/// How long one call waits for something to come home.
pub(crate) const WAIT: Duration = Duration::from_millis(50);

/// The nodes behind an engine: in this process, or on a network.
pub trait Fabric {
    /// Takes a shard's step.
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError>;

    /// Computes something, or waits a little for the nodes that compute; appends what came home.
    fn advance(&mut self, homes: &mut Vec<Home>) -> Result<(), ClusterError>;

    /// What every node did so far.
    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError>;
}
