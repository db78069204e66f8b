//! What each tool's copy keeps besides the bytes, found out with a small tree from disk to RAM.
//!
//! Speed is only comparable between tools that do the same work, so this table stands beside the
//! times.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{
    AtFlags, CWD, SeekFrom, Timespec, Timestamps, XattrFlags, futimens, getxattr, seek, setxattr, utimensat,
};

use crate::interrupt::Interrupted;
use crate::machine::is_root;
use crate::scratch::Scratch;
use crate::timed;
use crate::tools::{Checksum, Copy, Programs, Tool};
use ondeck_bench::size::{KIB, MIB};

pub const COLUMNS: [&str; 8] =
    ["owner", "mode", "file time (ns)", "directory time (ns)", "user xattr", "symlink", "hard link", "hole"];

/// What one tool kept; a column that could not be tested here is `None`.
#[derive(Debug)]
pub struct KeptMetadata {
    pub tool: Tool,
    /// The columns' answers, or why the tool was not run.
    pub answers: Result<[Option<bool>; COLUMNS.len()], String>,
}

const OWNER: (u32, u32) = (12345, 54321);
const XATTR: &str = "user.ondeck.probe";
const SPARSE_SIZE: u64 = 16 * MIB;

/// Before any clock of the copy itself, and with nanoseconds that microseconds would lose.
const TIME: Timespec = Timespec { tv_sec: 1_400_000_000, tv_nsec: 123_456_789 };

pub fn compare(scratch: &Scratch, programs: &Programs, only: &[String]) -> Result<Vec<KeptMetadata>> {
    let source = scratch.disk.join("probe");
    let target = scratch.ram.join("probe");
    let notes = scratch.disk.join("notes");
    let mut tools = Tool::PEERS.to_vec();
    tools.push(Tool::ondeck(Checksum::Xxh3, true));
    tools.retain(|tool| only.is_empty() || only.iter().any(|n| tool.name().starts_with(n)));

    let probe = Probe::create(&source, &scratch.ram)?;
    let mut table = Vec::new();
    for tool in tools {
        let copy = Copy { source: &source, target: &target, is_directory: true, notes: &notes };
        let answers = match tool.command(programs, copy) {
            None if tool.is_ondeck() => Err("not built".to_owned()),
            None => Err("not installed".to_owned()),
            Some(mut command) => {
                tool.forget_last_run(copy)?;
                let errors = scratch.disk.join("errors.txt");
                match timed::run(&mut command, &errors) {
                    Err(error) if error.is::<Interrupted>() => return Err(error),
                    Err(error) => Err(format!("{error:#}")),
                    Ok(finished) if !finished.status.success() => {
                        Err(format!("failed, {}", timed::complaint(finished.status, &errors)))
                    }
                    Ok(_) => Ok(probe.answers(&target)),
                }
            }
        };
        table.push(KeptMetadata { tool, answers });
    }
    Ok(table)
}

/// The tree that is copied, and which of its properties this machine could give it.
struct Probe {
    /// A file of root's cannot be given away by anyone else.
    owner: bool,
    /// Both filesystems must take it: tmpfs does since Linux 6.6.
    xattr: bool,
    /// As the source was read when it was complete.
    mode: u32,
    directory_mode: u32,
}

const PLAIN: &str = "directory/plain.dat";
const LINKED: &str = "directory/linked.dat";
const SYMLINK: &str = "directory/symlink";
const SYMLINK_TARGET: &str = "../nowhere/at all";
const SPARSE: &str = "sparse.dat";

impl Probe {
    fn create(root: &Path, ram: &Path) -> Result<Self> {
        Self::try_create(root, ram).with_context(|| format!("cannot make {}", root.display()))
    }

    fn try_create(root: &Path, ram: &Path) -> std::io::Result<Self> {
        let directory = root.join("directory");
        let plain = root.join(PLAIN);
        fs::create_dir_all(&directory)?;
        fs::write(&plain, vec![b'x'; 10 * KIB as usize])?;
        fs::hard_link(&plain, root.join(LINKED))?;
        symlink(SYMLINK_TARGET, root.join(SYMLINK))?;
        let sparse = File::create_new(root.join(SPARSE))?;
        sparse.write_all_at(b"end", SPARSE_SIZE - 3)?;

        let xattr = takes_xattr(&plain) && takes_xattr(ram);
        let owner = is_root();
        if owner {
            std::os::unix::fs::chown(&plain, Some(OWNER.0), Some(OWNER.1))?;
        }
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o604))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711))?;
        let times = Timestamps { last_access: TIME, last_modification: TIME };
        futimens(File::open(&plain)?.as_fd(), &times)?;
        utimensat(CWD, &directory, &times, AtFlags::empty())?;
        Ok(Self {
            owner,
            xattr,
            mode: fs::metadata(&plain)?.mode(),
            directory_mode: fs::metadata(&directory)?.mode(),
        })
    }

    fn answers(&self, copy: &Path) -> [Option<bool>; COLUMNS.len()] {
        let path = |name: &str| -> PathBuf { copy.join(name) };
        let of = |name: &str, holds: &dyn Fn(fs::Metadata) -> bool| -> bool {
            fs::symlink_metadata(path(name)).is_ok_and(holds)
        };
        let owner = of(PLAIN, &|m| (m.uid(), m.gid()) == OWNER);
        let mode =
            of(PLAIN, &|m| m.mode() == self.mode) && of("directory", &|m| m.mode() == self.directory_mode);
        let time = |m: fs::Metadata| m.mtime() == TIME.tv_sec && m.mtime_nsec() == TIME.tv_nsec;
        let mut value = [0; 16];
        let xattr = getxattr(path(PLAIN), XATTR, &mut value);
        let symlink = fs::read_link(path(SYMLINK)).is_ok_and(|to| to == Path::new(SYMLINK_TARGET));
        let hard_link = of(PLAIN, &|plain| {
            of(LINKED, &|linked| (plain.dev(), plain.ino()) == (linked.dev(), linked.ino()))
        });
        [
            self.owner.then_some(owner),
            Some(mode),
            Some(of(PLAIN, &time)),
            Some(of("directory", &time)),
            self.xattr.then_some(xattr == Ok(3)),
            Some(symlink),
            Some(hard_link),
            Some(begins_with_hole(&path(SPARSE))),
        ]
    }
}

fn takes_xattr(path: &Path) -> bool {
    setxattr(path, XATTR, b"yes", XattrFlags::empty()).is_ok()
}

/// Not by the blocks in use: with huge pages a tmpfs counts a whole one for the three bytes.
fn begins_with_hole(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| {
        let whole = file.metadata().is_ok_and(|m| m.len() == SPARSE_SIZE);
        whole && seek(&file, SeekFrom::Data(0)).is_ok_and(|data| data > SPARSE_SIZE / 2)
    })
}
