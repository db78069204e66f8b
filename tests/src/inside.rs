//! What the binary does as supervisor, init and holder: the processes that a bed consists of.
//!
//! They are single-threaded, so that they may unshare namespaces, and so that a death signal tied to the parent's
//! thread is one tied to the parent.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs, io};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::{PidfdFlags, Resource, Rlimit, Signal};
use rustix::thread::UnshareFlags;

use crate::control;
use crate::plan::{HostPlan, PREFIX, Plan, Ready, Replaced, SWITCH, SWITCH_ADDRESS, port_of};
use crate::processor;

/// Starts init as process 1 of a new process-id namespace and waits for it.
///
/// Only a child can be in a new process-id namespace, hence this process between the test and init. It stays to be
/// waited for: when it has ended, every process of the bed has.
///
/// # Errors
///
/// If the namespace can't be made, or init fails.
pub fn supervise(control_group: &str) -> Result<()> {
    forbid_core_files()?;
    unshare(UnshareFlags::NEWPID)?;
    let mut init = Command::new(env::current_exe()?);
    init.arg("init");
    die_with_this_process(&mut init)?;
    let status = init.spawn().context("cannot start init")?.wait()?;
    control::remove(control_group);
    processor::remove(control_group);
    ensure!(status.success(), "init failed: {status}");
    Ok(())
}

/// Process 1: builds the hosts, reports them, and lives until its stdin ends.
///
/// # Errors
///
/// If the plan can't be read or a step of building fails. Returning ends all processes of the bed.
pub fn init() -> Result<()> {
    let mut stdin = io::stdin().lock();
    let mut plan = String::new();
    stdin.read_line(&mut plan)?;
    let plan: Plan = serde_json::from_str(&plan).context("not a plan on stdin")?;

    unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWUTS)?;
    // Everything below is this bed's own affair: no mount may reach the machine, or come from it.
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")?;
    mount("proc", Path::new("/proc"), MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC)?;
    for Replaced { path, by } in &plan.replaced {
        rustix::mount::mount_bind(by, path).with_context(|| format!("cannot replace {}", path.display()))?;
    }
    rustix::system::sethostname(SWITCH.as_bytes()).context("cannot set the hostname")?;
    ip([
        "link set lo up".to_owned(),
        "link add bridge0 type bridge".to_owned(),
        format!("address add {SWITCH_ADDRESS}/{PREFIX} dev bridge0"),
        "link set bridge0 up".to_owned(),
    ])?;

    // All at once: making a network namespace is mostly waiting.
    let holders = plan
        .hosts
        .iter()
        .enumerate()
        .map(|(index, host)| start_holder(host, &port_of(index), &plan.control_group))
        .collect::<Result<Vec<Child>>>()?;
    let mut ready = Ready { holders: Vec::new() };
    for (mut holder, host) in holders.into_iter().zip(&plan.hosts) {
        ready.holders.push(holder.id() as i32);
        let mut line = String::new();
        let stdout = holder.stdout.take().context("a holder without stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "host {}: cannot be built, see above", host.name);
    }
    ip((0..plan.hosts.len()).map(|index| format!("link set {} master bridge0 up", port_of(index))))?;

    reap_orphans()?;
    println!("{}", serde_json::to_string(&ready)?);
    // Nobody writes any more: this returns when the test process has closed the pipe or has died.
    io::copy(&mut stdin.by_ref(), &mut io::sink())?;
    // What is frozen can't be killed.
    control::thaw(&plan.control_group);
    Ok(())
}

fn start_holder(host: &HostPlan, port: &str, control_group: &str) -> Result<Child> {
    let mut holder = Command::new(env::current_exe()?);
    holder.args(["host", "--name", &host.name, "--address", &host.address.to_string(), "--port", port]);
    holder.args(["--control-group", control_group]);
    for directory in &host.private_directories {
        holder.arg("--private-directory").arg(directory);
    }
    holder.stdin(Stdio::null()).stdout(Stdio::piped());
    holder.spawn().with_context(|| format!("cannot start the holder of {}", host.name))
}

/// A holder: makes one host's namespaces, says so on stdout, and keeps them for as long as it lives.
///
/// # Errors
///
/// If a step of building fails.
pub fn hold(
    name: &str,
    address: Ipv4Addr,
    port: &str,
    control_group: &str,
    private_directories: &[PathBuf],
) -> Result<()> {
    unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWUTS)?;
    rustix::system::sethostname(name.as_bytes()).context("cannot set the hostname")?;
    mount_run()?;
    control::enter_own(control_group, name)?;
    for directory in private_directories {
        mount("tmpfs", directory, MountFlags::NOSUID | MountFlags::NODEV)?;
    }
    // Process 1 is init, in whose network namespace the bridge is.
    ip([
        "link set lo up".to_owned(),
        format!("link add eth0 type veth peer name {port} netns 1"),
        format!("address add {address}/{PREFIX} dev eth0"),
        "link set eth0 up".to_owned(),
    ])?;
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// An empty `/run`, as after a boot.
fn mount_run() -> Result<()> {
    mount("tmpfs", Path::new("/run"), MountFlags::NOSUID | MountFlags::NODEV)?;
    // Debian's /var/lock points to it.
    fs::create_dir("/run/lock")?;
    fs::set_permissions("/run/lock", fs::Permissions::from_mode(0o1777))?;
    Ok(())
}

/// Mounts a tmpfs or proc on `target`; the mode 0755 matters to tmpfs only.
fn mount(kind: &str, target: &Path, flags: MountFlags) -> Result<()> {
    let options = (kind == "tmpfs").then_some(c"mode=755");
    rustix::mount::mount(kind, target, kind, flags, options)
        .with_context(|| format!("cannot mount {kind} on {}", target.display()))
}

fn unshare(flags: UnshareFlags) -> Result<()> {
    // SAFETY: no flag unshares the file descriptor table, so no thread loses a descriptor that it relies on.
    unsafe { rustix::thread::unshare_unsafe(flags) }.context("cannot make namespaces")
}

/// Runs one `ip` process for all commands.
fn ip(commands: impl IntoIterator<Item = String>) -> Result<()> {
    let commands: Vec<String> = commands.into_iter().collect();
    let mut ip = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run `ip`; install iproute2")?;
    if let Some(mut stdin) = ip.stdin.take() {
        // A failing `ip` stops reading; what it says is worth more than the broken pipe.
        let _ = stdin.write_all((commands.join("\n") + "\n").as_bytes());
    }
    let output = ip.wait_with_output()?;
    if !output.status.success() {
        bail!("ip failed on `{}`: {}", commands.join("; "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Lets the kernel reap all children that end from now on; as process 1 this one inherits every orphan.
fn reap_orphans() -> Result<()> {
    // SAFETY: ignoring a signal installs no handler.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error()).context("cannot ignore SIGCHLD");
    }
    Ok(())
}

/// Keeps this process and all that it starts from writing core files: tests kill and crash programs on purpose, and
/// the files would land in whatever directory these run in, the source tree included.
///
/// # Errors
///
/// If the kernel refuses the limit.
pub(crate) fn forbid_core_files() -> Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).context("cannot forbid core files")
}

/// Has the kernel kill `command`'s process when this one ends. For a process with one thread.
///
/// # Errors
///
/// If the process can't get a descriptor of itself.
pub(crate) fn die_with_this_process(command: &mut Command) -> Result<()> {
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .context("cannot open this process")?;
    // SAFETY: system calls only, in the child before exec.
    unsafe { command.pre_exec(move || kill_me_after(&this)) };
    Ok(())
}

fn kill_me_after(parent: &OwnedFd) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before; getppid can't tell, as it is 0 across process-id namespaces.
    let mut parent = [PollFd::new(parent, PollFlags::IN)];
    if rustix::event::poll(&mut parent, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0 {
        return Err(io::Error::other("the parent has ended"));
    }
    Ok(())
}

/// Whether `name` can be found in the directories of PATH.
pub(crate) fn in_path(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|directory| directory.join(OsStr::new(name)).is_file())
}
