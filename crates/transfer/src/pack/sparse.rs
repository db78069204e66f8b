//! Holes of a file: where its data is, and a checksum that counts the rest as zeros.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use rustix::fs::{self, SeekFrom, Stat};
use rustix::io::Errno;

use crate::checksum::{CHUNK, CHUNKED_ABOVE, Checksum, Digest, Hasher};
use crate::error::Fault;

/// The smallest hole that is kept. Smaller ones are stored as zeros: their place in the map and one more write each
/// cost more than they save.
const HOLE: u64 = 64 << 10;
/// The most segments in a file's map, which bounds the map to about 2.6 MB. What lies behind is stored in one piece,
/// zeros included.
const MOST_SEGMENTS: usize = 1 << 16;

/// A piece of a file that holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub offset: u64,
    pub length: u64,
}

/// The data of a file with holes, in order; `None` if it has none worth keeping.
pub(super) fn segments(file: BorrowedFd<'_>, stat: &Stat) -> Result<Option<Vec<Segment>>, Fault> {
    let size = stat.st_size as u64;
    if (stat.st_blocks as u64).saturating_mul(512) >= size || size < HOLE {
        return Ok(None);
    }
    let mut segments: Vec<Segment> = Vec::new();
    let mut at = 0;
    while at < size {
        let data = next(file, SeekFrom::Data(at), at, size)?.min(size);
        if data == size {
            break;
        }
        let end = next(file, SeekFrom::Hole(data), size, size)?.min(size);
        let gap_from = segments.last().map_or(0, |last| last.offset + last.length);
        let joins = data - gap_from < HOLE || segments.len() == MOST_SEGMENTS;
        match segments.last_mut() {
            Some(last) if joins => last.length = end - last.offset,
            None if joins => segments.push(Segment { offset: 0, length: end }),
            _ => segments.push(Segment { offset: data, length: end - data }),
        }
        at = end;
    }
    if let Some(last) = segments.last_mut()
        && size - (last.offset + last.length) < HOLE
    {
        last.length = size - last.offset;
    }
    let whole = [Segment { offset: 0, length: size }];
    Ok((segments != whole).then_some(segments))
}

fn next(file: BorrowedFd<'_>, what: SeekFrom, unknown: u64, size: u64) -> Result<u64, Fault> {
    match fs::seek(file, what) {
        Ok(offset) => Ok(offset),
        // Nothing of the kind follows.
        Err(Errno::NXIO) => Ok(size),
        // No such notion here: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(unknown),
        Err(error) => Err(Fault::new("looking for its holes", error)),
    }
}

/// The checksum of a file's content as it passes, in the form that its size calls for (see [`crate::checksum`]): the
/// same that a manifest of the file has.
pub(super) struct ContentHasher {
    size: u64,
    at: u64,
    /// Over the content, or over the current chunk of a large file.
    hasher: Hasher,
    /// Over the checksums of a large file's chunks.
    chain: Option<Hasher>,
}

impl ContentHasher {
    pub fn new(size: u64) -> Self {
        let chain = (size > CHUNKED_ABOVE).then(|| Checksum::Xxh3.hasher());
        ContentHasher { size, at: 0, hasher: Checksum::Xxh3.hasher(), chain }
    }

    /// Takes the next bytes of the content.
    pub fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let piece = data.len().min(self.left_of_chunk() as usize);
            self.hasher.update(&data[..piece]);
            self.advance(piece as u64);
            data = &data[piece..];
        }
    }

    /// Takes zeros up to `offset`.
    pub fn zeros_to(&mut self, offset: u64) {
        while self.at < offset {
            let piece = (offset - self.at).min(self.left_of_chunk());
            match &mut self.chain {
                // A sparse file can have millions of such chunks.
                Some(chain) if piece == CHUNK => {
                    chain.update(hole_digest().as_bytes());
                    self.at += CHUNK;
                }
                _ => {
                    self.hasher.update_zeros(piece);
                    self.advance(piece);
                }
            }
        }
    }

    fn left_of_chunk(&self) -> u64 {
        if self.chain.is_some() { CHUNK - self.at % CHUNK } else { u64::MAX }
    }

    fn advance(&mut self, length: u64) {
        self.at += length;
        if let Some(chain) = &mut self.chain
            && self.at.is_multiple_of(CHUNK)
        {
            let chunk = std::mem::replace(&mut self.hasher, Checksum::Xxh3.hasher());
            chain.update(chunk.finish().as_bytes());
        }
    }

    /// The checksum; what of the size was not given counts as zeros.
    pub fn finish(mut self) -> Digest {
        self.zeros_to(self.size);
        match self.chain {
            Some(mut chain) => {
                if !self.at.is_multiple_of(CHUNK) {
                    chain.update(self.hasher.finish().as_bytes());
                }
                chain.finish()
            }
            None => self.hasher.finish(),
        }
    }
}

/// The checksum of a chunk that is all hole.
fn hole_digest() -> &'static Digest {
    static DIGEST: OnceLock<Digest> = OnceLock::new();
    DIGEST.get_or_init(|| {
        let mut hasher = Checksum::Xxh3.hasher();
        hasher.update_zeros(CHUNK);
        hasher.finish()
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::verify::digest_of;

    #[test]
    fn the_checksum_is_that_of_a_manifest_whatever_the_holes() {
        let file = tempfile::tempfile().unwrap();
        for size in [0, 1, 5 << 20, CHUNKED_ABOVE, CHUNKED_ABOVE + 1, CHUNKED_ABOVE + 2 * CHUNK] {
            file.set_len(size).unwrap();
            let mut hasher = ContentHasher::new(size);
            for start in [100_000, (20 << 20) - 7] {
                if start + 50_000 <= size {
                    let data: Vec<u8> = (0..50_000_u64).map(|n| (n * 7 + start) as u8).collect();
                    rustix::io::pwrite(&file, &data, start).unwrap();
                    hasher.zeros_to(start);
                    hasher.update(&data);
                }
            }
            let expected = digest_of(file.as_fd(), size, Checksum::Xxh3, &mut vec![0; 1 << 20]).unwrap();
            assert_eq!(hasher.finish(), expected, "{size}");
        }
    }

    #[test]
    fn small_holes_are_taken_for_data_and_large_ones_are_found() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let found = |pieces: &[(u64, usize)], size: u64| {
            file.set_len(0).unwrap();
            for (offset, length) in pieces {
                rustix::io::pwrite(&file, &vec![1; *length], *offset).unwrap();
            }
            file.set_len(size).unwrap();
            segments(file.as_fd(), &fs::fstat(&file).unwrap()).unwrap()
        };
        let segment = |offset, length| Segment { offset, length };
        assert_eq!(found(&[], 1000), None);
        assert_eq!(found(&[(0, 4096), (8192, 4096)], 12_288), None);
        assert_eq!(found(&[], 1 << 20), Some(vec![]));
        assert_eq!(
            found(&[(8192, 4096), (1 << 20, 4096)], (1 << 20) + 8192),
            Some(vec![segment(0, 12_288), segment(1 << 20, 8192),])
        );
        assert_eq!(found(&[(0, 4096)], 1 << 20), Some(vec![segment(0, 4096)]));
    }
}
