//! Tasks: staging and users' scripts, each in a process of its own that the agent holds on a leash.
//!
//! The agent starts its own program as a *runner* and tells it, on its standard input, what to do ([`TaskOrder`]). The runner
//! makes namespaces for it, becomes the user there and does the work; it says how far it is, line by line, on its standard
//! output ([`Line`]). The input stays open for as long as the task may live: when the agent closes it, or dies, the runner
//! ends, and with its process-id namespace everything that the work has started. The output ends when nothing of it is
//! left.

mod group;
pub mod restraint;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_api::wire::{TaskReport, TaskState};
use ondeck_ramdisk::{EngineError, RuntimeDir, runtime_dir};
use ondeck_staging::task::order::{Line, Room};
use tokio::sync::watch;

use crate::story;
pub(crate) use ondeck_staging::task::order::TaskOrder;

pub use self::group::{MemoryGroup, remove_left_over as remove_left_over_groups};

/// The argument that makes the agent's program a runner.
pub const RUNNER: &str = "task-runner";

/// Tasks of one RAM disk whose reports are kept; a job has a handful. Those that ended first make room for others.
const MOST: usize = 32;

/// What a runner needs of the agent's environment: the programs that know the users, and what is logged.
const ENVIRONMENT: [&str; 4] = ["PATH", "LANG", "ONDECK_LOG", "RUST_BACKTRACE"];

/// The longest line of a runner.
const LONGEST_LINE: u64 = 1 << 20;

/// The most bytes of a log that no RAM disk takes with it; then it begins anew.
const MOST_LOGGED: u64 = 1 << 20;

/// The tasks of one RAM disk.
#[derive(Default)]
pub struct Tasks(Mutex<BTreeMap<String, Arc<Task>>>, Mutex<Option<Instant>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these protect is whole after every statement.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Tasks {
    /// The task of this name.
    pub fn find(&self, name: &str) -> Option<Arc<Task>> {
        lock(&self.0).get(name).cloned()
    }

    /// The task of this name; it is started if there is none.
    ///
    /// # Errors
    /// If it can't be started, there are too many that have not ended, or the RAM disk is being destroyed.
    pub fn find_or_start(
        &self,
        name: &str,
        runtime_dir: &RuntimeDir,
        start: impl FnOnce() -> Result<Arc<Task>, EngineError>,
    ) -> Result<Arc<Task>, EngineError> {
        let mut known = lock(&self.0);
        if let Some(found) = known.get(name) {
            return Ok(Arc::clone(found));
        }
        // Asked for under the lock that whoever destroys it takes afterwards: so no task is started unseen.
        if runtime_dir.is_given_up() {
            return Err(EngineError::GivenUp);
        }
        if known.len() >= MOST {
            let ended = known.iter().filter(|(_, task)| task.has_ended());
            let oldest = ended.min_by_key(|(_, task)| task.began).map(|(name, _)| name.clone());
            let Some(oldest) = oldest else {
                let text =
                    format!("{} has {MOST} tasks on this node already; end one of them", runtime_dir.id());
                return Err(EngineError::Refused(text));
            };
            known.remove(&oldest);
        }
        let task = start()?;
        known.insert(name.to_owned(), Arc::clone(&task));
        Ok(task)
    }

    /// The names of those that begin so.
    pub fn beginning_with(&self, beginning: &str) -> Vec<String> {
        lock(&self.0).keys().filter(|name| name.starts_with(beginning)).cloned().collect()
    }

    /// Whether one has not ended.
    pub fn is_any_running(&self) -> bool {
        lock(&self.0).values().any(|task| !task.has_ended())
    }

    /// Since when none has run; nothing if there never was one.
    pub fn quiet_since(&self) -> Option<Instant> {
        let known = lock(&self.0).values().filter_map(|task| task.ended_at()).max();
        known.max(*lock(&self.1))
    }

    /// Forgets a task; its name can be used again.
    pub fn forget(&self, name: &str, task: &Arc<Task>) {
        let last = self.quiet_since();
        *lock(&self.1) = last;
        let mut known = lock(&self.0);
        if known.get(name).is_some_and(|found| Arc::ptr_eq(found, task)) {
            known.remove(name);
        }
    }

    /// Lets go of all of them: they end now.
    pub fn let_go(&self) {
        lock(&self.0).values().for_each(|task| task.let_go());
    }
}

/// A process that copies, or a script, as the owner of a RAM disk; it ends when nobody holds its leash.
pub struct Task {
    report: Mutex<TaskReport>,
    began: Instant,
    /// Says when it has ended.
    ended: watch::Sender<Option<Instant>>,
    /// The runner's standard input.
    leash: Mutex<Option<ChildStdin>>,
    /// What the report still has room for.
    room: Mutex<Room>,
}

impl Task {
    /// A task of a RAM disk that has no filesystem: it is done.
    pub fn pretended(name: &str) -> Arc<Task> {
        let state = TaskState::Done { ok: true, message: None };
        Task::ended(TaskReport { state, ..TaskReport::new(name) })
    }

    /// A task that could not be begun; the same again may succeed.
    pub fn failed(name: &str, message: &str) -> Arc<Task> {
        let state = TaskState::Done { ok: false, message: Some(message.to_owned()) };
        Task::ended(TaskReport { state, retryable: true, ..TaskReport::new(name) })
    }

    /// A task that does not end before it is said to have.
    #[cfg(test)]
    pub(crate) fn pretended_to_hang(name: &str) -> Arc<Task> {
        let hangs = Arc::into_inner(Task::ended(TaskReport::new(name)));
        let ended = watch::Sender::new(None);
        hangs.map_or_else(|| Task::pretended(name), |task| Arc::new(Task { ended, ..task }))
    }

    #[cfg(test)]
    pub(crate) fn pretend_end(&self) {
        self.ended.send_replace(Some(Instant::now()));
    }

    fn ended(report: TaskReport) -> Arc<Task> {
        Arc::new(Task {
            report: Mutex::new(report),
            began: Instant::now(),
            ended: watch::Sender::new(Some(Instant::now())),
            leash: Mutex::default(),
            room: Mutex::default(),
        })
    }

    /// Starts a runner.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(name: &str, runtime_dir: &RuntimeDir, order: &TaskOrder) -> Result<Arc<Task>, EngineError> {
        let mark = |command: &mut Command| {
            runtime_dir.mark(&format!("{}{name}", runtime_dir::TASK), command);
        };
        Task::begin(name, &runtime_dir.log("tasks"), mark, order)
    }

    /// Starts a runner for work on disk, which belongs to no RAM disk: its leash alone ends it. What goes wrong in it is
    /// written to `log`.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_on_disk(name: &str, log: &Path, order: &TaskOrder) -> Result<Arc<Task>, EngineError> {
        // All tasks of this kind share one log, which no RAM disk takes with it when it goes.
        if std::fs::metadata(log).is_ok_and(|log| log.len() > MOST_LOGGED) {
            let emptied = std::fs::OpenOptions::new().write(true).open(log).and_then(|log| log.set_len(0));
            emptied.map_err(|error| EngineError::io("empty", log, error))?;
        }
        Task::begin(name, log, |_| {}, order)
    }

    fn begin(
        name: &str,
        log: &Path,
        mark: impl FnOnce(&mut Command),
        order: &TaskOrder,
    ) -> Result<Arc<Task>, EngineError> {
        let failed = |source| EngineError::Program { program: format!("ondeck {RUNNER}"), source };
        let stderr = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(log);
        let stderr = stderr.map_err(|error| EngineError::io("open", log, error))?;
        // This very program, also if another version has been installed since.
        let mut command = Command::new("/proc/self/exe");
        command.arg(RUNNER).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        // The agent's environment is not for whoever works as a user.
        command.env_clear().envs(ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        mark(&mut command);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // Signals from a terminal of the agent are not for it.
                rustix::process::setsid()?;
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(failed)?;
        let (Some(mut leash), Some(said)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed(std::io::Error::other("it has no pipes")));
        };
        let mut text = serde_json::to_vec(order).map_err(|error| EngineError::Refused(error.to_string()))?;
        text.push(b'\n');
        if let Err(error) = leash.write_all(&text) {
            // It is our child and not reaped, so the number is still its own.
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(error));
        }
        let task = Arc::new(Task {
            report: Mutex::new(TaskReport::new(name)),
            began: Instant::now(),
            ended: watch::Sender::new(None),
            leash: Mutex::new(Some(leash)),
            room: Mutex::default(),
        });
        let (listening, id, state) = (Arc::clone(&task), order.ramdisk.clone(), order.state.clone());
        // A thread for each task that runs: there are a few of them, and each is listened to until nothing is left.
        let thread = std::thread::Builder::new().name("task".into());
        let thread = thread.spawn(move || {
            let _of_job = story::of(&id).entered();
            let name = lock(&listening.report).name.clone();
            listening.listen(child, said, &state);
            let state = lock(&listening.report).state.clone();
            tracing::info!(ramdisk = %id, task = name, ?state, "task ended");
        });
        // Without the thread the leash is dropped with the task, and the runner ends.
        thread.map_err(failed)?;
        tracing::info!(ramdisk = %order.ramdisk, task = name, "task started");
        Ok(task)
    }

    /// Takes what the runner says, until nothing of it is left.
    fn listen(&self, mut child: Child, said: ChildStdout, state: &Path) {
        let mut said = BufReader::new(said);
        let mut text = Vec::new();
        loop {
            text.clear();
            match said.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut text) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            match serde_json::from_slice(&text) {
                Ok(line) => self.take(line),
                Err(error) => tracing::error!(%error, "a task's runner said what can't be understood"),
            }
        }
        // Its end comes after that of everything in its namespace.
        let how = match child.wait() {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("its runner exited with code {code}"),
                (None, Some(signal)) => format!("signal {signal} ended its runner"),
                (None, None) => "its runner ended".to_owned(),
            },
            Err(error) => format!("its runner can't be waited for: {error}"),
        };
        // Somebody may have killed it.
        if let Err(error) = group::remove_of(state, child.id()) {
            tracing::error!(runner = child.id(), %error, "can't remove the memory group of a task's script");
        }
        let was_let_go = lock(&self.leash).take().is_none();
        {
            let mut report = lock(&self.report);
            report.seconds = self.began.elapsed().as_secs_f64();
            if report.state == TaskState::Running {
                let message = if was_let_go {
                    "it was stopped before it was done".to_owned()
                } else {
                    format!("it ended before it was done: {how}")
                };
                report.retryable = true;
                report.state = TaskState::Done { ok: false, message: Some(message) };
            }
        }
        self.ended.send_replace(Some(Instant::now()));
    }

    fn take(&self, line: Line) {
        let fits = lock(&self.room).take(&line);
        let mut report = lock(&self.report);
        match line {
            Line::Done { ok, retryable, .. } if !fits => {
                report.retryable = retryable;
                report.state = TaskState::Done { ok, message: None };
            }
            _ if !fits => {}
            Line::Progress { entries_found, entries_done, bytes_found, bytes_done, bytes_written } => {
                (report.entries_found, report.entries_done) = (entries_found, entries_done);
                (report.bytes_found, report.bytes_done) = (bytes_found, bytes_done);
                report.bytes_written = bytes_written;
            }
            Line::Error(error) => report.errors.push(error),
            Line::Beside(path) => report.beside.push(path),
            Line::Units(units) => report.units.extend(units),
            Line::Striping(result) => report.striping.push(*result),
            Line::Log(log) => report.log = log,
            Line::Done { ok, message, retryable } => {
                report.retryable = retryable;
                report.state = TaskState::Done { ok, message };
            }
        }
    }

    /// Whether nothing of it is left.
    pub fn has_ended(&self) -> bool {
        self.ended_at().is_some()
    }

    fn ended_at(&self) -> Option<Instant> {
        *self.ended.borrow()
    }

    /// How it is.
    pub fn report(&self) -> TaskReport {
        let ended = self.has_ended();
        let mut report = lock(&self.report).clone();
        if !ended {
            // It has said how it will end, and something of it is still there.
            report.state = TaskState::Running;
            report.seconds = self.began.elapsed().as_secs_f64();
        }
        report
    }

    /// Waits until nothing of it is left, or the time is over.
    pub async fn wait(&self, longest: Duration) -> TaskReport {
        let mut ended = self.ended.subscribe();
        // Its sender lives in this very task.
        let _ = tokio::time::timeout(longest, ended.wait_for(Option::is_some)).await;
        self.report()
    }

    /// Ends it: its runner sees that its input is closed.
    pub fn let_go(&self) {
        lock(&self.leash).take();
    }
}

#[cfg(test)]
mod tests {
    use ondeck_api::wire::Unit;
    use ondeck_staging::task::order::{MOST_NAMED, MOST_UNITS};

    use super::*;

    #[test]
    fn a_report_has_an_end_whatever_its_task_says() {
        let task = Task::pretended("work");
        let unit = |name: &str| Unit { directory: "0".into(), entry: name.into(), bytes: 1, files: 1 };
        for _ in 0..100_000 {
            task.take(Line::Error("e".into()));
            task.take(Line::Beside("b".into()));
            task.take(Line::Units(vec![unit("u")]));
        }
        task.take(Line::Log("l".repeat(1 << 20)));
        task.take(Line::Units(vec![unit(&"u".repeat(256))]));
        task.take(Line::Done { ok: true, message: Some("m".repeat(1 << 20)), retryable: true });
        let report = task.report();
        let numbers = (report.errors.len(), report.beside.len(), report.units.len(), report.log.len());
        assert_eq!(numbers, (MOST_NAMED, MOST_NAMED, MOST_UNITS, 0));
        assert_eq!(report.state, TaskState::Done { ok: true, message: None });
    }

    #[test]
    fn tasks_that_ended_make_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::open(dir.path(), "job@1".parse().unwrap()).unwrap();
        let tasks = Tasks::default();
        let runs = Arc::new(Task {
            ended: watch::Sender::new(None),
            ..Arc::into_inner(Task::pretended("")).unwrap()
        });
        tasks.find_or_start("runs", &runtime_dir, || Ok(Arc::clone(&runs))).unwrap();
        for number in 0..MOST * 2 {
            let name = format!("home-{number}");
            tasks.find_or_start(&name, &runtime_dir, || Ok(Task::pretended(&name))).unwrap();
        }
        assert!(tasks.find("runs").is_some() && tasks.find("home-0").is_none());
        assert!(tasks.find(&format!("home-{}", MOST * 2 - 1)).is_some());
        assert_eq!(lock(&tasks.0).len(), MOST);
    }
}
