//! Dispatcher, Tier-1 node and Tier-2 node as state machines: no sockets, clocks, threads,
//! randomness or kernels. A [`Driver`] drives the nodes of a process. Here it runs in virtual time,
//! elsewhere in a process or on a network.
#![forbid(unsafe_code)]

mod dispatcher;
mod driver;
mod histogram;
mod message;
mod pace;
mod prompt;
mod roster;
mod tier1;
mod tier2;
mod timeline;
pub mod virtual_time;
mod watch;

pub use dispatcher::{
    DRAFTS_MAX, Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, DispatcherStats,
    LaneShape, OVERSUBSCRIPTION, PromptStanding, Rejection, lane_flights, lane_pages, page_hashes,
};
pub use driver::{Compute, Driver, Outgoing, Started};
pub use glinthawk_flight::{
    Generated, PAGE_POSITIONS, Row, Sample, Sampling, ShardId, StepId, TOKEN_NONE, TOKEN_PENDING,
};
pub use histogram::Histogram;
pub use message::{Attend, Attended, Home, Launch, Merge, NodeAddress, Parcel};
pub use pace::{BatchKind, Pace};
pub use prompt::{Biases, Completion, Finish, Prompt, PromptId};
pub use roster::{Back, Place, Roster, RosterShape};
pub use tier1::{Stage, Task, Tier1Node, Tier1Work};
pub use tier2::{Tier2Error, Tier2Node, Tier2Work, network_cores};
pub use timeline::Timeline;
pub use watch::{Finding, Held, Watch};
