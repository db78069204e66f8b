//! Reading an archive from its beginning to its end: one that another program made, or that lost its index.

use std::ffi::CString;
use std::io::{self, BufRead, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;

use super::PackError;
use super::directories::{LastOpened, TargetDirectories, checked, split};
use super::header::{BLOCK, Globals, Header, Holes, padded};
use super::index::Member;
use super::restore::{Part, Restorer, Spot};
use super::stream::{Source, sequential};
use super::unpack::{Selection, make_link};
use crate::progress::Progress;

/// The members of a stream.
pub(super) struct Reader<'a> {
    stream: PositionedStream<'a>,
    globals: Globals,
    path: PathBuf,
    /// Bytes of the last member that nobody has read.
    unread: u64,
}

/// A stream that knows its position.
struct PositionedStream<'a> {
    stream: Box<dyn BufRead>,
    at: u64,
    /// Who may tell it to stop, also in the middle of what has no end.
    progress: Option<&'a Progress>,
}

impl PositionedStream<'_> {
    fn may_go_on(&self) -> io::Result<()> {
        match self.progress {
            Some(progress) if progress.is_cancelled() => Err(Errno::CANCELED.into()),
            _ => Ok(()),
        }
    }
}

impl Read for PositionedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.may_go_on()?;
        let count = self.stream.read(buffer)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl BufRead for PositionedStream<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.may_go_on()?;
        self.stream.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.stream.consume(count);
        self.at += count as u64;
    }
}

impl<'a> Reader<'a> {
    pub fn new(
        source: &Arc<Source>,
        path: PathBuf,
        progress: Option<&'a Progress>,
    ) -> Result<Self, PackError> {
        match sequential(source) {
            Ok(stream) => Ok(Reader {
                stream: PositionedStream { stream, at: 0, progress },
                globals: Globals::default(),
                path,
                unread: 0,
            }),
            Err(source) => Err(PackError::Read { path, source }),
        }
    }

    /// The next header, with the offsets of header and data.
    fn next(&mut self) -> Result<Option<(Header, u64, u64)>, PackError> {
        let unread = std::mem::take(&mut self.unread);
        Part { reader: &mut self.stream, left: unread }.skip().map_err(|error| self.broken(error))?;
        let at = self.stream.at;
        match Header::read(&mut self.stream, &mut self.globals) {
            Ok(Some(header)) => {
                // Checked, because the end of a member is computed from it.
                self.unread = header.stored.checked_next_multiple_of(BLOCK).ok_or_else(|| {
                    self.broken(io::Error::new(io::ErrorKind::InvalidData, "a member is too large"))
                })?;
                Ok(Some((header, at, self.stream.at)))
            }
            Ok(None) => Ok(None),
            // Not even the first header is one.
            Err(error) if at == 0 && self.stream.at < 2 * BLOCK && is_ours(&error) => {
                Err(PackError::NotAnArchive { path: self.path.clone() })
            }
            Err(error) => Err(self.broken(error)),
        }
    }

    /// The data of the member whose header was read last.
    fn data(&mut self, stored: u64) -> Part<'_> {
        self.unread = padded(stored) - stored;
        Part { reader: &mut self.stream, left: stored }
    }

    fn broken(&self, error: io::Error) -> PackError {
        let (path, at) = (self.path.clone(), self.stream.at);
        match error.kind() {
            io::ErrorKind::UnexpectedEof => PackError::Truncated { path, at },
            // What the system didn't say was found by us or by Zstandard.
            _ if error.raw_os_error().is_none() => PackError::Damaged { path, at, why: error.to_string() },
            _ => PackError::Read { path, source: error },
        }
    }

    /// The next member, as far as an archive without an index tells.
    pub fn member(&mut self) -> Result<Option<Member>, PackError> {
        Ok(self.next()?.map(|(header, header_offset, data_offset)| {
            let kind = header.kind;
            Member {
                path: checked(&header.path).unwrap_or(header.path),
                kind,
                mode: header.attributes.mode,
                size: if kind == b'f' { header.size } else { 0 },
                link: if matches!(kind, b'h' | b'l') { header.link } else { Vec::new() },
                checksum: None,
                sparse: !matches!(header.holes, Holes::None),
                header_offset,
                data_offset,
                stored: header.stored,
            }
        }))
    }
}

/// Whether the bytes are no header, or too few for one; Zstandard's findings are others.
fn is_ours(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

/// Unpacks what is selected. Directories are left to be completed.
pub(super) fn unpack(
    mut reader: Reader<'_>,
    restorer: &Restorer<'_>,
    selection: &mut Selection,
    directories: &mut TargetDirectories<'_>,
) -> Result<(), PackError> {
    let (mut opened, mut first_opened) = (LastOpened::default(), LastOpened::default());
    let progress = restorer.monitor.progress;
    while !progress.is_cancelled() {
        let Some((mut header, offset, _)) = reader.next()? else { break };
        restorer.trust.narrow(&mut header);
        let stored = header.stored;
        let path = match checked(&header.path) {
            Ok(path) => path,
            Err(fault) => {
                restorer.failed(&header.path, fault);
                continue;
            }
        };
        if !selection.wants(&path) {
            continue;
        }
        if header.kind != b'd' {
            progress.entries_found.fetch_add(1, Relaxed);
            progress.bytes_found.fetch_add(if header.kind == b'f' { header.size } else { 0 }, Relaxed);
        }
        if header.kind == b'd' {
            match directories.at(&path, true) {
                // Kept until everything in it is there.
                Ok(directory) => drop(directory.attributes.set((header.attributes, header.lost))),
                Err(fault) => restorer.report(&path, fault),
            }
            continue;
        }
        let placed = directories
            .claim(&path, header.kind == b'l')
            .and_then(|()| directories.at(split(&path).0, false));
        let directory = match placed {
            Ok(directory) => directory,
            Err(fault) => {
                restorer.failed(&path, fault);
                continue;
            }
        };
        if header.kind == b'h' {
            let fds = (&mut opened, &mut first_opened);
            if let Err(fault) = make_link(restorer, directories, &path, &header.link, offset, fds) {
                restorer.failed(&path, fault);
            }
            continue;
        }
        let name = CString::new(split(&path).1).unwrap_or_default(); // `checked` has seen it
        let spot = opened.open(restorer.target, &directory).map(|dir| Spot {
            directory: &directory,
            dir,
            name: &name,
            offset,
        });
        let mut data = reader.data(stored);
        restorer.entry(&path, spot, &header, &mut data, None);
        let left = data.left;
        reader.unread += left;
    }
    Ok(())
}

/// The members one after another.
pub(super) struct Members {
    /// Read already, so that what is no archive is told at once.
    first: Option<Member>,
    reader: Option<Reader<'static>>,
}

impl Members {
    pub fn new(mut reader: Reader<'static>) -> Result<Self, PackError> {
        let first = reader.member()?;
        Ok(Members { reader: first.is_some().then_some(reader), first })
    }
}

impl Iterator for Members {
    type Item = Result<Member, PackError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let next = self.reader.as_mut()?.member().transpose();
        if !matches!(next, Some(Ok(_))) {
            self.reader = None;
        }
        next
    }
}
