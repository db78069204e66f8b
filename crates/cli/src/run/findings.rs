//! What happened to single entries.

use std::os::unix::ffi::OsStrExt;

use ondeck_staging::merge_back::MergeBack;
use ondeck_transfer::Event;

use super::plan::RunDirectory;
use super::report;

/// Events of single entries.
#[derive(Default)]
pub struct Findings {
    /// What failed, and why: the first of them.
    pub errors: Vec<String>,
    /// How many failed.
    pub error_count: u64,
    /// Whose versions were put beside someone else's.
    pub put_beside: Vec<report::ConflictReport>,
    /// What was kept although the program had deleted it.
    pub kept: Vec<String>,
}

impl Findings {
    /// Notes what happened to an entry of a directory; `merge` is the policy, if results come home.
    pub fn record(&mut self, directory: &RunDirectory, merge: Option<&MergeBack>, event: &Event<'_>) {
        /// A list that a person reads; the count is complete.
        const MOST: usize = 20;
        let full = |path: &[u8]| {
            directory.path.join(std::ffi::OsStr::from_bytes(path)).to_string_lossy().into_owned()
        };
        match event {
            Event::Failed(error) => {
                self.error_count += 1;
                if self.errors.len() < MOST {
                    self.errors.push(error.to_string());
                }
            }
            Event::PutBeside { path, name } => {
                let name = std::ffi::OsStr::from_bytes(name).to_string_lossy().into_owned();
                let beside = report::ConflictReport { path: full(path), name };
                if !self.put_beside.iter().any(|known| known.path == beside.path) {
                    self.put_beside.push(beside);
                }
            }
            Event::Kept(path) if merge.is_some_and(|merge| merge.was_there(path)) => {
                self.kept.push(full(path));
            }
            // Nothing is left behind here: what others own comes home as well, or the run says that it can't.
            Event::Kept(_) | Event::Deleted(_) | Event::Would(..) | Event::LeftBehind { .. } => {}
        }
    }
}
