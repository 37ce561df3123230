//! Row tables on the wire: little-endian entries viewed in place over the received bytes.

use crate::error::WireError;
use crate::kind::Kind;
use crate::row::Row;
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

const _: () = assert!(size_of::<WireRow>() == 16);

/// Bytes of a row table without sampling.
pub(crate) fn row_table_bytes_min(rows: u64) -> u64 {
    rows * size_of::<WireRow>() as u64
}

/// A view of the table of a hop or launch: the rows, then their sampling in the bytes that remain.
#[derive(Clone, Copy)]
pub struct RowTable<'a> {
    rows: &'a [WireRow],
    sampling: &'a [u8],
}

impl<'a> RowTable<'a> {
    pub(crate) fn view(kind: Kind, rows: u32, table: &'a [u8]) -> Result<Self, WireError> {
        let (rows, sampling) = <[WireRow]>::ref_from_prefix_with_elems(table, rows as usize)
            .map_err(|_| {
                let (field, value) = ("table bytes", table.len() as u64);
                WireError::Shape { kind, rows, field, value, rule: "too few for the rows" }
            })?;
        Ok(Self { rows, sampling })
    }

    /// The table's bytes.
    pub(crate) fn encode(rows: &[Row], sampling: &[u8]) -> Vec<u8> {
        let bytes = row_table_bytes_min(rows.len() as u64) as usize + sampling.len();
        let mut table = Vec::with_capacity(bytes);
        for row in rows {
            let wire = WireRow { context: ContextRow::from(row), token: row.token.into() };
            table.extend_from_slice(wire.as_bytes());
        }
        table.extend_from_slice(sampling);
        table
    }

    /// The rows of the shard.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + use<'a> {
        self.rows.iter().map(|row| Row {
            slot: row.context.slot(),
            position: row.context.position(),
            page: row.context.page(),
            token: row.token.get(),
        })
    }

    /// The sampling table, as its sender encoded it.
    pub fn sampling(&self) -> &'a [u8] {
        self.sampling
    }
}
