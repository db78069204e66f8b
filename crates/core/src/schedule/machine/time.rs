//! What follows from time that has passed: limits that are over, pauses that end.

use super::handling::Handling;
use super::hold::{hold_until, is_held_for_results_alone};
use crate::Incarnation;
use crate::schedule::event::{Fault, Outcome};
use crate::schedule::notice::{NoRamDisk, Overdue, TooLong, Turn};
use crate::schedule::{JobState, Prolog, RsaState, Time};

impl Handling<'_> {
    pub(super) fn pass_time(&mut self) {
        let now = self.now;
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        let ids: Vec<Incarnation> = self
            .schedule
            .jobs
            .values()
            .filter(|job| {
                due(job.under_way.map(|order| order.until))
                    || due(job.ending)
                    || due(hold_until(&self.schedule.site, job))
                    || due(job.not_before)
                    || due(job.prolog.until())
                    || (!job.delay_over && due(job.switch_at))
            })
            .map(|job| job.id)
            .collect();
        for id in ids {
            if due(hold_until(&self.schedule.site, &self.schedule.jobs[&id])) {
                let limit = self.schedule.site.limits.hold;
                let job = self.job(id);
                job.hopeless = true;
                let for_results = is_held_for_results_alone(job);
                // One that needs what its script makes stays held, which is said when it is given up.
                let starts = job.request.stage_in.is_none() || for_results;
                let what = match job.again_since {
                    _ if for_results => Overdue::Results,
                    Some(_) => Overdue::Input,
                    None => Overdue::Nodes,
                };
                self.tell(id, NoRamDisk::Overdue { what, limit, starts });
            }
            if due(self.job(id).ending) {
                // Whatever is left of it there can't be waited for.
                self.set_job_state(id, JobState::Finished, Turn::NotEndedInTime);
            }
            if due(self.job(id).prolog.until()) {
                self.job(id).prolog = Prolog::Over;
                self.no_prolog_asked(id);
            }
            let job = self.job(id);
            if due(job.switch_at) {
                job.delay_over = true;
            }
            if due(job.not_before) {
                job.not_before = None;
                job.retry_now |= job.rsa_state == RsaState::Held;
            }
            if let Some(order) = job.under_way.filter(|order| order.until <= now) {
                job.under_way = None;
                let why = TooLong(self.limit(order.work)).to_string();
                self.complete(
                    id,
                    order.work,
                    Outcome::Failed { why, blame: Vec::new(), fault: Fault::Transient },
                );
            }
        }
    }
}
