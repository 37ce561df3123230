//! The network thread: waits for what comes from sockets, for commands and timers, and serves what is ready.

use super::config::Config;
use super::connection::Connection;
use super::event::{Event, LostReason, Peer};
use super::handshake::{Hello, Status};
use super::lines::{LINE_PATIENCE, watch};
use super::outlet::Outlet;
use super::reception::{Guest, Reception};
use super::shared::{Command, Shared};
use crate::processes::keep_to_cores;
use glinthawk_flight::{Kind, Limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io::{self, PipeReader, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that are received in one turn are handed on together up to this much: waking another
/// thread costs as much as receiving a message.
const DELIVERED_BYTES: usize = 256 << 10;
/// Handshakes that are taken on in one turn: each may cost a signature, and peers wait meanwhile.
const GUESTS_PER_TURN: usize = 4;

pub(super) struct NetThread {
    config: Arc<Config>,
    shared: Arc<Shared>,
    wakeups: PipeReader,
    reception: Reception,
    connections: HashMap<Peer, Connection>,
    /// Their lines, which other threads read.
    lines: HashMap<Peer, Vec<Arc<Outlet>>>,
    /// Until when to wait for peers, once a shutdown was asked for.
    leaving_until: Option<Instant>,
    housekeeping_at: Instant,
}

/// What a ready descriptor belongs to.
enum Source {
    Wakeups,
    Listener(usize),
    Guest(u64),
    Connection(Peer),
}

/// Tells other threads that this one ended, even after a panic.
struct StopGuard(Arc<Shared>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl NetThread {
    pub(super) fn new(config: Arc<Config>, shared: Arc<Shared>, wakeups: PipeReader) -> Self {
        Self {
            reception: Reception::new(Arc::clone(&config)),
            config,
            shared,
            wakeups,
            connections: HashMap::new(),
            lines: HashMap::new(),
            leaving_until: None,
            housekeeping_at: Instant::now(),
        }
    }

    /// Runs until a shutdown is complete.
    pub(super) fn run(mut self) {
        let _guard = StopGuard(Arc::clone(&self.shared));
        if let Err(error) = self.serve() {
            tracing::error!(%error, "the network thread failed");
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut commands = Vec::new();
        let mut ready = Vec::new();
        loop {
            self.shared.take_commands(&mut commands);
            for command in commands.drain(..) {
                self.obey(command);
            }
            let now = Instant::now();
            if now >= self.housekeeping_at {
                self.keep_house(now);
            }
            if self.leaving_until.is_some_and(|until| self.connections.is_empty() || now >= until) {
                return Ok(());
            }
            let due = if self.shared.doze() { self.next_due(now) } else { now };
            self.wait(due.saturating_duration_since(now), &mut ready)?;
            let now = Instant::now();
            let mut guests = 0;
            for source in ready.drain(..) {
                guests += usize::from(matches!(source, Source::Guest(_)));
                if guests <= GUESTS_PER_TURN || !matches!(source, Source::Guest(_)) {
                    self.attend_to(source, now)?;
                }
            }
        }
    }

    /// When something must be done even if no descriptor becomes ready.
    fn next_due(&self, now: Instant) -> Instant {
        if self.connections.values().any(Connection::holds_input) {
            return now;
        }
        self.leaving_until.into_iter().fold(self.housekeeping_at, Instant::min)
    }

    /// Sleeps until a descriptor is ready; what to wait for follows from the state alone.
    fn wait(&self, timeout: Duration, ready: &mut Vec<Source>) -> io::Result<()> {
        let mut sources = vec![Source::Wakeups];
        let mut descriptors = vec![PollFd::new(&self.wakeups, PollFlags::IN)];
        for (index, listener) in self.reception.listeners().iter().enumerate() {
            sources.push(Source::Listener(index));
            descriptors.push(PollFd::new(listener, PollFlags::IN));
        }
        for (number, stream) in self.reception.guests() {
            sources.push(Source::Guest(number));
            descriptors.push(PollFd::new(stream, PollFlags::IN));
        }
        for (peer, connection) in &self.connections {
            // Asked for nothing, `poll` would still report a hang-up, again and again.
            if !connection.paused {
                sources.push(Source::Connection(*peer));
                let stream = &connection.outlet.channel.stream;
                descriptors.push(PollFd::new(stream, PollFlags::IN));
            }
        }
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = descriptors.iter().map(PollFd::revents);
        let is_ready = |(source, flags): &(Source, PollFlags)| match source {
            _ if !flags.is_empty() => true,
            Source::Connection(peer) => self.connections[peer].holds_input(),
            _ => false,
        };
        ready.extend(sources.into_iter().zip(flags).filter(is_ready).map(|(source, _)| source));
        Ok(())
    }

    fn attend_to(&mut self, source: Source, now: Instant) -> io::Result<()> {
        match source {
            Source::Wakeups => {
                // The first thread that finds this one asleep writes one byte.
                self.wakeups.read_exact(&mut [0])?;
            }
            Source::Listener(index) => self.reception.accept(index, now),
            Source::Guest(number) => {
                if let Some((guest, hello)) = self.reception.read(number) {
                    self.welcome(guest, hello, now);
                }
            }
            Source::Connection(peer) => {
                let paused = self.connections.get(&peer).is_none_or(|connection| connection.paused);
                if !paused {
                    self.receive(peer, Connection::READS_PER_TURN, now);
                }
            }
        }
        Ok(())
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Listen(listener) => self.reception.listen(listener),
            Command::Adopt(outlet) => {
                let peer = outlet.counters.peer;
                self.connections.insert(peer, Connection::new(outlet, Instant::now()));
            }
            Command::AdoptLine(outlet) => match outlet.counters.peer {
                peer if self.connections.contains_key(&peer) => {
                    self.lines.entry(peer).or_default().push(outlet);
                }
                _ => outlet.cut(),
            },
            Command::Ended(peer, reason) => self.end(peer, reason, Instant::now()),
            Command::Resume(peer) => {
                if let Some(connection) = self.connections.get_mut(&peer) {
                    connection.paused = false;
                    connection.heard_at = Instant::now();
                }
            }
            Command::Dismiss(peer) => {
                self.lines.remove(&peer);
                if let Some(connection) = self.connections.remove(&peer) {
                    // If this fails, the connection is gone already.
                    _ = connection.outlet.channel.stream.shutdown(Shutdown::Both);
                }
            }
            // A refusal costs speed, never correctness.
            Command::KeepTo(cores) => _ = keep_to_cores(&cores),
            Command::Shutdown => self.leave(),
            Command::Vanish => {
                self.connections.clear();
                self.lines.clear();
                self.leave();
            }
        }
    }

    fn leave(&mut self) {
        let now = Instant::now();
        self.leaving_until = Some(now + self.config.timing.farewell);
        self.reception.close();
        for connection in self.connections.values_mut() {
            connection.outlet.say_goodbye(now);
            // Read on, to see the other side close; what it still says is dropped.
            connection.paused = false;
        }
        self.shared.nudge();
    }

    fn welcome(&mut self, guest: Guest, hello: Hello, now: Instant) {
        let limits = self.config.limits.agree(hello.limits);
        if hello.line > 0 {
            return self.welcome_line(guest, &hello, limits);
        }
        let counters = match self.shared.enrol(hello.identity.clone(), guest.address) {
            Ok(counters) => counters,
            Err(error) => return self.reception.refuse(&guest, &error),
        };
        let peer = counters.peer;
        if let Err(error) = guest.answer(&self.config, Status::Welcome) {
            self.shared.strike(peer);
            return self.reception.refuse(&guest, &error.into());
        }
        let Guest { channel, address, .. } = guest;
        let outlet = Arc::new(Outlet::new(channel, counters, limits, &self.config, 0));
        self.shared.open(&outlet);
        self.connections.insert(peer, Connection::new(outlet, now));
        self.shared.post(0, Event::Joined { peer, identity: hello.identity, address });
    }

    fn welcome_line(&mut self, guest: Guest, hello: &Hello, limits: Limits) {
        let (node, line) = (hello.identity.node, hello.line);
        let counters = match self.shared.owner_of_line(node, line) {
            Ok(counters) => counters,
            Err(error) => return self.reception.refuse(&guest, &error),
        };
        let (peer, timing) = (counters.peer, &self.config.timing);
        let prepared = watch(&guest.channel.stream, timing).and_then(|()| self.shared.ready(line));
        let answered = prepared.and_then(|()| guest.answer(&self.config, Status::Welcome));
        if let Err(error) = answered {
            return self.reception.refuse(&guest, &error.into());
        }
        let outlet = Outlet::new(guest.channel, counters, limits, &self.config, line);
        let outlet = Arc::new(outlet);
        if self.shared.attach(line, &outlet) {
            let lines = self.lines.entry(peer).or_default();
            lines.retain(|line| !line.is_closed());
            lines.push(outlet);
        }
    }

    /// A connection with a peer has failed. What the peer said before it went still counts, above all a goodbye.
    fn end(&mut self, peer: Peer, reason: LostReason, now: Instant) {
        self.receive(peer, usize::MAX, now);
        self.lose(peer, reason);
    }

    fn receive(&mut self, peer: Peer, mut reads: usize, now: Instant) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        let mut arrived = Vec::new();
        let mut arrived_bytes = 0;
        let mut ended = None;
        loop {
            match connection.receive(&self.config.pool, &mut reads, now) {
                Ok(None) => break,
                Err(reason) => {
                    ended = Some(reason);
                    break;
                }
                Ok(Some(message)) => match message.kind() {
                    Kind::Heartbeat => {}
                    Kind::Goodbye => {
                        ended = Some(LostReason::Goodbye);
                        break;
                    }
                    _ if self.leaving_until.is_some() => {
                        self.config.pool.give(message.into_payload());
                    }
                    _ => {
                        arrived_bytes += message.header().wire_bytes();
                        arrived.push(Event::Message { peer, message, received_at: now });
                    }
                },
            }
            if arrived_bytes >= DELIVERED_BYTES {
                arrived_bytes = 0;
                connection.paused = self.shared.deliver(peer, &mut arrived);
                if connection.paused {
                    break;
                }
            }
        }
        if !arrived.is_empty() {
            connection.paused = self.shared.deliver(peer, &mut arrived);
        }
        if let Some(reason) = ended {
            self.lose(peer, reason);
        }
    }

    /// The one place where a peer ends.
    fn lose(&mut self, peer: Peer, reason: LostReason) {
        let Some(connection) = self.connections.remove(&peer) else { return };
        self.lines.remove(&peer);
        self.shared.strike(peer);
        if self.leaving_until.is_some() {
            return;
        }
        let counters = &connection.outlet.counters;
        let (node, address) = (&counters.identity.name, counters.address);
        match &reason {
            _ if !self.reception.complaints.may_write(Instant::now()) => {}
            LostReason::Goodbye => tracing::info!(node, %address, "a node left"),
            reason => tracing::warn!(node, %address, %reason, "lost a node"),
        }
        self.shared.post(0, Event::Lost { peer, reason });
    }

    /// Handles timers: signs of life to send, peers that gave none, peers that read nothing,
    /// unfinished handshakes.
    fn keep_house(&mut self, now: Instant) {
        let timing = self.config.timing;
        let late = now.saturating_duration_since(self.housekeeping_at);
        let shortest = timing.heartbeat.min(timing.silence).min(timing.stall).min(timing.handshake);
        self.housekeeping_at = now + (shortest / 4).max(Duration::from_millis(1));
        self.reception.keep_house(now);
        if late >= timing.silence / 2 {
            // This process was stopped, or its machine was. Who was not heard meanwhile may have said much.
            self.connections.values_mut().for_each(|connection| connection.heard_at = now);
            return;
        }
        let mut lost = Vec::new();
        let mut is_left = false;
        for (peer, connection) in &self.connections {
            let unheard = now.saturating_duration_since(connection.heard_at);
            let blocked = |outlet: &Arc<Outlet>| {
                let since = outlet.blocked_since();
                since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
            };
            let lines = self.lines.get(peer).into_iter().flatten();
            let line = lines.map(blocked).max().unwrap_or_default();
            let stalled = blocked(&connection.outlet).max(line / LINE_PATIENCE);
            if stalled >= timing.stall {
                lost.push((*peer, LostReason::Stalled(stalled.max(line))));
            } else if !connection.paused && unheard >= timing.silence {
                lost.push((*peer, LostReason::Silent(unheard)));
            } else if self.leaving_until.is_none() {
                is_left |= connection.outlet.heartbeat(now, timing.heartbeat);
            }
        }
        if is_left {
            self.shared.nudge();
        }
        for (peer, reason) in lost {
            self.lose(peer, reason);
        }
    }
}
