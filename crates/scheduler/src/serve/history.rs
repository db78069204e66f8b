//! The history of the layouts, as its users see it and have it forgotten.

use std::path::Path;
use std::sync::Arc;

use ondeck_api::auth::Caller;
use ondeck_api::scheduler::{Forgotten, LayoutRun};
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_layout::census::pattern_of;
use ondeck_layout::classify::classify;
use ondeck_layout::programs::key_of;

use super::Api;
use crate::store::{RunFilter, StoreError};

/// The most bytes of runs in an answer: nobody reads more, and whoever asks often costs no more memory than that.
const MOST_TOLD: usize = 3 << 20;

/// What a run takes in an answer beside its figures, at most: names of a program and a directory.
const OTHERWISE: usize = 1024;

fn failed(error: &StoreError) -> Refusal {
    Refusal::new(RefusalCode::Failed, error.to_string())
}

/// What is meant of the history of a user; without one, of all.
fn filter(uid: Option<u32>, program: Option<&str>, directory: Option<&str>) -> RunFilter {
    let directory = directory.map(|directory| pattern_of(Path::new(directory)));
    RunFilter { uid, program: program.map(key_of), directory }
}

/// Refuses a user who names another one.
fn check_user(caller: Caller, uid: Option<u32>) -> Result<(), Refusal> {
    match uid {
        Some(uid) if uid != caller.uid && !caller.is_administrator() => {
            Err(Refusal::new(RefusalCode::Forbidden, "the history of another user is for administrators"))
        }
        _ => Ok(()),
    }
}

impl Api {
    /// The runs that are meant, as far as the caller may see them.
    pub(super) async fn layout_history(
        self: &Arc<Self>,
        caller: Caller,
        uid: Option<u32>,
        program: Option<&str>,
        directory: Option<&str>,
    ) -> Result<Vec<LayoutRun>, Refusal> {
        check_user(caller, uid)?;
        let whose = if caller.is_administrator() { uid } else { Some(caller.uid) };
        let filter = filter(whose, program, directory);
        let kept =
            self.context.journal.read(|reader| reader.runs(&filter)).map_err(|error| failed(&error))?;
        // Newest first: what there is no room for is older.
        let mut bytes = 0;
        let fitting = kept.into_iter().take_while(|kept| {
            bytes += serde_json::to_vec(&kept.run).map_or(0, |run| run.len() + OTHERWISE);
            bytes <= MOST_TOLD
        });
        let view = fitting.map(|kept| LayoutRun {
            uid: kept.uid,
            job: kept.job,
            program: kept.program,
            directory: kept.directory,
            used: classify(&kept.run.tally, kept.run.shape).to_string(),
            run: kept.run,
        });
        Ok(view.collect())
    }

    /// Forgets the runs that are meant: the caller's own, unless an administrator names a user.
    pub(super) async fn forget_layout_history(
        self: &Arc<Self>,
        caller: Caller,
        uid: Option<u32>,
        program: Option<&str>,
        directory: Option<&str>,
    ) -> Result<Forgotten, Refusal> {
        check_user(caller, uid)?;
        let filter = filter(Some(uid.unwrap_or(caller.uid)), program, directory);
        let runs = self.context.journal.write(|store| store.forget_runs(&filter));
        runs.map(|runs| Forgotten { runs }).map_err(|error| failed(&error))
    }
}
