//! A whole message: header, table and payload, made here by a sender or opened from received
//! bytes. Every message that exists is well-formed, so its views cannot fail.

use crate::buffer::Buffer;
use crate::error::WireError;
use crate::header::{BodyChecksum, HEADER_BYTES, Header, Limits};
use crate::kind::Kind;
use crate::row::{Row, StepId};
use crate::table::{CONTEXT_ROW_BYTES, ContextRow, RowTable};
use zerocopy::{FromBytes, IntoBytes};

/// One message between two nodes, owning its bytes.
#[derive(Clone)]
pub struct Message {
    header: Header,
    table: Vec<u8>,
    payload: Buffer,
}

impl Message {
    /// A shard's rows and their q, k, v, (rows, query_width + 2·kv_width) bf16, for a Tier-2 node. `shared` are pages that
    /// the rows' contexts begin with.
    pub fn attend(step: StepId, layer: u32, rows: &[Row], shared: &[Row], qkv: Buffer) -> Self {
        let mut table = Vec::with_capacity((rows.len() + shared.len()) * CONTEXT_ROW_BYTES);
        for row in rows.iter().chain(shared) {
            table.extend_from_slice(ContextRow::from(row).as_bytes());
        }
        Self::make(Kind::Attend, step, layer, rows.len(), table, qkv)
    }

    /// The answer to an attend of `rows` rows: (rows, query_width) bf16.
    pub fn attended(step: StepId, layer: u32, rows: usize, attended: Buffer) -> Self {
        Self::make(Kind::Attended, step, layer, rows, Vec::new(), attended)
    }

    /// A shard on its way to the next slice; `residual` is (rows, hidden) f32.
    pub fn hop(step: StepId, rows: &[Row], sampling: &[u8], residual: Buffer) -> Self {
        let table = RowTable::encode(rows, sampling);
        Self::make(Kind::Hop, step, 0, rows.len(), table, residual)
    }

    /// A shard on its way to slice 0.
    pub fn launch(step: StepId, rows: &[Row], sampling: &[u8]) -> Self {
        let table = RowTable::encode(rows, sampling);
        Self::make(Kind::Launch, step, 0, rows.len(), table, Buffer::default())
    }

    /// What the last slice sampled, encoded by the caller.
    pub fn home(step: StepId, sampled: Vec<u8>) -> Self {
        Self::make(Kind::Home, step, 0, 0, sampled, Buffer::default())
    }

    /// A control message, encoded by the caller; `payload` may be empty.
    pub fn control(control: Vec<u8>, payload: Buffer) -> Self {
        Self::make(Kind::Control, StepId::default(), 0, 0, control, payload)
    }

    /// A sign of life.
    pub fn heartbeat() -> Self {
        Self::make(Kind::Heartbeat, StepId::default(), 0, 0, Vec::new(), Buffer::default())
    }

    /// The last message before leaving.
    pub fn goodbye() -> Self {
        Self::make(Kind::Goodbye, StepId::default(), 0, 0, Vec::new(), Buffer::default())
    }

    /// Panics if the parts do not fit each other: that is the sender's own mistake.
    fn make(
        kind: Kind,
        step: StepId,
        layer: u32,
        rows: usize,
        table: Vec<u8>,
        payload: Buffer,
    ) -> Self {
        let length = |value: usize| u32::try_from(value).expect("message parts are below 4 GiB");
        let header = Header {
            kind,
            step,
            layer,
            rows: length(rows),
            table_bytes: length(table.len()),
            payload_bytes: length(payload.len_bytes()),
            body_checksum: 0,
        };
        let unlimited =
            Limits { rows_max: u32::MAX, table_bytes_max: u32::MAX, payload_bytes_max: u32::MAX };
        let message = Self { header, table, payload };
        let fits = message.header.check(&unlimited).and_then(|()| message.check_table());
        assert!(fits.is_ok(), "ill-formed message: {}", fits.unwrap_err());
        message
    }

    /// A received message: checks table and payload, and the checksum that was computed of them
    /// as they came in, against the header that announced them.
    pub fn open(
        header: Header,
        table: Vec<u8>,
        payload: Buffer,
        checksum: BodyChecksum,
    ) -> Result<Self, WireError> {
        let lengths = [
            ("table", table.len(), header.table_bytes()),
            ("payload", payload.len_bytes(), header.payload_bytes()),
        ];
        for (part, bytes, needed) in lengths {
            if bytes != needed {
                return Err(WireError::Truncated { part, bytes, needed });
            }
        }
        let computed = checksum.finish();
        let found = header.body_checksum;
        if found != computed {
            return Err(WireError::BodyChecksum { kind: header.kind, found, computed });
        }
        let message = Self { header, table, payload };
        message.check_table()?;
        Ok(message)
    }

    fn check_table(&self) -> Result<(), WireError> {
        match self.header.kind {
            Kind::Hop | Kind::Launch => self.view_row_table().map(|_| ()),
            _ => Ok(()),
        }
    }

    fn view_row_table(&self) -> Result<RowTable<'_>, WireError> {
        RowTable::view(self.header.kind, self.header.rows, &self.table)
    }

    /// The header's bytes, checksums included. They, the table and the payload, in this order, are
    /// the message on the wire.
    pub fn seal(&self) -> [u8; HEADER_BYTES] {
        let body_checksum = BodyChecksum::of(&self.table, self.payload.bytes()).finish();
        Header { body_checksum, ..self.header }.encode()
    }

    /// Whether a peer with these limits would take the message.
    pub fn check(&self, limits: &Limits) -> Result<(), WireError> {
        self.header.check(limits)
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the message is.
    pub fn kind(&self) -> Kind {
        self.header.kind
    }

    /// The step it belongs to.
    pub fn step(&self) -> StepId {
        self.header.step
    }

    /// The layer it belongs to, counted from the first of the slice.
    pub fn layer(&self) -> u32 {
        self.header.layer
    }

    /// Rows it carries.
    pub fn rows(&self) -> usize {
        self.header.rows()
    }

    /// The table's bytes; what was encoded, for a home or a control message.
    pub fn table(&self) -> &[u8] {
        &self.table
    }

    /// The rows of an attend and the shared pages; panics for another kind.
    pub fn context_rows(&self) -> (&[ContextRow], &[ContextRow]) {
        assert_eq!(self.header.kind, Kind::Attend, "only an attend has context rows");
        let all = <[ContextRow]>::ref_from_bytes(&self.table);
        all.expect("12 bytes each, checked when made").split_at(self.rows())
    }

    /// Rows and sampling of a hop or launch; panics for another kind.
    pub fn row_table(&self) -> RowTable<'_> {
        assert!(
            matches!(self.header.kind, Kind::Hop | Kind::Launch),
            "a {} has no row table",
            self.header.kind
        );
        self.view_row_table().expect("the row table was checked when made")
    }

    /// The payload.
    pub fn payload(&self) -> &Buffer {
        &self.payload
    }

    /// The payload, for the kernels or back to the pool.
    pub fn into_payload(self) -> Buffer {
        self.payload
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.header.fmt(formatter)
    }
}
