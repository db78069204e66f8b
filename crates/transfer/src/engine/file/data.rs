//! Reading, hashing and writing a file's data, with its holes.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{self, SeekFrom, Stat};
use rustix::io::Errno;

use super::Copying;
use crate::checksum::{Checksum, Digest, Hasher};
use crate::engine::{Engine, Worker};
use crate::error::{During, Fault};

impl Engine<'_> {
    /// Copies the data of a file that one worker does alone.
    pub(super) fn copy_whole(&self, copy: &Copying, worker: &mut Worker) -> Result<Digest, Fault> {
        let size = copy.stat.st_size as u64;
        if size == 0 {
            return Ok(self.options.checksum.of(b""));
        }
        let mut hasher = None;
        if !is_sparse(&copy.stat) && size <= worker.buffer.len() as u64 && self.throttle.is_none() {
            // The common case, in the fewest system calls: all of the file at once.
            if self.options.checksum == Checksum::None && send_whole(copy, size)? {
                self.counts.written(self.monitor, size);
                return Ok(Digest::default());
            }
            let data = &mut worker.buffer[..size as usize];
            read_exactly(copy.source.as_fd(), data, 0)?;
            let digest = self.options.checksum.of(data);
            write_all(copy.target.as_fd(), data, 0)?;
            self.counts.written(self.monitor, size);
            return Ok(digest);
        }
        if is_sparse(&copy.stat) || size > 1 << 20 {
            fs::ftruncate(&copy.target, size).during("setting its size")?;
        }
        self.copy_range(copy, 0, size, &mut hasher, worker)?;
        Ok(hasher.map_or_else(|| self.options.checksum.of(b""), Hasher::finish))
    }

    /// Copies a range, keeping its holes.
    pub(super) fn copy_range(
        &self,
        copy: &Copying,
        start: u64,
        end: u64,
        hasher: &mut Option<Hasher>,
        worker: &mut Worker,
    ) -> Result<(), Fault> {
        let hasher = hasher.get_or_insert_with(|| self.options.checksum.hasher());
        let piece = self.throttle.as_ref().map_or(usize::MAX, |throttle| throttle.piece());
        let sparse = is_sparse(&copy.stat);
        let mut offset = start;
        while offset < end {
            let data_end = if sparse {
                let data = next_data(copy.source.as_fd(), offset, end)?;
                hasher.update_zeros(data - offset);
                offset = data;
                if offset == end { end } else { next_hole(copy.source.as_fd(), offset, end)? }
            } else {
                end
            };
            while offset < data_end {
                if self.monitor.progress.is_cancelled() {
                    return Err(Fault::new("copying it", Errno::CANCELED));
                }
                let length = worker.buffer.len().min(piece).min((data_end - offset) as usize);
                if let Some(throttle) = &self.throttle {
                    throttle.take(length);
                }
                let data = &mut worker.buffer[..length];
                read_exactly(copy.source.as_fd(), data, offset)?;
                hasher.update(data);
                write_all(copy.target.as_fd(), data, offset)?;
                offset += length as u64;
                self.counts.written(self.monitor, length as u64);
            }
        }
        Ok(())
    }
}

pub(super) fn is_sparse(stat: &Stat) -> bool {
    (stat.st_blocks as u64).saturating_mul(512) < stat.st_size as u64
}

/// The start of the next data at or after `offset`, at most `end`.
pub(super) fn next_data(file: BorrowedFd<'_>, offset: u64, end: u64) -> Result<u64, Fault> {
    match fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) => Ok(data.min(end)),
        // Only a hole follows.
        Err(Errno::NXIO) => Ok(end),
        // No such notion here: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(offset),
        Err(error) => Err(Fault::new("looking for its holes", error)),
    }
}

/// The end of the data that begins at `offset`, at most `end`.
fn next_hole(file: BorrowedFd<'_>, offset: u64, end: u64) -> Result<u64, Fault> {
    match fs::seek(file, SeekFrom::Hole(offset)) {
        Ok(hole) => Ok(hole.min(end)),
        Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(end),
        Err(error) => Err(Fault::new("looking for its holes", error)),
    }
}

/// Has the kernel copy a small file, which then passes through no memory of ours; `false` if it can't between these two.
fn send_whole(copy: &Copying, size: u64) -> Result<bool, Fault> {
    let mut sent = 0;
    while sent < size {
        let left = (size - sent) as usize;
        match fs::sendfile(&copy.target, &copy.source, Some(&mut sent), left) {
            // It became shorter, which the last look at the source will see.
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if sent == 0 => return Ok(false),
            Err(error) => return Err(Fault::new("copying its data", error)),
        }
    }
    Ok(true)
}

fn read_exactly(file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> Result<(), Fault> {
    let mut filled = 0;
    while filled < buffer.len() {
        match rustix::io::pread(file, &mut buffer[filled..], offset + filled as u64) {
            Ok(0) => {
                // It became shorter. The rest is zeros for this attempt, which the last look at the source discards.
                buffer[filled..].fill(0);
                return Ok(());
            }
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("reading it", error)),
        }
    }
    Ok(())
}

fn write_all(file: BorrowedFd<'_>, data: &[u8], offset: u64) -> Result<(), Fault> {
    let mut written = 0;
    while written < data.len() {
        match rustix::io::pwrite(file, &data[written..], offset + written as u64) {
            Ok(0) => return Err(Fault::new("writing it", Errno::NOSPC)),
            Ok(count) => written += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::new("writing it", error)),
        }
    }
    Ok(())
}
