//! The fixed 64-byte header every message starts with, the limits it is checked against before
//! anything is allocated for its body, and the checksum.

use crate::error::WireError;
use crate::kind::{Kind, PROTOCOL_VERSION};
use crate::row::{ShardId, StepId};
use crate::table::{CONTEXT_ROW_BYTES, row_table_bytes_min};
use std::mem::{align_of, offset_of, size_of};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every header.
pub const HEADER_BYTES: usize = 64;
/// The first four bytes of every message: "GLNT".
pub const MAGIC: u32 = u32::from_le_bytes(*b"GLNT");

/// The header as it travels: little-endian, no padding, readable at any address.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireHeader {
    magic: U32,
    version: U16,
    kind: u8,
    reserved_kind: u8,
    flight: U32,
    lane: U32,
    epoch: U64,
    layer: U32,
    rows: U32,
    table_bytes: U32,
    payload_bytes: U32,
    reserved: [u8; 16],
    /// CRC-32 of table and payload, in this order.
    body_checksum: U32,
    /// CRC-32 of the 60 bytes before it: lengths are believed only after it matches.
    header_checksum: U32,
}

const CHECKED_BYTES: usize = HEADER_BYTES - 4;

const _: () = assert!(size_of::<WireHeader>() == HEADER_BYTES && align_of::<WireHeader>() == 1);
const _: () = assert!(offset_of!(WireHeader, version) == 4 && offset_of!(WireHeader, kind) == 6);
const _: () = assert!(offset_of!(WireHeader, flight) == 8 && offset_of!(WireHeader, lane) == 12);
const _: () = assert!(offset_of!(WireHeader, epoch) == 16 && offset_of!(WireHeader, layer) == 24);
const _: () = assert!(offset_of!(WireHeader, rows) == 28);
const _: () = assert!(offset_of!(WireHeader, table_bytes) == 32);
const _: () = assert!(offset_of!(WireHeader, payload_bytes) == 36);
const _: () = assert!(offset_of!(WireHeader, reserved) == 40);
const _: () = assert!(offset_of!(WireHeader, body_checksum) == 56);
const _: () = assert!(offset_of!(WireHeader, header_checksum) == CHECKED_BYTES);

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

/// A header that was found to be well-formed and within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) kind: Kind,
    /// 0 in the kinds that belong to no step.
    pub(crate) step: StepId,
    /// 0 in the kinds that belong to no layer.
    pub(crate) layer: u32,
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
        let mut reserved = wire.reserved.iter().chain([&wire.reserved_kind]);
        if let Some(&found) = reserved.find(|byte| **byte != 0) {
            return Err(WireError::Reserved { found });
        }
        let header = Self {
            kind: Kind::from_byte(wire.kind).ok_or(WireError::Kind { found: wire.kind })?,
            step: StepId {
                shard: ShardId { flight: wire.flight.get(), lane: wire.lane.get() },
                epoch: wire.epoch.get(),
            },
            layer: wire.layer.get(),
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
            reserved_kind: 0,
            flight: self.step.shard.flight.into(),
            lane: self.step.shard.lane.into(),
            epoch: self.step.epoch.into(),
            layer: self.layer.into(),
            rows: self.rows.into(),
            table_bytes: self.table_bytes.into(),
            payload_bytes: self.payload_bytes.into(),
            reserved: [0; 16],
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
        let each = CONTEXT_ROW_BYTES as u64;
        let fits = table >= rows * each && table.is_multiple_of(each);
        let context_rows = (fits, "table bytes", table, "must be 12 for each row and shared page");
        let fits = table >= row_table_bytes_min(rows);
        let row_table = (fits, "table bytes", table, "too few for the rows");
        let bf16_rows = (values(2), "payload bytes", payload, "must be whole bf16 rows");
        let f32_rows = (values(4), "payload bytes", payload, "must be whole f32 rows");
        // The header's fields that a kind has no use for are reserved in it.
        let layer = u64::from(self.layer);
        let no_layer = (layer == 0, "layer", layer, "must be 0");
        let StepId { shard: ShardId { flight, lane }, epoch } = self.step;
        let no_flight = (flight == 0, "flight", flight.into(), "must be 0");
        let no_lane = (lane == 0, "lane", lane.into(), "must be 0");
        let no_epoch = (epoch == 0, "epoch", epoch, "must be 0");
        let rules: &[_] = match self.kind {
            Kind::Attend => &[some_rows, context_rows, bf16_rows],
            Kind::Attended => &[some_rows, no_table, bf16_rows],
            Kind::Hop => &[some_rows, row_table, f32_rows, no_layer],
            Kind::Launch => &[some_rows, row_table, no_payload, no_layer],
            Kind::Home => &[no_rows, no_payload, no_layer],
            Kind::Control => &[no_rows, no_flight, no_lane, no_epoch, no_layer],
            Kind::Heartbeat | Kind::Goodbye => {
                &[no_rows, no_table, no_payload, no_flight, no_lane, no_epoch, no_layer]
            }
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

    /// The step it belongs to.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// The layer it belongs to, counted from the first of the slice.
    pub fn layer(&self) -> u32 {
        self.layer
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
