//! Row tables on the wire: little-endian entries viewed in place over the received bytes.

use crate::error::WireError;
use crate::header::Kind;
use crate::row::{Row, Shard, check_shards};
use std::mem::size_of;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`ContextRow`].
pub const CONTEXT_ROW_BYTES: usize = 12;

/// What a Tier-2 node must know of a row: nothing but where its context is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ContextRow {
    slot: U32,
    position: U32,
    page: U32,
}

const _: () = assert!(size_of::<ContextRow>() == CONTEXT_ROW_BYTES);

impl ContextRow {
    /// Context slot on the Tier-2 node.
    pub fn slot(&self) -> u32 {
        self.slot.get()
    }

    /// Position of the row in its prompt.
    pub fn position(&self) -> u32 {
        self.position.get()
    }

    /// Page that holds the position.
    pub fn page(&self) -> u32 {
        self.page.get()
    }
}

impl From<&Row> for ContextRow {
    fn from(row: &Row) -> Self {
        Self { slot: row.slot.into(), position: row.position.into(), page: row.page.into() }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireRow {
    context: ContextRow,
    token: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireShard {
    lane: U32,
    start: U32,
    len: U32,
}

/// Opens a row table; the sampling's length is what remains.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct TableHead {
    shards: U32,
}

const _: () = assert!(size_of::<WireRow>() == 16 && size_of::<WireShard>() == 12);

/// Bytes of a row table with one shard and no sampling.
pub(crate) fn row_table_bytes_min(rows: u64) -> u64 {
    size_of::<TableHead>() as u64
        + rows * size_of::<WireRow>() as u64
        + size_of::<WireShard>() as u64
}

/// A view of the table of a hop or launch: rows, shards, sampling.
#[derive(Clone, Copy)]
pub struct RowTable<'a> {
    rows: &'a [WireRow],
    shards: &'a [WireShard],
    sampling: &'a [u8],
}

impl<'a> RowTable<'a> {
    /// Views `table` as that of a message of `rows` rows; the shards must partition the rows.
    pub(crate) fn view(kind: Kind, rows: u32, table: &'a [u8]) -> Result<Self, WireError> {
        let bad = |value: usize, rule: &'static str| {
            let (field, value) = ("table bytes", value as u64);
            WireError::Shape { kind, rows, field, value, rule }
        };
        let short = |_| bad(table.len(), "too few for head, rows and shards");
        let (head, rest) = TableHead::ref_from_prefix(table).map_err(|_| short(()))?;
        let (wire_rows, rest) =
            <[WireRow]>::ref_from_prefix_with_elems(rest, rows as usize).map_err(|_| short(()))?;
        let (shards, sampling) =
            <[WireShard]>::ref_from_prefix_with_elems(rest, head.shards.get() as usize)
                .map_err(|_| short(()))?;
        let view = Self { rows: wire_rows, shards, sampling };
        check_shards(rows, view.shards()).map_err(|source| WireError::Shards { kind, source })?;
        Ok(view)
    }

    /// The table's bytes.
    pub(crate) fn encode(rows: &[Row], shards: &[Shard], sampling: &[u8]) -> Vec<u8> {
        let bytes = row_table_bytes_min(rows.len() as u64) as usize
            + shards.len() * size_of::<WireShard>()
            + sampling.len();
        let mut table = Vec::with_capacity(bytes);
        table.extend_from_slice(TableHead { shards: (shards.len() as u32).into() }.as_bytes());
        for row in rows {
            let wire = WireRow { context: ContextRow::from(row), token: row.token.into() };
            table.extend_from_slice(wire.as_bytes());
        }
        for shard in shards {
            let (lane, start, len) = (shard.lane.into(), shard.start.into(), shard.len.into());
            table.extend_from_slice(WireShard { lane, start, len }.as_bytes());
        }
        table.extend_from_slice(sampling);
        table
    }

    /// The rows, ordered by Tier-2 node.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + use<'a> {
        self.rows.iter().map(|row| Row {
            slot: row.context.slot(),
            position: row.context.position(),
            page: row.context.page(),
            token: row.token.get(),
        })
    }

    /// The shards: together exactly the rows, lanes ascending.
    pub fn shards(&self) -> impl ExactSizeIterator<Item = Shard> + use<'a> {
        self.shards.iter().map(|shard| Shard {
            lane: shard.lane.get(),
            start: shard.start.get(),
            len: shard.len.get(),
        })
    }

    /// The sampling table, as its sender encoded it.
    pub fn sampling(&self) -> &'a [u8] {
        self.sampling
    }
}
