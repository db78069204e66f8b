//! Carrying out the log on the backing directory: one operation after the other, by one thread.
//!
//! What is made gets a name of its own first, that of something unfinished, beside the one it will have; only when its data is on
//! the disk it is renamed. So is the data of a file that is renamed or linked. To spare the disk, that is done for a *batch* of
//! operations together: their files are written back by several threads, the filesystem is synced once, and then the names are
//! changed in their order.
//!
//! A process that was killed may have done the first operation of the log without having noted it. So each one recognizes that it
//! is done already, by the inode numbers that were noted before.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, RenameFlags};
use rustix::io::Errno;

use super::Core;
use super::inode::{Home, Kind, Operation, Seen, dirty};
use super::names::UNFINISHED;
use super::state::State;
use super::wait::Need;
use crate::backing::{self, Stat};
use crate::message::{Ino, ROOT};
use crate::status::Conflict;
use crate::store::Store;

/// Operations that are prepared together at most.
const BATCH: u64 = 256;

/// The longest name that there is room for.
const LONGEST_NAME: usize = 255;

/// Conflicts that are remembered for people.
const CONFLICTS: usize = 1000;

/// The name of what is not complete yet, in the cache with this store.
pub fn unfinished(store: &Store, ino: Ino) -> OsString {
    format!("{UNFINISHED}{}-{ino:x}", store.id()).into()
}

/// The name for ours where somebody else has taken the one it should have.
pub fn beside(store: &Store, name: &OsStr, ino: Ino) -> OsString {
    let suffix = format!(".ondeck-{}-{ino:x}", store.id());
    let mut bytes = name.as_bytes().to_vec();
    bytes.truncate(LONGEST_NAME - suffix.len());
    bytes.extend(suffix.bytes());
    OsString::from_vec(bytes)
}

/// What became of an operation.
#[derive(Debug, Default)]
struct Done {
    /// The name that ours has, if it is not the one it should have.
    beside: Option<OsString>,
    /// A removal that was not carried out, because it is somebody else's.
    kept: bool,
}

impl State {
    /// Changes the homes as the first operation of the log says, which is done. Recovery does the same again.
    pub fn applied(&mut self, store: &Store, other_name: Option<&OsStr>) {
        let Some(pending) = self.log.pop_front() else { return };
        self.waits.carried_out(self.first_pending);
        self.first_pending += 1;
        self.progress = std::time::Instant::now();
        let operation = pending.operation;
        if pending.cancelled {
            return;
        }
        let named = |name: &OsString| other_name.map_or_else(|| name.clone(), OsStr::to_owned);
        let lose = |state: &mut State, ino: Ino, dir: Ino, name: &OsStr| {
            if let Some(inode) = state.inodes.get_mut(&ino) {
                inode.homes.retain(|home| home.dir != dir || home.name != name);
            }
        };
        match &operation {
            Operation::Make { ino, dir, name } => {
                if let Some(inode) = self.inodes.get_mut(ino) {
                    inode.made_by = 0;
                    if !inode.homes.is_empty() {
                        inode.homes = vec![Home { dir: *dir, name: named(name) }];
                    }
                }
            }
            Operation::Link { ino, dir, name } => {
                if let Some(inode) = self.inodes.get_mut(ino)
                    && !inode.homes.is_empty()
                {
                    inode.homes.push(Home { dir: *dir, name: named(name) });
                }
            }
            Operation::Unlink { ino, dir, name } => lose(self, *ino, *dir, name),
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                if let Some(over) = over {
                    lose(self, *over, *to_dir, to_name);
                }
                if let Some(home) = self.home_mut(*ino, *dir, name) {
                    *home = Home { dir: *to_dir, name: named(to_name) };
                }
            }
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                let (first, second) = (
                    self.home_mut(*ino, *dir, name).is_some(),
                    self.home_mut(*other, *to_dir, to_name).is_some(),
                );
                if first && let Some(home) = self.home_mut(*ino, *dir, name) {
                    *home = Home { dir: *to_dir, name: to_name.clone() };
                }
                if second
                    && let Some(home) = self.inodes.get_mut(other).and_then(|inode| {
                        inode.homes.iter_mut().find(|home| home.dir == *to_dir && home.name == *to_name)
                    })
                {
                    *home = Home { dir: *dir, name: name.clone() };
                }
            }
        }
        for ino in operation.inodes() {
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.pending = inode.pending.saturating_sub(1);
            }
            self.waits.wake(&Need::Synced(ino));
        }
        // It has changed their times there.
        for dir in operation.directories() {
            self.mark_dirty(dir, dirty::TIMES);
        }
        for ino in operation.inodes() {
            self.remove_if_unused(ino, store);
        }
        self.waits.wake(&Need::Log);
        if self.names_and_operations() > 0 {
            self.waits.wake(&Need::Space);
        }
    }

    fn home_mut(&mut self, ino: Ino, dir: Ino, name: &OsStr) -> Option<&mut Home> {
        self.inodes.get_mut(&ino)?.homes.iter_mut().find(|home| home.dir == dir && home.name == name)
    }

    fn has_home(&self, ino: Ino, dir: Ino, name: &OsStr) -> bool {
        self.inodes
            .get(&ino)
            .is_some_and(|inode| inode.homes.iter().any(|home| home.dir == dir && home.name == name))
    }

    fn seen(&self, ino: Ino) -> Option<Seen> {
        self.inodes.get(&ino).and_then(|inode| inode.seen)
    }

    /// The files whose data has to be on the disk before an operation is carried out.
    fn shown_by(&self, operation: &Operation) -> impl Iterator<Item = Ino> {
        let shown = match operation {
            Operation::Make { ino, .. } | Operation::Link { ino, .. } | Operation::Rename { ino, .. } => {
                [Some(*ino), None]
            }
            Operation::Exchange { ino, other, .. } => [Some(*ino), Some(*other)],
            Operation::Unlink { .. } => [None, None],
        };
        let is_file =
            |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| !inode.is_dir() && !inode.is_orphan());
        shown.into_iter().flatten().filter(is_file)
    }

    fn note_conflict(&mut self, dir: Ino, name: &OsStr, ours: Option<&OsStr>) {
        let path = |name: &OsStr| {
            let home = Home { dir, name: name.to_owned() };
            self.home_path(&home)
                .map(|names| names.join(OsStr::new("/")).to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let conflict = Conflict { path: path(name), ours: ours.map(path) };
        match &conflict.ours {
            Some(ours) => tracing::warn!(
                path = conflict.path,
                ours,
                "somebody else has changed this meanwhile; both are kept"
            ),
            None => tracing::warn!(
                path = conflict.path,
                "somebody else has changed this meanwhile; it is not removed"
            ),
        }
        if self.conflicts.len() < CONFLICTS {
            self.conflicts.push(conflict);
        }
    }
}

impl Core {
    /// Carries out operations until none has to be any more; returns when the first one fails, with the error.
    pub fn apply_some(&self) -> Result<bool, (Ino, Errno)> {
        let (batch, mut shown) = {
            let mut state = self.lock();
            let until = state.due();
            if state.first_pending > until || state.stopped {
                return Ok(false);
            }
            let last = until.min(state.first_pending + BATCH - 1).min(state.last_pending());
            let count = (last + 1 - state.first_pending) as usize;
            state.batch_end = last;
            let batch: Vec<_> = state.log.iter().take(count).cloned().collect();
            let mut shown: Vec<Ino> = (batch.iter().filter(|pending| !pending.cancelled))
                .flat_map(|pending| state.shown_by(&pending.operation))
                .collect();
            shown.sort_unstable();
            shown.dedup();
            (batch, shown)
        };
        // Whether what is made has a directory to be made in does not matter here: the nearest one that is there takes it.
        let mut failed = self.prepare_all(&batch);
        // What could not be made has no place for its data yet.
        shown.retain(|ino| failed.iter().all(|(other, _)| other != ino));
        failed.extend(self.write_back_all(&shown));
        // What comes before the first that failed is carried out all the same: a removal may make room for it.
        let first = batch.iter().position(|pending| {
            !pending.cancelled && failed.iter().any(|(ino, _)| pending.operation.shows(*ino))
        });
        let ready = first.unwrap_or(batch.len());
        let result = match failed.first() {
            Some(error) if ready == 0 => Err(*error),
            _ => Ok(()),
        };
        let result = result.and_then(|()| {
            for pending in &batch[..ready] {
                let number = self.lock().first_pending;
                let mut done = Done::default();
                // What it changes there must not be taken for somebody else's work by a pass, nor the other way round.
                let held = self.hold_still(&pending.operation);
                let mut failed = None;
                if !pending.cancelled {
                    match self.apply(&pending.operation) {
                        Ok(what) => done = what,
                        Err(error) => failed = Some((pending.operation.inodes()[0], error)),
                    }
                }
                if failed.is_none() {
                    self.end(number, &pending.operation, &done);
                }
                self.let_go(&held);
                if let Some(failed) = failed {
                    return Err(failed);
                }
            }
            Ok(())
        });
        self.lock().batch_end = 0;
        result.map(|()| true)
    }

    /// Looks whether the first operation of a log that was recovered is done already, and notes it then. Until that is known,
    /// nothing else may look at its files: they may not be where the journal says.
    ///
    /// # Errors
    /// The kernel's, if that can't be seen.
    pub fn settle_doubt(&self) -> Result<(), Errno> {
        let (number, pending) = {
            let state = self.lock();
            (state.first_pending, state.log.front().cloned())
        };
        match pending {
            Some(pending) if !pending.cancelled => {
                if let Some(done) = self.is_done(&pending.operation)? {
                    self.end(number, &pending.operation, &done);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn is_done(&self, operation: &Operation) -> Result<Option<Done>, Errno> {
        let is_at = |ino: Ino, dir: Ino, name: &OsStr| -> Result<bool, Errno> {
            let seen = self.lock().seen(ino);
            let found = match self.backing_directory(dir) {
                Ok(directory) => self.look(directory.as_fd(), name)?,
                // A directory that is not made there yet.
                Err(Errno::STALE) => None,
                Err(error) => return Err(error),
            };
            Ok(found.is_some_and(|found| seen.is_some_and(|seen| seen.ino == found.ino)))
        };
        let done = |at: bool, beside: Option<OsString>| {
            (at || beside.is_some()).then_some(Done { beside, kept: false })
        };
        let appeared = |ino: Ino, dir: Ino, name: &OsStr| -> Result<Option<Done>, Errno> {
            if is_at(ino, dir, name)? {
                return Ok(done(true, None));
            }
            let other = beside(&self.store, name, ino);
            Ok(if is_at(ino, dir, &other)? { done(false, Some(other)) } else { None })
        };
        let vanished = |ino: Ino, dir: Ino, name: &OsStr| -> Result<Option<Done>, Errno> {
            let had = self.lock().has_home(ino, dir, name);
            Ok(if had && !is_at(ino, dir, name)? { done(true, None) } else { None })
        };
        match operation {
            Operation::Make { ino, dir, name } => {
                let home = self.lock().inodes.get(ino).and_then(|inode| inode.homes.first().cloned());
                match home {
                    Some(home) if !is_at(*ino, home.dir, &home.name)? => appeared(*ino, *dir, name),
                    _ => Ok(None),
                }
            }
            Operation::Link { ino, dir, name } => appeared(*ino, *dir, name),
            Operation::Unlink { ino, dir, name } => vanished(*ino, *dir, name),
            Operation::Rename { ino, dir, name, to_dir, to_name, over } => {
                let is_there = self.lock().has_home(*ino, *dir, name);
                match over {
                    _ if is_there && !is_at(*ino, *dir, name)? => appeared(*ino, *to_dir, to_name),
                    Some(over) if !is_there => vanished(*over, *to_dir, to_name),
                    _ => Ok(None),
                }
            }
            Operation::Exchange { other, dir, name, .. } => Ok(done(is_at(*other, *dir, name)?, None)),
        }
    }

    /// Waits for the passes of the files of an operation, and keeps others from beginning.
    fn hold_still(&self, operation: &Operation) -> Vec<Ino> {
        let mut held = operation.inodes();
        held.sort_unstable();
        held.dedup();
        let mut state = self.lock();
        held.retain(|ino| state.inodes.get(ino).is_some_and(|inode| !inode.is_dir()));
        while held.iter().any(|ino| state.passes.contains(ino)) {
            state = self.wait(state);
        }
        state.passes.extend(&held);
        state.moving = Some(std::thread::current().id());
        held
    }

    fn let_go(&self, held: &[Ino]) {
        let mut state = self.lock();
        state.moving = None;
        for ino in held {
            state.passes.remove(ino);
            state.waits.wake(&Need::Synced(*ino));
            state.remove_if_unused(*ino, &self.store);
        }
        drop(state);
        self.wake_all();
    }

    fn end(&self, number: u64, operation: &Operation, done: &Done) {
        let moved = self.seen_now(operation);
        let mut state = self.lock();
        for (ino, seen) in moved {
            if let Some(inode) = state.inodes.get_mut(&ino) {
                inode.seen = Some(seen);
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
        if done.beside.is_some() || done.kept {
            state.note_conflict(dir, name, done.beside.as_deref());
        }
        state.journal_applied(number, done.beside.clone());
        state.failing.remove(&operation.inodes()[0]);
        state.applied(&self.store, done.beside.as_deref());
        drop(state);
        if let Operation::Unlink { ino, .. } = operation {
            self.backing.close(*ino);
        }
        if let Operation::Rename { over: Some(over), .. } = operation {
            self.backing.close(*over);
        }
        self.wake_all();
    }

    /// How the files of an operation look on the backing directory, now that it has changed their names.
    fn seen_now(&self, operation: &Operation) -> Vec<(Ino, Seen)> {
        let mut found = Vec::new();
        let mut look = |ino: Ino, dir: Ino, name: &OsStr| {
            let Ok(directory) = self.backing_directory(dir) else { return };
            let Ok(stat) = backing::stat(directory.as_fd(), name) else { return };
            let is_it = self.lock().seen(ino).is_some_and(|seen| seen.ino == stat.ino);
            if is_it {
                found.push((ino, Seen { ino: stat.ino, ctime: stat.ctime }));
            }
        };
        match operation {
            Operation::Make { ino, dir, name } | Operation::Link { ino, dir, name } => look(*ino, *dir, name),
            Operation::Rename { ino, to_dir, to_name, .. } => look(*ino, *to_dir, to_name),
            Operation::Exchange { ino, dir, name, other, to_dir, to_name } => {
                look(*ino, *to_dir, to_name);
                look(*other, *dir, name);
            }
            Operation::Unlink { ino, .. } => {
                // Its other names have another time of change now.
                let home = self.lock().inodes.get(ino).and_then(|inode| {
                    let Operation::Unlink { dir, name, .. } = operation else { return None };
                    inode.homes.iter().find(|home| home.dir != *dir || home.name != *name).cloned()
                });
                if let Some(home) = home {
                    look(*ino, home.dir, &home.name);
                }
            }
        }
        if let Operation::Rename { over: Some(over), to_dir, to_name, .. } = operation {
            let home = self.lock().inodes.get(over).and_then(|inode| {
                inode.homes.iter().find(|home| home.dir != *to_dir || home.name != *to_name).cloned()
            });
            if let Some(home) = home {
                look(*over, home.dir, &home.name);
            }
        }
        found
    }

    /// Makes what a batch makes, under the names of what is unfinished; returns what could not be made.
    fn prepare_all(&self, batch: &[super::state::Pending]) -> Vec<(Ino, Errno)> {
        let mut failed = Vec::new();
        for pending in batch.iter().filter(|pending| !pending.cancelled) {
            if let Operation::Make { ino, dir, .. } = &pending.operation
                && let Err(error) = self.prepare(*ino, *dir)
            {
                // Its next fsync(2) or close(2) tells it.
                if let Some(data) = self.lock().inodes.get_mut(ino).and_then(|inode| inode.data_or_new()) {
                    data.error = Some(error.raw_os_error());
                }
                failed.push((*ino, error));
            }
        }
        failed
    }

    /// Makes an inode under the name of what is unfinished, in the nearest directory that is there.
    fn prepare(&self, ino: Ino, dir: Ino) -> Result<(), Errno> {
        let (mode, rdev, target, within) = {
            let state = self.lock();
            let Some(inode) = state.inodes.get(&ino) else { return Ok(()) };
            // What is there already was prepared before. What nobody can reach any more is never made.
            if !inode.homes.is_empty() || (inode.is_orphan() && !inode.is_dir()) {
                return Ok(());
            }
            let target = match &inode.kind {
                Kind::Symlink(target) => target.clone(),
                _ => None,
            };
            let mut within = dir;
            while within != ROOT && state.inodes.get(&within).is_some_and(|inode| inode.homes.is_empty()) {
                within = state.directory(within).map_or(ROOT, |directory| directory.parent);
            }
            (inode.mode, inode.rdev, target, within)
        };
        let directory = self.backing_directory(within)?;
        let at = directory.as_fd();
        let name = unfinished(&self.store, ino);
        let made = backing::within(self.backing.uid(), at, || {
            let make = || make(at, &name, mode, rdev, target.as_deref());
            match make() {
                // Of a process that was killed before it could note that.
                Err(Errno::EXIST) => {
                    remove(at, &name)?;
                    make()
                }
                other => other,
            }?;
            backing::stat(at, &name)
        })?;
        let seen = Seen { ino: made.ino, ctime: made.ctime };
        let home = Home { dir: within, name };
        let mut state = self.lock();
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.homes = vec![home.clone()];
            inode.seen = Some(seen);
            if let Some(data) = inode.data_or_new() {
                data.backing_len = 0;
            }
        }
        state.journal_prepared(ino, home, seen);
        Ok(())
    }

    fn apply(&self, operation: &Operation) -> Result<Done, Errno> {
        match operation {
            Operation::Make { ino, dir, name } => {
                let home = self.lock().inodes.get(ino).and_then(|inode| inode.homes.first().cloned());
                match home {
                    None => Ok(Done::default()),
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
                if seen.is_some_and(|seen| seen.ino == first.ino) {
                    return Ok(Done::default());
                }
                let _ = ino;
                self.in_both(from.as_fd(), to.as_fd(), || {
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

    fn in_both<T>(
        &self,
        a: BorrowedFd<'_>,
        b: BorrowedFd<'_>,
        mut act: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        backing::within(self.backing.uid(), a, || backing::within(self.backing.uid(), b, &mut act))
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
            let over_is_dir =
                over.and_then(|over| state.inodes.get(&over)).is_some_and(super::inode::Inode::is_dir);
            (state.seen(ino), over.and_then(|over| state.seen(over)), over_is_dir)
        };
        let is_ours = |stat: &Stat| seen.is_some_and(|seen| seen.ino == stat.ino);
        let at_source = self.look(from, name)?;
        let at_target = self.look(to, to_name)?;
        if !at_source.as_ref().is_some_and(is_ours) {
            if at_target.as_ref().is_some_and(is_ours) {
                // Done already, and not noted.
                return Ok(Done::default());
            }
            // Ours may be beside, from before a crash.
            let other = beside(&self.store, to_name, ino);
            if self.look(to, &other)?.as_ref().is_some_and(is_ours) {
                return Ok(Done { beside: Some(other), kept: false });
            }
            return Err(Errno::STALE);
        }
        let free = match (&at_target, over_seen) {
            (None, _) => true,
            (Some(found), Some(seen)) => {
                (over_is_dir && found.ino == seen.ino) || seen.is_as_left(found.ino, found.ctime)
            }
            (Some(_), None) => false,
        };
        if free {
            let flags = if at_target.is_some() { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
            match self.in_both(from, to, || rename(from, name, to, to_name, flags)) {
                Ok(()) => return Ok(Done::default()),
                // Made by somebody else in this moment.
                Err(Errno::EXIST | Errno::NOTEMPTY) => {}
                Err(error) => return Err(error),
            }
        }
        let other = beside(&self.store, to_name, ino);
        self.in_both(from, to, || rename(from, name, to, &other, RenameFlags::NOREPLACE))?;
        Ok(Done { beside: Some(other), kept: false })
    }

    fn look(&self, directory: BorrowedFd<'_>, name: &OsStr) -> Result<Option<Stat>, Errno> {
        match backing::within(self.backing.uid(), directory, || backing::stat(directory, name)) {
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
        let (from, to) = (self.backing_directory(home.dir)?, self.backing_directory(dir)?);
        let link = |name: &OsStr| {
            self.in_both(from.as_fd(), to.as_fd(), || {
                rustix::fs::linkat(&from, home.name.as_os_str(), &to, name, AtFlags::empty())
            })
        };
        match link(name) {
            Ok(()) => return Ok(Done::default()),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        let is_ours = |stat: Stat| seen.is_some_and(|seen| seen.ino == stat.ino);
        if self.look(to.as_fd(), name)?.is_some_and(is_ours) {
            return Ok(Done::default());
        }
        let other = beside(&self.store, name, ino);
        match link(&other) {
            Ok(()) => {}
            Err(Errno::EXIST) if self.look(to.as_fd(), &other)?.is_some_and(is_ours) => {}
            Err(error) => return Err(error),
        }
        Ok(Done { beside: Some(other), kept: false })
    }

    fn apply_unlink(&self, ino: Ino, dir: Ino, name: &OsStr) -> Result<Done, Errno> {
        let (is_there, seen, is_dir) = {
            let state = self.lock();
            let is_dir = state.inodes.get(&ino).is_some_and(super::inode::Inode::is_dir);
            (state.has_home(ino, dir, name), state.seen(ino), is_dir)
        };
        if !is_there {
            return Ok(Done::default());
        }
        let directory = self.backing_directory(dir)?;
        let at = directory.as_fd();
        let Some(found) = self.look(at, name)? else { return Ok(Done::default()) };
        let is_ours = seen
            .is_some_and(|seen| (is_dir && seen.ino == found.ino) || seen.is_as_left(found.ino, found.ctime));
        if !is_ours {
            return Ok(Done { beside: None, kept: true });
        }
        self.keep_open(ino)?;
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match backing::within(self.backing.uid(), at, || rustix::fs::unlinkat(at, name, flags)) {
            Ok(()) | Err(Errno::NOENT) => Ok(Done::default()),
            // Somebody else has put something there.
            Err(Errno::NOTEMPTY | Errno::EXIST) if is_dir => Ok(Done { beside: None, kept: true }),
            Err(error) => Err(error),
        }
    }

    /// Opens a file that is about to lose its last name there, if somebody has it open here and may need its data.
    fn keep_open(&self, ino: Ino) -> Result<(), Errno> {
        let needs = {
            let mut state = self.lock();
            let Some(inode) = state.inodes.get_mut(&ino) else { return Ok(()) };
            let needs = inode.is_orphan() && inode.handles > 0 && matches!(inode.kind, Kind::File(_));
            // What is not resident is read from there, also when it has no home any more.
            needs && inode.data_or_new().is_some_and(|data| data.orphan.is_none())
        };
        if !needs {
            return Ok(());
        }
        let entry = self.backing_entry(ino)?;
        let file: Arc<File> = Arc::new(backing::reopen(self.backing.uid(), entry.as_fd(), true)?);
        if let Some(data) = self.lock().inodes.get_mut(&ino).and_then(|inode| inode.data_or_new()) {
            data.orphan = Some(file);
        }
        Ok(())
    }
}

fn make(at: BorrowedFd<'_>, name: &OsStr, mode: u32, rdev: u64, target: Option<&OsStr>) -> Result<(), Errno> {
    use rustix::fs::FileType;
    let private = Mode::RUSR | Mode::WUSR;
    match FileType::from_raw_mode(mode) {
        FileType::Directory => rustix::fs::mkdirat(at, name, Mode::RWXU),
        FileType::Symlink => rustix::fs::symlinkat(target.unwrap_or_default(), at, name),
        kind => rustix::fs::mknodat(at, name, kind, private, rdev),
    }
}

fn remove(at: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR),
        other => other,
    }
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
