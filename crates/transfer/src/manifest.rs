//! The manifest: what a copy put where, and with which checksum.
//!
//! It is a text file of lines with tab-separated fields, appended to while the copy runs, so that an interrupted
//! copy can be resumed:
//!
//! ```text
//! # ondeck manifest 1
//! # source /scratch/case/input
//! # target /ram/case/input
//! R   1f0c...                       a run begins, on this boot of the machine
//! f   xxh3-128:99aa...  4096  1700000000.000000000  1700000000.000000000  sub/file  65026:131
//! f   xxh3-128/16MiB:0f3c...  99999999  ...         big            a checksum over chunk checksums
//! d   -  0  ...  sub
//! S                                 everything above is on stable storage
//! ```
//!
//! The fields of an entry: its type (`f` file, `h` further name of a file, `d` directory, `l` symlink, `p` FIFO,
//! `s` socket, `c` and `b` devices, `x` what was recorded proved wrong), checksum, size, mtime and ctime of the *source* in seconds, path. Bytes below
//! 0x20, 0x7f and the backslash are written as `\xHH`; all others, also those that are not UTF-8, as they are.
//! Behind the path of a regular file stand the device and the inode number of the source, if they are known.
//! A later line for the same path replaces an earlier one. A finished run rewrites the file without stale lines.
//!
//! Entries after the last `S` are trusted only on the boot that wrote them: a crash of the machine may have lost
//! their data although the lines survived.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rustix::fs::{FlockOperation, Stat};
use twox_hash::XxHash3_128;

use crate::checksum::{CHUNKED_ABOVE, Checksum, Digest};

const HEADER: &[u8] = b"# ondeck manifest 1\n";

/// One entry of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The type, as in the format's description.
    pub kind: u8,
    /// Which checksum, and its value.
    pub checksum: Option<(Checksum, Digest)>,
    /// Bytes of a regular file, under any of its names.
    pub size: u64,
    /// The source's modification time: seconds, nanoseconds.
    pub mtime: (i64, u32),
    /// The source's change time.
    pub ctime: (i64, u32),
    /// The path relative to the root.
    pub path: Vec<u8>,
    /// Device and inode number of the source, of regular files. A directory that is renamed takes its files to other paths,
    /// and no time of theirs tells.
    pub inode: Option<(u64, u64)>,
}

impl ManifestEntry {
    pub(crate) fn new(kind: u8, checksum: Checksum, digest: Digest, source: &Stat, path: Vec<u8>) -> Self {
        ManifestEntry {
            kind,
            checksum: (!digest.as_bytes().is_empty()).then_some((checksum, digest)),
            size: if matches!(kind, b'f' | b'h') { source.st_size as u64 } else { 0 },
            mtime: mtime(source),
            ctime: (source.st_ctime, source.st_ctime_nsec as u32),
            path,
            inode: matches!(kind, b'f' | b'h').then(|| inode(source)),
        }
    }

    /// Whether the source is still in the state that this entry describes.
    pub(crate) fn describes(&self, source: &Stat) -> bool {
        self.size == source.st_size as u64
            && self.mtime == mtime(source)
            && self.ctime == ({ source.st_ctime }, source.st_ctime_nsec as u32)
    }

    /// Appends the line for this entry.
    pub fn write_to(&self, line: &mut Vec<u8>) {
        line.push(self.kind);
        line.push(b'\t');
        match &self.checksum {
            Some((checksum, digest)) => {
                let chunked = if self.size > CHUNKED_ABOVE { "/16MiB" } else { "" };
                line.extend_from_slice(checksum.name().as_bytes());
                line.extend_from_slice(chunked.as_bytes());
                line.push(b':');
                for byte in digest.as_bytes() {
                    line.extend_from_slice(&hex(*byte));
                }
            }
            None => line.push(b'-'),
        }
        // Writing to a Vec can't fail.
        let _ = write!(
            line,
            "\t{}\t{}.{:09}\t{}.{:09}\t",
            self.size, self.mtime.0, self.mtime.1, self.ctime.0, self.ctime.1
        );
        escape(&self.path, line);
        if let Some((device, inode)) = self.inode {
            let _ = write!(line, "\t{device}:{inode}");
        }
        line.push(b'\n');
    }

    /// Parses a line without its newline.
    pub fn parse(line: &[u8]) -> Option<ManifestEntry> {
        let mut fields = line.splitn(7, |b| *b == b'\t');
        let mut field = || fields.next();
        let kind = match field()? {
            [kind] if b"fhdlpscbx".contains(kind) => *kind,
            _ => return None,
        };
        let checksum = match std::str::from_utf8(field()?).ok()? {
            "-" => None,
            text => {
                let (name, digest) = text.split_once(':')?;
                let checksum = match name.strip_suffix("/16MiB").unwrap_or(name) {
                    "xxh3-128" => Checksum::Xxh3,
                    "blake3" => Checksum::Blake3,
                    _ => return None,
                };
                Some((checksum, Digest::from_hex(digest)?))
            }
        };
        let size = std::str::from_utf8(field()?).ok()?.parse().ok()?;
        let mtime = parse_time(field()?)?;
        let ctime = parse_time(field()?)?;
        let path = unescape(field()?)?;
        let inode = match field() {
            None => None,
            Some(inode) => {
                let (device, inode) = std::str::from_utf8(inode).ok()?.split_once(':')?;
                Some((device.parse().ok()?, inode.parse().ok()?))
            }
        };
        Some(ManifestEntry { kind, checksum, size, mtime, ctime, path, inode })
    }
}

pub(crate) fn mtime(stat: &Stat) -> (i64, u32) {
    (stat.st_mtime, stat.st_mtime_nsec as u32)
}

/// By what a file is told from another one of the same times: device and inode number.
pub(crate) fn inode(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let (seconds, nanoseconds) = std::str::from_utf8(text).ok()?.split_once('.')?;
    Some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
}

fn hex(byte: u8) -> [u8; 2] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]
}

/// Writes a path so that it stays on one line and in one field.
pub fn escape(path: &[u8], line: &mut Vec<u8>) {
    for byte in path {
        match byte {
            0..0x20 | 0x7f | b'\\' => {
                line.extend_from_slice(b"\\x");
                line.extend_from_slice(&hex(*byte));
            }
            _ => line.push(*byte),
        }
    }
}

/// Reads what [`escape`] wrote.
pub fn unescape(text: &[u8]) -> Option<Vec<u8>> {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        if *first != b'\\' {
            path.push(*first);
            rest = tail;
            continue;
        }
        let [b'x', high, low, tail @ ..] = tail else { return None };
        path.push(u8::from_str_radix(std::str::from_utf8(&[*high, *low]).ok()?, 16).ok()?);
        rest = tail;
    }
    Some(path)
}

/// Reads the entries of a manifest, in the order in which they were written; the last one for a path counts.
///
/// # Errors
/// If the file can't be read or is not a manifest.
pub fn read(path: &Path) -> io::Result<impl Iterator<Item = io::Result<ManifestEntry>>> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut header = vec![0; HEADER.len()];
    if reader.read_exact(&mut header).is_err() || header != HEADER {
        return Err(not_a_manifest());
    }
    Ok(reader.split(b'\n').filter_map(|line| match line {
        Ok(line) => ManifestEntry::parse(&line).map(Ok),
        Err(error) => Some(Err(error)),
    }))
}

fn not_a_manifest() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the file exists and is not an Ondeck manifest of version 1")
}

/// What an earlier, interrupted or finished run recorded: 24 bytes for each entry in memory, the rest in the file.
pub(crate) struct Previous {
    file: File,
    /// Hash of the path, offset of the line; sorted by hash.
    index: Vec<(u64, u64, u64)>,
    /// One bit for each entry of `index`: this run found it to be true still.
    confirmed: Vec<AtomicU64>,
}

impl Previous {
    fn load(file: &File, boot: &str) -> io::Result<Previous> {
        let mut reader = BufReader::with_capacity(256 << 10, file);
        let mut index = Vec::new();
        let mut unsynced = Vec::new();
        let mut same_boot = false;
        let mut offset = 0;
        let mut line = Vec::new();
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)? as u64;
            if length == 0 {
                break;
            }
            // A line without its end was cut by a crash.
            if let Some(line) = line.strip_suffix(b"\n") {
                match line {
                    [b'R', b'\t', id @ ..] => same_boot = id == boot.as_bytes(),
                    b"S" => index.append(&mut unsynced),
                    _ => {
                        if let Some(entry) = ManifestEntry::parse(line) {
                            let (high, low) = path_hash(&entry.path);
                            let list = if same_boot { &mut index } else { &mut unsynced };
                            list.push((high, low, offset));
                        }
                    }
                }
            }
            offset += length;
        }
        // Of several lines for one path the last counts.
        index.sort_unstable();
        index.dedup_by(|later, earlier| {
            let same = (later.0, later.1) == (earlier.0, earlier.1);
            if same {
                earlier.2 = later.2;
            }
            same
        });
        index.shrink_to_fit();
        let confirmed = (0..index.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Previous { file: file.try_clone()?, index, confirmed })
    }

    fn position(&self, path: &[u8]) -> Option<usize> {
        let (high, low) = path_hash(path);
        self.index.binary_search_by(|entry| (entry.0, entry.1).cmp(&(high, low))).ok()
    }

    /// The entry of a path, if there is one.
    pub fn find(&self, path: &[u8]) -> Option<ManifestEntry> {
        let offset = self.index[self.position(path)?].2;
        let mut line = vec![0; 512];
        let mut filled = 0;
        loop {
            let read = self.file.read_at(&mut line[filled..], offset + filled as u64).ok()?;
            filled += read;
            if let Some(end) = line[..filled].iter().position(|b| *b == b'\n') {
                // Compared in full: a hash alone must not decide what is not copied.
                return ManifestEntry::parse(&line[..end]).filter(|entry| entry.path == path);
            }
            if read == 0 {
                return None;
            }
            line.resize(line.len() * 2, 0);
        }
    }

    /// This run found the recorded entry in place.
    pub fn confirm(&self, path: &[u8]) {
        if let Some(position) = self.position(path) {
            self.confirmed[position / 64].fetch_or(1 << (position % 64), Relaxed);
        }
    }

    fn is_confirmed_at(&self, path: &[u8], offset: u64) -> bool {
        self.position(path).is_some_and(|position| {
            self.index[position].2 == offset
                && self.confirmed[position / 64].load(Relaxed) & (1 << (position % 64)) != 0
        })
    }
}

fn path_hash(path: &[u8]) -> (u64, u64) {
    let hash = XxHash3_128::oneshot(path);
    ((hash >> 64) as u64, hash as u64)
}

/// A manifest that is being written.
pub(crate) struct Manifest {
    path: PathBuf,
    file: Mutex<File>,
    previous: Option<Previous>,
    /// Where this run's lines begin.
    start: u64,
    /// A line could not be written; the copy is complete but its entry is not.
    failed: AtomicBool,
}

/// Why a manifest can't be opened.
pub(crate) enum OpenError {
    Busy,
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        OpenError::Io(error)
    }
}

impl Manifest {
    /// Opens or makes the manifest of the copy from `source` to `target`, and locks it against another copy.
    ///
    /// A manifest of another source or target is replaced: its entries say nothing about this one.
    pub fn open(path: &Path, source: &Path, target: &Path) -> Result<Manifest, OpenError> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(OpenError::Busy),
            // Some network filesystems have no locks; the target directory is locked as well.
            Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::NOSYS | rustix::io::Errno::NOLCK) => {}
            Err(error) => return Err(OpenError::Io(error.into())),
        }
        let mut head = HEADER.to_vec();
        for (key, value) in [("source", source), ("target", target)] {
            head.extend_from_slice(format!("# {key} ").as_bytes());
            escape(value.as_os_str().as_bytes(), &mut head);
            head.push(b'\n');
        }
        let length = file.metadata()?.len();
        let mut found = vec![0; head.len().min(length as usize)];
        file.read_exact_at(&mut found, 0)?;
        // A prefix of the header is a manifest whose very first write was cut.
        if !found.starts_with(HEADER) && !HEADER.starts_with(&found) {
            return Err(OpenError::Io(not_a_manifest()));
        }
        let boot = boot_id();
        let mut previous = None;
        let mut opening = Vec::new();
        if found == head {
            file.seek(SeekFrom::Start(head.len() as u64))?;
            let mut last = [b'\n'];
            file.read_exact_at(&mut last, length - 1)?;
            if last != *b"\n" {
                opening.push(b'\n');
            }
            file.rewind()?;
            previous = Some(Previous::load(&file, &boot)?).filter(|previous| !previous.index.is_empty());
        } else {
            file.set_len(0)?;
            opening = head;
        }
        opening.extend_from_slice(format!("R\t{boot}\n").as_bytes());
        file.write_all(&opening)?;
        let start = file.metadata()?.len();
        Ok(Manifest {
            path: path.to_owned(),
            file: Mutex::new(file),
            previous,
            start,
            failed: AtomicBool::new(false),
        })
    }

    pub fn previous(&self) -> Option<&Previous> {
        self.previous.as_ref()
    }

    fn append(&self, lines: &[u8]) {
        let mut file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if file.write_all(lines).is_err() {
            self.failed.store(true, Relaxed);
        }
    }

    /// Takes back what is recorded of a path.
    pub fn disown(&self, path: &[u8]) {
        let entry = ManifestEntry {
            kind: b'x',
            checksum: None,
            size: 0,
            mtime: (0, 0),
            ctime: (0, 0),
            path: path.to_vec(),
            inode: None,
        };
        let mut line = Vec::new();
        entry.write_to(&mut line);
        // An entry that is not synced counts within this boot only; one that is taken back must stay so.
        line.extend_from_slice(b"S\n");
        self.append(&line);
    }

    /// The target is synced: what was written so far survives a crash of the machine.
    ///
    /// Stale lines of earlier runs are dropped by rewriting the file, unless the run was `partial`, in which case
    /// what it did not come across may be needed again.
    pub fn synced(&self, partial: bool) -> io::Result<()> {
        if self.failed.load(Relaxed) {
            return Err(io::Error::other("not all of it could be written (is its filesystem full?)"));
        }
        self.append(b"S\n");
        if !partial && self.previous.is_some() {
            self.rewrite()?;
        }
        self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).sync_data()
    }

    fn rewrite(&self) -> io::Result<()> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let mut file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut temporary = self.path.clone().into_os_string();
        temporary.push(".new");
        let temporary = PathBuf::from(temporary);
        let new = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        let mut writer = BufWriter::with_capacity(256 << 10, new);
        file.rewind()?;
        let mut reader = BufReader::with_capacity(256 << 10, &*file);
        let mut offset = 0;
        let mut line = Vec::new();
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)? as u64;
            if length == 0 {
                break;
            }
            let keep = offset >= self.start
                || line.starts_with(b"#")
                || line
                    .strip_suffix(b"\n")
                    .and_then(ManifestEntry::parse)
                    .is_some_and(|entry| previous.is_confirmed_at(&entry.path, offset));
            if keep {
                writer.write_all(&line)?;
            }
            offset += length;
        }
        let new = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        new.sync_data()?;
        std::fs::rename(&temporary, &self.path)?;
        *file = new;
        Ok(())
    }
}

/// A worker's lines that are not in the file yet.
///
/// They are written after a few thousand bytes or a twentieth of a second, whichever comes first: what a killed copy
/// did in that time is copied again.
pub(crate) struct Lines {
    buffer: Vec<u8>,
    since: std::time::Instant,
}

impl Lines {
    const MOST_BYTES: usize = 16 << 10;
    const LONGEST: std::time::Duration = std::time::Duration::from_millis(50);

    pub fn new() -> Self {
        Lines { buffer: Vec::new(), since: std::time::Instant::now() }
    }

    pub fn push(&mut self, manifest: Option<&Manifest>, entry: &ManifestEntry) {
        if let Some(manifest) = manifest {
            entry.write_to(&mut self.buffer);
            if self.buffer.len() >= Self::MOST_BYTES || self.since.elapsed() >= Self::LONGEST {
                self.flush(manifest);
            }
        }
    }

    /// Called between items.
    pub fn flush_if_old(&mut self, manifest: Option<&Manifest>) {
        if let Some(manifest) = manifest
            && !self.buffer.is_empty()
            && self.since.elapsed() >= Self::LONGEST
        {
            self.flush(manifest);
        }
    }

    pub fn flush(&mut self, manifest: &Manifest) {
        if !self.buffer.is_empty() {
            manifest.append(&self.buffer);
            self.buffer.clear();
        }
        self.since = std::time::Instant::now();
    }
}

fn boot_id() -> String {
    // Without it (no /proc) no boot is ever "the same", so unsynced entries are copied again: slow, but safe.
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| format!("unknown-{}", std::process::id()), |id| id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &[u8]) -> ManifestEntry {
        ManifestEntry {
            kind: b'f',
            checksum: Some((Checksum::Xxh3, Checksum::Xxh3.of(path))),
            size: 7,
            mtime: (-5, 999_999_999),
            ctime: (1_700_000_000, 1),
            path: path.to_vec(),
            inode: Some((65_026, u64::MAX)),
        }
    }

    fn line(entry: &ManifestEntry) -> Vec<u8> {
        let mut line = Vec::new();
        entry.write_to(&mut line);
        line
    }

    #[test]
    fn a_record_survives_being_written_whatever_bytes_its_path_holds() {
        for path in [&b"plain"[..], b"tab\there", b"new\nline", b"back\\slash\\x41", b"\xff\xfe", b"\x7f\x01"]
        {
            let entry = entry(path);
            let line = line(&entry);
            assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
            assert_eq!(ManifestEntry::parse(&line[..line.len() - 1]), Some(entry.clone()));
            // Without the inode, as former versions wrote it.
            let former = &line[..line.iter().rposition(|b| *b == b'\t').unwrap()];
            assert_eq!(ManifestEntry::parse(former), Some(ManifestEntry { inode: None, ..entry }));
        }
    }

    #[test]
    fn unsynced_records_of_another_boot_are_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let text = [
            HEADER.to_vec(),
            b"# source /s\n# target /t\nR\tother-boot\n".to_vec(),
            line(&entry(b"synced")),
            b"S\n".to_vec(),
            line(&entry(b"unsynced")),
            format!("R\t{}\n", boot_id()).into_bytes(),
            line(&entry(b"this-boot")),
            b"f\ttorn".to_vec(),
        ];
        std::fs::write(&path, text.concat()).unwrap();
        let Ok(manifest) = Manifest::open(&path, Path::new("/s"), Path::new("/t")) else { panic!() };
        let previous = manifest.previous().unwrap();
        assert!(previous.find(b"synced").is_some() && previous.find(b"this-boot").is_some());
        assert!(previous.find(b"unsynced").is_none() && previous.find(b"torn").is_none());
        previous.confirm(b"synced");
        manifest.append(&line(&entry(b"new")));
        manifest.synced(false).unwrap();
        let paths: Vec<_> = read(&path).unwrap().map(|r| r.unwrap().path).collect();
        assert_eq!(paths, [b"synced".to_vec(), b"new".to_vec()]);
    }

    #[test]
    fn a_file_that_is_not_a_manifest_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("thesis.tex");
        std::fs::write(&path, "\\documentclass").unwrap();
        assert!(matches!(Manifest::open(&path, Path::new("/s"), Path::new("/t")), Err(OpenError::Io(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "\\documentclass");
    }

    #[test]
    fn a_manifest_of_another_target_is_begun_anew_and_two_copies_cannot_share_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let Ok(first) = Manifest::open(&path, Path::new("/s"), Path::new("/t")) else { panic!() };
        assert!(matches!(Manifest::open(&path, Path::new("/s"), Path::new("/t")), Err(OpenError::Busy)));
        first.append(&line(&entry(b"x")));
        drop(first);
        let Ok(second) = Manifest::open(&path, Path::new("/s"), Path::new("/other")) else { panic!() };
        assert!(second.previous().is_none());
    }
}
