//! One event being handled, and what all of its handling needs: jobs to be changed, the log, words for users.

use std::fmt;

use super::Schedule;
use crate::schedule::effects::{Action, Change, Effects, Refused};
use crate::schedule::notice::{NotNow, Notice, Waiting};
use crate::schedule::{Job, RsaState, Time};
use crate::{Incarnation, RamDiskId};

/// Whether these are the words of something. They are not written down for that: nearly all who wait have been told why.
fn says(said: &impl fmt::Display, text: &str) -> bool {
    struct Rest<'a>(&'a str);
    impl fmt::Write for Rest<'_> {
        fn write_str(&mut self, part: &str) -> fmt::Result {
            self.0 = self.0.strip_prefix(part).ok_or(fmt::Error)?;
            Ok(())
        }
    }
    let mut rest = Rest(text);
    fmt::write(&mut rest, format_args!("{said}")).is_ok() && rest.0.is_empty()
}

/// One event being handled.
pub(super) struct Handling<'a> {
    pub(super) schedule: &'a mut Schedule,
    pub(super) now: Time,
    pub(super) effects: Effects,
}

impl Handling<'_> {
    pub(super) fn known(&mut self, id: Incarnation) -> Result<&mut Job, Refused> {
        self.effects.jobs.push(id);
        self.schedule.jobs.get_mut(&id).ok_or(Refused::NoJob(id))
    }

    /// A job that is known, to be changed.
    pub(super) fn job(&mut self, id: Incarnation) -> &mut Job {
        self.effects.jobs.push(id);
        #[allow(clippy::expect_used)]
        self.schedule.jobs.get_mut(&id).expect("callers have just found it")
    }

    pub(super) fn note(&mut self, job: Option<Incarnation>, notice: impl Into<Notice>) {
        let states = job.and_then(|id| self.schedule.jobs.get(&id)).map(|job| (job.job_state, job.rsa_state));
        if let Some(id) = job {
            self.effects.jobs.push(id);
        }
        self.effects.changes.push(Change { job, states, notice: notice.into() });
    }

    /// Something that the user should know.
    pub(super) fn tell(&mut self, id: Incarnation, notice: impl Into<Notice>) {
        let notice = notice.into();
        let text = notice.to_string();
        let job = self.job(id);
        job.told = notice.told();
        // Nobody is told the same words twice; those of an earlier daemon are all that is left of what it told.
        if job.message != text {
            job.message = text;
            self.effects.actions.push(Action::Tell(id, notice.clone()));
            self.note(Some(id), notice);
        }
    }

    pub(super) fn become_state(&mut self, id: Incarnation, state: RsaState, notice: impl Into<Notice>) {
        let now = self.now;
        let job = self.job(id);
        job.rsa_state = state;
        job.outdated &= state == RsaState::Ready;
        job.since = now;
        job.waits_for.clear();
        self.note(Some(id), notice);
    }

    pub(super) fn waits(&mut self, id: Incarnation, why: Waiting) -> bool {
        if !says(&why, &self.schedule.jobs[&id].waits_for) {
            self.job(id).waits_for = why.to_string();
            self.note(Some(id), why);
        }
        false
    }

    /// Refuses what would take a RAM disk from processes that use it, as far as the queue shows them.
    pub(super) fn must_not_run(&self, id: Incarnation) -> Result<(), Refused> {
        match self.schedule.jobs.get(&id) {
            Some(job) if job.unsure && job.still_runs => Err(Refused::NotNow(NotNow::StillRuns(id))),
            _ => Ok(()),
        }
    }

    pub(super) fn with_ramdisk(&self, ramdisk: &RamDiskId) -> impl Iterator<Item = Incarnation> {
        let of = |job: &&Job| job.ramdisk().as_ref() == Some(ramdisk);
        self.schedule.jobs.values().filter(of).map(|job| job.id)
    }
}

#[cfg(test)]
mod tests {
    use super::says;

    #[test]
    fn words_are_those_that_are_said_and_no_part_of_them() {
        let said = format_args!("{} of {}", 3, "four").to_string();
        assert!(says(&said, "3 of four") && says(&"", ""));
        for other in ["", "3 of", "3 of four ", "3 of five", "4 of four"] {
            assert!(!says(&said, other), "{other}");
        }
        assert!(!says(&"", "words"));
    }
}
