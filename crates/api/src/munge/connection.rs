//! A connection to munged, with a time limit for all that is done by it.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::Munge;
use super::error::MungeError;
use super::protocol::{HEADER_LEN, parse_header};

/// How often to try to connect if munged refuses, as it does for a moment when it is restarted.
const CONNECT_ATTEMPTS: u32 = 4;
/// The pause after the first refused connect; the n-th is n times as long.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

impl Munge {
    /// Connects, patiently if the connection is refused.
    pub(super) fn connect(&self, deadline: Instant) -> Result<UnixStream, MungeError> {
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
pub(super) enum ReceiveError {
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
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) deadline: Instant,
}

impl Connection {
    /// Writes it all. A peer that hung up is an error and no signal, whatever this process does on `SIGPIPE`.
    pub(super) fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
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
    pub(super) fn receive(&mut self, wanted: u8) -> Result<Vec<u8>, ReceiveError> {
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
pub(super) fn is_dropped(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
    )
}
