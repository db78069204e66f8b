//! Symlinks, FIFOs, sockets and devices.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use rustix::fs::{self, AtFlags, FileType, Mode, Stat};

use super::file::{TRIES, kept_changing};
use super::placement::Placement;
use super::{At, Engine, Worker};
use crate::attributes;
use crate::checksum::Digest;
use crate::error::{During, Fault};

impl Engine<'_> {
    /// Copies a symlink, FIFO, socket or device.
    pub(super) fn other(&self, at: &At<'_>, worker: &mut Worker, attempt: u32) -> Result<(), Fault> {
        let source = at.fds.source.as_fd();
        let stat = fs::statat(source, at.name, AtFlags::SYMLINK_NOFOLLOW).during("reading it")?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if matches!(file_type, FileType::RegularFile | FileType::Directory) {
            return Err(Fault::message("copying it", "it was replaced by another kind of entry meanwhile"));
        }
        let found = self.found_in_target(at)?;
        // It has no content that could be newer.
        if self.options.update && found.as_ref().is_some_and(|found| self.is_same_other(at, &stat, found)) {
            self.unchanged(at, &stat, false);
            return Ok(());
        }
        let Some(placement) = self.placement(at, &stat, found.as_ref())? else { return Ok(()) };
        if placement.beside && found.as_ref().is_some_and(|found| self.is_same_other(at, &stat, found)) {
            if stat.st_nlink > 1 {
                self.meet_unchanged(at, &stat);
            }
            self.unchanged(at, &stat, false);
            return Ok(());
        }
        if stat.st_nlink > 1 && attempt == 0 && self.join_links(at, &stat, &placement, worker)? {
            return Ok(());
        }
        let kind = match file_type {
            FileType::Symlink => b'l',
            FileType::Fifo => b'p',
            FileType::Socket => b's',
            FileType::CharacterDevice => b'c',
            _ => b'b',
        };
        let made = self.make_other(at, &stat, file_type, &placement);
        if matches!(made, Ok(false)) && attempt + 1 < TRIES {
            return self.other(at, worker, attempt + 1);
        }
        let made = made.and_then(|named| if named { Ok(()) } else { Err(kept_changing()) });
        if stat.st_nlink > 1 {
            self.settle_links(at, &stat, made.is_ok().then_some(&*placement.name));
        }
        made?;
        self.counts.others.fetch_add(1, Ordering::Relaxed);
        self.placed(at, &placement, kind, Digest::default(), &stat, true, worker)
    }

    /// Returns whether it has its name.
    fn make_other(
        &self,
        at: &At<'_>,
        stat: &Stat,
        file_type: FileType,
        to: &Placement,
    ) -> Result<bool, Fault> {
        let (source, target) = (at.fds.source.as_fd(), at.fds.target()?);
        let name = self.working_name(at.node, to);
        let make = || match file_type {
            FileType::Symlink => {
                let content = fs::readlinkat(source, at.name, Vec::new())?;
                fs::symlinkat(&*content, target, &*name)
            }
            _ => fs::mknodat(
                target,
                &*name,
                file_type,
                Mode::from_raw_mode(stat.st_mode & 0o700),
                stat.st_rdev,
            ),
        };
        self.replacing_leftover(target, &name, make).during(match file_type {
            FileType::Symlink => "making the symlink",
            FileType::CharacterDevice | FileType::BlockDevice => "making the device",
            _ => "making it",
        })?;
        let xattrs = attributes::read_xattrs_at(source, at.name, self.policy)?;
        if at.node.hands_down_acl && file_type != FileType::Symlink {
            attributes::drop_acl_at(target, &name);
        }
        let wanted = attributes::cut(stat, &xattrs, at.node.most);
        let applied =
            attributes::apply_at(target, &name, &wanted, &xattrs, self.options.ownership, &self.privilege);
        if !self.give_name(target, &name, to)? {
            let _ = fs::unlinkat(target, &*name, AtFlags::empty());
            return Ok(false);
        }
        self.judge(applied).map(|()| true)
    }

    /// Whether the target has the same symlink, FIFO, socket or device.
    fn is_same_other(&self, at: &At<'_>, stat: &Stat, found: &Stat) -> bool {
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if file_type != FileType::from_raw_mode(found.st_mode) {
            return false;
        }
        match file_type {
            FileType::Symlink => {
                let name = self.target_name(at.name);
                let theirs =
                    at.fds.target().ok().and_then(|dir| fs::readlinkat(dir, &*name, Vec::new()).ok());
                theirs.is_some() && theirs == fs::readlinkat(&at.fds.source, at.name, Vec::new()).ok()
            }
            FileType::CharacterDevice | FileType::BlockDevice => stat.st_rdev == found.st_rdev,
            _ => true,
        }
    }
}
