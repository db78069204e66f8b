//! Which job a record of the queue is.
//!
//! A workload manager gives a number again once it was started clean, or has forgotten the job; and it may come back with
//! an older state, in which jobs are as they were before. So jobs are told apart by what does not change: their owner, and
//! the time of submission that they had when they were first seen. That time does change with a requeue, which raises the
//! restart count at once and the time later; so all times that a job was seen with are noted.

use std::collections::{BTreeMap, BTreeSet};

use super::Job;
use crate::{Incarnation, JobId, QueuedJob};

/// What tells a job from others of its number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Whose it is.
    pub uid: u32,
    /// The times of submission that it was seen with, in seconds since 1970.
    pub noted: BTreeSet<u64>,
    /// How many times it was started anew, as far as it was seen.
    pub restarts: u32,
}

impl Identity {
    /// What is noted of one life of a job.
    pub fn of(job: &Job) -> Identity {
        let mut noted = job.noted.clone();
        // A former version noted the one time only.
        noted.insert(job.submitted);
        Identity { uid: job.owner.uid, noted, restarts: job.id.restarts }
    }

    fn add(&mut self, other: &Identity) {
        self.noted.extend(&other.noted);
        self.restarts = self.restarts.max(other.restarts);
    }
}

/// The jobs that are known, or were: by number and the time of submission that stands in their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identities(BTreeMap<(JobId, u64), Identity>);

impl Identities {
    /// Notes a life of a job.
    pub fn note(&mut self, id: Incarnation, identity: &Identity) {
        self.0
            .entry((id.job, id.submitted))
            .and_modify(|known| known.add(identity))
            .or_insert_with(|| identity.clone());
    }

    /// Whether several jobs are known that had a number.
    pub fn are_several(&self, number: JobId) -> bool {
        self.0.range((number, 0)..=(number, u64::MAX)).nth(1).is_some()
    }

    /// Forgets a job.
    pub fn forget(&mut self, id: Incarnation) {
        self.0.remove(&(id.job, id.submitted));
    }

    /// Which job a record of the queue is, and which life of it.
    ///
    /// - A time of submission that was noted for a job of this number and owner: that job. If its restart count is lower
    ///   than it was, the workload manager has an older state, in which that life is not over.
    /// - Otherwise it is another job if it was never started anew, or if the newest job of this number is another owner's,
    ///   or was started anew more often already. In doubt, too: what is known as another one is left alone.
    /// - Otherwise it is the newest job of this number, which was requeued.
    pub fn identify(&self, seen: &QueuedJob) -> Incarnation {
        let (job, restarts) = (seen.id.job, seen.id.restarts);
        let of = |submitted| Incarnation { job, submitted, restarts };
        let mut of_number = self.0.range((job, 0)..=(job, u64::MAX)).rev();
        let newest = of_number.clone().next();
        let noted =
            |identity: &Identity| identity.uid == seen.owner.uid && identity.noted.contains(&seen.submitted);
        if let Some((&(_, submitted), _)) = of_number.find(|(_, identity)| noted(identity)) {
            return of(submitted);
        }
        if let Some((&(_, submitted), identity)) = newest
            && (restarts > 0 && identity.uid == seen.owner.uid && identity.restarts <= restarts)
        {
            return of(submitted);
        }
        // Another owner's may have been submitted in the same second, before the workload manager was started clean.
        let mut submitted = seen.submitted;
        while self.0.contains_key(&(job, submitted)) {
            submitted += 1;
        }
        of(submitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Owner, Standing};
    use proptest::prelude::*;

    fn seen(uid: u32, submitted: u64, restarts: u32) -> QueuedJob {
        QueuedJob {
            id: Incarnation { job: JobId(138), submitted, restarts },
            owner: Owner { uid, gid: uid },
            account: String::new(),
            standing: Standing::Waiting,
            reason: String::new(),
            node_count: 1,
            nodes: Vec::new(),
            start: None,
            submitted,
            priority: 1,
            qos: String::new(),
            held_for_input: false,
            dependent: false,
            depends_on: Vec::new(),
            component_of: None,
            several: false,
            has_burst_buffer: false,
            waits_for_results: false,
            burst_buffer_lost: false,
        }
    }

    /// Identifies a record, and notes it as the schedule does.
    fn note(known: &mut Identities, seen: &QueuedJob) -> String {
        let id = known.identify(seen);
        let identity =
            Identity { uid: seen.owner.uid, noted: [seen.submitted].into(), restarts: id.restarts };
        known.note(id, &identity);
        id.key()
    }

    #[test]
    fn a_number_that_is_used_again_is_another_job() {
        let mut known = Identities::default();
        assert_eq!(note(&mut known, &seen(1, 100, 0)), "138@100");
        // A requeue: the count at once, the time later.
        assert_eq!(note(&mut known, &seen(1, 100, 1)), "138@100.1");
        assert_eq!(note(&mut known, &seen(1, 160, 1)), "138@100.1");
        assert_eq!(note(&mut known, &seen(1, 300, 2)), "138@100.2");
        // slurmctld comes back with an older state.
        assert_eq!(note(&mut known, &seen(1, 100, 0)), "138@100");
        assert_eq!(note(&mut known, &seen(1, 160, 1)), "138@100.1");
        // It is started clean: the same owner, and another one.
        assert_eq!(note(&mut known, &seen(1, 400, 0)), "138@400");
        assert_eq!(note(&mut known, &seen(2, 500, 0)), "138@500");
        assert_eq!(note(&mut known, &seen(2, 500, 1)), "138@500.1");
        // Of a requeue that was seen late, it is not known whose it is.
        assert_eq!(note(&mut known, &seen(3, 700, 1)), "138@700.1");
        assert_eq!(note(&mut known, &seen(3, 760, 0)), "138@760");
        assert_eq!(note(&mut known, &seen(3, 800, 0)), "138@800");
        // Two clean starts within a second.
        assert_eq!(note(&mut known, &seen(4, 800, 0)), "138@801");
        assert_eq!(note(&mut known, &seen(3, 800, 0)), "138@800");
        assert_eq!(note(&mut known, &seen(4, 800, 0)), "138@801");
    }

    #[test]
    fn what_a_former_version_kept_is_still_the_same_job() {
        let mut known = Identities::default();
        let old = Incarnation { job: JobId(138), submitted: 0, restarts: 0 };
        known.note(old, &Identity { uid: 1, noted: [100].into(), restarts: 0 });
        assert_eq!(known.identify(&seen(1, 100, 0)), old);
        assert_eq!(known.identify(&seen(1, 200, 1)).key(), "138.1");
        assert_eq!(known.identify(&seen(1, 200, 0)).key(), "138@200");
    }

    proptest! {
        /// A world of jobs that are submitted, requeued, shown as they were, and started clean under one number.
        #[test]
        fn no_job_is_taken_for_another(choices in proptest::collection::vec((0u8..4, 1u32..3, 0usize..8), 1..60)) {
            struct Real { uid: u32, name: Option<u64>, lives: Vec<(u64, u32)> }
            let (mut known, mut jobs, mut clock) = (Identities::default(), Vec::<Real>::new(), 100);
            for (kind, uid, which) in choices {
                clock += 10;
                match (kind, jobs.last_mut()) {
                    (0, _) | (_, None) => jobs.push(Real { uid, name: None, lives: vec![(clock, 0)] }),
                    (1, Some(job)) => {
                        // Requeued: the count, and in the next look the time.
                        let (submitted, restarts) = job.lives[job.lives.len() - 1];
                        job.lives.push((submitted, restarts + 1));
                    }
                    (2, Some(job)) => {
                        let restarts = job.lives[job.lives.len() - 1].1;
                        if restarts > 0 {
                            job.lives.push((clock, restarts));
                        }
                    }
                    // An older state, of the present job or of one before.
                    _ => {
                        let index = which % jobs.len();
                        let job = &mut jobs[index];
                        let (submitted, restarts) = job.lives[which % job.lives.len()];
                        let id = known.identify(&seen(job.uid, submitted, restarts));
                        prop_assert_eq!((Some(id.submitted), id.restarts), (job.name, restarts));
                        continue;
                    }
                }
                let job = &mut jobs[..].last_mut().unwrap();
                let (submitted, restarts) = job.lives[job.lives.len() - 1];
                let record = seen(job.uid, submitted, restarts);
                let id = known.identify(&record);
                prop_assert_eq!(id.restarts, restarts);
                prop_assert_eq!(id.submitted, *job.name.get_or_insert(id.submitted));
                note(&mut known, &record);
                let names: BTreeSet<u64> = jobs.iter().filter_map(|job| job.name).collect();
                prop_assert_eq!(names.len(), jobs.len(), "two jobs have one name");
            }
        }
    }
}
