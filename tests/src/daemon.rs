//! A program that is left running in a host.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::enter::PID_FILE_VARIABLE;
use crate::wait::STEP;

/// How long a program may take from fork to exec. A bound for a machine that is out of breath.
const START_DEADLINE: Duration = Duration::from_secs(20);

/// How long a program may take to end after SIGKILL: one that writes to a dead filesystem takes for ever.
const KILL_DEADLINE: Duration = Duration::from_secs(5);

/// A running program, made by [`Host::spawn_daemon`](crate::Host::spawn_daemon). Killed when dropped.
///
/// It must stay in the foreground: of one that forks and exits, only the first process is known here.
#[derive(Debug)]
pub struct Daemon {
    /// The process that stands between, and that ends as the program does.
    between: Child,
    /// The program, by a descriptor: an id could pass to another process.
    program: OwnedFd,
    pid: Pid,
    pid_inside: Pid,
    log: PathBuf,
}

impl Daemon {
    pub(crate) fn spawn(host: &str, mut command: Command, log: &Path) -> Result<Daemon> {
        let what = format!("{} in {host}", program_of(&command));
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot open the log {}", log.display()))?;
        let pid_file = tempfile::NamedTempFile::new().context("cannot make a file for the process id")?;
        command.env(PID_FILE_VARIABLE, pid_file.path());
        command.stdout(output.try_clone()?).stderr(output);
        let mut between = command.spawn().with_context(|| format!("cannot start {what}"))?;

        let start = Instant::now();
        let pid = loop {
            // Written in one piece, with a newline at its end, when the program has been executed.
            let text = fs::read_to_string(pid_file.path())?;
            if let Some(pid) = text.strip_suffix('\n') {
                break pid.parse().ok().and_then(Pid::from_raw).context("not a process id")?;
            }
            if let Some(status) = between.try_wait()? {
                bail!("cannot start {what}: {status}: {}", tail(log));
            }
            if start.elapsed() > START_DEADLINE {
                let _ = between.kill();
                let _ = between.wait();
                bail!("{what} did not start in {START_DEADLINE:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let opened = rustix::process::pidfd_open(pid, PidfdFlags::empty());
        let Ok(program) = opened else { bail!("{what} ended at once: {}", tail(log)) };
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))
            .with_context(|| format!("{what} ended at once"))?;
        let pid_inside = inside_of(&status).unwrap_or(pid);
        Ok(Daemon { between, program, pid, pid_inside, log: log.to_owned() })
    }

    /// The program's id for the test process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The program's id for the processes in the hosts.
    pub fn pid_inside(&self) -> Pid {
        self.pid_inside
    }

    /// Sends a signal to the program, STOP too. Nothing happens if it has ended.
    pub fn kill(&self, signal: Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.program, signal);
    }

    /// Whether the program has not ended yet.
    pub fn is_running(&self) -> bool {
        let mut program = [PollFd::new(&self.program, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut program, Some(&now)) == Ok(0)
    }

    /// How the program ended, or `None` if it still runs after `deadline`.
    pub fn wait(&mut self, deadline: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Ok(Some(status)) = self.between.try_wait() {
                return Some(status);
            }
            if start.elapsed() >= deadline {
                return None;
            }
            std::thread::sleep(STEP);
        }
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Panics
    ///
    /// If the program still runs after `deadline`, with the end of its log.
    #[track_caller]
    pub fn stop(&mut self, deadline: Duration) -> ExitStatus {
        self.kill(Signal::TERM);
        match self.wait(deadline) {
            Some(status) => status,
            None => panic!("still running {deadline:?} after SIGTERM: {}", tail(&self.log)),
        }
    }

    /// What the program has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill(Signal::KILL);
        // Killing the process between as well would orphan a zombie to the machine's process 1, and the end of the
        // bed would have to wait until that one looks. By itself it ends as soon as it has reaped the program.
        if self.wait(KILL_DEADLINE).is_none() {
            let _ = self.between.kill();
            let _ = self.between.wait();
        }
    }
}

/// The program's name: what follows the lone hyphens in the arguments that [`crate::Host::command`] puts first.
fn program_of(command: &Command) -> String {
    let program = command.get_args().skip_while(|argument| *argument != "--").nth(1);
    program.unwrap_or(command.get_program()).to_string_lossy().into_owned()
}

/// The second of the ids, the one in the bed's namespace.
fn inside_of(status: &str) -> Option<Pid> {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Pid::from_raw(ids.split_whitespace().nth(1)?.parse().ok()?)
}

/// The last lines of a log, for an error.
pub(crate) fn tail(log: &Path) -> String {
    let text = String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
