//! The index behind the stream: which member is where. Its format is described in [`super`].

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use zstd::stream::read::Decoder;
use zstd::stream::write::Encoder;

use super::header::{BLOCK, padded};
use super::stream::{Frame, MOST_FRAME, Section, Source, read_at, write_at};
use crate::checksum::{Checksum, Digest};

/// Bytes of the footer, which end the file.
pub(super) const FOOTER: u64 = 64;
const MAGIC: &[u8; 8] = b"ONDKPACK";
const VERSION: u32 = 1;
/// The last bytes of the file, so that a reader need not guess.
const END: &[u8; 8] = b"KCAPKDNO";
/// Bit 0 of the footer's flags: the stream is compressed.
const COMPRESSED: u32 = 1;

/// The longest path or link target in an archive: four times what a path can be in one call. Linux has no limit for the
/// depth of a tree, but a reader needs one.
pub(super) const MOST_PATH: usize = 16 << 10;
/// The index of a stream is compressed like text, whatever the level of the data.
const LEVEL: i32 = 3;
/// Bytes of a growing index that are kept in memory; what is more waits in a file without a name.
const IN_MEMORY: usize = 4 << 20;

/// Set in the type of a member with holes.
const SPARSE: u8 = 0x80;
/// Set in the type of a file whose content could not be read to its end.
const INCOMPLETE: u8 = 0x40;
/// The types; a member has its place in this list.
const LETTERS: &[u8; 7] = b"fhdlpcb";

/// A member of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The path relative to the root of the tree; empty for the root itself.
    pub path: Vec<u8>,
    /// The type, with the letters of [`crate::manifest`]: `f` file, `h` further name of a file, `d` directory, `l`
    /// symlink, `p` FIFO, `c` and `b` devices; `?` for what another program put there.
    pub kind: u8,
    /// The permission bits.
    pub mode: u32,
    /// Bytes of a file's content, holes included.
    pub size: u64,
    /// The target of a symlink, or the path of a hard link's first name; empty for the others.
    pub link: Vec<u8>,
    /// XXH3-128 of a file's content, as a manifest of the file has it. `None` if the archive has no index, or if the
    /// file could not be read to its end when it was packed.
    pub checksum: Option<Digest>,
    /// Whether the file has holes.
    pub sparse: bool,
    /// Where its header begins in the uncompressed stream.
    pub header_offset: u64,
    /// Where its data begins: after the header.
    pub data_offset: u64,
    /// Bytes of its data in the stream, without padding; of a file with holes the map and what is not hole.
    pub stored: u64,
}

impl Member {
    /// Where the next header begins.
    pub(super) fn end(&self) -> u64 {
        self.data_offset + padded(self.stored)
    }
}

/// Writes an index while the archive grows.
pub(super) struct Writer<'a> {
    encoder: Encoder<'static, Spill<'a>>,
    record: Vec<u8>,
    path: Vec<u8>,
    end: u64,
    frames: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// An empty index. `directory` is where it grows when it doesn't fit in memory.
    pub fn new(directory: BorrowedFd<'a>) -> io::Result<Self> {
        let spill = Spill { directory, file: None, written: 0, buffer: Vec::new() };
        Ok(Writer {
            encoder: Encoder::new(spill, LEVEL)?,
            record: Vec::new(),
            path: Vec::new(),
            end: 0,
            frames: Vec::new(),
        })
    }

    /// Adds the next member, in the order of the stream.
    pub fn member(&mut self, member: &Member) -> io::Result<()> {
        let record = &mut self.record;
        record.clear();
        let incomplete = member.kind == b'f' && member.checksum.is_none();
        let letter = LETTERS.iter().position(|letter| *letter == member.kind).unwrap_or_default() as u8;
        record
            .push(letter | if member.sparse { SPARSE } else { 0 } | if incomplete { INCOMPLETE } else { 0 });
        let shared = self.path.iter().zip(&member.path).take_while(|(a, b)| a == b).count();
        number(record, shared as u64);
        text(record, &member.path[shared..]);
        number(record, (member.header_offset - self.end) / BLOCK);
        number(record, (member.data_offset - member.header_offset) / BLOCK);
        number(record, member.mode.into());
        match member.kind {
            b'f' => {
                number(record, member.size);
                if member.sparse {
                    number(record, member.stored);
                }
                if let Some(checksum) = &member.checksum {
                    record.extend_from_slice(checksum.as_bytes());
                }
            }
            b'h' | b'l' => text(record, &member.link),
            _ => {}
        }
        self.encoder.write_all(record)?;
        self.path.truncate(shared);
        self.path.extend_from_slice(&member.path[shared..]);
        self.end = member.end();
        Ok(())
    }

    /// Adds the next frame of a compressed stream: its length before and after compression.
    pub fn frame(&mut self, plain: usize, stored: usize) {
        number(&mut self.frames, plain as u64);
        number(&mut self.frames, stored as u64);
    }

    /// The index complete, for a stream of so many bytes.
    pub fn finish(self, stream: u64) -> io::Result<FinishedIndex<'a>> {
        let compressed = !self.frames.is_empty();
        Ok(FinishedIndex { members: self.encoder.finish()?, frames: self.frames, stream, compressed })
    }
}

/// An index that is complete but not yet in its archive.
pub(super) struct FinishedIndex<'a> {
    members: Spill<'a>,
    frames: Vec<u8>,
    stream: u64,
    compressed: bool,
}

impl FinishedIndex<'_> {
    /// Bytes of index and footer together.
    pub fn length(&self) -> u64 {
        self.members.length() + self.frames.len() as u64 + FOOTER
    }

    /// Hands the index and the footer to `write`, in pieces.
    pub fn write(&self, write: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut hasher = Checksum::Xxh3.hasher();
        self.members.pieces(&mut |piece| {
            hasher.update(piece);
            write(piece)
        })?;
        hasher.update(&self.frames);
        write(&self.frames)?;
        let mut footer = Vec::with_capacity(FOOTER as usize);
        footer.extend_from_slice(MAGIC);
        footer.extend_from_slice(&VERSION.to_le_bytes());
        footer.extend_from_slice(&(if self.compressed { COMPRESSED } else { 0 }).to_le_bytes());
        footer.extend_from_slice(&self.members.length().to_le_bytes());
        footer.extend_from_slice(&(self.frames.len() as u64).to_le_bytes());
        footer.extend_from_slice(&self.stream.to_le_bytes());
        hasher.update(&footer);
        footer.extend_from_slice(hasher.finish().as_bytes());
        footer.extend_from_slice(END);
        write(&footer)
    }
}

/// The index of an archive, found and checked.
pub(super) struct Index {
    members_at: u64,
    members_length: u64,
    /// Bytes of the uncompressed stream.
    pub stream: u64,
    /// The frames of a compressed stream.
    pub frames: Option<Vec<Frame>>,
}

/// What is at the end of a file.
pub(super) enum IndexLookup {
    Index(Index),
    /// Another program made the archive, or its end is missing.
    Nothing,
    /// There is one, but it is not what was written.
    Damaged,
}

/// Looks for an index at the end of an archive, and checks it.
pub(super) fn find(source: &Arc<Source>) -> io::Result<IndexLookup> {
    let Some(footer_at) = source.length.checked_sub(FOOTER) else { return Ok(IndexLookup::Nothing) };
    let mut footer = [0; FOOTER as usize];
    source.read_at(&mut footer, footer_at)?;
    if !footer.starts_with(MAGIC) || !footer.ends_with(END) {
        return Ok(IndexLookup::Nothing);
    }
    let four = |at: usize| u32::from_le_bytes([footer[at], footer[at + 1], footer[at + 2], footer[at + 3]]);
    let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
    let (members_length, frames_length, stream) = (eight(16), eight(24), eight(32));
    let total = members_length.checked_add(frames_length).filter(|total| *total <= footer_at);
    let Some(members_at) = total.map(|total| footer_at - total).filter(|_| four(8) == VERSION) else {
        return Ok(IndexLookup::Damaged);
    };
    // The frames come into memory, some seven bytes for four megabytes of stream; the members are only passed by.
    let mut hasher = Checksum::Xxh3.hasher();
    let mut frames = Vec::new();
    let mut section = Section { source: source.clone(), at: members_at, end: footer_at };
    let mut buffer = vec![0; 64 << 10];
    loop {
        let at = section.at;
        let count = section.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        let behind = (members_at + members_length).saturating_sub(at).min(count as u64) as usize;
        frames.extend_from_slice(&buffer[behind..count]);
    }
    hasher.update(&footer[..40]);
    if hasher.finish().as_bytes() != &footer[40..56] {
        return Ok(IndexLookup::Damaged);
    }
    let frames = match four(12) & COMPRESSED {
        0 => (stream <= members_at).then_some(None),
        _ => read_frames(&frames, stream, members_at).map(Some),
    };
    // The checksum guards against accidents only; that the parts fit together is checked all the same.
    let Some(frames) = frames else { return Ok(IndexLookup::Damaged) };
    Ok(IndexLookup::Index(Index { members_at, members_length, stream, frames }))
}

fn read_frames(mut data: &[u8], stream: u64, most: u64) -> Option<Vec<Frame>> {
    let mut frames = Vec::new();
    let (mut plain, mut at) = (0_u64, 0_u64);
    while !data.is_empty() {
        let frame = Frame {
            plain,
            plain_length: u32::try_from(take_number(&mut data).ok()?).ok()?,
            at,
            stored: u32::try_from(take_number(&mut data).ok()?).ok()?,
        };
        // No frame of ours is larger, compressed or not, and none at all is smaller than its own header and checksum.
        let (larger, stored) = (frame.plain_length.max(frame.stored), frame.stored);
        if frame.plain_length == 0 || stored < 9 || larger as usize > MOST_FRAME {
            return None;
        }
        plain += u64::from(frame.plain_length);
        at += u64::from(frame.stored);
        frames.push(frame);
    }
    (plain == stream && at <= most).then_some(frames)
}

impl Index {
    /// The members, in the order of the stream.
    pub fn members(&self, source: &Arc<Source>) -> io::Result<Members> {
        let (at, end) = (self.members_at, self.members_at + self.members_length);
        let section = Section { source: source.clone(), at, end };
        let decoder = Decoder::with_buffer(BufReader::with_capacity(64 << 10, section))?.single_frame();
        Ok(Members {
            reader: BufReader::with_capacity(64 << 10, decoder),
            path: Vec::new(),
            end: 0,
            stream: self.stream,
        })
    }
}

/// Reads the members of an index one after another.
pub(super) struct Members {
    reader: BufReader<Decoder<'static, BufReader<Section>>>,
    path: Vec<u8>,
    end: u64,
    stream: u64,
}

impl Iterator for Members {
    type Item = io::Result<Member>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.reader.fill_buf() {
            Ok([]) => None,
            Ok(_) => Some(self.read()),
            Err(error) => Some(Err(error)),
        }
    }
}

impl Members {
    fn read(&mut self) -> io::Result<Member> {
        let reader = &mut self.reader;
        let mut tag = [0];
        reader.read_exact(&mut tag)?;
        let [tag] = tag;
        let kind = *LETTERS.get(usize::from(tag & !(SPARSE | INCOMPLETE))).ok_or_else(broken)?;
        let shared = take_number(reader)? as usize;
        if shared > self.path.len() {
            return Err(broken());
        }
        self.path.truncate(shared);
        take_text(reader, &mut self.path)?;
        let blocks = |number: u64| number.checked_mul(BLOCK).ok_or_else(broken);
        let header_offset = self.end.checked_add(blocks(take_number(reader)?)?).ok_or_else(broken)?;
        let data_offset = header_offset.checked_add(blocks(take_number(reader)?)?).ok_or_else(broken)?;
        let mode = take_number(reader)? as u32 & 0o7777;
        let (mut size, mut stored, mut checksum, mut link) = (0, 0, None, Vec::new());
        match kind {
            b'f' => {
                size = take_number(reader)?;
                stored = if tag & SPARSE != 0 { take_number(reader)? } else { size };
                if tag & INCOMPLETE == 0 {
                    let mut digest = [0; 16];
                    reader.read_exact(&mut digest)?;
                    // The canonical form of an XXH3 is a number, big end first.
                    checksum = Digest::from_hex(&format!("{:032x}", u128::from_be_bytes(digest)));
                }
            }
            b'h' | b'l' => take_text(reader, &mut link)?,
            _ => {}
        }
        let sparse = tag & SPARSE != 0;
        let end = stored.checked_next_multiple_of(BLOCK).and_then(|stored| data_offset.checked_add(stored));
        if data_offset == header_offset || end.is_none_or(|end| end > self.stream) {
            return Err(broken());
        }
        let path = self.path.clone();
        let member =
            Member { path, kind, mode, size, link, checksum, sparse, header_offset, data_offset, stored };
        self.end = member.end();
        Ok(member)
    }
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the index is not what its checksum says")
}

/// A number in as few bytes as it needs: seven bits in each, the lowest first, the top bit set in all but the last.
fn number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn take_number(reader: &mut impl Read) -> io::Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        reader.read_exact(&mut byte)?;
        number |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Ok(number);
        }
    }
    Err(broken())
}

fn take_text(reader: &mut impl Read, text: &mut Vec<u8>) -> io::Result<()> {
    let length = take_number(reader)?;
    if text.len() as u64 + length > MOST_PATH as u64 {
        return Err(broken());
    }
    let start = text.len();
    text.resize(start + length as usize, 0);
    reader.read_exact(&mut text[start..])
}

/// Bytes that are kept in memory as long as they are few, so that an archive of any number of files is written in
/// bounded memory.
struct Spill<'a> {
    directory: BorrowedFd<'a>,
    file: Option<OwnedFd>,
    written: u64,
    buffer: Vec<u8>,
}

impl Spill<'_> {
    fn length(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    fn pieces(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        if let Some(file) = &self.file {
            let mut piece = vec![0; 1 << 20];
            let mut at = 0;
            while at < self.written {
                let count = piece.len().min((self.written - at) as usize);
                read_at(file.as_fd(), &mut piece[..count], at)?;
                take(&piece[..count])?;
                at += count as u64;
            }
        }
        take(&self.buffer)
    }

    /// A file that vanishes with us.
    fn nameless(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        match fs::openat(self.directory, c".", flags | OFlags::TMPFILE, mode) {
            // The filesystem (NFS, say) has no such thing.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {}
            other => return Ok(other?),
        }
        let name = format!(".index-{}.ondeck-partial", rustix::process::getpid().as_raw_nonzero());
        let file = fs::openat(self.directory, &*name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
        fs::unlinkat(self.directory, &*name, AtFlags::empty())?;
        Ok(file)
    }
}

impl Write for Spill<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(data);
        if self.buffer.len() >= IN_MEMORY {
            if self.file.is_none() {
                self.file = Some(self.nameless()?);
            }
            let Some(file) = &self.file else { return Ok(data.len()) };
            write_at(file.as_fd(), &self.buffer, self.written)?;
            self.written += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
