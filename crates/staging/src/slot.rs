//! The directory of a RAM disk that stands for one of a job's.

use std::ffi::CString;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ondeck_api::wire::JobDirectory;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// The place of one of a job's directories in the RAM disk, by its name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot(String);

impl Slot {
    /// That of a run, by the number of the directory in its plan.
    pub fn of_run(index: usize) -> Slot {
        Slot(format!("data{index}"))
    }

    /// That of a task, by the name that the order gives it.
    pub fn of_task(directory: &JobDirectory) -> Slot {
        Slot(directory.name.clone())
    }

    /// Its name in the RAM disk.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Opens it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(&self, ram: impl AsFd) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(ram, CString::new(self.name())?, flags, Mode::empty())?)
    }

    /// Makes it, or makes one that is there ours to fill.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make(&self, ram: impl AsFd) -> io::Result<OwnedFd> {
        let text = CString::new(self.name())?;
        match rustix::fs::mkdirat(&ram, &*text, Mode::RWXU) {
            // It may have the mode of the directory on disk already.
            Err(Errno::EXIST) => {
                rustix::fs::chmodat(&ram, &*text, Mode::RWXU, AtFlags::empty())?;
            }
            made => made?,
        }
        self.open(ram)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_called_as_its_side_has_always_called_it() {
        let directory = JobDirectory { path: "/d".into(), name: "3".into(), input: true, output: false };
        assert_eq!((Slot::of_run(3).name(), Slot::of_task(&directory).name()), ("data3", "3"));
    }
}
