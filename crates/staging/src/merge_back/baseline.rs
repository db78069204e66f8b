//! What an output directory held before the program saw it, and the file in which that is kept.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use ondeck_transfer::checksum::{Checksum, Digest};
use ondeck_transfer::manifest;
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::{self, Stat};
use rustix::io::Errno;

use super::appearance::{Appearance, parse_directory};
use super::before::Before;
use super::lines::read_lines;
use super::linked::{Linked, parse_linked};
use super::stat::{Moment, changed_at, is_directory, key};
use super::xattrs::xattrs_of;

/// The state of an entry right after it was copied into RAM.
pub(super) struct Staged {
    pub(super) inode: u64,
    pub(super) changed: Moment,
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    /// The checksum of a regular file's content.
    pub(super) digest: Option<(Checksum, Digest)>,
}

impl Staged {
    fn of(stat: &Stat) -> Staged {
        Staged {
            inode: stat.st_ino,
            changed: changed_at(stat),
            mode: stat.st_mode,
            owner: (stat.st_uid, stat.st_gid),
            digest: None,
        }
    }
}

/// What an output directory held before the program saw it: about 100 bytes for each entry in RAM, and what is
/// remembered of the disk.
#[derive(Default)]
pub struct Baseline {
    /// What was in RAM.
    pub(super) entries: HashMap<u128, Staged>,
    /// The directories in RAM, which are among the entries, too.
    pub(super) directories: HashMap<u128, Appearance>,
    /// What is remembered of the disk.
    pub(super) before: Arc<Before>,
    /// Of what kinds extended attributes can be in RAM: the beginnings of their names.
    pub(super) held: Vec<&'static [u8]>,
}

/// How the names of those extended attributes begin that RAM can hold.
const KINDS: [&[u8]; 3] = [b"trusted.", b"user.", b"system.posix_acl_"];

/// Of what kinds the extended attributes of a directory in RAM can be: tmpfs has no `user.*` before Linux 6.6.
fn held_in(ram: BorrowedFd<'_>) -> Vec<&'static [u8]> {
    let [trusted, user, acls] = KINDS;
    let mut held = vec![trusted];
    let probe = c"user.ondeck-probe";
    if fs::fsetxattr(ram, probe, b"", fs::XattrFlags::empty()).is_ok() && fs::fremovexattr(ram, probe).is_ok()
    {
        held.push(user);
    }
    if fs::fgetxattr(ram, c"system.posix_acl_access", &mut [0_u8; 0]) != Err(Errno::OPNOTSUPP) {
        held.push(acls);
    }
    held
}

impl Baseline {
    /// Remembers `ram` itself, and with the manifest of its stage-in every entry below it.
    pub fn of(ram: BorrowedFd<'_>, staged: Option<&Path>, before: Arc<Before>) -> io::Result<Baseline> {
        let (mut entries, mut directories) = (HashMap::new(), HashMap::new());
        // First, because it changes when the directory was changed last.
        let held = held_in(ram);
        let root = fs::fstat(ram)?;
        entries.insert(key(b""), Staged::of(&root));
        let xattrs = xattrs_of(ram)?;
        let xattrs = xattrs.iter().map(|(name, value)| (&**name, &**value));
        directories.insert(key(b""), Appearance::of(&root, xattrs));
        if let Some(manifest) = staged {
            survey(ram, &mut |visit| {
                entries.insert(key(visit.path), Staged::of(visit.stat));
                if is_directory(visit.stat) {
                    let appearance = Appearance::in_ram(visit.dir, visit.name, visit.stat)?;
                    directories.insert(key(visit.path), appearance);
                }
                Ok(Descend::Yes)
            })
            .map_err(|(_, error)| error)?;
            for record in manifest::read(manifest)? {
                let record = record?;
                if let Some(entry) = entries.get_mut(&key(&record.path)) {
                    entry.digest = record.checksum;
                }
            }
            // Further names of a file have no checksum of their own.
            let by_inode: HashMap<u64, _> =
                entries.values().filter_map(|entry| Some((entry.inode, entry.digest?))).collect();
            for entry in entries.values_mut() {
                entry.digest = entry.digest.or_else(|| by_inode.get(&entry.inode).copied());
            }
        }
        Ok(Baseline { entries, directories, before, held })
    }

    /// If nothing is known but what was on disk.
    pub fn of_disk(before: Arc<Before>) -> Baseline {
        Baseline { before, ..Baseline::default() }
    }
}

/// The first line of a baseline that is kept in a file.
const BASELINE: &str = "# ondeck baseline 3";
/// The first line in the version before, which knew no inodes of directories on disk.
const BASELINE_2: &str = "# ondeck baseline 2";
/// The first line in the version before that, which knew neither directories' attributes nor files with several names.
const BASELINE_1: &str = "# ondeck baseline 1";

impl Baseline {
    /// Keeps it in a file, for whoever brings the results home.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let partial = path.with_extension("partial");
        let mut file = io::BufWriter::new(std::fs::File::create(&partial)?);
        writeln!(file, "{BASELINE}")?;
        for (path, entry) in &self.entries {
            let Staged { inode, changed, mode, owner, digest } = entry;
            let digest = digest.map_or("-".to_owned(), |(kind, digest)| format!("{}:{digest}", kind.name()));
            writeln!(
                file,
                "{path:032x} {inode} {} {} {mode:o} {} {} {digest}",
                changed.0, changed.1, owner.0, owner.1
            )?;
        }
        for (path, directory) in &self.directories {
            writeln!(file, "directory {path:032x}{directory}")?;
        }
        for (path, Linked { inode, names, content }) in &self.before.linked {
            writeln!(file, "linked {path:032x} {inode} {names} {content}")?;
        }
        for (path, inode) in self.before.inodes.iter().flatten() {
            writeln!(file, "inode {path:032x} {inode}")?;
        }
        // Only of an overlay.
        for (path, directory) in &self.before.directories {
            writeln!(file, "shown {path:032x}{directory}")?;
        }
        for kind in &self.held {
            writeln!(file, "held {}", String::from_utf8_lossy(kind))?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&partial, path)
    }

    /// Reads one that was kept, also by the versions before.
    pub fn read(path: &Path) -> io::Result<Baseline> {
        let (mut entries, mut directories, mut before) = (HashMap::new(), HashMap::new(), Before::default());
        let mut held = Vec::new();
        read_lines(path, &[BASELINE, BASELINE_2, BASELINE_1], &mut |line| {
            if let Some(line) = line.strip_prefix("directory ") {
                directories.extend([parse_directory(line)?]);
            } else if let Some(line) = line.strip_prefix("linked ") {
                before.linked.extend([parse_linked(line)?]);
            } else if let Some(line) = line.strip_prefix("inode ") {
                let (path, inode) = line.split_once(' ')?;
                let path = u128::from_str_radix(path, 16).ok()?;
                before.inodes.get_or_insert_default().insert(path, inode.parse().ok()?);
            } else if let Some(line) = line.strip_prefix("shown ") {
                before.directories.extend([parse_directory(line)?]);
            } else if let Some(kind) = line.strip_prefix("held ") {
                held.push(*KINDS.iter().find(|known| **known == kind.as_bytes())?);
            } else {
                entries.extend([parse_entry(line)?]);
            }
            Some(())
        })?;
        Ok(Baseline { entries, directories, before: Arc::new(before), held })
    }

    /// Whether nothing was done to the top since, or it is not known.
    pub fn is_top_as_shown(&self, ram: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(shown) = self.entries.get(&key(b"")) else { return Ok(true) };
        Ok(shown.changed == changed_at(&fs::fstat(ram)?))
    }

    /// Whether it has an entry.
    pub fn contains(&self, path: &[u8]) -> bool {
        self.entries.contains_key(&key(path))
    }

    /// Adds an entry as it was copied into RAM, with the checksum of a regular file's content.
    pub fn add(&mut self, path: &[u8], stat: &Stat, digest: Option<(Checksum, Digest)>) {
        self.entries.insert(key(path), Staged { digest, ..Staged::of(stat) });
    }

    /// Adds a directory as it was copied into RAM.
    pub fn add_directory(&mut self, path: &[u8], ram: BorrowedFd<'_>, stat: &Stat) -> io::Result<()> {
        self.add(path, stat, None);
        match Appearance::in_ram(ram, &CString::new(path)?, stat) {
            Ok(appearance) => {
                self.directories.insert(key(path), appearance);
            }
            // Deeper than a path can tell: its mode and owner are known.
            Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What is remembered of the disk.
    pub fn before(&self) -> &Before {
        &self.before
    }

    /// Whether what is on disk now is another directory than the one that was there, and belongs to another user.
    pub fn is_anothers_top(&self, disk: &Stat) -> bool {
        let user = rustix::process::geteuid();
        let shown = self.directories.get(&key(b"")).map(|shown| shown.owner.0);
        let owner = if user.is_root() { shown } else { Some(user.as_raw()) };
        self.before.is_another(b"", disk) && owner.is_some_and(|owner| owner != disk.st_uid)
    }

    /// Adds a file on disk that has several names.
    pub fn add_linked(&mut self, path: &[u8], linked: Linked) {
        Arc::make_mut(&mut self.before).linked.insert(key(path), linked);
    }
}

fn parse_entry(line: &str) -> Option<(u128, Staged)> {
    let mut fields = line.split(' ');
    let path = u128::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.next()?.parse().ok()?;
    let changed = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let mode = u32::from_str_radix(fields.next()?, 8).ok()?;
    let owner = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let digest = match fields.next()? {
        "-" => None,
        text => {
            let (kind, digest) = text.split_once(':')?;
            let kinds = [Checksum::Xxh3, Checksum::Blake3, Checksum::None];
            let kind = kinds.into_iter().find(|known| known.name() == kind)?;
            Some((kind, Digest::from_hex(digest)?))
        }
    };
    fields.next().is_none().then_some((path, Staged { inode, changed, mode, owner, digest }))
}

#[cfg(test)]
mod tests {
    use super::super::linked::Content;
    use super::super::ours::{Ours, read_ours, write_ours};
    use super::*;

    #[test]
    fn a_baseline_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let staged = |inode, digest| Staged {
            inode,
            changed: (1_700_000_000, 999_999_999),
            mode: 0o100_644,
            owner: (20_001, 7),
            digest,
        };
        let digest = Some((Checksum::Xxh3, Checksum::Xxh3.of(b"content")));
        let entries = HashMap::from([(key(b""), staged(1, None)), (key(b"a\nb"), staged(u64::MAX, digest))]);
        let path = dir.path().join("0.baseline");
        let appearance = |xattrs| Appearance {
            changed: (3, 4),
            accessed: (-5, 6),
            modified: (7, 8),
            mode: 0o42_755,
            owner: (1, 2),
            xattrs,
        };
        let directories = HashMap::from([
            (key(b""), appearance(vec![])),
            (key(b"d"), appearance(vec![(1, u128::MAX), (u128::MAX, 0)])),
        ]);
        let linked = Linked { inode: u64::MAX, names: 3, content: Content::example() };
        let linked = HashMap::from([(key(b"l"), linked)]);
        let shown = HashMap::from([(key(b"s"), appearance(vec![(3, 4)]))]);
        let inodes = Some(HashMap::from([(key(b""), 2), (key(b"s"), u64::MAX)]));
        let before = Before {
            linked: linked.clone(),
            directories: shown.clone(),
            inodes: inodes.clone(),
            ..Before::default()
        };
        let held = vec![KINDS[0], KINDS[2]];
        Baseline { entries, directories: directories.clone(), before: Arc::new(before), held: held.clone() }
            .write(&path)
            .unwrap();
        let found = Baseline::read(&path).unwrap();
        assert_eq!((&found.directories, &found.before.linked), (&directories, &linked));
        assert_eq!((&found.before.directories, &found.held), (&shown, &held));
        assert_eq!(found.before.inodes, inodes);
        let found = found.entries;
        assert_eq!(found.len(), 2);
        let entry = &found[&key(b"a\nb")];
        assert_eq!(
            (entry.inode, entry.changed, entry.mode),
            (u64::MAX, (1_700_000_000, 999_999_999), 0o100_644)
        );
        assert_eq!((entry.owner, entry.digest), ((20_001, 7), digest));
        // What the version before has kept.
        let text = std::fs::read_to_string(&path).unwrap().replacen("baseline 3", "baseline 1", 1);
        let old = |line: &&str| {
            !["directory ", "linked ", "inode ", "shown ", "held "].iter().any(|new| line.starts_with(new))
        };
        std::fs::write(&path, text.lines().filter(old).map(|line| format!("{line}\n")).collect::<String>())
            .unwrap();
        let found = Baseline::read(&path).unwrap();
        assert!(found.contains(b"a\nb") && found.directories.is_empty() && found.before.linked.is_empty());
        assert!(found.before.inodes.is_none());
        let damaged = [
            "# ondeck baseline 1\n12 34",
            "# ondeck baseline 2\ndirectory 1 2",
            "# ondeck baseline 2\nheld x",
            "# ondeck baseline 3\ninode 12",
            "",
            &"x".repeat(2 << 20),
        ];
        for text in damaged {
            std::fs::write(&path, text).unwrap();
            assert!(Baseline::read(&path).is_err());
        }
        let ours = Ours::from([(key(b"a\nb"), (u64::MAX, (1_700_000_000, 999_999_999))), (1, (2, (-3, 4)))]);
        write_ours(&path, &ours).unwrap();
        assert_eq!(read_ours(&path).unwrap(), ours);
        assert!(read_ours(&dir.path().join("none")).unwrap().is_empty());
    }
}
