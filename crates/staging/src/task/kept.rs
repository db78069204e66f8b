//! What a RAM disk keeps from the fill to the end, beside the job's data: whichever node brings the results home finds it
//! there.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::{RAM_DISK, SCRATCH};
use crate::merge_back::{Baseline, Before, Mechanism, Ours, read_ours, write_ours};

/// Its directory, the user's alone. Jobs are shown directories beside it.
const KEPT: &str = ".ondeck";

/// How the kind of a note begins that is a directory, named by an inode.
const TOP: &str = "top-";

/// A RAM disk with less room than this takes no more notes of ours.
const ROOM: u64 = 64 << 20;

const VERSION: u32 = 1;

/// The longest note of one directory.
const LONGEST_NOTE: u64 = 64 << 10;

/// What is kept of one directory, beside its baseline.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    version: u32,
    /// When the job was shown it, by the clock of the disk's filesystem.
    since: (i64, i64),
    /// Whether what was on disk was copied into the RAM disk.
    mirror: bool,
}

/// An output directory as it was when the fill was done.
pub struct Filled {
    /// When that was, by the clock of the disk's filesystem.
    pub since: (i64, i64),
    /// How its results come home.
    pub mechanism: Mechanism,
    /// What the fill, and catching up, have put there.
    pub baseline: Baseline,
    /// What the job itself had written to disk, as far as it was copied from there.
    pub ours: Ours,
}

fn path(name: &str, kind: &str) -> PathBuf {
    Path::new(RAM_DISK).join(KEPT).join(format!("{name}.{kind}"))
}

/// Makes the directory.
pub fn prepare() -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(Path::new(RAM_DISK).join(KEPT)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// The manifest of the fill of a directory.
pub fn manifest_in(name: &str) -> PathBuf {
    path(name, "in.manifest")
}

/// The manifest of bringing a directory home: in memory if the job has filled the RAM disk.
pub fn manifest_out(name: &str) -> PathBuf {
    let room = rustix::fs::statvfs(RAM_DISK).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    if room >= ROOM && prepare().is_ok() { path(name, "out.manifest") } else { manifest_aside(name) }
}

/// The manifest of bringing a directory home, in memory: nothing is written to the RAM disk.
pub fn manifest_aside(name: &str) -> PathBuf {
    Path::new(SCRATCH).join(format!("{name}.out.manifest"))
}

/// What counts if nothing was remembered: everything on disk was changed by somebody else, so nothing of it is replaced
/// or deleted.
pub fn nothing() -> Filled {
    Filled {
        since: (i64::MIN, 0),
        mechanism: Mechanism::Bind,
        baseline: Baseline::default(),
        ours: Ours::new(),
    }
}

/// What is known on a server that is salvaged from, which may lack the notes: the inode of the directory on disk is the name of
/// a directory of ours, and these are on every server.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::NotFound`] if nothing was noted, as by a former version.
pub fn recall_top(name: &str) -> io::Result<Filled> {
    let found = tops(name)?;
    let (_, inode) = found.first().ok_or(io::ErrorKind::NotFound)?;
    let baseline = Baseline::of_disk(std::sync::Arc::new(Before::of_top(*inode)));
    Ok(Filled { baseline, ..nothing() })
}

/// The directories that name the inode of a directory on disk: their paths, and that inode.
fn tops(name: &str) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    let prefix = format!("{name}.{TOP}");
    for entry in fs::read_dir(Path::new(RAM_DISK).join(KEPT))? {
        let entry = entry?;
        let inode = entry.file_name().to_str().and_then(|name| name.strip_prefix(&prefix)?.parse().ok());
        found.extend(inode.map(|inode| (entry.path(), inode)));
    }
    Ok(found)
}

fn forget_tops(name: &str) -> io::Result<()> {
    match tops(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) => found.iter().try_for_each(|(path, _)| fs::remove_dir(path)),
    }
}

/// Forgets that a directory was filled: it is about to be, again.
pub fn forget(name: &str) -> io::Result<()> {
    forget_tops(name)?;
    ["json", "ours", "later.manifest"].iter().try_for_each(|kind| match fs::remove_file(path(name, kind)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    })
}

/// Remembers an output directory as it is now, and what was on disk before.
pub fn remember(
    name: &str,
    slot: &OwnedFd,
    since: (i64, i64),
    mirror: bool,
    before: Before,
) -> io::Result<()> {
    if let Some(inode) = before.top() {
        fs::DirBuilder::new().mode(0o700).create(path(name, &format!("{TOP}{inode}")))?;
    }
    let manifest = manifest_in(name);
    let baseline =
        Baseline::of(slot.as_fd(), mirror.then_some(manifest.as_path()), std::sync::Arc::new(before))?;
    baseline.write(&path(name, "baseline"))?;
    // The last of them: with it the others are complete.
    let note = Note { version: VERSION, since, mirror };
    let partial = path(name, "json.partial");
    fs::write(&partial, serde_json::to_vec(&note)?)?;
    fs::rename(&partial, path(name, "json"))
}

/// What was remembered, or [`nothing`].
pub fn recall(name: &str) -> io::Result<Filled> {
    let text = match read_note(&path(name, "json")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(nothing());
        }
        Err(error) => return Err(error),
    };
    let note: Note = serde_json::from_slice(&text)?;
    if note.version != VERSION {
        let text = format!("its format is {}, not {VERSION}: use the version that filled it", note.version);
        return Err(io::Error::other(text));
    }
    let baseline = Baseline::read(&path(name, "baseline"))?;
    let mechanism = if note.mirror { Mechanism::Mirror } else { Mechanism::Bind };
    let ours = read_ours(&path(name, "ours"))?;
    Ok(Filled { since: note.since, mechanism, baseline, ours })
}

/// When a directory was last filled, if that is known.
pub fn since(name: &str) -> Option<(i64, i64)> {
    // What is not understood is no reason to trust anything: the copy then looks at what it has recorded alone, as for one
    // that was interrupted.
    let note: Note = serde_json::from_slice(&read_note(&path(name, "json")).ok()?).ok()?;
    (note.version == VERSION).then_some(note.since)
}

/// Remembers what was copied later. Whatever is interrupted in between makes that what the job does to it is put beside
/// the file on disk, or is copied once too often.
pub fn remember_more(name: &str, baseline: &Baseline, ours: &Ours) -> io::Result<()> {
    write_ours(&path(name, "ours"), ours)?;
    baseline.write(&path(name, "baseline"))
}

/// The manifest of catching up with a directory.
pub fn manifest_later(name: &str) -> PathBuf {
    path(name, "later.manifest")
}

/// What is noted of entries that are open to their owner while they are packed.
pub fn opened(name: &str) -> PathBuf {
    path(name, "opened")
}

/// Reads a note. The job could have put anything in its place.
fn read_note(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let mut text = Vec::new();
    file.take(LONGEST_NOTE + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST_NOTE {
        return Err(io::Error::other(format!("{} is no note of ours: it is too long", path.display())));
    }
    Ok(text)
}

/// Opens the owner's part of the RAM disk.
pub fn open() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(RAM_DISK, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}
