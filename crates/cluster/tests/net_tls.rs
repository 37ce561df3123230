//! Encrypted connections among peers that do not have the secret: one clear line each, and it goes on.

mod net_support;

use glinthawk_cluster::net::{Config, Controller, Hello, LostReason, Status, Timing, Token};
use net_support::*;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, spawn};
use std::time::Duration;

fn listening(config: Config) -> (Controller, SocketAddr) {
    let controller = Controller::start(config).unwrap();
    let address = controller.listen("127.0.0.1:0").unwrap();
    (controller, address)
}

/// Forwards one connection to `address`; gives the bytes that the dialler sent.
fn recorded(address: SocketAddr, dial: impl FnOnce(SocketAddr)) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let relay = listener.local_addr().unwrap();
    let recorder = spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(address).unwrap();
        let (mut far_reader, mut near_writer) =
            (far.try_clone().unwrap(), near.try_clone().unwrap());
        let back = spawn(move || {
            // Ends when either side is gone.
            _ = std::io::copy(&mut far_reader, &mut near_writer);
            _ = near_writer.shutdown(Shutdown::Both);
        });
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = near.read(&mut buffer) {
            bytes.extend_from_slice(&buffer[..read]);
            if far.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        _ = far.shutdown(Shutdown::Both);
        back.join().unwrap();
        bytes
    });
    dial(relay);
    recorder.join().unwrap()
}

/// The beginning of a TLS connection, from a node without the secret.
fn client_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut config = encrypted("stranger");
    config.timing.handshake = Duration::from_millis(200);
    let dialler = spawn(move || {
        Controller::start(config).unwrap().connect(&address.to_string()).unwrap_err()
    });
    let (mut stream, _) = listener.accept().unwrap();
    let mut bytes = vec![0; 4096];
    let read = stream.read(&mut bytes).unwrap();
    bytes.truncate(read);
    // Nobody answered.
    dialler.join().unwrap();
    bytes
}

#[test]
fn strangers_are_refused_with_one_line() {
    let _alone = capture_log();
    let hello = Hello::encode(&config("plain"), Status::Hello).to_vec();
    let start = client_hello();
    let mut garbled = start.clone();
    garbled[9..].fill(0xff);
    let mut endless = vec![0x16, 3, 1, 0x40, 0];
    endless.resize(1 << 20, 1);
    let not_tls = "does not speak TLS: give --insecure on both or on neither";
    let cases: [(Vec<u8>, bool, &str); 8] = [
        (hello, false, not_tls),
        (b"GET / HTTP/1.1\r\nhost: example\r\n\r\n".to_vec(), false, not_tls),
        (vec![0xab; 1 << 20], false, not_tls),
        (garbled, false, "corrupt"),
        (endless, false, ""),
        (start[..50].to_vec(), true, "closed after 0 bytes of 128"),
        (start, true, "closed after 0 bytes of 128"),
        (Vec::new(), true, "closed after 0 bytes of 128"),
    ];
    let (victim, address) = listening(encrypted("victim"));
    check_refused(&victim, address, &cases, 1024);
    check_goes_on(&victim, address, encrypted("friend"));
}

#[test]
fn half_a_handshake_and_silence_is_dropped() {
    let _alone = capture_log();
    let timing = Timing { handshake: Duration::from_millis(200), ..Timing::default() };
    let start = client_hello();
    let (_victim, address) = listening(Config { timing, ..encrypted("victim") });
    for bytes in [&start[..], &start[..start.len() / 2], &[]] {
        let mut silent = RawPeer::dial(address);
        silent.say(bytes);
        silent.listen_to_the_end();
        check_one_line(&silent, "no complete hello within 200ms: 0 bytes of 128");
    }
}

#[test]
fn a_wrong_secret_is_said_on_both_sides() {
    let _alone = capture_log();
    let (victim, address) = listening(encrypted("victim"));
    let wrong = Config { token: Token::new("another secret altogether"), ..encrypted("wrong") };
    let wrong = Controller::start(wrong).unwrap();
    let log_start = log_length();
    let error = wrong.connect(&address.to_string()).unwrap_err().to_string();
    assert_eq!(error, format!("handshake with {address} failed: wrong cluster secret"));
    wait_for_log(log_start, "reason=refused by the other side: wrong cluster secret");
    assert!(victim.stats().is_empty());
    check_goes_on(&victim, address, encrypted("friend"));
}

#[test]
fn one_side_encrypts_and_the_other_does_not() {
    let _alone = capture_log();
    let hint = "give --insecure on both or on neither";
    let (_far, address) = listening(encrypted("far"));
    let plain = Controller::start(config("plain")).unwrap();
    let error = plain.connect(&address.to_string()).unwrap_err().to_string();
    let refused = "refused by the other side: one side encrypts and the other does not";
    assert!(error.contains(refused) && error.contains(hint), "{error}");

    let (_far, address) = listening(config("far"));
    let log_start = log_length();
    let near = Controller::start(encrypted("near")).unwrap();
    let error = near.connect(&address.to_string()).unwrap_err().to_string();
    assert!(error.contains("does not speak TLS") && error.contains(hint), "{error}");
    wait_for_log(log_start, "speaks TLS, this node does not");
}

/// Whatever a node said on the wire, saying it again is worth nothing.
#[test]
fn a_recorded_connection_cannot_be_replayed() {
    let _alone = capture_log();
    let (victim, address) = listening(encrypted("victim"));
    let bytes = recorded(address, |relay| {
        let near = Controller::start(encrypted("near")).unwrap();
        let (peer, _) = near.connect(&relay.to_string()).unwrap();
        next_joined(&victim);
        near.send(peer, attended(7, 100_000)).unwrap();
        assert_eq!(flight_of(&next_message(&victim).1), 7);
        near.shutdown();
        assert_eq!(next_lost(&victim).1, LostReason::Goodbye);
    });
    let secret_payload = [0; 64];
    assert!(bytes.len() > 100_000);
    assert!(!bytes.windows(64).any(|window| window == secret_payload), "zeros can be read");
    let known = victim.stats().len();
    // All at once, and only as far as its last words before the answer.
    for end in [bytes.len(), 1500, 700] {
        let mut thief = RawPeer::dial(address);
        thief.say(&bytes[..end]);
        thief.stream.shutdown(Shutdown::Write).unwrap_or_default();
        thief.listen_to_the_end();
        check_one_line(&thief, "refused a connection");
    }
    assert_eq!(victim.stats().len(), known, "a thief was let in");
    check_goes_on(&victim, address, encrypted("friend"));
}

/// Strangers dial as fast as they can; those that know each other go on, and a third gets in.
#[test]
fn a_flood_of_strangers_does_not_stop_the_others() {
    let _alone = capture_log();
    let start = client_hello();
    let ((near, far_peer), (far, near_peer)) = pair(encrypted("near"), encrypted("far"));
    let address = far.listen("127.0.0.1:0").unwrap();
    let over = AtomicBool::new(false);
    let flood = |bytes: &[u8]| {
        while !over.load(Ordering::Relaxed) {
            // It may be sent away before it has said anything.
            _ = TcpStream::connect(address).and_then(|mut stream| stream.write_all(bytes));
        }
    };
    scope(|scope| {
        scope.spawn(|| flood(&start));
        scope.spawn(|| flood(&[0xab; 5000]));
        for flight in 0..300 {
            near.send(far_peer, attended(flight, 50_000)).unwrap();
            assert_eq!(flight_of(&next_message(&far).1), flight);
            far.send(near_peer, attended(flight, 50_000)).unwrap();
            assert_eq!(flight_of(&next_message(&near).1), flight);
        }
        check_goes_on(&far, address, encrypted("friend"));
        over.store(true, Ordering::Relaxed);
    });
}
