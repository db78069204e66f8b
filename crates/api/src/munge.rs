//! A client for `munged`, spoken directly over its Unix socket.
//!
//! # What MUNGE is for
//!
//! MUNGE answers one question between the hosts of a cluster: *which user sent this?* Every host runs the
//! daemon `munged`, and all of them share one secret key. A program asks its own `munged` to *encode* a
//! credential; the daemon asks the kernel which user is at the other end of the socket (`SO_PEERCRED`), so
//! the program cannot claim to be somebody else, and returns a short text sealed with the key. The text
//! travels to another host by any means, and there a program asks *its* `munged` to *decode* it: it gets
//! back the uid, the gid and the payload, or a reason why the credential is not to be trusted.
//!
//! A credential is good for one decode on each host (a second one is [`MungeCode::Replayed`]), for a limited
//! time ([`MungeCode::Expired`]), and, if the sender asked for it, only by one user
//! ([`MungeCode::Unauthorized`], even for root). Whoever *holds* a credential may present it, though: a
//! service that receives an unrestricted one can pass it on to another service instead of decoding it. A
//! server that minds looks at [`Credential::only_for`], or has the payload say what is being authorised.
//!
//! # Why not libmunge
//!
//! `libmunge` is a shared library, and Ondeck is one statically linked binary. The library does little: it
//! writes one message to the socket and reads one back. This module does the same.
//!
//! # The protocol
//!
//! Version 4, of MUNGE 0.5; all integers are big endian. A connection carries one request and one response,
//! each an 11 byte header and a body:
//!
//! | header field | size | value |
//! | --- | --- | --- |
//! | magic | 4 | `0x00606D4B` |
//! | version | 1 | 4 |
//! | type | 1 | 2 encode request, 3 its response, 4 decode request, 5 its response |
//! | retry | 1 | 0, or how many times this request was already made |
//! | length | 4 | of the body |
//!
//! | body | fields |
//! | --- | --- |
//! | encode request | cipher 1, mac 1, zip 1, realm (1 + n), ttl 4, auth uid 4, auth gid 4, payload (4 + n) |
//! | encode response | error 1, message (1 + n), credential (4 + n) |
//! | decode request | credential (4 + n) |
//! | decode response | error 1, message (1 + n), cipher 1, mac 1, zip 1, realm (1 + n), ttl 4, address (1 + n), encoded 4, decoded 4, uid 4, gid 4, auth uid 4, auth gid 4, payload (4 + n) |
//!
//! `(k + n)` is a length of k bytes and then that many bytes. Messages and credentials end in a NUL, which
//! the length counts; payloads do not. Cipher, mac and zip 1, and ttl 0, mean "as munged is configured";
//! `0xFFFFFFFF` as a uid or gid means "anyone".
//!
//! # Retries, and why the retry byte matters
//!
//! `munged` drops connections when it is restarted. A dropped request is made again, up to
//! [`ATTEMPTS`] times in all. That is delicate for a decode: the daemon may have recorded the credential as
//! used before the answer was lost, and would call the second request a replay. So a request that may have
//! been processed before says so in its retry byte, and munged then lets an already used credential pass.
//! The byte is thus a waiver of the replay check, and this client sends it sparingly: only if an earlier
//! attempt of the *same* call wrote the *whole* request and got no answer. A timed out request is not
//! repeated, and neither is one that was answered with nonsense.

mod connection;
mod error;
mod protocol;
#[cfg(test)]
pub(crate) mod tests;

pub use error::{MungeCode, MungeError};

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use connection::{Connection, ReceiveError, is_dropped};
use protocol::{
    ANYONE, DECODE_REQUEST, DECODE_RESPONSE, ENCODE_REQUEST, ENCODE_RESPONSE, decode_request, encode_request,
    message, parse_decode_response, parse_encode_response,
};

/// How long one attempt may take, from the connect to the last byte of the response. No new attempt is begun
/// once this time has passed since the first, so that a call returns within about twice this time.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// How often a request is made, in all, if munged drops the connection. munged refuses a retry byte over 5.
pub const ATTEMPTS: u8 = 5;

/// The longest message body sent or accepted, in bytes. munged refuses longer requests, so a credential
/// longer than this could not be decoded anywhere. Base64 leaves room for about 750 KiB of payload.
pub const MAX_MESSAGE: usize = 1024 * 1024;

/// The pause after the first dropped connection; the n-th is n times as long.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A client of the `munged` that listens at one socket.
///
/// It holds no connection: each call opens its own, as the protocol wants. A `Munge` can be shared between
/// threads. Calls block, for at most about twice [`TIMEOUT`].
///
/// ```ignore
/// let munge = Munge::new(Munge::default_socket());
/// let credential = munge.encode(b"stage job 17", None, Duration::ZERO)?;
/// // ... on another host, which has the same key:
/// let sender = munge.decode(&credential)?;
/// println!("uid {} says {:?}", sender.uid, sender.payload);
/// ```
#[derive(Debug, Clone)]
pub struct Munge {
    socket: PathBuf,
    timeout: Duration,
}

/// What munged vouches for, after a credential was decoded and found good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    /// The user who had the credential encoded.
    pub uid: u32,
    /// The group of the process that had the credential encoded.
    pub gid: u32,
    /// The only user who may decode this credential, if the sender named one. As the decode went well, that
    /// is the user of this process.
    pub only_for: Option<u32>,
    /// The address of the host it was encoded on, as its munged knew it: for the log, not for access control.
    /// A host whose name resolves to 127.0.0.1 says that. `None` if it knew none.
    pub address: Option<IpAddr>,
    /// When it was encoded, by the clock of that host, in seconds since 1970.
    pub encoded_at: u64,
    /// When it was decoded, by the clock of this host, in seconds since 1970.
    pub decoded_at: u64,
    /// What the sender put in.
    pub payload: Vec<u8>,
}

impl Munge {
    /// A client for the munged at `socket`. Nothing is opened yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: TIMEOUT }
    }

    /// Where munged listens unless it is told otherwise.
    #[must_use]
    pub fn default_socket() -> &'static Path {
        Path::new("/run/munge/munge.socket.2")
    }

    /// The socket this client connects to.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Has munged seal `payload`, together with the uid and gid of this process, into a credential.
    ///
    /// With `only_for`, only that user can decode it (not even root). `ttl` is how long it is good for, in
    /// whole seconds, rounded up; zero stands for munged's default (300 s), and munged cuts it down to its
    /// maximum (3600 s). The credential is printable ASCII without spaces: `MUNGE:...:`.
    ///
    /// # Errors
    ///
    /// [`MungeError::Unreachable`] if no munged listens at the socket, [`MungeError::NoAnswer`] if it does
    /// not answer, [`MungeError::Protocol`] if it answers nonsense, [`MungeError::TooLong`] if the payload is
    /// too large, and [`MungeError::Refused`] if munged declines, or for `only_for` 4294967295, which is no
    /// user's uid: munged would take it to mean "anyone".
    pub fn encode(&self, payload: &[u8], only_for: Option<u32>, ttl: Duration) -> Result<String, MungeError> {
        if only_for == Some(ANYONE) {
            return Err(MungeError::Refused {
                code: MungeCode::BadArgument,
                message: format!("no user has the uid {ANYONE}"),
            });
        }
        let body = encode_request(payload, only_for, ttl)?;
        parse_encode_response(&self.exchange(ENCODE_REQUEST, &body, ENCODE_RESPONSE)?)
    }

    /// Has munged check `credential` and returns what it vouches for. White space around it is ignored.
    ///
    /// This uses the credential up: a second decode on this host is [`MungeCode::Replayed`].
    ///
    /// # Errors
    ///
    /// [`MungeError::Refused`] if the credential is not to be trusted, with the reason as a [`MungeCode`];
    /// otherwise as for [`encode`](Self::encode).
    pub fn decode(&self, credential: &str) -> Result<Credential, MungeError> {
        let body = decode_request(credential)?;
        parse_decode_response(&self.exchange(DECODE_REQUEST, &body, DECODE_RESPONSE)?)
    }

    /// Makes a request, again if the connection is dropped, and returns the body of the response.
    fn exchange(&self, request: u8, body: &[u8], response: u8) -> Result<Vec<u8>, MungeError> {
        let begin = Instant::now();
        // How many attempts munged may have processed: what the retry byte tells it.
        let mut delivered = 0;
        let mut attempts = 1;
        loop {
            let deadline = Instant::now() + self.timeout;
            let mut connection = Connection { stream: self.connect(deadline)?, deadline };
            let failure = match connection.send(&message(request, delivered, body)) {
                Err(error) => error,
                Ok(()) => {
                    delivered += 1;
                    match connection.receive(response) {
                        Ok(body) => return Ok(body),
                        Err(ReceiveError::Fatal(error)) => return Err(error),
                        Err(ReceiveError::Io(error)) => error,
                    }
                }
            };
            if attempts >= ATTEMPTS || !is_dropped(&failure) || begin.elapsed() >= self.timeout {
                return Err(MungeError::NoAnswer { path: self.socket.clone(), attempts, source: failure });
            }
            thread::sleep(RETRY_PAUSE * u32::from(attempts));
            attempts += 1;
        }
    }
}
