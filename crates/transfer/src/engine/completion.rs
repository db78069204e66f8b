//! Completing a directory when the last of its items is done.

use std::ffi::CStr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, Mode, RenameFlags};
use rustix::io::Errno;

use super::{Engine, RESTORING, stat_if_there};
use crate::attributes;
use crate::dir::{DirNode, Kind};
use crate::error::{During, Fault};
use crate::merge::{DirectoryAction, Merged};
use crate::progress::Event;

impl Engine<'_> {
    /// One of a directory's items is done. The last one completes the directory, which is one of its parent's items.
    pub(super) fn finished_one(&self, node: &Arc<DirNode>) {
        let mut node = node.clone();
        while node.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let complete = self.complete(&node);
            // Also if it could not be completed, and before the directory above is shut again.
            for result in [complete, self.shut_source(&node)] {
                if let Err(fault) = result {
                    self.failed(node.path(), fault);
                }
            }
            node.close();
            match &node.parent {
                Some(parent) => node = parent.clone(),
                None => return,
            }
        }
    }

    /// All entries of a directory are in place: remove what is not the source's, set its attributes, show it.
    fn complete(&self, node: &Arc<DirNode>) -> Result<(), Fault> {
        // The mode of a directory that was opened up, until it has it again or has got another one.
        let mut opened_up = node.restore_mode;
        let done = if self.monitor.progress.is_cancelled() {
            Ok(())
        } else {
            self.complete_target(node, &mut opened_up)
        };
        if let Some(mode) = opened_up
            && let Some(target) = &node.fds(&self.budget)?.target
        {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(RESTORING)?;
        }
        done
    }

    fn complete_target(&self, node: &Arc<DirNode>, opened_up: &mut Option<u32>) -> Result<(), Fault> {
        if self.single.is_some() {
            return Ok(());
        }
        let fds = node.fds(&self.budget)?;
        let path = node.path();
        let Some(target) = &fds.target else { return Ok(()) };
        if node.delete && !node.incomplete.load(Ordering::Relaxed) {
            self.delete_extraneous(&path, fds.source.as_fd(), target.as_fd(), node.kind == Kind::Resumed)?;
        }
        if self.options.dry_run {
            return Ok(());
        }
        let mut lost = Ok(());
        if node.attributes {
            let have = fs::fstat(target).during("reading its attributes")?;
            let xattrs = attributes::read_xattrs(fds.source.as_fd(), self.policy)?;
            let ownership = self.options.ownership;
            if matches!(node.kind, Kind::Existing | Kind::Resumed) {
                attributes::remove_others(target.as_fd(), &xattrs)?;
            }
            let wanted = attributes::cut(&node.source, &xattrs, node.most);
            lost = attributes::apply(target.as_fd(), &have, &wanted, &xattrs, ownership, &self.privilege);
            *opened_up = None;
        }
        let mut changed = false;
        if let (Kind::Existing, false, Some(policy), Some(entered)) =
            (node.kind, node.attributes, self.policy, &node.entered)
        {
            let have = fs::fstat(target).during("reading its attributes")?;
            let changes = policy.changes(&Merged {
                path: &path,
                source_dir: fds.source.as_fd(),
                source: &node.source,
                target_dir: target.as_fd(),
                entered,
                target: &have,
            });
            let mut changes =
                changes.map_err(|source| Fault { action: "reading its extended attributes", source })?;
            changed = !changes.is_empty();
            changes.mode = changes.mode.or(opened_up.take());
            lost = attributes::change(target.as_fd(), &have, &changes, &self.privilege);
        } else if let Some(mode) = opened_up.take() {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(RESTORING)?;
        }
        if let Some(temporary) = &node.partial {
            self.show_directory(node, temporary)?;
        }
        self.counts.directories.fetch_add(1, Ordering::Relaxed);
        if node.kind != Kind::Existing || node.attributes || changed {
            self.counts.made_directories.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(policy) = self.policy {
            policy.placed(&path, &fs::fstat(target).during("reading its attributes")?);
        }
        self.judge(lost)
    }

    /// Gives a directory of the source the mode back that shuts out its owner.
    fn shut_source(&self, node: &Arc<DirNode>) -> Result<(), Fault> {
        let Some(mode) = node.restore_source else { return Ok(()) };
        let fds = node.fds(&self.budget)?;
        fs::fchmod(&fds.source, Mode::from_raw_mode(mode)).during(RESTORING)
    }

    /// Gives a complete new directory its name.
    fn show_directory(&self, node: &Arc<DirNode>, temporary: &CStr) -> Result<(), Fault> {
        const ACTION: &str = "giving the finished directory its name";
        let parent_fds;
        let parent = match (&node.parent, &self.root_parent) {
            (Some(parent), _) => {
                parent_fds = parent.fds(&self.budget)?;
                parent_fds.target()?
            }
            (None, Some(fd)) => fd.as_fd(),
            (None, None) => return Err(Fault::message(ACTION, "it has no parent")),
        };
        let mut beside = None;
        let renamed = match fs::renameat_with(parent, temporary, parent, &*node.name, RenameFlags::NOREPLACE)
        {
            // Some filesystems can't promise not to replace; a plain rename replaces an empty directory only.
            Err(Errno::INVAL | Errno::NOSYS) => fs::renameat(parent, temporary, parent, &*node.name),
            Err(Errno::EXIST) => {
                // A file, symlink or the like that was there before: the source's directory takes its place. It may also
                // have come meanwhile.
                let action = match (self.policy, stat_if_there(parent, &node.name)?) {
                    (Some(policy), Some(found)) => {
                        let fds = node.fds(&self.budget)?;
                        Some(policy.directory(&node.path(), fds.source.as_fd(), Some(&found)))
                    }
                    _ => None,
                };
                match action {
                    Some(DirectoryAction::Refuse(why)) => return Err(Fault::message(ACTION, why)),
                    Some(DirectoryAction::Beside(name)) => {
                        let flags = RenameFlags::NOREPLACE;
                        let renamed = fs::renameat_with(parent, temporary, parent, &*name, flags);
                        beside = Some(name);
                        renamed
                    }
                    _ => match fs::unlinkat(parent, &*node.name, AtFlags::empty()) {
                        Ok(()) => fs::renameat(parent, temporary, parent, &*node.name),
                        // A directory that someone made meanwhile and that may hold their files.
                        Err(_) => Err(Errno::EXIST),
                    },
                }
            }
            other => other,
        };
        renamed.during(ACTION)?;
        if let Some(name) = &beside {
            (self.monitor.event)(Event::PutBeside { path: &node.path(), name: name.to_bytes() });
        }
        node.mark_renamed(beside);
        Ok(())
    }
}
