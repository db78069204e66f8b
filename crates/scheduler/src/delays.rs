//! Jobs that use the disk much and are delayed while their filesystem is busy: what is kept of each, and what is to be done next.
//! Nothing here asks anybody: `heavy_jobs` does.
//!
//! A job is kept from starting for a minute at a time ([`STEP`]), again and again, until its filesystem is less busy or its time is
//! over: so it starts by itself if there is no scheduler. It is delayed once in all of its lives.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ondeck_api::scheduler::DelayView;
use ondeck_core::schedule::Time;
use ondeck_core::{Incarnation, Owner, QueuedJob, Request, Standing, duration};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::loads::Pressure;

/// A job is kept from starting for so long at a time.
pub(crate) const STEP: Duration = Duration::from_secs(60);

/// It is kept so once more when less than this is left.
const RENEW: Duration = Duration::from_secs(30);

/// A begin time that lies further ahead than a step by this is not ours.
const SLACK: Duration = Duration::from_secs(5);

/// A job that is expected to start within this could start sooner than the queue is looked at again.
const SOON: Duration = Duration::from_secs(600);

/// When the load has fallen, this part of the jobs that wait is let go after each reading, and at least one.
const LET_GO_PART: usize = 10;

/// What could not be ordered is not tried again for so long.
const PAUSE: Duration = Duration::from_secs(5);

/// Whether a job could start at any moment: it is next, Slurm has not judged it yet, or expects it to start within some minutes.
pub(crate) fn may_start_soon(job: &QueuedJob, now: Time) -> bool {
    match job.standing {
        Standing::Next | Standing::Unjudged => !job.dependent,
        Standing::Waiting => {
            let expected = |start: u64| Time(start.saturating_mul(1000)) <= now.plus(SOON);
            !job.dependent && job.start.is_some_and(expected)
        }
        _ => false,
    }
}

/// Whether somebody else has said that a job begins later than we would say.
pub(crate) fn begins_later(begin: Option<u64>, now: Time) -> bool {
    begin.is_some_and(|begin| Time(begin.saturating_mul(1000)) > now.plus(STEP + SLACK))
}

/// A job that was delayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobDelay {
    /// Which life of which job.
    pub id: Incarnation,
    /// Whose it is.
    pub owner: Owner,
    /// The account it is charged to.
    pub account: String,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
    /// When it was submitted, in seconds since 1970.
    pub submitted: u64,
    /// How many compute nodes it wants.
    pub compute_nodes: u32,
    /// What its lines ask for.
    pub request: Request,
    /// Where the filesystem is mounted for which it waits.
    pub filesystem: PathBuf,
    /// Why it waits, in words.
    pub reason: String,
    /// Since when it waits.
    pub since: Time,
    /// It does not wait longer.
    pub until: Time,
    /// Before which time it was not to start anyway, in seconds since 1970, if anybody has said so.
    pub begin: Option<u64>,
    /// When and why it waits no longer.
    #[serde(default)]
    pub ended: Option<DelayEnd>,
}

/// When and why a job waits no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DelayEnd {
    pub at: Time,
    pub why: EndReason,
}

/// Why a job waits no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EndReason {
    /// Its filesystem is less busy, and it was its turn.
    Calm,
    /// No jobs wait for its filesystem any more.
    Unwatched,
    /// It has waited for as long as a job may.
    Bound,
    /// It has started.
    Started,
    /// Somebody has given it a later begin time.
    Later,
    /// It has left the queue.
    Gone,
}

/// What is to be done for a job that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing now.
    Wait,
    /// It is kept from starting for so long from now.
    Renew(Duration),
    /// It is let go: it may start after so long, which is nothing unless its user wants it later.
    LetGo(EndReason, Duration),
    /// It is over without that, since then.
    End(EndReason, Time),
}

/// A job as the queue shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenJob {
    pub standing: Standing,
    /// Before which time it does not start, in seconds since 1970.
    pub begin: Option<u64>,
    /// When it started or is expected to, in seconds since 1970.
    pub start: Option<u64>,
}

impl JobDelay {
    /// Whether a job is this one, in the same life or in a later one: a requeue raises the count of lives, and changes the time of
    /// submission. Who has the number again starts with the first life.
    pub fn is_of(&self, id: Incarnation, owner: Owner) -> bool {
        let is_later_life =
            self.id.job == id.job && self.owner.uid == owner.uid && id.restarts > self.id.restarts;
        self.id.is_same_job(id) || is_later_life
    }

    /// Before which time from now it was not to start anyway.
    fn own_begin(&self, now: Time) -> Duration {
        Time(self.begin.unwrap_or(0).saturating_mul(1000)).since(now)
    }

    /// For how long it is kept from starting next.
    pub fn next_step(&self, now: Time) -> Duration {
        STEP.min(self.until.since(now)).max(self.own_begin(now))
    }

    /// What is to be done next. `turn` is why this job is let go now, if it is.
    fn step(&self, seen: Option<SeenJob>, turn: Option<EndReason>, now: Time) -> Step {
        let Some(seen) = seen else { return Step::End(EndReason::Gone, now) };
        match seen.standing {
            // It goes on to count: somebody else keeps it from starting.
            Standing::Held => return Step::Wait,
            standing if standing.waits() => {}
            _ => {
                // It may have started while nobody looked.
                let started =
                    seen.start.map_or(now, |start| Time(start.saturating_mul(1000)).max(self.since));
                return Step::End(EndReason::Started, started.min(now));
            }
        }
        if begins_later(seen.begin, now.plus(self.own_begin(now).saturating_sub(STEP))) {
            return Step::End(EndReason::Later, now);
        }
        let (left, own) = (self.until.since(now), self.own_begin(now));
        if let Some(why) = turn {
            return Step::LetGo(why, own);
        }
        // Slurm counts whole seconds.
        if left < Duration::from_secs(1) {
            return Step::LetGo(EndReason::Bound, own);
        }
        let kept = Time(seen.begin.unwrap_or(0).saturating_mul(1000)).since(now);
        if kept < RENEW.min(left) { Step::Renew(self.next_step(now)) } else { Step::Wait }
    }

    /// What its user is told.
    pub fn told(&self) -> String {
        let filesystem = self.filesystem.display();
        let Some(DelayEnd { at, why }) = self.ended else {
            let most = duration::display(self.until.since(self.since));
            return format!(
                "it starts up to {most} later, and sooner if {filesystem} is less busy: {}",
                self.reason
            );
        };
        let waited = duration::display(at.since(self.since));
        match why {
            EndReason::Calm => format!("it has waited {waited}, until {filesystem} was less busy"),
            EndReason::Unwatched => {
                format!("it has waited {waited}, and no jobs wait for {filesystem} to be less busy any more")
            }
            EndReason::Bound => {
                format!("it has waited {waited} for {filesystem} to be less busy, and does not wait longer")
            }
            EndReason::Started => format!("it was delayed for {waited}, while {filesystem} was busy"),
            EndReason::Later => {
                format!(
                    "it was delayed for {waited} while {filesystem} was busy, and has a later begin time now"
                )
            }
            EndReason::Gone => format!("it left the queue while it waited for {filesystem}, after {waited}"),
        }
    }

    /// What is shown of it.
    pub fn view(&self) -> DelayView {
        DelayView {
            filesystem: self.filesystem.clone(),
            reason: self.reason.clone(),
            since_ms: clock::shown(self.since),
            until_ms: clock::shown(self.until),
            ended_ms: self.ended.map(|ended| clock::shown(ended.at)),
            text: self.told(),
        }
    }
}

/// A job that was delayed and has not left the queue.
#[derive(Clone, Debug)]
struct Known {
    delay: JobDelay,
    /// When something was ordered for it last: what the queue showed before says nothing of that.
    ordered: Time,
    /// Until when nothing is ordered for it.
    pause: Option<Instant>,
}

/// All jobs that were delayed and have not left the queue.
#[derive(Default)]
pub(crate) struct Delays(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// By the first life of each.
    known: BTreeMap<Incarnation, Known>,
    /// After which reading of each filesystem some were let go last.
    let_go: HashMap<PathBuf, u64>,
    /// Jobs that were found not to use the disk much, and when.
    light: BTreeMap<Incarnation, Instant>,
}

/// How long it counts that a job does not use the disk much: its user may forget the history.
const LIGHT: Duration = Duration::from_secs(60);

fn first_life(id: Incarnation) -> Incarnation {
    *id.lives().start()
}

impl Delays {
    /// Goes on with what an earlier daemon has kept.
    pub fn resume(&self, kept: Vec<JobDelay>) {
        let mut all = self.lock();
        for delay in kept {
            let known = Known { delay, ordered: Time(0), pause: None };
            all.known.entry(first_life(known.delay.id)).or_insert(known);
        }
    }

    /// Whether nobody was delayed who is still in the queue.
    pub fn is_empty(&self) -> bool {
        self.lock().known.is_empty()
    }

    /// Whether a job is delayed, or was, in any of its lives.
    pub fn knows(&self, id: Incarnation, owner: Owner) -> bool {
        let kept = self.lock();
        kept.known.range(Incarnation::of_number(id.job)).any(|(_, known)| known.delay.is_of(id, owner))
    }

    /// Whether a job was found a moment ago not to use the disk much.
    pub fn is_light(&self, id: Incarnation) -> bool {
        let mut kept = self.lock();
        kept.light.retain(|_, at| at.elapsed() < LIGHT);
        kept.light.contains_key(&first_life(id))
    }

    /// Notes that a job does not use the disk much.
    pub fn set_light(&self, id: Incarnation) {
        self.lock().light.insert(first_life(id), Instant::now());
    }

    /// Keeps what is known of a job, for which something was ordered at a time.
    pub fn put(&self, delay: JobDelay, ordered: Time) {
        self.lock().known.insert(first_life(delay.id), Known { delay, ordered, pause: None });
    }

    /// Something could not be ordered for a job: it is tried again a moment later.
    pub fn failed(&self, id: Incarnation) {
        if let Some(known) = self.lock().known.get_mut(&first_life(id)) {
            known.pause = Some(Instant::now() + PAUSE);
        }
    }

    /// Forgets a job that has left the queue.
    pub fn forget(&self, id: Incarnation) {
        self.lock().known.remove(&first_life(id));
    }

    /// The jobs that wait.
    pub fn waiting(&self) -> Vec<JobDelay> {
        let kept = self.lock();
        let waiting = kept.known.values().filter(|known| known.delay.ended.is_none());
        waiting.map(|known| known.delay.clone()).collect()
    }

    /// The jobs that wait no longer.
    pub fn over(&self) -> Vec<JobDelay> {
        let kept = self.lock();
        kept.known
            .values()
            .filter(|known| known.delay.ended.is_some())
            .map(|known| known.delay.clone())
            .collect()
    }

    /// What is to be done for each job that waits, by a look at the queue that was taken at a time.
    pub fn steps(
        &self,
        taken: Time,
        now: Time,
        seen: impl Fn(&JobDelay) -> Option<SeenJob>,
        pressure: impl Fn(&Path) -> Pressure,
    ) -> Vec<(JobDelay, Step)> {
        let mut kept = self.lock();
        let waiting = kept.known.values().filter(|known| {
            let is_due = known.pause.is_none_or(|pause| pause <= Instant::now());
            known.delay.ended.is_none() && known.ordered < taken && is_due
        });
        let waiting: Vec<(JobDelay, Option<SeenJob>)> =
            waiting.map(|known| (known.delay.clone(), seen(&known.delay))).collect();
        let turns = kept.turns(&waiting, pressure);
        let step = |(delay, seen): (JobDelay, Option<SeenJob>)| {
            let step = delay.step(seen, turns.get(&delay.id).copied(), now);
            (delay, step)
        };
        waiting.into_iter().map(step).filter(|(_, step)| *step != Step::Wait).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// The jobs that are let go because their filesystem is less busy: after each reading of its load a part of them, those that wait
    /// longest. All at once would make it as busy again. Where no jobs wait any more, it is the turn of all.
    fn turns(
        &mut self,
        waiting: &[(JobDelay, Option<SeenJob>)],
        pressure: impl Fn(&Path) -> Pressure,
    ) -> BTreeMap<Incarnation, EndReason> {
        let mut of: BTreeMap<&Path, Vec<&JobDelay>> = BTreeMap::new();
        for (delay, _) in waiting.iter().filter(|(_, seen)| seen.is_some_and(|seen| seen.standing.waits())) {
            of.entry(&delay.filesystem).or_default().push(delay);
        }
        let mut turns = BTreeMap::new();
        for (filesystem, mut delays) in of {
            let (number, turn) = match pressure(filesystem) {
                Pressure::Busy { .. } | Pressure::Unknown => continue,
                Pressure::Unwatched => (delays.len(), EndReason::Unwatched),
                Pressure::Calm { reading } => {
                    if self.let_go.insert(filesystem.to_owned(), reading) == Some(reading) {
                        continue;
                    }
                    (delays.len().div_ceil(LET_GO_PART), EndReason::Calm)
                }
            };
            delays.sort_by_key(|delay| (delay.since, delay.id));
            turns.extend(delays.iter().take(number).map(|delay| (delay.id, turn)));
        }
        turns
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_layout::Load;
    use proptest::prelude::*;

    use super::*;
    use crate::samples::queued;

    fn delay(number: u32, since_s: u64) -> JobDelay {
        JobDelay {
            id: format!("{number}@7").parse().unwrap(),
            owner: Owner { uid: 1000, gid: 1000 },
            account: String::new(),
            work_dir: "/".into(),
            submitted: 7,
            compute_nodes: 1,
            request: Request::default(),
            filesystem: "/scratch".into(),
            reason: "so".into(),
            since: Time(since_s * 1000),
            until: Time((since_s + 600) * 1000),
            begin: None,
            ended: None,
        }
    }

    fn seen(standing: Standing, begin: u64) -> Option<SeenJob> {
        Some(SeenJob { standing, begin: (begin > 0).then_some(begin), start: None })
    }

    fn at(seconds: u64) -> Time {
        Time(seconds * 1000)
    }

    #[test]
    fn a_job_waits_in_steps_until_its_time_is_over_or_it_is_its_turn() {
        let delay = delay(1, 1000);
        let step = |begin, its_turn: bool, now| {
            delay.step(seen(Standing::Waiting, begin), its_turn.then_some(EndReason::Calm), at(now))
        };
        assert_eq!(step(1060, false, 1010), Step::Wait);
        assert_eq!(step(1060, false, 1031), Step::Renew(STEP));
        assert_eq!(step(0, false, 1031), Step::Renew(STEP));
        // No longer than its time.
        assert_eq!(step(1570, false, 1560), Step::Renew(Duration::from_secs(40)));
        assert_eq!(step(1600, false, 1590), Step::Wait);
        assert_eq!(step(1600, false, 1600), Step::LetGo(EndReason::Bound, Duration::ZERO));
        assert_eq!(step(1060, true, 1010), Step::LetGo(EndReason::Calm, Duration::ZERO));
    }

    #[test]
    fn what_a_user_has_said_of_the_begin_stays_and_so_does_a_hold() {
        let mut delay = delay(1, 1000);
        let turn = Some(EndReason::Calm);
        let later = |begin| delay.step(seen(Standing::Waiting, begin), turn, at(1010));
        assert_eq!(later(1300), Step::End(EndReason::Later, at(1010)));
        assert_eq!(later(1070), Step::LetGo(EndReason::Calm, Duration::ZERO));
        assert_eq!(delay.step(seen(Standing::Held, 0), turn, at(5000)), Step::Wait);
        for standing in [Standing::Configuring, Standing::Running, Standing::Ended] {
            let step = delay.step(seen(standing, 0), None, at(1010));
            assert_eq!(step, Step::End(EndReason::Started, at(1010)));
        }
        assert_eq!(delay.step(None, None, at(1010)), Step::End(EndReason::Gone, at(1010)));
        // It started while nobody looked.
        let started = |start| SeenJob { standing: Standing::Running, begin: None, start: Some(start) };
        for (start, told) in [(1005, 1005), (900, 1000), (2000, 1010)] {
            let step = delay.step(Some(started(start)), None, at(1010));
            assert_eq!(step, Step::End(EndReason::Started, at(told)));
        }
        // What it was to wait for anyway.
        delay.begin = Some(1050);
        let step = delay.step(seen(Standing::Waiting, 1060), turn, at(1010));
        assert_eq!(step, Step::LetGo(EndReason::Calm, Duration::from_secs(40)));
    }

    #[test]
    fn a_begin_time_that_a_user_wants_is_not_brought_forward() {
        let mut delay = delay(1, 1000);
        delay.begin = Some(1064);
        assert_eq!(delay.next_step(at(1000)), Duration::from_secs(64));
        // It is not taken for somebody else's.
        assert_eq!(delay.step(seen(Standing::Waiting, 1064), None, at(1001)), Step::Wait);
        assert_eq!(delay.step(seen(Standing::Waiting, 1064), None, at(1040)), Step::Renew(STEP));
        assert_eq!(delay.next_step(at(1580)), Duration::from_secs(20));
        // It may lie beyond the bound.
        delay.until = at(1010);
        assert_eq!(delay.next_step(at(1000)), Duration::from_secs(64));
    }

    #[test]
    fn a_requeued_job_is_the_same_and_who_has_its_number_again_is_another_one() {
        let delays = Delays::default();
        delays.resume(vec![delay(1, 1000)]);
        let (owner, other) = (Owner { uid: 1000, gid: 5 }, Owner { uid: 1001, gid: 1000 });
        let knows = |id: &str, owner| delays.knows(id.parse().unwrap(), owner);
        assert!(knows("1@7", owner) && knows("1@7.1", owner));
        // The time of submission is that of the requeue.
        assert!(knows("1@900.1", owner) && knows("1@999.2", owner));
        assert!(!knows("1@900", owner) && !knows("1@900.1", other) && !knows("2@7", owner));
    }

    #[test]
    fn only_a_job_that_could_start_within_minutes_is_delayed() {
        let mut job = queued("1@7".parse().unwrap());
        assert!(may_start_soon(&job, at(1000)));
        job.standing = Standing::Waiting;
        assert!(!may_start_soon(&job, at(1000)));
        job.start = Some(1500);
        assert!(may_start_soon(&job, at(1000)));
        job.start = Some(1000 + 86_400);
        assert!(!may_start_soon(&job, at(1000)));
        (job.standing, job.dependent) = (Standing::Unjudged, true);
        assert!(!may_start_soon(&job, at(1000)));
        assert!(begins_later(Some(1100), at(1000)) && !begins_later(Some(1060), at(1000)));
        assert!(!begins_later(None, at(1000)));
    }

    #[test]
    fn those_who_wait_longest_are_let_go_first_and_a_part_of_them_after_each_reading() {
        let delays = Delays::default();
        // The later in the queue, the longer it has waited.
        delays.resume((0..25).map(|number| delay(number, 2000 - u64::from(number))).collect());
        let go_by = |pressure, why| {
            let steps = delays.steps(at(2010), at(2010), |_| seen(Standing::Waiting, 2060), |_| pressure);
            let mut gone: Vec<u32> = Vec::new();
            for (mut delay, step) in steps {
                assert_eq!(step, Step::LetGo(why, Duration::ZERO));
                gone.push(delay.id.job.0);
                delay.ended = Some(DelayEnd { at: at(2010), why });
                delays.put(delay, at(2010));
            }
            gone.sort_unstable();
            gone
        };
        let go = |reading| go_by(Pressure::Calm { reading }, EndReason::Calm);
        assert_eq!(go(3), [22, 23, 24]);
        assert_eq!(go(3), Vec::<u32>::new());
        assert_eq!(go(4), [19, 20, 21]);
        let owner = Owner { uid: 1000, gid: 1000 };
        assert!(delays.knows("24@7.3".parse().unwrap(), owner), "it is not delayed in its next life");
        assert_eq!(delays.over().len(), 6);
        // The site delays no jobs any more.
        assert_eq!(go_by(Pressure::Unwatched, EndReason::Unwatched).len(), 19);
    }

    #[test]
    fn a_load_that_is_not_known_lets_nobody_go_before_the_time() {
        let delays = Delays::default();
        delays.resume(vec![delay(1, 1000)]);
        let steps = |begin, now| {
            let steps =
                delays.steps(at(now), at(now), |_| seen(Standing::Waiting, begin), |_| Pressure::Unknown);
            steps.into_iter().map(|(_, step)| step).collect::<Vec<_>>()
        };
        assert_eq!(steps(1100, 1050), []);
        assert_eq!(steps(0, 1050), [Step::Renew(STEP)]);
        assert_eq!(steps(0, 1600), [Step::LetGo(EndReason::Bound, Duration::ZERO)]);
        // A look from before the last order says nothing.
        delays.put(delay(1, 1000), at(1700));
        assert_eq!(steps(0, 1650), []);
        delays.failed("1@7".parse().unwrap());
        assert_eq!(steps(0, 1800), []);
    }

    proptest! {
        /// However the load goes, and whenever the scheduler is away.
        #[test]
        fn no_job_is_kept_from_starting_beyond_its_bound(
            events in proptest::collection::vec((1..90_u64, any::<bool>(), any::<bool>()), 1..100)
        ) {
            let delays = Delays::default();
            delays.resume(vec![delay(1, 1000)]);
            let (mut now, mut begin, mut reading) = (1000, 1060, 0);
            for (pause, is_busy, restarts) in events {
                now += pause;
                if restarts {
                    let kept: Vec<JobDelay> = delays.lock().known.values().map(|known| known.delay.clone()).collect();
                    *delays.lock() = Kept::default();
                    delays.resume(kept);
                }
                reading += 1;
                let pressure = if is_busy { Pressure::Busy { load: Load::new(0.9) } } else { Pressure::Calm { reading } };
                let steps = delays.steps(at(now), at(now), |_| seen(Standing::Waiting, begin), |_| pressure);
                for (mut delay, step) in steps {
                    match step {
                        Step::Renew(time) => begin = now + time.as_secs(),
                        Step::LetGo(why, time) => {
                            begin = now + time.as_secs();
                            prop_assert_eq!(why == EndReason::Calm, !is_busy);
                            delay.ended = Some(DelayEnd { at: at(now), why });
                            delays.put(delay, Time(0));
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                prop_assert!(begin <= 1600.max(now), "{} at {}", begin, now);
            }
        }
    }

    #[test]
    fn each_end_has_its_sentence() {
        let mut delay = delay(1, 1000);
        delay.reason = "its load is 87 %, and its line #RSA_IO says that it is I/O-heavy".into();
        assert_eq!(
            delay.told(),
            "it starts up to 10 min 0 s later, and sooner if /scratch is less busy: its load is 87 %, and its line #RSA_IO \
             says that it is I/O-heavy"
        );
        for (why, part) in [
            (EndReason::Calm, "until /scratch was less busy"),
            (EndReason::Unwatched, "no jobs wait for /scratch to be less busy any more"),
            (EndReason::Bound, "does not wait longer"),
            (EndReason::Started, "was delayed for 2 min 0 s"),
            (EndReason::Later, "a later begin time"),
            (EndReason::Gone, "left the queue"),
        ] {
            delay.ended = Some(DelayEnd { at: at(1120), why });
            assert!(delay.told().contains(part), "{}", delay.told());
            assert!(delay.view().ended_ms.is_some());
        }
    }
}
