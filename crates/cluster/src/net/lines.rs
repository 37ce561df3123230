//! Lines: further connections of two peers, each for one thread at either end. That thread reads its lines itself, and
//! writes them itself as long as the sockets take it. So its messages wait for no other thread, and the messages of
//! several threads are copied side by side.
//!
//! A line lives as long as the first connection of the two peers, which alone carries signs of life. A thread that
//! computes reads nothing meanwhile: what came for it stays in the socket. If the way of a line alone is cut, the system finds
//! out (`watch`).

use super::config::Timing;
use super::connection::Connection;
use super::event::{Event, LostReason, Peer};
use glinthawk_flight::{Kind, Pool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_user_timeout,
};
use std::io::{self, PipeReader, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The lines that two peers may have, at most.
pub(crate) const LINES_MAX: u16 = 1024;

/// The longest that a thread sleeps at once.
pub(super) const LONGEST: Duration = Duration::from_secs(3600);

/// How many times longer than others a line may be left unread: its thread reads it between two things that it computes.
pub(super) const LINE_PATIENCE: u32 = 8;

/// Lets the system end a line whose other end is out of reach, though nothing is sent.
pub(super) fn watch(stream: &TcpStream, timing: &Timing) -> io::Result<()> {
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, timing.silence)?;
    set_tcp_keepintvl(stream, timing.silence)?;
    set_tcp_keepcnt(stream, LINE_PATIENCE - 1)?;
    let longest = (LINE_PATIENCE * timing.stall).as_millis();
    set_tcp_user_timeout(stream, u32::try_from(longest).unwrap_or(u32::MAX))?;
    Ok(())
}

/// The lines that one thread receives from.
pub(super) struct Lines {
    connections: Vec<Connection>,
    /// Readable when something else than a line has news for the thread.
    bell: PipeReader,
}

/// What came from a line.
pub(super) enum Heard {
    Message(Event),
    /// The line is of no more use, and so is its peer.
    Ended(Peer, LostReason),
}

impl Lines {
    pub(super) fn new(bell: PipeReader) -> Self {
        Self { connections: Vec::new(), bell }
    }

    pub(super) fn add(&mut self, connections: Vec<Connection>) {
        self.connections.extend(connections);
    }

    /// What comes next, waiting for at most `timeout`; `None` also if the bell has rung.
    pub(super) fn next(&mut self, timeout: Duration, pool: &Pool) -> Option<Heard> {
        // What a peer that is gone has left in a socket does not count.
        self.connections.retain(|line| !line.outlet.is_closed());
        let holds_input = self.connections.iter().any(Connection::holds_input);
        let ready = self.wait(if holds_input { Duration::ZERO } else { timeout });
        let ready = ready.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot wait for messages");
            vec![true; self.connections.len()]
        });
        let now = Instant::now();
        for (index, line) in self.connections.iter_mut().enumerate() {
            if !ready[index] && !line.holds_input() {
                continue;
            }
            let peer = line.outlet.counters.peer;
            let mut reads = Connection::READS_PER_TURN;
            let ended = match line.receive(pool, &mut reads, now) {
                Ok(None) => continue,
                Ok(Some(message)) => match message.kind() {
                    Kind::Heartbeat => continue,
                    Kind::Goodbye => LostReason::Goodbye,
                    _ => {
                        // The next turn begins with another line.
                        self.connections.rotate_left(index + 1);
                        return Some(Heard::Message(Event::Message {
                            peer,
                            message,
                            received_at: now,
                        }));
                    }
                },
                Err(reason) => reason,
            };
            self.connections.remove(index);
            return Some(Heard::Ended(peer, ended));
        }
        None
    }

    /// Which lines can be read, after a wait for one of them or the bell.
    fn wait(&mut self, timeout: Duration) -> io::Result<Vec<bool>> {
        let mut descriptors = Vec::with_capacity(1 + self.connections.len());
        descriptors.push(PollFd::new(&self.bell, PollFlags::IN));
        let sockets = self.connections.iter().map(|line| &line.outlet.channel.stream);
        descriptors.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
        let timeout = Timespec::try_from(timeout.min(LONGEST)).map_err(io::Error::other)?;
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready: Vec<bool> =
            descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
        if ready.remove(0) {
            // It does not block, because there is something to read.
            _ = (&self.bell).read(&mut [0; 64])?;
        }
        Ok(ready)
    }
}
