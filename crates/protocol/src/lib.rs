//! Dispatcher, Tier-1 node and Tier-2 node as state machines: no sockets, clocks, threads,
//! randomness or kernels. Drivers elsewhere run them in a process, on a network, in virtual time.
#![forbid(unsafe_code)]

mod prompt;

pub use prompt::{Completion, Finish, Generated, Prompt, PromptId, Sampling};
