//! What only a peer with the secret can do to an encrypted connection, and the channel under it.

use super::channel::Channel;
use super::config::{Bounds, Config, Encryption, Timing, Token};
use super::controller::Controller;
use super::event::{Event, LostReason, Peer};
use super::handshake::{HELLO_BYTES, HandshakeError, Hello, Status};
use super::tls::Tls;
use glinthawk_flight::{Buffer, Message, Pool, StepId};
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{scope, yield_now};
use std::time::Duration;

fn config(name: &str) -> Config {
    let token = Token::new("the cluster's secret");
    Config { encryption: Encryption::Always, ..Config::new(name, token, Arc::new(Pool::new(8))) }
}

fn listening(config: Config) -> (Controller, SocketAddr) {
    let controller = Controller::start(config).unwrap();
    let address = controller.listen("127.0.0.1:0").unwrap();
    (controller, address)
}

fn dial(address: SocketAddr, tls: &Tls) -> Channel {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nonblocking(true).unwrap();
    Channel::new(stream, Some(tls.dial()))
}

/// Writes all of it, in pieces of at most `piece` bytes.
fn write_all(channel: &Channel, mut bytes: &[u8], piece: usize) {
    while !bytes.is_empty() {
        match channel.write_vectored(&mut [IoSlice::new(&bytes[..piece.min(bytes.len())])]) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        yield_now();
    }
}

fn read_exact(channel: &Channel, mut bytes: &mut [u8], piece: usize) {
    while !bytes.is_empty() {
        let end = piece.min(bytes.len());
        match channel.read_vectored(&mut [IoSliceMut::new(&mut bytes[..end])]) {
            Ok(0) => panic!("the stream ended"),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        yield_now();
    }
}

fn next_joined(controller: &Controller) -> Peer {
    match controller.recv(Duration::from_secs(60)) {
        Some(Event::Joined { peer, .. }) => peer,
        other => panic!("expected a node to join, got {other:?}"),
    }
}

/// Both directions at once, more than the sockets hold, in pieces of any length.
#[test]
fn a_channel_carries_both_directions_at_once() {
    let tls = Tls::new("the cluster's secret");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = dial(listener.local_addr().unwrap(), &tls);
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let far = Channel::new(stream, Some(tls.accept()));
    // The handshake is the reader's work, so both sides must read.
    let sent: Vec<u8> =
        (0..5_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let check = |channel: &Channel, piece| {
        let mut received = vec![0; sent.len()];
        read_exact(channel, &mut received, piece);
        assert!(received == sent);
    };
    scope(|scope| {
        scope.spawn(|| write_all(&near, &sent, 300_000));
        scope.spawn(|| write_all(&far, &sent, 1000));
        scope.spawn(|| check(&near, 70_000));
        scope.spawn(|| check(&far, 7000));
    });
}

/// The version is checked inside TLS, and both sides learn of the difference.
#[test]
fn another_version_is_told_inside_tls() {
    let (_far, address) = listening(config("far"));
    let old = config("old");
    let channel = dial(address, old.token.tls());
    let mut hello = Hello::encode(&old, Status::Hello);
    hello[4] = 99;
    write_all(&channel, &hello, HELLO_BYTES);
    let mut answer = [0; HELLO_BYTES];
    read_exact(&channel, &mut answer, HELLO_BYTES);
    let refused = Hello::decode(&answer, &old.token, Status::Welcome).unwrap_err();
    assert!(matches!(refused, HandshakeError::Refused(Status::Version)), "{refused}");
}

/// A peer that has the secret and stops reading fills its bounded queue and is lost.
#[test]
fn a_peer_that_stops_reading_tls_is_lost() {
    let timing = Timing { stall: Duration::from_millis(200), ..Timing::default() };
    let bounds = Bounds { queue_bytes_max: 1 << 20, ..Bounds::default() };
    let (victim, address) = listening(Config { timing, bounds, ..config("victim") });
    let deaf = config("deaf");
    let channel = dial(address, deaf.token.tls());
    write_all(&channel, &Hello::encode(&deaf, Status::Hello), HELLO_BYTES);
    read_exact(&channel, &mut [0; HELLO_BYTES], HELLO_BYTES);
    let peer = next_joined(&victim);
    let message = || Message::attended(StepId::default(), 0, 1, Buffer::zeroed(64 << 10));
    let mut given = 0;
    while victim.send(peer, message()).is_ok() {
        given += 64 << 10;
        assert!(given < 1 << 30, "a gigabyte went to a peer that reads nothing");
    }
    let sent = victim.stats()[0].sent_total().bytes as usize;
    assert!(given <= sent + (1 << 20) + (64 << 10), "{given} given, {sent} sent");
    match victim.recv(Duration::from_secs(60)) {
        Some(Event::Lost { reason: LostReason::Stalled(_), .. }) => {}
        other => panic!("expected a stalled peer, got {other:?}"),
    }
}
