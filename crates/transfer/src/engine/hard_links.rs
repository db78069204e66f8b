//! Further names of inodes that have several.

use std::ffi::CStr;
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, Stat};
use rustix::io::Errno;

use super::placement::Placement;
use super::walk::Batch;
use super::{At, CopyItem, Engine, Worker};
use crate::checksum::Digest;
use crate::error::{During, Fault};
use crate::links::{ParkedName, Role};

impl Engine<'_> {
    /// For a name of an inode with several: `true` if it is dealt with (linked, or left to the worker that copies
    /// the first name), `false` if it is the first and must be copied.
    pub(super) fn join_links(
        &self,
        at: &At<'_>,
        stat: &Stat,
        to: &Placement,
        worker: &mut Worker,
    ) -> Result<bool, Fault> {
        match self.links.meet(stat, at.node, at.name) {
            Role::First => Ok(false),
            Role::Parked => {
                // Its directory isn't complete before this name is linked.
                at.node.pending.fetch_add(1, Ordering::AcqRel);
                Ok(true)
            }
            Role::LinkTo { node, name } => {
                let from = node.fds(&self.budget)?;
                let target = at.fds.target()?;
                let working = self.working_name(at.node, to);
                let link = || {
                    fs::linkat(
                        from.target.as_ref().ok_or(Errno::BADF)?,
                        &*name,
                        target,
                        &*working,
                        AtFlags::empty(),
                    )
                };
                self.replacing_leftover(target, &working, link).during("making the hard link")?;
                let named = self.give_name(target, &working, to)?;
                if *working != *to.name {
                    // Renaming a name over another of the same inode does nothing at all, by POSIX.
                    let _ = fs::unlinkat(target, &*working, AtFlags::empty());
                }
                if !named {
                    // It is copied like any other, and the policy is asked again.
                    return Ok(false);
                }
                self.counts.hard_links.fetch_add(1, Ordering::Relaxed);
                self.placed(at, to, b'h', Digest::default(), stat, true, worker)?;
                Ok(true)
            }
        }
    }

    /// The name that further names of an unchanged file's inode are linked to: this one, if it is the first.
    pub(super) fn meet_unchanged(&self, at: &At<'_>, stat: &Stat) {
        if let Role::Parked = self.links.meet(stat, at.node, at.name) {
            // It comes back when the first name is in place, and is found unchanged again.
            at.node.pending.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The first name of an inode is in place (or failed): the names that wait for it become work.
    pub(super) fn settle_links(&self, at: &At<'_>, stat: &Stat, target_name: Option<&CStr>) {
        let waiting = match target_name {
            Some(name) => self.links.placed(stat, at.node, name),
            None => self.links.failed(stat),
        };
        // Each parked name already counts as an item of its directory.
        self.stack.push(
            waiting.into_iter().map(|ParkedName { node, name }| CopyItem::Copy(Batch::of_one(node, &name))),
        );
    }
}
