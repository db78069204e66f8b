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

use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// How long one attempt may take, from the connect to the last byte of the response. No new attempt is begun
/// once this time has passed since the first, so that a call returns within about twice this time.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// How often a request is made, in all, if munged drops the connection. munged refuses a retry byte over 5.
pub const ATTEMPTS: u8 = 5;

/// The longest message body sent or accepted, in bytes. munged refuses longer requests, so a credential
/// longer than this could not be decoded anywhere. Base64 leaves room for about 750 KiB of payload.
pub const MAX_MESSAGE: usize = 1024 * 1024;

/// How often to try to connect if munged refuses, as it does for a moment when it is restarted.
const CONNECT_ATTEMPTS: u32 = 4;
/// The pause after the first refused connect; the n-th is n times as long.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);
/// The pause after the first dropped connection; the n-th is n times as long.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

const MAGIC: u32 = 0x0060_6D4B;
const VERSION: u8 = 4;
const HEADER_LEN: usize = 11;

const ENCODE_REQUEST: u8 = 2;
const ENCODE_RESPONSE: u8 = 3;
const DECODE_REQUEST: u8 = 4;
const DECODE_RESPONSE: u8 = 5;

/// For cipher, mac and zip: as munged is configured.
const DEFAULT: u8 = 1;
/// For a uid or gid: no restriction.
const ANYONE: u32 = u32::MAX;

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

/// The error codes that MUNGE documents (`munge_err_t` in `munge.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MungeCode {
    /// 1: something went wrong inside munged.
    Internal,
    /// 2: an invalid argument, such as an empty credential.
    BadArgument,
    /// 3: a message longer than munged allows.
    TooLong,
    /// 4: a buffer overflow.
    Overflow,
    /// 5: munged is out of memory.
    OutOfMemory,
    /// 6: trouble on the socket, or too many retries.
    Socket,
    /// 7: a time-out (MUNGE documents it as unused).
    Timeout,
    /// 8: not a credential: the format is wrong.
    BadCredential,
    /// 9: a credential of an unknown version.
    BadVersion,
    /// 10: an unknown or disabled cipher.
    BadCipher,
    /// 11: an unknown or disabled message authentication code.
    BadMac,
    /// 12: an unknown or disabled compression.
    BadZip,
    /// 13: an unknown security realm.
    BadRealm,
    /// 14: the seal is broken: the credential was changed, or made with another key.
    Invalid,
    /// 15: the credential is too old.
    Expired,
    /// 16: the credential comes from the future: the clocks of the two hosts differ.
    Rewound,
    /// 17: the credential was already decoded on this host.
    Replayed,
    /// 18: the credential is meant for another user.
    Unauthorized,
    /// A code this client does not know.
    Other(u8),
}

impl MungeCode {
    /// The code for the number munged sends. There is none for 0, which means success.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::Internal,
            2 => Self::BadArgument,
            3 => Self::TooLong,
            4 => Self::Overflow,
            5 => Self::OutOfMemory,
            6 => Self::Socket,
            7 => Self::Timeout,
            8 => Self::BadCredential,
            9 => Self::BadVersion,
            10 => Self::BadCipher,
            11 => Self::BadMac,
            12 => Self::BadZip,
            13 => Self::BadRealm,
            14 => Self::Invalid,
            15 => Self::Expired,
            16 => Self::Rewound,
            17 => Self::Replayed,
            18 => Self::Unauthorized,
            other => Self::Other(other),
        })
    }

    /// Whether the credential is at fault, rather than munged or this program: what a server answers with
    /// "not authenticated" (HTTP 401) and not with "try again later" (503).
    #[must_use]
    pub fn is_about_the_credential(self) -> bool {
        match self {
            Self::BadArgument
            | Self::BadCredential
            | Self::BadVersion
            | Self::BadCipher
            | Self::BadMac
            | Self::BadZip
            | Self::BadRealm
            | Self::Invalid
            | Self::Expired
            | Self::Rewound
            | Self::Replayed
            | Self::Unauthorized => true,
            Self::Internal
            | Self::TooLong
            | Self::Overflow
            | Self::OutOfMemory
            | Self::Socket
            | Self::Timeout
            | Self::Other(_) => false,
        }
    }
}

/// Why a credential could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum MungeError {
    /// There is no munged at the socket, or this user may not connect to it.
    #[error("can't reach munged at {}: {source}; is munged running?", .path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why the connect failed.
        source: io::Error,
    },
    /// munged took the connection but did not answer: it dropped the connection each time, or timed out.
    /// Dropping it is also what a munged does that speaks another version of the protocol.
    #[error(
        "munged at {} did not answer ({attempts} {}): {source}",
        .path.display(), if *.attempts == 1 { "attempt" } else { "attempts" }
    )]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// How often the request was made.
        attempts: u8,
        /// What became of the last one.
        source: io::Error,
    },
    /// What answered does not speak version 4 of MUNGE's protocol.
    #[error("munged broke its protocol: {0}")]
    Protocol(String),
    /// The message would be, or is, longer than munged allows ([`MAX_MESSAGE`]).
    #[error("a MUNGE message of {length} bytes is over the limit of {MAX_MESSAGE}")]
    TooLong {
        /// The length of its body.
        length: usize,
    },
    /// munged answered no.
    #[error("munged refused: {message}")]
    Refused {
        /// Which of the documented errors it is.
        code: MungeCode,
        /// munged's own words.
        message: String,
    },
}

impl MungeError {
    /// The code munged gave, if it was munged that refused.
    #[must_use]
    pub fn code(&self) -> Option<MungeCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }
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

    /// Connects, patiently if the connection is refused.
    fn connect(&self, deadline: Instant) -> Result<UnixStream, MungeError> {
        let mut attempt = 1;
        loop {
            match connect_once(&self.socket, deadline) {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused && attempt < CONNECT_ATTEMPTS =>
                {
                    thread::sleep(CONNECT_PAUSE * attempt);
                    attempt += 1;
                }
                Err(source) => {
                    return Err(MungeError::Unreachable { path: self.socket.clone(), source });
                }
            }
        }
    }
}

/// Connects with a time limit, which `UnixStream::connect` does not have: it would wait for ever on a munged
/// that is stopped and whose queue of connections is full.
fn connect_once(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    loop {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(time_left(deadline)?))?;
        match net::connect(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(plain_timeout(error.into())),
        }
    }
}

/// Why no response was received.
enum ReceiveError {
    /// The connection failed; it may be worth another.
    Io(io::Error),
    /// There was a response, and it is nonsense.
    Fatal(MungeError),
}

impl From<io::Error> for ReceiveError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// An open connection, to be finished with at a certain time.
struct Connection {
    stream: UnixStream,
    deadline: Instant,
}

impl Connection {
    /// Writes it all. A peer that hung up is an error and no signal, whatever this process does on `SIGPIPE`.
    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(time_left(self.deadline)?))?;
            match net::send(&self.stream, bytes, SendFlags::NOSIGNAL) {
                Ok(n) => bytes = &bytes[n..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(plain_timeout(error.into())),
            }
        }
        Ok(())
    }

    /// Reads until the buffer is full.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            self.stream.set_read_timeout(Some(time_left(self.deadline)?))?;
            match self.stream.read(&mut buffer[filled..]) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it hung up")),
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(plain_timeout(error)),
            }
        }
        Ok(())
    }

    /// Reads a message of the wanted type and returns its body.
    fn receive(&mut self, wanted: u8) -> Result<Vec<u8>, ReceiveError> {
        let mut header = [0; HEADER_LEN];
        self.fill(&mut header)?;
        let length = parse_header(&header, wanted).map_err(ReceiveError::Fatal)?;
        let mut body = vec![0; length];
        self.fill(&mut body)?;
        Ok(body)
    }
}

/// The time until the deadline, which is not zero (the kernel takes zero for "no limit").
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// On a socket with a time limit the kernel says "would block" when the time is over.
fn plain_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

/// Whether the other end closed the connection.
fn is_dropped(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
    )
}

/// A header and a body that was checked to be short enough.
fn message(kind: u8, retry: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + body.len());
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&[VERSION, kind, retry]);
    put_length(&mut out, body.len());
    out.extend_from_slice(body);
    out
}

/// The length of the body that follows this header.
fn parse_header(header: &[u8; HEADER_LEN], wanted: u8) -> Result<usize, MungeError> {
    let mut reader = Reader(header);
    let magic = reader.u32()?;
    if magic != MAGIC {
        return Err(violation(format!("a message starts with {magic:#010x} and not {MAGIC:#010x}")));
    }
    let version = reader.u8()?;
    if version != VERSION {
        return Err(violation(format!("it speaks version {version} and not {VERSION}")));
    }
    let kind = reader.u8()?;
    if kind != wanted {
        return Err(violation(format!("a message of type {kind} came where type {wanted} is due")));
    }
    reader.u8()?; // the retry byte means nothing in a response
    let length = reader.u32()? as usize;
    if length > MAX_MESSAGE { Err(MungeError::TooLong { length }) } else { Ok(length) }
}

fn encode_request(payload: &[u8], only_for: Option<u32>, ttl: Duration) -> Result<Vec<u8>, MungeError> {
    const FIXED: usize = 4 + 4 * 4; // cipher, mac, zip, no realm; ttl, uid, gid, length
    check_length(FIXED.saturating_add(payload.len()))?;
    let mut out = Vec::with_capacity(FIXED + payload.len());
    out.extend_from_slice(&[DEFAULT, DEFAULT, DEFAULT, 0]);
    out.extend_from_slice(&ttl_seconds(ttl).to_be_bytes());
    out.extend_from_slice(&only_for.unwrap_or(ANYONE).to_be_bytes());
    out.extend_from_slice(&ANYONE.to_be_bytes());
    put_length(&mut out, payload.len());
    out.extend_from_slice(payload);
    Ok(out)
}

fn decode_request(credential: &str) -> Result<Vec<u8>, MungeError> {
    let text = credential.trim_ascii().as_bytes();
    check_length(text.len().saturating_add(4 + 1))?;
    let mut out = Vec::with_capacity(4 + text.len() + 1);
    put_length(&mut out, text.len() + 1); // with the NUL
    out.extend_from_slice(text);
    out.push(0);
    Ok(out)
}

fn parse_encode_response(body: &[u8]) -> Result<String, MungeError> {
    let mut reader = Reader(body);
    let refusal = reader.refusal()?;
    let credential = reader.long_bytes()?;
    reader.end()?;
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    let text = credential
        .strip_suffix(&[0])
        .filter(|text| !text.is_empty() && text.iter().all(u8::is_ascii_graphic))
        .ok_or_else(|| violation("the credential is not a text ending in NUL"))?;
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn parse_decode_response(body: &[u8]) -> Result<Credential, MungeError> {
    let mut reader = Reader(body);
    let refusal = reader.refusal()?;
    reader.take(3)?; // cipher, mac, zip
    reader.short_bytes()?; // realm
    reader.u32()?; // ttl
    let address = parse_address(reader.short_bytes()?)?;
    let encoded_at = reader.u32()?;
    let decoded_at = reader.u32()?;
    let uid = reader.u32()?;
    let gid = reader.u32()?;
    let auth_uid = reader.u32()?;
    reader.u32()?; // auth gid
    let payload = reader.long_bytes()?;
    reader.end()?;
    // A refusal has all these fields too, and for an expired, rewound or replayed credential they are even
    // filled in. They are not handed on, so that nobody trusts them by accident.
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    Ok(Credential {
        uid,
        gid,
        only_for: Some(auth_uid).filter(|uid| *uid != ANYONE),
        address,
        encoded_at: encoded_at.into(),
        decoded_at: decoded_at.into(),
        payload: payload.to_vec(),
    })
}

fn parse_address(bytes: &[u8]) -> Result<Option<IpAddr>, MungeError> {
    let address = if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        IpAddr::V4(Ipv4Addr::from(v4))
    } else if let Ok(v6) = <[u8; 16]>::try_from(bytes) {
        IpAddr::V6(Ipv6Addr::from(v6))
    } else if bytes.is_empty() {
        return Ok(None);
    } else {
        return Err(violation(format!("an IP address of {} bytes", bytes.len())));
    };
    Ok(Some(address).filter(|address| !address.is_unspecified()))
}

/// Whole seconds, rounded up. munged reads 0 as its default and 0xFFFFFFFF as its maximum.
fn ttl_seconds(ttl: Duration) -> u32 {
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// Appends a length, which was checked to be within [`MAX_MESSAGE`].
fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&(length as u32).to_be_bytes());
}

fn check_length(length: usize) -> Result<(), MungeError> {
    if length > MAX_MESSAGE { Err(MungeError::TooLong { length }) } else { Ok(()) }
}

fn violation(what: impl Into<String>) -> MungeError {
    MungeError::Protocol(what.into())
}

/// Takes a message apart from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], MungeError> {
        let (head, tail) = self
            .0
            .split_at_checked(n)
            .ok_or_else(|| violation(format!("a field of {n} bytes, but {} are left", self.0.len())))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MungeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u8(&mut self) -> Result<u8, MungeError> {
        self.array().map(u8::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, MungeError> {
        self.array().map(u32::from_be_bytes)
    }

    /// A length of one byte, and so many bytes.
    fn short_bytes(&mut self) -> Result<&'a [u8], MungeError> {
        let n = self.u8()?;
        self.take(n.into())
    }

    /// A length of four bytes, and so many bytes.
    fn long_bytes(&mut self) -> Result<&'a [u8], MungeError> {
        let n = self.u32()?;
        self.take(n as usize)
    }

    /// The error number and message that a response begins with; `None` for success.
    fn refusal(&mut self) -> Result<Option<MungeError>, MungeError> {
        let number = self.u8()?;
        let message = self.short_bytes()?;
        let Some(code) = MungeCode::from_number(number) else { return Ok(None) };
        let message = String::from_utf8_lossy(message.strip_suffix(&[0]).unwrap_or(message));
        let message =
            if message.is_empty() { format!("error {number}") } else { message.escape_debug().to_string() };
        Ok(Some(MungeError::Refused { code, message }))
    }

    fn end(self) -> Result<(), MungeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(violation(format!("{} bytes after the end of a response", self.0.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    const NOBODY: u32 = 65534;

    // ---- framing, without munged ----

    /// What the `munge` program writes for `munge -s hello -u 1000 -t 77` (taken with strace).
    const ENCODE_WIRE: &[u8] = b"\x00\x60\x6d\x4b\x04\x02\x00\x00\x00\x00\x19\
        \x01\x01\x01\x00\x00\x00\x00\x4d\x00\x00\x03\xe8\xff\xff\xff\xff\x00\x00\x00\x05hello";

    /// What munged answers `unmunge` for a good credential with the payload `hello` (taken with strace).
    const DECODE_BODY: &[u8] = b"\x00\x00\x04\x05\x00\x00\x00\x00\x01\x2c\x04\x7f\x00\x00\x01\
        \x6b\x02\x36\x34\x6b\x02\x36\x35\x00\x00\x00\x07\x00\x00\x00\x08\xff\xff\xff\xff\xff\xff\xff\xff\
        \x00\x00\x00\x05hello";

    fn encode_body(error: u8, text: &[u8], credential: &[u8]) -> Vec<u8> {
        let mut body = vec![error, text.len() as u8];
        body.extend_from_slice(text);
        put_length(&mut body, credential.len());
        body.extend_from_slice(credential);
        body
    }

    #[track_caller]
    fn assert_code<T: std::fmt::Debug>(result: Result<T, MungeError>, code: MungeCode) {
        match result {
            Err(MungeError::Refused { code: got, message }) if got == code => {
                assert!(!message.is_empty() && !message.contains('\0'), "{message:?}");
            }
            other => panic!("wanted {code:?}, got {other:?}"),
        }
    }

    #[test]
    fn an_encode_request_is_what_the_munge_program_sends() {
        let body = encode_request(b"hello", Some(1000), Duration::from_secs(77)).unwrap();
        assert_eq!(message(ENCODE_REQUEST, 0, &body), ENCODE_WIRE);
    }

    #[test]
    fn a_decode_request_counts_its_nul_and_no_white_space() {
        assert_eq!(decode_request(" MUNGE:AwQ=:\n").unwrap(), b"\0\0\0\x0cMUNGE:AwQ=:\0");
        assert_eq!(decode_request("").unwrap(), b"\0\0\0\x01\0");
    }

    #[test]
    fn a_decode_response_is_understood() {
        let credential = parse_decode_response(DECODE_BODY).unwrap();
        let want = Credential {
            uid: 7,
            gid: 8,
            only_for: None,
            address: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            encoded_at: 0x6b02_3634,
            decoded_at: 0x6b02_3635,
            payload: b"hello".to_vec(),
        };
        assert_eq!(credential, want);
    }

    #[test]
    fn addresses_may_be_missing_or_of_either_family() {
        assert_eq!(parse_address(&[]).unwrap(), None);
        assert_eq!(parse_address(&[0; 4]).unwrap(), None);
        assert_eq!(parse_address(&[10, 0, 0, 1]).unwrap(), Some("10.0.0.1".parse().unwrap()));
        let v6: Ipv6Addr = "2001:db8::1".parse().unwrap();
        assert_eq!(parse_address(&v6.octets()).unwrap(), Some(v6.into()));
        assert!(matches!(parse_address(&[1; 5]), Err(MungeError::Protocol(_))));
    }

    #[test]
    fn a_response_cut_short_or_too_long_is_a_violation() {
        for n in 0..DECODE_BODY.len() {
            let result = parse_decode_response(&DECODE_BODY[..n]);
            assert!(matches!(result, Err(MungeError::Protocol(_))), "{n}: {result:?}");
        }
        let longer = [DECODE_BODY, b"\0"].concat();
        assert!(matches!(parse_decode_response(&longer), Err(MungeError::Protocol(_))));

        let body = encode_body(0, b"", b"MUNGE:x:\0");
        assert_eq!(parse_encode_response(&body).unwrap(), "MUNGE:x:");
        for n in 0..body.len() {
            assert!(matches!(parse_encode_response(&body[..n]), Err(MungeError::Protocol(_))), "{n}");
        }
        for bad in [&b""[..], b"\0", b"MUNGE:x:", b"MUNGE\0:x:\0", b"MUNGE:\xff:\0", b"two words\0"] {
            let result = parse_encode_response(&encode_body(0, b"", bad));
            assert!(matches!(result, Err(MungeError::Protocol(_))), "{bad:?}: {result:?}");
        }
    }

    #[test]
    fn lengths_that_lie_are_a_violation() {
        // A message and a credential of 4 GiB, in a body of a few bytes.
        assert!(matches!(parse_encode_response(b"\0\0\xff\xff\xff\xff"), Err(MungeError::Protocol(_))));
        assert!(matches!(parse_encode_response(b"\0\xff\0\0\0\0"), Err(MungeError::Protocol(_))));
    }

    #[test]
    fn headers_are_checked() {
        let good = *b"\x00\x60\x6d\x4b\x04\x03\x00\x00\x00\x00\x19";
        assert_eq!(parse_header(&good, 3).unwrap(), 25);
        for (at, value) in [(0, 1), (3, 0), (4, 3), (4, 5), (5, 5), (5, 6)] {
            let mut bad = good;
            bad[at] = value;
            assert!(matches!(parse_header(&bad, 3), Err(MungeError::Protocol(_))), "{at} {value}");
        }
        let mut long = good;
        long[7..].copy_from_slice(&(MAX_MESSAGE as u32).to_be_bytes());
        assert_eq!(parse_header(&long, 3).unwrap(), MAX_MESSAGE);
        long[7..].copy_from_slice(&(MAX_MESSAGE as u32 + 1).to_be_bytes());
        assert!(matches!(parse_header(&long, 3), Err(MungeError::TooLong { length: 1_048_577 })));
    }

    #[test]
    fn every_error_number_has_a_code() {
        assert_eq!(MungeCode::from_number(0), None);
        let mut seen = std::collections::HashSet::new();
        for n in 1..=u8::MAX {
            let code = MungeCode::from_number(n).unwrap();
            assert!(seen.insert(code), "{code:?} twice");
            assert_eq!(code == MungeCode::Other(n), n > 18);
        }
        let error = parse_encode_response(&encode_body(16, b"Rewound credential\0", b"")).unwrap_err();
        assert_eq!(error.code(), Some(MungeCode::Rewound));
        assert_eq!(error.to_string(), "munged refused: Rewound credential");
        assert!(MungeCode::Rewound.is_about_the_credential());
        assert!(!MungeCode::Socket.is_about_the_credential());
        assert_code(parse_encode_response(&encode_body(200, b"", b"")), MungeCode::Other(200));
        // A message can't play tricks on a terminal.
        let error = parse_encode_response(&encode_body(1, b"a\x1b[2J\xff\0", b"")).unwrap_err();
        assert_eq!(error.to_string(), "munged refused: a\\u{1b}[2J\u{fffd}");
    }

    #[test]
    fn the_time_to_live_is_rounded_up_and_saturates() {
        assert_eq!(ttl_seconds(Duration::ZERO), 0);
        assert_eq!(ttl_seconds(Duration::from_nanos(1)), 1);
        assert_eq!(ttl_seconds(Duration::from_millis(1001)), 2);
        assert_eq!(ttl_seconds(Duration::MAX), u32::MAX);
    }

    #[test]
    fn what_is_too_long_or_restricted_to_nobody_is_not_sent() {
        let munge = Munge::new("/nonexistent");
        let large = "x".repeat(MAX_MESSAGE);
        assert!(matches!(
            munge.encode(large.as_bytes(), None, Duration::ZERO),
            Err(MungeError::TooLong { .. })
        ));
        assert!(matches!(munge.decode(&large), Err(MungeError::TooLong { .. })));
        assert_code(munge.encode(b"", Some(u32::MAX), Duration::ZERO), MungeCode::BadArgument);
    }

    // ---- the exchange, with a stand-in for munged ----

    /// A directory that goes away with the guard.
    struct TempDir(PathBuf);

    impl TempDir {
        fn new() -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let n = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("munge-test-{}-{n}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Reads a request; its retry byte and body.
    fn read_request(stream: &mut UnixStream) -> (u8, Vec<u8>) {
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).unwrap();
        let mut body = vec![0; u32::from_be_bytes(header[7..].try_into().unwrap()) as usize];
        stream.read_exact(&mut body).unwrap();
        (header[6], body)
    }

    /// A client with a short time limit, of a listener that handles its connections in turn, one by each
    /// function; then the listener goes away. Joining the thread gives the functions' results.
    fn stand_in<T: Send + 'static>(
        connections: Vec<fn(UnixStream) -> T>,
    ) -> (Munge, thread::JoinHandle<Vec<T>>, TempDir) {
        let dir = TempDir::new();
        let path = dir.0.join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let handle = thread::spawn(move || {
            connections.into_iter().map(|handle| handle(listener.accept().unwrap().0)).collect()
        });
        (Munge { socket: path, timeout: Duration::from_secs(1) }, handle, dir)
    }

    fn answer(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        let body = encode_body(0, b"", b"MUNGE:x:\0");
        stream.write_all(&message(ENCODE_RESPONSE, 0, &body)).unwrap();
        retry
    }

    fn drop_after_reading(mut stream: UnixStream) -> u8 {
        read_request(&mut stream).0
    }

    fn drop_within_the_response(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        stream.write_all(&message(ENCODE_RESPONSE, 0, b"\0\0")[..9]).unwrap();
        retry
    }

    fn drop_at_once(_: UnixStream) -> u8 {
        99
    }

    #[test]
    fn a_dropped_request_is_repeated_and_says_so() {
        let (munge, thread, _dir) = stand_in(vec![drop_after_reading, drop_within_the_response, answer]);
        assert_eq!(munge.encode(b"", None, Duration::ZERO).unwrap(), "MUNGE:x:");
        assert_eq!(thread.join().unwrap(), [0, 1, 2]);
    }

    #[test]
    fn a_request_that_was_never_read_is_no_retry() {
        // More than the socket buffers, so that the client can't have written it all.
        let large = vec![7; MAX_MESSAGE - 100];
        let (munge, thread, _dir) = stand_in(vec![drop_at_once, drop_at_once, answer]);
        assert_eq!(munge.encode(&large, None, Duration::ZERO).unwrap(), "MUNGE:x:");
        assert_eq!(thread.join().unwrap(), [99, 99, 0]);
    }

    #[test]
    fn retries_are_bounded() {
        let (munge, thread, _dir) = stand_in(vec![drop_after_reading; 5]);
        let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
        assert!(matches!(error, MungeError::NoAnswer { attempts: ATTEMPTS, .. }), "{error:?}");
        assert!(error.to_string().ends_with("did not answer (5 attempts): it hung up"), "{error}");
        assert_eq!(thread.join().unwrap(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_munged_that_dies_in_between_is_unreachable() {
        let (munge, thread, _dir) = stand_in(vec![drop_after_reading]);
        let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
        assert!(matches!(error, MungeError::Unreachable { .. } | MungeError::NoAnswer { .. }), "{error:?}");
        thread.join().unwrap();
    }

    fn trickle(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        for byte in message(ENCODE_RESPONSE, 0, &[0; 100]) {
            thread::sleep(Duration::from_millis(50));
            if net::send(&stream, &[byte], SendFlags::NOSIGNAL).is_err() {
                break;
            }
        }
        retry
    }

    fn say_nothing(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        let _ = stream.read(&mut [0]); // until the client hangs up
        retry
    }

    #[test]
    fn silence_and_trickles_time_out_and_are_not_repeated() {
        for handle in [trickle as fn(UnixStream) -> u8, say_nothing] {
            let (munge, thread, _dir) = stand_in(vec![handle]);
            let begin = Instant::now();
            let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
            let MungeError::NoAnswer { attempts: 1, source, .. } = &error else { panic!("{error:?}") };
            assert_eq!(source.kind(), io::ErrorKind::TimedOut, "{error}");
            assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_stopped_munged_with_a_full_queue_times_out() {
        let dir = TempDir::new();
        let path = dir.0.join("s");
        let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        net::listen(&listener, 0).unwrap();
        let _fills_the_queue = UnixStream::connect(&path).unwrap();
        let munge = Munge { socket: path, timeout: Duration::from_millis(300) };
        let begin = Instant::now();
        let error = munge.decode("MUNGE:x:").unwrap_err();
        let MungeError::Unreachable { source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    }

    fn answer_nonsense(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        retry
    }

    fn answer_at_length(mut stream: UnixStream) -> u8 {
        let (retry, _) = read_request(&mut stream);
        stream.write_all(b"\x00\x60\x6d\x4b\x04\x03\x00\xff\xff\xff\xff").unwrap();
        retry
    }

    #[test]
    fn nonsense_is_not_repeated() {
        let (munge, thread, _dir) = stand_in(vec![answer_nonsense]);
        let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
        assert!(matches!(error, MungeError::Protocol(_)), "{error:?}");
        assert_eq!(thread.join().unwrap(), [0]);

        let (munge, thread, _dir) = stand_in(vec![answer_at_length]);
        let error = munge.encode(b"", None, Duration::ZERO).unwrap_err();
        assert!(matches!(error, MungeError::TooLong { length: 0xffff_ffff }), "{error:?}");
        thread.join().unwrap();
    }

    #[test]
    fn no_munged_is_unreachable_and_the_error_asks_whether_it_runs() {
        let dir = TempDir::new();
        let error = Munge::new(dir.0.join("none")).decode("MUNGE:x:").unwrap_err();
        assert!(matches!(error, MungeError::Unreachable { .. }), "{error:?}");
        assert!(error.to_string().ends_with("is munged running?"), "{error}");
        assert!(error.to_string().contains("/none: "), "{error}");

        let file = dir.0.join("file");
        std::fs::write(&file, "").unwrap();
        let long = dir.0.join("x".repeat(200));
        for path in [dir.0.clone(), file, long, PathBuf::new()] {
            let error = Munge::new(&path).decode("MUNGE:x:").unwrap_err();
            assert!(matches!(error, MungeError::Unreachable { .. }), "{path:?}: {error:?}");
        }
    }

    // ---- with a real munged ----

    /// A munged with its own key and socket, killed with the guard.
    struct Munged {
        child: Child,
        dir: TempDir,
    }

    impl Munged {
        /// Starts one, or says why not and returns `None`: it takes root, and the package.
        fn start() -> Option<Self> {
            let skip = |why: &str| {
                eprintln!("skipped: {why}");
                None
            };
            if !rustix::process::geteuid().is_root() {
                return skip("not root");
            }
            for program in ["munged", "munge", "unmunge", "setpriv"] {
                let run = Command::new(program).arg("--version").stdout(Stdio::null()).status();
                if run.is_err() {
                    return skip(&format!("no {program} here"));
                }
            }
            let accounts = std::fs::read_to_string("/etc/passwd").unwrap();
            let Some(account) = accounts.lines().find(|line| line.starts_with("munge:")) else {
                return skip("no account munge");
            };
            let ids: Vec<u32> = account.split(':').skip(2).take(2).map(|id| id.parse().unwrap()).collect();

            // munged is strict about its directory: it and the key must be its own.
            let dir = TempDir::new();
            let key = dir.0.join("key");
            let mut random = [0; 1024];
            std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
            std::fs::write(&key, random).unwrap();
            let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&key, mode(0o400)).unwrap();
            std::fs::set_permissions(&dir.0, mode(0o755)).unwrap();
            for path in [&key, &dir.0] {
                std::os::unix::fs::chown(path, Some(ids[0]), Some(ids[1])).unwrap();
            }
            let mut munged = Self { child: Self::spawn(&dir.0), dir };
            munged.wait_until_it_listens();
            Some(munged)
        }

        fn spawn(dir: &Path) -> Child {
            let option = |name: &str, file: &str| format!("--{name}={}", dir.join(file).display());
            Command::new("setpriv")
                .args(["--reuid=munge", "--regid=munge", "--clear-groups"])
                .args(["setpriv", "--pdeathsig=KILL", "munged"]) // again, as a change of user clears it
                .args(["--foreground", "--num-threads=2"])
                .args([option("key-file", "key"), option("socket", "socket")])
                .args([option("pid-file", "pid"), option("log-file", "log"), option("seed-file", "seed")])
                .stdout(Stdio::null())
                .stderr(std::fs::File::create(dir.join("stderr")).unwrap())
                .spawn()
                .unwrap()
        }

        fn wait_until_it_listens(&mut self) {
            let begin = Instant::now();
            while UnixStream::connect(self.socket()).is_err() {
                let ended = self.child.try_wait().unwrap();
                if ended.is_some() || begin.elapsed() > Duration::from_secs(20) {
                    let said = std::fs::read_to_string(self.dir.0.join("stderr")).unwrap_or_default();
                    panic!("munged did not start ({ended:?}): {said}");
                }
                thread::sleep(Duration::from_millis(10));
            }
        }

        fn socket(&self) -> PathBuf {
            self.dir.0.join("socket")
        }

        fn client(&self) -> Munge {
            Munge::new(self.socket())
        }

        fn kill(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }

        /// Runs `munge` or `unmunge` as a user; its exit code and output.
        fn run(&self, program: &str, uid: u32, args: &[&str], input: &[u8]) -> (i32, String) {
            let mut child = Command::new(program)
                .arg("--socket")
                .arg(self.socket())
                .args(args)
                .uid(uid)
                .gid(uid)
                .current_dir("/")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(input).unwrap();
            let output = child.wait_with_output().unwrap();
            (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
        }
    }

    impl Drop for Munged {
        fn drop(&mut self) {
            self.kill();
        }
    }

    fn now() -> u64 {
        std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()
    }

    #[test]
    fn real_munged_round_trip_and_replay() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        let binary: Vec<u8> = (0..=255).collect();
        for payload in [&b""[..], b"hello", &binary, &vec![0; 100_000]] {
            // time(2), which munged asks, is up to a tick behind.
            let before = now() - 1;
            let text = munge.encode(payload, None, Duration::ZERO).unwrap();
            assert!(text.starts_with("MUNGE:") && text.ends_with(':'), "{text}");
            let credential = munge.decode(&text).unwrap();
            assert_eq!(credential.payload, payload);
            assert_eq!((credential.uid, credential.gid), (0, rustix::process::getegid().as_raw()));
            assert_eq!(credential.only_for, None);
            assert!(credential.address.is_some());
            for time in [credential.encoded_at, credential.decoded_at] {
                assert!((before..=now()).contains(&time), "{time}");
            }
            // Neither the same text nor one that differs in what munged ignores is good again.
            assert_code(munge.decode(&text), MungeCode::Replayed);
            assert_code(munge.decode(&format!(" {text}\n")), MungeCode::Replayed);
        }
    }

    #[test]
    fn real_munged_interoperates_with_its_programs() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();

        // Theirs, as another user, decoded by us.
        let (code, text) = munged.run("munge", NOBODY, &["--string", "from nobody"], b"");
        assert_eq!(code, 0);
        let credential = munge.decode(&text).unwrap();
        assert_eq!((credential.uid, credential.gid), (NOBODY, NOBODY));
        assert_eq!(credential.payload, b"from nobody");

        // Ours, decoded by theirs, with the time to live that was asked for; then a replay by us.
        for (ttl, want) in [(Duration::ZERO, 300), (Duration::from_millis(76_001), 77), (Duration::MAX, 3600)]
        {
            let text = munge.encode(b"from root", None, ttl).unwrap();
            let (code, output) = munged.run("unmunge", NOBODY, &[], text.as_bytes());
            assert_eq!(code, 0, "{output}");
            let has = |key: &str, value: &str| {
                output.lines().any(|line| line.starts_with(key) && line.trim_end().ends_with(value))
            };
            assert!(has("TTL:", &format!(" {want}")) && has("UID:", "root (0)"), "{output}");
            assert!(output.ends_with("\n\nfrom root"), "{output}");
            assert_code(munge.decode(&text), MungeCode::Replayed);
        }
    }

    #[test]
    fn real_munged_lets_only_the_named_user_decode() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        let text = munge.encode(b"for nobody", Some(NOBODY), Duration::ZERO).unwrap();
        // Not even root; and the attempt does not use it up.
        assert_code(munge.decode(&text), MungeCode::Unauthorized);
        let (code, output) = munged.run("unmunge", NOBODY, &[], text.as_bytes());
        assert_eq!(code, 0, "{output}");

        let text = munge.encode(b"for me", Some(0), Duration::ZERO).unwrap();
        assert_eq!(munged.run("unmunge", NOBODY, &[], text.as_bytes()).0, 18);
        assert_eq!(munge.decode(&text).unwrap().only_for, Some(0));

        // As a server does it: a user's credential that only the server can decode.
        let (_, text) = munged.run("munge", NOBODY, &["--restrict-uid", "0", "--string", "hi"], b"");
        let credential = munge.decode(&text).unwrap();
        assert_eq!((credential.uid, credential.only_for), (NOBODY, Some(0)));
    }

    #[test]
    fn real_munged_refuses_what_expired() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        let text = munge.encode(b"", None, Duration::from_secs(1)).unwrap();
        thread::sleep(Duration::from_millis(2200));
        let error = munge.decode(&text).unwrap_err();
        assert_eq!(error.code(), Some(MungeCode::Expired), "{error:?}");
        assert_eq!(error.to_string(), "munged refused: Expired credential");
    }

    #[test]
    fn real_munged_refuses_garbage() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        assert_code(munge.decode(""), MungeCode::BadArgument);
        assert_code(munge.decode("  \n"), MungeCode::BadArgument);
        for garbage in
            ["garbage", "MUNGE:", "MUNGE::", "MUNGE:!!!!:", "MUNGE:\0:", "\0", "MUNGE:ä:", "Munge:AwQF:"]
        {
            let error = munge.decode(garbage).unwrap_err();
            assert!(error.code().is_some_and(MungeCode::is_about_the_credential), "{garbage:?}: {error:?}");
        }
        let text = munge.encode(b"payload", None, Duration::ZERO).unwrap();
        // Cut anywhere, or changed anywhere, it is refused for a fault of its own.
        for n in (0..text.len()).step_by(7) {
            let cut = munge.decode(&text[..n]).unwrap_err();
            assert!(cut.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {cut:?}");
            let closed = munge.decode(&format!("{}:", &text[..n])).unwrap_err();
            assert!(closed.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {closed:?}");
            let mut changed = text.clone().into_bytes();
            changed[n] = if changed[n] == b'A' { b'B' } else { b'A' };
            let changed = munge.decode(&String::from_utf8(changed).unwrap()).unwrap_err();
            assert!(changed.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {changed:?}");
        }
        // That did not use it up.
        assert_eq!(munge.decode(&text).unwrap().payload, b"payload");

        // Made with another key.
        let other = Munged::start().unwrap();
        assert_code(
            munge.decode(&other.client().encode(b"", None, Duration::ZERO).unwrap()),
            MungeCode::Invalid,
        );
    }

    #[test]
    fn real_munged_takes_payloads_up_to_the_limit() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        let payload = vec![1; 750 * 1024];
        let text = munge.encode(&payload, None, Duration::ZERO).unwrap();
        assert_eq!(munge.decode(&text).unwrap().payload, payload);
        // A credential that could not be decoded is not handed out.
        let error = munge.encode(&vec![1; 800 * 1024], None, Duration::ZERO).unwrap_err();
        assert!(matches!(error, MungeError::TooLong { .. }), "{error:?}");
    }

    #[test]
    fn real_munged_lets_a_retry_pass_but_no_replay() {
        let Some(munged) = Munged::start() else { return };
        // Between the client and munged: the first answer is lost, after munged has used the credential up.
        let proxy = munged.dir.0.join("proxy");
        let listener = UnixListener::bind(&proxy).unwrap();
        let real = munged.socket();
        let thread = thread::spawn(move || {
            let mut retries = vec![];
            for connection in 0..2 {
                let mut client = listener.accept().unwrap().0;
                let (retry, body) = read_request(&mut client);
                retries.push(retry);
                let mut server = UnixStream::connect(&real).unwrap();
                server.write_all(&message(DECODE_REQUEST, retry, &body)).unwrap();
                let mut answer = vec![];
                server.read_to_end(&mut answer).unwrap();
                if connection > 0 {
                    client.write_all(&answer).unwrap();
                }
            }
            retries
        });
        let munge = munged.client();
        let text = munge.encode(b"once", None, Duration::ZERO).unwrap();
        assert_eq!(Munge::new(proxy).decode(&text).unwrap().payload, b"once");
        assert_eq!(thread.join().unwrap(), [0, 1]);
        assert_code(munge.decode(&text), MungeCode::Replayed);
    }

    #[test]
    fn real_munged_killed_and_started_again() {
        let Some(mut munged) = Munged::start() else { return };
        let munge = munged.client();
        let text = munge.encode(b"survivor", None, Duration::ZERO).unwrap();
        munged.kill();
        assert!(munged.socket().exists(), "a stale socket is what this test is about");
        let begin = Instant::now();
        let error = munge.decode(&text).unwrap_err();
        assert!(matches!(error, MungeError::Unreachable { .. }), "{error:?}");
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());

        munged.child = Munged::spawn(&munged.dir.0);
        munged.wait_until_it_listens();
        assert_eq!(munge.decode(&text).unwrap().payload, b"survivor");
    }

    #[test]
    fn real_munged_serves_many_threads() {
        let Some(munged) = Munged::start() else { return };
        let munge = munged.client();
        thread::scope(|scope| {
            for n in 0..16_u8 {
                let munge = &munge;
                scope.spawn(move || {
                    for m in 0..20 {
                        let text = munge.encode(&[n, m], Some(0), Duration::ZERO).unwrap();
                        assert_eq!(munge.decode(&text).unwrap().payload, [n, m]);
                    }
                });
            }
        });
    }
}
