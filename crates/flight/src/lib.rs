//! The state object that travels through the layers: rows, payload buffers, and (on a network) the
//! wire form. Pure data: nothing here computes, schedules or talks to a socket.
#![forbid(unsafe_code)]

mod buffer;
mod error;
mod header;
mod kind;
mod message;
mod row;
mod table;
mod token;

pub use buffer::{Buffer, DeviceMemory, Pool};
pub use error::WireError;
pub use header::{BodyChecksum, HEADER_BYTES, Header, Limits, MAGIC};
pub use kind::{KINDS, Kind, PROTOCOL_VERSION};
pub use message::Message;
pub use row::{PAGE_POSITIONS, Row, ShardId, StepId, TOKEN_NONE, TOKEN_PENDING, pages_for};
pub use table::{CONTEXT_ROW_BYTES, ContextRow, RowTable};
pub use token::{Generated, Sample, Sampling};
