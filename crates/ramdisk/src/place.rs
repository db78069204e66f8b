//! The place of a RAM disk on one node: its directory, its processes, what they wrote to their logs.
//!
//! Every process that is started here carries a [mark](crate::mark), by which an agent knows it again after a crash.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ondeck_core::RamDiskId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::EngineError;
use crate::mark::{Marks, marks_of};
use crate::processes::{look_at, look_at_one, pids};

pub use crate::mark::Marked;

/// How the role of a task's processes begins. A task does not outlive its agent.
pub const TASK: &str = "task-";

/// How long [`Place::adopt`] waits for the end of an earlier agent's tasks.
const ENDING: Duration = Duration::from_secs(5);

/// Servers are given up after everything else when memory runs out, but before the agent: killed, they take the data
/// of a job along; without the agent nobody would clear up.
const SERVER_OOM_SCORE: &str = "-900";

/// How long a wait sleeps between two looks, at first; it doubles up to [`LONGEST_NAP`].
const FIRST_NAP: Duration = Duration::from_micros(500);
const LONGEST_NAP: Duration = Duration::from_millis(10);

/// A process of a RAM disk.
#[derive(Clone, Debug)]
pub struct Process {
    /// What it is: `brick`, `client`, `monitor`.
    pub role: String,
    /// Its process id.
    pub pid: i32,
    /// How it ended, once it has: the status if it was our child, else nothing is known.
    pub ended: Option<Option<ExitStatus>>,
}

/// The place of a RAM disk on this node.
pub struct Place {
    id: RamDiskId,
    /// The agent's directory, the same for all its RAM disks.
    scope: PathBuf,
    dir: PathBuf,
    marks: Marks,
    processes: Arc<Mutex<BTreeMap<i32, Process>>>,
    given_up: AtomicBool,
}

impl Place {
    /// The place of `id` in the agent's directory `scope`; it is made (mode 0700) if it is missing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(scope: &Path, id: RamDiskId) -> io::Result<Place> {
        let dir = scope.join("ramdisks").join(id.name.as_str());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(Place {
            id,
            scope: scope.to_owned(),
            dir,
            marks: Marks::open(scope)?,
            processes: Arc::default(),
            given_up: AtomicBool::new(false),
        })
    }

    /// Whose place it is.
    pub fn id(&self) -> &RamDiskId {
        &self.id
    }

    /// The directory that only root can look into.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The directory `name` in it, made (mode 0700) if it is missing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn subdirectory(&self, name: &str) -> Result<PathBuf, EngineError> {
        let path = self.path(name);
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(EngineError::io("make", &path, error))
            }
            _ => Ok(path),
        }
    }

    /// Writes a file that only root can read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_private(&self, name: &str, content: &[u8]) -> Result<PathBuf, EngineError> {
        let path = self.path(name);
        let partial = self.path(&format!("{name}.partial"));
        let write = || -> io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
            file.write_all(content)?;
            // What is kept of a RAM disk decides whether its data is destroyed: it must outlive a crash of the machine.
            file.sync_all()?;
            fs::rename(&partial, &path)?;
            fs::File::open(&self.dir)?.sync_all()
        };
        write().map_err(|error| EngineError::io("write", &path, error))?;
        Ok(path)
    }

    /// Starts a process of the RAM disk in a session of its own. It outlives the agent; its output goes to
    /// `ROLE.log`.
    ///
    /// # Errors
    /// [`EngineError::Program`] if it can't be started.
    pub fn start(&self, role: &str, mut command: Command) -> Result<i32, EngineError> {
        self.prepare(role, &mut command)?;
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().map_err(|source| EngineError::Program { program, source })?;
        let pid = child.id() as i32;
        self.table().insert(pid, Process { role: role.to_owned(), pid, ended: None });
        let table = Arc::clone(&self.processes);
        let (id, role) = (self.id.clone(), role.to_owned());
        // A thread for each process: there are a handful of them, and each must be reaped the moment it ends.
        std::thread::spawn(move || {
            let status = child.wait().ok();
            note_end(&table, pid, status);
            tracing::debug!(ramdisk = %id, role, pid, ?status, "process ended");
        });
        Ok(pid)
    }

    /// Runs a command to its end and returns what it printed.
    ///
    /// # Errors
    /// If it can't be started, exits with another code than 0, or takes longer than `until`; then it is killed.
    pub fn run(&self, role: &str, command: Command, until: Instant) -> Result<Vec<u8>, EngineError> {
        self.run_beside(&[], role, command, until)
    }

    /// As [`Place::run`], for a command that speaks to these servers: it would wait in vain for one that has ended.
    ///
    /// # Errors
    /// As [`Place::run`]; [`EngineError::Exited`] as soon as one of the servers has ended. The command is killed then.
    pub fn run_beside(
        &self,
        servers: &[&str],
        role: &str,
        mut command: Command,
        until: Instant,
    ) -> Result<Vec<u8>, EngineError> {
        let output = self.path(&format!("{role}.out"));
        let log_end = fs::metadata(self.log(role)).map_or(0, |meta| meta.len());
        self.prepare(role, &mut command)?;
        // What it makes in the place may hold keys.
        // SAFETY: a system call only, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
                Ok(())
            });
        }
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&output);
        command.stdout(file.map_err(|error| EngineError::io("write", &output, error))?);
        if command.get_current_dir().is_none() {
            command.current_dir(&self.dir);
        }
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().map_err(|source| EngineError::Program { program, source })?;
        let pid = child.id() as i32;
        let ended = self.wait(until, role, || {
            let ended =
                child.try_wait().map_err(|error| EngineError::io("wait for", Path::new(role), error))?;
            if ended.is_none() {
                servers.iter().try_for_each(|server| self.must_run(server).map(drop))?;
            }
            Ok(ended)
        });
        let status = match ended {
            Ok(status) => status,
            Err(error) => {
                // It is our child and not reaped, so the number is still its own.
                kill(pid);
                let _ = child.wait();
                return Err(error);
            }
        };
        if !status.success() {
            return Err(EngineError::Exited {
                role: role.to_owned(),
                how: describe(Some(status)),
                log: tail(&self.log(role), log_end),
            });
        }
        fs::read(&output).map_err(|error| EngineError::io("read", &output, error))
    }

    fn prepare(&self, role: &str, command: &mut Command) -> Result<(), EngineError> {
        let log = self.log(role);
        let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
        let out = open().map_err(|error| EngineError::io("open", &log, error))?;
        let err = out.try_clone().map_err(|error| EngineError::io("open", &log, error))?;
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        self.mark(role, command);
        // SAFETY: only system calls between fork and exec, on nothing that another thread could hold.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                let flags = rustix::fs::OFlags::WRONLY;
                // Not allowed in some containers; then the kernel's own choice stands.
                if let Ok(file) =
                    rustix::fs::open("/proc/self/oom_score_adj", flags, rustix::fs::Mode::empty())
                {
                    let _ = rustix::io::write(&file, SERVER_OOM_SCORE.as_bytes());
                }
                Ok(())
            });
        }
        Ok(())
    }

    /// Marks a process that is not started here as one of the RAM disk's: it is ended with it.
    pub fn mark(&self, role: &str, command: &mut Command) {
        self.marks.put(&self.id.to_string(), role, command);
    }

    /// Where the output of `role` goes.
    pub fn log(&self, role: &str) -> PathBuf {
        self.path(&format!("{}.log", role.replace(' ', "-")))
    }

    /// Waits until `look` finds what it looks for, the time is over, or the RAM disk is destroyed.
    ///
    /// # Errors
    /// [`EngineError::Deadline`], [`EngineError::GivenUp`], or what `look` says.
    pub fn wait<T>(
        &self,
        until: Instant,
        what: &str,
        mut look: impl FnMut() -> Result<Option<T>, EngineError>,
    ) -> Result<T, EngineError> {
        let began = Instant::now();
        let mut nap = FIRST_NAP;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if self.given_up.load(Ordering::Relaxed) {
                return Err(EngineError::GivenUp);
            }
            if Instant::now() >= until {
                return Err(EngineError::Deadline { what: what.to_owned(), waited: began.elapsed() });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }

    /// Fails if the RAM disk is being destroyed or the time is over: for work that waits for nothing.
    ///
    /// # Errors
    /// [`EngineError::Deadline`], [`EngineError::GivenUp`].
    pub fn must_go_on(&self, until: Instant, what: &str) -> Result<(), EngineError> {
        if self.is_given_up() {
            return Err(EngineError::GivenUp);
        }
        if Instant::now() >= until {
            return Err(EngineError::Deadline { what: what.to_owned(), waited: Duration::ZERO });
        }
        Ok(())
    }

    /// Ends every wait in this place from now on: the RAM disk is being destroyed.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether the RAM disk is being destroyed.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// The processes that were started or found here, the ended ones too.
    pub fn processes(&self) -> Vec<Process> {
        self.table().values().cloned().collect()
    }

    /// Forgets the processes of a role that have ended, as they were meant to.
    pub fn forget_ended(&self, role: &str) {
        self.table().retain(|_, process| process.role != role || process.ended.is_none());
    }

    /// Ends the processes of a role, and forgets them at once: when they have ended is nothing to whoever comes after them in
    /// that role. [`Place::kill_all`] finds one that does not end.
    pub fn end_role(&self, role: &str) {
        self.kill_role(role);
        self.table().retain(|_, process| process.role != role);
    }

    /// The running process of a role.
    pub fn running(&self, role: &str) -> Option<i32> {
        self.table().values().find(|process| process.role == role && process.ended.is_none()).map(|p| p.pid)
    }

    /// Fails with the end of its log if the process of this role has ended (or never began).
    ///
    /// # Errors
    /// [`EngineError::Exited`].
    pub fn must_run(&self, role: &str) -> Result<i32, EngineError> {
        let table = self.table();
        let of_role = || table.values().filter(|process| process.role == role);
        if let Some(process) = of_role().find(|process| process.ended.is_none()) {
            return Ok(process.pid);
        }
        let how = of_role().next_back().map_or_else(
            || "it is not running".to_owned(),
            |process| describe(process.ended.as_ref().and_then(|status| *status)),
        );
        Err(EngineError::Exited { role: role.to_owned(), how, log: tail(&self.log(role), 0) })
    }

    /// Finds the processes that an earlier agent started for this incarnation, and watches them. Its tasks are ended:
    /// nobody waits for them any more.
    ///
    /// # Errors
    /// If it can't be told which they are.
    pub fn adopt(&self) -> io::Result<()> {
        let mut tasks = Vec::new();
        for found in marked(&self.scope)? {
            if found.id != self.id.to_string() || self.table().contains_key(&found.pid) {
                continue;
            }
            if found.is_a_task() {
                tasks.extend(kill_if_marked(found.pid, &self.scope, self.id.name.as_str()));
            } else {
                watch_adopted(&self.processes, found.role, found.pid)?;
            }
        }
        let until = Instant::now() + ENDING;
        for (pid, handle) in tasks {
            if !ends(&handle, until) {
                tracing::error!(ramdisk = %self.id, pid, "a task of an earlier agent does not end");
            }
        }
        Ok(())
    }

    /// Kills every process of this RAM disk on this node, of whatever incarnation, and waits until they are gone.
    ///
    /// # Errors
    /// [`EngineError::Immortal`] if one is still there at `until`; the kernel's, if it can't be told whether one is.
    pub fn kill_all(&self, until: Instant) -> Result<(), EngineError> {
        // The known ones first, without a look at all of /proc; then whatever they started. A dying process can still
        // have started another one, so this is repeated until none is found.
        let mut killed: Vec<(i32, OwnedFd)> = Vec::new();
        for process in self.processes().iter().filter(|process| process.ended.is_none()) {
            killed.extend(kill_if_marked(process.pid, &self.scope, self.id.name.as_str()));
        }
        let mut nap = FIRST_NAP;
        loop {
            let left: Vec<Marked> = marked(&self.scope)
                .map_err(|error| EngineError::io("read", Path::new("/proc"), error))?
                .into_iter()
                .filter(|found| name_of(&found.id) == self.id.name.as_str())
                .collect();
            if left.is_empty() {
                break;
            }
            for found in &left {
                killed.extend(kill_if_marked(found.pid, &self.scope, self.id.name.as_str()));
            }
            if Instant::now() >= until {
                return Err(EngineError::Immortal { pids: left.iter().map(|found| found.pid).collect() });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
        // The environment goes first when a process ends, its files and ports after that.
        let immortal: Vec<i32> =
            killed.iter().filter(|(_, handle)| !ends(handle, until)).map(|(pid, _)| *pid).collect();
        if immortal.is_empty() { Ok(()) } else { Err(EngineError::Immortal { pids: immortal }) }
    }

    /// Kills the processes of one role.
    pub fn kill_role(&self, role: &str) {
        for process in self.processes() {
            if process.role == role && process.ended.is_none() {
                kill_if_marked(process.pid, &self.scope, self.id.name.as_str());
            }
        }
    }

    /// Kills every process on this machine that has a file of the filesystem with this device number open, mapped, or as
    /// its directory.
    ///
    /// # Errors
    /// [`EngineError::Immortal`] if one is still there at `until`; the kernel's, if it can't be told whether one is.
    pub fn end_users_of(&self, device: u64, until: Instant) -> Result<(), EngineError> {
        let mut nap = FIRST_NAP;
        loop {
            let all = pids().and_then(|all| look_at(all, move |pid| uses(pid, device)));
            let all = all.map_err(|error| EngineError::io("read", Path::new("/proc"), error))?;
            let users: Vec<i32> =
                all.into_iter().filter(|(_, uses)| *uses == Some(true)).map(|(pid, _)| pid).collect();
            if users.is_empty() {
                return Ok(());
            }
            for pid in &users {
                tracing::warn!(ramdisk = %self.id, pid, "killing a process that still uses the RAM disk");
                if let Some(handle) =
                    Pid::from_raw(*pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
                    && matches!(look_at_one(*pid, move |pid| uses(pid, device)), Ok(Some(true)))
                {
                    // It may have ended by now.
                    let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
                }
            }
            if Instant::now() >= until {
                return Err(EngineError::Immortal { pids: users });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<i32, Process>> {
        lock(&self.processes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A table of processes is whole after every single statement that changes it.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn note_end(table: &Mutex<BTreeMap<i32, Process>>, pid: i32, status: Option<ExitStatus>) {
    if let Some(process) = lock(table).get_mut(&pid) {
        process.ended = Some(status);
    }
}

fn watch_adopted(table: &Arc<Mutex<BTreeMap<i32, Process>>>, role: String, pid: i32) -> io::Result<()> {
    let Some(number) = Pid::from_raw(pid) else { return Ok(()) };
    let handle = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(handle) => handle,
        // It has ended meanwhile.
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    lock(table).insert(pid, Process { role, pid, ended: None });
    let table = Arc::clone(table);
    std::thread::spawn(move || {
        while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) {}
        note_end(&table, pid, None);
    });
    Ok(())
}

/// Every process on this machine that an agent with the directory `scope` has started and that has not ended.
///
/// # Errors
/// The kernel's: then it is not known which they are, or whether there is one.
pub fn marked(scope: &Path) -> io::Result<Vec<Marked>> {
    marks_of(pids()?, scope)
}

/// Whether a process has something of the filesystem with this device number. What can't be looked at has mostly ended
/// meanwhile; if it has not, the filesystem can't be unmounted, and that is told.
fn uses(pid: i32, device: u64) -> bool {
    // Without asking the filesystem's server, which may hang: it may be any filesystem of the machine.
    let on_device = |path: PathBuf| {
        let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
        rustix::fs::statx(rustix::fs::CWD, &path, flags, rustix::fs::StatxFlags::TYPE)
            .is_ok_and(|stat| rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor) == device)
    };
    let base = PathBuf::from(format!("/proc/{pid}"));
    ["cwd", "root", "exe"].iter().any(|name| on_device(base.join(name)))
        || fs::read_dir(base.join("fd")).into_iter().flatten().flatten().any(|entry| on_device(entry.path()))
        || maps(&base, device)
}

fn maps(base: &Path, device: u64) -> bool {
    let wanted = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    fs::read_to_string(base.join("maps"))
        .is_ok_and(|maps| maps.lines().any(|line| line.split_whitespace().nth(3) == Some(&wanted)))
}

/// The name of a RAM disk in `NAME@EPOCH`.
pub fn name_of(id: &str) -> &str {
    id.rsplit_once('@').map_or(id, |(name, _)| name)
}

/// Kills a process that has our mark, and returns a descriptor to wait for its end with. The descriptor keeps the process
/// id from being given away between look and kill.
fn kill_if_marked(pid: i32, scope: &Path, name: &str) -> Option<(i32, OwnedFd)> {
    let handle = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())?;
    // What it is can't be told: then it is not killed, and whoever waits for its end is told that it has not come.
    marks_of([pid], scope).ok()?.pop().filter(|found| name_of(&found.id) == name)?;
    // It may have ended by now.
    let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
    Some((pid, handle))
}

/// Waits for the end of a process; false if it has not come by then.
fn ends(handle: &OwnedFd, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = rustix::event::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Kills the tasks that an agent with this directory started for a RAM disk that is not in `known`. Nothing else of one
/// is killed: its servers may hold results.
///
/// # Errors
/// If it can't be told which they are; then none is killed.
pub fn end_stray_tasks(scope: &Path, known: &[RamDiskId]) -> io::Result<usize> {
    let strays: Vec<Marked> = marked(scope)?
        .into_iter()
        .filter(|found| found.is_a_task() && !known.iter().any(|id| found.id == id.to_string()))
        .collect();
    for stray in &strays {
        tracing::warn!(pid = stray.pid, ramdisk = stray.id, role = stray.role, "killing a stray task");
        kill_if_marked(stray.pid, scope, name_of(&stray.id));
    }
    Ok(strays.len())
}

fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn describe(status: Option<ExitStatus>) -> String {
    match status {
        None => "it ended".into(),
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("it exited with code {code}"),
            (None, Some(signal)) => format!("signal {signal} ended it"),
            (None, None) => "it ended".into(),
        },
    }
}

/// The last lines of a log from `start` on, for a message.
pub fn tail(log: &Path, start: u64) -> String {
    const MOST: u64 = 2000;
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(length.saturating_sub(MOST))))?;
        let mut text = Vec::new();
        file.take(MOST).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn place(dir: &Path) -> Place {
        Place::open(dir, "test@1".parse().unwrap()).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn a_process_and_what_it_started_are_found_by_their_mark_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let first = place(dir.path());
        let mut command = Command::new("sh");
        command.args(["-c", "(sleep 300 &) ; exec sleep 300"]);
        let pid = first.start("brick", command).unwrap();
        // The shell that starts the second one in between is gone when both are what they shall be.
        let sleeps = |process: &Marked| {
            fs::read(format!("/proc/{}/cmdline", process.pid)).is_ok_and(|line| line.starts_with(b"sleep\0"))
        };
        first
            .wait(soon(), "two processes", || {
                let all = marked(dir.path()).unwrap();
                Ok((all.len() == 2 && all.iter().all(sleeps)).then_some(()))
            })
            .unwrap();
        assert_eq!(first.must_run("brick").unwrap(), pid);

        // An agent that starts again knows only the directory.
        let second = place(dir.path());
        second.adopt().unwrap();
        assert_eq!(second.processes().len(), 2);
        assert_eq!(end_stray_tasks(dir.path(), &[]).unwrap(), 0);
        assert_eq!(marked(dir.path()).unwrap().len(), 2);
        second.kill_all(soon()).unwrap();
        assert!(marked(dir.path()).unwrap().is_empty());
        first.wait(soon(), "its end", || Ok(first.must_run("brick").err())).unwrap();
        second.wait(soon(), "its end", || Ok(second.running("brick").is_none().then_some(()))).unwrap();
    }

    #[test]
    fn the_late_end_of_one_that_was_taken_away_is_nothing_to_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = place(dir.path());
        let sleep = || {
            let mut command = Command::new("sleep");
            command.arg("300");
            command
        };
        let first = place.start("client", sleep()).unwrap();
        place.end_role("client");
        // It may still be dying.
        let second = place.start("client", sleep()).unwrap();
        let gone = PathBuf::from(format!("/proc/{first}"));
        place.wait(soon(), "its end", || Ok((!gone.exists()).then_some(()))).unwrap();
        let known = || place.processes().into_iter().map(|process| (process.pid, process.ended.is_some()));
        assert_eq!(known().collect::<Vec<_>>(), [(second, false)]);
        assert_eq!(place.must_run("client").unwrap(), second);
        place.kill_all(soon()).unwrap();
    }

    /// The environment of what a place starts.
    fn marks_of(place: &Place) -> Vec<(String, String)> {
        let mut command = Command::new("true");
        place.mark("brick", &mut command);
        let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
        command.get_envs().map(|(name, value)| (text(name), text(value.unwrap()))).collect()
    }

    fn begin(command: &mut Command) -> std::process::Child {
        let child = command.arg("300").spawn().unwrap();
        let is_it = |line: Vec<u8>| line.ends_with(b"\x00300\0");
        while !fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(is_it) {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_mark_that_all_can_know_or_in_a_users_set_uid_program_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let place = place(dir.path());
        let marks = marks_of(&place);
        let public: Vec<_> = marks.iter().filter(|(name, _)| name != "ONDECK_PROOF").cloned().collect();
        assert_eq!((marks.len(), public.len()), (4, 3));
        let stolen: Vec<_> = marks
            .iter()
            .map(|(name, value)| {
                (name.clone(), if name == "ONDECK_ROLE" { "client" } else { value }.to_owned())
            })
            .collect();
        // As a program that has become root for good.
        let mut forged: Vec<_> =
            [&public, &stolen].map(|marks| begin(Command::new("sleep").envs(marks.clone()))).into();
        if rustix::process::geteuid().is_root() {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
            let program = dir.path().join("set-uid");
            let sleep = Command::new("sh").args(["-c", "command -v sleep"]).output().unwrap().stdout;
            fs::copy(String::from_utf8(sleep).unwrap().trim(), &program).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
            forged.push(begin(Command::new(&program).uid(20_002).gid(20_002).envs(marks.clone())));
            let owner = fs::metadata(format!("/proc/{}/stat", forged[2].id())).unwrap().uid();
            assert_eq!(owner, 0, "it is not set-uid here");
        }
        assert!(marked(dir.path()).unwrap().is_empty());
        place.adopt().unwrap();
        assert!(place.processes().is_empty());
        assert_eq!(end_stray_tasks(dir.path(), &[]).unwrap(), 0);
        place.kill_all(soon()).unwrap();
        for mut child in forged {
            assert_eq!(child.try_wait().unwrap(), None);
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(fs::metadata(dir.path().join("marks.json")).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn processes_of_a_former_version_are_known_if_they_ran_when_the_key_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let mut marks = marks_of(&place(dir.path()));
        marks.retain(|(name, _)| name != "ONDECK_PROOF");
        fs::remove_file(dir.path().join("marks.json")).unwrap();
        let mut server = begin(Command::new("sleep").envs(marks.clone()));
        let place = place(dir.path());
        let mut forged = begin(Command::new("sleep").envs(marks));
        place.adopt().unwrap();
        assert_eq!(place.must_run("brick").unwrap(), server.id() as i32);
        assert_eq!(place.processes().len(), 1);
        place.kill_all(soon()).unwrap();
        assert_eq!(server.wait().unwrap().signal(), Some(9));
        assert_eq!(forged.try_wait().unwrap(), None);
        forged.kill().unwrap();
        forged.wait().unwrap();
    }

    #[test]
    fn without_its_key_a_process_is_neither_known_nor_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let first = place(dir.path());
        let mut command = Command::new("sleep");
        command.arg("300");
        let pid = first.start("brick", command).unwrap();
        let (key, kept) = (dir.path().join("marks.json"), dir.path().join("kept"));
        fs::rename(&key, &kept).unwrap();
        let error = Marks::open(dir.path()).map(|_| ()).unwrap_err().to_string();
        let id = first.id().to_string();
        for word in ["marks.json", &pid.to_string(), "brick", &id, "put the file back"] {
            assert!(error.contains(word), "no `{word}` in: {error}");
        }
        assert!(marked(dir.path()).is_err() && end_stray_tasks(dir.path(), &[]).is_err());
        assert!(first.kill_all(soon()).is_err() && first.running("brick").is_some());
        fs::rename(&kept, &key).unwrap();
        first.kill_all(soon()).unwrap();
    }

    #[test]
    fn of_a_ram_disk_that_is_not_known_only_the_tasks_are_ended() {
        let dir = tempfile::tempdir().unwrap();
        let place = place(dir.path());
        let sleep = || {
            let mut command = Command::new("sleep");
            command.arg("300");
            command
        };
        let server = place.start("brick", sleep()).unwrap();
        place.start(&format!("{TASK}fill"), sleep()).unwrap();
        assert_eq!(end_stray_tasks(dir.path(), &["test@1".parse().unwrap()]).unwrap(), 0);
        assert_eq!(end_stray_tasks(dir.path(), &["test@2".parse().unwrap()]).unwrap(), 1);
        let left = || marked(dir.path()).unwrap();
        place.wait(soon(), "the task's end", || Ok((left().len() == 1).then_some(()))).unwrap();
        assert_eq!(left()[0].pid, server);
        place.kill_all(soon()).unwrap();
    }

    #[test]
    fn another_agents_processes_are_left_alone() {
        let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut command = Command::new("sleep");
        command.arg("300");
        let other = place(theirs.path());
        other.start("brick", command).unwrap();
        place(ours.path()).kill_all(soon()).unwrap();
        assert!(other.running("brick").is_some());
        other.kill_all(soon()).unwrap();
    }

    #[test]
    fn what_fails_says_what_it_printed() {
        let dir = tempfile::tempdir().unwrap();
        let place = place(dir.path());
        let mut command = Command::new("sh");
        command.args(["-c", "echo the port is taken >&2; exit 3"]);
        let text = place.run("mkfs", command, soon()).unwrap_err().to_string();
        assert!(text.contains("code 3") && text.contains("the port is taken"), "{text}");

        let text = place.start("brick", Command::new("no-such-program")).unwrap_err().to_string();
        assert!(text.contains("no-such-program"), "{text}");

        let mut command = Command::new("sleep");
        command.arg("300");
        let soon = Instant::now() + Duration::from_millis(30);
        assert!(matches!(place.run("slow", command, soon), Err(EngineError::Deadline { .. })));
        assert!(marked(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn a_command_does_not_wait_for_a_server_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let place = place(dir.path());
        let command = |program: &str, of: &str| {
            let mut command = Command::new(program);
            command.arg(of);
            command
        };
        place.start("server", command("sleep", "300")).unwrap();
        assert!(place.run_beside(&["server"], "asks", command("sleep", "0.1"), soon()).is_ok());
        let server = place.running("server").unwrap();
        kill(server);
        let began = Instant::now();
        let error = place.run_beside(&["server"], "asks", command("sleep", "300"), soon()).unwrap_err();
        assert!(error.to_string().contains("signal 9"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5));
        assert!(marked(dir.path()).unwrap().is_empty());
    }
}
