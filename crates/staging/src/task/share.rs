//! Sharing a copy out over several nodes, by the entries of the directories' top levels.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use ondeck_api::wire::{JobDirectory, Unit};
use ondeck_transfer::survey::{Descend, survey};
use rustix::fs::FileType;

use super::Failure;
use super::order::MOST_UNITS;
use super::worker::{OpenDirectory, Worker};
use crate::slot::Slot;

impl Worker<'_> {
    /// Looks at what there is to copy.
    pub fn survey(&self, directories: &[JobDirectory], home: bool) -> Result<Option<String>, Failure> {
        let mut found: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
        // Inputs that are outputs, too, are filled by one task.
        let wanted = |directory: &JobDirectory| if home { directory.output } else { !directory.output };
        for directory in
            self.open_chosen(directories, |directory| wanted(directory) || directory.path.is_dir())?
        {
            if !wanted(directory.wanted) {
                continue;
            }
            let name = &directory.wanted.name;
            // Made once, before several nodes fill it.
            let slot = Slot::of_task(directory.wanted);
            let slot = if home { slot.open(&self.ram) } else { slot.make(&self.ram) };
            let root = match (&slot, home) {
                (Ok(slot), true) => slot,
                (Err(_), true) => continue,
                (Err(error), false) => {
                    let text = format!("{}: can't make `{name}` in the RAM disk: {error}", self.order.node);
                    return Err(Failure::passing(text));
                }
                (_, false) => &directory.disk,
            };
            let mut has_links = false;
            // Whatever can't be read is found, and named, by the copy itself.
            let _ = survey(root.as_fd(), &mut |visit| {
                if directory.nested.iter().any(|nested| nested == visit.path) {
                    return Ok(Descend::No);
                }
                let first = visit.path.split(|byte| *byte == b'/').next().unwrap_or_default();
                let file = FileType::from_raw_mode(visit.stat.st_mode) != FileType::Directory;
                if file && visit.stat.st_nlink > 1 {
                    has_links = true;
                    return Err(io::ErrorKind::Interrupted.into());
                }
                // A nested directory of the job lies below: it belongs to the whole.
                let whole = directory
                    .nested
                    .iter()
                    .any(|nested| nested.strip_prefix(first).is_some_and(|rest| rest.first() == Some(&b'/')));
                if let (Ok(first), true, false) = (std::str::from_utf8(first), file, whole) {
                    let unit = found.entry((name.clone(), first.to_owned())).or_default();
                    unit.0 += visit.stat.st_size as u64;
                    unit.1 += 1;
                }
                Ok(Descend::Yes)
            });
            if has_links {
                return Ok(None);
            }
        }
        let mut units: Vec<Unit> = found
            .into_iter()
            .map(|((directory, entry), (bytes, files))| Unit { directory, entry, bytes, files })
            .collect();
        units.sort_by_key(|unit| std::cmp::Reverse((unit.bytes, unit.files)));
        units.truncate(MOST_UNITS);
        self.tell_units(&units);
        Ok(None)
    }

    /// Whether this task is to do single entries only.
    pub fn has_a_part(&self) -> bool {
        self.order.request.share.as_ref().is_some_and(|share| !share.all_but)
    }

    /// The entries of a directory's top level that are other tasks', of those that are in any of these roots.
    pub fn left_out(
        &self,
        directory: &OpenDirectory<'_>,
        roots: &[&OwnedFd],
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let Some(share) = &self.order.request.share else { return Ok(Vec::new()) };
        let listed = share.entries.iter().filter(|(name, _)| *name == directory.wanted.name);
        let listed: HashSet<&[u8]> = listed.map(|(_, entry)| entry.as_bytes()).collect();
        if share.all_but {
            return Ok(listed.into_iter().map(<[u8]>::to_vec).collect());
        }
        let mut others = HashSet::new();
        for root in roots {
            let names = names(root).map_err(|error| {
                Failure::passing(format!("{}: can't be read: {error}", directory.path.display()))
            })?;
            others.extend(names.into_iter().filter(|name| !listed.contains(name.as_slice())));
        }
        Ok(others.into_iter().collect())
    }
}

/// The names in a directory.
fn names(directory: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if OsStr::from_bytes(&name) != "." && OsStr::from_bytes(&name) != ".." {
            names.push(name);
        }
    }
    Ok(names)
}
