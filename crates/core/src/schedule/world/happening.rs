//! What may happen next in a world, and what the schedule is told of it.

use super::*;
use crate::RamDiskId;

#[derive(Clone, Debug)]
pub(in crate::schedule) enum Happening {
    Becomes(usize, Slurm),
    Queue,
    Prolog(usize),
    Epilog(usize),
    /// The workload manager comes back with an older state, in which a job that runs has not started.
    OlderState(usize),
    /// A node ends what it has of the run that the workload manager has forgotten.
    LateEpilog(usize),
    Ends(usize, Outcome),
    TaskTimesOut(usize),
    EndingTimesOut(usize),
    PauseEnds(usize),
    PrologGivenUp(usize),
    DelayEnds(usize),
    /// It has waited for RSA nodes beyond patience.
    HasWaited(usize),
    Lost(usize),
    Back(usize),
    Broken(usize),
    Whole(usize),
    Cleaned(usize),
    /// The workload manager asks something for a job with a burst buffer.
    Asks(usize, BurstBufferCall),
    /// The call in which a job waits for its input keeps others from ending.
    MustNotWait(usize),
    /// It goes on with what it was answered.
    Answered(usize),
    /// The workload manager loses a burst buffer.
    BufferLost(usize),
    /// One that was torn down, or is lost, was not asked for again for long.
    NotAskedAgain(usize),
    /// Somebody releases a job with a burst buffer that is held.
    Released(usize),
    /// A job has been held for as long as it may be.
    HeldTooLong(usize),
    /// What keeps a job in front of the queue is undone.
    Unlocked(usize),
    /// The daemon is killed, and another one reads the journal.
    Restart,
    /// The journal is lost, and a daemon with an empty one takes over.
    JournalLost,
    /// The RAM disk that was built for a job is found.
    Found(usize),
    /// A node that has not answered since is given up.
    GiveUp(usize),
    /// The workload manager is started clean, and gives the number of the one job to the other.
    UsedAgain(usize, usize),
    Drain(usize),
    Resume(usize),
    Retry(usize),
    Salvage(usize),
    Abandon(usize),
}

impl Happening {
    fn is_fault(&self) -> bool {
        match self {
            Happening::Ends(_, outcome) => !matches!(outcome, Outcome::Done(_) | Outcome::Tight(_)),
            Happening::TaskTimesOut(_)
            | Happening::EndingTimesOut(_)
            | Happening::Lost(_)
            | Happening::Broken(_) => true,
            _ => false,
        }
    }
}

impl World {
    /// What can happen next.
    pub(in crate::schedule) fn happenings(&self) -> Vec<Happening> {
        let mut all = self.all_happenings();
        all.retain(|happening| self.faults > 0 || !happening.is_fault());
        all
    }

    /// What the workload manager does for a job with a burst buffer: it asks, asks again, is answered, or forgets to ask.
    fn burst_buffer_happenings(&self, index: usize, all: &mut Vec<Happening>) {
        use BurstBufferCall as Call;
        let Some(buffer) = self.buffers.get(index) else { return };
        let job = self.schedule.jobs().get(&self.id(index));
        let is_answered = |stage: BurstBuffer| job.is_none_or(|job| job.burst_buffer >= stage);
        let asks = |call| Happening::Asks(index, call);
        let is_pending = matches!(self.slurm[index], Slurm::Waiting | Slurm::Next);
        let is_gone = self.slurm[index] == Slurm::Gone;
        if is_pending && self.held[index] && self.swaps < 2 {
            all.push(Happening::Released(index));
        }
        if self.lost[index] {
            return;
        }
        if is_pending && *buffer > Buffer::No && *buffer < Buffer::PreRun && self.buffer_losses > 0 {
            all.push(Happening::BufferLost(index));
        }
        match buffer {
            Buffer::No | Buffer::TornDown if is_gone => {}
            _ if is_gone && *buffer < Buffer::Running => all.push(asks(Call::Teardown)),
            // Slurm sets up nothing for jobs that are held.
            Buffer::No if self.held[index] => {}
            // The first one may be lost.
            Buffer::No => all.extend([asks(Call::Setup), asks(Call::DataIn)]),
            Buffer::SetUp => all.push(asks(Call::DataIn)),
            Buffer::StagingIn => {
                all.push(asks(Call::DataIn));
                let may_be_held = job.is_some_and(|job| !job.hold.is_held());
                // Where one may have no place, it comes to the same.
                let has_a_place = self.schedule.site().kept_waiting > 1;
                if may_be_held && has_a_place && !is_answered(BurstBuffer::Answered) {
                    all.push(Happening::MustNotWait(index));
                }
                if job.is_some() && is_answered(BurstBuffer::Answered) {
                    all.push(Happening::Answered(index));
                }
            }
            Buffer::StagedIn if self.slurm[index] == Slurm::Next && !self.held[index] => {
                all.push(asks(Call::PreRun))
            }
            Buffer::StagedIn => {}
            Buffer::PreRun => {
                all.push(asks(Call::PreRun));
                if is_answered(BurstBuffer::Started) {
                    all.push(Happening::Answered(index));
                }
            }
            Buffer::Running => {
                if matches!(self.slurm[index], Slurm::Ending { .. } | Slurm::Gone) {
                    // One of them may be lost.
                    all.extend([asks(Call::PostRun), Happening::Answered(index)]);
                }
            }
            Buffer::StagingOut if is_gone => {
                all.push(asks(Call::PostRun));
                match job {
                    Some(job) if job.results && matches!(job.rsa_state, RsaState::Held | RsaState::Lost) => {
                        all.push(asks(Call::DataOut));
                    }
                    Some(job) if job.results || job.job_state != JobState::Finished => {}
                    _ => all.push(asks(Call::Teardown)),
                }
            }
            Buffer::Kept { told } => {
                all.push(asks(Call::DataOut));
                // Somebody may do what it is told, without being told.
                if *told || self.faults > 0 {
                    all.push(asks(Call::Teardown));
                }
            }
            Buffer::StagingOut | Buffer::TornDown => {}
        }
        if is_pending && *buffer > Buffer::No && *buffer < Buffer::PreRun && self.swaps < 2 {
            // The workload manager was started anew.
            all.push(asks(Call::Teardown));
        }
    }

    /// It is asked, which changes what the workload manager waits for.
    fn ask(&mut self, index: usize, call: BurstBufferCall) {
        use BurstBufferCall as Call;
        let is_pending = matches!(self.slurm[index], Slurm::Waiting | Slurm::Next);
        let buffer = &mut self.buffers[index];
        *buffer = match (call, *buffer) {
            (Call::Setup, _) => Buffer::SetUp,
            (Call::DataIn, _) => Buffer::StagingIn,
            (Call::PreRun, _) => Buffer::PreRun,
            (Call::PostRun, _) => Buffer::StagingOut,
            (Call::DataOut, kept @ Buffer::Kept { .. }) => kept,
            (Call::DataOut, _) => Buffer::Kept { told: false },
            (Call::Teardown, _) if is_pending => {
                self.swaps += 1;
                Buffer::No
            }
            (Call::Teardown, _) => Buffer::TornDown,
        };
    }

    fn all_happenings(&self) -> Vec<Happening> {
        let mut all = vec![Happening::Queue];
        for index in 0..self.slurm.len() {
            self.burst_buffer_happenings(index, &mut all);
        }
        if self.one_number && self.swaps < 2 {
            for (old, state) in self.slurm.iter().enumerate() {
                let next = self.slurm.iter().position(|state| matches!(state, Slurm::Absent | Slurm::Gone));
                let next = next.filter(|next| *next != old);
                if let Some(next) = next.filter(|_| !matches!(state, Slurm::Absent)) {
                    all.push(Happening::UsedAgain(old, next));
                }
            }
        }
        if self.journals > 0 {
            all.push(Happening::JournalLost);
        }
        for index in 0..self.slurm.len() {
            if self.queue_seen && self.is_unknown(index) && !self.found[index] {
                all.push(Happening::Found(index));
            }
        }
        for index in 0..self.slurm.len() {
            match self.slurm[index] {
                Slurm::Waiting => {
                    if self.swaps < 2 && !self.is_dependent(index) && !self.held[index] {
                        all.push(Happening::Becomes(index, Slurm::Next));
                    }
                    all.push(Happening::Becomes(index, Slurm::Gone));
                }
                Slurm::Next => {
                    if self.swaps < 2 && self.buffers.get(index) != Some(&Buffer::PreRun) {
                        all.push(Happening::Becomes(index, Slurm::Waiting));
                    }
                    let running = Slurm::Running { prolog_ran: false, nodes: self.compute_nodes };
                    if !self.held[index] && self.buffers.is_empty() {
                        all.push(Happening::Becomes(index, running));
                    }
                    all.push(Happening::Becomes(index, Slurm::Gone));
                }
                Slurm::Running { prolog_ran, nodes } => {
                    if self.older_states > 0 && self.left[index] == 0 {
                        all.push(Happening::OlderState(index));
                    }
                    // One that had waited for the former scheduler asks again.
                    let asks_again = |job: &Job| job.prolog.is_expected();
                    if !prolog_ran || self.schedule.jobs().get(&self.id(index)).is_some_and(asks_again) {
                        all.push(Happening::Prolog(index));
                    }
                    all.push(Happening::Epilog(index));
                    let end = if nodes == 0 { Slurm::Gone } else { Slurm::Ending { nodes } };
                    all.push(Happening::Becomes(index, end));
                }
                Slurm::Ending { .. } => all.push(Happening::Epilog(index)),
                Slurm::Gone | Slurm::Absent => {}
            }
            if self.left[index] > 0 {
                all.push(Happening::LateEpilog(index));
            }
            let Some(job) = self.schedule.jobs().get(&self.id(index)) else { continue };
            if let Some(order) = job.under_way {
                all.push(Happening::Ends(index, Outcome::Done(String::new())));
                all.push(Happening::TaskTimesOut(index));
                let mut faults = vec![Fault::Transient];
                match order.work {
                    Work::Construct if job.older => faults.push(Fault::Elsewhere),
                    Work::StageIn => faults.push(Fault::NeedsUser),
                    Work::StageOut => faults.extend([Fault::NeedsUser, Fault::Lost]),
                    Work::Unmount { force: false } => faults.push(Fault::Busy),
                    _ => {}
                }
                match order.work {
                    Work::StageIn => all.push(Happening::Ends(index, Outcome::Tight(String::new()))),
                    Work::Mount => {
                        let refused = Outcome::Refused { why: String::new(), fault: Fault::NeedsUser };
                        all.push(Happening::Ends(index, refused));
                        if job.prolog == Prolog::Over {
                            all.push(Happening::Ends(index, Outcome::Later { why: String::new() }));
                        }
                    }
                    _ => {}
                }
                for fault in faults {
                    let blame = match (order.work, &job.allocation) {
                        (Work::Construct | Work::Destroy, Some(allocation)) => {
                            vec![allocation.nodes[0].clone()]
                        }
                        _ => Vec::new(),
                    };
                    let outcome = Outcome::Failed { why: String::new(), blame, fault };
                    all.push(Happening::Ends(index, outcome));
                }
            }
            if job.place == QueuePlace::Unlocking {
                all.push(Happening::Unlocked(index));
            }
            if self.lost[index] && job.burst_buffer == BurstBuffer::TornDown && job.doubted == Some(NOW) {
                all.push(Happening::NotAskedAgain(index));
            }
            if self.depends && job.hold.is_held() && job.rsa_state == RsaState::Initial {
                all.push(Happening::HeldTooLong(index));
            }
            if job.prolog == Prolog::Waiting {
                // Of all else, the next daemon knows the same.
                all.push(Happening::Restart);
            }
            if job.not_before.is_some() {
                all.push(Happening::PauseEnds(index));
            }
            if job.ending.is_some() {
                all.push(Happening::EndingTimesOut(index));
            }
            if job.prolog.until().is_some() {
                all.push(Happening::PrologGivenUp(index));
            }
            if job.switch_at.is_some() && !job.delay_over {
                all.push(Happening::DelayEnds(index));
            }
            // What is refused changes nothing.
            let refused = job.unsure && job.still_runs;
            if matches!(job.rsa_state, RsaState::Held | RsaState::Lost) && !refused {
                all.push(Happening::Retry(index));
            }
            if job.rsa_state == RsaState::Lost && job.broken && !refused {
                all.push(Happening::Salvage(index));
            }
            if matches!(job.rsa_state, RsaState::Held | RsaState::Lost | RsaState::StagingOut) && !refused {
                all.push(Happening::Abandon(index));
            }
            if job.allocation.is_some() && self.losses == 0 {
                all.push(Happening::Broken(index));
            }
            if job.broken {
                all.push(Happening::Whole(index));
            }
            if job.lacking == Some(NOW) {
                all.push(Happening::HasWaited(index));
            }
        }
        for (index, found) in self.schedule.nodes().values().enumerate() {
            if found.up && self.losses == 0 {
                all.push(Happening::Lost(index));
            }
            // What the node has is told of before the node.
            let all_found = (0..self.slurm.len()).all(|index| self.found[index] || !self.is_unknown(index));
            if (!found.up || !found.heard) && self.queue_seen && all_found {
                all.push(Happening::Back(index));
            }
            if !found.heard && all_found {
                all.push(Happening::GiveUp(index));
            }
            if !found.leftover_on_rsa.is_empty() {
                all.push(Happening::Cleaned(index));
            }
            if self.drains {
                let drained = !found.drained.is_empty();
                all.push(if drained { Happening::Resume(index) } else { Happening::Drain(index) });
            }
        }
        if self.drains {
            all.push(Happening::Restart);
        }
        all
    }

    /// Lets a time that a job waits for come.
    fn due(&mut self, index: usize, which: impl Fn(&mut Job)) -> Event {
        which(self.schedule.jobs.get_mut(&self.id(index)).unwrap());
        // Time stands still here: it is put back in the job, which the schedule can't know.
        self.schedule.settled = None;
        Event::Tick
    }

    /// Makes it true, and returns what the schedule is told; nothing if it does not hear of it.
    pub(in crate::schedule) fn come_about(
        &mut self,
        happening: &Happening,
        requests: &[Request],
    ) -> Option<Event> {
        self.faults -= u8::from(happening.is_fault());
        let event = match happening {
            Happening::Becomes(index, to) => {
                if matches!(
                    (self.slurm[*index], to),
                    (Slurm::Waiting, Slurm::Next) | (Slurm::Next, Slurm::Waiting)
                ) {
                    self.swaps += 1;
                }
                self.slurm[*index] = *to;
                return None;
            }
            Happening::Released(index) => {
                self.swaps += 1;
                (self.held[*index], self.released[*index]) = (false, true);
                return None;
            }
            Happening::JournalLost => {
                self.lose_the_journal();
                return None;
            }
            Happening::BufferLost(index) => {
                self.buffer_losses -= 1;
                self.lost[*index] = true;
                return None;
            }
            Happening::Answered(index) => {
                let (to, slurm) = match self.buffers[*index] {
                    Buffer::StagingIn => (Buffer::StagedIn, None),
                    Buffer::PreRun => {
                        let running = Slurm::Running { prolog_ran: false, nodes: self.compute_nodes };
                        (Buffer::Running, Some(running))
                    }
                    _ => (Buffer::StagingOut, None),
                };
                self.buffers[*index] = to;
                self.slurm[*index] = slurm.unwrap_or(self.slurm[*index]);
                return None;
            }
            Happening::Asks(index, call) => {
                self.ask(*index, *call);
                let seen = Box::new(self.seen(*index, requests));
                Event::BurstBuffer { call: *call, seen }
            }
            Happening::MustNotWait(index) => Event::MustNotWait(self.id(*index)),
            Happening::UsedAgain(old, next) => {
                // What ran goes on where nobody looks, and has ended soon.
                (self.slurm[*old], self.slurm[*next]) = (Slurm::Gone, Slurm::Waiting);
                self.swaps += 1;
                return None;
            }
            Happening::Found(index) => {
                self.found[*index] = true;
                let physical = self.physical[*index];
                let ObservedJob { job, work_dir, .. } = self.seen(*index, requests);
                Event::Found(Box::new(FoundRamDisk {
                    ramdisk: RamDiskId { name: job.id.ramdisk(), epoch: Epoch(NOW.0 * 2000) },
                    job: job.id,
                    owner: job.owner,
                    account: job.account,
                    request: requests[*index].clone(),
                    work_dir,
                    purpose: physical.purpose.unwrap(),
                    nodes: vec![node(0)],
                    promise: SHARE,
                    guarded: physical.unsaved,
                    runs: self.has_processes(*index),
                    fault: None,
                }))
            }
            Happening::GiveUp(index) => Event::GiveUp(node(*index)),
            Happening::Queue => Event::Queue {
                taken: Time(NOW.0 + 1),
                jobs: (0..self.slurm.len())
                    .filter(|index| self.is_in_queue(*index))
                    .map(|index| self.seen(index, requests))
                    .collect(),
            },
            Happening::Prolog(index) => {
                let Slurm::Running { nodes, .. } = self.slurm[*index] else { unreachable!() };
                self.slurm[*index] = Slurm::Running { prolog_ran: true, nodes };
                Event::Starting(Box::new(self.seen(*index, requests)))
            }
            Happening::Epilog(index) => {
                // Also of a job that goes on: a node may have failed it.
                let (Slurm::Running { nodes, .. } | Slurm::Ending { nodes }) = &mut self.slurm[*index] else {
                    unreachable!()
                };
                *nodes = nodes.saturating_sub(1);
                let left = *nodes;
                if left == 0 {
                    self.slurm[*index] = Slurm::Gone;
                }
                Event::Ending { job: self.id(*index), node: compute_node(self.runs[*index], left) }
            }
            Happening::OlderState(index) => {
                let Slurm::Running { nodes, .. } = self.slurm[*index] else { unreachable!() };
                (self.slurm[*index], self.left[*index]) = (Slurm::Next, nodes);
                self.runs[*index] += 1;
                self.older_states -= 1;
                return None;
            }
            Happening::LateEpilog(index) => {
                self.left[*index] -= 1;
                let node = compute_node(self.runs[*index] - 1, self.left[*index]);
                Event::Ending { job: self.id(*index), node }
            }
            Happening::Ends(index, outcome) => {
                let order = self.schedule.jobs()[&self.id(*index)].under_way.unwrap();
                self.really_ends(*index, order.work, outcome);
                Event::Ended { job: self.id(*index), number: order.number, outcome: outcome.clone() }
            }
            Happening::TaskTimesOut(index) => {
                let work = self.schedule.jobs()[&self.id(*index)].under_way.unwrap().work;
                let late = Outcome::Failed { why: String::new(), blame: Vec::new(), fault: Fault::Transient };
                self.really_ends(*index, work, &late);
                self.due(*index, |job| job.under_way.as_mut().unwrap().until = NOW)
            }
            Happening::EndingTimesOut(index) => {
                // Whatever runs there is out of reach.
                match self.known_run(*index) {
                    KnownRun::This => self.slurm[*index] = Slurm::Gone,
                    KnownRun::Last => self.left[*index] = 0,
                    KnownRun::Earlier => {}
                }
                self.due(*index, |job| job.ending = Some(NOW))
            }
            Happening::PauseEnds(index) => self.due(*index, |job| job.not_before = Some(NOW)),
            Happening::PrologGivenUp(index) => {
                self.due(*index, |job| job.prolog = Prolog::Expected(Some(NOW)))
            }
            Happening::HasWaited(index) => {
                self.due(*index, |job| job.lacking = Some(Time(NOW.0 - PATIENCE.as_millis() as u64)))
            }
            Happening::NotAskedAgain(index) => {
                let since = Time(NOW.0 - self.schedule.site().limits.again.as_millis() as u64);
                self.due(*index, |job| job.doubted = Some(since))
            }
            Happening::HeldTooLong(index) => {
                let since = Time(NOW.0 - self.schedule.site().limits.hold.as_millis() as u64);
                self.due(*index, |job| job.since = since)
            }
            Happening::DelayEnds(index) => self.due(*index, |job| job.switch_at = Some(NOW)),
            Happening::Lost(index) => {
                self.losses += 1;
                Event::NodeLost(node(*index))
            }
            Happening::Back(index) => Event::NodeUp { node: node(*index), capacity: CAPACITY },
            Happening::Broken(index) => {
                self.losses += 1;
                let ramdisk = self.schedule.jobs()[&self.id(*index)].ramdisk().unwrap();
                let node =
                    self.schedule.jobs()[&self.id(*index)].allocation.as_ref().unwrap().nodes[0].clone();
                Event::Broken { ramdisk, node, why: String::new() }
            }
            Happening::Whole(index) => match self.schedule.jobs()[&self.id(*index)].ramdisk() {
                Some(ramdisk) => Event::Whole(ramdisk),
                None => return None,
            },
            Happening::Cleaned(index) => {
                let ramdisk = self.schedule.nodes()[&node(*index)].leftover_on_rsa.first().unwrap().clone();
                Event::Cleaned { node: node(*index), ramdisk }
            }
            Happening::Unlocked(index) => Event::Unlocked(self.id(*index)),
            Happening::Restart => {
                self.restart();
                return None;
            }
            Happening::Drain(index) => Event::Drain { node: node(*index), why: "somebody".into() },
            Happening::Resume(index) => Event::Resume(node(*index)),
            Happening::Retry(index) => Event::Retry { job: self.id(*index), salvage: false },
            Happening::Salvage(index) => Event::Retry { job: self.id(*index), salvage: true },
            Happening::Abandon(index) => {
                self.physical[*index].unsaved = false;
                Event::Abandon { job: self.id(*index), by: "somebody".into() }
            }
        };
        self.queue_seen |= matches!(event, Event::Queue { .. });
        Some(event)
    }
}
