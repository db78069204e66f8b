//! Making one entry from its header and its data.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io::{self, BufRead, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{self, AtFlags, FileType, Mode, Stat};
use rustix::io::Errno;

use super::directories::{CREATE, TargetDirectory, hash, lost_acl};
use super::header::{Attributes, Header, Holes, read_map};
use super::sparse::{ContentHasher, Segment};
use super::stream::write_at;
use super::trust::Trust;
use crate::attributes::{self, Privilege, Xattr};
use crate::checksum::Digest;
use crate::dir::partial_name;
use crate::error::{During, EntryError, Fault};
use crate::progress::{Event, Monitor};

pub(super) const READING: &str = "reading it from the archive";

/// What all threads share that make entries.
pub(super) struct Restorer<'a> {
    pub target: BorrowedFd<'a>,
    pub monitor: &'a Monitor<'a>,
    pub privilege: Privilege,
    /// Whether a later member of the same path replaces an earlier one, as in an archive that was appended to. An
    /// index has every path once.
    pub last_wins: bool,
    pub trust: Trust,
    pub counts: Counts,
    /// Files that are not there because they failed, so that no link is made to an older file of the name: the hashes
    /// of their paths.
    failed: Mutex<HashSet<u128>>,
}

#[derive(Default)]
pub(super) struct Counts {
    pub files: AtomicU64,
    pub others: AtomicU64,
    pub hard_links: AtomicU64,
    pub bytes: AtomicU64,
    pub verified: AtomicU64,
    pub errors: AtomicU64,
}

/// Where an entry is made.
pub(super) struct Spot<'a> {
    pub directory: &'a TargetDirectory,
    /// The same, open.
    pub dir: BorrowedFd<'a>,
    pub name: &'a CStr,
    /// The member's place in the stream, which makes a temporary name its own.
    pub offset: u64,
}

impl Spot<'_> {
    /// The name under which the entry is made.
    pub fn working_name(&self) -> CString {
        if self.directory.fresh {
            return self.name.to_owned();
        }
        let own = [self.name.to_bytes(), format!(".{:x}", self.offset).as_bytes()].concat();
        partial_name(&CString::new(own).unwrap_or_default()) // made of a C string and text
    }

    fn discard(&self, name: &CStr) {
        let _ = fs::unlinkat(self.dir, name, AtFlags::empty());
    }

    fn give_name(&self, working: &CStr) -> Result<(), Fault> {
        if *working == *self.name {
            return Ok(());
        }
        fs::renameat(self.dir, working, self.dir, self.name).during("giving it its name").inspect_err(|_| {
            self.discard(working);
        })
    }
}

impl<'a> Restorer<'a> {
    pub fn new(target: BorrowedFd<'a>, last_wins: bool, trust: Trust, monitor: &'a Monitor<'a>) -> Self {
        Restorer {
            target,
            monitor,
            privilege: Privilege::of_this_process(),
            last_wins,
            trust,
            counts: Counts::default(),
            failed: Mutex::default(),
        }
    }

    /// Reports an entry that could not be unpacked; the others go on.
    pub fn failed(&self, path: &[u8], fault: Fault) {
        self.lock_failed().insert(hash(path));
        self.report(path, fault);
    }

    /// The same for one that is there, but not with all it should have.
    pub fn report(&self, path: &[u8], fault: Fault) {
        self.counts.errors.fetch_add(1, Relaxed);
        self.monitor.progress.errors.fetch_add(1, Relaxed);
        let error = EntryError { path: path.to_vec(), action: fault.action, source: fault.source };
        (self.monitor.event)(Event::Failed(&error));
    }

    fn lock_failed(&self) -> std::sync::MutexGuard<'_, HashSet<u128>> {
        self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn done(&self, count: &AtomicU64, bytes: u64) {
        count.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_add(bytes, Relaxed);
        self.monitor.progress.bytes_done.fetch_add(bytes, Relaxed);
        self.monitor.progress.entries_done.fetch_add(1, Relaxed);
    }

    /// Makes an entry that is neither a directory nor a hard link, and reports it if that fails.
    pub fn entry(
        &self,
        path: &[u8],
        spot: Result<Spot<'_>, Fault>,
        header: &Header,
        data: &mut dyn BufRead,
        checksum: Option<&Digest>,
    ) {
        let made = spot.and_then(|spot| match header.kind {
            b'f' => self.file(&spot, header, data, checksum),
            _ => self.special(&spot, header),
        });
        match made {
            Ok(applied) => self.finished(path, header, applied),
            // Being told to stop is no fault of the entry.
            Err(_) if self.monitor.progress.is_cancelled() => {}
            Err(fault) => self.failed(path, fault),
        }
    }

    /// Counts an entry that is in place, and reports what it lacks.
    pub fn finished(&self, path: &[u8], header: &Header, applied: Result<(), Fault>) {
        let lost = header.lost.as_deref().map_or(Ok(()), |why| Err(lost_acl(why)));
        if let Err(fault) = applied.and(lost) {
            self.report(path, fault);
        }
        match header.kind {
            b'f' => self.done(&self.counts.files, header.size),
            _ => self.done(&self.counts.others, 0),
        }
    }

    /// Makes an entry under its working name, in place of what may be left there.
    fn make<T>(&self, spot: &Spot<'_>, name: &CStr, make: impl Fn() -> Result<T, Errno>) -> Result<T, Fault> {
        match make() {
            Err(Errno::EXIST) if !spot.directory.fresh || self.last_wins => {
                fs::unlinkat(spot.dir, name, AtFlags::empty()).during("replacing what is there")?;
                make().during("creating it")
            }
            Err(Errno::EXIST) => Err(Fault::message("creating it", "the archive has it twice")),
            other => other.during("creating it"),
        }
    }

    /// Makes an empty file under its working name.
    pub fn create(&self, spot: &Spot<'_>, working: &CStr, header: &Header) -> Result<(OwnedFd, Stat), Fault> {
        // In a directory that others may look into, a file is its maker's alone until owner and ACL are right. In one of
        // ours, which is closed, most files need no other mode later.
        let visible = if spot.directory.fresh { 0o755 } else { 0o700 };
        let mode = Mode::from_raw_mode(header.attributes.mode & visible | 0o200);
        let file = self.make(spot, working, || fs::openat(spot.dir, working, CREATE, mode))?;
        if spot.directory.hands_down_acl {
            attributes::drop_acl(file.as_fd());
        }
        let created = fs::fstat(&file).during("creating it")?;
        Ok((file, created))
    }

    fn file(
        &self,
        spot: &Spot<'_>,
        header: &Header,
        data: &mut dyn BufRead,
        checksum: Option<&Digest>,
    ) -> Result<Result<(), Fault>, Fault> {
        let working = spot.working_name();
        let (file, created) = self.create(spot, &working, header)?;
        let written = self.content(file.as_fd(), header, data, checksum.is_some());
        let digest = written.inspect_err(|_| spot.discard(&working))?;
        self.complete(spot, &working, file.as_fd(), &created, header, checksum.zip(digest))
    }

    /// The data is there: checksum, attributes, and the name. What could not be kept of the attributes is in the
    /// inner result.
    pub fn complete(
        &self,
        spot: &Spot<'_>,
        working: &CStr,
        file: BorrowedFd<'_>,
        created: &Stat,
        header: &Header,
        checksums: Option<(&Digest, Digest)>,
    ) -> Result<Result<(), Fault>, Fault> {
        if let Some((expected, found)) = checksums {
            if *expected != found {
                spot.discard(working);
                let why =
                    format!("its checksum is {found}, the index says {expected}: the archive is damaged");
                return Err(Fault::message("checking it", &why));
            }
            self.counts.verified.fetch_add(1, Relaxed);
        }
        let (want, xattrs) = self.wanted(spot, &header.attributes, created);
        let ownership = self.trust.ownership();
        let applied = attributes::apply(file, created, &want, xattrs, ownership, &self.privilege);
        spot.give_name(working)?;
        Ok(applied)
    }

    /// What an entry that was just made shall get.
    fn wanted<'h>(&self, spot: &Spot<'_>, header: &'h Attributes, made: &Stat) -> (Stat, &'h [Xattr]) {
        let mut want = header.of(made);
        if let Trust::Umask(_) = self.trust {
            want.st_mode &= libc::S_IFMT | spot.directory.most;
        }
        (want, &header.xattrs)
    }

    /// Writes a file's data where it belongs, and returns its checksum if it is wanted.
    fn content(
        &self,
        file: BorrowedFd<'_>,
        header: &Header,
        data: &mut dyn BufRead,
        hash: bool,
    ) -> Result<Option<Digest>, Fault> {
        let mut hasher = hash.then(|| ContentHasher::new(header.size));
        let in_data;
        let (segments, map) = match &header.holes {
            Holes::None => {
                self.pieces(file, Segment { offset: 0, length: header.size }, data, &mut hasher)?;
                return Ok(hasher.map(ContentHasher::finish));
            }
            Holes::Map(segments) => (segments, 0),
            Holes::InData => {
                in_data = read_map(data).during(READING)?;
                (&in_data.0, in_data.1)
            }
        };
        let end = segments.last().map_or(0, |last| last.offset + last.length);
        let total: u64 = segments.iter().map(|segment| segment.length).sum();
        if end > header.size || total + map > header.stored {
            return Err(Fault::message(READING, "the map of its holes does not fit its size"));
        }
        fs::ftruncate(file, header.size).during("setting its size")?;
        for segment in segments {
            if let Some(hasher) = &mut hasher {
                hasher.zeros_to(segment.offset);
            }
            self.pieces(file, *segment, data, &mut hasher)?;
        }
        Ok(hasher.map(ContentHasher::finish))
    }

    /// Writes one segment.
    pub fn pieces(
        &self,
        file: BorrowedFd<'_>,
        segment: Segment,
        data: &mut dyn BufRead,
        hasher: &mut Option<ContentHasher>,
    ) -> Result<(), Fault> {
        let mut written = 0;
        while written < segment.length {
            if self.monitor.progress.is_cancelled() {
                return Err(Fault::new("unpacking it", Errno::CANCELED));
            }
            let piece = data.fill_buf().during(READING)?;
            if piece.is_empty() {
                return Err(Fault::new(READING, io::ErrorKind::UnexpectedEof));
            }
            let piece =
                &piece[..piece.len().min(usize::try_from(segment.length - written).unwrap_or(usize::MAX))];
            if let Some(hasher) = hasher {
                hasher.update(piece);
            }
            write_at(file, piece, segment.offset + written).during("writing it")?;
            let length = piece.len();
            self.monitor.progress.bytes_written.fetch_add(length as u64, Relaxed);
            written += length as u64;
            data.consume(length);
        }
        Ok(())
    }

    /// A symlink, FIFO or device.
    fn special(&self, spot: &Spot<'_>, header: &Header) -> Result<Result<(), Fault>, Fault> {
        let working = spot.working_name();
        match header.kind {
            b'l' => {
                let link = CString::new(&header.link[..]).during("creating it")?;
                self.make(spot, &working, || fs::symlinkat(&*link, spot.dir, &*working))?;
            }
            b'c' | b'b' if matches!(self.trust, Trust::Umask(_)) => {
                let why = "it is a device, which is made only for root, and only with --same-permissions";
                return Err(Fault::message("unpacking it", why));
            }
            kind => {
                let file_type = match kind {
                    b'p' => FileType::Fifo,
                    b'c' => FileType::CharacterDevice,
                    b'b' => FileType::BlockDevice,
                    _ => return Err(Fault::message("unpacking it", "it is of a type unknown here")),
                };
                let device = match kind {
                    b'p' => 0,
                    _ => fs::makedev(header.device.0, header.device.1),
                };
                // Its maker's alone until it is the owner's.
                let mode = Mode::RUSR | Mode::WUSR;
                self.make(spot, &working, || fs::mknodat(spot.dir, &*working, file_type, mode, device))?;
                if spot.directory.hands_down_acl {
                    attributes::drop_acl_at(spot.dir, &working);
                }
            }
        }
        let applied = fs::statat(spot.dir, &*working, AtFlags::SYMLINK_NOFOLLOW)
            .during("reading its attributes")
            .and_then(|made| {
                let (want, xattrs) = self.wanted(spot, &header.attributes, &made);
                let ownership = self.trust.ownership();
                attributes::apply_at(spot.dir, &working, &want, xattrs, ownership, &self.privilege)
            });
        spot.give_name(&working)?;
        Ok(applied)
    }

    /// Makes a further name of a file that is in place.
    pub fn hard_link(
        &self,
        path: &[u8],
        spot: &Spot<'_>,
        first: &[u8],
        first_dir: BorrowedFd<'_>,
        first_name: &CStr,
    ) {
        let linked = if self.lock_failed().contains(&hash(first)) {
            Err(Fault::message("linking it", "the file it is another name of could not be unpacked"))
        } else {
            let working = spot.working_name();
            let link = || fs::linkat(first_dir, first_name, spot.dir, &*working, AtFlags::empty());
            self.make(spot, &working, link).and_then(|()| spot.give_name(&working)).map(|()| {
                if *working != *spot.name {
                    // Renaming to another name of the same file does nothing, and leaves both.
                    spot.discard(&working);
                }
            })
        };
        match linked {
            Ok(()) => self.done(&self.counts.hard_links, 0),
            Err(fault) => self.failed(path, fault),
        }
    }
}

/// Some of a reader's bytes; what was not taken of them can be passed over.
pub(super) struct Part<'a> {
    pub reader: &'a mut dyn BufRead,
    pub left: u64,
}

impl Part<'_> {
    /// Passes over what is left.
    pub fn skip(&mut self) -> io::Result<()> {
        while self.left > 0 {
            match self.fill_buf()?.len() {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.consume(count),
            }
        }
        Ok(())
    }
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let data = self.fill_buf()?;
        let count = data.len().min(buffer.len());
        buffer[..count].copy_from_slice(&data[..count]);
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Part<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.left == 0 {
            return Ok(&[]);
        }
        let data = self.reader.fill_buf()?;
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(data.len());
        Ok(&data[..most])
    }

    fn consume(&mut self, count: usize) {
        self.reader.consume(count);
        self.left -= count as u64;
    }
}
