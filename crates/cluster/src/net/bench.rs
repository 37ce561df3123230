//! What the controller costs: flights against bare TCP of the same bytes, in the same run, over
//! this machine's loopback.

use super::config::{Bounds, Config, Encryption, Token};
use super::controller::{ConnectError, Controller};
use super::event::{Event, Peer, SendError};
use crate::processes::keep_to_cores;
use glinthawk_flight::{Buffer, HEADER_BYTES, Kind, Message, Pool, Row, StepId};
use std::hint::{black_box, spin_loop};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Bare and flight take turns this often, so that a busy moment of the machine hits both.
const TURNS: usize = 9;
/// Messages under way in the throughput runs: as with a fixed number of flights, more than one
/// hot buffer and less than all memory.
const WINDOW: usize = 16;
/// What an end reads to evict all else: more than the caches next to a core hold.
const EVICTED_BYTES: usize = 4 << 20;
/// A message that takes longer than this will not come.
const PATIENCE: Duration = Duration::from_secs(30);

/// One for all, because making its keys takes a while.
static TOKEN: LazyLock<Token> = LazyLock::new(|| Token::new("bench"));

/// The size of what is sent.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// Rows of a shard.
    pub rows: usize,
    /// Bytes of a row on its way out: 2·(D + 2·D_kv).
    pub row_bytes_out: usize,
    /// Bytes of a row on its way back: 2·D.
    pub row_bytes_back: usize,
    /// Round trips measured, for each method.
    pub round_trips: usize,
    /// Messages under way at a time in them. With more than one, the time from answer to answer counts.
    pub under_way: usize,
    /// Computation between two round trips, during which the far end is idle.
    pub pause: Duration,
    /// Whether messages through controllers are written before and read after, as by kernels. Else they stay in the caches
    /// of the cores that copy them. Writing and reading are timed too, unless they have cores of their own.
    pub touched: bool,
    /// Whether each end reads much memory before it sends, as kernels do, so that nothing else is left in the caches next to
    /// its core. That is not timed. Only with one message under way.
    pub evicts: bool,
    /// Messages of the throughput run, for each method.
    pub stream_messages: usize,
}

/// What was measured; medians.
#[derive(Clone, Copy, Debug)]
pub struct BenchFigures {
    /// Bytes of a message out and of one back, on the wire.
    pub wire_bytes: (usize, usize),
    /// A bare TCP ping-pong of these bytes.
    pub bare_round_trip: Duration,
    /// The same through two controllers, from `send` to `recv` and back.
    pub flight_round_trip: Duration,
    /// What the controllers add to one message: half the difference; zero if they are faster.
    pub added_per_message: Duration,
    /// A loop of vectored writes against a loop of reads.
    pub bare_bytes_per_second: f64,
    /// `send` against `recv`.
    pub flight_bytes_per_second: f64,
    /// Throughput of flights as a share of the bare loop's just before; the median of all turns.
    pub throughput_share: f64,
    /// The round trip through two controllers over TLS.
    pub tls_round_trip: Duration,
    /// `send` against `recv` over TLS.
    pub tls_bytes_per_second: f64,
    /// Throughput over TLS as a share of plain flights just before; the median of all turns.
    pub tls_share: f64,
}

/// Why the network benchmark has no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A socket failed.
    #[error("loopback socket: {0}")]
    Io(#[from] io::Error),
    /// The two controllers did not find each other.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A message could not be sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Something other than the expected message arrived, or nothing did.
    #[error("expected a message, got {0}")]
    Unexpected(String),
}

/// Measures latency and throughput of the controller against bare TCP.
pub fn bench(options: &BenchOptions) -> Result<BenchFigures, BenchError> {
    let (mut bare, mut flights, mut tls) = (Vec::new(), Vec::new(), Vec::new());
    let [mut bare_rates, mut flight_rates, mut tls_rates] = [const { Vec::new() }; 3];
    let (mut shares, mut tls_shares) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        bare.extend(bare_round_trips(options)?);
        flights.extend(flight_round_trips(options, Encryption::Never)?);
        tls.extend(flight_round_trips(options, Encryption::Always)?);
        bare_rates.push(bare_stream(options)?);
        flight_rates.push(flight_stream(options, Encryption::Never)?);
        tls_rates.push(flight_stream(options, Encryption::Always)?);
        shares.push(flight_rates[turn] / bare_rates[turn]);
        tls_shares.push(tls_rates[turn] / flight_rates[turn]);
    }
    let bare_round_trip = median(bare);
    let flight_round_trip = median(flights);
    Ok(BenchFigures {
        wire_bytes: wire_bytes(options),
        bare_round_trip,
        flight_round_trip,
        added_per_message: flight_round_trip.saturating_sub(bare_round_trip) / 2,
        bare_bytes_per_second: median(bare_rates),
        flight_bytes_per_second: median(flight_rates),
        throughput_share: median(shares),
        tls_round_trip: median(tls),
        tls_bytes_per_second: median(tls_rates),
        tls_share: median(tls_shares),
    })
}

/// A round trip: the usual one, and the mean with those that had to wait for a core.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrip {
    /// The median.
    pub median: Duration,
    /// The mean.
    pub mean: Duration,
}

/// The cores of one end of a round trip.
#[derive(Clone, Copy, Debug)]
pub struct EndCores {
    /// Of the two threads that copy messages.
    pub network: [usize; 2],
    /// Of the thread that makes and uses them.
    pub node: usize,
}

impl EndCores {
    /// All of them on one core.
    pub fn one(core: usize) -> Self {
        Self { network: [core; 2], node: core }
    }
}

/// Round trips through two controllers on given cores. On one core this measures the work of both ends; on two, they must
/// also wake each other.
pub fn round_trip(options: &BenchOptions, ends: [EndCores; 2]) -> Result<RoundTrip, BenchError> {
    let pinned = |cores: &[usize]| {
        keep_to_cores(cores).map_err(|error| BenchError::Unexpected(error.to_string()))
    };
    assert!(
        !options.evicts || options.under_way == 1,
        "an end that reads memory while another message waits"
    );
    let (tell, told) = mpsc::channel();
    let evicted_ns = &AtomicU64::new(0);
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<(), BenchError> {
            // A controller's threads stay where they were started.
            pinned(&ends[1].network)?;
            let far = Controller::start(config("bench-far", options, Encryption::Never))?;
            pinned(&[ends[1].node])?;
            // If the receiver is gone, the other end has failed and says why.
            _ = tell.send(far.listen((Ipv4Addr::LOCALHOST, 0))?);
            echo(options, &far, joined(&far)?, options.round_trips, evicted_ns)
        });
        let ping = scope.spawn(move || -> Result<Vec<Duration>, BenchError> {
            pinned(&ends[0].network)?;
            let near = Controller::start(config("bench-near", options, Encryption::Never))?;
            pinned(&[ends[0].node])?;
            let address = told.recv().map_err(|_| BenchError::Unexpected("no address".into()))?;
            let (far_peer, _) = near.connect(&address.to_string())?;
            ping(options, &near, far_peer, options.round_trips, evicted_ns)
        });
        let round_trips = ping.join().expect("the ping thread does not panic");
        echo.join().expect("the echo thread does not panic")?;
        let round_trips = round_trips?;
        let mean = round_trips.iter().sum::<Duration>() / round_trips.len().max(1) as u32;
        Ok(RoundTrip { median: median(round_trips), mean })
    })
}

fn median<T: Copy + PartialOrd>(mut values: Vec<T>) -> T {
    values.sort_unstable_by(|a, b| a.partial_cmp(b).expect("measured figures are numbers"));
    values[values.len() / 2]
}

fn wire_bytes(options: &BenchOptions) -> (usize, usize) {
    let pool = Pool::new(2);
    let out = outgoing(options, &pool).header().wire_bytes();
    (out, answer(options, &pool).header().wire_bytes())
}

fn outgoing(options: &BenchOptions, pool: &Pool) -> Message {
    let row = Row { slot: 0, position: 0, page: 0, token: 0 };
    let rows = vec![row; options.rows];
    let payload = payload(options, pool, options.row_bytes_out);
    Message::attend(StepId::default(), 0, &rows, &[], payload)
}

fn answer(options: &BenchOptions, pool: &Pool) -> Message {
    let payload = payload(options, pool, options.row_bytes_back);
    Message::attended(StepId::default(), 0, options.rows, payload)
}

fn payload(options: &BenchOptions, pool: &Pool, row_bytes: usize) -> Buffer {
    let mut payload = pool.take(options.rows * row_bytes);
    if options.touched {
        payload.bytes_mut().fill(1);
    }
    payload
}

/// Ends a message's use.
fn finish(options: &BenchOptions, pool: &Pool, message: Message) {
    let payload = message.into_payload();
    if options.touched {
        black_box(payload.bytes().iter().fold(0, |all, byte| all ^ byte));
    }
    pool.give(payload);
}

/// Both ends of a bare connection.
fn bare_pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    Ok((near, far))
}

fn bare_round_trips(options: &BenchOptions) -> io::Result<Vec<Duration>> {
    let (mut near, mut far) = bare_pair()?;
    let (out_bytes, back_bytes) = wire_bytes(options);
    let count = options.round_trips.div_ceil(TURNS);
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> io::Result<()> {
            let (mut out, back) = (vec![0; out_bytes], vec![0; back_bytes]);
            for _ in 0..count {
                far.read_exact(&mut out)?;
                far.write_all(&back)?;
            }
            Ok(())
        });
        let (out, mut back) = (vec![0; out_bytes], vec![0; back_bytes]);
        let mut round_trips = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            near.write_all(&out)?;
            near.read_exact(&mut back)?;
            round_trips.push(start.elapsed());
        }
        echo.join().expect("the echo thread does not panic")?;
        Ok(round_trips)
    })
}

fn config(name: &str, options: &BenchOptions, encryption: Encryption) -> Config {
    let window_bytes = WINDOW / 2 * wire_bytes(options).0;
    let bounds = Bounds {
        queue_bytes_max: window_bytes,
        inbox_bytes_max: window_bytes,
        ..Bounds::default()
    };
    let config = Config::new(name, TOKEN.clone(), Arc::new(Pool::new(WINDOW)));
    Config { bounds, encryption, ..config }
}

fn joined(far: &Controller) -> Result<Peer, BenchError> {
    match far.recv(PATIENCE) {
        Some(Event::Joined { peer, .. }) => Ok(peer),
        other => Err(BenchError::Unexpected(format!("{other:?}"))),
    }
}

/// Two controllers that know each other, with the peer each has to talk to.
fn controller_pair(
    options: &BenchOptions,
    encryption: Encryption,
) -> Result<[(Controller, Peer); 2], BenchError> {
    let near = Controller::start(config("bench-near", options, encryption))?;
    let far = Controller::start(config("bench-far", options, encryption))?;
    let address = far.listen((Ipv4Addr::LOCALHOST, 0))?;
    let (far_peer, _) = near.connect(&address.to_string())?;
    let near_peer = joined(&far)?;
    Ok([(near, far_peer), (far, near_peer)])
}

fn next_message(controller: &Controller, kind: Kind) -> Result<Message, BenchError> {
    match controller.recv(PATIENCE) {
        Some(Event::Message { message, .. }) if message.kind() == kind => Ok(message),
        other => Err(BenchError::Unexpected(format!("{other:?}"))),
    }
}

fn flight_round_trips(
    options: &BenchOptions,
    encryption: Encryption,
) -> Result<Vec<Duration>, BenchError> {
    let [(near, far_peer), (far, near_peer)] = controller_pair(options, encryption)?;
    let count = options.round_trips.div_ceil(TURNS);
    let evicted_ns = &AtomicU64::new(0);
    thread::scope(|scope| {
        let echo = scope.spawn(|| echo(options, &far, near_peer, count, evicted_ns));
        let round_trips = ping(options, &near, far_peer, count, evicted_ns)?;
        echo.join().expect("the echo thread does not panic")?;
        Ok(round_trips)
    })
}

/// Reads all of `memory`; returns how long that took.
fn evict(memory: &[u64]) -> Duration {
    let start = Instant::now();
    black_box(memory.iter().fold(0, |all, word| all ^ word));
    start.elapsed()
}

fn evicting_memory(options: &BenchOptions) -> Vec<u64> {
    vec![1; if options.evicts { EVICTED_BYTES / size_of::<u64>() } else { 0 }]
}

/// Answers `count` messages; says how long it read memory before each answer.
fn echo(
    options: &BenchOptions,
    far: &Controller,
    near_peer: Peer,
    count: usize,
    evicted_ns: &AtomicU64,
) -> Result<(), BenchError> {
    let memory = evicting_memory(options);
    for _ in 0..count {
        let message = next_message(far, Kind::Attend)?;
        finish(options, far.pool(), message);
        evicted_ns.store(evict(&memory).as_nanos() as u64, Ordering::Release);
        far.send(near_peer, answer(options, far.pool()))?;
    }
    Ok(())
}

/// Sends `count` messages, so many at a time; how long each took, or each answer came after the one before. What the other
/// end took to read memory is not counted.
fn ping(
    options: &BenchOptions,
    near: &Controller,
    far_peer: Peer,
    count: usize,
    evicted_ns: &AtomicU64,
) -> Result<Vec<Duration>, BenchError> {
    let memory = evicting_memory(options);
    let mut round_trips = Vec::with_capacity(count);
    let (mut sent, mut start) = (0, Instant::now());
    for answered in 0..count {
        while sent < count.min(answered + options.under_way) {
            let paused = Instant::now();
            while paused.elapsed() < options.pause {
                spin_loop();
            }
            evict(&memory);
            if options.under_way == 1 {
                start = Instant::now();
            }
            near.send(far_peer, outgoing(options, near.pool()))?;
            sent += 1;
        }
        let message = next_message(near, Kind::Attended)?;
        let elsewhere = Duration::from_nanos(evicted_ns.load(Ordering::Acquire));
        round_trips.push(start.elapsed().saturating_sub(elsewhere));
        start = Instant::now();
        finish(options, near.pool(), message);
    }
    Ok(round_trips)
}

/// Bytes per second of a loop of vectored writes (header, then body) against a loop of reads.
fn bare_stream(options: &BenchOptions) -> io::Result<f64> {
    let (mut near, mut far) = bare_pair()?;
    let (out_bytes, _) = wire_bytes(options);
    let count = options.stream_messages;
    let start = Instant::now();
    thread::scope(|scope| {
        let sink = scope.spawn(move || -> io::Result<Duration> {
            let mut messages = vec![vec![0; out_bytes]; WINDOW];
            for number in 0..count {
                far.read_exact(&mut messages[number % WINDOW])?;
            }
            Ok(start.elapsed())
        });
        let (header, bodies) = ([0; HEADER_BYTES], vec![vec![0; out_bytes - HEADER_BYTES]; WINDOW]);
        for number in 0..count {
            let body = &bodies[number % WINDOW];
            let mut slices = &mut [IoSlice::new(&header), IoSlice::new(body)][..];
            while !slices.is_empty() {
                let written = near.write_vectored(slices)?;
                IoSlice::advance_slices(&mut slices, written);
            }
        }
        let elapsed = sink.join().expect("the sink thread does not panic")?;
        Ok((out_bytes * count) as f64 / elapsed.as_secs_f64())
    })
}

/// The same through two controllers.
fn flight_stream(options: &BenchOptions, encryption: Encryption) -> Result<f64, BenchError> {
    let [(near, far_peer), (far, _)] = controller_pair(options, encryption)?;
    let (out_bytes, _) = wire_bytes(options);
    let count = options.stream_messages;
    let start = Instant::now();
    thread::scope(|scope| {
        let sink = scope.spawn(|| -> Result<Duration, BenchError> {
            for _ in 0..count {
                let message = next_message(&far, Kind::Attend)?;
                finish(options, far.pool(), message);
            }
            Ok(start.elapsed())
        });
        for _ in 0..count {
            near.send(far_peer, outgoing(options, near.pool()))?;
        }
        let elapsed = sink.join().expect("the sink thread does not panic")?;
        Ok((out_bytes * count) as f64 / elapsed.as_secs_f64())
    })
}
