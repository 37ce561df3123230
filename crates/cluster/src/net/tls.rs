//! Who may speak TLS with a node: exactly those that hold the cluster's secret.
//!
//! The secret is stretched into one Ed25519 key pair that all nodes of the cluster share. Both ends
//! present its public key as it is (RFC 7250: no certificates, no names, no dates), sign the
//! handshake with it, and take no other key. So each end knows that the other has the secret, and
//! a recorded connection is worth nothing: every handshake signs fresh random numbers.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring as provider,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, PeerIncompatible, ServerConfig, ServerConnection, SignatureScheme,
};
use std::num::NonZeroU32;
use std::sync::Arc;

/// A stranger that dials sees the public key and can try secrets against it at home. This many
/// hashes for each try take a tenth of a second here, once.
const STRETCH: NonZeroU32 = NonZeroU32::new(1 << 18).unwrap();

/// An Ed25519 private key in PKCS #8 is this, then 32 bytes.
const PKCS8_START: [u8; 16] =
    [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Both ends of TLS for one secret.
pub(super) struct Tls {
    dialler: Arc<ClientConfig>,
    listener: Arc<ServerConfig>,
}

impl Tls {
    /// Takes a while, by intent.
    pub(super) fn new(secret: &str) -> Self {
        let mut pkcs8 = [0; 48];
        pkcs8[..16].copy_from_slice(&PKCS8_START);
        let algorithm = ring::pbkdf2::PBKDF2_HMAC_SHA256;
        let salt = b"glinthawk cluster key";
        ring::pbkdf2::derive(algorithm, STRETCH, salt, secret.as_bytes(), &mut pkcs8[16..]);
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(&pkcs8[..]))
            .expect("32 bytes are an Ed25519 key");
        let public = key.public_key().expect("a key pair has a public key").into_owned();

        // One choice of everything: there is nothing to negotiate down to.
        let own = Arc::new(CryptoProvider {
            cipher_suites: vec![provider::cipher_suite::TLS13_AES_128_GCM_SHA256],
            kx_groups: vec![provider::kx_group::X25519],
            ..provider::default_provider()
        });
        let certified = Arc::new(CertifiedKey::new(vec![public.to_vec().into()], key));
        let algorithms = own.signature_verification_algorithms;
        let verifier = Arc::new(OwnKeyOnly { public, algorithms });
        let mut dialler = ClientConfig::builder_with_provider(Arc::clone(&own))
            .with_protocol_versions(&[&TLS13])
            .expect("the suite is one of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                Arc::clone(&certified),
            )));
        dialler.resumption = Resumption::disabled();
        dialler.enable_sni = false;
        let mut listener = ServerConfig::builder_with_provider(own)
            .with_protocol_versions(&[&TLS13])
            .expect("the suite is one of TLS 1.3")
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
        listener.send_tls13_tickets = 0;
        Self { dialler: Arc::new(dialler), listener: Arc::new(listener) }
    }

    /// The state of a connection that this node dialled.
    pub(super) fn dial(&self) -> Connection {
        // A name is asked for, and neither sent nor checked.
        let name = ServerName::try_from("glinthawk").expect("a name");
        let dialled = ClientConnection::new(Arc::clone(&self.dialler), name);
        dialled.expect("the configuration is complete").into()
    }

    /// The state of a connection that this node accepted.
    pub(super) fn accept(&self) -> Connection {
        let accepted = ServerConnection::new(Arc::clone(&self.listener));
        accepted.expect("the configuration is complete").into()
    }
}

/// Takes this key and no other, from either end.
#[derive(Debug)]
struct OwnKeyOnly {
    public: SubjectPublicKeyInfoDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl OwnKeyOnly {
    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        if key.as_ref() == self.public.as_ref() {
            return Ok(());
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn check_signature(
        &self,
        message: &[u8],
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature_with_raw_key(message, &self.public, signature, &self.algorithms)
    }
}

/// No configuration here offers TLS 1.2.
fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(PeerIncompatible::Tls12NotOfferedOrEnabled.into())
}

impl ServerCertVerifier for OwnKeyOnly {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        _key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for OwnKeyOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _others: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        _key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
