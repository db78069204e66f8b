//! One host of a bed: running programs in it, looking at it, cutting it off, crashing it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt, fs, io};

use anyhow::{Context, Result};
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::ThreadNameSpaceType;

use crate::daemon::Daemon;
use crate::enter::Credentials;
use crate::observe::{self, Mount, Namespace, Process};
use crate::users::User;
use crate::wait::wait_until;

/// After this [`Host::run`] kills its program: a test that hangs tells less than one that fails.
pub const RUN_DEADLINE: Duration = Duration::from_secs(120);

/// After this [`Host::crash`] gives up on a process that SIGKILL does not end.
const CRASH_DEADLINE: Duration = Duration::from_secs(20);

/// One host. Cloning gives another handle for the same host.
///
/// The methods that observe or harm a host panic when they fail, as tests have no other use for such an error.
#[derive(Clone)]
pub struct Host {
    inner: Arc<HostInner>,
    credentials: Option<Credentials>,
    login: Option<User>,
}

/// What is the same for all handles of a host.
struct HostInner {
    name: String,
    address: Ipv4Addr,
    /// The process that keeps the namespaces.
    holder: Pid,
    /// Identifies the network namespace, and by it the host's processes.
    network: PathBuf,
    /// The mounts that the host came with.
    own_mounts: BTreeSet<u64>,
    /// The bridge's end of the cable, and the process in whose network namespace the bridge is.
    port: String,
    init: Pid,
    /// The `ondeck-testbed` binary.
    binary: PathBuf,
}

impl Host {
    pub(crate) fn new(
        name: &str,
        address: Ipv4Addr,
        holder: Pid,
        port: String,
        init: Pid,
        binary: &Path,
    ) -> Result<Host> {
        let network = Namespace::Network.of(holder).with_context(|| format!("{name} has ended"))?;
        let own_mounts = observe::mounts_of(holder)?.into_iter().map(|mount| mount.id).collect();
        let inner = HostInner {
            name: name.to_owned(),
            address,
            holder,
            network,
            own_mounts,
            port,
            init,
            binary: binary.to_owned(),
        };
        Ok(Host { inner: Arc::new(inner), credentials: None, login: None })
    }

    /// The hostname, which all hosts of the bed resolve.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The address in the bed's network, which all hosts also know by the name.
    pub fn address(&self) -> Ipv4Addr {
        self.inner.address
    }

    /// The id, for the test process, of the process that keeps the host's namespaces.
    pub fn holder(&self) -> Pid {
        self.inner.holder
    }

    /// This host, with programs run as another user without further groups.
    ///
    /// The environment stays root's, HOME included; set what the program looks at.
    pub fn as_user(&self, uid: u32, gid: u32) -> Host {
        self.as_user_in(uid, gid, &[])
    }

    /// This host, with programs run as another user with further groups.
    pub fn as_user_in(&self, uid: u32, gid: u32, groups: &[u32]) -> Host {
        let credentials = Some(Credentials { uid, gid, groups: groups.to_owned() });
        Host { inner: Arc::clone(&self.inner), credentials, login: None }
    }

    /// This host, with programs run as after a login of this user: with all groups, in the home directory, and with
    /// nothing in the environment but PATH, HOME, USER, LOGNAME and SHELL.
    pub fn log_in(&self, user: &User) -> Host {
        let as_user = self.as_user_in(user.uid, user.gid, &user.groups);
        Host { login: Some(user.clone()), ..as_user }
    }

    /// This host, with programs run as root.
    pub fn as_root(&self) -> Host {
        Host { inner: Arc::clone(&self.inner), credentials: None, login: None }
    }

    /// A command that runs `program` in this host. Arguments, environment and streams can be added as to any other;
    /// stdin is /dev/null.
    ///
    /// `program` is looked for in the host, and the working directory must exist there and outside. The child that
    /// [`Command::spawn`] gives is a process that stands between: it passes on the signals HUP, INT, QUIT, TERM,
    /// USR1, USR2 and CONT, ends with the program and as the program did, and when it is killed the program is
    /// killed too, but not the program's own children. Exit code 127: the program could not be started.
    ///
    /// A program that was killed that way is left to the machine's process 1 as a zombie, and the end of the bed waits
    /// until that one reaps it: at once under systemd, after a second under some inits of containers.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.enter(None, program.as_ref())
    }

    /// A [`command`](Host::command) that is killed after [`RUN_DEADLINE`].
    pub(crate) fn bounded_command(&self, program: impl AsRef<OsStr>) -> Command {
        self.enter(Some(RUN_DEADLINE), program.as_ref())
    }

    fn enter(&self, deadline: Option<Duration>, program: &OsStr) -> Command {
        let mut command = enter_command(&self.inner.binary, self.inner.holder);
        if let Some(deadline) = deadline {
            command.arg("--deadline-ms").arg(deadline.as_millis().to_string());
        }
        if let Some(Credentials { uid, gid, groups }) = &self.credentials {
            command.arg("--uid").arg(uid.to_string()).arg("--gid").arg(gid.to_string());
            for group in groups {
                command.arg("--group").arg(group.to_string());
            }
        }
        if let Some(User { name, home, .. }) = &self.login {
            command.env_clear().envs(env::var_os("PATH").map(|path| ("PATH", path)));
            command.env("HOME", home).env("USER", name).env("LOGNAME", name).env("SHELL", "/bin/sh");
            command.current_dir(home);
        }
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }

    /// Runs a program to its end. It is killed after [`RUN_DEADLINE`].
    ///
    /// A child in the background that keeps stdout or stderr open is waited for too: redirect its output.
    ///
    /// # Panics
    ///
    /// If `command_line` is empty.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, command_line: &[S]) -> Ran {
        let (program, arguments) = command_line.split_first().expect("a program to run");
        let mut command = self.bounded_command(program);
        match command.args(arguments).output() {
            Ok(output) => Ran::of(output),
            Err(error) => panic!("cannot run {}: {error}", self.inner.binary.display()),
        }
    }

    /// Runs a program that must succeed, and gives its stdout.
    ///
    /// # Panics
    ///
    /// If it fails, with its stdout and stderr.
    #[track_caller]
    pub fn ok<S: AsRef<OsStr>>(&self, command_line: &[S]) -> String {
        let ran = self.run(command_line);
        let words: Vec<_> = command_line.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        assert!(ran.status.success(), "{}: `{}` failed: {ran:#?}", self.name(), words.join(" "));
        ran.stdout
    }

    /// Runs a script of `sh`, as [`run`](Host::run) does.
    #[track_caller]
    pub fn shell(&self, script: &str) -> Ran {
        self.run(&["sh", "-c", script])
    }

    /// Runs `action` in a thread of the test process whose network is this host's, and gives what it gave. Sockets
    /// that it makes stay in that network; drop them before the bed, as they keep the network alive.
    ///
    /// # Panics
    ///
    /// If the bed has gone, or as `action` does.
    #[track_caller]
    pub fn in_network<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        let ended = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let holder = rustix::process::pidfd_open(self.inner.holder, PidfdFlags::empty())?;
                // Of the four namespaces, the network is the one that a single thread may join.
                rustix::thread::move_into_thread_name_spaces(holder.as_fd(), ThreadNameSpaceType::NETWORK)?;
                io::Result::Ok(action())
            });
            thread.join()
        });
        match ended {
            Ok(Ok(value)) => value,
            Ok(Err(error)) => panic!("cannot enter the network of {}: {error}", self.name()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Starts `command`, made by [`command`](Host::command) of this host, and lets it run; stdout and stderr are
    /// appended to the file `log`. Returns when the program has been executed, not when it is ready.
    ///
    /// # Errors
    ///
    /// If the log can't be opened or the program can't be executed; then the log's end is in the error.
    pub fn spawn_daemon(&self, command: Command, log: &Path) -> Result<Daemon> {
        Daemon::spawn(self.name(), command, log)
    }

    /// A path of this host as the test process can open it, also below the host's own mounts.
    ///
    /// Absolute symbolic links on the way lead to the test process's root.
    pub fn path_from_outside(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.proc("root").join(path.strip_prefix("/").unwrap_or(path))
    }

    fn proc(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.inner.holder.as_raw_nonzero().to_string()).join(name)
    }

    /// The processes in the host, its holder left out: all that are in its network namespace.
    pub fn processes(&self) -> Vec<Process> {
        let mut processes = observe::processes_in(Namespace::Network, &self.inner.network);
        processes.retain(|process| process.pid != self.inner.holder);
        processes
    }

    /// The host's mounts in the order in which they are stacked.
    ///
    /// # Panics
    ///
    /// If the bed has gone.
    #[track_caller]
    pub fn mounts(&self) -> Vec<Mount> {
        match observe::mounts_of(self.inner.holder) {
            Ok(mounts) => mounts,
            Err(error) => panic!("cannot read the mounts of {}: {error}", self.name()),
        }
    }

    /// The mounts that were made since the host was built.
    ///
    /// # Panics
    ///
    /// If the bed has gone.
    #[track_caller]
    pub fn new_mounts(&self) -> Vec<Mount> {
        let mut mounts = self.mounts();
        mounts.retain(|mount| !self.inner.own_mounts.contains(&mount.id));
        mounts
    }

    /// The TCP sockets that listen, sorted.
    ///
    /// # Panics
    ///
    /// If the bed has gone.
    #[track_caller]
    pub fn listening(&self) -> Vec<SocketAddr> {
        match observe::listening_in_network_of(self.inner.holder) {
            Ok(sockets) => sockets,
            Err(error) => panic!("cannot read the sockets of {}: {error}", self.name()),
        }
    }

    /// Pulls the network cable: packets from and to the host are lost from now on, without any error to the senders
    /// but those of time. Its address and its connections to itself stay.
    ///
    /// # Panics
    ///
    /// If `ip` fails.
    #[track_caller]
    pub fn cut(&self) {
        self.set_link("down");
    }

    /// Plugs the network cable in again. Connections may take a second to recover, as the hosts have to find out.
    ///
    /// # Panics
    ///
    /// If `ip` fails.
    #[track_caller]
    pub fn join(&self) {
        self.set_link("up");
    }

    #[track_caller]
    fn set_link(&self, state: &str) {
        let HostInner { binary, init, port, name, .. } = &*self.inner;
        let output = enter_command(binary, *init).args(["--", "ip", "link", "set", port, state]).output();
        match output {
            Ok(output) => assert!(output.status.success(), "cannot set {name}'s link {state}: {output:?}"),
            Err(error) => panic!("cannot run {}: {error}", binary.display()),
        }
    }

    /// Kills every process of the host with SIGKILL, and returns when none is left. Its mounts, its `/run` and its
    /// network stay: see [`reboot`](Host::reboot).
    ///
    /// # Panics
    ///
    /// If a process does not end.
    #[track_caller]
    pub fn crash(&self) {
        wait_until(CRASH_DEADLINE, "every process of the crashed host has ended", || {
            let processes = self.processes();
            for process in &processes {
                observe::signal(process, Namespace::Network, &self.inner.network, Signal::KILL);
            }
            processes.is_empty()
        });
    }

    /// Crashes the host and takes what a real one loses with its memory: all mounts made since it was built, and the
    /// content of `/run`. Private directories stay as a disk would.
    ///
    /// # Panics
    ///
    /// If a process does not end, a mount can't be detached or `/run` can't be emptied.
    #[track_caller]
    pub fn reboot(&self) {
        self.crash();
        let root = self.as_root();
        for mount in self.new_mounts().iter().rev() {
            root.ok(&[OsStr::new("umount"), OsStr::new("--lazy"), mount.target.as_os_str()]);
        }
        if let Err(error) = empty(&self.path_from_outside("/run"), OsStr::new("lock")) {
            panic!("cannot empty /run of {}: {error}", self.name());
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Host({} {})", self.inner.name, self.inner.address)
    }
}

fn enter_command(binary: &Path, holder: Pid) -> Command {
    let mut command = Command::new(binary);
    // A group of its own: what happens in a host is no business of the test process. The kernel sends SIGHUP to all of a group
    // that has lost its parents while one of its processes is stopped.
    command.process_group(0);
    command.arg("enter").arg("--pid").arg(holder.as_raw_nonzero().to_string()).stdin(Stdio::null());
    command
}

/// Removes what is in `directory`, the entry `kept` itself excepted.
fn empty(directory: &Path, kept: &OsStr) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true if entry.file_name() == kept => empty(&entry.path(), OsStr::new(""))?,
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// What a program did.
#[derive(Clone, Debug)]
pub struct Ran {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl Ran {
    pub(crate) fn of(output: Output) -> Ran {
        Ran {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Whether it succeeded.
    pub fn success(&self) -> bool {
        self.status.success()
    }

    /// The exit code, or `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Itself, if it succeeded.
    ///
    /// # Panics
    ///
    /// If it failed, with all it wrote.
    #[track_caller]
    pub fn assert_success(&self) -> &Ran {
        assert!(self.success(), "failed: {self:#?}");
        self
    }

    /// Itself, if it exited with `code`.
    ///
    /// # Panics
    ///
    /// If it did not, with all it wrote.
    #[track_caller]
    pub fn assert_code(&self, code: i32) -> &Ran {
        assert_eq!(self.code(), Some(code), "{self:#?}");
        self
    }

    /// Itself, if stderr has `text`.
    ///
    /// # Panics
    ///
    /// If it has not, with all it wrote.
    #[track_caller]
    pub fn assert_says(&self, text: &str) -> &Ran {
        assert!(self.stderr.contains(text), "no `{text}` in {self:#?}");
        self
    }
}
