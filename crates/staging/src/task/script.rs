//! Running a user's script: as the user, with an environment of ours, and with limits.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

use ondeck_core::Bytes;

use super::Failure;
use super::pipes::ask_for_limits;
use super::worker::Worker;
use crate::environment;

/// What scripts find in their path.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Open files at first, as a login would have it; some programs try all numbers up to the limit.
const FILES: u64 = 1024;

/// How a script's process says that it could not join its memory group, and must.
const NOT_GROUPED: i32 = libc::ENOTSUP;

impl Worker<'_> {
    /// Runs `script` with a directory of the RAM disk and the one on disk. `kind` is what it is called in messages.
    pub fn run_script(&self, kind: &str, script: &Path, ram: &Path, disk: &Path) -> Result<(), Failure> {
        let script = self.order.request.work_dir.join(script);
        let name = script.display();
        let mut command = Command::new(&script);
        command.args([ram, disk]).env_clear().envs(self.environment(ram)).stdin(Stdio::null());
        let streams = self.log.try_clone().and_then(|out| Ok((out, self.log.try_clone()?)));
        let (out, err) =
            streams.map_err(|error| Failure::passing(format!("the {kind} script {name}: {error}")))?;
        command.stdout(out).stderr(err);
        let memory = self.order.script_memory;
        confine(&mut command, &self.limits, memory, self.order.require_memory_group);
        self.shared.in_script.store(true, Relaxed);
        let status = command.spawn().and_then(|mut child| child.wait());
        self.shared.in_script.store(false, Relaxed);
        let status = status.map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::PermissionDenied => {
                    "; make it executable with chmod +x, for you on this node"
                }
                std::io::ErrorKind::NotFound => "; is it there, and the interpreter of its first line?",
                _ if error.raw_os_error() == Some(NOT_GROUPED) => {
                    "; it could not be put into its memory group, which require_memory_group in the agent's \
                     configuration asks for"
                }
                _ if error.raw_os_error() == Some(libc::ENOEXEC) => {
                    "; its first line must name an interpreter, as in #!/bin/sh"
                }
                _ => "",
            };
            Failure::lasting(format!(
                "the {kind} script {name} can't be executed on {}: {error}{hint}",
                self.order.node
            ))
        })?;
        match (status.code(), status.signal()) {
            (Some(0), _) => Ok(()),
            (Some(code), _) => {
                Err(Failure::lasting(format!("the {kind} script {name} failed with exit code {code}")))
            }
            (None, Some(libc::SIGKILL)) => Err(Failure::lasting(format!(
                "the {kind} script {name} was killed (signal 9); it may take {memory} of memory (script_memory in the \
                 agent's configuration)"
            ))),
            (None, signal) => Err(Failure::lasting(format!(
                "the {kind} script {name} was ended by signal {}",
                signal.unwrap_or_default()
            ))),
        }
    }

    /// What a script finds in its environment, and nothing else.
    fn environment(&self, ram: &Path) -> Vec<(&'static str, std::ffi::OsString)> {
        let directories = self.order.request.work.directories();
        let input = directories.iter().filter(|directory| directory.input);
        let output = directories.iter().filter(|directory| directory.output);
        let mut environment = environment::of_script(
            ram,
            input.map(|directory| directory.path.as_path()),
            output.map(|directory| directory.path.as_path()),
            self.order.request.job.clone().into(),
        );
        environment.extend([
            ("HOME", self.user.home.clone().into()),
            ("USER", self.user.name.clone().into()),
            ("LOGNAME", self.user.name.clone().into()),
            ("PATH", PATH.into()),
        ]);
        environment
    }
}

fn confine(command: &mut Command, limits: &OwnedFd, memory: Bytes, must_be_grouped: bool) {
    let limits = limits.as_raw_fd();
    let set = |resource, value: u64| {
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: a system call with a struct that lives until it has returned.
        unsafe { libc::setrlimit(resource, &limit) }
    };
    // SAFETY: the closure makes system calls only, in a child between fork and exec; the descriptor lives in the parent
    // until the exec.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            libc::umask(0o022);
            // All that is open is closed on exec already, or should be. It can't be closed here: an error of the exec is told
            // through one of them. Linux before 5.11 can't do this.
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            let mut files: libc::rlimit = std::mem::zeroed();
            if libc::getrlimit(libc::RLIMIT_NOFILE, &mut files) == 0 {
                files.rlim_cur = files.rlim_max.min(FILES);
                libc::setrlimit(libc::RLIMIT_NOFILE, &files);
            }
            // Until the exec, no other process of the user's can trace this one or take its descriptors.
            if !ask_for_limits(limits) {
                if must_be_grouped {
                    return Err(std::io::Error::from_raw_os_error(NOT_GROUPED));
                }
                set(libc::RLIMIT_AS, memory.0);
            }
            Ok(())
        });
    }
}
