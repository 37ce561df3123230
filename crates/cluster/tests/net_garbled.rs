//! The network controller among peers that do not behave: one clear line each, and it goes on.

mod net_support;

use glinthawk_cluster::net::{
    Bounds, Config, Controller, Hello, LostReason, SendError, Status, Timing,
};
use glinthawk_flight::{Buffer, HEADER_BYTES, Limits, Message, PROTOCOL_VERSION, StepId};
use net_support::*;
use std::io::Read;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

/// A node that listens, with limits small enough to pass.
fn listening(timing: Timing) -> (Controller, SocketAddr) {
    let limits = Limits { rows_max: 100, table_bytes_max: 10_000, payload_bytes_max: 100_000 };
    let controller = Controller::start(Config { limits, timing, ..config("victim") }).unwrap();
    let address = controller.listen("127.0.0.1:0").unwrap();
    (controller, address)
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let step = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..bytes).map(step).collect()
}

/// What a stranger says instead of a hello, whether it then hangs up, and the line it earns.
#[test]
fn strangers_are_refused_with_one_line() {
    let _alone = capture_log();
    let hello = Hello::encode(&config("stranger"), Status::Hello).to_vec();
    let changed = |at: usize, value: u8| {
        let mut bytes = hello.clone();
        bytes[at] = value;
        bytes
    };
    let mut endless = hello.clone();
    endless[40] ^= 1;
    endless.extend(noise(1 << 20, 3));
    let version = format!("protocol version 99, this node speaks {PROTOCOL_VERSION}");
    let cases: [(Vec<u8>, bool, &str); 9] = [
        (b"GET / HTTP/1.1\r\nhost: example\r\n\r\n".to_vec(), false, "not a glinthawk hello"),
        (changed(0, b'X'), false, "not a glinthawk hello"),
        (noise(100, 1), false, "not a glinthawk hello"),
        (noise(1 << 20, 2), false, "not a glinthawk hello"),
        (changed(4, 99), false, &version),
        (changed(63, hello[63] ^ 1), false, "wrong cluster secret"),
        (endless, false, "wrong cluster secret"),
        (hello[..50].to_vec(), true, "closed after 50 bytes of 128"),
        (Vec::new(), true, "closed after 0 bytes of 128"),
    ];
    let (victim, address) = listening(Timing::default());
    check_refused(&victim, address, &cases, 128);
    check_goes_on(&victim, address, config("friend"));
}

#[test]
fn a_peer_that_says_nothing_is_dropped() {
    let _alone = capture_log();
    const PLACES: usize = 8;
    let timing = Timing { handshake: Duration::from_millis(100), ..Timing::default() };
    let bounds = Bounds { handshakes_max: PLACES, ..Bounds::default() };
    let victim = Controller::start(Config { timing, bounds, ..config("victim") }).unwrap();
    let address = victim.listen("127.0.0.1:0").unwrap();
    // More than there are places in the handshake: some make way, the others are dropped in time.
    let mut silent: Vec<RawPeer> = (0..PLACES + 3).map(|_| RawPeer::dial(address)).collect();
    let mut slow = RawPeer::dial(address);
    slow.say(&Hello::encode(&config("slow"), Status::Hello)[..127]);
    for peer in &mut silent {
        assert!(peer.listen_to_the_end().is_empty());
        check_one_line(peer, ": 0 bytes of 128");
    }
    slow.listen_to_the_end();
    check_one_line(&slow, "no complete hello within 100ms: 127 bytes of 128");
    // On a busy machine a friend may miss its 100 ms too, and tries again.
    let friend = Controller::start(config("friend")).unwrap();
    while friend.connect(&address.to_string()).is_err() {}
    next_joined(&victim);
}

#[test]
fn a_crowd_of_silent_peers_makes_way() {
    let _alone = capture_log();
    const PLACES: usize = 8;
    let timing = Timing { handshake: PATIENCE, ..Timing::default() };
    let bounds = Bounds { handshakes_max: PLACES, ..Bounds::default() };
    let victim = Controller::start(Config { timing, bounds, ..config("victim") }).unwrap();
    let address = victim.listen("127.0.0.1:0").unwrap();
    let mut silent: Vec<RawPeer> = (0..PLACES).map(|_| RawPeer::dial(address)).collect();
    for _ in 0..3 {
        check_goes_on(&victim, address, config("friend"));
        silent.push(RawPeer::dial(address));
    }
    // The oldest went, and only as many as were in the way.
    for peer in &mut silent[..3] {
        assert!(peer.listen_to_the_end().is_empty());
        check_one_line(peer, "made way for newer connections: 0 bytes of 128");
    }
    let last = silent.last_mut().unwrap();
    last.say(&Hello::encode(&config("late"), Status::Hello));
    next_joined(&victim);
}

/// Resident memory of this process.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn announced_bytes_take_no_memory_before_they_come() {
    let _alone = capture_log();
    let (victim, address) = {
        let controller = Controller::start(config("victim")).unwrap();
        let address = controller.listen("127.0.0.1:0").unwrap();
        (controller, address)
    };
    let large = Limits::default().payload_bytes_max as usize;
    let announcement = Message::control(Vec::new(), Buffer::zeroed(large)).seal();
    let before = resident_bytes();
    let announce = |_| {
        let mut peer = RawPeer::join(address, &config("boaster"));
        peer.say(&[&announcement[..], &[0; 1000]].concat());
        next_joined(&victim);
        peer
    };
    let _boasters: Vec<RawPeer> = (0..40).map(announce).collect();
    check_goes_on(&victim, address, config("friend"));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < large / 2, "40 announcements took {grown} bytes");
}

#[test]
fn a_message_that_came_in_pieces_is_whole() {
    let ((near, far_peer), (far, _)) = pair(config("near"), config("far"));
    for (table, payload) in [(0, 5 << 20), (200_000, 0), (300_000, 70_001), (65_536, 65_536)] {
        let mut buffer = Buffer::zeroed(payload);
        buffer.bytes_mut().copy_from_slice(&noise(payload, 6));
        let sent = Message::control(noise(table, 7), buffer);
        near.send(far_peer, sent.clone()).unwrap();
        let (_, message) = next_message(&far);
        assert_eq!(message.table(), sent.table());
        assert!(message.payload().bytes() == sent.payload().bytes());
    }
}

#[test]
fn a_node_that_panics_does_not_say_goodbye() {
    let ((near, _), (far, near_peer)) = pair(config("near"), config("far"));
    let panics = std::thread::spawn(move || {
        let _near = near;
        panic!("by intent");
    });
    assert!(panics.join().is_err());
    let (peer, reason) = next_lost(&far);
    assert_eq!(peer, near_peer);
    assert_ne!(reason, LostReason::Goodbye);
}

/// A peer that takes a few bytes now and then holds up a queue just as well as one that takes none.
#[test]
fn a_peer_that_hardly_reads_is_lost() {
    let _alone = capture_log();
    let timing = Timing { stall: Duration::from_millis(300), ..Timing::default() };
    let victim = Controller::start(Config { timing, ..config("victim") }).unwrap();
    let address = victim.listen("127.0.0.1:0").unwrap();
    let mut slow = RawPeer::join(address, &config("slow"));
    let slow_peer = next_joined(&victim);
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let reader = std::thread::spawn(move || {
        let mut few = [0; 512];
        while told.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Empty) {
            slow.stream.read_exact(&mut few).unwrap_or_default();
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    victim.send(slow_peer, attended(0, 64 << 20)).unwrap();
    let (peer, reason) = next_lost(&victim);
    assert_eq!(peer, slow_peer);
    assert!(matches!(reason, LostReason::Stalled(_)), "{reason}");
    drop(tell);
    reader.join().unwrap();
}

/// What a known node sends instead of messages, and how it is lost.
#[test]
fn garbled_messages_lose_their_sender_only() {
    let _alone = capture_log();
    let good = wire(&Message::attend(StepId::default(), 0, &rows(3), &[], Buffer::zeroed(3 * 200)));
    let patched = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let checksum = crc32(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        bytes
    };
    let mut flipped_header = good.clone();
    flipped_header[45] ^= 4;
    let mut flipped_payload = good.clone();
    *flipped_payload.last_mut().unwrap() ^= 4;
    let mut after_a_good_one = good.clone();
    after_a_good_one.extend(noise(1000, 5));
    let version = format!("protocol version 99, this node speaks {PROTOCOL_VERSION}");
    let cases: [(Vec<u8>, &str); 11] = [
        (noise(5000, 4), "not a glinthawk message"),
        (after_a_good_one, "not a glinthawk message"),
        (patched(4, 0x0001_0063), &version),
        (patched(6, 200), "unknown message kind 200"),
        (flipped_header, "header checksum"),
        (flipped_payload, "attend body checksum"),
        (patched(36, u32::MAX), "attend with payload bytes 4294967295, agreed limit is 100000"),
        (patched(32, 10_001), "attend with table bytes 10001, agreed limit is 10000"),
        (patched(28, 4), "attend of 4 rows with table bytes 36: must be 12 for each row"),
        (good[..40].to_vec(), "closed the connection after 40 of a message's 64 bytes"),
        (good[..300].to_vec(), "closed the connection after 300 of a message's 700 bytes"),
    ];
    let (victim, address) = listening(Timing::default());
    for (bytes, expected) in cases {
        let mut traitor = RawPeer::join(address, &config("traitor"));
        let traitor_peer = next_joined(&victim);
        traitor.say(&bytes);
        traitor.stream.shutdown(Shutdown::Write).unwrap_or_default();
        if bytes.starts_with(&good) {
            assert_eq!(next_message(&victim).0, traitor_peer);
        }
        let (peer, reason) = next_lost(&victim);
        assert_eq!(peer, traitor_peer);
        assert!(reason.to_string().contains(expected), "{reason}");
        assert_ne!(reason, LostReason::Goodbye);
        check_one_line(&traitor, expected);
    }
    check_goes_on(&victim, address, config("friend"));
}

/// The same checksum as the wire's, bit by bit: a liar can compute it too.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc));
    !bytes.iter().fold(!0, byte)
}

#[test]
fn a_known_node_that_falls_silent_is_lost() {
    let _alone = capture_log();
    let timing = Timing { silence: Duration::from_millis(100), ..Timing::default() };
    let (victim, address) = listening(timing);
    let mut silent = RawPeer::join(address, &config("silent"));
    let silent_peer = next_joined(&victim);
    let (peer, reason) = next_lost(&victim);
    assert_eq!(peer, silent_peer);
    assert!(matches!(reason, LostReason::Silent(silence) if silence >= Duration::from_millis(100)));
    silent.listen_to_the_end();
    check_one_line(&silent, "not heard for");
}

/// A peer that stops reading fills its bounded queue, blocks the sender, and is lost.
#[test]
fn a_peer_that_stops_reading_is_lost() {
    let _alone = capture_log();
    const QUEUE_BYTES: usize = 1 << 20;
    const MESSAGE_BYTES: usize = 64 << 10;
    let timing = Timing { stall: Duration::from_millis(200), ..Timing::default() };
    let bounds = Bounds { queue_bytes_max: QUEUE_BYTES, ..Bounds::default() };
    let victim = Controller::start(Config { timing, bounds, ..config("victim") }).unwrap();
    let address = victim.listen("127.0.0.1:0").unwrap();
    let deaf = RawPeer::join(address, &config("deaf"));
    let deaf_peer = next_joined(&victim);
    let mut given = 0;
    let error = loop {
        match victim.send(deaf_peer, attended(0, MESSAGE_BYTES)) {
            Ok(()) => given += MESSAGE_BYTES,
            Err(error) => break error,
        }
        assert!(given < 1 << 30, "a gigabyte went to a peer that reads nothing");
    };
    assert_eq!(error, SendError::Gone(deaf_peer));
    // Never more waited than the queue's bound; the rest was in the sockets' buffers.
    let sent = victim.stats()[0].sent_total().bytes as usize;
    assert!(given <= sent + QUEUE_BYTES + MESSAGE_BYTES, "{given} given, {sent} sent");
    let (peer, reason) = next_lost(&victim);
    assert_eq!(peer, deaf_peer);
    assert!(matches!(reason, LostReason::Stalled(_)), "{reason}");
    check_one_line(&deaf, "took hardly a byte for");
    check_goes_on(&victim, address, config("friend"));
}

/// A shutdown ends in time even if a peer does not read, and frees threads that wait in `send`.
#[test]
fn a_peer_that_stops_reading_cannot_hold_up_a_shutdown() {
    let _alone = capture_log();
    let timing = Timing { farewell: Duration::from_millis(100), ..Timing::default() };
    let bounds = Bounds { queue_bytes_max: 1 << 20, ..Bounds::default() };
    let victim = Controller::start(Config { timing, bounds, ..config("victim") }).unwrap();
    let address = victim.listen("127.0.0.1:0").unwrap();
    let _deaf = RawPeer::join(address, &config("deaf"));
    let deaf_peer = next_joined(&victim);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            loop {
                if let Err(error) = victim.send(deaf_peer, attended(0, 64 << 10)) {
                    return error;
                }
            }
        });
        victim.shutdown();
        let error = flood.join().unwrap();
        assert!(matches!(error, SendError::Stopped | SendError::Gone(_)), "{error}");
    });
}

/// A node that hangs up without reading what it was sent makes the socket fail; what it said
/// before, goodbye included, is still heard.
#[test]
fn last_words_are_heard() {
    let _alone = capture_log();
    let (victim, address) = listening(Timing::default());
    for round in 0..20 {
        let mut hasty = RawPeer::join(address, &config("hasty"));
        let hasty_peer = next_joined(&victim);
        victim.send(hasty_peer, attended(0, 50_000)).unwrap();
        // Its first byte has come: there is something that will not be read.
        hasty.stream.peek(&mut [0]).unwrap();
        let words = [attended(1, 1000), attended(2, 1000), Message::goodbye()];
        hasty.say(&words.iter().flat_map(wire).collect::<Vec<u8>>());
        drop(hasty);
        for flight in [1, 2] {
            // Into the broken socket, for good measure.
            _ = victim.send(hasty_peer, attended(0, 50_000));
            assert_eq!(flight_of(&next_message(&victim).1), flight, "round {round}");
        }
        assert_eq!(next_lost(&victim), (hasty_peer, LostReason::Goodbye), "round {round}");
    }
}
