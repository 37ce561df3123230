//! The state object that travels through the layers: rows, payload buffers, and (on a network) the
//! wire form. Pure data: nothing here computes, schedules or talks to a socket.
#![forbid(unsafe_code)]

mod buffer;
mod row;

pub use buffer::{Buffer, Pool};
pub use row::{PAGE_POSITIONS, Row, Shard};
