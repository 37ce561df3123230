//! The wire form: what is sent is what is opened, and anything else is refused with a named error.

use glinthawk_flight::{
    BodyChecksum, Buffer, HEADER_BYTES, Header, KINDS, Kind, Limits, MAGIC, Message,
    PROTOCOL_VERSION, Row, ShardId, StepId, WireError,
};
use proptest::prelude::*;

/// The message's bytes in one piece, as a socket would carry them.
fn wire(message: &Message) -> Vec<u8> {
    [&message.seal(), message.table(), message.payload().bytes()].concat()
}

/// Opens one message from `bytes`, allocating only after the header was accepted.
fn open(bytes: &[u8], limits: &Limits) -> Result<Message, WireError> {
    let header = Header::decode(bytes, limits)?;
    assert!(header.rows() <= limits.rows_max as usize);
    assert!(header.table_bytes() <= limits.table_bytes_max as usize);
    assert!(header.payload_bytes() <= limits.payload_bytes_max as usize);
    let body = &bytes[HEADER_BYTES..];
    let table = &body[..header.table_bytes().min(body.len())];
    let rest = &body[table.len()..];
    let payload = &rest[..header.payload_bytes().min(rest.len())];
    let checksum = BodyChecksum::of(table, payload);
    Message::open(header, table.to_vec(), buffer(payload), checksum)
}

fn buffer(bytes: &[u8]) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes.len());
    buffer.bytes_mut().copy_from_slice(bytes);
    buffer
}

/// `bytes` with its header checksum made right again.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let checksum = crc32fast::hash(&bytes[..HEADER_BYTES - 4]).to_le_bytes();
    bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&checksum);
    bytes
}

fn step() -> impl Strategy<Value = StepId> {
    any::<(u32, u32, u64)>()
        .prop_map(|(flight, lane, epoch)| StepId { shard: ShardId { flight, lane }, epoch })
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = any::<(u32, u32, u32, u32)>().prop_map(|(slot, position, page, token)| Row {
        slot,
        position,
        page,
        token,
    });
    prop::collection::vec(row, 1..40)
}

fn noise(bytes: usize, seed: u8) -> Buffer {
    let noise: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
    buffer(&noise)
}

prop_compose! {
    fn message()(
        kind in prop::sample::select(KINDS.as_slice()),
        step in step(),
        layer in any::<u32>(),
        rows in rows(),
        blob in prop::collection::vec(any::<u8>(), 0..60),
        width in 1usize..20,
        seed in any::<u8>(),
    ) -> Message {
        match kind {
            Kind::Attend => Message::attend(step, layer, &rows, &rows[1..], noise(rows.len() * width * 2, seed)),
            Kind::Attended => {
                Message::attended(step, layer, rows.len(), noise(rows.len() * width * 2, seed))
            }
            Kind::Hop => Message::hop(step, &rows, &blob, noise(rows.len() * width * 4, seed)),
            Kind::Launch => Message::launch(step, &rows, &blob),
            Kind::Home => Message::home(step, blob),
            Kind::Control => Message::control(blob, noise(width, seed)),
            Kind::Heartbeat => Message::heartbeat(),
            Kind::Goodbye => Message::goodbye(),
        }
    }
}

proptest! {
    #[test]
    fn what_is_sent_is_what_is_opened(message in message()) {
        let bytes = wire(&message);
        prop_assert_eq!(bytes.len(), message.header().wire_bytes());
        let opened = open(&bytes, &Limits::default()).unwrap();
        prop_assert_eq!(opened.kind(), message.kind());
        prop_assert_eq!((opened.step(), opened.layer()), (message.step(), message.layer()));
        prop_assert_eq!(opened.rows(), message.rows());
        prop_assert_eq!(wire(&opened), bytes);
    }

    #[test]
    fn row_tables_carry_rows_and_sampling(
        step in step(),
        rows in rows(),
        sampling in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let launch = Message::launch(step, &rows, &sampling);
        let launch = open(&wire(&launch), &Limits::default()).unwrap();
        let table = launch.row_table();
        prop_assert_eq!(table.rows().collect::<Vec<_>>(), &rows[..]);
        prop_assert_eq!(table.sampling(), &sampling[..]);
    }

    #[test]
    fn context_rows_carry_slot_position_and_page(step in step(), rows in rows()) {
        let attend = Message::attend(step, 3, &rows, &rows[1..], noise(rows.len() * 2, 0));
        let attend = open(&wire(&attend), &Limits::default()).unwrap();
        let (context, shared) = attend.context_rows();
        prop_assert_eq!((context.len(), shared), (rows.len(), &context[1..]));
        for (sent, row) in context.iter().zip(&rows) {
            prop_assert_eq!((sent.slot(), sent.position(), sent.page()),
                (row.slot, row.position, row.page));
        }
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let limits = Limits::default();
        prop_assert!(open(&bytes, &limits).is_err());
        // With the right start and checksum, the other fields are still arbitrary.
        if bytes.len() >= HEADER_BYTES {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
            bytes[6] %= 10;
            bytes[7] = 0;
            _ = open(&resealed(bytes), &limits);
        }
    }

    #[test]
    fn truncated_messages_are_refused(message in message(), keep in any::<prop::sample::Index>()) {
        let bytes = wire(&message);
        let bytes = &bytes[..keep.index(bytes.len())];
        let refused = matches!(open(bytes, &Limits::default()), Err(WireError::Truncated { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn any_flipped_bit_is_noticed(message in message(), at in any::<prop::sample::Index>()) {
        let mut bytes = wire(&message);
        let bit = at.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(open(&bytes, &Limits::default()).is_err());
    }

    /// A sender that lies consistently (the checksum is right) still cannot make a message that
    /// panics a reader or passes its limits; `open` asserts the latter.
    #[test]
    fn lying_headers_do_no_harm(
        message in message(),
        at in 6usize..HEADER_BYTES - 4,
        value in any::<u32>(),
    ) {
        let mut bytes = wire(&message);
        let end = (at + 4).min(HEADER_BYTES - 4);
        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        let limits = Limits { rows_max: 64, table_bytes_max: 4096, payload_bytes_max: 4096 };
        if let Ok(opened) = open(&resealed(bytes), &limits) {
            match opened.kind() {
                Kind::Attend => assert_eq!(opened.context_rows().0.len(), opened.rows()),
                Kind::Hop | Kind::Launch => {
                    assert_eq!(opened.row_table().rows().len(), opened.rows());
                }
                _ => {}
            }
        }
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let row = Row { slot: 1, position: 2, page: 3, token: 4 };
    let attend = wire(&Message::attend(StepId::default(), 0, &[row; 2], &[], Buffer::zeroed(8)));
    let check = |change: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let mut bytes = attend.clone();
        change(&mut bytes);
        let limits = Limits { rows_max: 8, table_bytes_max: 100, payload_bytes_max: 100 };
        let error = open(&bytes, &limits).expect_err(expected);
        assert_eq!(error.to_string(), expected);
    };
    let put = |bytes: &mut Vec<u8>, at: usize, value: u32| {
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        *bytes = resealed(std::mem::take(bytes));
    };
    check(&|bytes| bytes.truncate(10), "header has 10 bytes, needs 64");
    check(&|bytes| bytes.truncate(70), "table has 6 bytes, needs 24");
    check(&|bytes| bytes.truncate(90), "payload has 2 bytes, needs 8");
    check(&|bytes| bytes[0] = b'X', "magic is 0x544e4c58, not a glinthawk message");
    let version = format!("protocol version 200, this node speaks {PROTOCOL_VERSION}");
    check(&|bytes| bytes[4] = 200, &version);
    check(&|bytes| put(bytes, 6, 77), "unknown message kind 77");
    check(&|bytes| put(bytes, 6, 0x0101), "reserved byte is 1, must be 0");
    check(&|bytes| put(bytes, 52, 0x0200_0000), "reserved byte is 2, must be 0");
    check(&|bytes| put(bytes, 28, 9), "attend with rows 9, agreed limit is 8");
    check(&|bytes| put(bytes, 32, 101), "attend with table bytes 101, agreed limit is 100");
    check(
        &|bytes| put(bytes, 36, u32::MAX),
        "attend with payload bytes 4294967295, agreed limit is 100",
    );
    check(
        &|bytes| put(bytes, 28, 3),
        "attend of 3 rows with table bytes 24: must be 12 for each row and shared page",
    );
    check(
        &|bytes| put(bytes, 36, 7),
        "attend of 2 rows with payload bytes 7: must be whole bf16 rows",
    );
}

#[test]
fn what_a_kind_has_no_use_for_is_reserved() {
    let check = |message: Message, at: usize, expected: &str| {
        let mut bytes = wire(&message);
        bytes[at] = 5;
        let error = open(&resealed(bytes), &Limits::default()).expect_err(expected);
        assert_eq!(error.to_string(), expected);
    };
    let row = Row { slot: 1, position: 2, page: 3, token: 4 };
    let launch = Message::launch(StepId::default(), &[row], &[]);
    check(launch, 24, "launch of 1 rows with layer 5: must be 0");
    check(Message::home(StepId::default(), vec![1]), 24, "home of 0 rows with layer 5: must be 0");
    let control = || Message::control(vec![1], Buffer::default());
    check(control(), 8, "control of 0 rows with flight 5: must be 0");
    check(control(), 12, "control of 0 rows with lane 5: must be 0");
    check(Message::heartbeat(), 16, "heartbeat of 0 rows with epoch 5: must be 0");
}

#[test]
fn framing_between_the_tiers_is_under_two_percent() {
    // SmolLM2-135M: D = 576, D_kv = 192, bf16.
    let (out_bytes, back_bytes) = (2 * (576 + 2 * 192), 2 * 576);
    for rows in [32, 64, 1024] {
        let row = Row { slot: 0, position: 0, page: 0, token: 0 };
        let qkv = Buffer::zeroed(rows * out_bytes);
        let attend = Message::attend(StepId::default(), 0, &vec![row; rows], &[], qkv);
        let attended =
            Message::attended(StepId::default(), 0, rows, Buffer::zeroed(rows * back_bytes));
        for (message, bytes) in [(attend, out_bytes), (attended, back_bytes)] {
            let share = message.header().wire_bytes() as f64 / (rows * bytes) as f64 - 1.0;
            assert!((0.0..0.02).contains(&share), "{} of {rows} rows: {share}", message.kind());
        }
    }
}

#[test]
fn limits_agree_on_the_smaller() {
    let small = Limits { rows_max: 1, table_bytes_max: 20, payload_bytes_max: 3 };
    let other = Limits { rows_max: 10, table_bytes_max: 2, payload_bytes_max: 30 };
    let agreed = Limits { rows_max: 1, table_bytes_max: 2, payload_bytes_max: 3 };
    assert_eq!(small.agree(other), agreed);
    assert_eq!(other.agree(small), agreed);
    let message = Message::control(vec![0; 3], Buffer::default());
    assert!(matches!(message.check(&agreed), Err(WireError::OverLimit { value: 3, limit: 2, .. })));
}
