//! A cluster as a site has one: `ctl` with slurmctld and the scheduler, `c1` to `c4` that compute, `r1`
//! to `r4` that lend RAM; Slurm and its jobs are real. All of it ends when this is dropped.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ondeck_testbed::{Daemon, Host, Signal, Slurm, SlurmSetup, Testbed, User};
use serde_json::Value;

use crate::interrupt;
use crate::machine::is_executable;
use crate::scheduler::word;
use crate::tools::Programs;

/// Compute nodes, and RSA nodes.
pub const NODES: usize = 4;
/// What a step of a job may take, on a machine that is out of breath.
pub const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(20);
const AGENT_PORT: u16 = 7272;

/// How a cluster's Slurm knows of RAM disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integration {
    /// By Prolog and Epilog, and holds.
    Outside,
    /// By its burst buffers.
    Inside,
    /// Its burst buffers do nothing, and there is neither scheduler nor agent.
    None,
}

/// Functions that Slurm asks for, of which none does anything.
const NO_FUNCTIONS: &str = "\
for _, name in ipairs({ 'job_process', 'setup', 'data_in', 'test_data_in', 'real_size', 'paths', 'pre_run', 'post_run', \
'data_out', 'test_data_out', 'job_teardown', 'get_status' }) do
    _G['slurm_bb_' .. name] = function() return slurm.SUCCESS, '' end
end
function slurm_bb_pools()
    return slurm.SUCCESS, '{\"pools\":[{\"id\":\"none\",\"quantity\":0,\"granularity\":1048576}]}'
end
";
/// As docs/admin.md has it; the log tells how long each function took.
const BURST_BUFFER_CONF: &str =
    "Directive=RSA\nStageInTimeout=172800\nStageOutTimeout=172800\nOtherTimeout=300\n";
const BURST_BUFFERS: &str =
    "BurstBufferType=burst_buffer/lua\nDebugFlags=BurstBuffer\nSlurmctldDebug=verbose\n";
/// Slurm's own pace instead of the testbed's: a job that is submitted is looked at after 3 s at most, the whole queue once a minute.
pub const USUAL_PACE: &str = "SchedulerParameters=bf_continue\n";

/// What differs between the clusters of the benchmarks.
pub struct Setup<'a> {
    /// What each RSA node lends.
    pub lends: &'a str,
    /// Where jobs may have directories that are mounted over; the bed's scratch directory if there is none.
    pub disk: Option<&'a Path>,
    /// Lines for the part `[scheduler]`.
    pub scheduler: &'a str,
    pub integration: Integration,
    /// Lines for slurm.conf.
    pub slurm: &'a str,
}

pub struct Cluster {
    /// Before the bed, so that they end first.
    daemons: Vec<Daemon>,
    pub slurm: Slurm,
    bed: Testbed,
    ondeck: PathBuf,
    /// This program, for jobs.
    pub own: PathBuf,
}

impl Cluster {
    pub fn new(setup: &Setup) -> Result<Cluster> {
        let programs = Programs::find()?;
        let ondeck =
            programs.ondeck().context("ondeck is not built; run cargo build --release, or set ONDECK")?;
        eprintln!("ondeck: {}", ondeck.display());
        let mut builder = Testbed::builder().host("ctl").hosts("r", NODES).hosts("c", NODES);
        let this = std::env::current_exe().context("cannot find this program")?;
        let testbed = this.with_file_name("ondeck-testbed");
        if is_executable(&testbed) && std::env::var_os("ONDECK_TESTBED").is_none() {
            builder = builder.binary(testbed);
        }
        let bed = builder.build().context(
            "cannot build the testbed (its binary is made by cargo build --release -p ondeck-testbed, or named by \
             ONDECK_TESTBED)",
        )?;
        let dir = bed.dir().to_owned();
        // Copies: a build that goes on beside the benchmark would replace them halfway.
        let copy = |from: &Path, name: &str| -> Result<PathBuf> {
            let to = dir.join(name);
            fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(to)
        };
        let (ondeck, own) = (copy(ondeck, "ondeck")?, copy(&this, "ondeck-bench")?);
        let scratch = dir.join("scratch");
        write_config(&bed, setup, setup.disk.unwrap_or(&scratch))?;
        fs::File::create(dir.join("hooks"))?;
        let hook = |name: &str| -> Result<PathBuf> {
            let path = dir.join(format!("slurm-{name}"));
            let dir = dir.display();
            // One line a run: hook, job, host, nanoseconds; short enough to be appended in one piece.
            let script = format!(
                "#!/bin/sh\nbegan=$(date +%s%N)\n\
                 {dir}/ondeck {name} --config {dir}/ondeck.toml >>{dir}/{name}.log 2>&1\nstatus=$?\n\
                 echo \"{name} $SLURM_JOB_ID $(uname -n) $(($(date +%s%N) - began))\" >>{dir}/hooks\nexit $status\n"
            );
            fs::write(&path, script)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
            Ok(path)
        };
        let (prolog, epilog) = (hook("prolog")?, hook("epilog")?);
        let names = |prefix: &str| (1..=NODES).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>();
        let (conf, files) = burst_buffers(&dir, setup.integration)?;
        let conf = conf + setup.slurm;
        let hooks = setup.integration != Integration::None;
        let job_submit = dir.join("job_submit.lua");
        fs::write(&job_submit, include_str!("../../../slurm/job_submit.lua"))?;
        let slurm = bed.slurm(SlurmSetup {
            job_submit: hooks.then_some(job_submit),
            prolog: hooks.then_some(prolog),
            epilog: hooks.then_some(epilog),
            conf,
            files,
            ..SlurmSetup::new("ctl", names("c"))
        })?;
        let mut cluster = Cluster { daemons: Vec::new(), slurm, bed, ondeck, own };
        if !hooks {
            return Ok(cluster);
        }
        for name in names("r").iter().chain(&names("c")) {
            cluster.start(name, "agent", name)?;
        }
        cluster.start("ctl", "serve", "ondeck")?;
        for name in names("r").iter().chain(&names("c")) {
            let host = cluster.bed.host(name);
            wait("an agent listens", || {
                Ok(host.listening().iter().any(|socket| socket.port() == AGENT_PORT).then_some(()))
            })?;
        }
        wait("the scheduler knows its nodes", || {
            let Ok(status) = cluster.status() else { return Ok(None) };
            let up = status["nodes"]
                .as_array()
                .is_some_and(|nodes| nodes.len() == NODES && nodes.iter().all(|node| node["state"] == "up"));
            Ok(up.then_some(()))
        })?;
        Ok(cluster)
    }

    fn start(&mut self, host: &str, what: &str, config: &str) -> Result<()> {
        let host = self.bed.host(host);
        let mut command = host.command(&self.ondeck);
        command.arg(what).arg("--config").arg(self.bed.dir().join(format!("{config}.toml")));
        let log = self.bed.dir().join("log").join(format!("{what}-{}.log", host.name()));
        let daemon = host.spawn_daemon(command, &log)?;
        self.daemons.push(daemon);
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        self.bed.dir()
    }

    pub fn user(&self) -> &User {
        self.bed.user("alice")
    }

    pub fn host(&self, name: &str) -> &Host {
        self.bed.host(name)
    }

    /// Runs `ondeck` on `ctl` as root; what it printed as JSON, which it was asked for.
    pub fn ondeck(&self, arguments: &[&str]) -> Result<Value> {
        let printed = self.printed(&[arguments, &["--json"]].concat())?;
        serde_json::from_str(&printed).context("ondeck did not print JSON")
    }

    /// Runs `ondeck` on `ctl` as root; what it printed.
    pub fn printed(&self, arguments: &[&str]) -> Result<String> {
        let (ondeck, config) = (word(&self.ondeck), word(&self.bed.dir().join("ondeck.toml")));
        let mut line = vec![ondeck.as_str()];
        line.extend(arguments);
        line.extend(["--config", &config]);
        let ran = self.bed.host("ctl").run(&line);
        interrupt::check()?;
        if !ran.success() {
            bail!("ondeck {}: {}", arguments.join(" "), ran.stderr.trim());
        }
        Ok(ran.stdout)
    }

    pub fn status(&self) -> Result<Value> {
        self.ondeck(&["status"])
    }

    /// All that is known of a job.
    pub fn story(&self, job: u32) -> Result<Story> {
        Ok(Story(self.ondeck(&["job", "show", &job.to_string()])?))
    }

    /// Submits a script of the user's.
    pub fn submit(&self, script: &str, options: &[&str]) -> Result<u32> {
        interrupt::check()?;
        let ran = self.slurm.try_submit(self.user(), script, options);
        interrupt::check()?;
        ensure!(ran.success(), "sbatch: {}", ran.stderr.trim());
        ran.stdout.trim().parse().context("sbatch printed no number")
    }

    /// Keeps all compute nodes busy, so that what is submitted next is on deck.
    pub fn block(&self) -> Result<u32> {
        let nodes = format!("--nodes={NODES}");
        let job =
            self.submit("#!/bin/sh\nexec sleep 3600\n", &[&nodes, "--exclusive", "--output=/dev/null"])?;
        wait("the nodes are busy", || Ok((self.slurm_state(job)? == "RUNNING").then_some(())))?;
        Ok(job)
    }

    pub fn cancel(&self, job: u32) -> Result<()> {
        let ran = self.slurm.client(&["scancel", &job.to_string()]);
        interrupt::check()?;
        ensure!(ran.success(), "scancel: {}", ran.stderr.trim());
        Ok(())
    }

    fn slurm_state(&self, job: u32) -> Result<String> {
        let ran = self.slurm.client(&[
            "squeue",
            "--noheader",
            "--states=all",
            "-j",
            &job.to_string(),
            "-O",
            "State:40",
        ]);
        interrupt::check()?;
        Ok(ran.stdout.trim().to_owned())
    }

    /// Has the scheduler stop where it is, or go on.
    pub fn stop_scheduler(&self, stops: bool) {
        let signal = if stops { Signal::STOP } else { Signal::CONT };
        if let Some(scheduler) = self.daemons.last() {
            scheduler.kill(signal);
        }
    }

    /// Waits until Slurm has ended a job, and it must have ended well.
    pub fn wait_completed(&self, job: u32) -> Result<()> {
        wait(&format!("job {job} ends"), || {
            let state = self.slurm_state(job)?;
            let ended =
                ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL"].contains(&state.as_str());
            ensure!(!ended, "job {job} ended as {state}");
            Ok((state == "COMPLETED").then_some(()))
        })
    }

    /// Waits until a job's RAM disk is ready.
    pub fn wait_ready(&self, job: u32) -> Result<()> {
        wait(&format!("the RAM disk of job {job} is ready"), || {
            let status = self.status()?;
            // The name goes on with the time of submission.
            let id = format!("{job}@");
            let state = |state: &str| {
                let jobs = status["jobs"].as_array().into_iter().flatten();
                jobs.filter(|job| job["id"].as_str().is_some_and(|name| name.starts_with(&id)))
                    .any(|job| job["rsa_state"] == state)
            };
            ensure!(!state("INELIGIBLE"), "job {job} gets no RAM disk: {status}");
            Ok(state("READY").then_some(()))
        })
    }

    /// What each call of one of the functions of burst_buffer.lua took, in milliseconds, in the order of the log, of which only
    /// what comes after so many bytes counts.
    pub fn function_ms(&self, function: &str, after: usize) -> Vec<f64> {
        let log = self.slurm.controller_log();
        let of_line = |line: &str| -> Option<f64> {
            let (called, took) = line.split_once(" ran for ")?;
            let us: f64 = took.strip_prefix("usec=")?.trim_end().parse().ok()?;
            called.split(' ').any(|word| word == function).then_some(us / 1e3)
        };
        log.get(after..).unwrap_or_default().lines().filter_map(of_line).collect()
    }

    /// Waits until nothing of any job is left.
    pub fn wait_idle(&self) -> Result<()> {
        wait("all jobs are done", || {
            let jobs = self.status()?["jobs"].as_array().map(Vec::len);
            Ok((jobs == Some(0)).then_some(()))
        })?;
        wait("Slurm is idle", || {
            let ran = self.slurm.client(&["squeue", "--noheader"]);
            Ok(ran.stdout.trim().is_empty().then_some(()))
        })
    }

    /// How long a hook took for a job on each of its nodes, in milliseconds, once it has run on so many.
    pub fn hook_ms(&self, hook: &str, job: u32, nodes: usize) -> Result<Vec<f64>> {
        wait(&format!("the {hook} of job {job} has run"), || {
            let text = fs::read_to_string(self.dir().join("hooks"))?;
            let id = job.to_string();
            let of_job: Vec<f64> = text
                .lines()
                .filter_map(|line| {
                    let mut words = line.split(' ');
                    let same = words.next() == Some(hook) && words.next() == Some(id.as_str());
                    let ns: f64 = words.nth(1)?.parse().ok()?;
                    same.then_some(ns / 1e6)
                })
                .collect();
            Ok((of_job.len() >= nodes).then_some(of_job))
        })
    }
}

/// What `ondeck job show --json` printed.
pub struct Story(Value);

impl Story {
    /// The seconds that the job spent in a state; 0 if it was not in it.
    pub fn seconds(&self, state: &str) -> f64 {
        let phases = self.0["phases"].as_array().into_iter().flatten();
        phases.filter(|phase| phase[0] == state).filter_map(|phase| phase[1].as_f64()).sum()
    }

    /// When it first was in a state, in milliseconds since 1970.
    pub fn first_ms(&self, state: &str) -> Option<u64> {
        let log = self.0["log"].as_array()?;
        log.iter().find(|line| line["states"][1] == state)?["at_ms"].as_u64()
    }

    /// Whether it was in a state at all.
    pub fn was(&self, state: &str) -> bool {
        self.first_ms(state).is_some()
    }

    /// What its user is told.
    pub fn message(&self) -> &str {
        self.0["job"]["message"].as_str().unwrap_or_default()
    }
}

/// Waits until something is there, and gives it.
pub fn wait<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let began = Instant::now();
    loop {
        interrupt::check()?;
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(began.elapsed() < PATIENCE, "not reached within {} s: {what}", PATIENCE.as_secs());
        std::thread::sleep(LOOK);
    }
}

/// The lines of slurm.conf, and the files beside it.
fn burst_buffers(dir: &Path, integration: Integration) -> Result<(String, Vec<PathBuf>)> {
    let functions = match integration {
        Integration::Outside => return Ok((String::new(), Vec::new())),
        Integration::Inside => include_str!("../../../slurm/burst_buffer.lua"),
        Integration::None => NO_FUNCTIONS,
    };
    let settings = format!("ONDECK={0}/ondeck\nONDECK_CONFIG={0}/ondeck.toml\n", dir.display());
    let beside = dir.join("beside");
    fs::create_dir(&beside)?;
    let files = [
        ("burst_buffer.lua", functions),
        ("burst_buffer.conf", BURST_BUFFER_CONF),
        ("ondeck.env", &settings),
    ];
    let mut written = Vec::new();
    for (name, text) in files {
        fs::write(beside.join(name), text)?;
        written.push(beside.join(name));
    }
    Ok((BURST_BUFFERS.to_owned(), written))
}

/// One file for the scheduler and the hooks, and one for each agent.
fn write_config(bed: &Testbed, setup: &Setup, prefix: &Path) -> Result<()> {
    let munge = bed.munge().context("cannot start munged")?;
    let rsa: Vec<String> = (1..=NODES).map(|n| format!("\"r{n}\"")).collect();
    let text = |state: &str| {
        format!(
            "munge_socket = {munge:?}\n\
             [agent]\nlisten = \"auto\"\n{state}administrators = [\"root@ctl\"]\nmount_prefixes = [{prefix:?}]\n\
             [agent.device.ram]\nkind = \"ram\"\ncapacity = \"{}\"\n\
             [scheduler]\nhost = \"ctl\"\nlisten = \"auto\"\nstate = {:?}\nsharing = \"any\"\n{}\n\
             [scheduler.pool.default]\nnodes = [{}]\n",
            setup.lends,
            bed.dir().join("scheduler"),
            setup.scheduler,
            rsa.join(", "),
        )
    };
    fs::write(bed.dir().join("ondeck.toml"), text(""))?;
    for host in bed.hosts().iter().filter(|host| host.name() != "ctl") {
        let name = host.name();
        // The hosts have one process-id namespace: an agent that looks for what it left must not find another's.
        let state = format!("state = \"/run/ondeck/agent-{name}\"\n");
        fs::write(bed.dir().join(format!("{name}.toml")), text(&state))?;
    }
    Ok(())
}
