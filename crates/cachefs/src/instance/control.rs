//! What the server of a cache can be asked, and asking it.
//!
//! One order a connection, as a line of JSON; the answers are lines, too, the last of which ends it. Root may ask, and the
//! user whose cache it is.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use super::record::path;
use crate::settings::Settings;
use crate::status::Status;

/// No order is longer: it has a path.
const LONGEST_ORDER: u64 = 1 << 20;

/// No answer is longer: a status names all that others have changed, too.
const LONGEST_ANSWER: u64 = 1 << 28;

/// What whoever may not ask is answered.
pub const ANOTHER_USERS: &str = "this cache is another user's";

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Answered by [`Answer::Report`].
    Status,
    /// Everything that was changed before goes to the backing directory.
    Flush,
    /// Reads a file, or all below a directory; the path is relative to the mount point.
    Preload {
        /// The path, empty for all.
        #[serde(with = "path")]
        path: PathBuf,
    },
    /// Gives clean data of a file, or of all below a directory, up.
    Evict {
        /// The path, empty for all.
        #[serde(with = "path")]
        path: PathBuf,
    },
    /// Flushes, takes the mount away, and ends the server.
    Unmount {
        /// Do not flush, and do not wait for those who use it: what the backing directory lacks is lost.
        lose: bool,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    /// What there is to see.
    Report(Box<Report>),
    /// It goes on.
    Progress {
        /// As it is now.
        status: Box<Status>,
    },
    /// It is done.
    Done,
    /// What was not written back was given up by somebody else's order meanwhile.
    GivenUp,
    /// It is not.
    Failed {
        /// Why, and what to do.
        message: String,
        /// Whether the cache is all that some data has.
        unwritten: bool,
    },
}

/// A cache, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Where it is mounted.
    #[serde(with = "path")]
    pub mount_point: PathBuf,
    /// The directory behind it.
    #[serde(with = "path")]
    pub backing: PathBuf,
    /// Whose it is: a name, or `root`.
    pub user: String,
    /// Whether all users may use it.
    pub others: bool,
    /// The run that alone sees it, if it is one's.
    #[serde(default)]
    pub run: Option<String>,
    /// The process that serves it.
    pub server: u32,
    /// Whether it is mounted; if not, only what the backing directory lacks is left of it.
    pub mounted: bool,
    /// How it works. `passthrough` says whether the kernel reads resident files by itself.
    pub settings: Settings,
    /// Figures.
    pub status: Status,
}

/// After so long without a word from a server, whoever waits for it is told.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a server may take to say how it is.
const STATUS: Duration = Duration::from_secs(5);

/// What comes before the last answer.
pub enum News<'a> {
    /// It goes on.
    Progress(&'a Status),
    /// Nothing was heard of the server for a while: of this process, if it is known.
    Silence(Option<u32>),
}

/// Asks a server. `progress` gets how it goes, and gives up by returning false; the server stops then, too, where it can.
///
/// # Errors
/// The kernel's: `NotFound` or `ConnectionRefused` if there is no server, `UnexpectedEof` if it died meanwhile,
/// `Interrupted` if `progress` gave up. Who may not ask is told so by an answer.
pub fn ask(socket: &Path, order: &Order, progress: &mut dyn FnMut(&Status) -> bool) -> io::Result<Answer> {
    converse(socket, order, SILENCE, &mut |news| match news {
        News::Progress(status) => progress(status),
        News::Silence(_) => true,
    })
}

/// The same, for those who want to know when a server says nothing for long.
///
/// # Errors
/// As [`ask`].
pub fn ask_and_wait(
    socket: &Path,
    order: &Order,
    tell: &mut dyn FnMut(News<'_>) -> bool,
) -> io::Result<Answer> {
    converse(socket, order, SILENCE, tell)
}

/// Asks a server how it is, which it must say soon.
///
/// # Errors
/// As [`ask`], and `TimedOut` with a [`Silent`] if it does not answer.
pub fn ask_status(socket: &Path) -> io::Result<Answer> {
    let mut silent = None;
    let answer = converse(socket, &Order::Status, STATUS, &mut |news| match news {
        News::Progress(_) => true,
        News::Silence(server) => {
            silent = Some(Silent { server });
            false
        }
    });
    match silent {
        Some(silent) => Err(io::Error::new(io::ErrorKind::TimedOut, silent)),
        None => answer,
    }
}

/// A server that is there, and does not answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "the server{} does not answer; it is stopped, or waits for something that hangs",
    server.map(|server| format!(" (process {server})")).unwrap_or_default()
)]
pub struct Silent {
    /// Its process, if it is known.
    pub server: Option<u32>,
}

fn converse(
    socket: &Path,
    order: &Order,
    silence: Duration,
    tell: &mut dyn FnMut(News<'_>) -> bool,
) -> io::Result<Answer> {
    let is_late = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
    let interrupted = || io::Error::from(io::ErrorKind::Interrupted);
    let stream = loop {
        match connect(socket, silence) {
            // So many wait to be heard that no more can.
            Err(error) if is_late(&error) => {
                if !tell(News::Silence(None)) {
                    return Err(interrupted());
                }
            }
            other => break other?,
        }
    };
    // The kernel's word, so it is known of one that says nothing, too.
    let server = sockopt::socket_peercred(&stream).ok();
    let server = server.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    send(&stream, &line)?;
    let mut answers = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        let room = LONGEST_ANSWER.saturating_sub(line.len() as u64);
        match answers.by_ref().take(room).read_until(b'\n', &mut line) {
            // What came of the line already is kept.
            Err(error) if is_late(&error) => {
                if !tell(News::Silence(server)) {
                    return Err(interrupted());
                }
                continue;
            }
            // It was killed while it had not read all.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            other => other?,
        };
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match serde_json::from_slice(&line)? {
            Answer::Progress { status } => {
                if !tell(News::Progress(&status)) {
                    return Err(interrupted());
                }
            }
            last => return Ok(last),
        }
        line.clear();
    }
}

/// Connects to a server. Neither this nor a read lasts longer than `limit`.
fn connect(socket: &Path, limit: Duration) -> io::Result<UnixStream> {
    let stream =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // For `connect`, this is how long it waits for a place in the queue.
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(limit))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    let stream = UnixStream::from(stream);
    stream.set_read_timeout(Some(limit))?;
    Ok(stream)
}

/// Sends all of an order. A server that refuses whoever asks need not listen to it: its answer is there to be read then.
fn send(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads an order; `None` at the end.
pub(super) fn read_line<T: for<'de> Deserialize<'de>>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref().take(LONGEST_ORDER).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Writes one line.
pub(super) fn write_line(to: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)
}
