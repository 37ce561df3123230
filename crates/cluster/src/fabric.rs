//! What carries a launched step through the layers and home again.

use crate::error::ClusterError;
use crate::report::NodeReport;
use glinthawk_protocol::{Back, Home, Launch, StepId};
use std::time::Duration;

/// How long one call waits for something to come home.
pub(crate) const WAIT: Duration = Duration::from_millis(50);

/// What a fabric reports.
pub enum FabricEvent {
    /// A shard came home.
    Home(Home),
    /// A node is gone, and with it the contexts of some lanes. The other lanes go on, or rest until it has another host.
    NodeLost {
        /// The lanes.
        lanes: Vec<u32>,
        /// Which node, and what became of it.
        error: ClusterError,
    },
    /// A node has left in order, and with it some lanes.
    NodeLeft {
        /// Which node.
        name: String,
        /// The lanes.
        lanes: Vec<u32>,
    },
    /// Nobody has a step that was launched.
    Astray(StepId),
    /// Nobody took a lost node's place in time: the lanes that rested are lost.
    LanesClosed(Vec<u32>),
    /// A node is to leave: no further context should begin on its lanes.
    LanesLeaving(Vec<u32>),
    /// A place has a node again.
    NodeBack {
        /// Which place.
        name: String,
        /// How long it had none.
        after: Duration,
        /// The lanes that go on.
        back: Back,
    },
}

/// The nodes behind an engine: in this process, or on a network.
pub trait Fabric: Send {
    /// Takes a shard's step.
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError>;

    /// Whether it takes a shard's next step while one is in the air, and knows the tokens in between.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Computes something, or waits a little for the nodes that compute; appends what happened. An
    /// error is the end of the whole fabric.
    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError>;

    /// These lanes are leaving, and have no context left.
    fn drained(&mut self, _lanes: &[u32]) {}

    /// What every node did so far.
    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError>;
}
