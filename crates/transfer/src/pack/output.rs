//! The archive as it grows: units of the stream are finished in any order and get their places in the right one.
//!
//! A worker that has finished a unit hands it over here. The place of a unit is known when all before it are
//! finished; the worker that finishes the one everybody waits for also writes what had to wait. Writing itself needs
//! no order.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::index::{self, Member};
use super::stream::write_at;
use crate::progress::Monitor;

/// GNU tar reads and writes in records of this size; an archive that is a multiple of it is to everyone's liking.
const RECORD: u64 = 20 * 512;
/// The two blocks of zeros that end a tar stream.
const END_BLOCKS: u64 = 1024;
/// Begins a frame that programs which decompress pass over.
const SKIPPABLE: [u8; 4] = 0x184D_2A50_u32.to_le_bytes();
/// How long a worker waits at most before it looks whether another one has panicked.
const LOOK_UP: Duration = Duration::from_millis(200);

/// A finished unit of the stream.
#[derive(Default)]
pub(super) struct Unit {
    /// The bytes for the file.
    pub bytes: Vec<u8>,
    /// Their length in the stream, before compression.
    pub plain_length: u64,
    /// Length before and after compression of each frame.
    pub frames: Vec<(usize, usize)>,
    /// The members that this unit completes, with offsets relative to its beginning.
    pub members: Vec<Member>,
    /// The large file that the unit is a part of: its members' offsets are relative to the file's header.
    pub part_of: Option<PartOf>,
}

/// A part of a large file.
pub(super) struct PartOf {
    /// Whether its header is in this part.
    pub first: bool,
    /// Where that is in the stream; set when the first part gets its place.
    pub header_offset: Arc<AtomicU64>,
}

struct State<'a> {
    /// The unit whose place comes next.
    next: u64,
    /// Finished units that wait for that one.
    parked: BTreeMap<u64, Unit>,
    /// Units that are finished but not written.
    unwritten: usize,
    /// Where the next unit begins in the stream, and in the file.
    plain: u64,
    at: u64,
    index: index::Writer<'a>,
    failure: Option<io::Error>,
}

/// The archive that is being written.
pub(super) struct Output<'a> {
    file: BorrowedFd<'a>,
    monitor: &'a Monitor<'a>,
    compressed: bool,
    state: Mutex<State<'a>>,
    written: Condvar,
    /// Set when writing failed or a worker panicked: the rest is only passed through.
    stopped: AtomicBool,
    /// Units that may be finished and not written at a time. With as many as there are workers, each of them can run
    /// ahead by one unit of a slow one; the memory is that of as many units again as are being worked on.
    most_unwritten: usize,
    /// Buffers that were written, to be used again: fresh ones cost a page fault for every 4 KiB.
    spare: Mutex<Vec<Vec<u8>>>,
}

/// How large it has become.
pub(super) struct Sizes {
    /// Bytes of the uncompressed stream.
    pub stream: u64,
    /// Bytes of the file.
    pub archive: u64,
}

impl<'a> Output<'a> {
    pub fn new(
        file: BorrowedFd<'a>,
        compressed: bool,
        workers: usize,
        index: index::Writer<'a>,
        monitor: &'a Monitor<'a>,
    ) -> Self {
        Output {
            file,
            monitor,
            compressed,
            state: Mutex::new(State {
                next: 0,
                parked: BTreeMap::new(),
                unwritten: 0,
                plain: 0,
                at: 0,
                index,
                failure: None,
            }),
            written: Condvar::new(),
            stopped: AtomicBool::new(false),
            most_unwritten: workers,
            spare: Mutex::new(Vec::new()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether there is no point in going on.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed) || self.monitor.progress.is_cancelled()
    }

    /// Wakes everyone who waits for a worker that is no more.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
        self.written.notify_all();
    }

    /// A buffer with anything in it.
    pub fn buffer(&self) -> Vec<u8> {
        self.spare.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop().unwrap_or_default()
    }

    fn recycle(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if buffer.capacity() > 0 && spare.len() < self.most_unwritten {
            spare.push(buffer);
        }
    }

    /// Takes a finished unit. Every number must be handed in once, also when nothing came of it.
    ///
    /// Returns when so few units wait to be written that the caller may begin another.
    pub fn finish(&self, number: u64, unit: Unit) {
        let mut state = self.lock();
        state.parked.insert(number, unit);
        state.unwritten += 1;
        let mut placed = Vec::new();
        loop {
            let next = state.next;
            let Some(unit) = state.parked.remove(&next) else { break };
            state.next += 1;
            let at = state.at;
            let bytes = self.place(&mut state, unit);
            placed.push((at, bytes));
        }
        drop(state);
        for (at, bytes) in placed {
            if !self.is_stopped() && !bytes.is_empty() {
                match write_at(self.file, &bytes, at) {
                    Ok(()) => {
                        self.monitor.progress.bytes_written.fetch_add(bytes.len() as u64, Relaxed);
                    }
                    Err(error) => self.fail(error),
                }
            }
            self.recycle(bytes);
            self.lock().unwritten -= 1;
            self.written.notify_all();
        }
        let mut state = self.lock();
        // Whoever waits here holds no unit, so the one that all wait for is in someone's hands.
        while state.unwritten > self.most_unwritten && !self.stopped.load(Relaxed) {
            state =
                self.written.wait_timeout(state, LOOK_UP).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Gives the archive up.
    pub fn fail(&self, error: io::Error) {
        self.lock().failure.get_or_insert(error);
        self.stop();
    }

    /// Gives a unit its place, and its members theirs in the index.
    fn place(&self, state: &mut State<'_>, unit: Unit) -> Vec<u8> {
        let mut base = state.plain;
        if let Some(part) = &unit.part_of {
            if part.first {
                part.header_offset.store(base, Relaxed);
            }
            base = part.header_offset.load(Relaxed);
        }
        for mut member in unit.members {
            member.header_offset += base;
            member.data_offset += base;
            if let Err(error) = state.index.member(&member) {
                state.failure.get_or_insert(error);
                self.stop();
            }
        }
        for (plain, stored) in unit.frames {
            state.index.frame(plain, stored);
        }
        state.plain += unit.plain_length;
        state.at += unit.bytes.len() as u64;
        unit.bytes
    }

    /// Ends the stream and writes the index behind it. `compress` makes a frame of the stream's last bytes.
    pub fn complete(self, compress: &mut dyn FnMut(&[u8]) -> io::Result<Vec<u8>>) -> io::Result<Sizes> {
        let mut state = self.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(failure) = state.failure {
            return Err(failure);
        }
        let (file, progress) = (self.file, self.monitor.progress);
        let mut at = state.at;
        let mut append = |data: &[u8]| {
            write_at(file, data, at)?;
            at += data.len() as u64;
            progress.bytes_written.fetch_add(data.len() as u64, Relaxed);
            Ok(())
        };
        let stream = if self.compressed {
            let stream = (state.plain + END_BLOCKS).next_multiple_of(RECORD);
            let end = vec![0; (stream - state.plain) as usize];
            let frame = compress(&end)?;
            append(&frame)?;
            state.index.frame(end.len(), frame.len());
            let index = state.index.finish(stream)?;
            // A frame can't be larger than this. Without its index, some hundred million members, the archive is
            // still one, only slower to read.
            if let Ok(length) = u32::try_from(index.length()) {
                append(&SKIPPABLE)?;
                append(&length.to_le_bytes())?;
                index.write(&mut append)?;
            }
            stream
        } else {
            let stream = state.plain + END_BLOCKS;
            let index = state.index.finish(stream)?;
            let unpadded = stream + index.length();
            let padding = unpadded.next_multiple_of(RECORD) - unpadded;
            append(&vec![0; (END_BLOCKS + padding) as usize])?;
            index.write(&mut append)?;
            stream
        };
        Ok(Sizes { stream, archive: at })
    }
}
