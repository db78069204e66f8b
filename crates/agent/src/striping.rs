//! What an agent keeps of the layouts that it has set for a job: what the directories had before. It is written before one is
//! set, so that the next agent can take back what this one has begun.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ondeck_api::wire::DirectoryToRestore;
use ondeck_core::Incarnation;
use serde::{Deserialize, Serialize};

/// The version of [`StripingRecord`].
const VERSION: u32 = 1;

/// What is kept for a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripingRecord {
    version: u32,
    /// Its directories, each with what it had before.
    pub directories: Vec<DirectoryToRestore>,
}

/// Where it is kept, in the agent's directory.
pub fn directory(state: &Path) -> PathBuf {
    state.join("layouts")
}

fn path(state: &Path, job: Incarnation) -> PathBuf {
    directory(state).join(format!("{}.json", job.label()))
}

impl StripingRecord {
    /// A job whose layouts have not been set.
    pub fn new() -> StripingRecord {
        StripingRecord { version: VERSION, directories: Vec::new() }
    }

    /// What is kept for a job; nothing if nothing is.
    ///
    /// # Errors
    /// If it can't be read, or is not understood.
    pub fn load(state: &Path, job: Incarnation) -> io::Result<Option<StripingRecord>> {
        let text = match fs::read(path(state, job)) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let record: StripingRecord = serde_json::from_slice(&text)?;
        if record.version != VERSION {
            return Err(io::Error::other(format!("its format is {}, not {VERSION}", record.version)));
        }
        Ok(Some(record))
    }

    /// Keeps it.
    ///
    /// # Errors
    /// The kernel's; then nothing may be set.
    pub fn save(&self, state: &Path, job: Incarnation) -> io::Result<()> {
        let (directory, path) = (directory(state), path(state, job));
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        let partial = path.with_extension("partial");
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&partial, &path)?;
        File::open(&directory)?.sync_all()
    }

    /// Forgets what is kept for a job.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove(state: &Path, job: Incarnation) -> io::Result<()> {
        match fs::remove_file(path(state, job)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_api::wire::{FormerLayout, FormerValue};

    use super::*;

    #[test]
    fn what_directories_had_is_kept_per_life_of_a_job_and_what_can_not_be_read_is_not_taken_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (state, job) = (folder.path(), "42@1795381275".parse().unwrap());
        assert_eq!(StripingRecord::load(state, job).unwrap(), None);
        StripingRecord::remove(state, job).unwrap();
        let mut record = StripingRecord::new();
        record.directories.push(DirectoryToRestore {
            path: "/scratch/$(touch x)".into(),
            options: "-c 2 -S 1M".into(),
            targets: Some(2),
            tool: None,
            former: FormerLayout { layout: FormerValue::Inherited, mark: None, inode: None },
        });
        record.save(state, job).unwrap();
        assert_eq!(StripingRecord::load(state, job).unwrap(), Some(record));
        assert_eq!(StripingRecord::load(state, "42@1795381275.1".parse().unwrap()).unwrap(), None);
        for wrong in ["", "{", "{\"version\":2,\"directories\":[]}"] {
            fs::write(path(state, job), wrong).unwrap();
            assert!(StripingRecord::load(state, job).is_err(), "{wrong}");
        }
        StripingRecord::remove(state, job).unwrap();
        assert_eq!(fs::read_dir(directory(state)).unwrap().count(), 0);
    }
}
