//! What the server of a cache can be asked, and asking it.
//!
//! One order a connection, as a line of JSON; the answers are lines, too, the last of which ends it. Root may ask, and the
//! user whose cache it is.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::record::path;
use crate::settings::Settings;
use crate::status::Status;

/// No line is longer: a path, or a status with what fails.
pub(super) const LONGEST_LINE: u64 = 1 << 20;

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

/// Asks a server. `progress` gets how it goes, and gives up by returning false; the server stops then, too, where it can.
///
/// # Errors
/// The kernel's: `NotFound` or `ConnectionRefused` if there is no server, `PermissionDenied` for who may not ask,
/// `UnexpectedEof` if it died meanwhile, `Interrupted` if `progress` gave up.
pub fn ask(socket: &Path, order: &Order, progress: &mut dyn FnMut(&Status) -> bool) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answers = BufReader::new(stream);
    loop {
        match read_line(&mut answers)? {
            Some(Answer::Progress { status }) => {
                if !progress(&status) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
            }
            Some(last) => return Ok(last),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Reads one line; `None` at the end.
pub(super) fn read_line<T: for<'de> Deserialize<'de>>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)?;
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
