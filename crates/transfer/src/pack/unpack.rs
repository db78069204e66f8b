//! Unpacking by the index: one thread reads it and makes the directories, workers make the entries, each where it
//! finds its member.
//!
//! Hard links are made when all files are there, directories get their attributes and names when all entries are.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{self, AtFlags, Stat};

use super::PackError;
use super::directories::{LastOpened, TargetDirectories, TargetDirectory, checked, split};
use super::header::{Globals, Header, MOST_RECORDS};
use super::index::{Index, Member};
use super::restore::{READING, Restorer, Spot};
use super::sparse::{ContentHasher, Segment};
use super::stream::{Range, Source, Stream, Window};
use crate::checksum::{CHUNK, CHUNKED_ABOVE, Checksum, Digest};
use crate::error::{During, Fault};

/// Bytes of the stream that are handed out together. A larger member is alone, and is read piece by piece.
const GROUP: u64 = 4 << 20;
/// What may lie between two members that are read together: a hard link or two, but not a file that nobody wants.
const GAP: u64 = 64 << 10;
/// The most members of a group: with their paths they wait in memory.
const MOST_MEMBERS: usize = 4096;

/// Which paths are unpacked: all, or some with what they hold.
pub(super) struct Selection(Option<HashMap<Vec<u8>, bool>>);

impl Selection {
    /// Paths as a user writes them; `None` means all.
    pub fn new(only: Option<&[std::path::PathBuf]>) -> Result<Self, (Vec<u8>, Fault)> {
        use std::os::unix::ffi::OsStrExt;
        let Some(only) = only else { return Ok(Selection(None)) };
        let mut paths = HashMap::new();
        for path in only {
            let path = path.as_os_str().as_bytes();
            paths.insert(checked(path).map_err(|fault| (path.to_vec(), fault))?, false);
        }
        Ok(Selection(Some(paths)))
    }

    pub fn wants(&mut self, path: &[u8]) -> bool {
        let Some(paths) = &mut self.0 else { return true };
        let mut end = path.len();
        loop {
            if let Some(found) = paths.get_mut(&path[..end]) {
                *found = true;
                return true;
            }
            if end == 0 {
                return false;
            }
            end = path[..end].iter().rposition(|b| *b == b'/').unwrap_or(0);
        }
    }

    /// Paths that nothing in the archive had.
    pub fn missed(self) -> Vec<Vec<u8>> {
        let paths = self.0.unwrap_or_default();
        paths.into_iter().filter(|(_, found)| !found).map(|(path, _)| path).collect()
    }
}

/// A member that is to be made.
struct UnpackItem {
    member: Member,
    /// Where: of a directory, itself.
    directory: Arc<TargetDirectory>,
    /// The path to be made, when it is not the member's own.
    path: Option<Vec<u8>>,
}

impl UnpackItem {
    fn path(&self) -> &[u8] {
        self.path.as_deref().unwrap_or(&self.member.path)
    }
}

/// What a worker does in one go.
enum UnpackBatch {
    /// Members that stand together in the stream.
    Group(Vec<UnpackItem>),
    /// A chunk of a large file.
    Chunk(Arc<LargeFile>, u64),
}

/// A large file that several workers unpack.
struct LargeFile {
    item: UnpackItem,
    made: OnceLock<Option<Made>>,
    /// Chunks that are not done; whoever does the last one completes the file.
    left: AtomicU64,
    digests: Mutex<Vec<Digest>>,
    fault: OnceLock<Fault>,
}

/// What the first worker makes of it.
struct Made {
    file: OwnedFd,
    created: Stat,
    header: Header,
    working: CString,
}

/// A worker's own state.
#[derive(Default)]
struct Worker {
    window: Window,
    opened: LastOpened,
}

/// What unpacking by an index needs.
pub(super) struct Unpacker<'a> {
    pub restorer: &'a Restorer<'a>,
    pub stream: Stream,
    pub threads: usize,
}

impl Unpacker<'_> {
    /// Unpacks what is selected. Directories are left to be completed.
    pub fn run(
        &self,
        index: &Index,
        source: &Arc<Source>,
        selection: &mut Selection,
        directories: &mut TargetDirectories<'_>,
        read_error: &dyn Fn(std::io::Error) -> PackError,
    ) -> Result<(), PackError> {
        let mut links = Vec::new();
        self.with_workers(|feeder| {
            for member in index.members(source).map_err(read_error)? {
                if self.restorer.monitor.progress.is_cancelled() {
                    break;
                }
                let member = member.map_err(read_error)?;
                self.member(member, selection, directories, &mut links, feeder);
            }
            Ok(())
        })?;
        if !links.is_empty() {
            self.links(links, index, source, selection, directories, read_error)?;
        }
        Ok(())
    }

    /// Runs `feed` while workers do what it hands out, and returns when all is done.
    fn with_workers(
        &self,
        feed: impl FnOnce(&mut Feeder<'_>) -> Result<(), PackError>,
    ) -> Result<(), PackError> {
        // One piece of work for each worker waits, so that none has to wait for the index. What waits are names.
        let (send, receive) = sync_channel(self.threads);
        let receive = Arc::new(Mutex::new(receive));
        std::thread::scope(|scope| {
            let mut started = 0;
            for number in 0..self.threads {
                let receive = receive.clone();
                let thread = std::thread::Builder::new().name(format!("unpack-{number}"));
                started += usize::from(thread.spawn_scoped(scope, move || self.work(&receive)).is_ok());
            }
            let alone = (started == 0).then(|| (receive, Worker::default()));
            let mut feeder =
                Feeder { send, alone, compressed: &self.stream, items: Vec::new(), start: 0, end: 0 };
            feed(&mut feeder)?;
            feeder.flush(self);
            Ok(())
        })
    }

    /// Takes one member of the index.
    fn member(
        &self,
        mut member: Member,
        selection: &mut Selection,
        directories: &mut TargetDirectories<'_>,
        links: &mut Vec<(Vec<u8>, Vec<u8>, u64)>,
        feeder: &mut Feeder<'_>,
    ) {
        let progress = self.restorer.monitor.progress;
        let plain = checked(&member.path).and_then(|path| {
            // The packer writes no other.
            if path == member.path {
                Ok(())
            } else {
                Err(Fault::message("unpacking it", "its path is not plain"))
            }
        });
        if let Err(fault) = plain {
            // What nobody asked for need not be told.
            if selection.0.is_none() {
                self.restorer.failed(&member.path, fault);
            }
            return;
        }
        if !selection.wants(&member.path) {
            return;
        }
        if member.kind != b'd' {
            progress.entries_found.fetch_add(1, Relaxed);
            progress.bytes_found.fetch_add(member.size, Relaxed);
        }
        let path = &member.path[..];
        let placed = if member.kind == b'd' {
            directories.at(path, true)
        } else {
            directories.claim(path, member.kind == b'l').and_then(|()| directories.at(split(path).0, false))
        };
        let directory = match placed {
            Ok(directory) => directory,
            Err(fault) => return self.restorer.failed(path, fault),
        };
        match member.kind {
            b'h' => {
                if let Err(fault) = directories.keep(path).and_then(|()| directories.keep(&member.link)) {
                    return self.restorer.failed(path, fault);
                }
                let link = std::mem::take(&mut member.link);
                links.push((member.path, link, member.header_offset));
            }
            b'f' if member.checksum.is_none() => {
                let why = "its content could not be read to its end when it was packed";
                self.restorer.failed(path, Fault::message("unpacking it", why));
            }
            _ => feeder.take(self, UnpackItem { member, directory, path: None }),
        }
    }

    /// Makes the hard links. The first name of a file may be one that is not selected: then its content goes to the
    /// first of the selected names.
    fn links(
        &self,
        links: Vec<(Vec<u8>, Vec<u8>, u64)>,
        index: &Index,
        source: &Arc<Source>,
        selection: &mut Selection,
        directories: &mut TargetDirectories<'_>,
        read_error: &dyn Fn(std::io::Error) -> PackError,
    ) -> Result<(), PackError> {
        let mut stand_in: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        if selection.0.is_some() {
            for (path, first, _) in &links {
                if !selection.wants(first) {
                    stand_in.entry(first.clone()).or_insert_with(|| path.clone());
                }
            }
        }
        if !stand_in.is_empty() {
            self.with_workers(|feeder| {
                for member in index.members(source).map_err(read_error)? {
                    let member = member.map_err(read_error)?;
                    if self.restorer.monitor.progress.is_cancelled() {
                        break;
                    }
                    if let Some(path) = stand_in.get(&member.path)
                        && (member.checksum.is_some() || !matches!(member.kind, b'd' | b'h' | b'f'))
                    {
                        match directories.at(split(path).0, false) {
                            Ok(directory) => {
                                feeder.take(self, UnpackItem { directory, path: Some(path.clone()), member })
                            }
                            Err(fault) => self.restorer.failed(path, fault),
                        }
                    }
                }
                Ok(())
            })?;
        }
        let (mut opened, mut first_opened) = (LastOpened::default(), LastOpened::default());
        for (path, first, offset) in links {
            if self.restorer.monitor.progress.is_cancelled() {
                break;
            }
            let first = stand_in.get(&first).unwrap_or(&first);
            if *first == path {
                continue;
            }
            if let Err(fault) =
                make_link(self.restorer, directories, &path, first, offset, (&mut opened, &mut first_opened))
            {
                self.restorer.failed(&path, fault);
            }
        }
        Ok(())
    }

    fn work(&self, receive: &Mutex<Receiver<UnpackBatch>>) {
        let mut worker = Worker::default();
        loop {
            let next = receive.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
            let Ok(work) = next else { break };
            self.one(work, &mut worker);
        }
    }

    fn one(&self, work: UnpackBatch, worker: &mut Worker) {
        let cancelled = self.restorer.monitor.progress.is_cancelled();
        match work {
            UnpackBatch::Group(items) if !cancelled => self.group(&items, worker),
            UnpackBatch::Group(_) => {}
            UnpackBatch::Chunk(file, chunk) => self.chunk(&file, chunk, worker),
        }
    }

    fn group(&self, items: &[UnpackItem], worker: &mut Worker) {
        let [first, .., last] = items else {
            return items.iter().for_each(|item| self.single(item, worker));
        };
        let start = first.member.header_offset;
        let view = match worker.window.view(&self.stream, start, last.member.end()) {
            Ok(view) => view,
            Err(fault) => {
                for item in items {
                    let source = std::io::Error::new(fault.source.kind(), fault.source.to_string());
                    self.failed(item, Fault { action: fault.action, source });
                }
                return;
            }
        };
        for item in items {
            if self.restorer.monitor.progress.is_cancelled() {
                return;
            }
            let at = |offset: u64| (offset - start) as usize;
            let member = &item.member;
            let data = at(member.data_offset);
            match self.read(member, &view[at(member.header_offset)..data]) {
                Ok(header) => {
                    let mut data = &view[data..data + member.stored as usize];
                    self.make(item, header, &mut data, &mut worker.opened);
                }
                Err(fault) => self.failed(item, fault),
            }
        }
    }

    /// A member that is alone; it may be larger than memory.
    fn single(&self, item: &UnpackItem, worker: &mut Worker) {
        match self.header(&item.member, &mut worker.window) {
            Ok(header) => {
                let at = item.member.data_offset;
                let mut data = Range::new(&self.stream, &mut worker.window, at, at + item.member.stored);
                self.make(item, header, &mut data, &mut worker.opened);
            }
            Err(fault) => self.failed(item, fault),
        }
    }

    fn header(&self, member: &Member, window: &mut Window) -> Result<Header, Fault> {
        if member.data_offset - member.header_offset > 2 * MOST_RECORDS {
            return Err(Fault::message(READING, "its header is too large"));
        }
        let view = window.view(&self.stream, member.header_offset, member.data_offset)?;
        self.read(member, view)
    }

    /// A member's header, as far as it is followed.
    fn read(&self, member: &Member, view: &[u8]) -> Result<Header, Fault> {
        let mut header = read_header(member, view)?;
        self.restorer.trust.narrow(&mut header);
        Ok(header)
    }

    fn make(
        &self,
        item: &UnpackItem,
        header: Header,
        data: &mut dyn std::io::BufRead,
        opened: &mut LastOpened,
    ) {
        if header.kind == b'd' {
            let _ = item.directory.attributes.set((header.attributes, header.lost));
            return;
        }
        let path = item.path();
        let name = CString::new(split(path).1).unwrap_or_default(); // `checked` has seen it
        let spot = opened.open(self.restorer.target, &item.directory).map(|dir| Spot {
            directory: &item.directory,
            dir,
            name: &name,
            offset: item.member.header_offset,
        });
        self.restorer.entry(path, spot, &header, data, item.member.checksum.as_ref());
    }

    fn failed(&self, item: &UnpackItem, fault: Fault) {
        self.restorer.failed(item.path(), fault);
    }

    fn chunk(&self, file: &LargeFile, chunk: u64, worker: &mut Worker) {
        let member = &file.item.member;
        let cancelled = self.restorer.monitor.progress.is_cancelled();
        let made = file.made.get_or_init(|| match self.begin_large(file, worker) {
            Ok(made) => Some(made),
            Err(fault) => {
                let _ = file.fault.set(fault);
                None
            }
        });
        if let Some(made) = made
            && file.fault.get().is_none()
            && !cancelled
        {
            let (start, end) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(member.size));
            let at = member.data_offset;
            let mut data = Range::new(&self.stream, &mut worker.window, at + start, at + end);
            let mut hasher = Some(ContentHasher::new(end - start));
            let segment = Segment { offset: start, length: end - start };
            match self.restorer.pieces(made.file.as_fd(), segment, &mut data, &mut hasher) {
                Ok(()) => {
                    let digest = hasher.map(ContentHasher::finish).unwrap_or_default();
                    file.digests.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[chunk as usize] =
                        digest;
                }
                Err(fault) => {
                    let _ = file.fault.set(fault);
                }
            }
        }
        if file.left.fetch_sub(1, std::sync::atomic::Ordering::AcqRel) == 1 {
            self.finish_large(file, worker);
        }
    }

    fn begin_large(&self, file: &LargeFile, worker: &mut Worker) -> Result<Made, Fault> {
        let header = self.header(&file.item.member, &mut worker.window)?;
        let name = CString::new(split(file.item.path()).1).during("creating it")?;
        let dir = worker.opened.open(self.restorer.target, &file.item.directory)?;
        let spot = Spot {
            directory: &file.item.directory,
            dir,
            name: &name,
            offset: file.item.member.header_offset,
        };
        let working = spot.working_name();
        let (fd, created) = self.restorer.create(&spot, &working, &header)?;
        Ok(Made { file: fd, created, header, working })
    }

    fn finish_large(&self, file: &LargeFile, worker: &mut Worker) {
        let path = file.item.path();
        let outcome = (|| {
            let name = CString::new(split(path).1).during("creating it")?;
            let dir = worker.opened.open(self.restorer.target, &file.item.directory)?;
            let spot = Spot {
                directory: &file.item.directory,
                dir,
                name: &name,
                offset: file.item.member.header_offset,
            };
            let made = file.made.get().and_then(Option::as_ref);
            let cancelled = self.restorer.monitor.progress.is_cancelled();
            let (Some(made), None, false) = (made, file.fault.get(), cancelled) else {
                if let Some(made) = made {
                    let _ = fs::unlinkat(dir, &*made.working, AtFlags::empty());
                }
                return match file.fault.get() {
                    Some(fault) => {
                        let source = std::io::Error::new(fault.source.kind(), fault.source.to_string());
                        Err(Fault { action: fault.action, source })
                    }
                    None => Err(Fault::new("unpacking it", rustix::io::Errno::CANCELED)),
                };
            };
            let digests = file.digests.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let found = Checksum::Xxh3.of_chunks(&digests);
            let checksums = file.item.member.checksum.as_ref().map(|expected| (expected, found));
            let fd = made.file.as_fd();
            let applied =
                self.restorer.complete(&spot, &made.working, fd, &made.created, &made.header, checksums)?;
            self.restorer.finished(path, &made.header, applied);
            Ok(())
        })();
        if let Err(fault) = outcome
            && !self.restorer.monitor.progress.is_cancelled()
        {
            self.restorer.failed(path, fault);
        }
    }
}

/// Makes one hard link; the outer result is about its place, the link's own failure is reported.
pub(super) fn make_link(
    restorer: &Restorer<'_>,
    directories: &mut TargetDirectories<'_>,
    path: &[u8],
    first: &[u8],
    offset: u64,
    (opened, first_opened): (&mut LastOpened, &mut LastOpened),
) -> Result<(), Fault> {
    let first = checked(first)?;
    let (first_parent, first_name) = split(&first);
    let first_name = CString::new(first_name).during("linking it")?;
    if first_name.is_empty() {
        return Err(Fault::message("linking it", "it is to be another name of a directory"));
    }
    let (parent, name) = split(path);
    let name = CString::new(name).during("linking it")?;
    let directory = directories.at(parent, false)?;
    let first_directory = directories.at(first_parent, false)?;
    let dir = opened.open(restorer.target, &directory)?;
    let first_dir = first_opened.open(restorer.target, &first_directory)?;
    restorer.hard_link(
        path,
        &Spot { directory: &directory, dir, name: &name, offset },
        &first,
        first_dir,
        &first_name,
    );
    Ok(())
}

/// The header at a member's place, if it is the member's.
fn read_header(member: &Member, mut view: &[u8]) -> Result<Header, Fault> {
    let differs =
        || Fault::message(READING, "what is at its place is not what the index says: the archive is damaged");
    let header = Header::read(&mut view, &mut Globals::default()).during(READING)?.ok_or_else(differs)?;
    let path = checked(&header.path)?;
    let same = path == member.path
        && header.kind == member.kind
        && header.size == member.size
        && header.stored == member.stored
        && view.is_empty();
    if same { Ok(header) } else { Err(differs()) }
}

/// Gathers members that are read together.
struct Feeder<'a> {
    send: SyncSender<UnpackBatch>,
    /// No thread could be started: the feeder does the work as well.
    alone: Option<(Arc<Mutex<Receiver<UnpackBatch>>>, Worker)>,
    compressed: &'a Stream,
    items: Vec<UnpackItem>,
    /// The range of the stream that they may be in.
    start: u64,
    end: u64,
}

impl Feeder<'_> {
    fn take(&mut self, unpacker: &Unpacker<'_>, item: UnpackItem) {
        let member = &item.member;
        if member.kind == b'f' && !member.sparse && member.size > CHUNKED_ABOVE {
            self.flush(unpacker);
            return self.large(unpacker, item);
        }
        let (from, to) = (member.header_offset, member.end());
        let joins = match self.compressed.frame_at(from) {
            // One frame is decompressed once, whatever of it is wanted.
            Some((_, frame)) => {
                let end = frame.plain + u64::from(frame.plain_length);
                let joins = from >= self.start && to <= self.end;
                if !joins {
                    self.flush(unpacker);
                    (self.start, self.end) = (frame.plain, end);
                }
                to <= end
            }
            None => {
                let follows = self.items.last().is_some_and(|last| from - last.member.end() <= GAP);
                if !follows || to - self.start > GROUP {
                    self.flush(unpacker);
                    self.start = from;
                }
                to - from <= GROUP
            }
        };
        if self.items.len() == MOST_MEMBERS {
            self.flush(unpacker);
            if self.compressed.frames.is_none() {
                self.start = from;
            }
        }
        self.items.push(item);
        if !joins {
            self.flush(unpacker);
            self.end = 0;
        }
    }

    fn large(&mut self, unpacker: &Unpacker<'_>, item: UnpackItem) {
        let chunks = item.member.size.div_ceil(CHUNK);
        let file = Arc::new(LargeFile {
            item,
            made: OnceLock::new(),
            left: AtomicU64::new(chunks),
            // Its data is in the stream, so it can't be larger than that.
            digests: Mutex::new(vec![Digest::default(); chunks as usize]),
            fault: OnceLock::new(),
        });
        for chunk in 0..chunks {
            self.send(unpacker, UnpackBatch::Chunk(file.clone(), chunk));
        }
    }

    fn flush(&mut self, unpacker: &Unpacker<'_>) {
        if !self.items.is_empty() {
            let items = std::mem::take(&mut self.items);
            self.send(unpacker, UnpackBatch::Group(items));
        }
    }

    fn send(&mut self, unpacker: &Unpacker<'_>, work: UnpackBatch) {
        // It fails only when every worker has panicked, which the end of their scope tells.
        let _ = self.send.send(work);
        if let Some((receive, worker)) = &mut self.alone {
            let next = receive.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).try_recv();
            if let Ok(work) = next {
                unpacker.one(work, worker);
            }
        }
    }
}
