//! What people order of a cache: to write back, to read in advance, to give up what is resident.

use std::io;
use std::path::{Component, Path};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::inode::{UnderWay, dirty};
use super::state::State;
use super::{NOBODY, Owner, RETRY};
use crate::message::{Ino, ROOT, Reply, Request, Service};
use crate::settings::EXTENT;
use crate::status::Status;

/// How often progress of a flush is told.
const PROGRESS: Duration = Duration::from_millis(100);

/// How often whoever has ordered a preload is told how it goes, and so found to be gone.
const PRELOAD_TOLD: Duration = Duration::from_secs(1);

/// If no more than these are left to be done, it is looked at once whether one is.
const FEW: usize = 64;

/// The same of more than these, after so long.
const MANY_ARE_LEFT: Duration = Duration::from_millis(10);

/// What a flush still waits for.
struct Left {
    count: usize,
    /// One that fails, if nothing is being done for any of them.
    failing: Option<Ino>,
}

/// What a flush waits for once names are changed.
struct DataLeft {
    /// Files that were dirty at this generation.
    of_files: u64,
    /// The same of directories: each name that was changed there has changed their times.
    of_directories: u64,
}

impl State {
    /// What is left of the operations of the log up to this one; `None`: nothing.
    fn names_left(&self, last: u64) -> Option<Left> {
        if self.first_pending > last {
            return None;
        }
        let left = || {
            let log = (self.first_pending..=last).zip(&self.log);
            log.filter(|(_, pending)| !pending.cancelled).map(|(_, pending)| &pending.operation)
        };
        let is_written = |ino: &Ino| self.passes.contains_key(ino);
        let is_stuck = !self.failing.is_empty() && !left().any(|left| left.inodes().iter().any(is_written));
        let failing = if is_stuck { self.failing_of(left().flat_map(|left| left.inodes())) } else { None };
        Some(Left { count: left().count(), failing })
    }

    /// One of these that fails, or else one that they may wait for.
    fn failing_of(&self, mut left: impl Iterator<Item = Ino>) -> Option<Ino> {
        left.find(|ino| self.failing.contains_key(ino)).or_else(|| self.failing.keys().next().copied())
    }

    /// What is left of inodes, and has to be brought there before all else; `None`: nothing.
    fn data_left(&mut self, data: &DataLeft) -> Option<Left> {
        let mut needs_names = false;
        let of = |ino: &Ino, generation: u64| {
            let inode = self.inodes.get(ino).filter(|inode| !inode.is_orphan())?;
            let was = if inode.is_dir() { data.of_directories } else { data.of_files };
            (generation <= was).then_some(inode)
        };
        let mut is_needed = |ino: &Ino, generation: u64| {
            let Some(inode) = of(ino, generation) else { return false };
            if !inode.is_dir() || inode.pending == 0 {
                return true;
            }
            needs_names |= inode.dirty != dirty::TIMES && !State::can_pass_directory(inode);
            // Those that come later give it other times.
            inode.dirty != dirty::TIMES
        };
        let left: Vec<Ino> = (self.dirty_by_age.iter())
            .filter(|(ino, dirty)| is_needed(ino, dirty.generation))
            .map(|(ino, _)| *ino)
            .collect();
        if needs_names {
            self.wanted = self.last_pending();
        }
        // What is in a pass, and counts as dirty only since that has begun. Which pass does not matter: one that was seen before may
        // have failed meanwhile, and another begun.
        let is_left = |ino: &Ino, since: Option<u64>| since.is_some_and(|since| of(ino, since).is_some());
        let is_in_pass = |(ino, pass): &(&Ino, &UnderWay)| {
            let listed = self.dirty_by_age.get(*ino).map(|dirty| dirty.generation);
            is_left(ino, pass.dirty_since) && !is_left(ino, listed)
        };
        let in_pass = self.passes.iter().filter(is_in_pass).count();
        if left.is_empty() && in_pass == 0 {
            return None;
        }
        self.urgent.extend(&left);
        let is_stuck = |ino: &Ino| !self.passes.contains_key(ino) && self.is_held_up(*ino);
        let is_all_stuck = in_pass == 0 && left.iter().all(is_stuck);
        let failing = if is_all_stuck { self.failing_of(left.iter().copied()) } else { None };
        Some(Left { count: left.len() + in_pass, failing })
    }
}

impl Owner {
    /// Returns once everything that was changed before the call is on the backing directory, and synced.
    ///
    /// It is asked about ten times a second whether to go on.
    ///
    /// # Errors
    /// It was given up, or what is left can't be written: then with what fails. Nothing is lost, and it is tried again all the
    /// while.
    pub fn flush(&self, progress: &mut dyn FnMut(&Status) -> bool) -> Result<(), String> {
        let (last, of_files) = {
            let mut state = self.core.lock();
            state.wanted = state.last_pending();
            state.try_stuck();
            (state.wanted, state.generation)
        };
        let names = self.flush_until(progress, |state| state.names_left(last));
        // Names that can't be changed there hold up no data of others.
        let then = DataLeft { of_files, of_directories: self.core.lock().generation };
        let data = self.flush_until(progress, |state| state.data_left(&then));
        names.and(data)?;
        self.sync(progress)
    }

    /// Works until nothing is left. It fails when all that is left fails: what others do meanwhile does not count.
    fn flush_until(
        &self,
        progress: &mut dyn FnMut(&Status) -> bool,
        mut left: impl FnMut(&mut State) -> Option<Left>,
    ) -> Result<(), String> {
        let mut told = Instant::now();
        let (mut fewer, mut fewest) = (Instant::now(), usize::MAX);
        loop {
            let mut state = self.core.lock();
            let Some(Left { count, failing }) = left(&mut state) else { return Ok(()) };
            if state.stopped {
                return Err("the cache is ending".into());
            }
            if count < fewest {
                (fewer, fewest) = (Instant::now(), count);
            }
            // It has failed since this began, and since anything else of it went well.
            let since = fewer + RETRY;
            let failing = failing.filter(|_| since.elapsed() > RETRY);
            if let Some(ino) = failing
                && let Some((error, until)) = state.failing.get(&ino)
                && *until > since
            {
                return Err(format!("{}: {}", state.shown(ino), io::Error::from(*error)));
            }
            self.core.work.notify_all();
            if count > FEW {
                // To look at all of them each time that one is done would take longer than the work.
                drop(state);
                std::thread::sleep(MANY_ARE_LEFT);
            } else {
                drop(self.core.wait(state));
            }
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                if !progress(&self.status()) {
                    return Err("given up".into());
                }
            }
        }
    }

    /// Has the backing directory's filesystem reach its disk. Whoever gives that up need not wait for a disk that hangs.
    fn sync(&self, progress: &mut dyn FnMut(&Status) -> bool) -> Result<(), String> {
        let (tell, told) = channel();
        let core = Arc::clone(&self.core);
        let cannot = |error: io::Error| format!("can't sync the backing directory: {error}");
        let sync = move || {
            let synced = core.backing.assume().and_then(|()| Ok(core.sync_all()?));
            // Who has given up does not listen.
            let _ = tell.send(synced);
        };
        std::thread::Builder::new().name("sync".into()).spawn(sync).map_err(cannot)?;
        loop {
            match told.recv_timeout(PROGRESS) {
                Ok(synced) => return synced.map_err(cannot),
                Err(RecvTimeoutError::Timeout) if progress(&self.status()) => {}
                Err(RecvTimeoutError::Timeout) => return Err("given up".into()),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("can't sync the backing directory: a defect".into());
                }
            }
        }
    }

    /// Reads a file, or all files below a directory, into the cache; the path is below its root. It ends when nobody hears what
    /// is told.
    ///
    /// # Errors
    /// What failed first, by its path.
    pub fn preload(&self, path: &Path, tell: &mut dyn FnMut(&Status) -> bool) -> Result<(), String> {
        let mut told = Instant::now();
        self.below(path, &mut |ino, size| {
            let mut offset = 0;
            while offset < size {
                if told.elapsed() >= PRELOAD_TOLD {
                    if !tell(&self.status()) {
                        return Err(Errno::CANCELED);
                    }
                    told = Instant::now();
                }
                let read = Request::Read { ino, handle: 0, offset, size: EXTENT as u32 };
                self.call(NOBODY, read)?;
                offset += EXTENT;
            }
            Ok(())
        })
    }

    /// Gives up the resident data of a file, or of all below a directory, as far as it is clean and nobody uses it.
    ///
    /// # Errors
    /// As of [`preload`](Owner::preload).
    pub fn evict(&self, path: &Path) -> Result<(), String> {
        self.below(path, &mut |ino, _| {
            let mut state = self.core.lock();
            state.evict_file(&self.core.store, ino);
            drop(state);
            self.core.wake_all();
            Ok(())
        })
    }

    /// Forgets names that nobody uses if they take too much, without waiting until it is looked for that.
    pub fn forget_names(&self) {
        self.core.forget_if_many();
        self.core.wake_all();
    }

    /// Does something with all regular files at or below a path.
    fn below(&self, path: &Path, act: &mut dyn FnMut(Ino, u64) -> Result<(), Errno>) -> Result<(), String> {
        let of = |path: &Path, error: Errno| format!("{}: {}", path.display(), io::Error::from(error));
        let mut found = (ROOT, libc::S_IFDIR, 0);
        // What is known by its number must not be forgotten meanwhile.
        let give_back = |ino: Ino| {
            if ino != ROOT {
                self.forget(&[(ino, 1)]);
            }
        };
        let mut walked = std::path::PathBuf::new();
        let mut done = Ok(());
        for part in path.components() {
            let Component::Normal(name) = part else {
                done = Err(format!("{}: a path below the cache's root is needed", path.display()));
                break;
            };
            walked.push(name);
            match self.call(NOBODY, Request::Lookup { parent: found.0, name: name.to_owned() }) {
                Ok(Reply::Entry(entry)) => {
                    give_back(found.0);
                    found = (entry.ino, entry.mode, entry.size);
                }
                Ok(_) => done = Err(of(&walked, Errno::IO)),
                Err(error) => done = Err(of(&walked, error)),
            }
            if done.is_err() {
                break;
            }
        }
        let mut stack = vec![(walked, found)];
        while let Some((path, (ino, mode, size))) = stack.pop() {
            match mode & libc::S_IFMT {
                _ if done.is_err() => {}
                libc::S_IFREG => done = act(ino, size).map_err(|error| of(&path, error)),
                libc::S_IFDIR => match self.call(NOBODY, Request::List { ino }) {
                    Ok(Reply::Listed(entries)) => {
                        for entry in entries.iter().filter(|entry| entry.kind != libc::S_IFLNK) {
                            let lookup = Request::Lookup { parent: ino, name: entry.name.clone() };
                            let path = path.join(&entry.name);
                            match self.call(NOBODY, lookup) {
                                Ok(Reply::Entry(found)) => {
                                    stack.push((path, (found.ino, found.mode, found.size)));
                                }
                                // Gone meanwhile: nothing is to be done.
                                Err(Errno::NOENT) => {}
                                Ok(_) => done = Err(of(&path, Errno::IO)),
                                Err(error) => done = Err(of(&path, error)),
                            }
                        }
                    }
                    Ok(_) => done = Err(of(&path, Errno::IO)),
                    Err(error) => done = Err(of(&path, error)),
                },
                _ => {}
            }
            give_back(ino);
        }
        done
    }
}
