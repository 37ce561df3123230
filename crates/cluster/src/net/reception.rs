//! Where strangers wait: listeners, and connections that have not yet said who they are.

use super::channel::Channel;
use super::config::Config;
use super::handshake::{HELLO_BYTES, HandshakeError, Hello, Status};
use super::tls::Tls;
use crate::complaints::Complaints;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After a failed accept (no file descriptors, most likely) a listener rests this long.
const ACCEPT_REST: Duration = Duration::from_secs(1);
/// Connections that are accepted in one turn of the network thread, so that a flood of them leaves it time for peers.
const ACCEPTED_PER_TURN: usize = 16;

/// Accepts connections and reads one hello from each; holds a bounded number of them.
pub(super) struct Reception {
    config: Arc<Config>,
    listeners: Vec<TcpListener>,
    rests_until: Option<Instant>,
    guests: BTreeMap<u64, Guest>,
    guests_seen: u64,
    pub(super) complaints: Complaints,
}

/// A connection in its handshake.
pub(super) struct Guest {
    pub(super) channel: Channel,
    pub(super) address: SocketAddr,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    deadline: Instant,
}

impl Reception {
    pub(super) fn new(config: Arc<Config>) -> Self {
        Self {
            config,
            listeners: Vec::new(),
            rests_until: None,
            guests: BTreeMap::new(),
            guests_seen: 0,
            complaints: Complaints::new(),
        }
    }

    pub(super) fn listen(&mut self, listener: TcpListener) {
        self.listeners.push(listener);
    }

    /// Accepts no more connections.
    pub(super) fn close(&mut self) {
        self.listeners.clear();
        self.guests.clear();
    }

    /// The listeners to wait for: none after a failure.
    pub(super) fn listeners(&self) -> &[TcpListener] {
        if self.rests_until.is_some() { &[] } else { &self.listeners }
    }

    pub(super) fn guests(&self) -> impl Iterator<Item = (u64, &TcpStream)> {
        self.guests.iter().map(|(number, guest)| (*number, &guest.channel.stream))
    }

    /// Accepts the connections that wait at a listener.
    pub(super) fn accept(&mut self, index: usize, now: Instant) {
        for _ in 0..ACCEPTED_PER_TURN {
            let accepted = self.listeners[index].accept().and_then(|(stream, address)| {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                Ok((stream, address))
            });
            match accepted {
                Ok((stream, address)) => {
                    if self.guests.len() >= self.config.bounds.handshakes_max {
                        self.make_room();
                    }
                    let deadline = now + self.config.timing.handshake;
                    let session = self.config.tls(address.ip()).map(Tls::accept);
                    let channel = Channel::new(stream, session);
                    let bytes = [0; HELLO_BYTES];
                    let guest = Guest { channel, address, bytes, filled: 0, deadline };
                    self.guests.insert(self.guests_seen, guest);
                    self.guests_seen += 1;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    if self.complaints.may_write(now) {
                        tracing::warn!(%error, "cannot accept connections for a moment");
                    }
                    self.rests_until = Some(now + ACCEPT_REST);
                    return;
                }
            }
        }
    }

    /// Drops a guest for the next one: the oldest of the address that most guests come from, which are hardly all nodes.
    fn make_room(&mut self) {
        let mut crowds: HashMap<IpAddr, usize> = HashMap::new();
        for guest in self.guests.values() {
            *crowds.entry(guest.address.ip()).or_default() += 1;
        }
        let Some((&crowd, _)) = crowds.iter().max_by_key(|(_, guests)| **guests) else { return };
        let mut of_crowd = self.guests.extract_if(.., |_, guest| guest.address.ip() == crowd);
        let Some((_, oldest)) = of_crowd.next() else { return };
        drop(of_crowd);
        let bytes = oldest.filled;
        self.refuse(&oldest, &HandshakeError::Crowded { bytes });
    }

    /// Reads on from a guest. Returns it once its hello is complete and right.
    pub(super) fn read(&mut self, number: u64) -> Option<(Guest, Hello)> {
        let guest = self.guests.get_mut(&number)?;
        match guest.read(&self.config) {
            Ok(None) => None,
            Ok(Some(hello)) => self.guests.remove(&number).map(|guest| (guest, hello)),
            Err(error) => {
                let guest = self.guests.remove(&number)?;
                self.refuse(&guest, &error);
                None
            }
        }
    }

    /// Drops connections that took too long, and lets a rested listener accept again.
    pub(super) fn keep_house(&mut self, now: Instant) {
        self.rests_until.take_if(|until| *until <= now);
        self.complaints.keep_house(now);
        let late = self.guests.extract_if(.., |_, guest| guest.deadline <= now);
        for (_, guest) in late.collect::<Vec<_>>() {
            let waited = self.config.timing.handshake;
            self.refuse(&guest, &HandshakeError::Timeout { waited, bytes: guest.filled });
        }
    }

    /// A line for us, unless there were many, and an answer for a peer that would understand it.
    pub(super) fn refuse(&mut self, guest: &Guest, error: &HandshakeError) {
        if self.complaints.may_write(Instant::now()) {
            tracing::warn!(address = %guest.address, reason = %error, "refused a connection");
        }
        if let Some(status) = error.answer() {
            // The peer is being refused anyway, so a failed answer does not matter.
            _ = guest.answer(&self.config, status);
        }
    }
}

impl Guest {
    fn read(&mut self, config: &Config) -> Result<Option<Hello>, HandshakeError> {
        let mut rest = [IoSliceMut::new(&mut self.bytes[self.filled..])];
        match self.channel.read_vectored(&mut rest) {
            Ok(0) => return Err(HandshakeError::Closed { bytes: self.filled }),
            Ok(read) => self.filled += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        Hello::check_start(&self.bytes[..self.filled])?;
        if self.filled < HELLO_BYTES {
            return Ok(None);
        }
        Hello::decode(&self.bytes, &config.token, Status::Hello).map(Some)
    }

    /// Answers a hello. The answer fits any fresh socket's buffer, so it is one write.
    pub(super) fn answer(&self, config: &Config, status: Status) -> io::Result<()> {
        let answer = Hello::encode(config, status);
        let written = match status {
            // Into the socket itself: the channel is what the peer does not speak.
            Status::Mixed => (&self.channel.stream).write(&answer)?,
            _ => self.channel.write_vectored(&mut [IoSlice::new(&answer)])?,
        };
        if written == HELLO_BYTES { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
    }
}
