//! What must hold after every event, in every state, and of the end of every history.

use crate::schedule::turns::nobody_overtakes;
use crate::schedule::world::*;
use crate::schedule::*;
use crate::{Incarnation, Request, WaitPolicy};

impl World {
    /// Lets something happen, and checks what must hold of it.
    pub(in crate::schedule) fn happen(&mut self, happening: &Happening, requests: &[Request]) {
        let Some(event) = self.come_about(happening, requests) else {
            if matches!(happening, Happening::Restart) {
                self.check_restart();
            }
            return;
        };
        let before = self.schedule.clone();
        let effects = self.schedule.handle(NOW, event).unwrap();
        nobody_overtakes(&before, &self.schedule, NOW);
        self.check_step(&before, &effects);
        if let Happening::Found(index) = happening
            && self.is_unknown(*index)
        {
            // It holds nothing, and nobody goes on with it: whoever looks at the nodes removes it.
            assert!(!self.physical[*index].unsaved, "results are left where nobody sees to them");
            self.physical[*index] = Physical::default();
        }
        self.check();
    }

    /// What was ordered and may not have been done is done again.
    fn check_restart(&self) {
        let again = self.schedule.resume();
        for job in self.schedule.jobs().values() {
            assert_eq!(again.contains(&Action::LockIn(job.id)), job.place == QueuePlace::LockedIn);
            assert_eq!(again.contains(&Action::UndoLockIn(job.id)), job.place == QueuePlace::Unlocking);
            assert!(job.under_way.is_none_or(|order| again.contains(&Action::Begin(job.id, order))));
        }
        self.check();
    }

    /// What must hold of every step.
    fn check_step(&mut self, before: &Schedule, effects: &Effects) {
        self.check_promises(before);
        self.note_given_up(before);
        for action in &effects.actions {
            self.check_hold(action);
            if let Action::Begin(of, order) = action {
                self.check_work(*of, order.work);
            }
            self.carry_out(action);
        }
        for job in &effects.gone {
            self.check_gone(job);
            self.leave(job);
        }
    }

    /// What the workload manager was told to be there stays until the job has started, or is really held; only a loss takes it away
    /// before.
    fn check_promises(&self, before: &Schedule) {
        for (of, was) in before.jobs() {
            let Some(job) = self.schedule.jobs().get(of) else { continue };
            let is_staged = was.is_promised() && was.rsa_state == RsaState::Ready;
            if is_staged && (was.job_state, job.job_state) == (JobState::Ondeck, JobState::Ondeck) {
                let is_held = job.hold == Hold::Stands && self.held[index_of(*of)];
                let may_change = was.broken || job.broken || is_held;
                assert!(job.rsa_state == RsaState::Ready || may_change, "a promise is broken: {job:?}");
            }
        }
    }

    /// What must be true of a job and its RAM disk when work begins.
    fn check_work(&self, of: Incarnation, work: Work) {
        let index = index_of(of);
        let job = &self.schedule.jobs()[&of];
        let physical = &self.physical[index];
        match work {
            Work::Construct => assert!(!physical.built, "built twice"),
            Work::Mount => assert!(job.job_state == JobState::Running),
            Work::StageOut => {
                assert!(!job.salvage || job.broken, "what is whole is given up");
                assert!(!physical.mounted || physical.given_up, "staged out while a node may write");
            }
            Work::Destroy => {
                assert!(!physical.unsaved, "results destroyed");
                assert!(!physical.mounted || physical.given_up, "destroyed while mounted");
            }
            Work::Unmount { force: true } => {
                let runs = self.has_processes(index);
                assert!(!runs || job.broken || job.mount_failed, "taken away from processes that run");
            }
            Work::StageIn | Work::StopStageIn | Work::Unmount { .. } => {}
        }
    }

    /// What must be true when nothing of a job is kept any more.
    fn check_gone(&self, job: &Job) {
        let physical = &self.physical[index_of(job.id)];
        assert!(job.allocation.is_none() && job.under_way.is_none() && !job.results, "{job:?}");
        if self.journal_lost && physical.built {
            // It is found later, and nothing was done about it.
            return;
        }
        assert!(!physical.unsaved);
        assert_eq!(job.place, QueuePlace::Own);
    }

    /// A hold for the results of another job ends when these are home, or nobody can wait for them.
    fn check_hold(&self, action: &Action) {
        match action {
            Action::HoldBack(of, _) => {
                assert!(index_of(*of) == 0 && self.is_dependent(0), "held, and depends on nobody");
            }
            Action::LetGo(of) if self.depends => {
                let jobs = self.schedule.jobs();
                let lost = jobs.get(&self.id(1)).is_some_and(|job| job.rsa_state == RsaState::Lost);
                let hopeless = jobs.get(of).is_some_and(|job| job.hopeless);
                let in_ram = self.physical[1].unsaved;
                assert!(!self.held_in_time || !in_ram || lost || hopeless, "let go before results are home");
            }
            _ => {}
        }
    }

    fn is_at_work(&self, index: usize) -> bool {
        let job = self.schedule.jobs().get(&self.id(index));
        job.is_some_and(|job| job.under_way.is_some() || job.not_before.is_some())
    }

    /// Nobody is held for the results of a job of which nothing is left, or for a place.
    pub(super) fn lets_go(&self, index: usize, requests: &[Request]) {
        let mut world = self.clone();
        for other in (0..requests.len()).filter(|other| *other != index) {
            world.slurm[other] = Slurm::Gone;
            while world.progress(other, requests) {
                world.tears_down(&[other], requests);
                world.happen(&Happening::Queue, requests);
            }
        }
        world.happen(&Happening::Queue, requests);
        // One that must have its input has to get it first.
        while world.held[index] && requests[index].wait == Some(WaitPolicy::Hold) && world.is_at_work(index) {
            world.progress(index, requests);
        }
        assert!(!world.held[index], "held for ever: {:?}", world.schedule.jobs());
    }

    /// A job whose burst buffer is lost stays in the queue, and has no RSA nodes after a while, also if it is next.
    pub(super) fn gives_back(&self, index: usize, requests: &[Request]) {
        let mut world = self.clone();
        world.slurm[index] = Slurm::Next;
        for _ in 0..30 {
            world.happen(&Happening::Queue, requests);
            let Some(job) = world.schedule.jobs().get(&world.id(index)) else { return };
            if job.burst_buffer == BurstBuffer::TornDown && job.doubted == Some(NOW) {
                world.happen(&Happening::NotAskedAgain(index), requests);
            } else {
                world.progress(index, requests);
            }
        }
        let has_nodes =
            world.schedule.jobs().get(&world.id(index)).is_some_and(|job| job.allocation.is_some());
        assert!(!has_nodes, "nodes are kept for a job that never starts: {:?}", world.schedule.jobs());
    }

    /// What must hold in every state.
    fn check(&self) {
        for (name, node) in self.schedule.nodes() {
            let promised: u64 = node.promised.values().map(|bytes| bytes.0).sum();
            assert!(!node.up || promised <= node.capacity.0, "{name} promised twice");
            for id in node.promised.keys() {
                let job = &self.schedule.jobs()[id];
                assert!(job.allocation.as_ref().is_some_and(|found| found.nodes.contains(name)));
            }
        }
        let home: Vec<&Job> = self
            .schedule
            .jobs()
            .values()
            .filter(|job| matches!(job.under_way, Some(WorkOrder { work: Work::StageOut, .. })))
            .collect();
        for (index, one) in home.iter().enumerate() {
            for other in &home[..index] {
                let meet = one.request.data_out.iter().any(|mine| {
                    let mut theirs = other.request.data_out.iter();
                    theirs.any(|theirs| mine.starts_with(theirs) || theirs.starts_with(mine))
                });
                assert!(!meet, "{} and {} bring results home to the same place", one.id, other.id);
            }
        }
        let is_kept_waiting = |job: &&Job| {
            job.job_state == JobState::Ondeck
                && job.burst_buffer == BurstBuffer::DataIn
                && job.hold == Hold::No
                && !job.may_start_on_disk()
        };
        let kept_waiting = self.schedule.jobs().values().filter(is_kept_waiting).count();
        assert!(kept_waiting <= self.schedule.site().kept_waiting as usize, "no place is left for others");
        for job in self.schedule.jobs().values() {
            for name in job.allocation.iter().flat_map(|found| &found.nodes) {
                assert!(self.schedule.nodes()[name].promised.contains_key(&job.id));
            }
            assert_eq!(job.under_way.is_some(), job.rsa_state.is_work(), "{job:?}");
            // The cells with a dash.
            if job.rsa_state.is_shown() {
                assert!(matches!(job.job_state, JobState::Running | JobState::Finished), "{job:?}");
            }
            if self.physical[index_of(job.id)].unsaved && !self.is_unknown(index_of(job.id)) {
                assert!(job.results, "unsaved results are not known of: {job:?}");
            }
            // What is known to be outdated waits for its hold, and for nothing else.
            if job.outdated {
                let waits_for_its_hold = job.hold == Hold::Ordered && job.job_state == JobState::Ondeck;
                assert!(waits_for_its_hold && job.rsa_state == RsaState::Ready, "{job:?}");
            }
            // What it must have before it starts is not what another job is about to replace; or it is being held, unless somebody
            // does not want that.
            let staged = matches!(job.rsa_state, RsaState::StagingIn | RsaState::Ready) && !job.outdated;
            let is_concerned = job.job_state == JobState::Ondeck && !job.hold.is_released_by_others();
            if is_concerned && staged && job.request.wait == Some(WaitPolicy::Hold) {
                let is_held = job.rsa_state == RsaState::Ready && job.hold.is_held();
                assert!(!is_held, "READY, and held for ever: {job:?}");
                let writes = |other: &&Job| {
                    let mut theirs = other.request.data_out.iter();
                    other.id != job.id
                        && other.results
                        && theirs.any(|theirs| {
                            let mut mine = job.request.data_in.iter();
                            mine.any(|mine| mine.starts_with(theirs) || theirs.starts_with(mine))
                        })
                };
                assert!(self.schedule.jobs().values().find(writes).is_none(), "{job:?}");
            }
            let has_nodes = !matches!(job.rsa_state, RsaState::Initial | RsaState::Ineligible);
            assert_eq!(has_nodes, job.allocation.is_some(), "{job:?}");
            // Who asks is answered as soon as there is something to say.
            let is_refused = job.rsa_state == RsaState::Ineligible && job.hold != Hold::Ordered;
            let is_decided = job.rsa_state == RsaState::Ready && !job.outdated || is_refused;
            match job.burst_buffer {
                BurstBuffer::DataIn => {
                    let is_on_its_way = |other: &Job| {
                        other.results
                            && other.job_state == JobState::Finished
                            && !matches!(other.rsa_state, RsaState::Held | RsaState::Lost)
                    };
                    let waits_for_results = self.schedule.jobs().values().any(is_on_its_way);
                    assert!(!is_decided && (!job.put_off || job.may_start_on_disk()), "{job:?}");
                    assert!(!job.may_start_on_disk() || waits_for_results, "{job:?}");
                }
                BurstBuffer::PreRun => assert!(
                    matches!(
                        job.rsa_state,
                        RsaState::Mounting | RsaState::UnmountNeeded | RsaState::Unmounting
                    ),
                    "{job:?}"
                ),
                _ => {}
            }
            // Nothing waits for ever: work, a pause, the workload manager, other jobs, or somebody who was told.
            let waits = job.under_way.is_some()
                || job.not_before.is_some()
                || job.prolog.until().is_some()
                || job.place == QueuePlace::Unlocking;
            let for_people =
                matches!(job.rsa_state, RsaState::Held | RsaState::Lost) && !job.message.is_empty();
            let for_the_queue = job.job_state != JobState::Finished && job.job_state != JobState::Demoted;
            let for_teardown = job.burst_buffer == BurstBuffer::Kept && self.is_told(job.id);
            let for_others = !job.waits_for.is_empty() || for_teardown;
            assert!(waits || for_people || for_the_queue || for_others, "{job:?}");
        }
    }

    /// Whether the workload manager was told that the results for which it keeps a job are not waited for any longer; or has lost
    /// the job.
    fn is_told(&self, of: Incarnation) -> bool {
        !matches!(self.buffers.get(index_of(of)), Some(Buffer::Kept { told: false }))
    }

    /// The workload manager ends a job with a burst buffer that has been told to, or that waits for nothing.
    fn tears_down(&mut self, ended: &[usize], requests: &[Request]) {
        for &index in ended {
            let known = self.schedule.jobs().contains_key(&self.id(index));
            let Some(buffer) = self.buffers.get(index) else { continue };
            match buffer {
                Buffer::Kept { told: false } if known => continue,
                Buffer::No | Buffer::TornDown => continue,
                _ if self.lost[index] => continue,
                Buffer::StagingOut if known => continue,
                _ => self.happen(&Happening::Asks(index, BurstBufferCall::Teardown), requests),
            }
        }
    }

    /// From here everything comes to an end if nothing else goes wrong.
    pub(super) fn ends(&self, requests: &[Request]) {
        let mut world = self.clone();
        let all: Vec<usize> = (0..self.slurm.len()).collect();
        for _ in 0..200 {
            world.slurm.fill(Slurm::Gone);
            world.tears_down(&all, requests);
            world.happen(&Happening::Queue, requests);
            for index in 0..self.slurm.len() {
                if world.is_unknown(index) && !world.found[index] {
                    world.happen(&Happening::Found(index), requests);
                }
            }
            if world.schedule.jobs().is_empty() {
                for index in 0..world.schedule.nodes().len() {
                    world.happen(&Happening::Resume(index), requests);
                    let known = &world.schedule.nodes()[&node(index)];
                    if !known.up || !known.heard {
                        world.happen(&Happening::Back(index), requests);
                    }
                    while !world.schedule.nodes()[&node(index)].leftover_on_rsa.is_empty() {
                        world.happen(&Happening::Cleaned(index), requests);
                    }
                }
                assert!(world.schedule.nodes().values().all(Node::is_free));
                return;
            }
            for index in 0..self.slurm.len() {
                world.progress(index, requests);
            }
        }
        panic!("does not come to an end: {:?}", self.schedule.jobs());
    }

    /// What comes next for a job that has ended, if nothing else goes wrong; returns whether it is known.
    fn progress(&mut self, index: usize, requests: &[Request]) -> bool {
        let Some(job) = self.schedule.jobs().get(&self.id(index)).cloned() else { return false };
        if job.under_way.is_some() {
            self.happen(&Happening::Ends(index, Outcome::Done(String::new())), requests);
        } else if job.ending.is_some() {
            // That its Epilogs never come is no further fault.
            self.faults = self.faults.saturating_add(1);
            self.happen(&Happening::EndingTimesOut(index), requests);
        } else if job.not_before.is_some() {
            self.happen(&Happening::PauseEnds(index), requests);
        } else if matches!(job.rsa_state, RsaState::Held | RsaState::Lost) {
            self.happen(&Happening::Retry(index), requests);
        } else if job.place == QueuePlace::Unlocking {
            self.happen(&Happening::Unlocked(index), requests);
        }
        true
    }
}
