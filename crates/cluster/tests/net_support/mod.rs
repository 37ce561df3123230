//! Shared by the network tests: controllers on loopback, a peer of raw bytes, captured log lines.
#![allow(dead_code, reason = "every test file uses its own part")]

use glinthawk_cluster::net::{
    Config, Controller, Encryption, Event, HELLO_BYTES, Hello, LostReason, Peer, Status, Token,
};
use glinthawk_flight::{Buffer, Kind, Message, Pool, Row, ShardId, StepId};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

/// Longer than anything here takes; reached only when a test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One for all, because making its keys takes a while.
static TOKEN: LazyLock<Token> = LazyLock::new(|| Token::new("the cluster's secret"));

pub fn config(name: &str) -> Config {
    Config::new(name, TOKEN.clone(), Arc::new(Pool::new(64)))
}

/// The same with TLS, on the loopback too.
pub fn encrypted(name: &str) -> Config {
    Config { encryption: Encryption::Always, ..config(name) }
}

pub fn next(controller: &Controller) -> Event {
    controller.recv(PATIENCE).expect("an event arrives")
}

pub fn next_message(controller: &Controller) -> (Peer, Message) {
    match next(controller) {
        Event::Message { peer, message, .. } => (peer, message),
        other => panic!("expected a message, got {other:?}"),
    }
}

pub fn next_joined(controller: &Controller) -> Peer {
    match next(controller) {
        Event::Joined { peer, .. } => peer,
        other => panic!("expected a node to join, got {other:?}"),
    }
}

pub fn next_lost(controller: &Controller) -> (Peer, LostReason) {
    match next(controller) {
        Event::Lost { peer, reason } => (peer, reason),
        other => panic!("expected a node to be lost, got {other:?}"),
    }
}

/// A controller that dialled another: ((dialler, its peer), (listener, its peer)).
pub fn pair(near: Config, far: Config) -> ((Controller, Peer), (Controller, Peer)) {
    pair_at("127.0.0.1:0", near, far)
}

pub fn pair_at(
    address: &str,
    near: Config,
    far: Config,
) -> ((Controller, Peer), (Controller, Peer)) {
    let (near, far) = (Controller::start(near).unwrap(), Controller::start(far).unwrap());
    let address = far.listen(address).unwrap();
    let (far_peer, identity) = near.connect(&address.to_string()).unwrap();
    assert_eq!(&identity, far.identity());
    let near_peer = next_joined(&far);
    ((near, far_peer), (far, near_peer))
}

/// A step that is recognisable by its flight.
pub fn step(flight: u32) -> StepId {
    StepId { shard: ShardId { flight, lane: 0 }, epoch: 0 }
}

/// The flight by which a message is recognised.
pub fn flight_of(message: &Message) -> u32 {
    message.step().shard.flight
}

/// A message of one row with this much payload, recognisable by its flight.
pub fn attended(flight: u32, payload_bytes: usize) -> Message {
    Message::attended(step(flight), 0, 1, Buffer::zeroed(payload_bytes))
}

pub fn rows(count: usize) -> Vec<Row> {
    let row = |i: usize| Row { slot: i as u32, position: 7, page: i as u32 / 2, token: 100 };
    (0..count).map(row).collect()
}

/// A peer that sends the bytes it is told to.
pub struct RawPeer {
    pub stream: TcpStream,
    pub address: SocketAddr,
    log_start: usize,
}

impl RawPeer {
    pub fn dial(address: SocketAddr) -> Self {
        let log_start = LOG.lock().unwrap().len();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let address = stream.local_addr().unwrap();
        Self { stream, address, log_start }
    }

    /// Dials and shakes hands like one of ours.
    pub fn join(address: SocketAddr, config: &Config) -> Self {
        let mut peer = Self::dial(address);
        peer.say(&Hello::encode(config, Status::Hello));
        let mut welcome = [0; HELLO_BYTES];
        peer.stream.read_exact(&mut welcome).unwrap();
        Hello::decode(&welcome, &config.token, Status::Welcome).unwrap();
        peer
    }

    /// Writes; a peer that was already sent away may find the door closed.
    pub fn say(&mut self, bytes: &[u8]) {
        _ = self.stream.write_all(bytes);
    }

    /// Reads until the other side closes.
    pub fn listen_to_the_end(&mut self) -> Vec<u8> {
        let mut heard = Vec::new();
        match self.stream.read_to_end(&mut heard) {
            Ok(_) => heard,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => heard,
            Err(error) => panic!("the connection was not closed: {error}"),
        }
    }
}

/// A message's bytes as they travel.
pub fn wire(message: &Message) -> Vec<u8> {
    [&message.seal(), message.table(), message.payload().bytes()].concat()
}

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static LOG_STARTED: Once = Once::new();

struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts collecting warnings of the whole test binary. While the guard lives no other test logs,
/// so that a port in a line is that of the test's own peer.
pub fn capture_log() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    LOG_STARTED.call_once(|| {
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .with_writer(|| LogWriter)
            .init();
    });
    ALONE.lock().unwrap_or_else(|failed_before| failed_before.into_inner())
}

/// The log lines about a peer, since it dialled: ports are used again.
pub fn log_lines(peer: &RawPeer) -> Vec<String> {
    let log = String::from_utf8(LOG.lock().unwrap()[peer.log_start..].to_vec()).unwrap();
    let needle = format!("address={}", peer.address);
    let about = |line: &&str| line.split(' ').any(|word| word == needle);
    log.lines().filter(about).map(str::to_owned).collect()
}

/// Where the log ends now.
pub fn log_length() -> usize {
    LOG.lock().unwrap().len()
}

/// Waits for a line that holds this, from that place in the log on.
#[track_caller]
pub fn wait_for_log(start: usize, expected: &str) {
    let begun = Instant::now();
    while !String::from_utf8_lossy(&LOG.lock().unwrap()[start..]).contains(expected) {
        assert!(begun.elapsed() < PATIENCE, "\"{expected}\" was not logged");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kinds that carry work, for tests over all of them.
pub fn one_of_each() -> Vec<Message> {
    let step = StepId { shard: ShardId { flight: 3, lane: 1 }, epoch: 1 << 40 };
    let rows = rows(4);
    let mut payload = Buffer::zeroed(4 * 32);
    payload.bytes_mut().iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
    let messages = vec![
        Message::attend(step, 5, &rows, &[], payload.clone()),
        Message::attended(step, 5, 4, payload.clone()),
        Message::hop(step, &rows, b"sampling", payload.clone()),
        Message::launch(step, &rows, b"sampling"),
        Message::home(step, b"tokens".to_vec()),
        Message::control(b"control".to_vec(), payload),
    ];
    assert!(messages.iter().all(|m| !matches!(m.kind(), Kind::Heartbeat | Kind::Goodbye)));
    messages
}

/// Whatever happened, a friend can join and be heard.
pub fn check_goes_on(victim: &Controller, address: SocketAddr, friend: Config) {
    let friend = Controller::start(friend).unwrap();
    let (victim_peer, _) = friend.connect(&address.to_string()).unwrap();
    let friend_peer = next_joined(victim);
    friend.send(victim_peer, attended(42, 1000)).unwrap();
    let (peer, message) = next_message(victim);
    assert_eq!((peer, flight_of(&message)), (friend_peer, 42));
    friend.shutdown();
    assert_eq!(next_lost(victim), (friend_peer, LostReason::Goodbye));
}

pub fn check_one_line(peer: &RawPeer, expected: &str) {
    let lines = log_lines(peer);
    assert_eq!(lines.len(), 1, "lines about {}: {lines:#?}", peer.address);
    assert!(lines[0].contains("WARN") && lines[0].contains(expected), "{}", lines[0]);
}

/// Strangers are told little and dropped: what each says, whether it then hangs up, and the line it earns.
pub fn check_refused(
    victim: &Controller,
    address: SocketAddr,
    cases: &[(Vec<u8>, bool, &str)],
    heard_max: usize,
) {
    for (bytes, hangs_up, expected) in cases {
        let mut stranger = RawPeer::dial(address);
        stranger.say(bytes);
        if *hangs_up {
            stranger.stream.shutdown(Shutdown::Write).unwrap();
        }
        let heard = stranger.listen_to_the_end();
        assert!(heard.len() <= heard_max, "a stranger was told {} bytes", heard.len());
        check_one_line(&stranger, expected);
    }
    assert!(victim.stats().is_empty());
}
