//! One command: started, waited for, timed, and stopped when the bench is.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::interrupt;

/// A copy that takes longer than this hangs, or is of no use to anyone.
const LIMIT: Duration = Duration::from_secs(900);

/// What a program gets to clean up after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Finished {
    /// From before the process was made until it had been waited for.
    pub elapsed: Duration,
    pub status: ExitStatus,
    /// Largest resident set of any one process of the command, in bytes.
    ///
    /// The kernel carries the high-water mark of the process that calls exec over to the new
    /// program, so this is never less than the bench's own: nothing here may hold much memory, and
    /// [`crate::memcpy`] runs in a process of its own for that reason.
    pub peak_memory: u64,
}

/// Runs the command to its end with nothing on standard input and its complaints in `errors`.
///
/// The command gets a process group of its own, so that stopping it also stops the workers of a
/// shell pipe or of fpsync.
pub fn run(command: &mut Command, errors: &Path) -> Result<Finished> {
    interrupt::check()?;
    let name = command.get_program().to_string_lossy().into_owned();
    let errors = File::create(errors).with_context(|| format!("cannot write {}", errors.display()))?;
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);

    let start = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let pid = Pid::from_child(&child);
    let ended = wait_until_ended(pid, LIMIT);
    if !matches!(ended, Ok(true)) {
        stop(pid);
    }
    let (status, peak_memory) = reap(pid)?;
    let elapsed = start.elapsed();

    if !ended? {
        interrupt::check()?;
        bail!("{name} took more than {} s and was stopped", LIMIT.as_secs());
    }
    Ok(Finished { elapsed, status, peak_memory })
}

/// Whether the process ended before a signal came and before the limit.
fn wait_until_ended(pid: Pid, limit: Duration) -> Result<bool> {
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot open a pidfd")?;
    let deadline = Instant::now() + limit;
    loop {
        let mut events = vec![PollFd::new(&process, PollFlags::IN)];
        let signals = interrupt::readable();
        if let Some(signals) = &signals {
            events.push(PollFd::new(signals, PollFlags::IN));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).context("the time limit does not fit")?;
        match poll(&mut events, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(!events[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for a command"),
        }
    }
}

fn stop(pid: Pid) {
    // A group that is already gone is what this is for.
    let _ = kill_process_group(pid, Signal::TERM);
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
        && let Ok(grace) = Timespec::try_from(GRACE)
    {
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&grace));
    }
    let _ = kill_process_group(pid, Signal::KILL);
}

/// Waits with wait4(2), the only call that also tells what the process used.
fn reap(pid: Pid) -> Result<(ExitStatus, u64)> {
    let mut status = 0;
    // SAFETY: all zeroes is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live locals, and `pid` is our child, waited for only here.
        let result = unsafe { libc::wait4(pid.as_raw_nonzero().get(), &raw mut status, 0, &raw mut usage) };
        if result != -1 {
            let peak_memory = u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024;
            return Ok((ExitStatus::from_raw(status), peak_memory));
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error).context("cannot wait for a command");
        }
    }
}

/// Why a command failed, in one line: its exit status and the first thing it complained about.
pub fn complaint(status: ExitStatus, errors: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(errors) {
        // Complaints that are not text, or too long to read, leave the exit status to speak.
        let _ = file.take(64 * 1024).read_to_string(&mut text);
    }
    match text.lines().find(|line| !line.trim().is_empty()) {
        Some(line) => {
            let line: String = line.trim().chars().take(100).collect();
            format!("{status}: {line}")
        }
        None => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors_file(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("ondeck-bench-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_command_is_timed_and_its_memory_read() {
        let errors = errors_file("timed");
        let finished = run(Command::new("sleep").arg("0.05"), &errors).unwrap();
        std::fs::remove_file(&errors).unwrap();
        assert!(finished.status.success());
        assert!(finished.elapsed >= Duration::from_millis(50));
        assert!(finished.peak_memory > 0);
    }

    #[test]
    fn a_failure_is_told_in_the_commands_own_first_words() {
        let errors = errors_file("complaint");
        let mut command = Command::new("sh");
        command.args(["-c", "echo >&2; echo 'no such luck' >&2; echo try --help >&2; exit 3"]);
        let finished = run(&mut command, &errors).unwrap();
        let complaint = complaint(finished.status, &errors);
        std::fs::remove_file(&errors).unwrap();
        assert_eq!(complaint, "exit status: 3: no such luck");
    }
}
