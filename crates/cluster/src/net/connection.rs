//! One connection: bytes from the socket into messages, messages into the socket. Never blocks.

use super::controller::LostReason;
use super::link::{Link, Sealed};
use super::stats::PeerCounters;
use glinthawk_flight::{Buffer, HEADER_BYTES, Header, Limits, Message, Pool};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages are taken from the link into one vectored write up to this much; what still waits can
/// be overtaken by a deeper layer.
const STAGED_BYTES: usize = 256 << 10;
const STAGED_MESSAGES: usize = 16;

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) counters: Arc<PeerCounters>,
    pub(super) limits: Limits,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    /// Nothing is read while the node has not taken what was received.
    pub(super) paused: bool,
    /// When bytes last came in; or when reading was resumed.
    pub(super) heard_at: Instant,
}

impl Connection {
    /// Reads in one turn, so that a busy peer does not keep the others waiting.
    pub(super) const READS_PER_TURN: usize = 32;

    pub(super) fn new(
        stream: TcpStream,
        counters: Arc<PeerCounters>,
        limits: Limits,
        now: Instant,
    ) -> Self {
        Self {
            stream,
            counters,
            limits,
            inbound: Inbound::default(),
            outbound: Outbound::new(now),
            paused: false,
            heard_at: now,
        }
    }

    /// The next whole message, or `None` when the socket has no more for now. `reads` counts down.
    pub(super) fn receive(
        &mut self,
        pool: &Pool,
        reads: &mut usize,
        now: Instant,
    ) -> Result<Option<Message>, LostReason> {
        loop {
            if let Some(message) = self.inbound.assemble(&self.limits, pool)? {
                self.counters.received[message.kind().index()].count(message.header());
                return Ok(Some(message));
            }
            if std::mem::take(&mut self.inbound.drained) || *reads == 0 {
                return Ok(None);
            }
            *reads -= 1;
            match self.inbound.fill(&self.stream) {
                Ok(0) => return Err(self.inbound.cut()),
                Ok(_) => self.heard_at = now,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LostReason::Broken(error.to_string())),
            }
        }
    }

    /// Writes what the link releases until the socket takes no more. Returns the bytes of the
    /// messages that are gone; their payloads are back in the pool.
    pub(super) fn transmit(&mut self, pool: &Pool, now: Instant) -> Result<usize, LostReason> {
        let mut bytes_gone = 0;
        while self.outbound.stage(now) {
            let wanted = self.outbound.staged_bytes - self.outbound.written;
            match self.outbound.write(&self.stream) {
                Ok(written) => {
                    self.outbound.blocked_since = None;
                    self.outbound.spoke_at = now;
                    self.outbound.written += written;
                    bytes_gone += self.outbound.retire(pool, &self.counters);
                    if written < wanted {
                        self.outbound.blocked_since = Some(now);
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.outbound.blocked_since.get_or_insert(now);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LostReason::Broken(error.to_string())),
            }
        }
        Ok(bytes_gone)
    }

    /// When there will be something to write; a blocked socket says so itself.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.outbound.blocked_since {
            Some(_) => None,
            None => self.outbound.link.due(),
        }
    }
}

/// Bytes on their way to being a message. The body is received straight into its buffers, and the
/// next header with it, so that a stream of messages costs one read each.
#[derive(Default)]
pub(super) struct Inbound {
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
    table: Vec<u8>,
    payload: Buffer,
    filled: usize,
}

impl Body {
    fn needed(&self) -> usize {
        self.table.len() + self.payload.len_bytes()
    }
}

impl Inbound {
    /// Whatever the bytes received so far make: a checked header, buffers for its body, a message.
    fn assemble(&mut self, limits: &Limits, pool: &Pool) -> Result<Option<Message>, LostReason> {
        if self.body.is_none() && self.header_filled == HEADER_BYTES {
            let header = Header::decode(&self.header.0, limits)?;
            let table = vec![0; header.table_bytes()];
            let payload = pool.take(header.payload_bytes());
            self.body = Some(Body { header, table, payload, filled: 0 });
            self.header_filled = 0;
        }
        match self.body.take_if(|body| body.filled == body.needed()) {
            None => Ok(None),
            Some(Body { header, table, payload, .. }) => {
                Ok(Some(Message::open(header, table, payload)?))
            }
        }
    }

    fn fill(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        let next_header = &mut self.header.0[self.header_filled..];
        let (read, wanted, body_wanted) = match &mut self.body {
            None => (stream.read(next_header)?, next_header.len(), 0),
            Some(body) => {
                let wanted = body.needed() - body.filled;
                let table_filled = body.filled.min(body.table.len());
                let payload_filled = body.filled - table_filled;
                let mut slices = [
                    IoSliceMut::new(&mut body.table[table_filled..]),
                    IoSliceMut::new(&mut body.payload.bytes_mut()[payload_filled..]),
                    IoSliceMut::new(next_header),
                ];
                (stream.read_vectored(&mut slices)?, wanted + HEADER_BYTES, wanted)
            }
        };
        self.drained = read < wanted;
        let of_body = read.min(body_wanted);
        if let Some(body) = &mut self.body {
            body.filled += of_body;
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

/// Messages on their way to being bytes.
pub(super) struct Outbound {
    pub(super) link: Link,
    staged: VecDeque<Sealed>,
    staged_bytes: usize,
    /// Bytes of the staged messages that the socket has taken.
    written: usize,
    /// Since when the socket has taken nothing of what is staged.
    pub(super) blocked_since: Option<Instant>,
    /// When the socket last took bytes.
    spoke_at: Instant,
}

impl Outbound {
    fn new(now: Instant) -> Self {
        Self {
            link: Link::new(),
            staged: VecDeque::with_capacity(STAGED_MESSAGES),
            staged_bytes: 0,
            written: 0,
            blocked_since: None,
            spoke_at: now,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.staged.is_empty() && self.link.is_empty()
    }

    /// Stages a heartbeat if nothing was said for `interval`. It goes past the link: an artificial
    /// delay must not make a node look dead.
    pub(super) fn heartbeat(&mut self, now: Instant, interval: Duration) -> bool {
        let due =
            self.staged.is_empty() && now.saturating_duration_since(self.spoke_at) >= interval;
        if due {
            self.stage_message(Sealed::new(Message::heartbeat()));
        }
        due
    }

    fn stage_message(&mut self, sealed: Sealed) {
        self.staged_bytes += sealed.wire_bytes();
        self.staged.push_back(sealed);
    }

    /// Takes messages from the link for the next write; false when there is nothing to write.
    fn stage(&mut self, now: Instant) -> bool {
        while self.staged_bytes < STAGED_BYTES && self.staged.len() < STAGED_MESSAGES {
            let Some(sealed) = self.link.pop(now) else { break };
            self.stage_message(sealed);
        }
        !self.staged.is_empty()
    }

    /// One vectored write of everything staged and not yet written.
    fn write(&self, mut stream: &TcpStream) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 3 * STAGED_MESSAGES];
        let mut used = 0;
        for Sealed { head, message } in &self.staged {
            for part in [head.as_slice(), message.table(), message.payload().bytes()] {
                if !part.is_empty() {
                    slices[used] = IoSlice::new(part);
                    used += 1;
                }
            }
        }
        let mut slices = &mut slices[..used];
        IoSlice::advance_slices(&mut slices, self.written);
        stream.write_vectored(slices)
    }

    /// Lets go of the messages that are wholly written; returns their bytes.
    fn retire(&mut self, pool: &Pool, counters: &PeerCounters) -> usize {
        let mut bytes_gone = 0;
        while let Some(Sealed { message, .. }) = self.staged.front() {
            let bytes = message.header().wire_bytes();
            if bytes > self.written {
                break;
            }
            self.written -= bytes;
            self.staged_bytes -= bytes;
            counters.sent[message.kind().index()].count(message.header());
            if is_accounted(message) {
                bytes_gone += bytes;
            }
            let sealed = self.staged.pop_front().expect("the front was just looked at");
            pool.give(sealed.message.into_payload());
        }
        bytes_gone
    }
}

/// Heartbeats and goodbyes are the controller's own: no `send` paid for them.
fn is_accounted(message: &Message) -> bool {
    use glinthawk_flight::Kind::{Goodbye, Heartbeat};
    !matches!(message.kind(), Heartbeat | Goodbye)
}
