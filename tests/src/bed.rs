//! Building and dropping the whole.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{env, fmt};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal};
use tempfile::TempDir;

use crate::control;
use crate::host::Host;
use crate::inside::in_path;
use crate::munge::Munge;
use crate::observe::{self, Namespace, Process};
use crate::plan::{
    HostPlan, MAX_HOSTS, Plan, Ready, Replaced, SLURM_DIRECTORY, SWITCH, SWITCH_ADDRESS, address_of, port_of,
    slurm_directory_in,
};
use crate::processor::CpuLimit;
use crate::users::{self, User};

/// Names the `ondeck-testbed` binary, for tests that can't find it beside themselves.
pub const BINARY_VARIABLE: &str = "ONDECK_TESTBED";
/// How the temporary directories begin; the process id of their maker and a random part follow.
pub const DIRECTORY_PREFIX: &str = "ondeck-testbed.";

/// After this a bed whose processes don't end is left to the kernel, with a warning.
const END_DEADLINE: Duration = Duration::from_secs(30);

/// `bin/as`.
const AS: &str = "\
#!/bin/sh
# as USER COMMAND...: runs a command as another user, in the user's home directory.
user=${1:?usage: as USER COMMAND...}
shift
home=$(getent passwd \"$user\" | cut -d: -f6)
[ -n \"$home\" ] || { echo \"as: no user $user\" >&2; exit 1; }
cd \"$home\" || exit 1
exec setpriv --reuid=\"$user\" --regid=\"$(id -g \"$user\")\" --init-groups \\
    env HOME=\"$home\" USER=\"$user\" LOGNAME=\"$user\" \"$@\"
";

/// Several hosts on one machine. They end when this is dropped, or when the process that built it ends.
pub struct Testbed {
    hosts: Vec<Host>,
    /// Init's own namespaces, as a host: the bridge is in its network.
    switch: Host,
    munge: Mutex<Option<Munge>>,
    /// Identifies the process-id namespace.
    process_ids: PathBuf,
    /// Init and the holders: the processes that the bed itself consists of.
    own: Vec<Pid>,
    users: Vec<User>,
    /// Ends when all processes of the bed have. Its stdin is the pipe that init watches.
    supervisor: Child,
    init: OwnedFd,
    dir: TempDir,
}

/// Says what a [`Testbed`] consists of.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    names: Vec<String>,
    private_directories: Vec<PathBuf>,
    binary: Option<PathBuf>,
}

impl Builder {
    /// Adds one host. The first has the address 10.77.0.1, the others 10.77.0.11, 10.77.0.12 and so on.
    #[must_use]
    pub fn host(mut self, name: &str) -> Builder {
        self.names.push(name.to_owned());
        self
    }

    /// Adds `count` hosts, called `prefix` and a number from 1.
    #[must_use]
    pub fn hosts(mut self, prefix: &str, count: usize) -> Builder {
        self.names.extend((1..=count).map(|number| format!("{prefix}{number}")));
        self
    }

    /// Gives each host a tmpfs of its own on this directory, owned by root with mode 0755. A relative path is made in
    /// [`Testbed::dir`]; one that begins with a slash must exist.
    #[must_use]
    pub fn private_directory(mut self, path: impl Into<PathBuf>) -> Builder {
        self.private_directories.push(path.into());
        self
    }

    /// The `ondeck-testbed` binary. Without it: what the variable `ONDECK_TESTBED` names, this process itself, or a
    /// file in the directory of this process or the one above, as Cargo lays them out.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Builder {
        self.binary = Some(path.into());
        self
    }

    /// Builds the hosts.
    ///
    /// # Errors
    ///
    /// If the user is not root, a program is missing, the names are no hostnames or not distinct, or the kernel
    /// refuses a step. Nothing is left then.
    pub fn build(self) -> Result<Testbed> {
        check()?;
        check_names(&self.names)?;
        let binary = self.binary.map_or_else(find_binary, Ok)?;
        let dir = tempfile::Builder::new()
            .prefix(&format!("{DIRECTORY_PREFIX}{}.", std::process::id()))
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .context("cannot make a directory in /tmp")?;
        let users = users::make(dir.path())?;
        let plan = write_plan(&self.names, &self.private_directories, &users, dir.path())?;

        let log = dir.path().join("testbed.log");
        let mut supervisor = start(&binary, &log, &plan.control_group)?;
        let ready = exchange(&mut supervisor, &plan)
            .and_then(|ready| Testbed::assemble(&mut supervisor, &plan, &ready, &binary));
        match ready {
            Ok(Assembled { hosts, switch, process_ids, own, init }) => {
                let bed = Testbed {
                    hosts,
                    switch,
                    munge: Mutex::default(),
                    process_ids,
                    own,
                    users,
                    supervisor,
                    init,
                    dir,
                };
                bed.write_launchers(&binary)?;
                Ok(bed)
            }
            Err(error) => {
                drop(supervisor.stdin.take());
                let _ = supervisor.wait();
                let said = fs::read_to_string(&log).unwrap_or_default();
                Err(error.context(format!("cannot build the testbed: {}", said.trim())))
            }
        }
    }
}

/// What [`Testbed::assemble`] finds out about the running processes.
struct Assembled {
    hosts: Vec<Host>,
    switch: Host,
    process_ids: PathBuf,
    own: Vec<Pid>,
    init: OwnedFd,
}

impl Testbed {
    /// A bed without hosts yet.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn assemble(supervisor: &mut Child, plan: &Plan, ready: &Ready, binary: &Path) -> Result<Assembled> {
        let supervisor = Pid::from_child(supervisor);
        let process_ids =
            Namespace::ProcessIdOfChildren.of(supervisor).context("the supervisor has ended")?;
        let processes = observe::processes_in(Namespace::ProcessId, &process_ids);
        let outside = |inside: i32| {
            let process =
                processes.iter().find(|process| process.pid_inside.as_raw_nonzero().get() == inside);
            process.map(|process| process.pid).context("a process of the bed has ended")
        };
        let init = outside(1)?;
        let mut hosts = Vec::new();
        for (index, (host, &holder)) in plan.hosts.iter().zip(&ready.holders).enumerate() {
            hosts.push(Host::new(&host.name, host.address, outside(holder)?, port_of(index), init, binary)?);
        }
        let switch = Host::new(SWITCH, SWITCH_ADDRESS, init, "bridge0".to_owned(), init, binary)?;
        let own = hosts.iter().map(Host::holder).chain([init]).collect();
        let init = rustix::process::pidfd_open(init, PidfdFlags::empty()).context("init has ended")?;
        Ok(Assembled { hosts, switch, process_ids, own, init })
    }

    /// The host of this name.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[track_caller]
    pub fn host(&self, name: &str) -> &Host {
        match self.hosts.iter().find(|host| host.name() == name) {
            Some(host) => host,
            None => panic!("the testbed has no host {name}"),
        }
    }

    /// All hosts, in the order in which they were added.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The bed's temporary directory, the same in all hosts, with mode 0755. It goes with the bed.
    ///
    /// It stands for the disk that the nodes of a cluster share: it has the users' home directories and a directory
    /// `scratch`, see [`User`]. In its directory `bin` are two scripts for root: `on HOST COMMAND` runs a command in
    /// another host, `as USER COMMAND` runs one as another user.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The ordinary users that every host knows by name.
    pub fn users(&self) -> &[User] {
        &self.users
    }

    /// The user of this name: alice or bob.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[track_caller]
    pub fn user(&self, name: &str) -> &User {
        match self.users.iter().find(|user| user.name == name) {
            Some(user) => user,
            None => panic!("the testbed has no user {name}"),
        }
    }

    /// All processes in the bed that are not the bed's own, also those that left their host's network namespace.
    pub fn processes(&self) -> Vec<Process> {
        let mut processes = observe::processes_in(Namespace::ProcessId, &self.process_ids);
        processes.retain(|process| !self.own.contains(&process.pid));
        processes
    }

    /// The socket of a munged for all hosts, which is started at the first call. It belongs to no host, so that it
    /// survives the crash of any.
    ///
    /// # Errors
    ///
    /// If munge is not installed or munged can't be started.
    ///
    /// # Panics
    ///
    /// If munged does not answer.
    pub fn munge(&self) -> Result<PathBuf> {
        let mut munge = self.munge.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let started = match munge.take() {
            Some(started) => started,
            None => Munge::start(&self.switch, &self.dir().join("munge"))?,
        };
        Ok(munge.insert(started).socket.clone())
    }

    /// Holds a process of the bed to so many percent of one processor until what is returned is dropped.
    ///
    /// # Errors
    ///
    /// If this machine's control groups can't do that: see [`crate::processor::check`].
    pub fn limit_cpu(&self, process: Pid, percent: u64) -> Result<CpuLimit> {
        let name = self.dir().file_name().context("a directory in /tmp")?.to_string_lossy();
        CpuLimit::new(&name, process, percent)
    }

    /// Writes `bin/on` and `bin/as`. `on` names the holders as the processes in the bed know them.
    fn write_launchers(&self, binary: &Path) -> Result<()> {
        let mut on = "#!/bin/sh\n# on HOST COMMAND...: runs a command in another host of the testbed.\n\
            host=${1:?usage: on HOST COMMAND...}\nshift\ncase $host in\n"
            .to_owned();
        let processes = observe::processes_in(Namespace::ProcessId, &self.process_ids);
        for host in &self.hosts {
            let holder = processes.iter().find(|process| process.pid == host.holder());
            let holder = holder.with_context(|| format!("{} has ended", host.name()))?.pid_inside;
            on += &format!("    {}) holder={} ;;\n", host.name(), holder.as_raw_nonzero());
        }
        on += "    *) echo \"on: no host $host\" >&2; exit 1 ;;\nesac\n";
        on += &format!("exec '{}' enter --pid \"$holder\" -- \"$@\"\n", binary.display());

        let directory = self.dir().join("bin");
        fs::create_dir(&directory)?;
        for (name, script) in [("on", on.as_str()), ("as", AS)] {
            let path = directory.join(name);
            fs::write(&path, script)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // Closing the pipe would do; the signal also does when another thread is about to exec with a copy of it.
        drop(self.supervisor.stdin.take());
        if let Some(name) = self.dir.path().file_name() {
            // What is frozen can't be killed.
            control::thaw(&name.to_string_lossy());
        }
        let _ = rustix::process::pidfd_send_signal(&self.init, Signal::KILL);
        let start = Instant::now();
        while let Ok(None) = self.supervisor.try_wait() {
            if start.elapsed() > END_DEADLINE {
                eprintln!("ondeck-testbed: some processes do not end; left: {:#?}", self.processes());
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl fmt::Debug for Testbed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Testbed").field("hosts", &self.hosts).field("dir", &self.dir()).finish()
    }
}

/// Whether a bed can be built here at all.
pub(crate) fn check() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "the testbed makes namespaces and mounts: run it as root");
    ensure!(in_path("ip"), "the testbed needs the command `ip`: install iproute2");
    Ok(())
}

fn check_names(names: &[String]) -> Result<()> {
    ensure!(!names.is_empty(), "a testbed needs a host");
    ensure!(names.len() <= MAX_HOSTS, "a testbed has at most {MAX_HOSTS} hosts, not {}", names.len());
    for (index, name) in names.iter().enumerate() {
        let letters = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !letters || name.is_empty() || name.len() > 63 || name.starts_with('-') {
            bail!("`{name}` is no hostname: up to 63 letters, digits and hyphens");
        }
        ensure!(name != "localhost" && name != SWITCH, "the hostname {name} is taken");
        ensure!(!names[..index].contains(name), "the hostname {name} is there twice");
    }
    Ok(())
}

fn find_binary() -> Result<PathBuf> {
    const NAME: &str = "ondeck-testbed";
    if let Some(path) = env::var_os(BINARY_VARIABLE) {
        return Ok(path.into());
    }
    let this = env::current_exe().context("cannot tell the path of this process")?;
    if this.file_name().is_some_and(|name| name == NAME) {
        return Ok(this);
    }
    // A test is in target/debug/deps, the binary in target/debug.
    let beside = this.ancestors().skip(1).take(2).map(|directory| directory.join(NAME));
    beside.into_iter().find(|path| path.is_file()).with_context(|| {
        format!("no {NAME} near {}; build it, or name it in {BINARY_VARIABLE}", this.display())
    })
}

/// Writes the files and directories that the hosts share, and says what init is to build.
fn write_plan(names: &[String], private_directories: &[PathBuf], users: &[User], dir: &Path) -> Result<Plan> {
    let mut directories = Vec::new();
    for directory in private_directories {
        if directory.is_relative() {
            fs::create_dir_all(dir.join(directory))?;
        }
        let directory = dir.join(directory);
        ensure!(directory.is_dir(), "{} cannot be private: no such directory", directory.display());
        directories.push(directory);
    }
    let hosts: Vec<HostPlan> = names
        .iter()
        .enumerate()
        .map(|(index, name)| HostPlan {
            name: name.clone(),
            address: address_of(index),
            private_directories: directories.clone(),
        })
        .collect();
    let mut table = format!("{} localhost\n{SWITCH_ADDRESS} {SWITCH}\n", Ipv4Addr::LOCALHOST);
    for host in &hosts {
        table += &format!("{} {}\n", host.address, host.name);
    }
    let passwd = users::passwd(&fs::read_to_string("/etc/passwd")?, users);
    let group = users::group(&fs::read_to_string("/etc/group")?, users);
    let etc = dir.join("etc");
    users::make_directory(&etc, 0, 0, 0o755)?;
    let mut replaced = Vec::new();
    for (name, content) in [("hosts", table), ("passwd", passwd), ("group", group)] {
        let by = etc.join(name);
        users::write_public(&by, content.as_bytes())?;
        replaced.push(Replaced { path: Path::new("/etc").join(name), by });
    }
    // Already here, and empty until it is needed: mounts that a host is built with survive its reboot.
    let by = slurm_directory_in(dir);
    users::make_directory(&by, 0, 0, 0o755)?;
    if Path::new(SLURM_DIRECTORY).is_dir() {
        replaced.push(Replaced { path: SLURM_DIRECTORY.into(), by });
    }
    let control_group = dir.file_name().context("a directory in /tmp")?.to_string_lossy().into_owned();
    Ok(Plan { hosts, replaced, control_group })
}

/// Starts the supervisor. Std makes the pipe close-on-exec, so that no other child holds it open.
fn start(binary: &Path, log: &Path, control_group: &str) -> Result<Child> {
    let mut command = Command::new(binary);
    command.args(["supervise", "--control-group", control_group]).current_dir("/").env_clear();
    if let Some(path) = env::var_os("PATH") {
        command.env("PATH", path);
    }
    // A group of its own: Ctrl-C is for the test process, whose end is enough.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(log)?).process_group(0);
    command.spawn().with_context(|| format!("cannot run {}", binary.display()))
}

/// Hands the plan to init and waits for its answer.
fn exchange(supervisor: &mut Child, plan: &Plan) -> Result<Ready> {
    const ENDED: &str = "init ended before the hosts were ready";
    let stdin = supervisor.stdin.as_mut().context("no pipe to init")?;
    writeln!(stdin, "{}", serde_json::to_string(plan)?).context(ENDED)?;
    let stdout = supervisor.stdout.take().context("no pipe from init")?;
    let mut answer = String::new();
    BufReader::new(stdout).read_line(&mut answer)?;
    serde_json::from_str(&answer).context(ENDED)
}
