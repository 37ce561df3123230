//! Lines: further connections of two nodes, each read by one thread of theirs.

mod net_support;

use glinthawk_cluster::net::{
    Config, Controller, Event, HELLO_BYTES, Hello, LostReason, Peer, SendError, Status, Timing,
};
use glinthawk_flight::{Kind, Message};
use net_support::*;
use std::io::Read;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const LINES: u16 = 3;

type Nodes = ((Controller, Peer), (Controller, Peer));

/// Two nodes with lines.
fn lined(near: Config, far: Config) -> Nodes {
    let ((near, far_peer), (far, near_peer)) = pair(near, far);
    [&near, &far].into_iter().for_each(|node| node.allow_lines(LINES));
    (1..=LINES).for_each(|line| near.add_line(far_peer, line).unwrap());
    ((near, far_peer), (far, near_peer))
}

fn next_in(controller: &Controller, letter_box: u16) -> (Peer, Message) {
    match controller.recv_in(letter_box.into(), PATIENCE) {
        Some(Event::Message { peer, message, .. }) => (peer, message),
        other => panic!("expected a message in box {letter_box}, got {other:?}"),
    }
}

/// A greeting on a line.
fn hello_on(config: &Config, line: u16) -> [u8; HELLO_BYTES] {
    let mut hello = Hello::encode(config, Status::Hello);
    hello[8..10].copy_from_slice(&line.to_le_bytes());
    hello
}

/// Answers with a message's flight on the line that it came from, until the peer leaves.
fn echo(controller: &Controller, line: u16) {
    let line = usize::from(line);
    while let Some(event) = controller.recv_in(line, PATIENCE) {
        match event {
            Event::Message { peer, message, .. } => {
                let answer = attended(flight_of(&message), 2_000_000);
                // The other side may have heard enough.
                _ = controller.send_on(line, peer, answer);
            }
            Event::Lost { .. } => return,
            Event::Joined { .. } => {}
        }
    }
}

/// Long messages both ways on every line at once, each read by its own thread; and the first connection beside them.
#[test]
fn every_line_leads_to_the_thread_of_its_letter_box() {
    for config in [config, encrypted] {
        let ((near, far_peer), (far, near_peer)) = lined(config("near"), config("far"));
        near.send(far_peer, attended(77, 1000)).unwrap();
        assert_eq!(flight_of(&next_message(&far).1), 77);
        std::thread::scope(|scope| {
            for line in 1..=LINES {
                let (near, far) = (&near, &far);
                scope.spawn(move || echo(far, line));
                scope.spawn(move || {
                    for number in 0..20 {
                        let flight = u32::from(line) * 100 + number;
                        let message = attended(flight, 1_000_000);
                        near.send_on(line.into(), far_peer, message).unwrap();
                        let (peer, message) = next_in(near, line);
                        assert_eq!((peer, flight_of(&message)), (far_peer, flight));
                    }
                    // A letter box takes what others put there, too.
                    let peer = near_peer;
                    far.post(line.into(), Event::Lost { peer, reason: LostReason::Stopped });
                });
            }
        });
        let stats = &near.stats()[..];
        assert_eq!(stats.len(), 1, "lines are counted with their peer");
        assert_eq!(stats[0].sent(Kind::Attended).messages, 1 + 20 * u64::from(LINES));
    }
}

#[test]
fn a_thread_that_waits_learns_of_its_first_line() {
    let ((near, far_peer), (far, near_peer)) = pair(config("near"), config("far"));
    far.sort(2, |_| 1);
    [&near, &far].into_iter().for_each(|node| node.allow_lines(1));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| next_in(&far, 1));
        std::thread::sleep(Duration::from_millis(50));
        near.add_line(far_peer, 1).unwrap();
        near.send_on(1, far_peer, attended(5, 1000)).unwrap();
        let (peer, message) = waits.join().unwrap();
        assert_eq!((peer, flight_of(&message)), (near_peer, 5));
    });
    // What came over the first connection is sorted as ever.
    near.send(far_peer, attended(6, 1000)).unwrap();
    assert_eq!(flight_of(&next_in(&far, 1).1), 6);
}

#[test]
fn a_node_that_leaves_takes_its_lines_along() {
    let ((near, far_peer), (far, near_peer)) = lined(config("near"), config("far"));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| far.recv_in(1, Duration::from_secs(2)));
        near.shutdown();
        assert_eq!(next_lost(&far), (near_peer, LostReason::Goodbye));
        assert!(waits.join().unwrap().is_none(), "nothing more comes from a line");
    });
    assert_eq!(far.send_on(1, near_peer, attended(0, 2)), Err(SendError::Gone(near_peer)));
    assert_eq!(near.send_on(1, far_peer, attended(0, 2)), Err(SendError::Stopped));
    assert!(far.recv_in(1, Duration::ZERO).is_none());
}

/// A peer and its line, by raw bytes.
fn raw_line(far: &Controller, name: &str) -> (RawPeer, RawPeer, Peer) {
    let address = far.listen("127.0.0.1:0").unwrap();
    far.allow_lines(1);
    let config = config(name);
    let first = RawPeer::join(address, &config);
    let peer = next_joined(far);
    (first, say_hello(address, &config, 1), peer)
}

/// Dials a line and shakes hands.
fn say_hello(address: SocketAddr, config: &Config, line: u16) -> RawPeer {
    let mut peer = RawPeer::dial(address);
    peer.say(&hello_on(config, line));
    let mut welcome = [0; HELLO_BYTES];
    peer.stream.read_exact(&mut welcome).unwrap();
    Hello::decode(&welcome, &config.token, Status::Welcome).unwrap();
    peer
}

#[test]
fn garbage_on_a_line_loses_its_sender() {
    let _alone = capture_log();
    let far = Controller::start(config("far")).unwrap();
    let (mut first, mut line, sender) = raw_line(&far, "garbler");
    line.say(&[7; 200]);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(far.recv_in(1, Duration::from_secs(2)).is_none()));
        let (peer, reason) = next_lost(&far);
        assert_eq!(peer, sender);
        assert!(matches!(reason, LostReason::Garbled(_)), "{reason}");
    });
    first.listen_to_the_end();
    line.listen_to_the_end();
}

#[test]
fn a_line_that_breaks_loses_its_peer() {
    let _alone = capture_log();
    let far = Controller::start(config("far")).unwrap();
    let (mut first, line, sender) = raw_line(&far, "breaker");
    drop(line);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(far.recv_in(1, Duration::from_secs(2)).is_none()));
        assert_eq!(next_lost(&far), (sender, LostReason::Closed));
    });
    first.listen_to_the_end();
}

#[test]
fn a_line_that_is_not_read_loses_its_peer() {
    let _alone = capture_log();
    let timing = Timing { stall: Duration::from_millis(300), ..Timing::default() };
    let far = Controller::start(Config { timing, ..config("far") }).unwrap();
    let (_first, _line, sender) = raw_line(&far, "deaf");
    far.send_on(1, sender, attended(0, 64 << 20)).unwrap();
    let (peer, reason) = next_lost(&far);
    assert_eq!(peer, sender);
    assert!(matches!(reason, LostReason::Stalled(_)), "{reason}");
}

/// A line belongs to a node that is connected, and its number is one of those that are allowed.
#[test]
fn a_line_of_a_stranger_is_refused() {
    let _alone = capture_log();
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap();
    let (stranger, known) = (config("stranger"), config("known"));
    let _known = RawPeer::join(address, &known);
    next_joined(&far);
    let refused = |config: &Config, line: u16| {
        let mut peer = RawPeer::dial(address);
        peer.say(&hello_on(config, line));
        let answer = peer.listen_to_the_end();
        assert_eq!(answer[6], Status::Malformed as u8);
        let lines = log_lines(&peer);
        assert!(lines[0].contains("which has no place for it"), "{lines:?}");
    };
    refused(&known, 1);
    far.allow_lines(2);
    refused(&stranger, 1);
    refused(&known, 3);
    refused(&known, u16::MAX);
    // A node that had given up its line makes it again.
    let mut given_up = say_hello(address, &known, 1);
    let _line = say_hello(address, &known, 1);
    given_up.listen_to_the_end();
    check_goes_on(&far, address, config("friend"));
}

/// What a thread has not taken yet does not stay behind when its peer goes.
#[test]
fn lines_that_nobody_reads_leave_no_descriptors() {
    let _alone = capture_log();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap();
    far.allow_lines(20);
    let mut after = Vec::new();
    for _ in 0..5 {
        let guest = config("guest");
        let first = RawPeer::join(address, &guest);
        let peer = next_joined(&far);
        let lines: Vec<RawPeer> = (1..=20).map(|line| say_hello(address, &guest, line)).collect();
        drop((first, lines));
        assert_eq!(next_lost(&far).0, peer);
        after.push(open());
    }
    // Other tests of this process come and go.
    assert!(after[4] < after[0] + 40, "{after:?}");
}

/// Messages that nobody takes stay in the socket: the node holds none of them.
#[test]
fn a_line_that_nobody_reads_holds_its_sender_back() {
    let ((near, far_peer), (far, _)) = lined(config("near"), config("far"));
    for flight in 0..40 {
        near.send_on(1, far_peer, attended(flight, 1 << 20)).unwrap();
    }
    let began = Instant::now();
    while near.stats()[0].sent_total().messages == 0 && began.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    assert_eq!(far.stats()[0].received_total().messages, 0);
    for flight in 0..40 {
        assert_eq!(flight_of(&next_in(&far, 1).1), flight);
    }
}
