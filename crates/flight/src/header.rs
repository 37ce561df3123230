//! The fixed 64-byte header every message starts with, the limits it is checked against before
//! anything is allocated for its body, and the checksum.

use crate::error::WireError;
use crate::row::Shard;
use crate::table::{CONTEXT_ROW_BYTES, row_table_bytes_min};
use std::fmt;
use std::mem::{align_of, offset_of, size_of};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every header.
pub const HEADER_BYTES: usize = 64;
/// The first four bytes of every message and handshake: "GLNT".
pub const MAGIC: u32 = u32::from_le_bytes(*b"GLNT");
/// Version of headers, tables, handshake and control messages together.
pub const PROTOCOL_VERSION: u16 = 3;

/// The header as it travels: little-endian, no padding, readable at any address.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireHeader {
    magic: U32,
    version: U16,
    kind: u8,
    reserved: u8,
    flight: U32,
    lane: U32,
    epoch: U64,
    step: U64,
    layer: U32,
    start: U32,
    rows: U32,
    table_bytes: U32,
    payload_bytes: U32,
    held_us: U32,
    /// CRC-32 of table and payload, in this order.
    body_checksum: U32,
    /// CRC-32 of the 60 bytes before it: lengths are believed only after it matches.
    header_checksum: U32,
}

const CHECKED_BYTES: usize = HEADER_BYTES - 4;

const _: () = assert!(size_of::<WireHeader>() == HEADER_BYTES && align_of::<WireHeader>() == 1);
const _: () = assert!(offset_of!(WireHeader, version) == 4 && offset_of!(WireHeader, kind) == 6);
const _: () = assert!(offset_of!(WireHeader, flight) == 8 && offset_of!(WireHeader, lane) == 12);
const _: () = assert!(offset_of!(WireHeader, epoch) == 16 && offset_of!(WireHeader, step) == 24);
const _: () = assert!(offset_of!(WireHeader, layer) == 32 && offset_of!(WireHeader, start) == 36);
const _: () = assert!(offset_of!(WireHeader, rows) == 40);
const _: () = assert!(offset_of!(WireHeader, table_bytes) == 44);
const _: () = assert!(offset_of!(WireHeader, payload_bytes) == 48);
const _: () = assert!(offset_of!(WireHeader, held_us) == 52);
const _: () = assert!(offset_of!(WireHeader, body_checksum) == 56);
const _: () = assert!(offset_of!(WireHeader, header_checksum) == CHECKED_BYTES);

/// What a message is. The number is its byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Tier 1 → Tier 2: rows (slot, position, page) and their q, k, v in bf16.
    Attend = 1,
    /// Tier 2 → Tier 1: the rows' attention output in bf16, in the order asked.
    Attended = 2,
    /// Slice → next slice: rows, shards, sampling, and the residual in f32.
    Hop = 3,
    /// Dispatcher → slice 0: rows, shards, sampling.
    Launch = 4,
    /// Last slice → dispatcher: what was sampled, encoded by the sender.
    Home = 5,
    /// Anything else nodes tell each other; encoded by the sender, with an optional payload.
    Control = 6,
    /// Says that the sender lives.
    Heartbeat = 7,
    /// The sender's last message: it leaves in good order.
    Goodbye = 8,
}

/// Every kind; `KINDS[kind.index()] == kind`.
pub const KINDS: [Kind; 8] = [
    Kind::Attend,
    Kind::Attended,
    Kind::Hop,
    Kind::Launch,
    Kind::Home,
    Kind::Control,
    Kind::Heartbeat,
    Kind::Goodbye,
];

impl Kind {
    /// The kind's place in [`KINDS`], for counters by kind.
    pub fn index(self) -> usize {
        self as usize - 1
    }

    /// The kind's name in logs and statistics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Attend => "attend",
            Kind::Attended => "attended",
            Kind::Hop => "hop",
            Kind::Launch => "launch",
            Kind::Home => "home",
            Kind::Control => "control",
            Kind::Heartbeat => "heartbeat",
            Kind::Goodbye => "goodbye",
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Upper bounds on one message, agreed in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows at most.
    pub rows_max: u32,
    /// Bytes of row table or encoded control message at most.
    pub table_bytes_max: u32,
    /// Bytes of payload at most.
    pub payload_bytes_max: u32,
}

impl Default for Limits {
    /// Room for 4096 rows of a 70B model's residual in one hop, with some to spare.
    fn default() -> Self {
        Self { rows_max: 1 << 16, table_bytes_max: 8 << 20, payload_bytes_max: 256 << 20 }
    }
}

impl Limits {
    /// What two nodes that have these limits may send each other.
    pub fn agree(self, other: Self) -> Self {
        Self {
            rows_max: self.rows_max.min(other.rows_max),
            table_bytes_max: self.table_bytes_max.min(other.table_bytes_max),
            payload_bytes_max: self.payload_bytes_max.min(other.payload_bytes_max),
        }
    }
}

/// Where in the computation a message belongs. Fields that a kind has no use for are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The flight.
    pub flight: u32,
    /// The attempt; what carries an older one is dropped.
    pub epoch: u64,
    /// The flight's pass through the layers.
    pub step: u64,
    /// Layer of the model, from 0; a hop's is the first that the receiver runs.
    pub layer: u32,
    /// The Tier-2 node's place in its Tier-1 node's list of attention workers.
    pub lane: u32,
    /// First of the message's rows in the flight.
    pub start: u32,
    /// In an answer: how long the answering node held the request, microseconds, so that the asker
    /// can tell network from compute without a common clock.
    pub held_us: u32,
}

/// A header that was found to be well-formed and within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) kind: Kind,
    pub(crate) place: Place,
    pub(crate) rows: u32,
    pub(crate) table_bytes: u32,
    pub(crate) payload_bytes: u32,
    pub(crate) body_checksum: u32,
}

impl Header {
    /// Reads a header and checks everything that can be checked without the body.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self, WireError> {
        let truncated =
            WireError::Truncated { part: "header", bytes: bytes.len(), needed: HEADER_BYTES };
        let (wire, _) = WireHeader::ref_from_prefix(bytes).map_err(|_| truncated)?;
        if wire.magic.get() != MAGIC {
            return Err(WireError::Magic { found: wire.magic.get() });
        }
        if wire.version.get() != PROTOCOL_VERSION {
            return Err(WireError::Version { found: wire.version.get() });
        }
        let computed = crc32fast::hash(&bytes[..CHECKED_BYTES]);
        let found = wire.header_checksum.get();
        if found != computed {
            return Err(WireError::HeaderChecksum { found, computed });
        }
        if wire.reserved != 0 {
            return Err(WireError::Reserved { found: wire.reserved });
        }
        let header = Self {
            kind: Kind::from_byte(wire.kind).ok_or(WireError::Kind { found: wire.kind })?,
            place: wire.place(),
            rows: wire.rows.get(),
            table_bytes: wire.table_bytes.get(),
            payload_bytes: wire.payload_bytes.get(),
            body_checksum: wire.body_checksum.get(),
        };
        header.check(limits)?;
        Ok(header)
    }

    /// The header's bytes for a body of this checksum.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut wire = WireHeader {
            magic: MAGIC.into(),
            version: PROTOCOL_VERSION.into(),
            kind: self.kind as u8,
            reserved: 0,
            flight: self.place.flight.into(),
            lane: self.place.lane.into(),
            epoch: self.place.epoch.into(),
            step: self.place.step.into(),
            layer: self.place.layer.into(),
            start: self.place.start.into(),
            rows: self.rows.into(),
            table_bytes: self.table_bytes.into(),
            payload_bytes: self.payload_bytes.into(),
            held_us: self.place.held_us.into(),
            body_checksum: self.body_checksum.into(),
            header_checksum: 0.into(),
        };
        wire.header_checksum = crc32fast::hash(&wire.as_bytes()[..CHECKED_BYTES]).into();
        zerocopy::transmute!(wire)
    }

    /// Whether lengths are within the limits and fit the kind.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), WireError> {
        let bounds = [
            ("rows", self.rows, limits.rows_max),
            ("table bytes", self.table_bytes, limits.table_bytes_max),
            ("payload bytes", self.payload_bytes, limits.payload_bytes_max),
        ];
        for (field, value, limit) in bounds {
            if value > limit {
                let (value, limit) = (value.into(), limit.into());
                return Err(WireError::OverLimit { kind: self.kind, field, value, limit });
            }
        }
        self.check_shape()
    }

    fn check_shape(&self) -> Result<(), WireError> {
        let (rows, table) = (u64::from(self.rows), u64::from(self.table_bytes));
        let payload = u64::from(self.payload_bytes);
        let values = |bytes: u64| payload > 0 && rows > 0 && payload.is_multiple_of(bytes * rows);
        let some_rows = (rows > 0, "rows", rows, "must be at least 1");
        let no_rows = (rows == 0, "rows", rows, "must be 0");
        let no_table = (table == 0, "table bytes", table, "must be 0");
        let no_payload = (payload == 0, "payload bytes", payload, "must be 0");
        let fits = table == rows * CONTEXT_ROW_BYTES as u64;
        let context_rows = (fits, "table bytes", table, "must be 12 a row");
        let fits = table >= row_table_bytes_min(rows);
        let row_table = (fits, "table bytes", table, "too few for the rows");
        let bf16_rows = (values(2), "payload bytes", payload, "must be whole bf16 rows");
        let f32_rows = (values(4), "payload bytes", payload, "must be whole f32 rows");
        let rules: &[_] = match self.kind {
            Kind::Attend => &[some_rows, context_rows, bf16_rows],
            Kind::Attended => &[some_rows, no_table, bf16_rows],
            Kind::Hop => &[some_rows, row_table, f32_rows],
            Kind::Launch => &[some_rows, row_table, no_payload],
            Kind::Home => &[no_rows, no_payload],
            Kind::Control => &[no_rows],
            Kind::Heartbeat | Kind::Goodbye => &[no_rows, no_table, no_payload],
        };
        match rules.iter().find(|(fits, ..)| !fits) {
            None => Ok(()),
            Some(&(_, field, value, rule)) => {
                Err(WireError::Shape { kind: self.kind, rows: self.rows, field, value, rule })
            }
        }
    }

    /// What the message is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it belongs.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Rows it carries.
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Bytes of table that follow the header.
    pub fn table_bytes(&self) -> usize {
        self.table_bytes as usize
    }

    /// Bytes of payload that follow the table.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes as usize
    }

    /// Bytes of the whole message on the wire.
    pub fn wire_bytes(&self) -> usize {
        HEADER_BYTES + self.table_bytes() + self.payload_bytes()
    }

    /// The rows as a range of their flight.
    pub fn shard(&self) -> Shard {
        Shard { lane: self.place.lane, start: self.place.start, len: self.rows }
    }
}

impl WireHeader {
    fn place(&self) -> Place {
        Place {
            flight: self.flight.get(),
            epoch: self.epoch.get(),
            step: self.step.get(),
            layer: self.layer.get(),
            lane: self.lane.get(),
            start: self.start.get(),
            held_us: self.held_us.get(),
        }
    }
}

/// CRC-32 of table, then payload: some 60 GB/s from cache where the CPU has wide carry-less
/// multiplication, so that it costs a few percent of the copy into the socket. Fed piece by piece,
/// a receiver sums what is still in its cache.
#[derive(Clone, Default)]
pub struct BodyChecksum(crc32fast::Hasher);

impl BodyChecksum {
    /// The checksum of a whole body.
    pub fn of(table: &[u8], payload: &[u8]) -> Self {
        let mut checksum = Self::default();
        checksum.update(table);
        checksum.update(payload);
        checksum
    }

    /// Takes in the next bytes of the body.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> u32 {
        self.0.finalize()
    }
}
