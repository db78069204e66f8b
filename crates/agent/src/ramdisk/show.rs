//! The RAM disk at a directory of this node, and away from it again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ondeck_ramdisk::engine::{CLIENT, DATA};
use ondeck_ramdisk::mounts::check_path;
use ondeck_ramdisk::{Build, EngineError, RuntimeDir, mounts};

use super::client::READ_ONLY;
use super::{GIVING_UP, RamDisk, lock};
use crate::hang::within;
use crate::record::{RamDiskRecord, Shown};
use crate::unmount::{ORDERLY, all_mounts, take_away};

impl RamDisk {
    pub(super) fn show(&self, build: &Build, path: &Path, read_only: bool) -> Result<(), EngineError> {
        check_path(path)?;
        if self.record().shown.iter().any(|shown| shown.path == path) {
            return Ok(());
        }
        if !self.is_mounted()? {
            // The simulated engine shows nothing.
            return self.note(|record| record.shown.push(Shown { path: path.to_owned(), made: false }));
        }
        let root = self.runtime_dir.path(CLIENT);
        self.is_whole(build)?;
        if all_mounts()?
            .iter()
            .any(|mount| mount.at == path && mount.source.starts_with("ondeck") && !mount.is_a_users())
        {
            let text = format!("another RAM disk is shown at {} already", path.display());
            return Err(EngineError::Refused(text));
        }
        // The path may lie on a filesystem that hangs.
        let wanted = path.to_owned();
        let found = within(build.until, "the directory to mount on", move || {
            mounts::Target::open_plain(&wanted).map_err(|error| not_opened(&wanted, error))
        })?;
        // Noted before the mount, and before a directory is made: who comes after a crash must know what to take away.
        let shown = |made| Shown { path: path.to_owned(), made };
        self.note(|record| record.shown.push(shown(found.is_none())))?;
        let (target, made) = match found {
            Some(target) => (target, false),
            None => self.make_target(build, path)?,
        };
        let source = if read_only { self.read_only_view(&root)? } else { root };
        let at = path.to_owned();
        let bound = within(build.until, "mounting", move || {
            mounts::bind(&source.join(DATA), &target).map_err(|error| EngineError::io("mount on", &at, error))
        });
        bound.inspect_err(|_| {
            if made {
                // It is empty, or somebody else's now.
                let _ = fs::remove_dir(path);
            }
            let _ = self.note(|record| record.shown.retain(|shown| shown.path != path));
        })
    }

    /// Makes the directory to mount on, which was noted.
    fn make_target(&self, build: &Build, path: &Path) -> Result<(mounts::Target, bool), EngineError> {
        let wanted = path.to_owned();
        let made = within(build.until, "the directory to mount on", move || {
            mounts::Target::open_or_make(&wanted).map_err(|error| not_opened(&wanted, error))
        });
        if !matches!(made, Ok((_, true))) {
            // Somebody else was quicker, so it is theirs; or there is none.
            self.note(|record| match &made {
                Ok(_) => record
                    .shown
                    .iter_mut()
                    .filter(|shown| shown.path == path)
                    .for_each(|shown| shown.made = false),
                Err(_) => record.shown.retain(|shown| shown.path != path),
            })?;
        }
        made
    }

    pub(super) fn read_only_view(&self, root: &Path) -> Result<PathBuf, EngineError> {
        let view = self.runtime_dir.subdirectory(READ_ONLY)?;
        if self.mounts_at(&view)?.is_empty() {
            let mount = || -> std::io::Result<()> {
                mounts::bind(root, &mounts::Target::open(&view, None)?)?;
                mounts::remount_read_only(&view)
            };
            mount().map_err(|error| EngineError::io("mount on", &view, error))?;
        }
        Ok(view)
    }

    pub(super) fn hide(&self, path: &Path) -> Result<(), EngineError> {
        let Some(shown) = self.record().shown.into_iter().find(|shown| shown.path == path) else {
            return Ok(());
        };
        for mount in own_mounts(&self.runtime_dir)?.iter().filter(|mount| mount.at == path) {
            take_away(mount, self.record().layout.owner)?;
        }
        if shown.made {
            // Not empty: then it is somebody else's now.
            let _ = fs::remove_dir(path);
        }
        *lock(&self.overmounts_removed) = Some(Instant::now());
        self.note(|record| record.shown.retain(|shown| shown.path != path))
    }

    /// Takes it away from every directory where it is shown here. The client stays, and so does what it holds.
    ///
    /// # Errors
    /// What could not be taken away.
    pub fn hide_everywhere(&self) -> Result<(), EngineError> {
        let _work = self.lock_work(Instant::now() + GIVING_UP)?;
        if self.is_gone() { Ok(()) } else { self.hide_all() }
    }

    /// The job begins here, and nobody has told it whether it has this RAM disk: it has what all of its nodes show, and
    /// nothing else. Tells whether that is so.
    ///
    /// # Errors
    /// What could not be taken away.
    pub fn begins(&self) -> Result<bool, EngineError> {
        let _work = self.lock_work(Instant::now() + GIVING_UP)?;
        let record = self.record();
        if self.is_gone() || lock(&self.frozen).is_some() {
            // What a job that is stopped sees is decided before it goes on.
            return Ok(false);
        }
        if record.overmounts.is_empty() {
            *lock(&self.targets) = None;
            return Ok(false);
        }
        if record.whole && self.must_overmount_all().is_ok() {
            return Ok(true);
        }
        self.hide_all()?;
        Ok(false)
    }

    fn hide_all(&self) -> Result<(), EngineError> {
        *lock(&self.targets) = None;
        self.detach_held(self.record().layout.owner);
        take_all_away(&self.runtime_dir, &self.record())?;
        *lock(&self.overmounts_removed) = Some(Instant::now());
        self.note(|record| {
            record.shown.clear();
            record.overmounts.clear();
        })
    }
}

/// Where a RAM disk is shown, by the kernel's own table and not by what was noted, the latest first: directories above
/// may have been renamed since, and others may have mounted something at the same path.
pub(super) fn own_mounts(runtime_dir: &RuntimeDir) -> Result<Vec<mounts::Mount>, EngineError> {
    let all = all_mounts()?;
    let devices: Vec<(u32, u32)> = all
        .iter()
        .filter(|mount| mount.at.starts_with(runtime_dir.dir()))
        .map(|mount| mount.device)
        .collect();
    let name = format!("ondeck:{}", runtime_dir.id());
    // Users can give any name to what they mount by FUSE.
    let is_own = |mount: &mounts::Mount| {
        (mount.source == name && !mount.is_a_users()) || devices.contains(&mount.device)
    };
    let mut shown: Vec<_> =
        all.into_iter().filter(|mount| is_own(mount) && !mount.at.starts_with(runtime_dir.dir())).collect();
    shown.reverse();
    Ok(shown)
}

/// Unmounts it wherever it is shown, and removes the directories that were made for it.
pub(super) fn take_all_away(runtime_dir: &RuntimeDir, record: &RamDiskRecord) -> Result<(), EngineError> {
    let mut result = Ok(());
    for mount in own_mounts(runtime_dir)? {
        if let Err(error) = take_away(&mount, record.layout.owner) {
            result = Err(error);
        }
    }
    for shown in record.shown.iter().filter(|shown| shown.made) {
        let path = shown.path.clone();
        // Not empty, or gone: then it is somebody else's now.
        let _ =
            within(Instant::now() + ORDERLY, "removing a directory", move || Ok(fs::remove_dir(path).ok()));
    }
    // One inside another can't be reached once the client is cut off, and went with the outer one.
    if own_mounts(runtime_dir)?.is_empty() { Ok(()) } else { result }
}

/// Why the directory to show it at can't be opened. No component of the path may be a symlink: whoever can change a directory
/// above could otherwise choose what is mounted over.
fn not_opened(path: &Path, error: std::io::Error) -> EngineError {
    if error.kind() == std::io::ErrorKind::NotADirectory {
        return EngineError::Refused(format!("{} is not a directory", path.display()));
    }
    if error.raw_os_error() != Some(rustix::io::Errno::LOOP.raw_os_error()) {
        return EngineError::io("mount on", path, error);
    }
    let real = path.parent().and_then(|parent| parent.canonicalize().ok());
    let hint = real
        .zip(path.file_name())
        .map(|(parent, name)| format!("; its real path may be {}", parent.join(name).display()));
    let hint = hint.unwrap_or_default();
    EngineError::Refused(format!("there is a symlink in {}{hint}", path.display()))
}
