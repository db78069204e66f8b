//! What of a directory's attributes comes home: those that the program changed.

use std::ffi::{CStr, CString};
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use ondeck_transfer::merge::{Changes, MergePolicy, Merged};
use rustix::fs::Stat;

use super::appearance::Appearance;
use super::stat::{Moment, accessed_at, changed_at, key, modified_at, time_of};
use super::xattrs::xattrs_of;
use super::{Mechanism, MergeBack};

impl MergeBack {
    /// What the program changed of a directory that is merged into.
    pub(super) fn changes_of(&self, merged: &Merged<'_>) -> io::Result<Changes> {
        let user = rustix::process::geteuid();
        let is_owner = user.is_root() || user.as_raw() == merged.entered.st_uid;
        let mut changes = Changes::default();
        if is_owner && !self.salvage {
            changes.modified = self.modified(merged).map(time_of);
        }
        if self.interim.load(Relaxed) {
            return Ok(changes);
        }
        if is_owner {
            let (mode, owner) = self.shown_rights(merged.path, merged.entered);
            let (uid, gid) = (merged.source.st_uid, merged.source.st_gid);
            changes.owner = (user.is_root() && owner.0 != uid).then_some(uid);
            changes.group = (owner.1 != gid).then_some(gid);
            if mode != merged.source.st_mode {
                // The group of a directory that is shared stays that of what is made in it, unless the program says so.
                let told = if user.is_root()
                    || self.baseline.contains(merged.path)
                    || self.shown(merged.path).is_some()
                {
                    (mode ^ merged.source.st_mode) & 0o2000
                } else {
                    0
                };
                let shared = merged.source.st_mode & told | merged.entered.st_mode & !told & 0o2000;
                changes.mode = Some(merged.source.st_mode & 0o5777 | shared);
            }
        }
        if self.salvage {
            return Ok(changes);
        }
        changes.xattrs = self.changed_xattrs(merged)?;
        if is_owner {
            changes.accessed = self.accessed(merged).map(time_of);
        } else {
            // Whoever may write to a directory may set these; all else is for its owner.
            changes.xattrs.retain(|(name, _)| name.to_bytes().starts_with(b"user."));
        }
        Ok(changes)
    }

    /// A directory as the program was shown it.
    fn shown(&self, path: &[u8]) -> Option<&Appearance> {
        match self.mechanism {
            Mechanism::Overlay if !path.is_empty() => self.baseline.before.directories.get(&key(path)),
            _ => self.baseline.directories.get(&key(path)),
        }
    }

    /// Whether the default ACL of a directory was one of the attributes that the program was shown.
    pub(super) fn was_shown_default_acl(&self, path: &[u8]) -> bool {
        self.shown(path).is_some_and(|shown| shown.value(c"system.posix_acl_default").is_some())
    }

    /// The mode and the owner of a directory that the program was shown, or of what is on disk now.
    fn shown_rights(&self, path: &[u8], target: &Stat) -> (u32, (u32, u32)) {
        if let Some(shown) = self.shown(path) {
            return (shown.mode, shown.owner);
        }
        match self.baseline.entries.get(&key(path)) {
            Some(staged) => (staged.mode, staged.owner),
            None => (target.st_mode, (target.st_uid, target.st_gid)),
        }
    }

    /// When the program was shown a directory, by the clock of the RAM disk: what is later can have come about by itself.
    fn shown_at(&self, path: &[u8]) -> Option<Moment> {
        let path = if self.mechanism == Mechanism::Overlay { b"" } else { path };
        self.baseline.directories.get(&key(path)).map(|shown| shown.changed)
    }

    /// The time of the last writing that a directory gets, if not the one that it has by now.
    fn modified(&self, merged: &Merged<'_>) -> Option<Moment> {
        let left = modified_at(merged.source);
        let entered = self.entered_at(merged.path, merged.entered);
        let now = modified_at(merged.target);
        let wanted = match self.shown(merged.path) {
            // Bringing a file that was changed where it stands is no writing to its directory.
            Some(shown) if shown.modified == left => Some(entered),
            _ if left == entered => Some(entered),
            _ if self.interim.load(Relaxed) => None,
            // It came about by itself. Somebody else may have written to the directory later.
            Some(_) if self.came_by_itself(merged, left) => (left >= entered).then_some(left),
            Some(_) => Some(left),
            None => self.is_made(merged.path).then_some(left),
        };
        wanted.filter(|wanted| *wanted != now)
    }

    fn came_by_itself(&self, merged: &Merged<'_>, time: Moment) -> bool {
        self.shown_at(merged.path).is_some_and(|shown| shown <= time) && time <= changed_at(merged.source)
    }

    /// The time of the last reading, if the program has set it: one that can have come about by itself is left.
    fn accessed(&self, merged: &Merged<'_>) -> Option<Moment> {
        let left = accessed_at(merged.source);
        let shown = self.shown(merged.path)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
        let set = left < self.shown_at(merged.path)? || left.0 > now.as_secs() as i64;
        (set && left != shown.accessed && left != accessed_at(merged.target)).then_some(left)
    }

    /// Whether an extended attribute that a directory in RAM does not have any more was removed by the program. An overlay
    /// leaves out what RAM can't hold when it copies a directory there, such as a filesystem's own.
    fn can_be_removed(&self, name: &CStr) -> bool {
        let name = name.to_bytes();
        let held = self.mechanism != Mechanism::Overlay
            || self.baseline.held.iter().any(|kind| name.starts_with(kind));
        held && !name.starts_with(b"security.")
    }

    /// What the program changed of a directory's extended attributes.
    fn changed_xattrs(&self, merged: &Merged<'_>) -> io::Result<Vec<(CString, Option<Vec<u8>>)>> {
        let shown = self.shown(merged.path);
        // What was kept by the version before does not tell.
        if shown.is_none() && self.baseline.contains(merged.path) {
            return Ok(Vec::new());
        }
        let left: Vec<(CString, Vec<u8>)> = xattrs_of(merged.source_dir)?
            .into_iter()
            .filter_map(|(name, value)| Some((self.xattr_name(&name)?, value)))
            .collect();
        let before = |name: &CStr| shown.and_then(|shown| shown.value(name));
        let was_any = shown.is_some_and(|shown| !shown.xattrs.is_empty());
        if left.is_empty() && !was_any {
            return Ok(Vec::new());
        }
        let theirs = xattrs_of(merged.target_dir)?;
        let removed = theirs.iter().filter(|(name, _)| {
            before(name).is_some() && self.can_be_removed(name) && !left.iter().any(|(kept, _)| kept == name)
        });
        let mut changes: Vec<_> = removed.map(|(name, _)| (name.clone(), None)).collect();
        for (name, value) in left {
            let same = theirs.iter().any(|(theirs, found)| *theirs == name && *found == value);
            if before(&name) != Some(key(&value)) && !same {
                changes.push((name, Some(value)));
            }
        }
        Ok(changes)
    }
}
