//! What a controller is told before it starts: who it is, what it accepts, how long it waits.

use super::tls::Tls;
use glinthawk_flight::{Limits, Pool};
use sha2::{Digest, Sha256};
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use subtle::ConstantTimeEq;

/// Names a node for as long as its process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u64);

impl NodeId {
    /// An id that no other node has.
    pub fn random() -> Self {
        // The standard library seeds each hasher from the system's randomness.
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self(hasher.finish())
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// The identity that a node claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Unique in the cluster.
    pub node: NodeId,
    /// For people: at most 64 bytes, no control characters.
    pub name: String,
}

/// The secret that all nodes of a cluster share. Only its digest is ever sent, and beyond the
/// loopback only inside TLS.
#[derive(Clone)]
pub struct Token {
    secret: Arc<str>,
    digest: [u8; Token::BYTES],
    tls: Arc<OnceLock<Tls>>,
}

impl Token {
    /// Bytes of a digest.
    pub const BYTES: usize = 32;

    /// The token of this text.
    pub fn new(text: &str) -> Self {
        let mut digest = Sha256::new();
        digest.update(b"glinthawk cluster token\0");
        digest.update(text.as_bytes());
        let digest = digest.finalize().into();
        Self { secret: text.into(), digest, tls: Arc::default() }
    }

    /// What goes into a hello.
    pub fn digest(&self) -> [u8; Self::BYTES] {
        self.digest
    }

    /// Compares in a time that does not depend on where the first difference is.
    pub fn matches(&self, digest: &[u8; Self::BYTES]) -> bool {
        self.digest.ct_eq(digest).into()
    }

    /// How to speak TLS with those that have the secret. The first call takes a while.
    pub(super) fn tls(&self) -> &Tls {
        self.tls.get_or_init(|| Tls::new(&self.secret))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

/// Which connections are TLS. Both ends must agree, and each decides by the other's address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// All but those of the loopback, which nobody else can read.
    #[default]
    BeyondLoopback,
    /// All.
    Always,
    /// None.
    Never,
}

/// How long the controller waits for a peer.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From accepting or dialling a connection to the end of its handshake.
    pub handshake: Duration,
    /// Without anything else to say, a sign of life is sent this often.
    pub heartbeat: Duration,
    /// A peer that was not heard for this long is lost.
    pub silence: Duration,
    /// A peer that accepts no byte of its queue for this long is lost; on a line, eight times as long.
    pub stall: Duration,
    /// A shutdown waits this long at most for what is queued and for the peers' goodbye.
    pub farewell: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(15),
            stall: Duration::from_secs(15),
            farewell: Duration::from_secs(5),
        }
    }
}

/// How much the controller holds for a peer.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections at most; further ones are refused.
    pub peers_max: usize,
    /// Connections in their handshake at most. For a further one, the oldest of the address that has most is dropped.
    pub handshakes_max: usize,
    /// Bytes handed to `send` and not yet to the socket, per peer or line; beyond this, `send` waits. Bytes
    /// that an injected delay holds back count too.
    pub queue_bytes_max: usize,
    /// Bytes received and not yet taken by `recv`, per peer; beyond this, nothing more is read from
    /// the peer. A single turn may exceed it by 256 KiB and a message.
    pub inbox_bytes_max: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            peers_max: 256,
            handshakes_max: 128,
            queue_bytes_max: 512 << 20,
            inbox_bytes_max: 512 << 20,
        }
    }
}

/// Everything a controller is told before it starts.
#[derive(Clone)]
pub struct Config {
    /// Who this node is.
    pub identity: Identity,
    /// The cluster's secret.
    pub token: Token,
    /// Which connections are TLS.
    pub encryption: Encryption,
    /// The largest messages this node takes; a pair of nodes agrees on the smaller.
    pub limits: Limits,
    /// How long to wait.
    pub timing: Timing,
    /// How much to hold.
    pub bounds: Bounds,
    /// Where payloads are received into, and where they return once sent.
    pub pool: Arc<Pool>,
}

impl Config {
    /// A node of this name with a random id and default limits, timing and bounds.
    pub fn new(name: &str, token: Token, pool: Arc<Pool>) -> Self {
        Self {
            identity: Identity { node: NodeId::random(), name: name.to_owned() },
            token,
            encryption: Encryption::default(),
            limits: Limits::default(),
            timing: Timing::default(),
            bounds: Bounds::default(),
            pool,
        }
    }

    /// How to speak TLS with a peer at this address; `None` is plain TCP.
    pub(super) fn tls(&self, peer: IpAddr) -> Option<&Tls> {
        let encrypted = match self.encryption {
            Encryption::BeyondLoopback => !peer.to_canonical().is_loopback(),
            Encryption::Always => true,
            Encryption::Never => false,
        };
        encrypted.then(|| self.token.tls())
    }
}

/// An artificial link. It applies to what this end sends, so both ends must be given it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkShape {
    /// Every message arrives this much later; messages follow each other into the delay.
    pub delay: Duration,
    /// The link carries this much; messages wait for each other.
    pub bytes_per_second: Option<u64>,
}
