//! Packing entries and small files into a unit.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::buffer::spare_capacity;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{Entry, EntryKind, LARGE, Packer};
use crate::attributes::{Xattr, is_regular, is_symlink, read_xattrs, read_xattrs_at, same_state};
use crate::checksum::Checksum;
use crate::dir::{DirFds, DirNode, join};
use crate::error::{During, Fault};
use crate::pack::header::{Attributes, Header, Holes, pad};
use crate::pack::index::Member;
use crate::pack::sparse::ContentHasher;

/// How often a file that changes under the packer is read again before it is reported.
const TRIES: u32 = 3;

const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    // A FIFO swapped in for the file must not block a worker.
    .union(OFlags::NONBLOCK);

impl Packer<'_> {
    /// Appends entries to a buffer.
    pub(super) fn entries(&self, entries: &[Entry], buffer: &mut Vec<u8>) -> Vec<Member> {
        let mut members = Vec::with_capacity(entries.len());
        let mut parent: Option<(&Arc<DirNode>, Vec<u8>)> = None;
        for entry in entries {
            if self.output.is_stopped() {
                break;
            }
            let directory = match parent.take() {
                Some((node, path)) if Arc::ptr_eq(node, &entry.node) => path,
                _ => entry.node.path(),
            };
            let path = match entry.what {
                EntryKind::Directory => directory.clone(),
                _ => join(&directory, entry.name.to_bytes()),
            };
            parent = Some((&entry.node, directory));
            let start = buffer.len();
            match self.entry(entry, &path, buffer) {
                Ok((member, outcome)) => {
                    let (count, bytes) = match member.kind {
                        b'f' => (&self.counts.files, member.size),
                        b'h' => (&self.counts.hard_links, 0),
                        _ => (&self.counts.others, 0),
                    };
                    match outcome {
                        Err(fault) => self.failed(&path, fault),
                        Ok(()) if member.kind == b'd' => {
                            self.counts.directories.fetch_add(1, Relaxed);
                        }
                        Ok(()) => self.done(count, bytes),
                    }
                    members.push(member);
                }
                Err(fault) => {
                    buffer.truncate(start);
                    self.entry_failed(&entry.node, &entry.name, &path, fault);
                }
            }
        }
        members
    }

    /// Appends one entry. It may be in the archive and yet have something to report.
    fn entry(
        &self,
        entry: &Entry,
        path: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(Member, Result<(), Fault>), Fault> {
        let fds = entry.node.fds(&self.budget)?;
        let dir = fds.source.as_fd();
        let mut header = match &entry.what {
            EntryKind::File(found) => return self.file(&fds, entry, *found, path, buffer),
            EntryKind::Directory => header_of(
                b'd',
                path,
                attributes_of(self, &entry.node.source, self.options.packed(read_xattrs(dir, None)?)),
            ),
            EntryKind::Link(first) => {
                let stat = fs::statat(dir, &*entry.name, AtFlags::SYMLINK_NOFOLLOW)
                    .during("reading its attributes")?;
                if is_regular(&stat) {
                    // Whether this name can be read is whether the first one could: a link to what is not in the
                    // archive would be of no use.
                    open_source(self, &fds, &entry.name)?;
                }
                let mut header = header_of(b'h', path, attributes_of(self, &stat, Vec::new()));
                header.link.clone_from(first);
                header
            }
            EntryKind::Other => {
                let stat = fs::statat(dir, &*entry.name, AtFlags::SYMLINK_NOFOLLOW)
                    .during("reading its attributes")?;
                let kind = match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Symlink => b'l',
                    FileType::Fifo => b'p',
                    FileType::CharacterDevice => b'c',
                    FileType::BlockDevice => b'b',
                    _ => {
                        return Err(Fault::message(
                            "packing it",
                            "it was replaced by another kind of entry meanwhile",
                        ));
                    }
                };
                let xattrs = self.options.packed(read_xattrs_at(dir, &entry.name, None)?);
                let mut header = header_of(kind, path, attributes_of(self, &stat, xattrs));
                if is_symlink(&stat) {
                    header.link = fs::readlinkat(dir, &*entry.name, Vec::new())
                        .during("reading where it points")?
                        .into_bytes();
                }
                header.device = (fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
                header
            }
        };
        let start = buffer.len();
        header.write(buffer)?;
        let member = Member {
            path: path.to_vec(),
            kind: header.kind,
            mode: header.attributes.mode,
            size: 0,
            link: std::mem::take(&mut header.link),
            checksum: None,
            sparse: false,
            header_offset: start as u64,
            data_offset: buffer.len() as u64,
            stored: 0,
        };
        Ok((member, Ok(())))
    }

    /// Appends a small file.
    fn file(
        &self,
        fds: &DirFds,
        entry: &Entry,
        found: u64,
        path: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(Member, Result<(), Fault>), Fault> {
        let start = buffer.len();
        let mut attempt = 1;
        loop {
            let (file, stat) = open_source(self, fds, &entry.name)?;
            let xattrs = self.options.packed(read_xattrs(file.as_fd(), None)?);
            let whole = stat.st_size as u64;
            // It was small when its place in this unit was given to it.
            let size = if whole > LARGE { found } else { whole };
            let segments =
                if size == whole { crate::pack::sparse::segments(file.as_fd(), &stat)? } else { None };
            let mut map = Vec::new();
            let mut header = header_of(b'f', path, attributes_of(self, &stat, xattrs));
            header.size = size;
            header.stored = size;
            if let Some(segments) = &segments {
                crate::pack::header::write_map(segments, size, &mut map);
                header.stored = map.len() as u64 + segments.iter().map(|segment| segment.length).sum::<u64>();
                header.holes = Holes::InData;
            }
            header.write(buffer)?;
            let data_offset = buffer.len();
            let checksum = match &segments {
                None => {
                    read_into(file.as_fd(), 0, size as usize, buffer)?;
                    Checksum::Xxh3.of(&buffer[data_offset..])
                }
                Some(segments) => {
                    buffer.extend_from_slice(&map);
                    let mut hasher = ContentHasher::new(size);
                    for segment in segments {
                        let from = buffer.len();
                        read_into(file.as_fd(), segment.offset, segment.length as usize, buffer)?;
                        hasher.zeros_to(segment.offset);
                        hasher.update(&buffer[from..]);
                    }
                    hasher.finish()
                }
            };
            self.counts.bytes_read.fetch_add(header.stored - map.len() as u64, Relaxed);
            pad(buffer, header.stored);
            let after = fs::fstat(&file).during("reading its attributes")?;
            let same = same_state(&stat, &after) && size == whole;
            if !same && attempt < TRIES {
                attempt += 1;
                buffer.truncate(start);
                continue;
            }
            let member = Member {
                path: path.to_vec(),
                kind: b'f',
                mode: header.attributes.mode,
                size,
                link: Vec::new(),
                checksum: Some(checksum),
                sparse: segments.is_some(),
                header_offset: start as u64,
                data_offset: data_offset as u64,
                stored: header.stored,
            };
            return Ok((member, if same { Ok(()) } else { Err(changed()) }));
        }
    }
}

/// What an archive holds of a file whose writer was not done.
pub(super) fn changed() -> Fault {
    Fault::message(
        "packing it",
        "it changed while it was packed, and is in the archive as it was read; pack it when its writer has closed it",
    )
}

/// Opens a file of the source.
pub(super) fn open_source(packer: &Packer<'_>, fds: &DirFds, name: &CStr) -> Result<(OwnedFd, Stat), Fault> {
    // Reading a source should not change its access time; only its owner (or root) may ask for that.
    let mut opened = Err(Errno::PERM);
    if packer.root || packer.no_atime.load(Relaxed) {
        opened = fs::openat(&fds.source, name, READ_FLAGS | OFlags::NOATIME, Mode::empty());
        if matches!(opened, Err(Errno::PERM)) {
            packer.no_atime.store(false, Relaxed);
        }
    }
    if matches!(opened, Err(Errno::PERM)) {
        opened = fs::openat(&fds.source, name, READ_FLAGS, Mode::empty());
    }
    let file = opened.during("opening it")?;
    let stat = fs::fstat(&file).during("reading its attributes")?;
    if !is_regular(&stat) {
        return Err(Fault::message("packing it", "it was replaced by another kind of entry meanwhile"));
    }
    Ok((file, stat))
}

/// Appends `length` bytes of a file; what it does not have is zeros.
fn read_into(
    file: BorrowedFd<'_>,
    mut offset: u64,
    length: usize,
    buffer: &mut Vec<u8>,
) -> Result<(), Fault> {
    let end = buffer.len() + length;
    buffer.reserve(length);
    while buffer.len() < end {
        // It may read more than asked for, which is cut off below: cheaper than to clear the buffer beforehand.
        match rustix::io::pread(file, spare_capacity(buffer), offset) {
            Ok(0) => break,
            Ok(count) => offset += count as u64,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("reading it", error)),
        }
    }
    buffer.resize(end, 0);
    Ok(())
}

pub(super) fn attributes_of(packer: &Packer<'_>, stat: &Stat, xattrs: Vec<Xattr>) -> Attributes {
    Attributes {
        mode: packer.options.modes.get(&stat.st_ino).copied().unwrap_or(stat.st_mode & 0o7777),
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: crate::manifest::mtime(stat),
        xattrs,
    }
}

/// The header of an entry without content.
pub(super) fn header_of(kind: u8, path: &[u8], attributes: Attributes) -> Header {
    Header {
        kind,
        path: path.to_vec(),
        link: Vec::new(),
        attributes,
        size: 0,
        stored: 0,
        device: (0, 0),
        holes: Holes::None,
        lost: None,
    }
}
