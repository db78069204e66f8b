//! `ondeck-testbed`: a shell in a small cluster of namespaces. Also, by hidden subcommands, the processes that such a
//! cluster consists of.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use ondeck_testbed::enter::{CANNOT_START, Credentials};
use ondeck_testbed::{Pid, SlurmSetup, Testbed, enter, inside, wait_until};

/// Several hosts on one machine, as namespaces: nothing is left of them when this command ends.
#[derive(Parser)]
#[command(name = "ondeck-testbed", version)]
struct Arguments {
    #[command(subcommand)]
    action: TestbedCommand,
}

#[derive(Subcommand)]
enum TestbedCommand {
    /// Build the hosts ctl, n1, n2, ... and give a shell on ctl; needs root.
    Shell {
        /// How many hosts besides ctl.
        #[arg(long, default_value_t = 4)]
        hosts: usize,
        /// Start munged, for Slurm.
        #[arg(long)]
        with_munge: bool,
        /// Start an agent on every host but ctl, which may build RAM disks; needs ONDECK, the path of the binary, and
        /// munged.
        #[arg(long, requires = "with_munge")]
        with_agents: bool,
        /// Add the hosts c1, c2, ... cN, and start a Slurm of which they are the nodes and ctl the controller. Then
        /// the variables that docs/admin.md begins with are set; with ONDECK, the path of the binary, `ondeck` is in
        /// PATH.
        #[arg(long, value_name = "N", default_value_t = 0)]
        with_slurm: usize,
    },
    #[command(hide = true)]
    Supervise {
        #[arg(long)]
        control_group: String,
    },
    #[command(hide = true)]
    Init,
    #[command(hide = true)]
    Host {
        #[arg(long)]
        name: String,
        #[arg(long)]
        address: Ipv4Addr,
        #[arg(long)]
        port: String,
        #[arg(long)]
        control_group: String,
        #[arg(long)]
        private_directory: Vec<PathBuf>,
    },
    #[command(hide = true)]
    Enter {
        #[arg(long)]
        pid: i32,
        #[arg(long, requires = "gid")]
        uid: Option<u32>,
        #[arg(long, requires = "uid")]
        gid: Option<u32>,
        #[arg(long, requires = "uid")]
        group: Vec<u32>,
        #[arg(long)]
        deadline_ms: Option<u64>,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match act(Arguments::parse().action) {
        Ok(code) => code,
        Err(Failure { error, code }) => {
            eprintln!("ondeck-testbed: {error:#}");
            ExitCode::from(code)
        }
    }
}

struct Failure {
    error: anyhow::Error,
    code: u8,
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure { error, code: 1 }
    }
}

fn act(action: TestbedCommand) -> Result<ExitCode, Failure> {
    match action {
        TestbedCommand::Shell { hosts, with_munge, with_agents, with_slurm } => {
            return Ok(shell(hosts, with_munge, with_agents, with_slurm)?);
        }
        TestbedCommand::Supervise { control_group } => inside::supervise(&control_group)?,
        TestbedCommand::Init => inside::init()?,
        TestbedCommand::Host { name, address, port, control_group, private_directory } => {
            inside::hold(&name, address, &port, &control_group, &private_directory)?;
        }
        TestbedCommand::Enter { pid, uid, gid, group, deadline_ms, program } => {
            let holder = Pid::from_raw(pid).context("not a process id")?;
            let credentials = uid.zip(gid).map(|(uid, gid)| Credentials { uid, gid, groups: group });
            let deadline = deadline_ms.map(Duration::from_millis);
            let status = enter::enter(holder, credentials, deadline, &program)
                .map_err(|error| Failure { error, code: CANNOT_START })?;
            enter::end_as(status)
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A shell on ctl. The bed goes when the shell ends, or when a signal ends this process: it is waited for, so that
/// the temporary directory goes too.
fn shell(hosts: usize, with_munge: bool, with_agents: bool, slurm_nodes: usize) -> Result<ExitCode> {
    let bed = Testbed::builder().host("ctl").hosts("n", hosts).hosts("c", slurm_nodes).build()?;
    let bin = bed.dir().join("bin");
    let path = std::env::var("PATH").unwrap_or_default();
    let startup = bed.dir().join("bashrc");
    fs::write(&startup, "PS1='\\u@\\h:\\w\\$ '\n")?;

    let mut bash = bed.host("ctl").command("bash");
    bash.arg("--rcfile").arg(&startup).stdin(Stdio::inherit());
    bash.env("PATH", format!("{}:{path}", bin.display())).env("BED", bed.dir());
    let mut more = String::new();
    if with_munge {
        let socket = bed.munge()?;
        more += &format!("munge answers at {}, $MUNGE_SOCKET\n", socket.display());
        if with_agents {
            bash.env("ONDECK_CONFIG", start_agents(&bed, &socket)?);
            more += "`ondeck ramdisk nodes` says what the agents of the hosts lend\n";
        }
        bash.env("MUNGE_SOCKET", &socket);
        for host in bed.hosts() {
            // Where everybody looks for it.
            let link = format!("mkdir -p /run/munge && ln -s {} /run/munge/munge.socket.2", socket.display());
            host.shell(&link).assert_success();
        }
    }
    // Its daemons end with the shell.
    let mut slurm = None;
    if slurm_nodes > 0 {
        let nodes = (1..=slurm_nodes).map(|number| format!("c{number}"));
        let started = slurm.insert(bed.slurm(SlurmSetup::new("ctl", nodes))?);
        bash.env("SLURM_CONF", started.conf());
        if !with_agents {
            bash.env("ONDECK_CONFIG", started.conf().with_file_name("ondeck.toml"));
            bash.env("SCRATCH", bed.dir().join("scratch")).env("STATE", bed.dir().join("scheduler"));
            if let Some(binary) = std::env::var_os("ONDECK") {
                copy_binary(&bed, Path::new(&binary))?;
                more += "No agent and no scheduler runs yet: docs/admin.md starts them, block by block.\n";
            }
        }
        more += &format!(
            "Slurm has the nodes c1 to c{slurm_nodes}: `sinfo`, `squeue`. Its logs are in $BED/log. Jobs are an \
             ordinary user's, alice's or bob's:\n    as alice srun -N {slurm_nodes} hostname\n    \
             as alice sbatch --wrap 'sleep 100'\n"
        );
    }
    if std::io::stdin().is_terminal() {
        let last = bed.hosts().last().map_or("", |host| host.name());
        eprintln!(
            "This is ctl (10.77.0.1), one of {} hosts from ctl to {last}; `cat /etc/hosts` lists them.\n\
             `on n1 COMMAND` runs a command on n1. The disk and /tmp are shared; mounts, /run and the network are \
             each host's own.\n`as alice COMMAND` runs one as an ordinary user.\n{more}`exit` ends all hosts and every process in them.",
            bed.hosts().len()
        );
    }
    let status = enter::run_until_signal(bash)?;
    let code = status.and_then(|status| u8::try_from(status.code()?).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

/// Puts the binary into the PATH of the shell.
fn copy_binary(bed: &Testbed, binary: &Path) -> Result<PathBuf> {
    let ondeck = bed.dir().join("bin/ondeck");
    fs::copy(binary, &ondeck).with_context(|| format!("can't copy {}", binary.display()))?;
    Ok(ondeck)
}

/// Starts an agent on every host but the first, from which administrators call; returns their configuration.
fn start_agents(bed: &Testbed, munge_socket: &Path) -> Result<PathBuf> {
    let binary = std::env::var_os("ONDECK").context("set ONDECK to the path of the binary")?;
    let ondeck = copy_binary(bed, Path::new(&binary))?;
    let nodes: Vec<String> = bed.hosts()[1..].iter().map(|host| format!("{:?}", host.name())).collect();
    let config = bed.dir().join("ondeck.toml");
    let text = format!(
        "nodes = [{}]\nmunge_socket = {munge_socket:?}\n\n[agent]\nlisten = \"auto\"\nadministrators = [\"root@ctl\"]\n\n\
         [agent.device.ram]\nkind = \"ram\"\ncapacity = \"4GiB\"\n",
        nodes.join(", ")
    );
    fs::write(&config, text)?;
    for host in &bed.hosts()[1..] {
        let mut agent = host.command(ondeck.as_os_str());
        agent.arg("agent").arg("--config").arg(&config);
        let log = bed.dir().join(format!("agent-{}.log", host.name()));
        // It ends with the bed, not with its handle.
        std::mem::forget(host.spawn_daemon(agent, &log)?);
        let address = std::net::SocketAddr::from((host.address(), 7272));
        let answers = || host.in_network(|| std::net::TcpStream::connect(address).is_ok());
        wait_until(Duration::from_secs(10), "an agent to listen", answers);
    }
    Ok(config)
}
