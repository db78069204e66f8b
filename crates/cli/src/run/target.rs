//! Where results go when somebody has renamed or removed their directory while the program ran.
//!
//! The keeper writes to the directories that it opened at the start: they hold what the program saw, and nobody can put
//! another one in their place. But the user looks under the path, so both are compared before and after the results are
//! brought home. A directory that was renamed gets its results where it is, and the run says so with an exit code of its
//! own. One that was removed, or that no path leads to, gets nothing: its results are held. When they are asked for again,
//! a removed directory is opened anew by its path, or made.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result, anyhow, bail};
use ondeck_staging::merge_back::journal::Journal;
use ondeck_staging::merge_back::{Baseline, MergeBack, Moment};
use ondeck_transfer::{Whereabouts, whereabouts};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::places::{journal_path, manifest_path};
use super::plan::RunDirectory;
use super::shared::{Output, Shared, lock};

/// Earlier than anything: whatever a directory holds that was not there at the start is somebody else's.
const NEVER: Moment = (i64::MIN, 0);

impl RunDirectory {
    /// Where the directory is now, if its path does not lead to it any more.
    ///
    /// # Errors
    /// If results can't go there, with the reason and what to do.
    pub fn moved_to(&self) -> Result<Option<PathBuf>> {
        let now = whereabouts(&self.path, self.disk.as_fd())
            .context("can't see whether this is still the directory that the program had; mend that")?;
        match now {
            Whereabouts::InPlace => Ok(None),
            Whereabouts::Moved(now) => Ok(Some(now)),
            Whereabouts::Removed => bail!(
                "the directory was removed while the program ran. To resume makes it anew, or takes the one that is then at \
                 this path, and brings everything that the program saw there in RAM"
            ),
            Whereabouts::Hidden => bail!("{now}. Mount it again, or take away what covers it"),
            Whereabouts::Lost(_) => {
                bail!("{now}. Mount it again: to resume opens the directory anew by its path")
            }
        }
    }

    /// The directory that is at the path now, if the one that was opened is gone. It is made if it was removed.
    fn open_anew(&self) -> Result<Option<OwnedFd>> {
        let removed = match whereabouts(&self.path, self.disk.as_fd())? {
            Whereabouts::InPlace | Whereabouts::Moved(_) | Whereabouts::Hidden => return Ok(None),
            Whereabouts::Removed => true,
            Whereabouts::Lost(_) => false,
        };
        let path = self.path.display();
        // The path had no symlink at the start. One that somebody has put there since could lead anywhere.
        let open = |path: &Path| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        };
        let opened = match open(&self.path) {
            Err(Errno::NOENT) if removed => {
                rustix::fs::mkdir(&self.path, Mode::RWXU)
                    .with_context(|| format!("it was removed and can't be made again; mkdir -p {path}"))?;
                open(&self.path)
            }
            other => other,
        };
        let opened = opened.map_err(|error| match error {
            Errno::LOOP => {
                anyhow!("there is a symlink in its path now, which is not followed; put a directory there")
            }
            Errno::NOTDIR => anyhow!("there is no directory at its path now; put one there"),
            error => anyhow!("it can't be opened anew: {error}"),
        })?;
        let owner = rustix::fs::fstat(&opened)?.st_uid;
        if owner != self.owner && owner != rustix::process::geteuid().as_raw() {
            bail!(
                "the directory that is at its path now belongs to another user (uid {owner}), and so may not be meant; put \
                 one of yours there"
            );
        }
        Ok(Some(opened))
    }
}

impl Shared {
    /// Opens the target of an output anew if it is gone. Returns whether the results go to another directory now.
    ///
    /// # Errors
    /// Why they can't, and what to do.
    pub fn open_target_anew(&mut self, output: &Output) -> Result<bool> {
        let index = output.directory;
        let Some(disk) = self.plan.directories[index].open_anew()? else { return Ok(false) };
        let directory = &mut self.plan.directories[index];
        let is_another = rustix::fs::fstat(&disk)?.st_ino != directory.inode;
        directory.disk = disk;
        if !is_another {
            return Ok(false);
        }
        // What was on disk at the start is gone, so nothing is as it was staged in, and nothing that is there is ours.
        let former = &output.merge_back;
        let (id, nested) = (former.id.clone(), former.nested.clone());
        // What it knows of files with several names is its own: another output's doing says nothing of what somebody has
        // put here.
        let mut merge_back = MergeBack::new(former.mechanism, NEVER, Baseline::default(), id, nested);
        // As at the start: without it a successor knows less, and nothing is lost.
        merge_back.journal = Journal::go_on(&journal_path(&self.dir, index)).ok();
        let fresh = Output {
            directory: index,
            ram: rustix::io::fcntl_dupfd_cloexec(&output.ram, 0)?,
            slot: output.slot.clone(),
            merge_back,
            home: AtomicBool::new(false),
            detached: AtomicBool::new(output.detached.load(Relaxed)),
        };
        // The record of what was copied to the former one.
        match std::fs::remove_file(manifest_path(&self.dir, index)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        if let Some(known) = lock(&self.outputs).iter_mut().find(|known| known.directory == index) {
            *known = Arc::new(fresh);
        }
        Ok(true)
    }
}
