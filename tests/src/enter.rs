//! What the binary does to run one program in a host.
//!
//! Joining a process-id namespace concerns children only, so a process stays between: it enters the host, starts the
//! program, passes signals on to it and ends as it does, by the same signal if it was one. When it is killed the
//! program is killed too.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{env, io, mem, ptr};

use anyhow::{Context, Result};
use rustix::process::{Gid, Pid, PidfdFlags, Uid};
use rustix::thread::ThreadNameSpaceType;

use crate::control;
use crate::inside::{die_with_this_process, forbid_core_files};

/// Names a file that is to get the program's process id once it runs.
pub const PID_FILE_VARIABLE: &str = "ONDECK_TESTBED_PID_FILE";

/// The exit code for a program that can't be started, as shells have it.
pub const CANNOT_START: u8 = 127;

/// The signals that are passed on, and that a program finds at their defaults.
const PASSED_ON: [libc::c_int; 7] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2, libc::SIGCONT];

/// Who the program runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The supplementary groups, without the primary one.
    pub groups: Vec<u32>,
}

/// Runs `program` in the namespaces of the process `holder` and waits for its end.
///
/// # Errors
///
/// If the holder is gone or the program can't be started.
pub fn enter(
    holder: Pid,
    credentials: Option<Credentials>,
    deadline: Option<Duration>,
    program: &[OsString],
) -> Result<ExitStatus> {
    let directory = env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let mut pid_file = env::var_os(PID_FILE_VARIABLE).map(File::create).transpose()?;
    let signals = block(&PASSED_ON)?;
    forbid_core_files()?;

    let holder = rustix::process::pidfd_open(holder, PidfdFlags::empty()).context("the host is gone")?;
    rustix::thread::move_into_thread_name_spaces(
        holder.as_fd(),
        ThreadNameSpaceType::MOUNT
            | ThreadNameSpaceType::NETWORK
            | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
            | ThreadNameSpaceType::CONTROL_GROUP
            | ThreadNameSpaceType::PROCESS_ID,
    )
    .context("cannot enter the host")?;
    control::join_own()?;
    // Joining a mount namespace leads to its root.
    env::set_current_dir(&directory)
        .with_context(|| format!("the host has no directory {}", directory.display()))?;

    let (name, arguments) = program.split_first().context("no program named")?;
    let mut command = Command::new(name);
    command.args(arguments).env_remove(PID_FILE_VARIABLE);
    // SAFETY: system calls only, in the child before exec. They precede the death signal because a change of user
    // clears it.
    unsafe {
        command.pre_exec(move || {
            reset_signals()?;
            become_user(credentials.as_ref())
        });
    }
    die_with_this_process(&mut command)?;
    let mut child = command.spawn().with_context(|| format!("cannot start {}", name.to_string_lossy()))?;
    if let Some(file) = &mut pid_file {
        writeln!(file, "{}", child.id())?;
    }
    wait(&mut child, &signals, deadline, pass_on)?.context("stopped waiting")
}

/// Ends this process as the program ended.
pub fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // SAFETY: system calls without memory of ours.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            let mut only: libc::sigset_t = mem::zeroed();
            libc::sigemptyset(&mut only);
            libc::sigaddset(&mut only, signal);
            libc::sigprocmask(libc::SIG_UNBLOCK, &only, ptr::null_mut());
            libc::raise(signal);
        }
    }
    std::process::exit(status.code().unwrap_or(1))
}

/// Undoes what this process did to its signals, and what whoever started it did. Tests that run in the background or
/// under nohup have some ignored; a program inherits that, and the blocked ones too.
fn reset_signals() -> io::Result<()> {
    for signal in PASSED_ON {
        // SAFETY: the default disposition is no handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: the set is initialised by sigemptyset before it is used.
    unsafe {
        let mut none: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn become_user(credentials: Option<&Credentials>) -> io::Result<()> {
    if let Some(Credentials { uid, gid, groups }) = credentials {
        let groups: &[u32] = groups;
        // SAFETY: the pointer and the length are of one slice.
        if unsafe { libc::setgroups(groups.len(), groups.as_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        rustix::thread::set_thread_gid(Gid::from_raw(*gid))?;
        rustix::thread::set_thread_uid(Uid::from_raw(*uid))?;
    }
    Ok(())
}

/// Blocks signals, to be waited for, and SIGCHLD with them.
fn block(signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    // SAFETY: the set is initialised by sigemptyset before it is used, and SIG_DFL is no handler. An ignored SIGCHLD
    // would let children end without a status.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        if libc::sigprocmask(libc::SIG_BLOCK, &set, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(set)
    }
}

/// The next of the blocked signals, or `None` after `patience`.
fn next_signal(signals: &libc::sigset_t, patience: Duration) -> io::Result<Option<libc::siginfo_t>> {
    let patience = libc::timespec { tv_sec: patience.as_secs() as _, tv_nsec: patience.subsec_nanos() as _ };
    // SAFETY: siginfo_t is plain data that the kernel fills in; all pointers are to live values.
    let (signal, info) = unsafe {
        let mut info: libc::siginfo_t = mem::zeroed();
        (libc::sigtimedwait(signals, &mut info, &patience), info)
    };
    match signal {
        -1 => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
            error => Err(error),
        },
        _ => Ok(Some(info)),
    }
}

/// Runs `command` to its end, and gives how it ended; `None` if a signal that was sent to this process came first.
/// What the terminal sends is the command's own affair.
///
/// # Errors
///
/// If the command can't be started.
pub fn run_until_signal(mut command: Command) -> Result<Option<ExitStatus>> {
    let signals = block(&PASSED_ON)?;
    let mut child = command.spawn().context("cannot start the command")?;
    Ok(wait(&mut child, &signals, None, |_, _| ControlFlow::Break(()))?)
}

/// Passes a signal on to the child.
fn pass_on(child: &Child, signal: libc::c_int) -> ControlFlow<()> {
    // SAFETY: a system call without memory; the child has not been waited for, so the id is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
    ControlFlow::Continue(())
}

/// Waits for the child. `on_signal` gets the signals that were sent to this process, and may end the waiting.
fn wait(
    child: &mut Child,
    signals: &libc::sigset_t,
    deadline: Option<Duration>,
    on_signal: impl Fn(&Child, libc::c_int) -> ControlFlow<()>,
) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let patience = match deadline {
            Some(deadline) => deadline.saturating_sub(start.elapsed()),
            None => Duration::from_secs(3600),
        };
        if deadline.is_some() && patience.is_zero() {
            eprintln!("ondeck-testbed: killed after {:?}", start.elapsed());
            child.kill()?;
            return child.wait().map(Some);
        }
        // What the kernel sends, as for Ctrl-C, has gone to the whole foreground and so to the program itself.
        if let Some(info) = next_signal(signals, patience)?
            && info.si_signo != libc::SIGCHLD
            && info.si_code <= 0
            && on_signal(child, info.si_signo).is_break()
        {
            return Ok(None);
        }
    }
}
