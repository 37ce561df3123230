//! The handshake: one fixed-size hello from the dialler, one answer of the same form. Both carry
//! the token, so that each side knows the other before it believes anything else. On an encrypted
//! connection TLS comes first, and has checked the secret before the hello is read.

use super::channel::{Channel, NOT_TLS};
use super::config::{Config, Identity, NodeId, Token};
use glinthawk_flight::{Limits, PROTOCOL_VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::AlertDescription;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{offset_of, size_of};
use std::time::{Duration, Instant};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a hello: nothing more is read from a peer that is not known yet. Magic, version and
/// length are the same in every version, so that any two can tell each other why they part.
pub const HELLO_BYTES: usize = 128;
/// The first four bytes of a hello: "GLHI".
const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"GLHI");
const NAME_BYTES: usize = 64;

/// A hello as it travels.
#[derive(Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireHello {
    magic: U32,
    version: U16,
    status: u8,
    reserved: u8,
    /// A further connection of two peers, for one thread at each end; 0 is the first.
    line: U16,
    reserved_too: [u8; 2],
    rows_max: U32,
    table_bytes_max: U32,
    payload_bytes_max: U32,
    node: U64,
    token: [u8; Token::BYTES],
    /// UTF-8, filled up with zeros.
    name: [u8; NAME_BYTES],
}

const _: () = assert!(size_of::<WireHello>() == HELLO_BYTES);
const _: () = assert!(offset_of!(WireHello, version) == 4 && offset_of!(WireHello, status) == 6);
const _: () = assert!(offset_of!(WireHello, token) == 32 && offset_of!(WireHello, name) == 64);

/// What a hello is: a greeting, or the answer to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Status {
    /// The dialler's greeting.
    #[error("hello")]
    Hello = 0,
    /// Come in.
    #[error("welcome")]
    Welcome = 1,
    /// Another version of the protocol.
    #[error("another protocol version")]
    Version = 2,
    /// Not the cluster's token.
    #[error("wrong cluster secret")]
    Token = 3,
    /// This node is already connected.
    #[error("the two nodes are already connected")]
    Connected = 4,
    /// No room for another peer.
    #[error("no room for another peer")]
    Full = 5,
    /// Limits or name make no sense.
    #[error("malformed hello")]
    Malformed = 6,
    /// This side encrypts the connection and the other does not, or the reverse.
    #[error("one side encrypts and the other does not: {MIXED}")]
    Mixed = 7,
}

const STATUSES: [Status; 8] = [
    Status::Hello,
    Status::Welcome,
    Status::Version,
    Status::Token,
    Status::Connected,
    Status::Full,
    Status::Malformed,
    Status::Mixed,
];

/// What to do about it.
const MIXED: &str =
    "give --insecure on both or on neither, and the address itself, not a forwarded port";
/// The first byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Not our protocol.
    #[error("magic is {found:#010x}, not a glinthawk hello")]
    Magic {
        /// The four bytes found.
        found: u32,
    },
    /// Another version of our protocol.
    #[error("protocol version {found}, this node speaks {PROTOCOL_VERSION}")]
    Version {
        /// The peer's version.
        found: u16,
    },
    /// Not the cluster's token.
    #[error("wrong cluster secret")]
    Token,
    /// The other side is plain where this one is encrypted, or no node at all.
    #[error("does not speak TLS: {MIXED}")]
    Plain,
    /// The other side is encrypted where this one is plain.
    #[error("speaks TLS, this node does not: {MIXED}")]
    Encrypted,
    /// TLS failed for another reason than the secret.
    #[error("{0}")]
    Tls(rustls::Error),
    /// A greeting where an answer was due, or the reverse, or neither.
    #[error("unexpected status {found} in hello")]
    Status {
        /// The byte found.
        found: u8,
    },
    /// The name is not printable text.
    #[error("node name is not printable text")]
    Name,
    /// A limit of 0: no message could ever be sent.
    #[error("limits allow no messages")]
    Limits,
    /// The two nodes already have a connection, or are the same node.
    #[error("node {node} is already connected")]
    Connected {
        /// The peer's id.
        node: NodeId,
    },
    /// All places are taken.
    #[error("no room for another peer, limit is {peers_max}")]
    Full {
        /// Peers at most.
        peers_max: usize,
    },
    /// A line of a node that is not connected, or more than are allowed.
    #[error("line {line} of node {node}, which has no place for it")]
    Line {
        /// The peer's id.
        node: NodeId,
        /// The line.
        line: u16,
    },
    /// The other side said no.
    #[error("refused by the other side: {0}")]
    Refused(Status),
    /// The peer did not finish its hello in time.
    #[error("no complete hello within {waited:?}: {bytes} bytes of {HELLO_BYTES}")]
    Timeout {
        /// How long it was given.
        waited: Duration,
        /// Bytes it sent.
        bytes: usize,
    },
    /// Others came while it took its time.
    #[error("made way for newer connections: {bytes} bytes of {HELLO_BYTES}")]
    Crowded {
        /// Bytes it sent.
        bytes: usize,
    },
    /// The peer went away.
    #[error("closed after {bytes} bytes of {HELLO_BYTES}")]
    Closed {
        /// Bytes it sent.
        bytes: usize,
    },
    /// The socket failed.
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        use rustls::Error as Tls;
        match error.downcast::<Tls>() {
            Err(error) => Self::Io(error),
            Ok(NOT_TLS) => Self::Plain,
            // The key that was presented is not made of our secret.
            Ok(Tls::InvalidCertificate(_)) => Self::Token,
            // So says a node that was presented ours.
            Ok(Tls::AlertReceived(AlertDescription::AccessDenied)) => Self::Refused(Status::Token),
            Ok(error) => Self::Tls(error),
        }
    }
}

impl HandshakeError {
    /// What to tell the peer, if it would understand the answer.
    pub(super) fn answer(&self) -> Option<Status> {
        match self {
            Self::Version { .. } => Some(Status::Version),
            Self::Token => Some(Status::Token),
            Self::Plain | Self::Encrypted => Some(Status::Mixed),
            Self::Name | Self::Limits | Self::Line { .. } => Some(Status::Malformed),
            Self::Connected { .. } => Some(Status::Connected),
            Self::Full { .. } => Some(Status::Full),
            _ => None,
        }
    }
}

/// What a peer said about itself, after its token was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Who it is.
    pub identity: Identity,
    /// The largest messages it takes.
    pub limits: Limits,
    /// Which of their connections it is; all but the first, 0, are lines.
    pub line: u16,
}

impl Hello {
    /// This node's hello. A refusal carries neither token nor identity.
    pub fn encode(config: &Config, status: Status) -> [u8; HELLO_BYTES] {
        let mut wire = WireHello::new_zeroed();
        wire.magic = HELLO_MAGIC.into();
        wire.version = PROTOCOL_VERSION.into();
        wire.status = status as u8;
        if matches!(status, Status::Hello | Status::Welcome) {
            wire.rows_max = config.limits.rows_max.into();
            wire.table_bytes_max = config.limits.table_bytes_max.into();
            wire.payload_bytes_max = config.limits.payload_bytes_max.into();
            wire.node = config.identity.node.0.into();
            wire.token = config.token.digest();
            let name = config.identity.name.as_bytes();
            assert!(name.len() <= NAME_BYTES, "a node's name has at most {NAME_BYTES} bytes");
            wire.name[..name.len()].copy_from_slice(name);
        }
        zerocopy::transmute!(wire)
    }

    /// This node's greeting on a line.
    pub(super) fn encode_line(config: &Config, line: u16) -> [u8; HELLO_BYTES] {
        let mut bytes = Self::encode(config, Status::Hello);
        let wire: &mut WireHello = zerocopy::transmute_mut!(&mut bytes);
        wire.line = line.into();
        bytes
    }

    /// Refuses a stranger by its first bytes, without waiting for the rest.
    pub fn check_start(bytes: &[u8]) -> Result<(), HandshakeError> {
        let Some(start) = bytes.first_chunk::<4>() else { return Ok(()) };
        match u32::from_le_bytes(*start) {
            HELLO_MAGIC => Ok(()),
            _ if start[0] == TLS_HANDSHAKE => Err(HandshakeError::Encrypted),
            found => Err(HandshakeError::Magic { found }),
        }
    }

    /// Reads a peer's hello, which must have the given status and our token.
    pub fn decode(
        bytes: &[u8; HELLO_BYTES],
        token: &Token,
        status: Status,
    ) -> Result<Self, HandshakeError> {
        Self::check_start(bytes)?;
        let wire: &WireHello = zerocopy::transmute_ref!(bytes);
        let found = wire.status;
        if let Some(refusal) = STATUSES.iter().find(|refusal| **refusal as u8 == found)
            && status == Status::Welcome
            && !matches!(refusal, Status::Hello | Status::Welcome)
        {
            return Err(HandshakeError::Refused(*refusal));
        }
        if wire.version.get() != PROTOCOL_VERSION {
            return Err(HandshakeError::Version { found: wire.version.get() });
        }
        if !token.matches(&wire.token) {
            return Err(HandshakeError::Token);
        }
        if found != status as u8 {
            return Err(HandshakeError::Status { found });
        }
        let limits = Limits {
            rows_max: wire.rows_max.get(),
            table_bytes_max: wire.table_bytes_max.get(),
            payload_bytes_max: wire.payload_bytes_max.get(),
        };
        if limits.rows_max == 0 || limits.table_bytes_max == 0 || limits.payload_bytes_max == 0 {
            return Err(HandshakeError::Limits);
        }
        let name = decode_name(&wire.name).ok_or(HandshakeError::Name)?;
        let identity = Identity { node: NodeId(wire.node.get()), name };
        Ok(Self { identity, limits, line: wire.line.get() })
    }
}

fn decode_name(bytes: &[u8; NAME_BYTES]) -> Option<String> {
    let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
    let name = std::str::from_utf8(&bytes[..len]).ok()?;
    (!name.chars().any(char::is_control)).then(|| name.to_owned())
}

/// The dialler's side, on the caller's thread: says hello, waits for the answer.
pub(super) fn greet(
    channel: &Channel,
    config: &Config,
    line: u16,
) -> Result<Hello, HandshakeError> {
    let deadline = Instant::now() + config.timing.handshake;
    let hello = Hello::encode_line(config, line);
    // It fits any fresh socket's buffer, so it is one write.
    if channel.write_vectored(&mut [IoSlice::new(&hello)])? < HELLO_BYTES {
        return Err(io::Error::from(io::ErrorKind::WriteZero).into());
    }
    let mut bytes = [0; HELLO_BYTES];
    let mut filled = 0;
    while filled < HELLO_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let waited = config.timing.handshake;
            return Err(HandshakeError::Timeout { waited, bytes: filled });
        }
        match channel.read_vectored(&mut [IoSliceMut::new(&mut bytes[filled..])]) {
            Ok(0) => return Err(HandshakeError::Closed { bytes: filled }),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for_input(channel, left)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        Hello::check_start(&bytes[..filled])?;
    }
    Hello::decode(&bytes, &config.token, Status::Welcome)
}

/// Sleeps until the socket has bytes, or is gone, or the time is over.
fn wait_for_input(channel: &Channel, timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&channel.stream, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_flight::Pool;
    use std::sync::Arc;

    fn config() -> Config {
        Config::new("node-a", Token::new("secret"), Arc::new(Pool::new(1)))
    }

    fn check(change: impl Fn(&mut [u8; HELLO_BYTES]), expected: &str) {
        let mut bytes = Hello::encode(&config(), Status::Hello);
        change(&mut bytes);
        let error = Hello::decode(&bytes, &Token::new("secret"), Status::Hello).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_hello_carries_identity_and_limits() {
        let config = config();
        let bytes = Hello::encode(&config, Status::Hello);
        let hello = Hello::decode(&bytes, &config.token, Status::Hello).unwrap();
        let (identity, limits) = (config.identity.clone(), config.limits);
        assert_eq!(hello, Hello { identity, limits, line: 0 });
        let bytes = Hello::encode_line(&config, 7);
        assert_eq!(Hello::decode(&bytes, &config.token, Status::Hello).unwrap().line, 7);
    }

    #[test]
    fn a_bad_hello_is_refused_by_name() {
        check(|bytes| bytes[0] = b'X', "magic is 0x49484c58, not a glinthawk hello");
        let version = format!("protocol version 200, this node speaks {PROTOCOL_VERSION}");
        check(|bytes| bytes[4] = 200, &version);
        check(|bytes| bytes[40] ^= 1, "wrong cluster secret");
        check(|bytes| bytes[6] = 200, "unexpected status 200 in hello");
        check(|bytes| bytes[12..16].fill(0), "limits allow no messages");
        check(|bytes| bytes[64] = 0xff, "node name is not printable text");
        check(|bytes| bytes[65] = b'\n', "node name is not printable text");
    }

    #[test]
    fn a_refusal_carries_no_secret() {
        let bytes = Hello::encode(&config(), Status::Token);
        assert!(bytes[8..].iter().all(|byte| *byte == 0));
        let error = Hello::decode(&bytes, &Token::new("secret"), Status::Welcome).unwrap_err();
        assert_eq!(error.to_string(), "refused by the other side: wrong cluster secret");
    }
}
