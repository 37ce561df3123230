//! A connected byte stream that never blocks: plain TCP, or TLS. One thread reads it, and
//! whichever thread holds the connection's writer writes it.

use rustls::{Connection, Error, InvalidMessage};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Encrypted bytes that are read from the socket at once.
const INCOMING_BYTES: usize = 64 << 10;
/// Bytes that are encrypted at once and then handed to the socket: whole records of 16 KiB.
const OUTGOING_BYTES: usize = 64 << 10;

/// What the first bytes of a peer that does not speak TLS are taken for.
pub(super) const NOT_TLS: Error = Error::InvalidMessage(InvalidMessage::InvalidContentType);

pub(super) struct Channel {
    /// To wait for and to shut down; its bytes are the channel's.
    pub(super) stream: TcpStream,
    tls: Option<Tls>,
}

struct Tls {
    /// Locked while bytes are encrypted or decrypted: one state serves both directions.
    session: Mutex<Session>,
    /// The reading thread's own.
    incoming: Mutex<Incoming>,
    /// The last read left bytes that the socket no longer has.
    holds_input: AtomicBool,
}

struct Session {
    connection: Connection,
    /// Bytes that the caller of `write_vectored` still offers, though they are encrypted: the
    /// socket has not taken all of what became of them.
    owed: usize,
}

/// Encrypted bytes on their way to the session.
struct Incoming {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Channel {
    /// The stream must not block.
    pub(super) fn new(stream: TcpStream, session: Option<Connection>) -> Self {
        let tls = session.map(|mut connection| {
            connection.set_buffer_limit(Some(OUTGOING_BYTES));
            let bytes = vec![0; INCOMING_BYTES].into_boxed_slice();
            Tls {
                session: Mutex::new(Session { connection, owed: 0 }),
                incoming: Mutex::new(Incoming { bytes, start: 0, end: 0 }),
                holds_input: AtomicBool::new(false),
            }
        });
        Self { stream, tls }
    }

    /// Whether another read may get more, even if the socket has nothing.
    pub(super) fn holds_input(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.holds_input.load(Ordering::Relaxed))
    }

    /// Reads what there is, up to the buffers' length. Zero is the end of the stream. Over TLS, this
    /// also takes the handshake on, for as long as it lasts.
    pub(super) fn read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.tls {
            None => (&self.stream).read_vectored(buffers),
            Some(tls) => tls.read_vectored(&self.stream, buffers),
        }
    }

    /// Writes what the socket takes. Over TLS, bytes count as written once the socket has taken what
    /// became of them. Until then the caller must offer the same bytes again, and may add to them.
    /// What is written before the handshake is over goes out when it is.
    pub(super) fn write_vectored(&self, buffers: &mut [IoSlice<'_>]) -> io::Result<usize> {
        match &self.tls {
            None => (&self.stream).write_vectored(buffers),
            Some(tls) => tls.write_vectored(&self.stream, buffers),
        }
    }
}

impl Tls {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().expect("no panic while a session is locked")
    }

    fn read_vectored(
        &self,
        mut stream: &TcpStream,
        buffers: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let mut incoming = self.incoming.lock().expect("only the reading thread locks it");
        let mut wanted = buffers;
        let mut read = 0;
        loop {
            read += self.session().decrypt(stream, &mut incoming, &mut wanted)?;
            let full = wanted.is_empty();
            if full || read > 0 {
                // A full read of the socket, too, says that there may be more.
                self.holds_input.store(full || incoming.end == INCOMING_BYTES, Ordering::Relaxed);
                return Ok(read);
            }
            match stream.read(&mut incoming.bytes) {
                Ok(0) => return Ok(0),
                Ok(bytes) => (incoming.start, incoming.end) = (0, bytes),
                Err(error) => {
                    self.holds_input.store(false, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
    }

    fn write_vectored(
        &self,
        stream: &TcpStream,
        mut buffers: &mut [IoSlice<'_>],
    ) -> io::Result<usize> {
        let mut written = 0;
        loop {
            let mut session = self.session();
            match session.flush(stream) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && written > 0 => {
                    return Ok(written);
                }
                flushed => flushed?,
            }
            let taken = std::mem::take(&mut session.owed);
            written += taken;
            IoSlice::advance_slices(&mut buffers, taken);
            if buffers.is_empty() {
                return Ok(written);
            }
            session.owed = session.connection.writer().write_vectored(buffers)?;
            if session.owed == 0 {
                // Only before the handshake is over, when enough waits for it.
                return if written > 0 { Ok(written) } else { Err(ErrorKind::WouldBlock.into()) };
            }
        }
    }
}

impl Session {
    /// Decrypts incoming bytes until the buffers are full or there are no more.
    fn decrypt(
        &mut self,
        stream: &TcpStream,
        incoming: &mut Incoming,
        wanted: &mut &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let mut read = 0;
        loop {
            while let Some(buffer) = wanted.first_mut() {
                let bytes = match self.connection.reader().read(buffer) {
                    Ok(bytes) => bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                    Err(error) => return Err(error),
                };
                let whole = bytes == buffer.len();
                read += bytes;
                IoSliceMut::advance_slices(wanted, bytes);
                if !whole {
                    break;
                }
            }
            let mut rest = &incoming.bytes[incoming.start..incoming.end];
            if wanted.is_empty() || rest.is_empty() {
                return Ok(read);
            }
            let shaking_hands = self.connection.is_handshaking();
            let taken = self.connection.read_tls(&mut rest)?;
            if taken == 0 {
                // The other end has closed the session.
                return Err(ErrorKind::ConnectionAborted.into());
            }
            incoming.start += taken;
            let processed = self.connection.process_new_packets();
            // A peer that does not speak TLS would not understand the alert.
            if shaking_hands && !matches!(processed, Err(NOT_TLS)) {
                match self.flush(stream) {
                    Err(error) if error.kind() != ErrorKind::WouldBlock && processed.is_ok() => {
                        return Err(error);
                    }
                    // What is left goes with the next read: the other end waits for it.
                    _ => {}
                }
            }
            processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        }
    }

    /// Writes what is encrypted until the socket takes no more.
    fn flush(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            if self.connection.write_tls(&mut stream)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }
}
