//! Writing data and attributes back: which inode is next, and passes of several that are synced together.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::Core;
use super::inode::{Inode, Seen, dirty};
use super::pass::Pass;
use super::state::State;
use super::wait::Need;
use crate::backing;
use crate::message::Ino;
use crate::settings::SyncWhen;

/// More files than these are synced together with all of their filesystem.
const SYNC_ONE_BY_ONE: usize = 3;

/// Extents of a pass that makes room: so much can't be evicted until its end.
pub const EXTENTS_OF_PASS: usize = 16;

/// Whether something is written back now.
enum Turn {
    Now,
    NotNow,
    /// When this operation is done.
    After(u64),
}

impl State {
    /// The number of the last operation that has to be carried out now.
    pub fn due(&self) -> u64 {
        let mut until = self.wanted;
        if !self.settings.idle {
            let old =
                self.log.iter().take_while(|pending| pending.since.elapsed() >= self.settings.age).count()
                    as u64;
            until = until.max(self.first_pending + old - 1);
        }
        if self.log.len() >= self.longest_log() / 2 || self.has_too_many_names() {
            // What is stuck keeps the place of all that was carried out since: the rest is at the end.
            let part = if self.stuck.is_empty() { 2 } else { 1 };
            until = until.max(self.first_pending + self.log.len() as u64 / part);
        }
        until.min(self.last_pending())
    }

    /// The next inode that has to be written back now.
    pub fn next_pass(&mut self) -> Option<Ino> {
        if self.draining {
            let low = self.settings.capacity.0 / 100 * u64::from(self.settings.dirty.low);
            self.draining = self.dirty_bytes > low || self.waits.is_waited_for(&Need::Space);
        }
        let now = Instant::now();
        let mut wanted = self.wanted;
        let mut is_ready = |ino: &Ino, for_room: bool| match self.can_pass(*ino, now, for_room) {
            Turn::Now => true,
            Turn::NotNow => false,
            Turn::After(number) => {
                wanted = wanted.max(number);
                false
            }
        };
        let mut found = self.urgent.iter().find(|ino| is_ready(ino, false)).copied();
        // What the kernel writes to without asking would be dirty again.
        let is_quiet = |ino: &Ino| !self.unasked.contains(ino);
        if found.is_none() && !self.settings.idle {
            found = self.failing.keys().find(|ino| is_quiet(ino) && is_ready(ino, false)).copied();
        }
        if found.is_none() && !self.settings.idle {
            let age = if self.has_too_many_names() { Duration::ZERO } else { self.settings.age };
            let mut old = self.dirty_by_age.iter().take_while(|(_, dirty)| dirty.since.elapsed() >= age);
            found = old.find(|(ino, _)| is_quiet(ino) && is_ready(ino, false)).map(|(ino, _)| *ino);
        }
        if found.is_none() && self.draining {
            let mut all = self.dirty_by_use.keys();
            found = all.find(|ino| is_quiet(ino) && is_ready(ino, true)).copied();
        }
        self.wanted = wanted;
        found
    }

    /// Whether an inode can be written back now.
    fn can_pass(&self, ino: Ino, now: Instant, for_room: bool) -> Turn {
        let is_taken = self.passes.contains_key(&ino) || self.applier_awaits.contains(&ino);
        if is_taken
            || self.opening.contains(&ino)
            || self.failing.get(&ino).is_some_and(|(_, until)| *until > now)
        {
            return Turn::NotNow;
        }
        let Some(inode) = self.inodes.get(&ino) else { return Turn::NotNow };
        let turn = |ready| if ready { Turn::Now } else { Turn::NotNow };
        if !inode.is_dirty() || (for_room && inode.data().is_none_or(|data| data.dirty_bytes() == 0)) {
            return Turn::NotNow;
        }
        // One that is still to be made, and found for a while, is brought to where it is found.
        let is_never_found = inode.needless || inode.pending == 0 || !inode.homes.is_empty();
        if inode.is_orphan() && is_never_found {
            return turn(for_room && inode.data().is_some());
        }
        if inode.homes.is_empty() && inode.made_by != 0 {
            return Turn::After(inode.made_by);
        }
        if let Some(number) =
            self.gains_after(ino).filter(|_| inode.is_dir() && inode.dirty & dirty::RIGHTS != 0)
        {
            return Turn::After(number);
        }
        turn(!inode.is_dir() || State::can_pass_directory(inode))
    }

    /// Whether a directory's attributes can be brought there now. Every operation in it changes its times there, and may need the
    /// rights that its owner had before. Another owner is given by root alone, who needs none.
    pub fn can_pass_directory(inode: &Inode) -> bool {
        const RIGHTS: u32 = libc::S_IWUSR | libc::S_IXUSR;
        let keeps_rights = inode.mode & RIGHTS == RIGHTS;
        inode.pending == 0 || (keeps_rights && inode.dirty & !dirty::TIMES != 0)
    }

    /// Whether an inode can't be written back now: it fails, or an operation has to be done before.
    pub fn is_held_up(&self, ino: Ino) -> bool {
        self.failing.contains_key(&ino) || !matches!(self.can_pass(ino, Instant::now(), false), Turn::Now)
    }
}

impl Core {
    /// Brings what a pass has to the disk.
    ///
    /// # Errors
    /// The kernel's; it is noted, and dirty as before. `EAGAIN` if all of it has to come once more.
    pub fn bring(&self, mut pass: Pass) -> Result<(), Errno> {
        let done = self.carry(&mut pass).and_then(|()| self.sync(&mut pass));
        self.end_of(pass, done)
    }

    fn end_of(&self, mut pass: Pass, done: Result<(), Errno>) -> Result<(), Errno> {
        let done = match done.and_then(|()| self.seen_after(&mut pass)) {
            Ok(()) => self.lock().commit_pass(&pass, &self.store),
            Err(error) => {
                self.lock().fail_pass(&pass, error, &self.store);
                Err(error)
            }
        };
        self.wake_all();
        done
    }

    /// Writes files back, so that all that they had when the call began is on the disk; returns what failed.
    pub fn write_back_all(&self, inos: &[Ino]) -> Vec<(Ino, Errno)> {
        // Before anything is written: syncfs(2) tells what could not be written since its file was opened, and nothing earlier.
        let filesystem = (inos.len() > SYNC_ONE_BY_ONE).then(|| self.open_filesystem());
        let next = AtomicUsize::new(0);
        let work = || -> Vec<Result<Pass, (Ino, Errno)>> {
            let mut done = Vec::new();
            while let Some(ino) = inos.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(mut pass) = self.begin_when_free(*ino) else { continue };
                match self.carry(&mut pass) {
                    Ok(()) => done.push(Ok(pass)),
                    Err(error) => {
                        let _told = self.end_of(pass, Err(error));
                        done.push(Err((*ino, error)));
                    }
                }
            }
            done
        };
        let others = self.lock().settings.threads.min(inos.len() / 4);
        let done: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..others)
                .map(|_| {
                    scope.spawn(|| {
                        // Whoever can't become the user does nothing; the calling thread does it all then.
                        if self.backing.assume().is_ok() { work() } else { Vec::new() }
                    })
                })
                .collect();
            let mut done = work();
            for thread in threads {
                match thread.join() {
                    Ok(more) => done.extend(more),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            done
        });
        let (passes, failed): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
        let passes: Vec<Pass> = passes.into_iter().flatten().collect();
        let mut failed: Vec<(Ino, Errno)> = failed.into_iter().filter_map(Result::err).collect();
        let with_data = passes.iter().filter(|pass| pass.written > 0).count();
        let together = filesystem
            .filter(|_| with_data > SYNC_ONE_BY_ONE)
            .map(|filesystem| filesystem.and_then(|filesystem| rustix::fs::syncfs(&filesystem)));
        for mut pass in passes {
            let ino = pass.ino;
            let synced = match together {
                Some(result) if pass.written > 0 => {
                    pass.synced = result.is_ok();
                    result
                }
                _ => self.sync(&mut pass),
            };
            if let Err(error) = self.end_of(pass, synced) {
                failed.push((ino, error));
            }
        }
        failed
    }

    fn begin_when_free(&self, ino: Ino) -> Option<Pass> {
        let mut state = self.lock();
        while state.passes.contains_key(&ino) && !state.stopped {
            state = self.wait(state);
        }
        state.begin_pass(ino, usize::MAX, &self.store)
    }

    /// Has everything of the backing directory's filesystem reach the disk.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync_all(&self) -> Result<(), Errno> {
        rustix::fs::syncfs(&self.open_filesystem()?)
    }

    fn open_filesystem(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(self.backing.root(), ".", flags, Mode::empty())
    }

    /// Has what a pass has written be on the disk. If somebody may wait for all of it there, its size and attributes, too.
    fn sync(&self, pass: &mut Pass) -> Result<(), Errno> {
        let Some(file) = pass.file.as_ref().filter(|_| !pass.orphan) else { return Ok(()) };
        if self.lock().settings.sync != SyncWhen::Later {
            rustix::fs::fsync(file)?;
            pass.synced = true;
        } else if pass.written > 0 {
            rustix::fs::fdatasync(file)?;
        }
        Ok(())
    }

    /// How it looks after it was written.
    fn seen_after(&self, pass: &mut Pass) -> Result<(), Errno> {
        if pass.orphan {
            return Ok(());
        }
        let found = match &pass.file {
            Some(file) => backing::stat(file.as_fd(), OsStr::new(""))?,
            None => backing::stat(self.entry_for_pass(pass.ino)?.as_fd(), OsStr::new(""))?,
        };
        pass.seen = Some(Seen::now(&found));
        pass.blocks = Some(found.blocks);
        Ok(())
    }
}
