//! Project ids, by which XFS and ext4 count the blocks of a tree against a quota of its own.
//!
//! Such a directory gives its id to what is made in it, and takes no name of what has another: link(2) and rename(2) fail with `EXDEV`
//! there, and programs copy instead. So they do here, since the backing directory would refuse it for good when nobody can be told.
//! An id that others change later is not noticed.

use std::os::fd::AsFd;

use rustix::io::Errno;

use super::Core;
use super::inode::{Kind, Operation};
use super::state::{State, Stop};
use super::wait::Need;
use crate::backing::{self, Project};
use crate::message::{Ino, ROOT};

/// Ids that are remembered; who asks for more reads them again.
const MOST: usize = 16 << 10;

impl State {
    /// Checks that a directory takes a name of something.
    ///
    /// # Errors
    /// `EXDEV` if its project does not, or what has to be read first.
    pub fn check_project(&self, ino: Ino, into: Ino) -> Result<(), Stop> {
        if !self.keeps_projects {
            return Ok(());
        }
        let project = self.project(into)?;
        if project.inherits && self.project(ino)?.id != project.id {
            return Err(Errno::XDEV.into());
        }
        Ok(())
    }

    fn project(&self, ino: Ino) -> Result<Project, Stop> {
        if let Some(known) = self.projects.get(&ino) {
            return Ok(*known);
        }
        let inode = self.inode(ino)?;
        if ino == ROOT || !inode.homes.is_empty() {
            return Err(Stop::Wait(Need::Project(ino)));
        }
        // What is not there yet is made with the id of the directory that it is made in.
        let index = inode.made_by.checked_sub(self.first_pending);
        let making = index.and_then(|index| self.log.get(index as usize)).map(|pending| &pending.operation);
        let Some(Operation::Make { dir, .. }) = making else { return Ok(Project::default()) };
        let above = self.project(*dir)?;
        Ok(match above.inherits {
            true => Project { inherits: inode.is_dir(), ..above },
            false => Project::default(),
        })
    }

    fn now_of_project(&mut self, ino: Ino, project: Project) {
        if self.projects.len() >= MOST {
            self.projects.clear();
        }
        self.projects.insert(ino, project);
    }
}

impl Core {
    /// Reads the project of something that is on the backing directory.
    pub(super) fn read_project(&self, need: &Need, ino: Ino) {
        let kind = self.lock().inodes.get(&ino).map(|inode| match &inode.kind {
            Kind::Directory(_) => (true, None),
            Kind::File(_) => (false, None),
            // To open one of these is to do something, if it can be opened at all.
            Kind::Symlink(_) | Kind::Special(_) => (false, inode.homes.first().map(|home| home.dir)),
        });
        let found = match kind {
            None => Err(Errno::STALE),
            // It may be another's, but was most probably made where it is.
            Some((_, Some(dir))) => {
                self.project_of_directory(dir).map(|above| Project { inherits: false, ..above })
            }
            Some((true, None)) => self.project_of_directory(ino),
            Some((false, None)) => self.backing_file(ino).and_then(|file| backing::project(file.as_fd())),
        };
        let mut state = self.lock();
        match found {
            Ok(project) => state.now_of_project(ino, project),
            // Who may not look is told by the backing directory, later.
            Err(Errno::ACCESS | Errno::PERM) => state.now_of_project(ino, Project::default()),
            Err(error) => return state.waits.fail(need, error),
        }
        state.waits.wake(need);
    }

    fn project_of_directory(&self, ino: Ino) -> Result<Project, Errno> {
        let directory = self.backing_directory(ino)?;
        backing::project(backing::reopen_directory(directory.as_fd())?.as_fd())
    }
}
