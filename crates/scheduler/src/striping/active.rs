//! The layouts of all jobs that have not ended, or of which something is still to be taken back: who has set which directory's.
//!
//! Of jobs with one directory the first stays, and the others are told. Elements of an array have one script, and want the same:
//! they leave it to the first of them, which is not over before the last of them is. So one of them sets it, and it is
//! taken back once.
//!
//! That holds among the jobs of a user. Whoever names another one's directory may have no right to it, and must neither keep its
//! owner's job from it nor hear who has it: between users the note in the directory decides, which the agent reads and writes as the user.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_core::{Incarnation, JobId, NodeName, Owner};

use super::{DirectoryLayout, JobLayouts};

/// The layouts of a job that has not ended, or of which something is still to be taken back.
pub(crate) struct ActiveLayouts {
    record: Mutex<JobLayouts>,
    /// Held by whoever orders something for it.
    pub work: Arc<Turn>,
    /// Whether its Epilog has run where its script ran.
    over: AtomicBool,
    /// Whether it is being taken back: then nobody leaves anything to it any more.
    closed: AtomicBool,
    /// How often taking back has failed, and until when it is not tried again.
    tries: Mutex<(u32, Option<Instant>)>,
}

/// Whose turn it is to order something for a job.
pub(crate) type Turn = tokio::sync::Mutex<()>;

/// The pause after taking back has failed; doubled each time, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl ActiveLayouts {
    fn new(record: JobLayouts) -> Arc<ActiveLayouts> {
        Arc::new(ActiveLayouts {
            record: Mutex::new(record),
            work: Arc::default(),
            over: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            tries: Mutex::default(),
        })
    }

    /// What is known.
    pub fn record(&self) -> MutexGuard<'_, JobLayouts> {
        lock(&self.record)
    }

    /// Whether its Epilog has run where its script ran.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// How often taking back has failed.
    pub fn tries(&self) -> u32 {
        lock(&self.tries).0
    }

    /// Whether it is time to try taking back.
    pub fn is_due(&self) -> bool {
        lock(&self.tries).1.is_none_or(|until| until <= Instant::now())
    }

    /// Taking back has failed; how often by now.
    pub fn failed(&self) -> u32 {
        let mut tries = lock(&self.tries);
        let pause = FIRST_PAUSE.saturating_mul(1 << tries.0.min(10)).min(LONGEST_PAUSE);
        *tries = (tries.0 + 1, Some(Instant::now() + pause));
        tries.0
    }
}

/// So many are taken back at a time: each is a request to an agent, and a task there.
const AT_A_TIME: usize = 16;

/// The layouts of all such jobs.
pub(crate) struct Layouts {
    known: Mutex<Known>,
    /// Who takes some back has a turn.
    pub turns: tokio::sync::Semaphore,
    /// Who counts what is left has a turn of its own: that may take long, and keeps no layout from being taken back.
    pub counts: tokio::sync::Semaphore,
    /// The last that had left something to another one is over.
    pub freed: tokio::sync::Notify,
}

type Known = BTreeMap<Incarnation, Arc<ActiveLayouts>>;

impl Default for Layouts {
    fn default() -> Layouts {
        let [turns, counts] = [AT_A_TIME; 2].map(tokio::sync::Semaphore::new);
        Layouts { known: Mutex::default(), turns, counts, freed: tokio::sync::Notify::new() }
    }
}

/// Who has a directory that a job wants.
#[derive(Default)]
struct Others {
    /// Whoever has set it, or may have.
    rival: Option<Arc<ActiveLayouts>>,
    /// The element of the job's array that sees to it.
    first: Option<Arc<ActiveLayouts>>,
    /// Who writes there beside them.
    beside: Vec<Arc<ActiveLayouts>>,
}

impl Others {
    /// Those that have a directory which this job wants.
    fn of(known: &Known, job: &JobLayouts, path: &Path) -> Others {
        let mut others = Others::default();
        for (_, other) in known.iter().filter(|(id, _)| **id != job.id) {
            let record = other.record();
            if record.owner != job.owner {
                continue;
            }
            let Some(directory) = record.directory(path) else { continue };
            let is_of_array = job.is_of_the_array_of(&record);
            if is_of_array && directory.left_to.is_some() {
                continue;
            }
            if is_of_array && !other.is_closed() && directory.takes_guests() {
                others.first.get_or_insert_with(|| Arc::clone(other));
            } else if directory.may_be_set() {
                others.rival.get_or_insert_with(|| Arc::clone(other));
            } else if record.ended.is_none() {
                others.beside.push(Arc::clone(other));
            }
        }
        others
    }

    /// Settles between a job and them who has the directory.
    fn settle(self, job: &mut JobLayouts, path: &Path) {
        let (id, size) = (job.id, job.size());
        let Some(own) = job.directory_mut(path) else { return };
        for other in self.rival.iter().chain(&self.beside) {
            own.counts = false;
            other.record().count_no_more(Some(path));
        }
        if let Some(rival) = self.rival {
            let rival = rival.record();
            // Its agent may have said nothing.
            let is_set = rival.directory(path).is_some_and(|of_rival| !of_rival.is_ordered());
            let has = if is_set { "has" } else { "may have" };
            own.leave_alone(format!("job {} {has} set its layout, and that is not taken back yet", rival.id));
        } else if let Some(first) = self.first {
            let mut first = first.record();
            let first_id = first.id;
            let Some(of_first) = first.directory_mut(path) else { return };
            of_first.counts &= own.counts;
            of_first.guests.nodes = of_first.guests.nodes.saturating_add(size.0);
            of_first.guests.tasks = of_first.guests.tasks.saturating_add(size.1);
            let who = match first_id.is_same_job(id) {
                true => "an earlier run of it".to_owned(),
                false => format!("job {first_id}, another element of its array,"),
            };
            own.leave_to(first_id, of_first, format!("{who} sees to it"));
        }
    }
}

impl Layouts {
    /// Goes on with what an earlier daemon has kept.
    pub fn resume(&self, kept: Vec<JobLayouts>) {
        let mut known = lock(&self.known);
        for record in kept {
            known.entry(record.id).or_insert_with(|| ActiveLayouts::new(record));
        }
    }

    /// Those of a job.
    pub fn of(&self, id: Incarnation) -> Option<Arc<ActiveLayouts>> {
        lock(&self.known).get(&id).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<ActiveLayouts>> {
        lock(&self.known).values().cloned().collect()
    }

    /// Other jobs whose layouts these directories have, or may have.
    pub fn others(&self, record: &JobLayouts) -> Vec<Arc<ActiveLayouts>> {
        let wanted = record.to_stripe();
        let uses = |other: &&Arc<ActiveLayouts>| {
            let other = other.record();
            other.id != record.id && wanted.iter().any(|directory| other.uses(&directory.path))
        };
        lock(&self.known).values().filter(uses).cloned().collect()
    }

    /// Adds those of a job, unless they are there already. Whoever came first keeps a directory, and elements of an array share
    /// it. What is new is returned with a turn at its work.
    pub fn add(
        &self,
        mut record: JobLayouts,
    ) -> (Arc<ActiveLayouts>, Option<tokio::sync::OwnedMutexGuard<()>>) {
        let mut known = lock(&self.known);
        if let Some(there) = known.get(&record.id) {
            return (Arc::clone(there), None);
        }
        for path in record.paths() {
            Others::of(&known, &record, &path).settle(&mut record, &path);
        }
        let added = ActiveLayouts::new(record);
        let turn = Arc::clone(&added.work).try_lock_owned().ok();
        let id = added.record().id;
        known.insert(id, Arc::clone(&added));
        (added, turn)
    }

    /// Other jobs for which layouts are set, or may be.
    pub fn rivals(&self, id: Incarnation) -> Vec<Incarnation> {
        let known = lock(&self.known);
        let sets =
            |other: &Arc<ActiveLayouts>| other.record().directories.iter().any(DirectoryLayout::may_be_set);
        known
            .iter()
            .filter(|(other, active)| **other != id && sets(active))
            .map(|(other, _)| *other)
            .collect()
    }

    /// A job has found that another one has set a directory's layout, by a name of its own.
    pub fn found_set(&self, finder: Owner, (job, path, inode): (Incarnation, &Path, Option<u64>)) {
        if let Some(other) = lock(&self.known).get(&job) {
            let mut other = other.record();
            // Who has said so may be anybody who may write there, and may write anything.
            let noted = other.directory(path).and_then(|directory| directory.former.as_ref()?.inode);
            if other.owner == finder && (noted.is_none() || noted == inode) {
                other.count_no_more(Some(path));
            }
        }
    }

    /// Of those that a job has left something to, one that it has not waited for.
    pub fn first_of(
        &self,
        active: &ActiveLayouts,
        waited: &BTreeSet<Incarnation>,
    ) -> Option<Arc<ActiveLayouts>> {
        let known = lock(&self.known);
        let firsts: Vec<Incarnation> =
            active.record().directories.iter().filter_map(|directory| directory.left_to).collect();
        firsts.iter().filter(|id| !waited.contains(id)).find_map(|id| known.get(id)).cloned()
    }

    /// Has a job see itself to what it has left to others that could not do it.
    pub fn take_over(&self, active: &ActiveLayouts) {
        let known = lock(&self.known);
        // Whoever holds two of these locks holds that of all of them before.
        let mut record = active.record();
        for path in record.paths() {
            let Some(own) = record.directory_mut(&path) else { continue };
            let Some(first) = own.left_to.map(|first| known.get(&first)) else { continue };
            if let Some(first) = first {
                let mut first = first.record();
                if first.directory(&path).is_some_and(DirectoryLayout::takes_guests) {
                    continue;
                }
                first.count_no_more(Some(&path));
            }
            own.take_over();
            Others::of(&known, &record, &path).settle(&mut record, &path);
        }
    }

    /// Orders once more what failed for a job; whether there is something. What another job has set meanwhile is its own.
    pub fn order_again(&self, active: &ActiveLayouts) -> bool {
        let known = lock(&self.known);
        let mut record = active.record();
        let mut is_changed = false;
        for path in record.failed() {
            let others = Others::of(&known, &record, &path);
            if others.rival.is_some() {
                continue;
            }
            if let Some(own) = record.directory_mut(&path) {
                own.order_again();
            }
            others.settle(&mut record, &path);
            is_changed = true;
        }
        is_changed
    }

    /// Whether those of a job may be taken back: nobody has left anything to it who is not over. From then on nobody does.
    pub fn close(&self, active: &ActiveLayouts) -> bool {
        let known = lock(&self.known);
        let id = active.record().id;
        let is_needed = known.values().any(|other| other.record().has_left_to(id));
        if !is_needed {
            active.closed.store(true, Ordering::Release);
        }
        !is_needed
    }

    /// Forgets those of a job: nothing is to be done any more.
    pub fn remove(&self, id: Incarnation) {
        let mut known = lock(&self.known);
        let Some(removed) = known.remove(&id) else { return };
        let removed = removed.record();
        for first in removed.directories.iter().filter_map(|directory| known.get(&directory.left_to?)) {
            let mut first = first.record();
            // What they have left is counted together.
            first.ended = first.ended.map(|ended| removed.ended.map_or(ended, |last| last.max(ended)));
            self.freed.notify_one();
        }
    }

    /// Nothing of a job runs any more on a node, as its Epilog says; that matters where its script ran. Returns those of
    /// which that is news.
    pub fn left(&self, job: JobId, restarts: u32, node: &NodeName) -> Vec<Arc<ActiveLayouts>> {
        let known = lock(&self.known);
        let of_number = known.range(Incarnation::of_number(job)).map(|(_, active)| active);
        let left = of_number.filter(|active| {
            let record = active.record();
            record.id.restarts <= restarts && record.nodes.first() == Some(node)
        });
        left.filter(|active| !active.over.swap(true, Ordering::AcqRel)).cloned().collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use ondeck_api::wire::{FormerLayout, FormerValue, StripingOutcome, StripingReport, StripingResult};
    use ondeck_core::QueuedJob;
    use ondeck_core::schedule::Time;
    use ondeck_layout::Rules;
    use ondeck_layout::job::{JobSize, Known as KnownFiles, choose};
    use ondeck_layout::programs::JobProgram;
    use proptest::prelude::*;

    use super::*;
    use crate::samples::queued;
    use crate::striping::{DirectoryState, StripingAsked};

    const ARRAY: JobId = JobId(100);

    /// A life of a job of two processes; elements of the array have numbers below it.
    fn planned(id: &str, lines: &str) -> JobLayouts {
        let request = ondeck_directive::parse(lines.as_bytes()).unwrap().request;
        let id: Incarnation = id.parse().unwrap();
        let asked = StripingAsked {
            io: None,
            request: request.striping,
            outputs: request.data_out,
            work_dir: "/".into(),
            tasks: Some(2),
            array: (id.job < ARRAY).then_some(ARRAY),
            program: JobProgram::default(),
        };
        let job = QueuedJob { nodes: vec!["c1".parse().unwrap()], ..queued(id) };
        JobLayouts::plan(&job, &asked, Time(1), |choice, path| {
            let size = JobSize { nodes: 1, tasks: Some(2) };
            choose(choice, size, path, KnownFiles::default(), None, &Rules::tuned())
        })
    }

    fn answered(path: &Path, outcome: StripingOutcome) -> StripingReport {
        let former = Some(FormerLayout { layout: FormerValue::Inherited, mark: None, inode: None });
        let former = former.filter(|_| matches!(outcome, StripingOutcome::Set { .. }));
        StripingReport { directories: vec![StripingResult { path: path.to_owned(), outcome, former }] }
    }

    fn set() -> StripingOutcome {
        StripingOutcome::Set { native: "two".into() }
    }

    const A: &str = "#RSA_LAYOUT_DIR=/a:-c 2\n";

    #[test]
    fn elements_of_an_array_leave_their_directory_to_the_first_and_it_is_over_after_the_last() {
        let layouts = Layouts::default();
        let a = Path::new("/a");
        let (first, turn) = layouts.add(planned("1@7", A));
        assert!(turn.is_some() && first.work.try_lock().is_err(), "whoever comes next waits for it");
        drop(turn);
        first.record().take(&answered(a, set()));
        let (second, _) = layouts.add(planned("2@7", A));
        // What was requeued has the directory still, also if nobody knows any more when it was submitted first.
        let (again, _) = layouts.add(planned("1@7.1", A));
        let (later, _) = layouts.add(planned("2@9.1", A));
        assert!(later.record().to_stripe().is_empty() && later.record().told().is_none());
        for guest in [&second, &again] {
            assert!(guest.record().to_stripe().is_empty() && guest.record().told().is_none());
            assert!(guest.record().to_count().is_empty() && !guest.record().is_to_restore());
        }
        let text = |active: &ActiveLayouts| active.record().view()[0].text.clone();
        assert!(
            text(&second).contains("job 1, another element of its array, sees to it"),
            "{}",
            text(&second)
        );
        assert!(text(&again).contains("an earlier run of it sees to it"), "{}", text(&again));
        assert_eq!(second.record().view()[0].options.as_deref(), Some("-c 2 -S 1M"));
        // Another job is none of them, and neither is an array that had the number before.
        for (id, lines) in [("200@7", A), ("3@6", "#RSA_LAYOUT_DIR=/a:-c 4\n")] {
            let (other, _) = layouts.add(planned(id, lines));
            assert!(other.record().told().unwrap().contains("job 1 has set its layout"));
            let id = other.record().id;
            layouts.remove(id);
        }
        assert!(first.record().to_count().is_empty(), "others have written there, too");
        first.record().ended = Some(Time(10));
        assert!(!layouts.close(&first));
        assert!(text(&first).ends_with("until other elements of its array have ended"), "{}", text(&first));
        for (guest, ended) in [(&again, 15), (&later, 18), (&second, 20)] {
            guest.record().ended = Some(Time(ended));
            assert!(!layouts.close(&first) && layouts.close(guest));
            let id = guest.record().id;
            layouts.remove(id);
        }
        assert!(layouts.close(&first));
        let record = first.record().clone();
        assert_eq!((record.ended, record.size_in(a)), (Some(Time(20)), (4, 8)));
        // Nobody leaves anything to what is being taken back.
        let (late, _) = layouts.add(planned("4@7", A));
        assert!(late.record().told().unwrap().contains("job 1 has set its layout"));
    }

    #[test]
    fn who_names_another_users_directory_keeps_nobody_from_it_and_is_not_told_who_has_it() {
        let layouts = Layouts::default();
        let stranger = |id: &str| {
            let mut record = planned(id, A);
            record.owner.uid += 1;
            record
        };
        let a = Path::new("/a");
        let (guess, _) = layouts.add(stranger("201@7"));
        let (own, _) = layouts.add(planned("202@7", A));
        assert_eq!(own.record().to_stripe().len(), 1);
        guess.record().take(&answered(a, StripingOutcome::Failed { why: "/a: Permission denied".into() }));
        own.record().take(&answered(a, set()));
        let (other_guess, _) = layouts.add(stranger("203@7"));
        assert_eq!(other_guess.record().told(), None);
        assert_eq!(own.record().to_count(), [PathBuf::from("/a")]);
        // The agent, as its user, is told whom the note in the directory may name.
        assert!(layouts.rivals(other_guess.record().id).contains(&own.record().id));
    }

    #[test]
    fn a_note_in_another_directory_says_nothing_of_a_job_s_own() {
        let layouts = Layouts::default();
        let a = Path::new("/a");
        let (own, _) = layouts.add(planned("1@7", A));
        let mut report = answered(a, set());
        let former = report.directories[0].former.as_mut().unwrap();
        former.inode = Some(5);
        own.record().take(&report);
        let id = own.record().id;
        let owner = own.record().owner;
        // Whoever may write in another directory has put it there.
        layouts.found_set(owner, (id, a, Some(6)));
        layouts.found_set(owner, (id, a, None));
        layouts.found_set(Owner { uid: owner.uid + 1, ..owner }, (id, a, Some(5)));
        assert_eq!(own.record().to_count(), [PathBuf::from("/a")]);
        layouts.found_set(owner, (id, a, Some(5)));
        assert!(own.record().to_count().is_empty());
    }

    #[test]
    fn a_directory_of_which_its_agent_has_said_nothing_may_be_set() {
        let layouts = Layouts::default();
        let (first, _) = layouts.add(planned("201@7", A));
        first.record().take_silence("c1 does not answer");
        let (second, _) = layouts.add(planned("202@7", A));
        let told = second.record().told().unwrap();
        assert!(told.contains("job 201 may have set its layout"), "{told}");
    }

    #[test]
    fn an_element_sees_to_what_the_first_could_not_set() {
        let layouts = Layouts::default();
        let a = Path::new("/a");
        let (first, _) = layouts.add(planned("1@7", A));
        let (second, _) = layouts.add(planned("2@7", A));
        let (third, _) = layouts.add(planned("3@7", A));
        let mut waited = BTreeSet::new();
        assert!(Arc::ptr_eq(&layouts.first_of(&second, &waited).unwrap(), &first));
        waited.insert(first.record().id);
        assert!(layouts.first_of(&second, &waited).is_none());
        first.record().take(&answered(a, StripingOutcome::Failed { why: "/a: no".into() }));
        layouts.take_over(&second);
        layouts.take_over(&third);
        assert_eq!(second.record().to_stripe()[0].path, a);
        assert!(third.record().to_stripe().is_empty());
        assert!(Arc::ptr_eq(&layouts.first_of(&third, &waited).unwrap(), &second));
        second.record().take(&answered(a, set()));
        // What it could not set at its start, its results have from another one.
        assert!(layouts.order_again(&first));
        assert!(first.record().to_stripe().is_empty() && first.record().told().is_none());
        first.record().ended = Some(Time(9));
        second.record().ended = Some(Time(9));
        assert!(!layouts.close(&second), "results of the first come home in its layout");
        // What an agent has said of it need not be asked again.
        let b = "#RSA_LAYOUT_DIR=/b:-c 2\n";
        let (first, _) = layouts.add(planned("5@7", b));
        first.record().take(&answered(Path::new("/b"), StripingOutcome::Has { native: "two".into() }));
        let (second, _) = layouts.add(planned("6@7", b));
        assert!(second.record().to_stripe().is_empty() && second.record().to_count().is_empty());
        assert_eq!(first.record().size_in(Path::new("/b")), (2, 4));
        assert_eq!(first.record().to_count(), [PathBuf::from("/b")]);
    }

    /// What happens to one of the jobs of the model.
    #[derive(Clone, Copy, Debug)]
    enum Happening {
        Starts {
            job: u32,
            answers: [u8; 2],
        },
        Ends {
            job: u32,
        },
        /// The daemon is killed, and goes on with what is in its journal.
        Restart,
    }

    fn happenings() -> impl Strategy<Value = Vec<Happening>> {
        let happening = prop_oneof![
            4 => (0_u32..8, any::<[u8; 2]>()).prop_map(|(job, answers)| Happening::Starts { job, answers }),
            3 => (0_u32..8).prop_map(|job| Happening::Ends { job }),
            1 => Just(Happening::Restart),
        ];
        proptest::collection::vec(happening, 1..60)
    }

    /// Directories and jobs as they are, by nothing but what agents were told.
    #[derive(Default)]
    struct World {
        layouts: Layouts,
        /// Who has set each directory's layout.
        set: BTreeMap<PathBuf, Incarnation>,
        running: BTreeSet<Incarnation>,
        lives: BTreeMap<u32, u32>,
    }

    impl World {
        /// Six elements of an array, and two other jobs. A job that starts again is a new life of it.
        fn start(&mut self, job: u32, answers: [u8; 2]) {
            let number = if job < 6 { job + 1 } else { 200 + job };
            if self.running.iter().any(|id| id.job == JobId(number)) {
                return;
            }
            let life = self.lives.entry(job).or_default();
            let id = if *life == 0 { format!("{number}@7") } else { format!("{number}@7.{life}") };
            *life += 1;
            let lines = match job {
                0..6 => "#RSA_LAYOUT_DIR=/a:-c 2\n#RSA_LAYOUT_DIR=/b:-c 2\n",
                6 => "#RSA_LAYOUT_DIR=/a:-c 3\n",
                _ => "#RSA_LAYOUT_DIR=/b:none\n",
            };
            let (active, _) = self.layouts.add(planned(&id, lines));
            let by = active.record().id;
            self.running.insert(by);
            self.layouts.take_over(&active);
            let orders = active.record().to_stripe();
            for (order, answer) in orders.iter().zip(answers) {
                let outcome = match answer % 4 {
                    0 => StripingOutcome::Failed { why: "no".into() },
                    1 if !self.set.contains_key(&order.path) => StripingOutcome::Has { native: "two".into() },
                    _ => {
                        let before = self.set.insert(order.path.clone(), by);
                        assert_eq!(before, None, "{} is set twice", order.path.display());
                        set()
                    }
                };
                active.record().take(&answered(&order.path, outcome));
            }
        }

        /// Does what is to be done for all that have ended.
        fn sweep(&mut self) {
            loop {
                let before = self.layouts.all().len();
                for active in self.layouts.all() {
                    let has_ended = active.record().ended.is_some();
                    if !has_ended || !self.layouts.close(&active) {
                        continue;
                    }
                    let id = active.record().id;
                    let set = active.record().to_restore();
                    for path in set.iter().map(|directory| &directory.path) {
                        assert_eq!(self.set.remove(path), Some(id));
                        let outcome = StripingOutcome::Restored { native: "one".into() };
                        active.record().take_restored(&answered(path, outcome), true);
                    }
                    assert!(!active.record().is_to_restore());
                    active.record().end();
                    self.layouts.remove(id);
                }
                if self.layouts.all().len() == before {
                    return;
                }
            }
        }

        fn check(&self) {
            let all = self.layouts.all();
            for active in &all {
                let record = active.record().clone();
                for directory in &record.directories {
                    let Some(first) = directory.left_to else { continue };
                    assert!(directory.told().is_none() && !directory.counts && !directory.may_be_set());
                    // It has what it was promised.
                    let known = self.layouts.of(first).expect("whoever sees to it is there");
                    let known = known.record().clone();
                    let of_first = known.directory(&directory.path).unwrap();
                    assert!(of_first.left_to.is_none(), "{of_first:?}");
                    use DirectoryState::{Alone, Set};
                    assert!(matches!(of_first.state, Set { .. } | Alone { .. }), "{of_first:?}");
                    if matches!(of_first.state, Set { .. }) {
                        assert_eq!(self.set.get(&directory.path), Some(&first));
                    }
                }
            }
            for path in ["/a", "/b"].map(Path::new) {
                let users = all.iter().filter(|active| active.record().uses(path)).count();
                assert!(users <= 1, "{users} use {}", path.display());
                assert_eq!(users, usize::from(self.set.contains_key(path)));
                // One at most counts what is written there now.
                let count = |active: &&Arc<ActiveLayouts>| {
                    let record = active.record();
                    record.ended.is_none() && record.to_count().iter().any(|counted| counted == path)
                };
                assert!(all.iter().filter(count).count() <= 1);
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_a_shared_directory_is_set_once_and_taken_back_after_the_last(
            happenings in happenings()
        ) {
            let mut world = World::default();
            for happening in happenings {
                match happening {
                    Happening::Starts { job, answers } => world.start(job, answers),
                    Happening::Ends { job } => {
                        let number = if job < 6 { job + 1 } else { 200 + job };
                        let Some(id) = world.running.iter().find(|id| id.job == JobId(number)).copied() else { continue };
                        world.running.remove(&id);
                        let active = world.layouts.of(id).unwrap();
                        active.record().ended = Some(Time(5));
                        world.sweep();
                    }
                    Happening::Restart => {
                        let kept = world.layouts.all().iter().map(|active| {
                            let text = serde_json::to_string(&*active.record()).unwrap();
                            serde_json::from_str(&text).unwrap()
                        }).collect();
                        world.layouts = Layouts::default();
                        world.layouts.resume(kept);
                    }
                }
                world.check();
            }
            for id in std::mem::take(&mut world.running) {
                world.layouts.of(id).unwrap().record().ended = Some(Time(6));
            }
            world.sweep();
            prop_assert!(world.layouts.all().is_empty() && world.set.is_empty());
        }
    }
}
