//! Carrying out the log on the backing directory: one operation after the other, by one thread.
//!
//! What is made gets a name of its own first, that of something unfinished, beside the one it will have; only when its data is on
//! the disk it is renamed. So is the data of a file that is renamed or linked. To spare the disk, that is done for a *batch* of
//! operations together: their files are written back by several threads, the filesystem is synced once, and then the names are
//! changed in their order.
//!
//! One that fails for a reason of its own (its name is too long there, it may not be written to) holds up those that depend on it.
//! Others overtake it. If the backing directory itself can't be reached or written to, all wait in their order.
//!
//! A process that was killed may have done an operation without having noted it: the first of the log, or the one that was noted as
//! [begun](super::journal::Record::Begun). So each one recognizes that it is done already, by the inode numbers that were noted
//! before.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::Core;
use super::conflicts::Beside;
use super::inode::{Home, Homes, Inode, Kind, Operation, Seen, UnderWay, dirty};
use super::state::State;
use super::turns::{Held, Turn, is_its_own, may_be_missing};
use super::unfinished::{UNFINISHED, unfinished};
use super::wait::Need;
use crate::acl;
use crate::backing::{self, Stat};
use crate::message::{Ino, ROOT, Time};
use crate::status::ConflictKind;

/// What became of an operation.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// The name that ours has, if it is not the one it should have.
    pub beside: Option<OsString>,
    /// Why a removal was not carried out, if it was not.
    pub kept: Option<ConflictKind>,
    /// Files that it was about, and that others had changed before.
    pub changed: Vec<Ino>,
    /// Others have removed or replaced the file that it was to move.
    pub gone: bool,
}

impl State {
    pub(super) fn has_home(&self, ino: Ino, dir: Ino, name: &OsStr) -> bool {
        self.inodes
            .get(&ino)
            .is_some_and(|inode| inode.homes.iter().any(|home| home.dir == dir && *home.name == *name))
    }

    pub(super) fn seen(&self, ino: Ino) -> Option<Seen> {
        self.inodes.get(&ino).and_then(|inode| inode.seen)
    }

    /// Whether a file that is to be made has lost all its names again, and nobody has to find it until then, or it can't get its
    /// name at all.
    fn is_lost(&self, ino: Ino) -> bool {
        let orphan = self.inodes.get(&ino).filter(|inode| inode.is_orphan() && !inode.is_dir());
        orphan.is_some_and(|inode| inode.needless || self.stuck.contains_key(&inode.made_by))
    }

    /// Where something is made that is to be in a directory: the nearest one that is on the backing directory.
    pub(super) fn place_for(&self, dir: Ino) -> Ino {
        let mut within = dir;
        while within != ROOT && self.inodes.get(&within).is_some_and(|inode| inode.homes.is_empty()) {
            within = self.directory(within).map_or(ROOT, |directory| directory.parent);
        }
        within
    }

    /// Whether a directory may have a default ACL on the backing directory, which what is made there inherits, whatever it is to
    /// have: one that was removed here may still be there, and what is made waits at times in a directory above its own.
    fn may_have_default_acl(&self, dir: Ino) -> bool {
        let Some(inode) = self.inodes.get(&dir).filter(|_| self.keeps_acls) else { return false };
        let is_changed = (inode.dirty | inode.writing) & dirty::XATTRS != 0;
        is_changed
            || inode.xattrs.as_deref().is_none_or(|xattrs| xattrs.contains_key(OsStr::new(acl::DEFAULT)))
    }

    /// Whether a name that a file is to get is removed again by what comes next in the log that is about this name.
    fn is_taken_back(&self, ino: Ino, dir: Ino, name: &OsStr) -> bool {
        let name = name.to_owned();
        let link = Operation::Link { ino, dir, name: name.clone() };
        let mut about_it = (self.log.iter().filter(|pending| !pending.cancelled))
            .map(|pending| &pending.operation)
            .filter(|operation| operation.names().contains(&(dir, &name)))
            .skip_while(|operation| **operation != link);
        let next = about_it.nth(1);
        matches!(next, Some(Operation::Unlink { ino: removed, .. }) if *removed == ino)
    }

    /// The files whose data has to be on the disk before an operation is carried out: those that get a name; and those that lose
    /// one, because it may be the last that is known here, and has others.
    pub(super) fn shown_by(&self, operation: &Operation) -> impl Iterator<Item = Ino> {
        let is_left = |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| !inode.is_orphan());
        let shown = match operation {
            Operation::Make { ino, .. } | Operation::Link { ino, .. } => [Some(*ino), None],
            Operation::Rename { ino, over, .. } => [Some(*ino), over.filter(is_left)],
            Operation::Exchange { ino, other, .. } => [Some(*ino), Some(*other)],
            Operation::Unlink { ino, .. } => [Some(*ino).filter(is_left), None],
        };
        let is_file =
            |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| !inode.is_dir()) && !self.is_lost(*ino);
        shown.into_iter().flatten().filter(is_file)
    }
}

impl Core {
    /// Carries out some operations that have to be, and returns whether there were any. One that fails for a reason of its own holds
    /// up those that depend on it, and is tried again later.
    ///
    /// # Errors
    /// The backing directory can't be reached or written to: nothing was done.
    pub fn apply_some(&self) -> Result<bool, (Ino, Errno)> {
        let (round, shown, wide_directories) = {
            let mut state = self.lock();
            let round = if state.stopped { Vec::new() } else { state.next_round() };
            let Some((last, _)) = round.last() else { return Ok(false) };
            state.batch_end = *last;
            let mut shown: Vec<Ino> = (round.iter().filter_map(|(_, turn)| turn.operation()))
                .flat_map(|operation| state.shown_by(operation))
                .collect();
            let wide = state.wide_for(&round);
            shown.extend(wide.files);
            shown.sort_unstable();
            shown.dedup();
            (round, shown, wide.directories)
        };
        if let Err(failed) = self.narrow_directories(&wide_directories) {
            // That is how the end is told.
            if failed.1 != Errno::AGAIN {
                self.tell_unmade(&round, failed.1);
            }
            self.lock().batch_end = 0;
            return Err(failed);
        }
        // Whether what is made has a directory to be made in does not matter here: the nearest one that is there takes it.
        let mut failed = self.prepare_all(&round);
        // What could not be made has no place for its data.
        let shown: Vec<Ino> =
            shown.into_iter().filter(|ino| failed.iter().all(|(failed, _)| failed != ino)).collect();
        failed.extend(self.write_back_all(&shown));
        let done = self.apply_round(&round, &failed);
        self.lock().batch_end = 0;
        done
    }

    fn apply_round(&self, round: &[(u64, Turn)], failed: &[(Ino, Errno)]) -> Result<bool, (Ino, Errno)> {
        let mut held = Held::default();
        let mut any = false;
        for (number, turn) in round {
            let operation = match turn {
                Turn::Try(operation) => operation,
                Turn::Hold(operation, error) => {
                    held.add(operation, *error);
                    continue;
                }
                Turn::Pass(operation) => {
                    // With those before it, unless they are stuck.
                    if self.lock().first_pending == *number {
                        self.end(*number, operation, &Done::default());
                        any = true;
                    }
                    continue;
                }
            };
            if let Some(error) = held.holds(operation) {
                held.add(operation, error);
                continue;
            }
            let ino = operation.inodes()[0];
            let of_its_own =
                failed.iter().find(|(failed, _)| operation.shows(*failed)).map(|(_, error)| *error);
            let done = match of_its_own.or_else(|| self.lock().is_held_by(operation, failed)) {
                Some(error) => Err(error),
                None => self.apply_one(*number, operation),
            };
            let done = match done {
                // A directory that others have moved into the other one is still open where it was found.
                Err(error) if may_be_missing(error) || (error == Errno::INVAL && operation.moves()) => {
                    self.apply_again(*number, operation, error)
                }
                other => other,
            };
            match done {
                Ok(()) => any = true,
                Err(error) if is_its_own(error) => {
                    held.add(operation, error);
                    let mut state = self.lock();
                    state.stuck.insert(*number, (error, Instant::now() + super::RETRY));
                    state.failed_alone(ino, error);
                    state.waits.not_carried_out(*number, Some(&operation.inodes()), error);
                    drop(state);
                    self.wake_all();
                    any = true;
                }
                // What comes before it is carried out all the same.
                Err(_) if any => break,
                Err(error) => return Err((ino, error)),
            }
        }
        Ok(any)
    }

    pub(super) fn apply_one(&self, number: u64, operation: &Operation) -> Result<(), Errno> {
        // What it changes there must not be taken for somebody else's work by a pass, nor the other way round.
        let still = self.hold_still(operation);
        {
            let mut state = self.lock();
            state.journal_begun(number);
            state.applying = Some((operation.inodes()[0], Instant::now()));
        }
        let changed = self.changed_by_others(operation);
        let applied = self.apply(operation);
        let done = applied.map(|done| self.end(number, operation, &Done { changed, ..done }));
        {
            let mut state = self.lock();
            (state.moving, state.applying) = (None, None);
        }
        self.let_go(&still);
        done
    }

    /// Waits for the passes of the files of an operation, and keeps others from beginning.
    fn hold_still(&self, operation: &Operation) -> Vec<Ino> {
        let mut held = operation.inodes();
        held.sort_unstable();
        held.dedup();
        let mut state = self.lock();
        held.retain(|ino| state.inodes.get(ino).is_some_and(|inode| !inode.is_dir()));
        state.applier_awaits.clone_from(&held);
        while held.iter().any(|ino| state.passes.contains_key(ino)) {
            state = self.wait(state);
        }
        state.applier_awaits.clear();
        let pass = UnderWay { began: Instant::now(), dirty_since: None, changes: false };
        state.passes.extend(held.iter().map(|ino| (*ino, pass)));
        state.moving = Some(std::thread::current().id());
        held
    }

    /// Waits for the pass of a file or directory, and keeps others from beginning. Who has something held still waits for no more.
    ///
    /// # Errors
    /// `EAGAIN` if it is the end.
    pub fn hold_one_still(&self, ino: Ino) -> Result<(), Errno> {
        let mut state = self.lock();
        while state.passes.contains_key(&ino) {
            if state.stopped {
                return Err(Errno::AGAIN);
            }
            state = self.wait(state);
        }
        state.passes.insert(ino, UnderWay { began: Instant::now(), dirty_since: None, changes: false });
        Ok(())
    }

    pub fn let_go(&self, held: &[Ino]) {
        let mut state = self.lock();
        for ino in held {
            state.passes.remove(ino);
            state.waits.wake(&Need::Synced(*ino));
            state.waits.wake(&Need::Quiet(*ino));
            state.remove_if_unused(*ino, &self.store);
        }
        drop(state);
        self.wake_all();
    }

    pub(super) fn end(&self, number: u64, operation: &Operation, done: &Done) {
        let moved = self.seen_now(operation, done.beside.as_deref());
        let mut state = self.lock();
        for (ino, seen) in moved {
            if let Some(inode) = state.inodes.get_mut(&ino) {
                // That it has another time of change now must not hide what others have done.
                let is_changed = done.changed.contains(&ino);
                inode.seen = Some(if is_changed { Seen { ctime: Seen::OTHERS, ..seen } } else { seen });
                state.journal_seen(ino);
            }
        }
        let (dir, name) = match operation {
            Operation::Make { dir, name, .. }
            | Operation::Link { dir, name, .. }
            | Operation::Unlink { dir, name, .. } => (*dir, name),
            Operation::Rename { to_dir, to_name, .. } | Operation::Exchange { to_dir, to_name, .. } => {
                (*to_dir, to_name)
            }
        };
        if done.kept.is_some() {
            for dir in operation.directories() {
                state.now_aside(dir);
            }
        }
        if let Some(kind) = done.kept.or(done.beside.is_some().then_some(ConflictKind::Both)) {
            state.note_conflict((dir, name), done.beside.as_deref(), kind);
        }
        if done.gone {
            state.was_gone(operation.inodes()[0], (dir, name));
        }
        state.announce_applied(number, done.beside.clone());
        if state.stuck.contains_key(&number) {
            state.failing.remove(&operation.inodes()[0]);
        }
        state.applied(&self.store, number, done.beside.as_deref());
        state.shorten_journal();
        drop(state);
        if let Operation::Unlink { ino, .. } = operation {
            self.backing.close(*ino);
        }
        if let Operation::Rename { over: Some(over), .. } = operation {
            self.backing.close(*over);
        }
        self.wake_all();
    }

    /// How the files of an operation look on the backing directory, now that it has changed their names; the new name may be
    /// another than it says.
    fn seen_now(&self, operation: &Operation, beside: Option<&OsStr>) -> Vec<(Ino, Seen)> {
        let mut found = Vec::new();
        let mut look = |ino: Ino, dir: Ino, name: &OsStr| {
            let Ok(directory) = self.backing_directory(dir) else { return };
            let Ok(stat) = backing::stat(directory.as_fd(), name) else { return };
            let is_it = self.lock().seen(ino).is_some_and(|seen| seen.is(&stat));
            if is_it {
                found.push((ino, Seen::now(&stat)));
            }
        };
        match operation {
            Operation::Make { ino, dir, name } | Operation::Link { ino, dir, name } => {
                look(*ino, *dir, beside.unwrap_or(name));
            }
            Operation::Rename { ino, to_dir, to_name, .. } => look(*ino, *to_dir, beside.unwrap_or(to_name)),
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                look(*ino, *to_dir, to_name);
                look(*other, *dir, name);
            }
            Operation::Unlink { .. } => {}
        }
        // The other names of what has lost one have another time of change now.
        let lost = match operation {
            Operation::Unlink { ino, dir, name } => Some((*ino, *dir, name)),
            Operation::Rename { over: Some(over), to_dir, to_name, .. } => Some((*over, *to_dir, to_name)),
            _ => None,
        };
        if let Some((ino, dir, name)) = lost {
            let (home, seen) = {
                let state = self.lock();
                let inode = state.inodes.get(&ino);
                let is_other = |home: &&Home| home.dir != dir || *home.name != **name;
                let has_unknown = inode.is_some_and(|inode| !inode.is_orphan() && !inode.is_dir());
                (
                    inode.and_then(|inode| inode.homes.iter().find(is_other).cloned()),
                    inode.and_then(|inode| inode.seen).filter(|_| has_unknown),
                )
            };
            match (home, seen) {
                (Some(home), _) => look(ino, home.dir, &home.name),
                (None, Some(seen)) => found.push((ino, Seen { ctime: Seen::UNKNOWN, ..seen })),
                (None, None) => {}
            }
        }
        found
    }

    /// Makes what a round makes, under the names of what is unfinished; returns what could not be made.
    fn prepare_all(&self, round: &[(u64, Turn)]) -> Vec<(Ino, Errno)> {
        let mut failed = Vec::new();
        for operation in round.iter().filter_map(|(_, turn)| turn.operation()) {
            let Operation::Make { ino, dir, .. } = operation else { continue };
            self.lock().applying = Some((*ino, Instant::now()));
            if let Err(error) = self.prepare(*ino, *dir) {
                // Its next fsync(2) or close(2) tells it; of what is refused for a reason of its own, who waits for it is told.
                if !is_its_own(error)
                    && let Some(data) = self.lock().inodes.get_mut(ino).and_then(|inode| inode.data_or_new())
                {
                    data.error = Some(error.raw_os_error());
                }
                failed.push((*ino, error));
            }
        }
        self.lock().applying = None;
        failed
    }

    /// Has the next fsync(2) or close(2) of what a round was to make tell why nothing of it could be done.
    fn tell_unmade(&self, round: &[(u64, Turn)], error: Errno) {
        let mut state = self.lock();
        for operation in round.iter().filter_map(|(_, turn)| turn.operation()) {
            if let Operation::Make { ino, .. } = operation
                && let Some(data) = state.inodes.get_mut(ino).and_then(|inode| inode.data_or_new())
            {
                data.error = Some(error.raw_os_error());
            }
        }
    }

    /// Makes an inode under the name of what is unfinished, in the nearest directory that is there.
    pub(super) fn prepare(&self, ino: Ino, dir: Ino) -> Result<(), Errno> {
        let (mode, rdev, target, within, may_inherit) = {
            let state = self.lock();
            let Some(inode) = state.inodes.get(&ino) else { return Ok(()) };
            // What is there already was prepared before. What nobody has to find any more is never made.
            if !inode.homes.is_empty() || state.is_lost(ino) {
                return Ok(());
            }
            let target = match &inode.kind {
                Kind::Symlink(target) => target.as_deref().cloned(),
                _ => None,
            };
            let within = state.place_for(dir);
            (inode.mode, inode.rdev(), target, within, state.may_have_default_acl(within))
        };
        let directory = self.backing_directory(within)?;
        let at = directory.as_fd();
        let mut name = unfinished(&self.store, ino);
        let made = self.within(&[(within, at)], || {
            let make = |name: &OsStr| make(at, name, mode, rdev, target.as_deref());
            match make(&name) {
                Err(Errno::EXIST) => {
                    // Of a process that was killed before it could note that; or others have put something there.
                    if remove(at, &name).is_err() {
                        name = super::unfinished::unforeseen(&self.store, ino)?;
                    }
                    make(&name)
                }
                other => other,
            }
        })?;
        let seen = Seen::now(&made);
        let home = Home { dir: within, name: name.into() };
        let mut state = self.lock();
        // Also if the directory has got one in between.
        let may_inherit = may_inherit || state.may_have_default_acl(within);
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.homes = Homes::One(home.clone());
            inode.seen = Some(seen);
            if let Some(data) = inode.data_or_new() {
                data.backing_len = 0;
            }
        }
        let inherits = may_inherit && !matches!(FileType::from_raw_mode(mode), FileType::Symlink);
        if inherits {
            state.mark_dirty(ino, dirty::XATTRS);
        }
        state.journal_prepared(ino, home, seen, inherits);
        Ok(())
    }

    fn apply(&self, operation: &Operation) -> Result<Done, Errno> {
        match operation {
            Operation::Make { ino, dir, name } => {
                let home = self.lock().inodes.get(ino).and_then(|inode| inode.homes.first().cloned());
                match home {
                    None => Ok(Done::default()),
                    Some(home) if self.lock().is_lost(*ino) => self.unmake(*ino, &home),
                    Some(home) => self.show(*ino, (home.dir, &home.name), (*dir, name), None),
                }
            }
            Operation::Link { ino, dir, name } => self.apply_link(*ino, *dir, name),
            Operation::Unlink { ino, dir, name } => self.apply_unlink(*ino, *dir, name),
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                let (is_there, replaces) = {
                    let state = self.lock();
                    let replaces = over.filter(|over| state.has_home(*over, *to_dir, to_name));
                    (state.has_home(*ino, *dir, name), replaces)
                };
                if let Some(over) = replaces {
                    self.keep_open(over)?;
                }
                match (is_there, replaces) {
                    (true, replaces) => self.show(*ino, (*dir, name), (*to_dir, to_name), replaces),
                    (false, Some(over)) => self.apply_unlink(over, *to_dir, to_name),
                    (false, None) => Ok(Done::default()),
                }
            }
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                let (from, to) = (self.backing_directory(*dir)?, self.backing_directory(*to_dir)?);
                let first = backing::stat(from.as_fd(), name)?;
                let seen = self.lock().seen(*other);
                if seen.is_some_and(|seen| seen.is(&first)) {
                    return Ok(Done::default());
                }
                let _ = ino;
                self.in_both((*dir, from.as_fd()), (*to_dir, to.as_fd()), || {
                    rustix::fs::renameat_with(
                        &from,
                        name.as_os_str(),
                        &to,
                        to_name.as_os_str(),
                        RenameFlags::EXCHANGE,
                    )
                })?;
                Ok(Done::default())
            }
        }
    }

    /// Removes what was made under the name of what is unfinished, and never gets another: that name might be refused for ever.
    fn unmake(&self, ino: Ino, home: &Home) -> Result<Done, Errno> {
        self.keep_open(ino)?;
        let directory = self.backing_directory(home.dir)?;
        let gone = self.within(&[(home.dir, directory.as_fd())], || {
            rustix::fs::unlinkat(&directory, &*home.name, AtFlags::empty())
        });
        match gone {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let mut state = self.lock();
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.homes = Homes::None;
        }
        state.journal_inode(ino);
        Ok(Done::default())
    }

    fn in_both<T>(
        &self,
        a: (Ino, BorrowedFd<'_>),
        b: (Ino, BorrowedFd<'_>),
        act: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        self.within(&[a, b], act)
    }

    /// Gives something its new name on the backing directory.
    fn show(
        &self,
        ino: Ino,
        (dir, name): (Ino, &OsStr),
        (to_dir, to_name): (Ino, &OsStr),
        over: Option<Ino>,
    ) -> Result<Done, Errno> {
        let (from, to) = (self.backing_directory(dir)?, self.backing_directory(to_dir)?);
        let (from, to) = (from.as_fd(), to.as_fd());
        let (seen, over_seen, over_is_dir) = {
            let state = self.lock();
            let over_is_dir = over.and_then(|over| state.inodes.get(&over)).is_some_and(Inode::is_dir);
            (state.seen(ino), over.and_then(|over| state.seen(over)), over_is_dir)
        };
        let is_ours = |stat: Stat| seen.is_some_and(|seen| seen.is(&stat));
        let at_source = self.look((dir, from), name)?;
        let at_target = self.look((to_dir, to), to_name)?;
        if !at_source.is_some_and(is_ours) {
            if at_target.is_some_and(is_ours) {
                // Done already, and not noted.
                return Ok(Done::default());
            }
            // Ours may be beside, from before a crash.
            if let Beside::Ours(other) = self.place_beside(to_name, ino, (to_dir, to), is_ours)? {
                return Ok(Done { beside: Some(other), ..Done::default() });
            }
            if self.lock().inodes.get(&ino).is_none_or(|inode| inode.is_dir() || inode.made_by != 0) {
                return Err(Errno::STALE);
            }
            // Nobody can move it any more. What the cache has of it is to be found under its new name.
            let done = match over {
                Some(over) => self.apply_unlink(over, to_dir, to_name)?,
                None => Done::default(),
            };
            return Ok(Done { gone: true, ..done });
        }
        let free = match (&at_target, over_seen) {
            (None, _) => true,
            (Some(found), Some(seen)) => (over_is_dir && seen.is(found)) || seen.is_as_left(found),
            (Some(_), None) => false,
        };
        if free {
            let flags = if at_target.is_some() { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
            match self.in_both((dir, from), (to_dir, to), || rename(from, name, to, to_name, flags)) {
                Ok(()) => return Ok(Done::default()),
                // Made by somebody else in this moment.
                Err(Errno::EXIST | Errno::NOTEMPTY) => {}
                Err(error) => return Err(error),
            }
        }
        let other = self.place_beside(to_name, ino, (to_dir, to), is_ours)?.name();
        self.in_both((dir, from), (to_dir, to), || rename(from, name, to, &other, RenameFlags::NOREPLACE))?;
        Ok(Done { beside: Some(other), ..Done::default() })
    }

    pub(super) fn look(
        &self,
        (dir, directory): (Ino, BorrowedFd<'_>),
        name: &OsStr,
    ) -> Result<Option<Stat>, Errno> {
        match self.within(&[(dir, directory)], || backing::stat(directory, name)) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn apply_link(&self, ino: Ino, dir: Ino, name: &OsStr) -> Result<Done, Errno> {
        let (home, seen) = {
            let state = self.lock();
            let Some(inode) = state.inodes.get(&ino) else { return Ok(Done::default()) };
            (inode.homes.first().cloned(), inode.seen)
        };
        let Some(home) = home else { return Ok(Done::default()) };
        let is_ours = |stat: Stat| seen.is_some_and(|seen| seen.is(&stat));
        let (from, to) = (self.backing_directory(home.dir)?, self.backing_directory(dir)?);
        let link = |name: &OsStr| {
            self.in_both((home.dir, from.as_fd()), (dir, to.as_fd()), || {
                // Others may have put something of theirs under its name, to which its user may make no link.
                let ours = backing::open_path(from.as_fd(), &home.name)?;
                if !is_ours(backing::stat(ours.as_fd(), OsStr::new(""))?) {
                    return Err(Errno::STALE);
                }
                let path = backing::by_descriptor(ours.as_fd());
                rustix::fs::linkat(rustix::fs::CWD, path.as_str(), &to, name, AtFlags::SYMLINK_FOLLOW)
            })
        };
        match link(name) {
            Ok(()) => return Ok(Done::default()),
            Err(Errno::EXIST) => {}
            // What is not there any more need not be there first. It was removed while this was tried before.
            Err(error) if is_its_own(error) && self.lock().is_taken_back(ino, dir, name) => {
                return Ok(Done::default());
            }
            Err(error) => return Err(error),
        }
        if self.look((dir, to.as_fd()), name)?.is_some_and(is_ours) {
            return Ok(Done::default());
        }
        let place = self.place_beside(name, ino, (dir, to.as_fd()), is_ours)?;
        if let Beside::Free(other) = &place {
            link(other)?;
        }
        let other = place.name();
        Ok(Done { beside: Some(other), ..Done::default() })
    }

    fn apply_unlink(&self, ino: Ino, dir: Ino, name: &OsStr) -> Result<Done, Errno> {
        let (is_there, seen, is_dir) = {
            let state = self.lock();
            let is_dir = state.inodes.get(&ino).is_some_and(Inode::is_dir);
            (state.has_home(ino, dir, name), state.seen(ino), is_dir)
        };
        if !is_there {
            return Ok(Done::default());
        }
        let directory = self.backing_directory(dir)?;
        let at = directory.as_fd();
        let Some(found) = self.look((dir, at), name)? else { return Ok(Done::default()) };
        let is_ours = seen.is_some_and(|seen| (is_dir && seen.is(&found)) || seen.is_as_left(&found));
        if !is_ours {
            return Ok(Done { kept: Some(ConflictKind::NotRemoved), ..Done::default() });
        }
        self.keep_open(ino)?;
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match self.within(&[(dir, at)], || rustix::fs::unlinkat(at, name, flags)) {
            Ok(()) | Err(Errno::NOENT) => Ok(Done::default()),
            // Somebody else has put something there.
            Err(Errno::NOTEMPTY | Errno::EXIST) if is_dir => {
                // If that can't be seen, it is told as usual.
                Ok(Done {
                    kept: Some(why_kept(at, name).unwrap_or(ConflictKind::NotRemoved)),
                    ..Done::default()
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a file that is about to lose its last name there, or the last that is known here, if somebody has it open here and may
    /// need its data.
    fn keep_open(&self, ino: Ino) -> Result<(), Errno> {
        let needs = {
            let mut state = self.lock();
            let Some(inode) = state.inodes.get_mut(&ino) else { return Ok(()) };
            let is_last = inode.is_orphan() || inode.homes.len() < 2;
            let needs = is_last && inode.handles > 0 && matches!(inode.kind, Kind::File(_));
            // What is not resident is read from there, also when it has no home any more.
            needs && inode.data_or_new().is_some_and(|data| data.orphan.is_none())
        };
        if !needs {
            return Ok(());
        }
        let entry = self.backing_entry(ino)?;
        let file: Arc<File> = Arc::new(self.reopen(ino, &entry, true)?);
        if let Some(data) = self.lock().inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) {
            data.orphan = Some(file);
        }
        Ok(())
    }
}

/// Makes something, and tells what it is. Others may be allowed to change names there, so a name is not believed: a file is known by
/// its descriptor, and of all else [`backing::just_made`] looks whether it is what was made.
pub(super) fn make(
    at: BorrowedFd<'_>,
    name: &OsStr,
    mode: u32,
    rdev: u64,
    target: Option<&OsStr>,
) -> Result<Stat, Errno> {
    let private = Mode::RUSR | Mode::WUSR;
    let since = Time::of_the_last_tick();
    let kind = FileType::from_raw_mode(mode);
    match kind {
        FileType::RegularFile => {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(at, name, flags, private)?;
            return backing::stat(file.as_fd(), OsStr::new(""));
        }
        FileType::Directory => rustix::fs::mkdirat(at, name, Mode::RWXU)?,
        FileType::Symlink => rustix::fs::symlinkat(target.unwrap_or_default(), at, name)?,
        _ => rustix::fs::mknodat(at, name, kind, private, rdev)?,
    }
    backing::just_made(at, name, kind, since)
}

pub(super) fn remove(at: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR),
        other => other,
    }
}

/// Why a directory can't be removed that is empty here.
fn why_kept(at: BorrowedFd<'_>, name: &OsStr) -> Result<ConflictKind, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(at, name, flags, Mode::empty())?;
    let left = backing::list(directory.as_fd())?;
    let is_unfinished =
        |(name, _): &(OsString, Stat)| name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes());
    let are_all = !left.is_empty() && left.iter().all(is_unfinished);
    Ok(if are_all { ConflictKind::Unfinished } else { ConflictKind::NotRemoved })
}

/// Renames; `NOREPLACE` also where the filesystem does not have it, as well as it goes.
fn rename(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    to_name: &OsStr,
    flags: RenameFlags,
) -> Result<(), Errno> {
    match rustix::fs::renameat_with(from, name, to, to_name, flags) {
        Err(Errno::INVAL | Errno::NOSYS) if flags == RenameFlags::NOREPLACE => {
            match rustix::fs::statat(to, to_name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Err(Errno::EXIST),
                Err(Errno::NOENT) => rustix::fs::renameat(from, name, to, to_name),
                Err(error) => Err(error),
            }
        }
        other => other,
    }
}
