//! The loads of filesystems that count: those that were read last and were far enough from the ones before.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ondeck_layout::load::Steady;
use ondeck_layout::{Filesystem, Load};

/// The loads that count, by the filesystems' paths.
#[derive(Default)]
pub(crate) struct Loads(Mutex<HashMap<PathBuf, Reading>>);

#[derive(Default)]
struct Reading {
    counts: Steady,
    /// Why it could not be read last.
    wrong: Option<String>,
}

impl Loads {
    /// The load of a filesystem that counts; nothing where none is known.
    pub(crate) fn of(&self, filesystem: &Path) -> Load {
        self.lock().get(filesystem).and_then(|reading| reading.counts.load()).unwrap_or_default()
    }

    /// Takes a reading. One that could not be read changes nothing, and is told once.
    pub(crate) fn take(&self, filesystem: &Path, read: Result<Load, String>) {
        let mut loads = self.lock();
        let reading = loads.entry(filesystem.to_owned()).or_default();
        match read {
            Ok(load) => {
                reading.counts.read(load);
                reading.wrong = None;
            }
            Err(wrong) if reading.wrong.as_ref() != Some(&wrong) => {
                tracing::warn!(
                    filesystem = %filesystem.display(),
                    error = wrong,
                    "can't read how busy a filesystem is; layouts go by what was read last"
                );
                reading.wrong = Some(wrong);
            }
            Err(_) => {}
        }
    }

    /// Forgets filesystems that the site's file does not have any more.
    pub(crate) fn keep(&self, filesystems: &[Filesystem]) {
        self.lock().retain(|path, _| filesystems.iter().any(|filesystem| filesystem.path == *path));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Reading>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_layout::Site;

    use super::*;

    const SITE: &str = "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
        targets = 8\nservers = 4\ntarget = \"1GB/s\"\n";

    #[test]
    fn what_can_not_be_read_changes_nothing_and_what_is_not_in_the_file_any_more_is_forgotten() {
        let (loads, path) = (Loads::default(), Path::new("/scratch"));
        assert_eq!(loads.of(path), Load::default());
        loads.take(path, Ok(Load::new(0.5)));
        loads.take(path, Err("no answer".into()));
        assert_eq!(loads.of(path), Load::new(0.5));
        loads.take(path, Ok(Load::new(0.55)));
        assert_eq!(loads.of(path), Load::new(0.5));
        loads.keep(&Site::parse(SITE).unwrap().filesystems);
        assert_eq!(loads.of(path), Load::new(0.5));
        loads.keep(&[]);
        assert_eq!(loads.of(path), Load::default());
    }
}
