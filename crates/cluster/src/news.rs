//! What a worker tells the person who started it.

use crate::control::Role;
use crate::report::NodeReport;
use glinthawk_model::Model;
use std::time::Duration;

/// What a worker does.
pub enum WorkerNews<'a> {
    /// It looks for the dispatcher at this address.
    Dialling(&'a str),
    /// The job is over, and it had no role.
    NotNeeded,
    /// It has its role.
    Joined(&'a Role),
    /// It loads so many bytes of weights of this model.
    Loading(&'a Model, u64),
    /// It has so many bytes for contexts.
    Contexts(u64),
    /// It can begin.
    Ready,
    /// It leaves when nothing of it is needed any more.
    Leaving,
    /// The job is over; this is what it did, and for how long it was ready.
    Done(&'a NodeReport, Duration),
}
