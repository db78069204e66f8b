//! Starting a process of a RAM disk, or running a command to its end.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use super::RuntimeDir;
use super::ending::kill;
use super::known::{Process, describe, note_end, tail};
use crate::EngineError;

/// Servers are given up after everything else when memory runs out, but before the agent: killed, they take the data
/// of a job along; without the agent nobody would clear up.
const SERVER_OOM_SCORE: &str = "-900";

impl RuntimeDir {
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

    /// As [`RuntimeDir::run`], for a command that speaks to these servers: it would wait in vain for one that has ended.
    ///
    /// # Errors
    /// As [`RuntimeDir::run`]; [`EngineError::Exited`] as soon as one of the servers has ended. The command is killed then.
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
        // What it makes in the runtime directory may hold keys.
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
}
