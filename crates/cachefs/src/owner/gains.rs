//! Rights that a directory gains here are given to it on the backing directory only when what is below it is there as it is here: who
//! has removed a name, overwritten a file or taken rights away before does not want others to find what was there until then. The
//! same holds for a directory that is moved, because the place that it comes to may be open to others.
//!
//! So a pass of such a directory waits for the operations of the log before it, and has what is dirty below brought there first.

use std::collections::{BTreeSet, HashMap, HashSet};

use rustix::io::Errno;

use super::Core;
use super::inode::{Gain, Inode, Operation, dirty};
use super::pass::Pass;
use super::state::State;
use super::write_back::EXTENTS_OF_PASS;
use crate::message::{Ino, ROOT};
use crate::store::Store;

/// If more than these may lie below a directory, all of them are brought there: to look where each of them is would take longer.
const FEW: usize = 1000;

/// What has to be there before a directory is opened.
#[derive(Default)]
pub struct Below {
    pub files: Vec<Ino>,
    /// Those that have to lose rights.
    pub directories: BTreeSet<Ino>,
}

/// What a thread that writes back does next.
pub enum WriteBack {
    Pass(Box<Pass>),
    /// A directory is to be opened, and this has to be there before.
    Open(Ino, Below),
}

impl State {
    /// Begins what has to be done for an inode that is to be written back; `None` if there is nothing to write, or a pass of it is under
    /// way.
    pub fn begin_work(&mut self, ino: Ino, store: &Store) -> Option<WriteBack> {
        match self.before_it_opens(ino) {
            Some(below) => {
                self.opening.insert(ino);
                Some(WriteBack::Open(ino, below))
            }
            None => self.begin_pass(ino, EXTENTS_OF_PASS, store).map(Box::new).map(WriteBack::Pass),
        }
    }

    /// Ends what was begun before a directory is opened.
    pub fn end_opening(&mut self, ino: Ino, brought: Result<(), Errno>) {
        self.opening.remove(&ino);
        if let Err(error) = brought {
            self.failed_alone(ino, error);
        }
    }

    /// Notes that a directory may have gained rights.
    pub fn note_gains(&mut self, ino: Ino) {
        let is_there = self
            .inodes
            .get(&ino)
            .is_some_and(|inode| inode.is_dir() && (ino == ROOT || !inode.homes.is_empty()));
        if is_there {
            self.gains.insert(ino, Gain { after: self.last_pending(), generation: self.generation });
        }
    }

    /// The operation that has to be carried out before a directory is given its rights there.
    pub fn gains_after(&self, ino: Ino) -> Option<u64> {
        self.gains.get(&ino).map(|gain| gain.after).filter(|number| *number >= self.first_pending)
    }

    /// What has to be brought there before a directory whose pass is about to begin; `None`: nothing.
    fn before_it_opens(&self, ino: Ino) -> Option<Below> {
        let gain = self.gains.get(&ino)?;
        if self.inodes.get(&ino).is_none_or(|inode| inode.dirty & dirty::RIGHTS == 0) {
            return None;
        }
        let mut files: Vec<Ino> = self.dirty_files(gain.generation).collect();
        let is_wide = |wide: &Ino| *wide != ino;
        let mut directories: BTreeSet<Ino> = self.wide.iter().copied().filter(is_wide).collect();
        let mut places = Places::of(self, [ino]);
        if files.len() <= FEW {
            files.retain(|file| places.has_file(*file));
        }
        if directories.len() <= FEW {
            directories.retain(|directory| places.has(*directory));
        }
        (!files.is_empty() || !directories.is_empty()).then_some(Below { files, directories })
    }

    /// The files below directories that are about to be moved there, whose data has to be there before.
    pub fn dirty_below(&self, moved: &HashSet<Ino>) -> Vec<Ino> {
        let mut places = Places::of(self, moved.iter().copied());
        self.dirty_files(self.generation).filter(|file| places.has_file(*file)).collect()
    }

    /// Files that were dirty at a generation, and still are, or are just being written back.
    fn dirty_files(&self, generation: u64) -> impl Iterator<Item = Ino> {
        let is_file = |ino: &Ino| self.inodes.get(ino).is_some_and(|inode| !inode.is_dir());
        let listed = self.dirty_by_age.iter().filter(move |(_, dirty)| dirty.generation <= generation);
        let is_listed =
            move |ino: &Ino| self.dirty_by_age.get(ino).is_some_and(|dirty| dirty.generation <= generation);
        let in_pass = self.passes.iter().filter(move |(ino, pass)| {
            pass.dirty_since.is_some_and(|since| since <= generation) && !is_listed(ino)
        });
        listed.map(|(ino, _)| *ino).chain(in_pass.map(|(ino, _)| *ino)).filter(is_file)
    }

    /// Why an operation that moves a directory can't be carried out: what is below it could not be overwritten. Where there is no room
    /// for that it is moved all the same, because that may make room.
    pub fn is_held_by(&self, operation: &Operation, failed: &[(Ino, Errno)]) -> Option<Errno> {
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(Inode::is_dir);
        if failed.is_empty() || !operation.moves() {
            return None;
        }
        let moved: Vec<Ino> = operation.subjects().into_iter().filter(is_dir).collect();
        let mut places = Places::of(self, moved);
        let holds = |(ino, error): &&(Ino, Errno)| {
            !matches!(*error, Errno::NOSPC | Errno::DQUOT) && !is_dir(ino) && places.has_file(*ino)
        };
        failed.iter().find(holds).map(|(_, error)| *error)
    }
}

/// Whether things lie in some directories, at whatever depth, on the backing directory.
struct Places<'a> {
    state: &'a State,
    known: HashMap<Ino, bool>,
}

impl<'a> Places<'a> {
    fn of(state: &'a State, directories: impl IntoIterator<Item = Ino>) -> Places<'a> {
        Places { state, known: directories.into_iter().map(|ino| (ino, true)).collect() }
    }

    /// Whether a directory is one of them, or in one.
    fn has(&mut self, directory: Ino) -> bool {
        let mut way = Vec::new();
        let mut is_in = false;
        for at in self.state.above(directory) {
            if let Some(known) = self.known.get(&at) {
                is_in = *known;
                break;
            }
            way.push(at);
        }
        self.known.extend(way.into_iter().map(|at| (at, is_in)));
        is_in
    }

    fn has_file(&mut self, file: Ino) -> bool {
        let state = self.state;
        let homes = state.inodes.get(&file).map(|inode| &inode.homes);
        homes.is_some_and(|homes| homes.iter().any(|home| self.has(home.dir)))
    }
}

impl Core {
    /// Brings what has to be there before a directory is opened there.
    ///
    /// # Errors
    /// The backing directory's, of the directory itself or of something below it.
    pub fn bring_below(&self, ino: Ino, below: &Below) -> Result<(), Errno> {
        self.narrow_directories(&below.directories).map_err(|(_, error)| error)?;
        let failed = self.write_back_all(&below.files);
        let mut state = self.lock();
        if below.files.iter().any(|ino| state.applier_awaits.contains(ino)) {
            // It was left out, and is free again soon.
            state = self.wait(state);
        }
        let mut places = Places::of(&state, [ino]);
        // Of a file that is cut while it is written the next trial takes the rest.
        let counts = |(file, error): &&(Ino, Errno)| *error != Errno::AGAIN && places.has_file(*file);
        match failed.iter().find(counts) {
            Some((_, error)) => Err(*error),
            None => Ok(()),
        }
    }
}
