//! One connection as the thread that reads it has it: bytes from the socket into messages. Never blocks.

use super::channel::Channel;
use super::event::LostReason;
use super::outlet::Outlet;
use glinthawk_flight::{BodyChecksum, Buffer, HEADER_BYTES, Header, Limits, Message, Pool};
use std::io::{self, ErrorKind, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

/// What is allocated for a body's table, and for its payload, when it is announced. From there on they grow as bytes
/// arrive: what was announced and never came takes no memory.
const FIRST_BYTES: usize = 64 << 10;

pub(super) struct Connection {
    pub(super) outlet: Arc<Outlet>,
    inbound: Inbound,
    /// Nothing is read while the node has not taken what was received.
    pub(super) paused: bool,
    /// When bytes last came in; or when reading was resumed.
    pub(super) heard_at: Instant,
}

impl Connection {
    /// Reads in one turn, so that a busy peer does not keep the others waiting.
    pub(super) const READS_PER_TURN: usize = 32;

    pub(super) fn new(outlet: Arc<Outlet>, now: Instant) -> Self {
        Self { outlet, inbound: Inbound::default(), paused: false, heard_at: now }
    }

    /// Whether there is something to receive that `poll` cannot see.
    pub(super) fn holds_input(&self) -> bool {
        !self.paused && self.outlet.channel.holds_input()
    }

    /// The next whole message, or `None` when the socket has no more for now. `reads` counts down.
    pub(super) fn receive(
        &mut self,
        pool: &Pool,
        reads: &mut usize,
        now: Instant,
    ) -> Result<Option<Message>, LostReason> {
        loop {
            if let Some(message) = self.inbound.assemble(&self.outlet.limits, pool)? {
                self.outlet.counters.received[message.kind().index()].count(message.header());
                return Ok(Some(message));
            }
            if std::mem::take(&mut self.inbound.drained) || *reads == 0 {
                return Ok(None);
            }
            *reads -= 1;
            match self.inbound.fill(&self.outlet.channel, pool) {
                Ok(0) => return Err(self.inbound.cut()),
                Ok(_) => self.heard_at = now,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LostReason::Broken(error.to_string())),
            }
        }
    }
}

/// Bytes on their way to being a message. The body is received straight into its buffers, and the
/// next header with it, so that a stream of messages costs one read each.
#[derive(Default)]
struct Inbound {
    header: HeaderBytes,
    header_filled: usize,
    body: Option<Body>,
    /// The last read got less than it asked for: asking again now would get nothing.
    drained: bool,
}

struct HeaderBytes([u8; HEADER_BYTES]);

impl Default for HeaderBytes {
    fn default() -> Self {
        Self([0; HEADER_BYTES])
    }
}

struct Body {
    header: Header,
    /// At least as long as what has come of it, as is the payload.
    table: Vec<u8>,
    payload: Buffer,
    filled: usize,
    /// Checksum of the bytes filled so far, computed while they are in the cache.
    checksum: BodyChecksum,
}

impl Body {
    fn new(header: Header, pool: &Pool) -> Self {
        let (table, payload) = (header.table_bytes(), header.payload_bytes());
        let first = || pool.take(payload.min(FIRST_BYTES));
        Self {
            header,
            table: vec![0; table.min(FIRST_BYTES)],
            payload: pool.take_idle(payload).unwrap_or_else(first),
            filled: 0,
            checksum: BodyChecksum::default(),
        }
    }

    fn needed(&self) -> usize {
        self.header.table_bytes() + self.header.payload_bytes()
    }

    /// Bytes that there is room for now: nothing of the payload before the table is whole.
    fn room(&self) -> usize {
        match self.table.len() < self.header.table_bytes() {
            true => self.table.len(),
            false => self.table.len() + self.payload.len_bytes(),
        }
    }

    /// Makes room for as many bytes as have come, if there is none left.
    fn grow(&mut self, pool: &Pool) {
        if self.filled < self.room() || self.filled == self.needed() {
            return;
        }
        let (table, payload) = (self.table.len(), self.payload.len_bytes());
        if table < self.header.table_bytes() {
            self.table.resize((2 * table).min(self.header.table_bytes()), 0);
        } else {
            let mut larger = pool.take((2 * payload).min(self.header.payload_bytes()));
            larger.bytes_mut()[..payload].copy_from_slice(self.payload.bytes());
            pool.give(std::mem::replace(&mut self.payload, larger));
        }
    }

    fn take_in(&mut self, bytes: usize) {
        let (table, end) = (self.table.len(), self.filled + bytes);
        self.checksum.update(&self.table[self.filled.min(table)..end.min(table)]);
        let payload_start = self.filled.saturating_sub(table);
        let payload_end = end.saturating_sub(table);
        self.checksum.update(&self.payload.bytes()[payload_start..payload_end]);
        self.filled = end;
    }
}

impl Inbound {
    /// Turns the bytes received so far into a checked header, buffers for its body, or a message.
    fn assemble(&mut self, limits: &Limits, pool: &Pool) -> Result<Option<Message>, LostReason> {
        if self.body.is_none() && self.header_filled == HEADER_BYTES {
            let header = Header::decode(&self.header.0, limits)?;
            self.body = Some(Body::new(header, pool));
            self.header_filled = 0;
        }
        match self.body.take_if(|body| body.filled == body.needed()) {
            None => Ok(None),
            Some(Body { header, table, payload, checksum, .. }) => {
                Ok(Some(Message::open(header, table, payload, checksum)?))
            }
        }
    }

    fn fill(&mut self, channel: &Channel, pool: &Pool) -> io::Result<usize> {
        let next_header = &mut self.header.0[self.header_filled..];
        let (read, wanted, body_wanted) = match &mut self.body {
            None => {
                let wanted = next_header.len();
                (channel.read_vectored(&mut [IoSliceMut::new(next_header)])?, wanted, 0)
            }
            Some(body) => {
                body.grow(pool);
                let wanted = body.room() - body.filled;
                let is_all = body.room() == body.needed();
                let table_filled = body.filled.min(body.table.len());
                let payload = (body.filled - table_filled)..(body.room() - body.table.len());
                let next_header = if is_all { next_header } else { &mut [] };
                let read_max = wanted + next_header.len();
                let mut slices = [
                    IoSliceMut::new(&mut body.table[table_filled..]),
                    IoSliceMut::new(&mut body.payload.bytes_mut()[payload]),
                    IoSliceMut::new(next_header),
                ];
                (channel.read_vectored(&mut slices)?, read_max, wanted)
            }
        };
        self.drained = read < wanted && !channel.holds_input();
        let of_body = read.min(body_wanted);
        if let Some(body) = &mut self.body {
            body.take_in(of_body);
        }
        self.header_filled += read - of_body;
        Ok(read)
    }

    /// What the end of the stream means here.
    fn cut(&self) -> LostReason {
        match &self.body {
            Some(body) => LostReason::Cut {
                bytes: HEADER_BYTES + body.filled,
                needed: HEADER_BYTES + body.needed(),
            },
            None if self.header_filled > 0 => {
                LostReason::Cut { bytes: self.header_filled, needed: HEADER_BYTES }
            }
            None => LostReason::Closed,
        }
    }
}
