//! The tar stream inside an archive, read at any place or from its beginning.

use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs;
use rustix::io::Errno;
use zstd::bulk::Decompressor;

use crate::error::{During, Fault};

/// The most bytes of the stream in one frame, and of a frame when it did not get smaller.
pub(super) const MOST_FRAME: usize = 16 << 20;
/// What is read from a member at a time. A multiple of what the packer puts into a frame of a large file.
pub(super) const PIECE: u64 = 4 << 20;
/// Bytes read at a time where there is no index to read by.
const SEQUENTIAL: usize = 1 << 20;

/// A part of the stream that was compressed on its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Where it begins in the stream.
    pub plain: u64,
    pub plain_length: u32,
    /// Where it begins in the file.
    pub at: u64,
    pub stored: u32,
}

impl Frame {
    fn plain_end(&self) -> u64 {
        self.plain + u64::from(self.plain_length)
    }
}

/// The archive's file.
pub(super) struct Source {
    file: OwnedFd,
    pub length: u64,
    /// Whether it is compressed.
    pub compressed: bool,
    /// Bytes that were read from it.
    read: AtomicU64,
}

impl Source {
    /// Shares the caller's open file.
    pub fn new(file: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        let file = rustix::io::fcntl_dupfd_cloexec(file, 0)?;
        let length = fs::fstat(&file)?.st_size as u64;
        let mut source = Source { file, length, compressed: false, read: AtomicU64::new(0) };
        if length >= 4 {
            let mut magic = [0; 4];
            source.read_at(&mut magic, 0)?;
            // A frame of Zstandard, or one that is to be skipped.
            source.compressed = magic == [0x28, 0xb5, 0x2f, 0xfd]
                || (magic[0] & 0xf0 == 0x50 && magic[1..] == [0x2a, 0x4d, 0x18]);
        }
        Ok(Arc::new(source))
    }

    /// Fills a buffer from this place.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read_at(self.file.as_fd(), buffer, offset)?;
        self.read.fetch_add(buffer.len() as u64, Relaxed);
        Ok(())
    }

    /// How many bytes were read from it.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Relaxed)
    }
}

/// A part of the archive's file as a stream.
pub(super) struct Section {
    pub source: Arc<Source>,
    pub at: u64,
    pub end: u64,
}

impl io::Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        self.source.read_at(&mut buffer[..length], self.at)?;
        self.at += length as u64;
        Ok(length)
    }
}

/// The stream of an archive with an index.
pub(super) struct Stream {
    pub source: Arc<Source>,
    pub frames: Option<Vec<Frame>>,
}

impl Stream {
    /// The frame that holds this byte of the stream.
    pub fn frame_at(&self, offset: u64) -> Option<(usize, &Frame)> {
        let frames = self.frames.as_ref()?;
        let at = frames.partition_point(|frame| frame.plain_end() <= offset);
        frames.get(at).map(|frame| (at, frame))
    }
}

/// What a worker sees of a stream: one piece of it at a time.
#[derive(Default)]
pub(super) struct Window {
    /// The piece of an uncompressed stream, or a frame before it is decompressed.
    raw: Vec<u8>,
    /// The frame that was decompressed last.
    frame: Vec<u8>,
    number: Option<usize>,
    /// A piece that is in several frames.
    joined: Vec<u8>,
    decompressor: Option<Decompressor<'static>>,
    /// Where the last view is.
    last: BufferedPiece,
}

/// A piece in one of the buffers.
#[derive(Clone, Copy, Default)]
enum BufferedPiece {
    #[default]
    Nothing,
    /// The first bytes of `raw`.
    Raw(usize),
    /// From here to there in `frame`.
    Frame(usize, usize),
    /// All of `joined`.
    Joined,
}

impl Window {
    /// A piece of the stream. Its length is what memory it takes.
    pub fn view(&mut self, stream: &Stream, start: u64, end: u64) -> Result<&[u8], Fault> {
        const ACTION: &str = "reading it from the archive";
        let length = (end - start) as usize;
        if stream.frames.is_none() {
            self.raw.resize(self.raw.len().max(length), 0);
            stream.source.read_at(&mut self.raw[..length], start).during(ACTION)?;
            self.last = BufferedPiece::Raw(length);
            return Ok(self.last());
        }
        let ended = || Fault::message(ACTION, "the archive has no such place");
        let (number, frame) = stream.frame_at(start).ok_or_else(ended)?;
        if end <= frame.plain_end() {
            self.decompress(stream, number, frame).during(ACTION)?;
            let from = (start - frame.plain) as usize;
            self.last = BufferedPiece::Frame(from, from + length);
            return Ok(self.last());
        }
        self.joined.clear();
        let mut at = start;
        while at < end {
            let (number, frame) = stream.frame_at(at).ok_or_else(ended)?;
            self.decompress(stream, number, frame).during(ACTION)?;
            let from = (at - frame.plain) as usize;
            let until = frame.plain_end().min(end);
            self.joined.extend_from_slice(&self.frame[from..(until - frame.plain) as usize]);
            at = until;
        }
        self.last = BufferedPiece::Joined;
        Ok(self.last())
    }

    /// What [`Window::view`] returned last.
    fn last(&self) -> &[u8] {
        match self.last {
            BufferedPiece::Nothing => &[],
            BufferedPiece::Raw(length) => &self.raw[..length],
            BufferedPiece::Frame(from, to) => &self.frame[from..to],
            BufferedPiece::Joined => &self.joined,
        }
    }

    fn decompress(&mut self, stream: &Stream, number: usize, frame: &Frame) -> io::Result<()> {
        if self.number == Some(number) {
            return Ok(());
        }
        self.number = None;
        let stored = frame.stored as usize;
        self.raw.resize(self.raw.len().max(stored), 0);
        stream.source.read_at(&mut self.raw[..stored], frame.at)?;
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            none => none.insert(Decompressor::new()?),
        };
        self.frame.clear();
        self.frame.reserve(frame.plain_length as usize);
        decompressor.decompress_to_buffer(&self.raw[..stored], &mut self.frame)?;
        if self.frame.len() != frame.plain_length as usize {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a compressed part has not the length it should",
            ));
        }
        self.number = Some(number);
        Ok(())
    }
}

/// A range of the stream as a reader that hands out what the window shows.
pub(super) struct Range<'a, 'w> {
    stream: &'a Stream,
    window: &'w mut Window,
    at: u64,
    end: u64,
    /// The piece in the window.
    shown: Option<(u64, u64)>,
}

impl<'a, 'w> Range<'a, 'w> {
    pub fn new(stream: &'a Stream, window: &'w mut Window, at: u64, end: u64) -> Self {
        Range { stream, window, at, end, shown: None }
    }
}

impl BufRead for Range<'_, '_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.end {
            return Ok(&[]);
        }
        let start = match self.shown {
            Some((start, end)) if self.at < end => start,
            _ => {
                let mut end = self.end.min(self.at + PIECE);
                // To the end of a frame, so that none is decompressed twice.
                if let Some((_, frame)) = self.stream.frame_at(self.at) {
                    end = end.min(frame.plain_end());
                }
                self.window.view(self.stream, self.at, end).map_err(|fault| fault.source)?;
                self.shown = Some((self.at, end));
                self.at
            }
        };
        Ok(&self.window.last()[(self.at - start) as usize..])
    }

    fn consume(&mut self, count: usize) {
        self.at += count as u64;
    }
}

impl io::Read for Range<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let data = self.fill_buf()?;
        let count = data.len().min(buffer.len());
        buffer[..count].copy_from_slice(&data[..count]);
        self.consume(count);
        Ok(count)
    }
}

/// The stream of any archive from its beginning.
pub(super) fn sequential(source: &Arc<Source>) -> io::Result<Box<dyn BufRead>> {
    let section = Section { source: source.clone(), at: 0, end: source.length };
    let reader = BufReader::with_capacity(SEQUENTIAL, section);
    if !source.compressed {
        return Ok(Box::new(reader));
    }
    let decoder = zstd::stream::read::Decoder::with_buffer(reader)?;
    Ok(Box::new(BufReader::with_capacity(SEQUENTIAL, decoder)))
}

/// Fills a buffer from this place of a file.
pub(super) fn read_at(file: BorrowedFd<'_>, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match rustix::io::pread(file, &mut *buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes all of a buffer to this place of a file.
pub(super) fn write_at(file: BorrowedFd<'_>, mut data: &[u8], mut offset: u64) -> io::Result<()> {
    while !data.is_empty() {
        match rustix::io::pwrite(file, data, offset) {
            Ok(0) => return Err(Errno::NOSPC.into()),
            Ok(count) => {
                data = &data[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
