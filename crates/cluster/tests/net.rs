//! The network controller between nodes that behave, over plain TCP and over TLS.

mod net_support;

use glinthawk_cluster::net::{
    Bounds, Config, ConnectError, Controller, Event, HandshakeError, LinkShape, LostReason,
    SendError, Status, Timing, Token,
};
use glinthawk_flight::{Buffer, Kind, Limits, Message, ShardId, StepId, WireError};
use net_support::*;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Makes the configuration of a node of this name.
type MakeConfig = fn(&str) -> Config;

/// Runs every case twice.
macro_rules! over_tcp_and_tls {
    ($($case:ident,)*) => {
        mod tcp {
            $(#[test] fn $case() { super::$case(super::config); })*
        }
        mod tls {
            $(#[test] fn $case() { super::$case(super::encrypted); })*
        }
    };
}

over_tcp_and_tls! {
    every_kind_travels_both_ways_over_ipv4,
    every_kind_travels_both_ways_over_ipv6,
    bytes_between_the_tiers_are_what_the_design_says,
    a_goodbye_comes_after_everything_that_was_sent,
    a_node_that_returns_is_another_peer,
    one_connection_per_pair,
    a_full_node_refuses_further_peers,
    a_wrong_token_is_told_to_the_dialler,
    an_address_where_nobody_listens_is_unreachable,
    the_smaller_limits_hold_for_both,
    idle_nodes_keep_hearing_each_other,
    a_node_that_was_stopped_loses_nobody,
    back_pressure_bounds_both_sides,
    delay_pipelines_over_a_real_socket,
    bandwidth_queues_over_a_real_socket,
    events_of_a_peer_come_in_order,
    many_senders_leave_nothing_behind,
}

/// Every kind of message, both ways, byte for byte; and the counters that must result.
fn check_exchange(config: MakeConfig, address: &str) {
    let ((near, far_peer), (far, near_peer)) = pair_at(address, config("near"), config("far"));
    for message in one_of_each() {
        for ((from, to_peer), (to, from_peer)) in
            [((&near, far_peer), (&far, near_peer)), ((&far, near_peer), (&near, far_peer))]
        {
            from.send(to_peer, message.clone()).unwrap();
            let (peer, received) = next_message(to);
            assert_eq!(peer, from_peer);
            assert_eq!(wire(&received), wire(&message), "{}", message.kind());
        }
    }
    for controller in [&near, &far] {
        let [stats] = &controller.stats()[..] else { panic!("one peer, one line of statistics") };
        for message in one_of_each() {
            let received = stats.received(message.kind());
            assert_eq!(received.messages, 1);
            assert_eq!(received.bytes, message.header().wire_bytes() as u64);
            assert_eq!(received.rows, message.rows() as u64);
        }
    }
}

fn every_kind_travels_both_ways_over_ipv4(config: MakeConfig) {
    check_exchange(config, "127.0.0.1:0");
}

fn every_kind_travels_both_ways_over_ipv6(config: MakeConfig) {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        println!("skipped: no IPv6 loopback here: {error}");
        return;
    }
    check_exchange(config, "[::1]:0");
}

fn bytes_between_the_tiers_are_what_the_design_says(config: MakeConfig) {
    // SmolLM2-135M: D = 576, D_kv = 192.
    let (out_bytes, back_bytes) = (2.0 * (576.0 + 2.0 * 192.0), 2.0 * 576.0);
    let ((tier1, tier2_peer), (tier2, tier1_peer)) = pair(config("tier1"), config("tier2"));
    for count in [32, 33, 64] {
        let qkv = Buffer::zeroed(count * out_bytes as usize);
        tier1
            .send(tier2_peer, Message::attend(StepId::default(), 0, &rows(count), &[], qkv))
            .unwrap();
        next_message(&tier2);
        let attended = Buffer::zeroed(count * back_bytes as usize);
        tier2.send(tier1_peer, Message::attended(StepId::default(), 0, count, attended)).unwrap();
        next_message(&tier1);
    }
    let stats = &tier2.stats()[0];
    let out = stats.received(Kind::Attend);
    let back = tier1.stats()[0].received(Kind::Attended);
    for (counter, bytes) in [(out, out_bytes), (back, back_bytes)] {
        let framing = counter.bytes as f64 / counter.rows as f64 / bytes - 1.0;
        assert!((0.0..0.02).contains(&framing), "framing is {framing}");
    }
}

fn a_goodbye_comes_after_everything_that_was_sent(config: MakeConfig) {
    let ((near, far_peer), (far, near_peer)) = pair(config("near"), config("far"));
    for flight in 0..500 {
        near.send(far_peer, attended(flight, 1000)).unwrap();
    }
    near.shutdown();
    for flight in 0..500 {
        assert_eq!(flight_of(&next_message(&far).1), flight);
    }
    assert_eq!(next_lost(&far), (near_peer, LostReason::Goodbye));
    assert_eq!(far.send(near_peer, attended(0, 2)), Err(SendError::Gone(near_peer)));
    assert_eq!(near.send(far_peer, attended(0, 2)), Err(SendError::Stopped));
    assert!(near.recv(Duration::ZERO).is_none());
}

fn a_node_that_returns_is_another_peer(config: MakeConfig) {
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap().to_string();
    let identity_of = config("near");
    let mut peers = Vec::new();
    for _ in 0..3 {
        let near = Controller::start(identity_of.clone()).unwrap();
        near.connect(&address).unwrap();
        peers.push(next_joined(&far));
        drop(near);
        assert_eq!(next_lost(&far), (*peers.last().unwrap(), LostReason::Goodbye));
    }
    peers.dedup();
    assert_eq!(peers.len(), 3);
}

fn one_connection_per_pair(config: MakeConfig) {
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap().to_string();
    let near = Controller::start(config("near")).unwrap();
    near.connect(&address).unwrap();
    let refused = |result| match result {
        Err(ConnectError::Handshake { source: HandshakeError::Refused(status), .. }) => status,
        other => panic!("expected a refusal, got {other:?}"),
    };
    assert_eq!(refused(near.connect(&address)), Status::Connected);
    // Nor with itself.
    assert_eq!(refused(far.connect(&address)), Status::Connected);
}

fn a_full_node_refuses_further_peers(config: MakeConfig) {
    let bounds = Bounds { peers_max: 1, ..Bounds::default() };
    let far = Controller::start(Config { bounds, ..config("far") }).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap().to_string();
    let nodes = [config("first"), config("second")].map(|c| Controller::start(c).unwrap());
    nodes[0].connect(&address).unwrap();
    let error = nodes[1].connect(&address).unwrap_err();
    assert!(error.to_string().ends_with("refused by the other side: no room for another peer"));
}

fn a_wrong_token_is_told_to_the_dialler(config: MakeConfig) {
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap().to_string();
    let mut wrong = config("near");
    wrong.token = Token::new("something else");
    let error = Controller::start(wrong).unwrap().connect(&address).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with(&format!("handshake with {address} failed: ")), "{error}");
    assert!(error.ends_with("wrong cluster secret"), "{error}");
}

fn an_address_where_nobody_listens_is_unreachable(config: MakeConfig) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let near = Controller::start(config("near")).unwrap();
    assert!(matches!(near.connect(&address), Err(ConnectError::Unreachable { .. })));
}

fn the_smaller_limits_hold_for_both(config: MakeConfig) {
    let mut small = config("small");
    small.limits = Limits { payload_bytes_max: 1000, ..Limits::default() };
    let ((near, far_peer), (far, near_peer)) = pair(config("large"), small);
    for (from, to) in [(&near, far_peer), (&far, near_peer)] {
        from.send(to, attended(1, 1000)).unwrap();
        let over = from.send(to, attended(2, 1002)).unwrap_err();
        let SendError::OverLimit { source, .. } = over else { panic!("{over}") };
        assert!(matches!(source, WireError::OverLimit { value: 1002, limit: 1000, .. }));
    }
    assert_eq!(flight_of(&next_message(&far).1), 1);
    assert_eq!(flight_of(&next_message(&near).1), 1);
}

fn idle_nodes_keep_hearing_each_other(config: MakeConfig) {
    let mut quick = config("near");
    quick.timing = Timing { heartbeat: Duration::from_millis(20), ..Timing::default() };
    let far = Config { identity: config("far").identity, ..quick.clone() };
    let ((near, _), (far, _)) = pair(quick, far);
    let heartbeats =
        |controller: &Controller| controller.stats()[0].received(Kind::Heartbeat).messages;
    let start = Instant::now();
    while heartbeats(&near) < 3 || heartbeats(&far) < 3 {
        assert!(start.elapsed() < PATIENCE, "no heartbeats");
        assert!(near.recv(Duration::from_millis(5)).is_none());
    }
    assert!(far.recv(Duration::ZERO).is_none());
}

/// The network thread is stopped for longer than a peer may be silent.
fn a_node_that_was_stopped_loses_nobody(config: MakeConfig) {
    let silence = Duration::from_secs(1);
    let mut stopped = config("near");
    stopped.timing = Timing { silence, ..Timing::default() };
    let mut lively = config("far");
    lively.timing = Timing { heartbeat: Duration::from_millis(50), ..Timing::default() };
    let ((near, _), (far, near_peer)) = pair(stopped, lively);
    near.sort(1, move |message| {
        if flight_of(message) == 1 {
            std::thread::sleep(3 * silence);
        }
        0
    });
    for flight in [1, 2] {
        far.send(near_peer, attended(flight, 8)).unwrap();
        assert_eq!(flight_of(&next_message(&near).1), flight);
    }
    assert!(near.recv(silence / 2).is_none());
}

/// A receiver that dawdles holds the sender back; neither side holds more than its bounds.
fn back_pressure_bounds_both_sides(config: MakeConfig) {
    const MESSAGE_BYTES: usize = 64 << 10;
    const MESSAGES: u32 = 600; // far more than the sockets between them hold
    let bounds = Bounds { queue_bytes_max: 1 << 20, inbox_bytes_max: 1 << 20, ..Bounds::default() };
    let bounded = |name| Config { bounds, ..config(name) };
    let ((near, far_peer), (far, _)) = pair(bounded("near"), bounded("far"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut given = 0;
            for flight in 0..MESSAGES {
                near.send(far_peer, attended(flight, MESSAGE_BYTES)).unwrap();
                given += MESSAGE_BYTES as u64;
                let gone = near.stats()[0].sent_total().bytes;
                assert!(given <= gone + (1 << 20) + 2 * MESSAGE_BYTES as u64);
            }
        });
        let mut taken = 0;
        for flight in 0..MESSAGES {
            let held = far.stats()[0].received_total().bytes - taken;
            assert!(held <= (1 << 20) + (512 << 10), "{held} bytes unread");
            let (_, message) = next_message(&far);
            assert_eq!(flight_of(&message), flight);
            taken += message.header().wire_bytes() as u64;
        }
    });
}

fn delay_pipelines_over_a_real_socket(config: MakeConfig) {
    const DELAY: Duration = Duration::from_millis(100);
    const MESSAGES: u32 = 50;
    let ((near, far_peer), (far, near_peer)) = pair(config("near"), config("far"));
    for (controller, peer) in [(&near, far_peer), (&far, near_peer)] {
        controller.shape(peer, LinkShape { delay: DELAY, bytes_per_second: None });
    }
    let start = Instant::now();
    for flight in 0..MESSAGES {
        near.send(far_peer, attended(flight, 1000)).unwrap();
    }
    for flight in 0..MESSAGES {
        assert_eq!(flight_of(&next_message(&far).1), flight);
        far.send(near_peer, attended(flight, 1000)).unwrap();
    }
    for flight in 0..MESSAGES {
        assert_eq!(flight_of(&next_message(&near).1), flight);
    }
    let elapsed = start.elapsed();
    assert!(elapsed >= 2 * DELAY, "there and back took {elapsed:?}");
    // One after the other they would take a hundred delays.
    assert!(elapsed < DELAY * MESSAGES, "{MESSAGES} messages took {elapsed:?}");
}

fn bandwidth_queues_over_a_real_socket(config: MakeConfig) {
    let ((near, far_peer), (far, _)) = pair(config("near"), config("far"));
    let shape = LinkShape { delay: Duration::ZERO, bytes_per_second: Some(1_000_000) };
    near.shape(far_peer, shape);
    let start = Instant::now();
    let mut bytes = 0;
    for flight in 0..20 {
        let message = attended(flight, 10_000);
        bytes += message.header().wire_bytes();
        near.send(far_peer, message).unwrap();
    }
    for _ in 0..20 {
        next_message(&far);
    }
    assert!(start.elapsed() >= Duration::from_micros(bytes as u64), "faster than the link");
}

fn events_of_a_peer_come_in_order(config: MakeConfig) {
    let ((near, far_peer), (far, near_peer)) = pair(config("near"), config("far"));
    near.send(far_peer, attended(1, 100)).unwrap();
    near.shutdown();
    let events: Vec<Event> = std::iter::from_fn(|| far.recv(PATIENCE)).take(2).collect();
    assert!(matches!(&events[..],
        [Event::Message { peer: sender, .. }, Event::Lost { peer: leaver, .. }]
            if *sender == near_peer && *leaver == near_peer));
}

/// However the network cuts a stream into pieces, the same messages come out of it.
#[test]
fn messages_survive_any_segmentation() {
    let far = Controller::start(config("far")).unwrap();
    let address = far.listen("127.0.0.1:0").unwrap();
    let mut raw = RawPeer::join(address, &config("raw"));
    raw.stream.set_nodelay(true).unwrap();
    next_joined(&far);
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut sent = Vec::new();
    let mut stream = Vec::new();
    for flight in 0u32..300 {
        let message = match random(4) {
            0 => Message::control(flight.to_le_bytes().to_vec(), Buffer::default()),
            1 => Message::home(step(flight), vec![flight as u8; random(50) as usize]),
            2 => attended(flight, 2 + 2 * random(2000) as usize),
            _ => Message::heartbeat(),
        };
        stream.extend(wire(&message));
        if message.kind() != Kind::Heartbeat {
            sent.push(wire(&message));
        }
    }
    let mut rest = &stream[..];
    while !rest.is_empty() {
        let longest = [3, 70, 5000][random(3) as usize];
        let (piece, after) = rest.split_at(rest.len().min(1 + random(longest) as usize));
        raw.say(piece);
        rest = after;
    }
    for expected in sent {
        assert_eq!(wire(&next_message(&far).1), expected);
    }
}

/// A sender or the network thread writes, and no message is left behind. Without a timer to rescue
/// it, a message that each thread leaves to the other would never arrive.
fn many_senders_leave_nothing_behind(config: MakeConfig) {
    const SENDERS: u32 = 4;
    const MESSAGES: u32 = 500;
    let never = Duration::from_secs(4000);
    let timing = Timing {
        handshake: never,
        heartbeat: never,
        silence: never,
        stall: never,
        farewell: Timing::default().farewell,
    };
    let bounds = Bounds { queue_bytes_max: 400_000, inbox_bytes_max: 400_000, ..Bounds::default() };
    let patient = |name| Config { timing, bounds, ..config(name) };
    let ((near, far_peer), (far, _)) = pair(patient("near"), patient("far"));
    std::thread::scope(|scope| {
        for sender in 0..SENDERS {
            let near = &near;
            scope.spawn(move || {
                for number in 0..MESSAGES {
                    let step = StepId { shard: ShardId { flight: number, lane: sender }, epoch: 0 };
                    // Now and then one that is too long to be written by its sender.
                    let bytes = if (number + sender).is_multiple_of(50) { 200_000 } else { 1000 };
                    let message = Message::attended(step, 0, 1, Buffer::zeroed(bytes));
                    near.send(far_peer, message).unwrap();
                }
            });
        }
        let mut next_number = [0; SENDERS as usize];
        for _ in 0..SENDERS * MESSAGES {
            let ShardId { flight, lane } = next_message(&far).1.step().shard;
            assert_eq!(flight, next_number[lane as usize]);
            next_number[lane as usize] += 1;
        }
        assert_eq!(next_number, [MESSAGES; SENDERS as usize]);
    });
}
