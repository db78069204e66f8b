//! A file so large that several workers pack it, each a part at a time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::fs::{self, Stat};
use rustix::io::Errno;

use super::Packer;
use super::entries::{attributes_of, changed, header_of, open_source};
use crate::attributes::{read_xattrs, same_state};
use crate::dir::DirNode;
use crate::error::{During, Fault};
use crate::pack::header::Holes;
use crate::pack::index::Member;
use crate::pack::sparse::{ContentHasher, Segment};

/// Bytes of data in one part, which is one frame of a compressed archive.
const PART: u64 = 4 << 20;

/// A large file that is being packed.
pub(super) struct LargeFile {
    file: OwnedFd,
    stat: Stat,
    /// The header, and the map of its holes.
    header: Vec<u8>,
    /// Its data, in order, each with its place in the stream behind the map.
    pieces: Vec<(u64, Segment)>,
    /// Bytes of data without the map.
    packed: u64,
    /// What the index will say of it.
    member: Member,
    /// Where its header is in the stream.
    pub header_offset: Arc<AtomicU64>,
    turn: Mutex<Turn>,
    passed: Condvar,
}

/// The checksum goes through the file from its beginning to its end, so the parts take turns for it.
struct Turn {
    part: u64,
    hasher: Option<ContentHasher>,
    fault: Option<Fault>,
}

impl LargeFile {
    /// Opens it and writes its header.
    pub fn begin(packer: &Packer<'_>, node: &Arc<DirNode>, name: &std::ffi::CStr) -> Result<Self, Fault> {
        let fds = node.fds(&packer.budget)?;
        let (file, stat) = open_source(packer, &fds, name)?;
        let xattrs = packer.options.packed(read_xattrs(file.as_fd(), None)?);
        let segments = crate::pack::sparse::segments(file.as_fd(), &stat)?;
        let size = stat.st_size as u64;
        let path = crate::dir::join(&node.path(), name.to_bytes());
        let mut map = Vec::new();
        if let Some(segments) = &segments {
            crate::pack::header::write_map(segments, size, &mut map);
        }
        let sparse = segments.is_some();
        let segments = segments.unwrap_or_else(|| vec![Segment { offset: 0, length: size }]);
        let mut packed = 0;
        let pieces = (segments.into_iter())
            .map(|segment| {
                let at = packed;
                packed += segment.length;
                (at, segment)
            })
            .collect();
        let stored = map.len() as u64 + packed;
        let mut header = header_of(b'f', &path, attributes_of(packer, &stat, xattrs));
        (header.size, header.stored) = (size, stored);
        if sparse {
            header.holes = Holes::InData;
        }
        let mut bytes = Vec::new();
        header.write(&mut bytes)?;
        let header_length = bytes.len() as u64;
        bytes.extend_from_slice(&map);
        let member = Member {
            path,
            kind: b'f',
            mode: stat.st_mode & 0o7777,
            size,
            link: Vec::new(),
            checksum: None,
            sparse,
            header_offset: 0,
            data_offset: header_length,
            stored,
        };
        Ok(LargeFile {
            file,
            stat,
            header: bytes,
            pieces,
            packed,
            member,
            header_offset: Arc::default(),
            turn: Mutex::new(Turn { part: 0, hasher: Some(ContentHasher::new(size)), fault: None }),
            passed: Condvar::new(),
        })
    }

    /// How many parts it has; at least one, for the header.
    pub fn parts(&self) -> u64 {
        self.packed.div_ceil(PART).max(1)
    }

    /// Makes a buffer hold a part, whatever it held before. The last one also returns what the index says of the file, and whether there is
    /// something to report.
    ///
    /// Must be called once for every part, in order, by any worker: each waits for its turn until those before it
    /// have had theirs.
    pub fn part(
        &self,
        packer: &Packer<'_>,
        part: u64,
        buffer: &mut Vec<u8>,
    ) -> Option<(Member, Result<(), Fault>)> {
        let (start, end) = (part * PART, ((part + 1) * PART).min(self.packed));
        let header = if part == 0 { &self.header[..] } else { &[] };
        // What the buffer holds from its last use is overwritten, not cleared beforehand.
        buffer.resize(header.len() + (end - start) as usize, 0);
        buffer[..header.len()].copy_from_slice(header);
        let data = &mut buffer[header.len()..];
        let read = if packer.output.is_stopped() { Ok(()) } else { self.read(start, end, data) };
        if read.is_ok() {
            let length: u64 = self.pieces_of(start, end).map(|(_, piece)| piece.length).sum();
            packer.counts.bytes_read.fetch_add(length, Relaxed);
        }
        let last = part + 1 == self.parts();
        let mut turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while turn.part != part && !packer.output.is_stopped() {
            const LOOK_UP: Duration = Duration::from_millis(200);
            turn = self.passed.wait_timeout(turn, LOOK_UP).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        if let Err(fault) = read {
            turn.fault.get_or_insert(fault);
        }
        if let Some(hasher) = &mut turn.hasher
            && !packer.output.is_stopped()
        {
            let mut data = &buffer[header.len()..];
            for (_, piece) in self.pieces_of(start, end) {
                hasher.zeros_to(piece.offset);
                let (head, tail) = data.split_at(piece.length as usize);
                hasher.update(head);
                data = tail;
            }
        }
        turn.part += 1;
        self.passed.notify_all();
        if !last {
            return None;
        }
        crate::pack::header::pad(buffer, self.member.stored);
        let mut member = self.member.clone();
        if let Some(fault) = turn.fault.take() {
            return Some((member, Err(fault)));
        }
        member.checksum = turn.hasher.take().map(ContentHasher::finish);
        let unchanged = fs::fstat(&self.file)
            .during("reading its attributes")
            .and_then(|after| if same_state(&self.stat, &after) { Ok(()) } else { Err(changed()) });
        Some((member, unchanged))
    }

    /// The part's pieces of the file.
    fn pieces_of(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Segment)> + '_ {
        let first = self.pieces.partition_point(|(at, segment)| at + segment.length <= start);
        self.pieces[first..].iter().take_while(move |(at, _)| *at < end).map(move |(at, segment)| {
            let skip = start.saturating_sub(*at);
            let length = (at + segment.length).min(end) - (at + skip);
            (at + skip, Segment { offset: segment.offset + skip, length })
        })
    }

    /// Fills a part's data. Whatever happens it is filled: with zeros where the file has nothing.
    fn read(&self, start: u64, end: u64, mut data: &mut [u8]) -> Result<(), Fault> {
        for (_, piece) in self.pieces_of(start, end) {
            let (head, tail) = data.split_at_mut(piece.length as usize);
            data = tail;
            let mut filled = 0;
            while filled < head.len() {
                match rustix::io::pread(&self.file, &mut head[filled..], piece.offset + filled as u64) {
                    // It became shorter, which the last look at the file reports.
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(Errno::INTR) => {}
                    Err(error) => {
                        head[filled..].fill(0);
                        data.fill(0);
                        return Err(Fault::new("reading it", error));
                    }
                }
            }
            head[filled..].fill(0);
        }
        Ok(())
    }
}
