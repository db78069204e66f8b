//! What people order of a cache: to write back, to read in advance, to give up what is resident.

use std::io;
use std::path::{Component, Path};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::state::State;
use super::{NOBODY, Owner, RETRY};
use crate::message::{Ino, ROOT, Reply, Request, Service};
use crate::settings::EXTENT;
use crate::status::Status;

/// How often progress of a flush is told.
const PROGRESS: Duration = Duration::from_millis(100);

impl Owner {
    /// Returns once everything that was changed before the call is on the backing directory, and synced.
    ///
    /// It is asked about ten times a second whether to go on.
    ///
    /// # Errors
    /// It was given up, or what is left can't be written: then with what fails. Nothing is lost, and it is tried again all the
    /// while.
    pub fn flush(&self, progress: &mut dyn FnMut(&Status) -> bool) -> Result<(), String> {
        let begun = Instant::now();
        let last = {
            let mut state = self.core.lock();
            state.wanted = state.last_pending();
            state.try_stuck();
            state.wanted
        };
        let names = self.flush_until(progress, begun, |state| state.first_pending > last);
        // Names that can't be changed there hold up no data of others.
        let generation = self.core.lock().generation;
        let data = self.flush_until(progress, begun, |state| {
            let left: Vec<Ino> = (state.dirty_by_age.iter())
                .filter(|(_, dirty)| dirty.generation <= generation)
                .map(|(ino, _)| *ino)
                .filter(|ino| state.inodes.get(ino).is_some_and(|inode| !inode.is_orphan()))
                .collect();
            state.urgent.extend(&left);
            left.is_empty() && state.passes.is_empty()
        });
        let synced = self
            .as_the_user(|core| core.sync_all())
            .map_err(|error| format!("can't sync the backing directory: {error}"));
        names.and(data).and(synced)
    }

    fn flush_until(
        &self,
        progress: &mut dyn FnMut(&Status) -> bool,
        begun: Instant,
        is_done: impl Fn(&mut State) -> bool,
    ) -> Result<(), String> {
        let mut told = Instant::now();
        loop {
            let mut state = self.core.lock();
            if is_done(&mut state) {
                return Ok(());
            }
            if state.stopped {
                return Err("the cache is ending".into());
            }
            // It has failed since this began, and since anything else went well.
            let since = begun.max(state.progress) + RETRY;
            let failing = state.failing.iter().find(|(_, (_, until))| *until > since);
            if let Some((ino, (error, _))) = failing
                && since.elapsed() > RETRY
                && state.passes.is_empty()
                && state.urgent.iter().all(|ino| state.is_held_up(*ino))
            {
                return Err(format!("{}: {}", state.shown(*ino), io::Error::from(*error)));
            }
            self.core.work.notify_all();
            drop(self.core.wait(state));
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                if !progress(&self.status()) {
                    return Err("given up".into());
                }
            }
        }
    }

    /// Reads a file, or all files below a directory, into the cache; the path is below its root.
    ///
    /// # Errors
    /// What failed first, by its path.
    pub fn preload(&self, path: &Path) -> Result<(), String> {
        self.below(path, &mut |ino, size| {
            let mut offset = 0;
            while offset < size {
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
