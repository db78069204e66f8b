//! Entering a pair of directories: the source's is opened, the target's opened or made.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{self, AtFlags, Mode, Stat};
use rustix::io::Errno;

use super::{Engine, RESTORING, stat_if_there};
use crate::Ownership;
use crate::attributes::{self, ACL_ACCESS, ACL_DEFAULT, is_directory};
use crate::dir::{self, DirFds, DirNode, Kind, NewDir, OPEN_DIRECTORY};
use crate::error::{During, Fault};
use crate::merge::{DirectoryAction, Side};
use crate::progress::Event;

/// What is known of a target directory when it is entered.
pub(super) struct Entered {
    pub(super) target: Option<OwnedFd>,
    pub(super) kind: Kind,
    pub(super) partial: Option<CString>,
    pub(super) restore_mode: Option<u32>,
    pub(super) restore_source: Option<u32>,
}

impl Entered {
    /// A directory that a dry run would make.
    pub(super) fn imagined() -> Self {
        Entered {
            target: None,
            kind: Kind::Imagined,
            partial: None,
            restore_mode: None,
            restore_source: None,
        }
    }
}

impl Engine<'_> {
    pub(super) fn default_directory_action(&self) -> DirectoryAction {
        DirectoryAction::Merge { delete: self.options.delete, attributes: true }
    }

    pub(super) fn try_enter(
        &self,
        parent: &Arc<DirNode>,
        name: &CStr,
    ) -> Result<Option<(Arc<DirNode>, OwnedFd)>, Fault> {
        let fds = parent.fds(&self.budget)?;
        let path = || dir::join(&parent.path(), name.to_bytes());
        let Some((source, source_stat, restore_source)) =
            self.open_source_directory(fds.source.as_fd(), name, &path)?
        else {
            return Ok(None);
        };
        let entered = self.enter_both(parent, name, &fds, &source, restore_source);
        match entered {
            Ok(Some((entered, action, beside))) => {
                let listing = open_listing(&source)?;
                let names = (name.to_owned(), beside.unwrap_or_else(|| name.to_owned()));
                let node = self.node(Some(parent.clone()), names, source, source_stat, entered, action)?;
                Ok(Some((node, listing)))
            }
            left_out => {
                // Nothing else will.
                if let Some(mode) = restore_source {
                    fs::fchmod(&source, Mode::from_raw_mode(mode)).during(RESTORING)?;
                }
                left_out.map(|_| None)
            }
        }
    }

    /// The target's side of a directory whose source is open, and what is to be done with it; its name, if it is put beside
    /// what has its own.
    fn enter_both(
        &self,
        parent: &Arc<DirNode>,
        name: &CStr,
        fds: &DirFds,
        source: &OwnedFd,
        restore_source: Option<u32>,
    ) -> Result<Option<(Entered, DirectoryAction, Option<CString>)>, Fault> {
        const ACTION: &str = "copying it";
        let look = |name: &CStr| match (&fds.target, parent.kind) {
            (Some(target), Kind::Existing | Kind::Resumed) => stat_if_there(target.as_fd(), name),
            _ => Ok(None),
        };
        let ask = |name: &CStr, found: Option<&Stat>| match self.policy {
            Some(policy) => {
                policy.directory(&dir::join(&parent.path(), name.to_bytes()), source.as_fd(), found)
            }
            None => self.default_directory_action(),
        };
        let mut found = look(name)?;
        let mut action = ask(name, found.as_ref());
        let mut beside = None;
        if let DirectoryAction::Beside(other) = action {
            found = look(&other)?;
            action = ask(&other, found.as_ref());
            beside = Some(other);
        }
        match action {
            DirectoryAction::Skip => return Ok(None),
            DirectoryAction::Refuse(why) => return Err(Fault::message(ACTION, why)),
            DirectoryAction::Beside(_) => {
                let why = "someone else has also taken the name that it would get beside theirs; rename theirs and try again";
                return Err(Fault::message(ACTION, why));
            }
            DirectoryAction::Merge { .. } => {}
        }
        let mut entered =
            self.enter_target(parent, fds, beside.as_deref().unwrap_or(name), found.as_ref())?;
        entered.restore_source = restore_source;
        if let Some(beside) = &beside {
            let path = dir::join(&parent.path(), name.to_bytes());
            (self.monitor.event)(Event::PutBeside { path: &path, name: beside.to_bytes() });
        }
        Ok(Some((entered, action, beside)))
    }

    /// Opens or makes the target's directory for a source directory.
    fn enter_target(
        &self,
        parent: &DirNode,
        fds: &DirFds,
        name: &CStr,
        found: Option<&Stat>,
    ) -> Result<Entered, Fault> {
        let Some(target) = &fds.target else {
            (self.monitor.event)(Event::Would("make directory", &dir::join(&parent.path(), name.to_bytes())));
            return Ok(Entered::imagined());
        };
        let target = target.as_fd();
        match found {
            Some(stat) if is_directory(stat) => {
                let kind = if parent.kind == Kind::Resumed { Kind::Resumed } else { Kind::Existing };
                if let Some(policy) = self.policy
                    && self.is_closed_own(stat)
                {
                    policy.opening_up(Side::Target, &dir::join(&parent.path(), name.to_bytes()), stat);
                }
                let (opened, restore_mode) = self.open_existing(target, name, stat)?;
                Ok(Entered { target: Some(opened), kind, partial: None, restore_mode, restore_source: None })
            }
            _ if self.options.dry_run => {
                (self.monitor.event)(Event::Would(
                    "make directory",
                    &dir::join(&parent.path(), name.to_bytes()),
                ));
                Ok(Entered::imagined())
            }
            Some(_) if parent.kind == Kind::Resumed => {
                fs::unlinkat(target, name, AtFlags::empty()).during("replacing it by a directory")?;
                self.make_directory(target, name, false)
            }
            _ => {
                let seen = parent.kind == Kind::Existing && !self.options.unseen;
                self.make_directory(target, name, seen)
            }
        }
    }

    /// Makes a target directory, under a temporary name if others look into its parent.
    pub(super) fn make_directory(
        &self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        partial: bool,
    ) -> Result<Entered, Fault> {
        const ACTION: &str = "making the directory";
        let temporary = partial.then(|| self.partial_name(name));
        let name = temporary.as_deref().unwrap_or(name);
        let kind = match fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => Kind::Fresh,
            Err(Errno::EXIST) => Kind::Resumed,
            Err(error) => return Err(Fault::new(ACTION, error)),
        };
        let target = match kind {
            Kind::Fresh => fs::openat(parent, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?,
            _ => {
                let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).during(ACTION)?;
                self.open_existing(parent, name, &stat)?.0
            }
        };
        Ok(Entered {
            target: Some(target),
            kind,
            partial: temporary,
            restore_mode: None,
            restore_source: None,
        })
    }

    /// Opens a target directory that exists. One of ours that we may not write to (a finished copy of a read-only
    /// directory) is made writable until it is completed again.
    fn open_existing(
        &self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
    ) -> Result<(OwnedFd, Option<u32>), Fault> {
        const ACTION: &str = "opening it in the target";
        let closed = self.is_closed_own(stat) && !self.options.dry_run;
        if closed {
            attributes::chmod_at(parent, name, stat, stat.st_mode & 0o7777 | 0o700).during(ACTION)?;
        }
        let opened = fs::openat(parent, name, OPEN_DIRECTORY, Mode::empty()).during(ACTION)?;
        let now = fs::fstat(&opened).during(ACTION)?;
        if (now.st_dev, now.st_ino) != (stat.st_dev, stat.st_ino) {
            // What was decided on was another one, of somebody else perhaps.
            return Err(Fault::message(ACTION, "it was replaced by another meanwhile; try again"));
        }
        Ok((opened, closed.then_some(stat.st_mode & 0o7777)))
    }

    pub(super) fn node(
        &self,
        parent: Option<Arc<DirNode>>,
        (source_name, name): (CString, CString),
        source: OwnedFd,
        source_stat: Stat,
        entered: Entered,
        action: DirectoryAction,
    ) -> Result<Arc<DirNode>, Fault> {
        let (delete, attributes) = match action {
            DirectoryAction::Merge { delete, attributes } => (delete, attributes),
            DirectoryAction::Skip | DirectoryAction::Refuse(_) | DirectoryAction::Beside(_) => (false, false),
        };
        let new = entered.kind != Kind::Existing;
        let mut hands_down_acl = false;
        // A directory that we make hands down what the one above does.
        let mut most = parent.as_ref().map_or(0o777, |parent| parent.most);
        let mut target_stat = None;
        if let Some(target) = &entered.target {
            let mut stat = fs::fstat(target).during("opening it in the target")?;
            if let Some(mode) = entered.restore_mode {
                stat.st_mode = stat.st_mode & libc::S_IFMT | mode;
            }
            target_stat = Some(stat);
            if entered.kind == Kind::Resumed {
                self.make_as_new(parent.as_ref(), target.as_fd(), &stat)?;
            } else {
                match entered.kind {
                    Kind::Existing => {
                        let default = attributes::default_bits(target.as_fd());
                        hands_down_acl = default.is_some();
                        most = default
                            .filter(|_| !self.source_had_default_acl(parent.as_deref(), &name, &source))
                            .unwrap_or(0o777);
                    }
                    // What it inherited from its parent is not the source's; drop it before it is handed down.
                    _ if parent.as_ref().is_none_or(|parent| parent.hands_down_acl) => {
                        let _ = fs::fremovexattr(target, ACL_DEFAULT);
                        let _ = fs::fremovexattr(target, ACL_ACCESS);
                    }
                    _ => {}
                }
            }
        }
        Ok(DirNode::new(
            NewDir {
                parent,
                name,
                source_name,
                kind: entered.kind,
                partial: entered.partial,
                restore_mode: entered.restore_mode,
                restore_source: entered.restore_source,
                attributes: attributes || (new && self.single.is_none()),
                delete: delete || entered.kind == Kind::Resumed,
                hands_down_acl,
                most,
                source: source_stat,
                target: target_stat,
                fds: DirFds { source, target: entered.target },
            },
            &self.budget,
        ))
    }

    /// Whether the source's entries are as a default ACL, which their directory has in the target, has let them be: if it
    /// could not be shown to whoever made them, it still keeps out whom it keeps out.
    fn source_had_default_acl(&self, parent: Option<&DirNode>, name: &CStr, source: &OwnedFd) -> bool {
        let Some(policy) = self.policy.filter(|_| self.options.ownership == Ownership::Inherit) else {
            return true;
        };
        let path = parent.map_or_else(Vec::new, |parent| dir::join(&parent.path(), name.to_bytes()));
        has_xattr(source.as_fd(), ACL_DEFAULT) || policy.showed_default_acl(&path)
    }

    /// Makes a directory that an interrupted copy left what it was when that one made it. It may have got its mode and its
    /// ACLs already, and would hand them down.
    fn make_as_new(
        &self,
        parent: Option<&Arc<DirNode>>,
        target: BorrowedFd<'_>,
        stat: &Stat,
    ) -> Result<(), Fault> {
        const ACTION: &str = "taking back what an interrupted copy gave it";
        let parent_fds = parent.map(|parent| parent.fds(&self.budget)).transpose()?;
        let above = match &parent_fds {
            Some(fds) => Some(fds.target()?),
            None => self.root_parent.as_ref().map(AsFd::as_fd),
        };
        let group =
            above.map(fs::fstat).transpose().during(ACTION)?.map_or(0, |above| above.st_mode & 0o2000);
        let mode = 0o700 | group;
        if stat.st_mode & 0o7777 != mode {
            fs::fchmod(target, Mode::from_raw_mode(mode)).during(ACTION)?;
        }
        for name in [ACL_DEFAULT, ACL_ACCESS] {
            match fs::fremovexattr(target, name) {
                Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(Fault::new(ACTION, error)),
            }
        }
        Ok(())
    }
}

/// A descriptor to read the entries of a directory that was just opened. It shares its offset with the node's own,
/// which is never read from.
pub(super) fn open_listing(source: &OwnedFd) -> Result<OwnedFd, Fault> {
    rustix::io::fcntl_dupfd_cloexec(source, 0).during("listing it")
}

fn has_xattr(fd: BorrowedFd<'_>, name: &CStr) -> bool {
    fs::fgetxattr(fd, name, &mut [0_u8; 0]).is_ok()
}
