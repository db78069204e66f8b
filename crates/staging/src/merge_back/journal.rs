//! What a run's keeper writes down of each output, for the one that takes its place if it is killed.
//!
//! The file is in the run's directory, in RAM like the results themselves: it has to outlive a process, not a machine, so
//! nothing is synced. A SIGKILL can cut a line short, and another thread's line may follow; so a line begins with a newline
//! and ends with a mark, and one without its mark counts for nothing. What it would have said is then found out by
//! comparing contents, at worst with the program's version beside one that is the run's own.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use ondeck_transfer::merge::Side;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::Mechanism;
use super::linked::{Content, FileId};
use super::ours::Ours;
use super::stat::Moment;

/// The open journal of one output.
pub struct Journal(File);

/// What a journal holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Recalled {
    /// How the output was shown to the program.
    pub mechanism: Mechanism,
    /// Since when, by the clock of its filesystem.
    pub since: Moment,
    /// What was put on disk.
    pub ours: Ours,
    /// Directories that were made on disk.
    pub made: HashSet<u128>,
    /// Files with several names that have lost or got one, and the contents that they had.
    pub loosened: HashMap<FileId, Content>,
    /// Directories on disk that were entered and not completed: their inodes, and when they were written last before.
    pub entered: HashMap<u128, (u64, Moment)>,
    /// Entries that were made accessible to their owner, which had shut themselves off, in this order.
    pub opened_up: Vec<OpenedUp>,
    /// Whether everything is on disk.
    pub home: bool,
    /// Whether the mount over it was taken away.
    pub detached: bool,
}

/// An entry that has, for a moment, not the mode that it should have.
#[derive(Debug, PartialEq, Eq)]
pub struct OpenedUp {
    /// In RAM or on disk.
    pub side: Side,
    /// Its path below the directory that is merged.
    pub path: Vec<u8>,
    /// The inode that was opened up: another one of that name is left alone.
    pub inode: u64,
    /// The mode that it should have.
    pub mode: u32,
}

impl OpenedUp {
    /// An entry of the RAM disk that is to be read, if its mode shuts out the caller, its owner.
    pub fn needed(path: &[u8], stat: &Stat) -> Option<OpenedUp> {
        let needed = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => 0o700,
            FileType::RegularFile => 0o400,
            _ => return None,
        };
        let user = rustix::process::geteuid();
        let mode = stat.st_mode & 0o7777;
        if user.is_root() || user.as_raw() != stat.st_uid || mode & needed == needed {
            return None;
        }
        Some(OpenedUp { side: Side::Source, path: path.to_vec(), inode: stat.st_ino, mode })
    }

    /// The mode that it has while it is open.
    pub fn open_mode(&self) -> Mode {
        Mode::from_raw_mode(self.mode | 0o700)
    }

    /// Gives the entry its mode back, if it has not got it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn shut(&self, root: BorrowedFd<'_>) -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = if self.path.is_empty() { &b"."[..] } else { &self.path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let entry = match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            // What is in a directory that shuts out its owner was shut before that.
            Err(Errno::NOENT | Errno::ACCESS) => return Ok(()),
            other => other?,
        };
        let stat = rustix::fs::fstat(&entry)?;
        if stat.st_ino == self.inode && stat.st_mode & 0o7777 == self.mode | 0o700 {
            let path = format!("/proc/self/fd/{}", entry.as_raw_fd());
            rustix::fs::chmod(path, Mode::from_raw_mode(self.mode))?;
        }
        Ok(())
    }
}

impl Journal {
    /// Begins one.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn begin(path: &Path, mechanism: Mechanism, since: Moment) -> io::Result<Journal> {
        let partial = path.with_extension("partial");
        let mut file = File::options().create(true).truncate(true).write(true).open(&partial)?;
        write!(file, "\nshown {} {} {}.", mechanism.word(), since.0, since.1)?;
        std::fs::rename(&partial, path)?;
        Journal::go_on(path)
    }

    /// Goes on with one.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn go_on(path: &Path) -> io::Result<Journal> {
        Ok(Journal(File::options().append(true).open(path)?))
    }

    /// An entry is in place on disk.
    pub fn placed(&self, path: u128, inode: u64, changed: Moment) {
        self.line(&format!("placed {path:032x} {inode} {} {}", changed.0, changed.1));
    }

    /// A directory is about to be made on disk.
    pub fn made(&self, path: u128) {
        self.line(&format!("made {path:032x}"));
    }

    /// A directory on disk is about to be entered, which is complete again when it is placed.
    pub fn entered(&self, path: u128, inode: u64, written: Moment) {
        self.line(&format!("entered {path:032x} {inode} {} {}", written.0, written.1));
    }

    /// A file with several names is about to lose one, or has got one.
    pub fn loosened(&self, (device, inode): FileId, content: &Content) {
        self.line(&format!("loosened {device} {inode} {content}"));
    }

    /// An entry is about to be made accessible to its owner.
    pub fn opening_up(&self, side: Side, path: &[u8], inode: u64, mode: u32) {
        let side = if side == Side::Source { "ram" } else { "disk" };
        let path: String = path.iter().map(|byte| format!("{byte:02x}")).collect();
        self.line(&format!("opening {side} {inode} {mode:o} /{path}"));
    }

    /// Everything is on disk.
    pub fn home(&self) {
        self.line("home");
    }

    /// The mount over it was taken away.
    pub fn detached(&self) {
        self.line("detached");
    }

    fn line(&self, text: &str) {
        // One write, so that lines of several threads don't mix. If there is no room for it, a keeper that is killed may
        // take some of its own files for somebody else's: they stay, and the program's go beside them.
        let _ = (&self.0).write_all(format!("\n{text}.").as_bytes());
    }
}

/// Reads a journal. `None`: the output was never shown to the program.
///
/// # Errors
/// If it can't be read, or is none.
pub fn recall(path: &Path) -> io::Result<Option<Recalled>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut recalled: Option<Recalled> = None;
    for line in io::BufReader::new(file).lines() {
        let line = line?;
        let Some(line) = line.strip_suffix('.') else { continue };
        match &mut recalled {
            None => recalled = shown(line),
            // A line that is not understood was cut short, and what follows it is whole.
            Some(recalled) => drop(take(recalled, line)),
        }
    }
    recalled.map(Some).ok_or_else(|| io::Error::other(format!("{} is no journal of a run", path.display())))
}

fn shown(line: &str) -> Option<Recalled> {
    let mut fields = line.strip_prefix("shown ")?.split(' ');
    let word = fields.next()?;
    let all = [Mechanism::Bind, Mechanism::Mirror, Mechanism::Overlay, Mechanism::Disk];
    let mechanism = all.into_iter().find(|mechanism| mechanism.word() == word)?;
    let since = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Recalled {
        mechanism,
        since,
        ours: Ours::new(),
        made: HashSet::new(),
        loosened: HashMap::new(),
        entered: HashMap::new(),
        opened_up: Vec::new(),
        home: false,
        detached: false,
    })
}

fn take(recalled: &mut Recalled, line: &str) -> Option<()> {
    let mut fields = line.split(' ');
    let what = fields.next()?;
    let rest: Vec<&str> = fields.collect();
    match (what, &rest[..]) {
        ("placed", [path, inode, seconds, nanoseconds]) => {
            let changed = (seconds.parse().ok()?, nanoseconds.parse().ok()?);
            let path = u128::from_str_radix(path, 16).ok()?;
            recalled.ours.insert(path, (inode.parse().ok()?, changed));
            recalled.entered.remove(&path);
        }
        ("entered", [path, inode, seconds, nanoseconds]) => {
            let written = (seconds.parse().ok()?, nanoseconds.parse().ok()?);
            let path = u128::from_str_radix(path, 16).ok()?;
            recalled.entered.insert(path, (inode.parse().ok()?, written));
        }
        ("made", [path]) => drop(recalled.made.insert(u128::from_str_radix(path, 16).ok()?)),
        ("loosened", [device, inode, content @ ..]) => {
            let content = Content::parse(content.iter().copied())?;
            recalled.loosened.insert((device.parse().ok()?, inode.parse().ok()?), content);
        }
        ("opening", [side @ ("ram" | "disk"), inode, mode, path]) => {
            let hex = path.strip_prefix('/')?;
            let path = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok());
            recalled.opened_up.push(OpenedUp {
                side: if *side == "ram" { Side::Source } else { Side::Target },
                path: path.collect::<Option<_>>()?,
                inode: inode.parse().ok()?,
                mode: u32::from_str_radix(mode, 8).ok()?,
            });
        }
        ("home", []) => recalled.home = true,
        ("detached", []) => recalled.detached = true,
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_tells_what_was_written_also_around_a_line_that_was_cut_short() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out0.journal");
        assert!(recall(&path).unwrap().is_none());
        let journal = Journal::begin(&path, Mechanism::Overlay, (1_700_000_000, 999_999_999)).unwrap();
        journal.placed(7, 8, (9, 10));
        (&journal.0).write_all(b"\nplaced 0000").unwrap();
        journal.made(u128::MAX);
        journal.loosened((3, u64::MAX), &Content::example());
        journal.entered(7, 1, (2, 3));
        journal.entered(9, 1, (-2, 3));
        journal.placed(7, 8, (9, 10));
        journal.opening_up(Side::Source, b"a\n/b", 3, 0o4000);
        journal.home();
        (&journal.0).write_all(b"\ndetached").unwrap();
        let recalled = recall(&path).unwrap().unwrap();
        assert_eq!((recalled.mechanism, recalled.since), (Mechanism::Overlay, (1_700_000_000, 999_999_999)));
        assert_eq!(recalled.ours, Ours::from([(7, (8, (9, 10)))]));
        assert_eq!(recalled.made, HashSet::from([u128::MAX]));
        assert_eq!(recalled.loosened, HashMap::from([((3, u64::MAX), Content::example())]));
        assert_eq!(recalled.entered, HashMap::from([(9, (1, (-2, 3)))]));
        let opened = OpenedUp { side: Side::Source, path: b"a\n/b".to_vec(), inode: 3, mode: 0o4000 };
        assert_eq!(recalled.opened_up, [opened]);
        assert!(recalled.home && !recalled.detached);
        std::fs::write(&path, "something else").unwrap();
        assert!(recall(&path).is_err());
    }
}
