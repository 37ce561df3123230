//! What can be wrong with bytes that claim to be a message; every variant names the culprit.

use crate::kind::{Kind, PROTOCOL_VERSION};

/// Why bytes were refused as a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Fewer bytes than the part needs.
    #[error("{part} has {bytes} bytes, needs {needed}")]
    Truncated {
        /// Header, table or payload.
        part: &'static str,
        /// Bytes there are.
        bytes: usize,
        /// Bytes there must be.
        needed: usize,
    },
    /// Not our protocol at all.
    #[error("magic is {found:#010x}, not a glinthawk message")]
    Magic {
        /// The four bytes found.
        found: u32,
    },
    /// Our protocol, but another version of it.
    #[error("protocol version {found}, this node speaks {PROTOCOL_VERSION}")]
    Version {
        /// The sender's version.
        found: u16,
    },
    /// The header was altered on its way.
    #[error("header checksum {found:#010x}, its bytes give {computed:#010x}")]
    HeaderChecksum {
        /// The checksum the header carries.
        found: u32,
        /// The checksum of the bytes received.
        computed: u32,
    },
    /// Table or payload was altered on its way.
    #[error("{kind} body checksum {found:#010x}, its bytes give {computed:#010x}")]
    BodyChecksum {
        /// The message's kind.
        kind: Kind,
        /// The checksum the header carries.
        found: u32,
        /// The checksum of the bytes received.
        computed: u32,
    },
    /// A kind this version does not have.
    #[error("unknown message kind {found}")]
    Kind {
        /// The byte found.
        found: u8,
    },
    /// A reserved byte is not zero.
    #[error("reserved byte is {found}, must be 0")]
    Reserved {
        /// The byte found.
        found: u8,
    },
    /// A length beyond what the handshake agreed; nothing was allocated for it.
    #[error("{kind} with {field} {value}, agreed limit is {limit}")]
    OverLimit {
        /// The message's kind.
        kind: Kind,
        /// The field that is too large.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The limit agreed in the handshake.
        limit: u64,
    },
    /// A length that does not fit the kind or the number of rows.
    #[error("{kind} of {rows} rows with {field} {value}: {rule}")]
    Shape {
        /// The message's kind.
        kind: Kind,
        /// Rows in the header.
        rows: u32,
        /// The field that does not fit.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
}
