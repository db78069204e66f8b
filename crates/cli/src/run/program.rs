//! Starting processes inside the run's namespaces, and ending what they leave behind.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ondeck_core::exit;
use ondeck_ramdisk::namespace::Namespaces;
use rustix::process::{Pid, Signal, WaitOptions};

use super::report::Report;

/// What processes that the program left behind get between the request to end and the end.
pub const GRACE: Duration = Duration::from_secs(5);

/// What the user's processes must find as it was when they called us.
#[derive(Clone, Copy)]
pub struct Surroundings {
    /// The file mode mask.
    pub umask: rustix::fs::Mode,
    /// The signal mask.
    pub signals: libc::sigset_t,
    /// The process group of the command, which the terminal's signals go to.
    pub group: Pid,
}

impl Surroundings {
    /// Those of this process, before anything is changed.
    pub fn of_this_process() -> Surroundings {
        let umask = rustix::process::umask(rustix::fs::Mode::empty());
        rustix::process::umask(umask);
        // SAFETY: reads the mask into a zeroed set, which is a valid one.
        let signals = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut set);
            set
        };
        Surroundings { umask, signals, group: rustix::process::getpgrp() }
    }
}

/// Starts the program in the namespaces, in the front's process group, with everything else as the user had it.
pub fn start(
    namespaces: &Namespaces,
    command: &[OsString],
    surroundings: Surroundings,
) -> io::Result<std::process::Child> {
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]);
    spawn(namespaces, program, surroundings, false)
}

/// Starts one of the user's scripts: as the program, but without a chance of new privileges, and without the
/// terminal's input.
pub fn start_script(
    namespaces: &Namespaces,
    script: &Path,
    arguments: [&Path; 2],
    environment: &[(&str, OsString)],
    surroundings: Surroundings,
) -> io::Result<std::process::Child> {
    let mut command = Command::new(script);
    // Its output goes to standard error: standard output is the program's alone.
    command.args(arguments).envs(environment.iter().map(|(key, value)| (key, value))).stdin(Stdio::null());
    command.stdout(io::stderr());
    spawn(namespaces, command, surroundings, true)
}

fn spawn(
    namespaces: &Namespaces,
    mut command: Command,
    surroundings: Surroundings,
    no_new_privileges: bool,
) -> io::Result<std::process::Child> {
    // By path, so that a working directory inside a data directory is the one that the mounts show.
    let directory = std::env::current_dir()
        .ok()
        .and_then(|path| std::ffi::CString::new(path.as_os_str().as_bytes()).ok());
    // The kernel gives descriptors' numbers; a raw copy of the reference is needed because the closure must own it.
    let namespaces: *const Namespaces = namespaces;
    let join = SendPointer(namespaces);
    // SAFETY: the closure runs in the child before exec. It makes system calls only: no allocation, no lock. The
    // pointer is valid because the child has a copy of all memory, and `spawn` returns only after the exec.
    unsafe {
        command.pre_exec(move || {
            let join = &join;
            (*join.0).join()?;
            if let Some(directory) = &directory {
                // A directory that was removed is no reason not to run.
                libc::chdir(directory.as_ptr());
            }
            if no_new_privileges {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            }
            // The group is gone if the front was killed at this very moment; then the keeper's must do.
            let _ = rustix::process::setpgid(None, Some(surroundings.group));
            rustix::process::umask(surroundings.umask);
            libc::pthread_sigmask(libc::SIG_SETMASK, &surroundings.signals, std::ptr::null_mut());
            Ok(())
        });
    }
    command.spawn()
}

struct SendPointer(*const Namespaces);

// SAFETY: the pointer is only read, in the child, where a single thread exists.
unsafe impl Send for SendPointer {}
// SAFETY: as above.
unsafe impl Sync for SendPointer {}

/// The exit code that tells how a process ended: its own, or 128 + n for signal n.
pub fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => exit::SIGNAL_BASE.wrapping_add(signal as u8),
        (None, None) => exit::NOT_STARTED,
    }
}

/// The exit code that tells why a program could not be started.
pub fn start_failure(name: &OsStr, error: &io::Error) -> u8 {
    // A directory of PATH that may not be searched makes exec say "permission denied" although nothing was found.
    let nowhere = || {
        let path = std::env::var_os("PATH").unwrap_or_default();
        !name.as_bytes().contains(&b'/') && !std::env::split_paths(&path).any(|dir| dir.join(name).exists())
    };
    if error.kind() == io::ErrorKind::NotFound || nowhere() { exit::NOT_FOUND } else { exit::CANNOT_EXECUTE }
}

/// Reaps children that were orphaned to this process while `program` runs.
pub fn reap_orphans(program: i32) {
    loop {
        let options = rustix::process::WaitIdOptions::EXITED
            | rustix::process::WaitIdOptions::NOHANG
            | rustix::process::WaitIdOptions::NOWAIT;
        // rustix does not tell the pid of such a status, so the system call is made directly.
        // SAFETY: fills a zeroed siginfo_t, which is valid; si_pid is read as the kernel wrote it.
        let pid = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            if libc::waitid(libc::P_ALL, 0, &mut info, options.bits() as libc::c_int) != 0 {
                return;
            }
            info.si_pid()
        };
        if pid == 0 || pid == program {
            return;
        }
        let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG);
    }
}

/// Ends every process that the program left behind (they are children of this process, a subreaper): asks, waits
/// `grace`, and kills, but for those to `spare`. Returns how many there were.
pub fn end_left_behind(grace: Duration, spare: &[Pid]) -> u64 {
    let mut ended = std::collections::HashSet::new();
    let deadline = Instant::now() + grace;
    loop {
        // A dead one may leave children of its own, which become ours in turn.
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        let mut left = children();
        left.retain(|pid| !spare.contains(pid));
        if left.is_empty() {
            return ended.len() as u64;
        }
        let force = Instant::now() >= deadline;
        for pid in left {
            if ended.insert(pid) || force {
                let _ = rustix::process::kill_process(pid, if force { Signal::KILL } else { Signal::TERM });
            }
        }
        // Waits for a child to end, but not beyond the next look.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The children of this process's first thread, which are all that it has forked while it had no other.
pub fn children() -> Vec<Pid> {
    let own = std::process::id();
    let list = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// The child that was started first, if there is any but those to `spare`. Children of the program that became ours were
/// started later than it.
pub fn oldest_child(spare: &[Pid]) -> Option<u32> {
    let started = |pid: &Pid| -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        // The name stands in parentheses and may hold anything; the start is the 20th field behind it (proc(5)).
        stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
    };
    let mut left = children();
    left.retain(|pid| !spare.contains(pid));
    let first =
        left.into_iter().min_by_key(|pid| (started(pid).unwrap_or(u64::MAX), pid.as_raw_nonzero()))?;
    Some(first.as_raw_nonzero().get() as u32)
}

/// Makes orphaned descendants children of this process, or no longer.
pub fn adopt_orphans(adopt: bool) {
    // SAFETY: takes plain values. It can only fail for want of the option, which Linux has had since 3.4.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(adopt), 0, 0, 0) };
}

/// Runs the command in place, on disk, as if Ondeck were not there.
pub fn run_on_disk(command: &[OsString], report: Option<&Path>, why: &str) -> u8 {
    if report.is_none() {
        // Nothing is left to do afterwards, so nothing of us need stay.
        let error = Command::new(&command[0]).args(&command[1..]).exec();
        eprintln!("ondeck run: can't run {}: {error}", Path::new(&command[0]).display());
        return start_failure(&command[0], &error);
    }
    let began = Instant::now();
    // The terminal's signals are the program's; we wait for its end.
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: an empty handler does nothing; unlike SIG_IGN it is not inherited through exec.
        unsafe { libc::signal(signal, ignore as *const () as libc::sighandler_t) };
    }
    let status = Command::new(&command[0]).args(&command[1..]).status();
    let code = match &status {
        Ok(status) => exit_code(*status),
        Err(error) => {
            eprintln!("ondeck run: can't run {}: {error}", Path::new(&command[0]).display());
            start_failure(&command[0], error)
        }
    };
    let mut record = Report {
        command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        exit_code: code,
        fallback: Some(why.to_owned()),
        results_on_disk: true,
        ..Report::default()
    };
    record.program.exit_code = code;
    record.program.signal = status.ok().and_then(|status| status.signal());
    record.program.seconds = began.elapsed().as_secs_f64();
    record.phase("program", began.elapsed(), 0, 0);
    if let Some(path) = report
        && let Err(error) = record.write(path)
    {
        eprintln!("ondeck run: {error:#}");
    }
    code
}

/// A signal handler that does nothing.
pub extern "C" fn ignore(_signal: libc::c_int) {}

/// Points standard descriptors to nowhere.
pub fn redirect(which: std::ops::RangeInclusive<i32>) -> io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for number in which {
        // SAFETY: dup2 onto a standard descriptor, which nothing here owns.
        if unsafe { libc::dup2(null.as_raw_fd(), number) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// A descriptor that becomes readable when the child ends (Linux 5.3).
pub fn open_pid(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(pid as i32)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Sends a signal to a child.
pub fn send_signal(pid: u32, number: i32) {
    // SAFETY: a signal to a child that has not been reaped, so the pid is still its.
    unsafe { libc::kill(pid as libc::pid_t, number) };
}

/// A status that is no process's: the child was reaped by somebody else.
pub const UNKNOWN: i32 = 0xff00;

/// A child's status, if it has ended. It stays there to be collected.
pub fn ended(pid: u32) -> Option<ExitStatus> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: fills a zeroed siginfo_t, which is valid; the fields of a child's end are read as the kernel wrote them.
    let (code, status) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        if libc::waitid(libc::P_PID, pid, &mut info, flags) != 0 || info.si_pid() == 0 {
            return None;
        }
        (info.si_code, info.si_status())
    };
    Some(ExitStatus::from_raw(match code {
        libc::CLD_EXITED => (status & 0xff) << 8,
        libc::CLD_DUMPED => status | 0x80,
        _ => status,
    }))
}

/// Collects a child's status; without `wait` only if it has ended.
pub fn reap(pid: u32, wait: bool) -> Option<ExitStatus> {
    let mut status = 0;
    loop {
        // SAFETY: waits for a child of this process.
        match unsafe { libc::waitpid(pid as libc::pid_t, &mut status, if wait { 0 } else { libc::WNOHANG }) }
        {
            0 => return None,
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Some(ExitStatus::from_raw(UNKNOWN)),
            _ => return Some(ExitStatus::from_raw(status)),
        }
    }
}
