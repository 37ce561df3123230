//! The kinds of messages, and the version of the language that they make up.

use std::fmt;

/// Version of headers, tables, handshake and control messages together.
pub const PROTOCOL_VERSION: u16 = 16;

/// What a message is. The number is its byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Tier 1 → Tier 2: rows (slot, position, page) and their q, k, v in bf16; then shared pages.
    Attend = 1,
    /// Tier 2 → Tier 1: the rows' attention output in bf16, in the order asked.
    Attended = 2,
    /// Slice → next slice: as a launch, and the residual in f32.
    Hop = 3,
    /// Dispatcher → slice 0: rows, sampling and shared pages.
    Launch = 4,
    /// Last slice → dispatcher: what was sampled, encoded by the sender.
    Home = 5,
    /// Anything else nodes tell each other; encoded by the sender, with an optional payload.
    Control = 6,
    /// Says that the sender lives.
    Heartbeat = 7,
    /// The sender's last message: it leaves in good order.
    Goodbye = 8,
}

/// Every kind; `KINDS[kind.index()] == kind`.
pub const KINDS: [Kind; 8] = [
    Kind::Attend,
    Kind::Attended,
    Kind::Hop,
    Kind::Launch,
    Kind::Home,
    Kind::Control,
    Kind::Heartbeat,
    Kind::Goodbye,
];

impl Kind {
    /// The kind's place in [`KINDS`], for counters by kind.
    pub fn index(self) -> usize {
        self as usize - 1
    }

    /// The kind's name in logs and statistics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Attend => "attend",
            Kind::Attended => "attended",
            Kind::Hop => "hop",
            Kind::Launch => "launch",
            Kind::Home => "home",
            Kind::Control => "control",
            Kind::Heartbeat => "heartbeat",
            Kind::Goodbye => "goodbye",
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        KINDS.get(usize::from(byte).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
