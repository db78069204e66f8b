//! Layouts of jobs' directories on disk: set when a job starts, and taken back when it has ended. What it has left there is counted,
//! and, where the site wants that, it is watched who writes it.
//!
//! It is done by tasks, as the user, in three steps: the directories are looked at, what they have is noted in the agent's
//! directory, and only then something is set. So whatever ends in between, what was there before is known.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_api::wire::{
    CountOrder, DirectoryToRestore, DirectoryToStripe, FormerLayout, KindsSeen, KindsToTell, Refusal,
    RefusalCode, RestoreOrder, StripingOrder, StripingOutcome, StripingReport, StripingResult, StripingWork,
    TaskReport, TaskRequest, TaskState, TaskWork, WatchOrder,
};
use ondeck_core::{Bytes, Epoch, Incarnation, RamDiskId};

use super::{Node, failed, refusal};
use crate::hang;
use crate::striping::{self, StripingRecord};
use crate::task::{Task, TaskOrder};

/// The longest that an order may take: a job's start waits for it.
const LONGEST: Duration = Duration::from_secs(30);

/// The longest that a job is watched.
const LONGEST_WATCH: Duration = Duration::from_secs(60 * 24 * 3600);

/// How long a task may take to end after its deadline; what does not end then hangs in the kernel, and nobody waits for it.
const ENDING: Duration = Duration::from_millis(300);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The tasks that have not ended: each is some processes, and in a filesystem that hangs, which may be a user's own, they stay.
#[derive(Default)]
pub(super) struct Unended(Mutex<Vec<UnendedTask>>);

struct UnendedTask {
    uid: u32,
    /// When it should have ended.
    until: Instant,
    task: Arc<Task>,
}

/// So many may hang of a user, and of all together, before no more are begun.
const MOST_HANGING: usize = 4;
const MOST_HANGING_OF_ALL: usize = 64;

/// So many may be under way of a user, those that hang among them.
const MOST_OF_USER: usize = 32;

impl Unended {
    /// Begins a task of a user that should end by then, unless too many have not ended.
    fn begin(
        &self,
        uid: u32,
        until: Instant,
        begin: impl FnOnce() -> Result<Arc<Task>, String>,
    ) -> Result<Arc<Task>, String> {
        let mut unended = lock(&self.0);
        unended.retain(|known| !known.task.has_ended());
        let now = Instant::now();
        let hanging = unended.iter().filter(|known| known.until <= now).count();
        let of_user: Vec<&UnendedTask> = unended.iter().filter(|known| known.uid == uid).collect();
        let hanging_of_user = of_user.iter().filter(|known| known.until <= now).count();
        if hanging_of_user >= MOST_HANGING {
            let hang = format!("{hanging_of_user} tasks of user {uid} hang in a filesystem there");
            return Err(format!("{hang} that does not answer"));
        }
        if of_user.len() >= MOST_OF_USER {
            return Err(format!("{MOST_OF_USER} tasks of user {uid} are under way there already"));
        }
        if hanging >= MOST_HANGING_OF_ALL {
            return Err(format!("{hanging} tasks hang in filesystems there that do not answer"));
        }
        let task = begin()?;
        unended.push(UnendedTask { uid, until, task: Arc::clone(&task) });
        Ok(task)
    }
}

/// Whose layouts, and until when.
struct Errand<'a> {
    node: &'a Node,
    job: Incarnation,
    uid: u32,
    gid: u32,
    until: Instant,
}

impl Node {
    /// Gives directories of a job their layouts. What an earlier order of this kind has done is not done again.
    ///
    /// # Errors
    /// [`Refusal`]: the order is malformed, or what the directories have can't be noted: then nothing is set.
    pub fn stripe(&self, job: Incarnation, order: &StripingOrder) -> Result<StripingReport, Refusal> {
        order.check()?;
        let errand = self.errand(job, (order.uid, order.gid), order.deadline_ms);
        let of_job = self.layouts_of(job);
        let _one_of_them = lock(&of_job);
        let mut record = self.load_striping(job)?.unwrap_or_else(StripingRecord::new);
        let mut to_set: Vec<(DirectoryToStripe, FormerLayout)> = Vec::new();
        let mut new = Vec::new();
        for wanted in &order.directories {
            let Some(noted) = record.directories.iter_mut().find(|noted| noted.path == wanted.path) else {
                new.push(wanted.clone());
                continue;
            };
            // The site's figures may have changed since; what was there before has not.
            noted.options.clone_from(&wanted.options);
            (noted.targets, noted.tool) = (wanted.targets, wanted.tool);
            to_set.push((wanted.clone(), noted.former.clone()));
        }
        let mut report = StripingReport::default();
        if !new.is_empty() {
            let looked = StripingWork::Look { directories: new.clone(), rivals: order.rivals.clone() };
            let looked = errand.run("look", looked);
            for wanted in new {
                let result = of(&looked, &wanted.path);
                let (StripingOutcome::Free, Some(former)) = (&result.outcome, &result.former) else {
                    report.directories.push(result);
                    continue;
                };
                if !wanted.keep {
                    record.directories.push(DirectoryToRestore {
                        path: wanted.path.clone(),
                        options: wanted.options.clone(),
                        targets: wanted.targets,
                        tool: wanted.tool,
                        former: former.clone(),
                    });
                }
                to_set.push((wanted, former.clone()));
            }
        }
        if to_set.is_empty() {
            return Ok(report);
        }
        let noted = if record.directories.is_empty() { Ok(()) } else { record.save(&self.state, job) };
        noted.map_err(|error| {
            let kept = striping::directory(&self.state);
            let message =
                format!("{}: can't note in {} what directories had: {error}", self.name, kept.display());
            refusal(RefusalCode::Failed, message)
        })?;
        let work = StripingWork::Set { directories: to_set.clone(), rivals: order.rivals.clone(), job };
        let set = errand.run("set", work);
        for (wanted, former) in to_set {
            let former = Some(former).filter(|_| !wanted.keep);
            // What was begun and not told of may be set all the same.
            let outcome = match &set.1 {
                Err(why) if !set.0.contains_key(&wanted.path) => {
                    StripingOutcome::Unknown { why: format!("{}: {why}", wanted.path.display()) }
                }
                _ => of(&set, &wanted.path).outcome,
            };
            report.directories.push(StripingResult { path: wanted.path, outcome, former });
        }
        Ok(report)
    }

    /// Gives directories of a job back what they had before, by what is noted here, or else by the order.
    ///
    /// # Errors
    /// [`Refusal`]: the order is malformed, what was noted can't be read, or it could not be told of all directories what they
    /// have. Then it can be ordered again.
    pub fn restore_layouts(&self, job: Incarnation, order: &RestoreOrder) -> Result<StripingReport, Refusal> {
        order.check()?;
        let errand = self.errand(job, (order.uid, order.gid), order.deadline_ms);
        let of_job = self.layouts_of(job);
        let _one_of_them = lock(&of_job);
        let directories = match self.load_striping(job)? {
            Some(record) => record.directories,
            None => order.directories.clone(),
        };
        if directories.is_empty() {
            return Ok(StripingReport::default());
        }
        let paths: Vec<PathBuf> = directories.iter().map(|directory| directory.path.clone()).collect();
        let restored = errand.run("restore", StripingWork::Restore { directories });
        if let Err(why) = &restored.1 {
            return Err(refusal(RefusalCode::Failed, why.clone()));
        }
        let directories = paths.iter().map(|path| of(&restored, path)).collect();
        // Told of a directory that failed, the scheduler says when it is tried again, and with what.
        if let Err(error) = StripingRecord::remove(&self.state, job) {
            tracing::error!(%error, "can't forget what the directories of a job had; it is looked at again if it is ordered");
        }
        Ok(StripingReport { directories })
    }

    /// Counts what a job has left in directories.
    ///
    /// # Errors
    /// [`Refusal`]: the order is malformed.
    pub fn count(&self, job: Incarnation, order: &CountOrder) -> Result<StripingReport, Refusal> {
        order.check()?;
        let errand = self.errand(job, (order.uid, order.gid), order.deadline_ms);
        let CountOrder { directories, from_ms, until_ms, samples, .. } = order.clone();
        let counted = errand.run("count", StripingWork::Count { directories, from_ms, until_ms, samples });
        let directories = order.directories.iter().map(|path| of(&counted, path)).collect();
        Ok(StripingReport { directories })
    }

    /// Watches from now on who writes to the filesystems of a job's directories.
    ///
    /// # Errors
    /// [`Refusal`]: the order is malformed, a directory is not below a prefix, or the kernel can't tell it of a filesystem. Then
    /// nothing is watched.
    pub fn watch_writers(&self, job: Incarnation, order: &WatchOrder) -> Result<(), Refusal> {
        order.check()?;
        let rules = self.rules();
        let prefixes = rules.overmounts.prefixes();
        // What is no such path the job's user has no layout for either, and root is not sent there.
        let is_allowed = |path: &PathBuf| {
            let is_plain = path.components().all(|part| !matches!(part, Component::ParentDir));
            is_plain && prefixes.iter().any(|prefix| path.starts_with(prefix))
        };
        if let Some(other) = order.directories.iter().find(|path| !is_allowed(path)) {
            let message = format!("{}: it is not below the mount_prefixes of {}", other.display(), self.name);
            return Err(refusal(RefusalCode::Forbidden, message));
        }
        let (observer, directories) = (Arc::clone(&self.observer), order.directories.clone());
        let (node, uid) = (self.name.clone(), order.uid);
        let longest = Duration::from_millis(order.longest_ms).min(LONGEST_WATCH);
        let until = Instant::now() + Duration::from_millis(order.deadline_ms).min(LONGEST);
        let begun = hang::within(until, "watching who writes files", move || {
            Ok(observer.begin((job, uid), &node, &directories, (until, longest)))
        });
        let begun = begun.map_err(|error| failed(&error))?;
        begun.map_err(|error| refusal(RefusalCode::Failed, format!("{}: {error}", self.name)))
    }

    /// Watches a job no longer, and tells what was seen.
    ///
    /// # Errors
    /// [`Refusal`]: it was not watched, or not all of the time.
    pub fn writers_seen(&self, job: Incarnation, question: &KindsToTell) -> Result<KindsSeen, Refusal> {
        let seen = self.observer.end(job, &question.kinds);
        let kinds = seen.map_err(|error| {
            let message = format!("{}: who has written files is not known: {error}", self.name);
            refusal(RefusalCode::NotFound, message)
        })?;
        Ok(KindsSeen { kinds })
    }

    fn errand(&self, job: Incarnation, (uid, gid): (u32, u32), deadline_ms: u64) -> Errand<'_> {
        let until = Instant::now() + Duration::from_millis(deadline_ms).min(LONGEST);
        Errand { node: self, job, uid, gid, until }
    }

    /// The lock of whoever works on the layouts of a job.
    fn layouts_of(&self, job: Incarnation) -> Arc<Mutex<()>> {
        let mut locks = lock(&self.layouts);
        locks.retain(|known, lock| *known == job || Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(job).or_default())
    }

    fn load_striping(&self, job: Incarnation) -> Result<Option<StripingRecord>, Refusal> {
        StripingRecord::load(&self.state, job).map_err(|error| {
            let kept = striping::directory(&self.state);
            let message = format!(
                "{}: can't read in {} what the directories of job {job} had: {error}",
                self.name,
                kept.display()
            );
            refusal(RefusalCode::Failed, message)
        })
    }
}

/// What a task has told of each directory, and whether it came to its end.
type Told = (BTreeMap<PathBuf, StripingResult>, Result<(), String>);

/// What came of a directory.
fn of((told, ended): &Told, path: &Path) -> StripingResult {
    let silent = || {
        let why = match ended {
            Ok(()) => "nothing was told of it".to_owned(),
            Err(why) => why.clone(),
        };
        let outcome = StripingOutcome::Failed { why: format!("{}: {why}", path.display()) };
        StripingResult { path: path.to_owned(), outcome, former: None }
    };
    told.get(path).cloned().unwrap_or_else(silent)
}

impl Errand<'_> {
    /// Has it done as the user, and waits for its end or the deadline.
    fn run(&self, name: &str, work: StripingWork) -> Told {
        match self.try_run(name, work) {
            Ok(report) => {
                let ended = match report.state {
                    TaskState::Done { ok: true, .. } => Ok(()),
                    TaskState::Done { message, .. } => Err(message.unwrap_or_else(|| "it failed".to_owned())),
                    TaskState::Running => {
                        Err(format!("{}: it hangs; its filesystem does not answer", self.node.name))
                    }
                };
                let told = report.striping.into_iter().map(|result| (result.path.clone(), result)).collect();
                (told, ended)
            }
            Err(refused) => (BTreeMap::new(), Err(refused.message)),
        }
    }

    fn try_run(&self, name: &str, work: StripingWork) -> Result<TaskReport, Refusal> {
        let node = self.node;
        let rules = node.rules();
        let left = self.until.saturating_duration_since(Instant::now());
        let request = TaskRequest {
            work: TaskWork::Stripe { prefixes: rules.overmounts.prefixes().to_vec(), work },
            uid: self.uid,
            gid: self.gid,
            job: self.job.job.to_string(),
            label: self.job.label(),
            work_dir: "/".into(),
            deadline_ms: left.as_millis() as u64,
            bandwidth: None,
            share: None,
            unchanged_ms: 0,
        };
        let order = TaskOrder {
            ramdisk: RamDiskId { name: self.job.ramdisk(), epoch: Epoch(0) },
            node: node.name.clone(),
            request,
            data: None,
            state: node.state.clone(),
            socket: node.socket.clone(),
            script_memory: Bytes::ZERO,
            require_memory_group: false,
            out_of_date: Duration::ZERO,
        };
        let log = node.state.join("layouts.log");
        let start = || Task::start_on_disk(name, &log, &order).map_err(|error| failed(&error).message);
        let begun = node.unended.begin(self.uid, self.until + ENDING, start);
        let task = begun.map_err(|why| refusal(RefusalCode::Failed, format!("{}: {why}", node.name)))?;
        // An agent's requests that touch the system are on threads of their own.
        let report = tokio::runtime::Handle::current().block_on(task.wait(left + ENDING));
        task.let_go();
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_user_whose_filesystem_hangs_only_so_many_tasks_are_begun_and_others_have_theirs() {
        let (unended, now) = (Unended::default(), Instant::now());
        let begin =
            |uid: u32, until: Instant| unended.begin(uid, until, || Ok(Task::pretended_to_hang("look")));
        let first = begin(1001, now).map(|task| task.pretend_end());
        assert_eq!(first, Ok(()));
        for _ in 0..MOST_HANGING {
            assert!(begin(1001, now).is_ok());
        }
        assert!(begin(1001, now).is_err_and(|why| why.starts_with("4 tasks of user 1001 hang")));
        // Who has many that go on is no burden until there are very many.
        let later = now + LONGEST;
        let all: Vec<Arc<Task>> = (0..MOST_OF_USER).filter_map(|_| begin(1002, later).ok()).collect();
        assert_eq!(all.len(), MOST_OF_USER);
        assert!(begin(1002, later).is_err_and(|why| why.contains("32 tasks of user 1002 are under way")));
        all[0].pretend_end();
        assert!(begin(1002, later).is_ok());
        for uid in 2000..2000 + (MOST_HANGING_OF_ALL - MOST_HANGING) as u32 {
            assert!(begin(uid, now).is_ok());
        }
        assert!(begin(1003, now).is_err_and(|why| why.starts_with("64 tasks hang")));
    }
}
