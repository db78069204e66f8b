//! Where it is measured: a testbed with an agent in every host, and the commands that build and
//! destroy RAM disks there.
//!
//! `ctl` mounts, `n1` to `n8` lend their RAM, `p1` and `p2` do so with `preallocate = true`. All of
//! them are namespaces of one machine, so more nodes add no hardware: figures for more nodes show
//! what the engine's own work costs, and nothing of what a cluster gains.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ondeck_bench::size::{GIB, MIB, show};
use ondeck_testbed::{CpuLimit, Daemon, Host, Pid, Process, Ran, Testbed};
use serde_json::Value;

use crate::machine::{self, is_executable};
use crate::ramdisk::load::Load;
use crate::tools::Programs;
use crate::{interrupt, scratch};

/// Where the RAM disks are mounted.
pub const CLIENT: &str = "ctl";
/// The most nodes that a RAM disk lies on.
pub const MOST_NODES: usize = 8;
/// The name of every RAM disk.
const NAME: &str = "bench";
/// The device in a directory, in the configuration of every node.
pub const DISK: &str = "disk";
/// The port of all agents.
const PORT: u16 = 7272;
/// How long an agent may take to listen.
const STARTING: Duration = Duration::from_secs(20);
/// RAM that a measurement leaves alone, beside what it fills.
const SPARE: u64 = 3 * GIB;

/// What is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub engine: &'static str,
    pub nodes: usize,
    /// On the nodes that touch all pages first.
    pub preallocate: bool,
    /// The devices of data and metadata, where that is not just the RAM.
    pub devices: Option<(&'static str, Option<&'static str>)>,
}

impl Recipe {
    pub const fn new(engine: &'static str, nodes: usize) -> Self {
        Self { engine, nodes, preallocate: false, devices: None }
    }

    pub fn title(&self) -> String {
        format!("{}, {} {}", self.engine, self.nodes, if self.nodes == 1 { "node" } else { "nodes" })
    }

    fn hosts(&self) -> Vec<String> {
        let prefix = if self.preallocate { "p" } else { "n" };
        (1..=self.nodes).map(|number| format!("{prefix}{number}")).collect()
    }

    /// A tmpfs is seen on its own node only.
    fn client(&self) -> String {
        if self.engine == "tmpfs" { self.hosts().remove(0) } else { CLIENT.to_owned() }
    }

    /// The command line after `ondeck`, as a reader would type it.
    fn create_arguments(&self, size: u64, mount: &str) -> Vec<String> {
        let mut words: Vec<String> = vec!["ramdisk".into(), "create".into(), NAME.into()];
        words.extend(["--nodes".into(), self.hosts().join(",")]);
        words.extend(["--engine".into(), self.engine.into()]);
        words.extend(["--size".into(), format!("{}MiB", size / MIB)]);
        words.extend(["--mount".into(), format!("{}:{mount}", self.client())]);
        if let Some((data, metadata)) = self.devices {
            words.extend(["--device".into(), data.into()]);
            if let Some(metadata) = metadata {
                words.extend(["--metadata-device".into(), metadata.into()]);
            }
        }
        words
    }

    /// The same in one line, for the page.
    pub fn command(&self, size: u64) -> String {
        format!("ondeck {} --json", self.create_arguments(size, "/mnt").join(" "))
    }

    fn destroy_arguments(&self) -> Vec<String> {
        ["ramdisk", "destroy", NAME, "--nodes", &self.hosts().join(",")].map(String::from).to_vec()
    }

    pub fn destroy_command(&self) -> String {
        format!("ondeck {} --json", self.destroy_arguments().join(" "))
    }
}

/// A step of building or destroying, as the command itself reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    pub name: String,
    pub seconds: f64,
}

/// One run of a command that builds or destroys.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Wall time of the whole command.
    pub seconds: f64,
    pub steps: Vec<StepTime>,
}

/// A RAM disk that was built and is mounted. It is destroyed by [`AgentTestbed::destroy`], or with the bed.
pub struct MountedRamDisk<'a> {
    pub recipe: Recipe,
    pub timed: Timed,
    /// As the command printed it.
    pub layout: Value,
    /// Where it is mounted.
    pub client: &'a Host,
    pub mount: PathBuf,
}

/// The hosts with their agents. Everything ends when this is dropped.
pub struct AgentTestbed {
    /// Before the bed, so that they end first: an agent without its host would only complain.
    _agents: Vec<Daemon>,
    bed: Testbed,
    ondeck: PathBuf,
    /// This program, for the load.
    own: PathBuf,
}

impl AgentTestbed {
    pub fn new() -> Result<Self> {
        let ondeck = find_ondeck()?;
        eprintln!("ondeck: {}", ondeck.display());
        let mut builder = Testbed::builder().host(CLIENT).hosts("n", MOST_NODES).hosts("p", 2);
        if let Some(testbed) = beside("ondeck-testbed")
            && std::env::var_os("ONDECK_TESTBED").is_none()
        {
            builder = builder.binary(testbed);
        }
        let bed = builder.build().context(
            "cannot build the testbed (its binary is made by cargo build --release -p ondeck-testbed, or \
             named by ONDECK_TESTBED)",
        )?;
        // Copies: a build that goes on beside the benchmark would replace them halfway.
        let copy = |from: &Path, name: &str| -> Result<PathBuf> {
            let to = bed.dir().join(name);
            fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(to)
        };
        let ondeck = copy(&ondeck, "ondeck")?;
        let own = copy(&std::env::current_exe().context("cannot find this program")?, "ondeck-bench")?;
        let agents = start_agents(&bed, &ondeck)?;
        Ok(Self { _agents: agents, bed, ondeck, own })
    }

    pub fn dir(&self) -> &Path {
        self.bed.dir()
    }

    pub fn host(&self, name: &str) -> &Host {
        self.bed.host(name)
    }

    pub fn ondeck(&self) -> &Path {
        &self.ondeck
    }

    /// Holds a process to so many percent of one processor until what is returned is dropped.
    pub fn limit_cpu(&self, process: Pid, percent: u64) -> Result<CpuLimit> {
        self.bed.limit_cpu(process, percent)
    }

    /// Where the agent of a host keeps a RAM disk that was built here, as the host sees it.
    pub fn runtime_dir(host: &str) -> PathBuf {
        format!("/run/ondeck/{host}/ramdisks/{NAME}").into()
    }

    /// The agents' filesystem for the device [`DISK`].
    pub fn disk_label(&self) -> String {
        machine::filesystem(self.dir())
    }

    /// Runs a command in a host to its end, which must be a good one. Gives its wall time too.
    pub fn run(&self, host: &Host, command_line: &[String]) -> Result<(f64, Ran)> {
        interrupt::check()?;
        let began = Instant::now();
        let ran = host.run(command_line);
        let seconds = began.elapsed().as_secs_f64();
        interrupt::check()?;
        if !ran.success() {
            let said: Vec<&str> = ran.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
            // The last line of a program that failed says why more often than the first.
            let said = said.last().copied().unwrap_or("it said nothing");
            bail!("{}: {}: {said}", command_line[0].rsplit('/').next().unwrap_or(""), ran.status);
        }
        Ok((seconds, ran))
    }

    fn run_ondeck(&self, host: &Host, arguments: &[String]) -> Result<(f64, Value)> {
        let mut command_line = vec![self.ondeck.to_string_lossy().into_owned()];
        command_line.extend_from_slice(arguments);
        command_line.extend(["--json".into(), "--config".into(), text(&config_path(&self.bed, host))]);
        let (seconds, ran) = self.run(host, &command_line)?;
        Ok((seconds, serde_json::from_str(&ran.stdout).context("ondeck did not print JSON")?))
    }

    /// Builds a RAM disk and mounts it.
    pub fn create(&self, recipe: Recipe, size: u64) -> Result<MountedRamDisk<'_>> {
        let client = self.host(&recipe.client());
        let mount = self.dir().join("mnt");
        // Always from the same host, so that the way of the requests is the same for all engines.
        let (seconds, answer) =
            self.run_ondeck(self.host(CLIENT), &recipe.create_arguments(size, &text(&mount)))?;
        let steps = answer["steps"].as_array().context("no steps")?;
        let steps = steps
            .iter()
            .map(|step| {
                let name = step["name"].as_str().context("a step without a name")?.to_owned();
                Ok(StepTime { name, seconds: step["seconds"].as_f64().context("a step without time")? })
            })
            .collect::<Result<_>>()?;
        let layout = answer["layout"].clone();
        Ok(MountedRamDisk { recipe, timed: Timed { seconds, steps }, layout, client, mount })
    }

    /// Destroys it. Its steps are those of the slowest node each.
    pub fn destroy(&self, built: MountedRamDisk) -> Result<Timed> {
        let (seconds, answer) = self.run_ondeck(self.host(CLIENT), &built.recipe.destroy_arguments())?;
        let mut steps: Vec<StepTime> = Vec::new();
        for node in answer["nodes"].as_object().context("no nodes")?.values() {
            for step in node["steps"].as_array().into_iter().flatten() {
                let name = step[0].as_str().context("a step without a name")?;
                let seconds = step[1].as_f64().context("a step without time")?;
                match steps.iter_mut().find(|known| known.name == name) {
                    Some(known) => known.seconds = known.seconds.max(seconds),
                    None => steps.push(StepTime { name: name.to_owned(), seconds }),
                }
            }
        }
        Ok(Timed { seconds, steps })
    }

    /// Destroys what a failed measurement left.
    pub fn reset(&self) -> Result<()> {
        for recipe in
            [Recipe::new("gluster", MOST_NODES), Recipe { preallocate: true, ..Recipe::new("gluster", 2) }]
        {
            // A fault here shows again when the next RAM disk can't be built.
            if let Err(error) = self.run_ondeck(self.host(CLIENT), &recipe.destroy_arguments()) {
                interrupt::check()?;
                eprintln!("cannot clear up: {error:#}");
            }
        }
        Ok(())
    }

    /// Runs a load in a host.
    pub fn load(&self, host: &Host, arguments: &[&str]) -> Result<Load> {
        let mut command_line = vec![text(&self.own), "load".into()];
        command_line.extend(arguments.iter().map(|&argument| argument.to_owned()));
        let (_, ran) = self.run(host, &command_line)?;
        Load::parse(&ran.stdout)
    }

    /// Writes a file of `bytes` in blocks of 1 MiB, and gives it time to settle.
    pub fn write(&self, host: &Host, path: &Path, bytes: u64) -> Result<Load> {
        self.load(host, &["write", &text(path), "--bytes", &bytes.to_string()])
    }

    pub fn read(&self, host: &Host, path: &Path) -> Result<Load> {
        self.load(host, &["read", &text(path)])
    }

    /// The processes of all RAM disks.
    pub fn marked(&self) -> Vec<Marked> {
        marked(self.bed.processes())
    }

    pub fn marked_on(&self, host: &Host) -> Vec<Marked> {
        marked(host.processes())
    }

    /// Refuses what the machine has no RAM for; the note says what was asked for.
    pub fn fit(&self, wanted: u64, times: u64, least: u64) -> Result<(u64, Option<String>)> {
        let available = machine::memory("MemAvailable").saturating_sub(SPARE) / times.max(1);
        if wanted <= available {
            return Ok((wanted, None));
        }
        let fits = available / (256 * MIB) * (256 * MIB);
        ensure!(fits >= least, "{} of free RAM is too little", show(machine::memory("MemAvailable")));
        Ok((fits, Some(format!("Scaled down from {} to {} to fit the free RAM.", show(wanted), show(fits)))))
    }

    /// What running anything in a host costs, which is part of every wall time here.
    pub fn entering(&self) -> Result<f64> {
        let host = self.host(CLIENT);
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            best = best.min(self.run(host, &["true".to_owned()])?.0);
        }
        Ok(best)
    }

    /// Removes a file or tree as a host sees it.
    pub fn remove(&self, host: &Host, path: &Path) -> Result<()> {
        scratch::remove(&host.path_from_outside(path))
    }
}

/// A process that an agent started for a RAM disk.
pub struct Marked {
    /// What it is to it: `brick`, `client`.
    pub role: String,
    pub process: Process,
}

fn marked(processes: Vec<Process>) -> Vec<Marked> {
    let with_role = |process: Process| {
        let role = process.environment().remove("ONDECK_ROLE")?;
        Some(Marked { role, process })
    };
    processes.into_iter().filter_map(with_role).collect()
}

/// A path as an argument. All of ours are in the bed's directory, whose name is ASCII.
pub fn text(path: &Path) -> String {
    String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()
}

/// `ONDECK`, else what lies beside this program, else the newest build of the workspace.
fn find_ondeck() -> Result<PathBuf> {
    if std::env::var_os("ONDECK").is_none()
        && let Some(beside) = beside("ondeck")
    {
        return Ok(beside);
    }
    let programs = Programs::find()?;
    let found = programs.ondeck().map(Path::to_owned);
    found.context("ondeck is not built; run cargo build --release, or name the binary in ONDECK")
}

fn beside(name: &str) -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(name);
    is_executable(&path).then_some(path)
}

fn config_path(bed: &Testbed, host: &Host) -> PathBuf {
    bed.dir().join(format!("{}.toml", host.name()))
}

fn start_agents(bed: &Testbed, ondeck: &Path) -> Result<Vec<Daemon>> {
    let munge = bed.munge().context("cannot start munged, by which agents know each other")?;
    let mut agents = Vec::new();
    for host in bed.hosts() {
        let name = host.name();
        let disk = bed.dir().join(format!("disk-{name}"));
        fs::create_dir(&disk)?;
        let config = format!(
            "munge_socket = {munge:?}\n\
             [agent]\n\
             listen = \"{}\"\n\
             # The hosts share their process ids, and an agent ends whatever it finds under its name.\n\
             state = \"/run/ondeck/{name}\"\n\
             administrators = [\"root@{CLIENT}\"]\n\
             [agent.device.ram]\n\
             kind = \"ram\"\n\
             preallocate = {}\n\
             [agent.device.{DISK}]\n\
             kind = \"dir\"\n\
             path = {disk:?}\n\
             capacity = \"16GiB\"\n",
            host.address(),
            name.starts_with('p'),
        );
        let path = config_path(bed, host);
        fs::write(&path, config).with_context(|| format!("cannot write {}", path.display()))?;
        let mut agent = host.command(ondeck);
        agent.args(["agent", "--config"]).arg(&path);
        agents.push(host.spawn_daemon(agent, &bed.dir().join(format!("{name}.log")))?);
    }
    let began = Instant::now();
    for (host, agent) in bed.hosts().iter().zip(&agents) {
        while !host.listening().iter().any(|socket| socket.port() == PORT) {
            interrupt::check()?;
            ensure!(agent.is_running(), "the agent of {} ended: {}", host.name(), agent.log());
            ensure!(
                began.elapsed() < STARTING,
                "the agent of {} does not listen: {}",
                host.name(),
                agent.log()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(agents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_the_command_that_was_run() {
        let recipe = Recipe { devices: Some(("disk", Some("ram"))), ..Recipe::new("ceph", 2) };
        assert_eq!(
            recipe.command(2 * GIB),
            "ondeck ramdisk create bench --nodes n1,n2 --engine ceph --size 2048MiB --mount ctl:/mnt \
             --device disk --metadata-device ram --json"
        );
        assert_eq!(recipe.destroy_command(), "ondeck ramdisk destroy bench --nodes n1,n2 --json");
    }

    #[test]
    fn a_tmpfs_is_mounted_on_its_own_node() {
        let recipe = Recipe { preallocate: true, ..Recipe::new("tmpfs", 1) };
        assert!(recipe.command(GIB).contains("--nodes p1 --engine tmpfs --size 1024MiB --mount p1:/mnt"));
    }
}
