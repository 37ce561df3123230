//! The controller as the rest of the node sees it: listen, connect, send, receive, leave.

use super::channel::Channel;
use super::config::{Config, Identity, LinkShape};
use super::event::{Event, Peer, SendError};
use super::handshake::{self, HandshakeError, Hello};
use super::lines::watch;
use super::outlet::Outlet;
use super::sending::SendThread;
use super::shared::{Command, Shared};
use super::stats::PeerStats;
use super::thread::NetThread;
use super::tls::Tls;
use glinthawk_flight::{Message, Pool};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Why there is no connection to an address.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The name does not resolve to an address.
    #[error("cannot resolve {address}: {source}")]
    Resolve {
        /// What was asked for.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing answers there; perhaps not yet.
    #[error("cannot reach {address}: {source}")]
    Unreachable {
        /// What was asked for.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Something answers, but the handshake fails.
    #[error("handshake with {address} failed: {source}")]
    Handshake {
        /// Who answered.
        address: SocketAddr,
        /// What went wrong.
        source: HandshakeError,
    },
    /// The peer was lost meanwhile.
    #[error("{0} is gone")]
    Gone(Peer),
}

/// A node's end of every connection it has, with the two threads that serve all but what lines carry.
///
/// In each pair of nodes, one dials and the other listens; the connection carries both directions.
/// The caller decides which one dials. A second connection between two nodes is refused, unless it is a line.
pub struct Controller {
    shared: Arc<Shared>,
    config: Arc<Config>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Controller {
    /// Starts the network thread and the sending thread; no connection exists yet.
    pub fn start(config: Config) -> io::Result<Self> {
        let config = Arc::new(config);
        let ((wakeups, waker), (sender_wakeups, sender_waker)) = (io::pipe()?, io::pipe()?);
        let shared = Arc::new(Shared::new(&config, waker, sender_waker));
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let sending = SendThread::new(Arc::clone(&shared), sender_wakeups);
        let sending = thread("network-out").spawn(|| sending.run())?;
        let net = NetThread::new(Arc::clone(&config), Arc::clone(&shared), wakeups);
        let net = thread("network").spawn(|| net.run()).inspect_err(|_| shared.stop())?;
        Ok(Self { shared, config, threads: Mutex::new(vec![net, sending]) })
    }

    /// Accepts connections at an address (port 0 picks one); returns the address bound. Nodes that
    /// join are announced by [`Event::Joined`].
    pub fn listen(&self, address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        // Derives the keys now: the network thread must not stop for it when someone dials.
        if self.config.tls(bound.ip()).is_none() && !bound.ip().is_loopback() {
            tracing::warn!(address = %bound, "connections to other machines are not encrypted");
        }
        self.shared.command(Command::Listen(listener));
        Ok(bound)
    }

    /// Dials a node and shakes hands, on the caller's thread, within the handshake's time for each
    /// address the name resolves to. [`ConnectError::Unreachable`] is worth another try later.
    /// There is no `Joined` event for a peer that was dialled.
    pub fn connect(&self, address: &str) -> Result<(Peer, Identity), ConnectError> {
        let resolve = |source| ConnectError::Resolve { address: address.to_owned(), source };
        let unreachable =
            |source| ConnectError::Unreachable { address: address.to_owned(), source };
        let mut last = resolve(io::Error::from(io::ErrorKind::NotFound));
        for address in address.to_socket_addrs().map_err(resolve)? {
            match TcpStream::connect_timeout(&address, self.config.timing.handshake) {
                Ok(stream) => {
                    return self
                        .adopt(stream, address)
                        .map_err(|source| ConnectError::Handshake { address, source });
                }
                Err(error) => last = unreachable(error),
            }
        }
        Err(last)
    }

    /// Shakes hands on a new connection, or on a line.
    fn greet(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        line: u16,
    ) -> Result<(Channel, Hello), HandshakeError> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let channel = Channel::new(stream, self.config.tls(address.ip()).map(Tls::dial));
        let hello = handshake::greet(&channel, &self.config, line)?;
        Ok((channel, hello))
    }

    fn adopt(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> Result<(Peer, Identity), HandshakeError> {
        let (channel, hello) = self.greet(stream, address, 0)?;
        let limits = self.config.limits.agree(hello.limits);
        let identity = hello.identity.clone();
        let counters = self.shared.enrol(hello.identity, address)?;
        let peer = counters.peer;
        let outlet = Arc::new(Outlet::new(channel, counters, limits, &self.config, 0));
        self.shared.open(&outlet);
        self.shared.command(Command::Adopt(outlet));
        Ok((peer, identity))
    }

    /// Makes a line to a peer that was dialled. Lines count from 1, and both ends must allow them. From then on,
    /// what is sent by [`Controller::send_on`] that line goes over it, and the thread at the letter box of its number
    /// receives what comes.
    pub fn add_line(&self, peer: Peer, line: u16) -> Result<(), ConnectError> {
        let gone = || ConnectError::Gone(peer);
        let (node, address) = self.shared.identity(peer).ok_or_else(gone)?;
        let stream = TcpStream::connect_timeout(&address, self.config.timing.handshake)
            .map_err(|source| ConnectError::Unreachable { address: address.to_string(), source })?;
        let failed = |source| ConnectError::Handshake { address, source };
        let (channel, hello) = self.greet(stream, address, line).map_err(failed)?;
        if hello.identity.node != node {
            return Err(failed(HandshakeError::Line { node: hello.identity.node, line }));
        }
        let prepared = watch(&channel.stream, &self.config.timing);
        prepared.and_then(|()| self.shared.ready(line)).map_err(|error| failed(error.into()))?;
        let counters = match self.shared.owner_of_line(node, line) {
            Err(_) if self.shared.identity(peer).is_none() => return Err(gone()),
            owner => owner.map_err(failed)?,
        };
        let limits = self.config.limits.agree(hello.limits);
        let outlet = Arc::new(Outlet::new(channel, counters, limits, &self.config, line));
        if !self.shared.attach(line, &outlet) {
            return Err(gone());
        }
        self.shared.command(Command::AdoptLine(outlet));
        Ok(())
    }

    /// A peer may have this many lines from now on; before the first call, none.
    pub fn allow_lines(&self, lines: u16) {
        self.shared.allow_lines(lines);
    }

    /// Makes the link to a peer behave like a slower one, for what this end sends from now on.
    pub fn shape(&self, peer: Peer, shape: LinkShape) {
        self.shared.shape(peer, shape);
    }

    /// Queues a message. Among what waits for a peer the deepest layer goes first; control and home
    /// messages pass all layers and keep their order among themselves. Waits while the peer's queue
    /// is full, which ends when the peer reads on or is lost. Two nodes that both wait here without
    /// taking their events would lose each other. So a thread that sends more than the queue's
    /// bound without an answer must not also be the thread that receives.
    pub fn send(&self, peer: Peer, message: Message) -> Result<(), SendError> {
        self.shared.send(0, peer, message)
    }

    /// The same over a line, or over the first connection if there is no such line.
    pub fn send_on(&self, line: usize, peer: Peer, message: Message) -> Result<(), SendError> {
        self.shared.send(line, peer, message)
    }

    /// The next event, waiting for at most `timeout`; zero asks without waiting.
    pub fn recv(&self, timeout: Duration) -> Option<Event> {
        self.shared.recv(0, timeout)
    }

    /// From now on, several threads receive, each from a letter box of its own: `sorter` names the box of a message.
    /// Other events go to the first box, as everything did so far.
    pub fn sort(&self, boxes: usize, sorter: impl Fn(&Message) -> usize + Send + 'static) {
        self.shared.sort(boxes, Box::new(sorter));
    }

    /// The next event in a letter box.
    pub fn recv_in(&self, letter_box: usize, timeout: Duration) -> Option<Event> {
        self.shared.recv(letter_box, timeout)
    }

    /// Puts an event into a letter box, for the thread that receives there.
    pub fn post(&self, letter_box: usize, event: Event) {
        self.shared.post(letter_box, event);
    }

    /// Bytes that wait for a peer: 0 if it is gone.
    pub fn queued_bytes(&self, peer: Peer) -> usize {
        self.shared.queued_bytes(peer)
    }

    /// Sends a peer away that did what no honest node does. There is no `Lost` event for it. What it said before may
    /// still be among the events.
    pub fn dismiss(&self, peer: Peer) {
        self.shared.strike(peer);
        self.shared.command(Command::Dismiss(peer));
    }

    /// Keeps the network thread and the sending thread to these cores.
    pub fn keep_to(&self, cores: Vec<usize>) {
        self.shared.keep_to(cores);
    }

    /// Where received payloads come from and should return to.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.config.pool
    }

    /// Who this node is.
    pub fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// What went over every connection there was.
    pub fn stats(&self) -> Vec<PeerStats> {
        self.shared.stats()
    }

    /// Sends what is queued (on lines, as far as the sockets take it), says goodbye to everyone and ends both
    /// threads, within the farewell's time. Events that arrived before can still be received. Dropping does the same.
    pub fn shutdown(&self) {
        self.end(Command::Shutdown);
    }

    fn end(&self, how: Command) {
        let mut threads = self.threads.lock().expect("no panic while the handles are locked");
        if threads.is_empty() {
            return;
        }
        self.shared.command(how);
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a network thread had panicked");
            }
        }
    }
}

impl Drop for Controller {
    /// A node that panics does not say goodbye: that is for those that leave in good order.
    fn drop(&mut self) {
        let panics = std::thread::panicking();
        self.end(if panics { Command::Vanish } else { Command::Shutdown });
    }
}
