//! `ondeck doctor`: what works on this machine, and what to do about the rest. Everything is tried, nothing guessed.
//!
//! - `slurm`: what the scheduler needs from Slurm
//! - `layouts`: where files can be striped

mod layouts;
mod slurm;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ondeck_agent::task::{MemoryGroup, restraint};
use ondeck_api::Config;
use ondeck_api::munge::Munge;
use ondeck_core::{Bytes, EngineKind, exit};
use ondeck_ramdisk::{memory, probe};
use serde::Serialize;

use crate::state;

/// Check what works on this machine and what to do about the rest
///
/// Builds a small RAM disk and an overlay as `ondeck run` would, and takes them down again.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 `ondeck run` and `ondeck stage` work here, or with --slurm the scheduler; 1 something that \
                  they need does not."
)]
pub struct DoctorArgs {
    /// Check what the scheduler needs instead: Slurm's settings, the configuration, the agents (best as root on the
    /// scheduler's machine)
    #[arg(long)]
    slurm: bool,

    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print the findings as a JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// It works, with a limit or more slowly.
    Limited,
    /// It does not work.
    Missing,
}

#[derive(Serialize)]
struct Finding {
    what: &'static str,
    state: State,
    detail: String,
    /// What to do about it.
    remedy: Option<String>,
}

/// Runs the command.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let findings =
        if args.slurm { slurm::examine(args.config.as_deref()) } else { examine(args.config.as_deref()) };
    let mut out = std::io::stdout().lock();
    let written = if args.json {
        serde_json::to_writer_pretty(&mut out, &findings).map_err(Into::into).and_then(|()| writeln!(out))
    } else {
        findings.iter().try_for_each(|finding| print(&mut out, finding))
    };
    crate::heard(written);
    let broken = findings.iter().any(|finding| finding.state == State::Missing);
    ExitCode::from(if broken { exit::SOME_FAILED } else { exit::OK })
}

fn print(out: &mut impl Write, finding: &Finding) -> std::io::Result<()> {
    let mark = match finding.state {
        State::Ok => "ok     ",
        State::Limited => "limited",
        State::Missing => "MISSING",
    };
    writeln!(out, "{mark}  {:<24} {}", finding.what, finding.detail)?;
    match &finding.remedy {
        Some(remedy) => writeln!(out, "         {:<24} -> {remedy}", ""),
        None => Ok(()),
    }
}

fn examine(config: Option<&Path>) -> Vec<Finding> {
    let root = rustix::process::geteuid().is_root();
    let mut findings = vec![kernel(), ram()];
    // Before any thread exists: building namespaces forks.
    findings.extend(ram_disk(root));
    // Nobody else can mount one.
    findings.extend(root.then(cache));
    findings.push(state_directory());
    findings.push(manifests());
    findings.push(open_files());
    findings.push(batch_system());
    findings.extend(many_nodes(config));
    findings.extend(layouts::examine(config));
    findings
}

fn finding(what: &'static str, state: State, detail: impl Into<String>, remedy: Option<&str>) -> Finding {
    Finding { what, state, detail: detail.into(), remedy: remedy.map(ToOwned::to_owned) }
}

fn kernel() -> Finding {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 11) {
        finding("kernel", State::Ok, format!("Linux {release}"), None)
    } else {
        let remedy =
            "overlays of ordinary users need Linux 5.11; as root, or with --existing copy, runs work";
        finding("kernel", State::Limited, format!("Linux {release}"), Some(remedy))
    }
}

fn ram() -> Finding {
    match memory::free_ram() {
        Ok(free) => {
            let cgroup = free.cgroup.as_ref().map_or(String::new(), |(left, path)| {
                format!(", {left} left in the memory cgroup {}", path.display())
            });
            let detail =
                format!("{} usable ({} available on the machine{cgroup})", free.usable(), free.machine);
            let small = free.usable().0 < 256 << 20;
            let remedy = small
                .then_some("there is hardly room for a RAM disk; free memory or raise the cgroup's limit");
            finding("free RAM", if small { State::Limited } else { State::Ok }, detail, remedy)
        }
        Err(error) => finding("free RAM", State::Missing, error.to_string(), Some("mount /proc")),
    }
}

fn ram_disk(root: bool) -> Vec<Finding> {
    let scratch = std::env::temp_dir().join(format!("ondeck-doctor-{}", std::process::id()));
    if let Err(error) = fs::create_dir(&scratch) {
        let detail = format!("can't make a scratch directory {}: {error}", scratch.display());
        return vec![finding("RAM disk", State::Missing, detail, Some("set TMPDIR to a directory of yours"))];
    }
    let probe = probe::probe(&scratch);
    for dir in ["ramdisk", "lower", ""] {
        let _ = fs::remove_dir(scratch.join(dir));
    }
    let mut findings = Vec::new();
    let features = match probe.ram_disk {
        Ok(features) => features,
        Err(error) => {
            let remedy = if root {
                "root needs CAP_SYS_ADMIN; a container must be given it".into()
            } else {
                namespaces_remedy()
            };
            findings.push(Finding {
                what: "RAM disk",
                state: State::Missing,
                detail: error.to_string(),
                remedy: Some(remedy),
            });
            return findings;
        }
    };
    let how = if root {
        "as root, in a private mount namespace"
    } else {
        "in a user namespace, with your own uid and gid"
    };
    findings.push(finding("RAM disk", State::Ok, format!("tmpfs {how}"), None));
    findings.push(if features.huge_pages {
        finding("huge pages", State::Ok, "tmpfs huge=within_size", None)
    } else {
        finding(
            "huge pages",
            State::Limited,
            "refused by this kernel",
            Some("large files are about half as fast in RAM"),
        )
    });
    findings.push(match (features.no_swap, root) {
        (true, _) => finding("no swap", State::Ok, "tmpfs noswap", None),
        (false, true) => {
            finding("no swap", State::Limited, "needs Linux 6.4", Some("the RAM disk may be swapped out"))
        }
        (false, false) => finding(
            "no swap",
            State::Limited,
            "root only",
            Some("the RAM disk may be swapped out; without swap it can't be"),
        ),
    });
    findings.push(match probe.overlay {
        Ok(()) if root => finding("overlay", State::Ok, "existing output directories show through", None),
        Ok(()) => finding(
            "overlay",
            State::Limited,
            "works for files of your own user and primary group",
            Some("elsewhere existing content is copied into RAM; existing directories can't be renamed (EXDEV)"),
        ),
        Err(error) => finding(
            "overlay",
            State::Limited,
            format!("refused: {error}"),
            Some("use --existing copy for output directories that hold something, or empty ones"),
        ),
    });
    findings.push(if probe.user_xattrs {
        finding("extended attributes", State::Ok, "user xattrs on the RAM disk", None)
    } else {
        finding(
            "extended attributes",
            State::Limited,
            "tmpfs has no user xattrs before Linux 6.6",
            Some("files that have some are reported when they are staged in"),
        )
    });
    findings
}

/// Names the switch that is off, if it can be found.
/// `ondeck cache`, which neither runs nor copies need.
fn cache() -> Finding {
    let abilities = match ondeck_cachefs::serve::probe() {
        Ok(abilities) => abilities,
        Err(error) => {
            let remedy = "`modprobe fuse` makes /dev/fuse; `ondeck cache` mounts by it";
            return finding("cache", State::Limited, format!("can't be mounted: {error}"), Some(remedy));
        }
    };
    let maps = if abilities.kernel.maps_direct { "" } else { "; writes go through the page cache as well" };
    match abilities.passthrough {
        Ok(()) => finding("cache", State::Ok, "by FUSE; resident files are read by the kernel", None),
        Err(error) => finding(
            "cache",
            State::Limited,
            format!("by FUSE; resident files are read by the server ({error}){maps}"),
            Some("Linux 6.9 and newer reads them by itself, which is faster"),
        ),
    }
}

fn namespaces_remedy() -> String {
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    if read("/proc/sys/user/max_user_namespaces").as_deref() == Some("0") {
        return "ask the administrator for: sysctl user.max_user_namespaces=10000".into();
    }
    if read("/proc/sys/kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "ask the administrator for: sysctl kernel.unprivileged_userns_clone=1".into();
    }
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        return "ask the administrator for an AppArmor profile that allows ondeck user namespaces, or for: sysctl \
                kernel.apparmor_restrict_unprivileged_userns=0"
            .into();
    }
    "user namespaces are refused here (by a container's seccomp filter?); run as root, or with --fallback disk".into()
}

fn state_directory() -> Finding {
    match state::runs() {
        Ok(path) => {
            let detail = path.display().to_string();
            // Only there while runs are.
            let _ = fs::remove_dir(&path);
            finding("state of runs", State::Ok, detail, None)
        }
        Err(error) => finding("state of runs", State::Missing, format!("{error:#}"), None),
    }
}

fn manifests() -> Finding {
    match state::manifest_for(Path::new("/"), None) {
        Ok(path) => {
            let dir = path.parent().unwrap_or(&path).display().to_string();
            finding("manifests", State::Ok, dir, None)
        }
        Err(error) => {
            finding("manifests", State::Limited, format!("{error:#}"), Some("or copy with --no-manifest"))
        }
    }
}

fn open_files() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    if limit >= 1024 {
        finding("open files", State::Ok, format!("{limit} allowed"), None)
    } else {
        let remedy = "very deep trees are staged more slowly; raise it with ulimit -n";
        finding("open files", State::Limited, format!("{limit} allowed"), Some(remedy))
    }
}

fn batch_system() -> Finding {
    let detail = match (std::env::var("SLURM_JOB_ID"), std::env::var("SLURM_JOB_END_TIME")) {
        (Ok(id), Ok(_)) => format!("inside Slurm job {id}; its time limit is known"),
        (Ok(id), Err(_)) => {
            let remedy =
                "export SLURM_JOB_END_TIME (seconds since 1970) so that results are staged out in time";
            let detail = format!("inside Slurm job {id}; its time limit is not in the environment");
            return finding("batch system", State::Limited, detail, Some(remedy));
        }
        _ => "not inside a Slurm job".to_owned(),
    };
    finding("batch system", State::Ok, detail, None)
}

/// What RAM disks of many nodes need: programs of the engines, MUNGE, an agent.
fn many_nodes(config: Option<&Path>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (kind, what) in [(EngineKind::Gluster, "engine gluster"), (EngineKind::Ceph, "engine ceph")] {
        let programs = ondeck_ramdisk::engine(kind).programs();
        let missing: Vec<_> = programs
            .iter()
            .filter(|(program, _)| ondeck_agent::node::find_program(program).is_none())
            .collect();
        findings.push(if missing.is_empty() {
            finding(what, State::Ok, "its programs are installed", None)
        } else {
            let names: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
            let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
            packages.dedup();
            let remedy = format!("on nodes that shall use it: apt-get install {}", packages.join(" "));
            finding(what, State::Limited, format!("without {}", names.join(", ")), Some(&remedy))
        });
    }
    let (config, wrong) = match Config::load(config) {
        Ok(config) => (config, None),
        Err(error) => (Config::default(), Some(error.to_string())),
    };
    if let Some(wrong) = wrong {
        findings.push(finding(
            "configuration",
            State::Limited,
            wrong,
            Some("mend it: docs/engines.md explains the keys"),
        ));
    }
    if rustix::process::geteuid().is_root() {
        findings.extend(scripts(&config.agent.state, config.agent.require_memory_group));
    }
    let munge = Munge::new(config.munge_socket.clone());
    findings.push(match munge.encode(b"", None, std::time::Duration::ZERO) {
        Ok(_) => finding("MUNGE", State::Ok, config.munge_socket.display().to_string(), None),
        Err(error) => {
            let remedy =
                "agents are reached over TCP with it: apt-get install munge, the same key on all nodes";
            finding("MUNGE", State::Limited, error.to_string(), Some(remedy))
        }
    });
    findings.push(privileged_ports());
    let socket = config.agent.socket.display().to_string();
    findings.push(match std::os::unix::net::UnixStream::connect(&config.agent.socket) {
        Ok(_) => finding("agent", State::Ok, format!("answers at {socket}"), None),
        Err(_) => {
            let remedy = "for RAM disks of many nodes run `ondeck agent` as root; `ondeck run` needs none";
            finding("agent", State::Limited, format!("none at {socket}"), Some(remedy))
        }
    });
    findings
}

/// What bounds users' scripts, which an agent runs: tried from this process's control groups, as an agent would that is
/// started here.
fn scripts(state: &Path, is_required: bool) -> Vec<Finding> {
    // Before the agent's first start its directory is not there yet.
    let state = if state.exists() { state } else { Path::new("/") };
    let memory = match MemoryGroup::make(state, Bytes(16 << 20)) {
        Some(group) => {
            group.remove();
            finding("memory of scripts", State::Ok, "bounded by a memory group", None)
        }
        None if is_required => finding(
            "memory of scripts",
            State::Missing,
            "no memory group can be made here, so scripts are refused (require_memory_group)",
            Some("give the agent a memory controller that it may write to in /sys/fs/cgroup"),
        ),
        None => finding(
            "memory of scripts",
            State::Limited,
            "no memory group can be made here: the address space of each process of a script is bounded, not their number",
            Some(
                "give the agent a memory controller that it may write to in /sys/fs/cgroup, or have scripts refused: \
                 require_memory_group = true in [agent]",
            ),
        ),
    };
    let missing = restraint::missing();
    let others = if missing.is_empty() {
        finding(
            "processes of scripts",
            State::Ok,
            "bounded, and with less CPU than servers of RAM disks",
            None,
        )
    } else {
        let mut without = Vec::new();
        if missing.contains(&"pids") {
            without.push("no controller `pids`: only the number of each user's processes is bounded");
        }
        if missing.contains(&"cpu") {
            without.push("no controller `cpu`: scripts run with a nice value");
        }
        let remedy = "give the agent these controllers in /sys/fs/cgroup, to write to";
        finding("processes of scripts", State::Limited, without.join("; "), Some(remedy))
    };
    vec![memory, others]
}

/// Root calls daemons from a port below 1024, which proves that it is root only where users can't use one.
fn privileged_ports() -> Finding {
    const WHAT: &str = "ports below 1024";
    let (path, usual) = ("/proc/sys/net/ipv4/ip_unprivileged_port_start", 1024);
    let first: u32 = match fs::read_to_string(path).map(|text| text.trim().parse()) {
        Ok(Ok(first)) => first,
        // Before Linux 4.11.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => usual,
        other => return finding(WHAT, State::Limited, format!("{path} can't be read: {other:?}"), None),
    };
    if first >= usual {
        return finding(WHAT, State::Ok, "for root alone, by which daemons know root", None);
    }
    let detail = format!("users may use them from {first} on, and so pass for root with what root has sent");
    let remedy =
        "sysctl net.ipv4.ip_unprivileged_port_start=1024: on compute nodes and machines of administrators";
    finding(WHAT, State::Limited, detail, Some(remedy))
}
