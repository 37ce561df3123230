//! Dispatcher, Tier-1 node and Tier-2 node as state machines: no sockets, clocks, threads,
//! randomness or kernels. Drivers elsewhere run them in a process or on a network; the one here
//! runs them in virtual time.
#![forbid(unsafe_code)]

mod dispatcher;
mod histogram;
mod message;
mod prompt;
mod tier1;
mod tier2;
pub mod virtual_time;

pub use dispatcher::{
    Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, DispatcherStats, Rejection,
    Standing, lane_pages,
};
pub use glinthawk_flight::{Generated, PAGE_POSITIONS, Sample, ShardId, StepId};
pub use histogram::Histogram;
pub use message::{Attend, Attended, Home, Launch, Merge};
pub use prompt::{Completion, Finish, Prompt, PromptId, Sampling};
pub use tier1::{Stage, Tier1Action, Tier1Node, Tier1Work};
pub use tier2::{Tier2Error, Tier2Node};
