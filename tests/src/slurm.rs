//! A Slurm cluster on the hosts of a bed: slurmctld on one, a slurmd on each of the others, all of them real.
//!
//! ```no_run
//! use std::time::Duration;
//! use ondeck_testbed::{SlurmSetup, Testbed};
//!
//! # fn main() -> anyhow::Result<()> {
//! let bed = Testbed::builder().host("ctl").hosts("c", 2).build()?;
//! let slurm = bed.slurm(SlurmSetup::new("ctl", ["c1", "c2"]))?;
//! let alice = bed.user("alice");
//! let job = slurm.submit(alice, "#!/bin/sh\nsrun hostname\n", &["--nodes=2", "--output=out"]);
//! slurm.wait_state(job, "COMPLETED", Duration::from_secs(20));
//! assert_eq!(std::fs::read_to_string(alice.home.join("out"))?.lines().count(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! Every host finds the configuration at `/etc/slurm`, so that `squeue` works there without an environment; where the
//! machine has no such directory, [`Slurm::conf`] is for `SLURM_CONF`. The scheduler is set to look every second or
//! at once, as tests don't wait.
//!
//! There is no accounting unless [`SlurmSetup::accounting`] asks for it: slurmdbd stores nothing without MariaDB (in
//! Slurm 22.05 `accounting_storage/mysql` is the only store), which takes a few seconds to start. `scontrol show job`
//! has a job for five minutes after its end.
//!
//! A client of Slurm that finds no slurmctld hangs for ten seconds and more. The methods here panic instead when it is
//! known to be down; do the same in a test that calls clients itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;

use crate::bed::Testbed;
use crate::control;
use crate::daemon::{Daemon, tail};
use crate::host::{Host, Ran};
use crate::inside::in_path;
use crate::plan::slurm_directory_in;
use crate::users::{self, User, make_directory};
use crate::wait::{nap, wait_until};

mod accounting;
mod burst_buffers;

/// The user that slurmctld runs as; the package makes it.
const USER: &str = "slurm";
const CONTROLLER_PORT: u16 = 6817;
const NODE_PORT: u16 = 6818;
/// The name under which slurmctld is kept among the daemons; no hostname has a blank.
const CONTROLLER: &str = "the controller";
/// The name under which slurmdbd is kept among the daemons.
const KEEPER: &str = "the accounting";
const DEFAULT_CPUS: u32 = 4;

/// Control groups as the hosts have them.
const CGROUP_CONF: &str = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n";

/// From the start of a daemon until it answers. A bound for a machine that is out of breath: it takes a second.
const READY_DEADLINE: Duration = Duration::from_secs(60);
/// From SIGKILL until a daemon and its helper have ended.
const KILL_DEADLINE: Duration = Duration::from_secs(20);

/// The states that a job does not leave by itself.
const FINAL_STATES: [&str; 8] =
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"];

/// Says what a Slurm cluster consists of.
#[derive(Clone, Debug)]
pub struct SlurmSetup {
    /// The host of slurmctld, where jobs are submitted.
    pub controller: String,
    /// The hosts that are nodes. The partition `main` has them all.
    pub compute: Vec<String>,
    /// The CPUs of each node, more than the machine has if need be; 4 at first.
    pub cpus: u32,
    /// Further lines of slurm.conf. What is set here is not set otherwise: `PrologFlags=` replaces the one below, and
    /// so does `NodeName=c1` (with the rest of its line) for that node alone, or `PartitionName=main`.
    pub conf: String,
    /// A program for root to run on each node before a job. It must be executable.
    pub prolog: Option<PathBuf>,
    /// A program for root to run on each node after a job. It must be executable.
    pub epilog: Option<PathBuf>,
    /// A script in Lua that may change or refuse jobs; copied.
    pub job_submit: Option<PathBuf>,
    /// Further files to copy beside slurm.conf, such as `burst_buffer.lua`.
    pub files: Vec<PathBuf>,
    /// Whether there are accounts and qualities of service, in a database. Beside `normal` there is `ondeck`, which comes
    /// before it, and which users may not ask for. Priorities then come from both (priority/multifactor).
    pub accounting: bool,
}

impl SlurmSetup {
    /// A cluster of four CPUs a node without any scripts.
    pub fn new<S: Into<String>>(controller: &str, compute: impl IntoIterator<Item = S>) -> SlurmSetup {
        SlurmSetup {
            controller: controller.to_owned(),
            compute: compute.into_iter().map(Into::into).collect(),
            cpus: DEFAULT_CPUS,
            conf: String::new(),
            prolog: None,
            epilog: None,
            job_submit: None,
            files: Vec::new(),
            accounting: false,
        }
    }

    /// The text of slurm.conf.
    fn slurm_conf(&self, munge_socket: &Path, work: &Path, log: &Path) -> String {
        let mut settings: Vec<(String, String)> = [
            ("ClusterName", "testbed"),
            ("SlurmctldHost", &self.controller),
            ("SlurmUser", USER),
            ("SlurmctldPort", &CONTROLLER_PORT.to_string()),
            ("SlurmdPort", &NODE_PORT.to_string()),
            ("AuthType", "auth/munge"),
            ("AuthInfo", &format!("socket={}", munge_socket.display())),
            ("CredType", "cred/munge"),
            // Each host has control groups of its own.
            ("ProctrackType", if control::available() { "proctrack/cgroup" } else { "proctrack/linuxproc" }),
            ("TaskPlugin", "task/none"),
            ("JobAcctGatherType", "jobacct_gather/none"),
            ("AccountingStorageType", "accounting_storage/none"),
            ("SwitchType", "switch/none"),
            ("MpiDefault", "none"),
            // A node that comes back is used again, whatever it was lost for.
            ("ReturnToService", "2"),
            // More CPUs than the machine has.
            ("SlurmdParameters", "config_overrides"),
            ("SelectType", "select/cons_tres"),
            ("SelectTypeParameters", "CR_Core"),
            ("SchedulerType", "sched/backfill"),
            (
                "SchedulerParameters",
                "bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_continue",
            ),
            // Without it the Prolog runs at a job's first step only.
            ("PrologFlags", "Alloc"),
            ("MinJobAge", "300"),
            ("KillWait", "3"),
            ("SlurmctldTimeout", "30"),
            ("SlurmdTimeout", "30"),
            ("MessageTimeout", "10"),
            ("StateSaveLocation", &work.join("state").to_string_lossy()),
            ("SlurmdSpoolDir", &work.join("spool/%n").to_string_lossy()),
            ("SlurmctldPidFile", &work.join("state/slurmctld.pid").to_string_lossy()),
            ("SlurmdPidFile", "/run/slurmd.pid"),
            ("SlurmctldLogFile", &log.join("slurmctld.log").to_string_lossy()),
            ("SlurmdLogFile", &log.join("slurmd.%n.log").to_string_lossy()),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        if self.accounting {
            for (key, value) in accounting::settings(&self.controller, munge_socket) {
                settings.retain(|(known, _)| known != key);
                settings.push((key.to_owned(), value));
            }
        }
        for (key, script) in [("Prolog", &self.prolog), ("Epilog", &self.epilog)] {
            settings.extend(script.as_ref().map(|script| (key.to_owned(), script.display().to_string())));
        }
        if self.job_submit.is_some() {
            settings.push(("JobSubmitPlugins".to_owned(), "lua".to_owned()));
        }
        for node in &self.compute {
            let value = format!("{node} CPUs={} RealMemory=4000 State=UNKNOWN", self.cpus);
            settings.push(("NodeName".to_owned(), value));
        }
        let partition =
            format!("main Nodes={} Default=YES MaxTime=INFINITE State=UP", self.compute.join(","));
        settings.push(("PartitionName".to_owned(), partition));

        let given: BTreeSet<String> = self.conf.lines().filter_map(what_is_set).collect();
        let lines = settings.into_iter().map(|(key, value)| format!("{key}={value}\n"));
        let defaults: String =
            lines.filter(|line| what_is_set(line).is_none_or(|what| !given.contains(&what))).collect();
        format!("{defaults}{}\n", self.conf)
    }
}

/// What a line of slurm.conf sets: its key, of nodes and partitions with their name. `None` for a comment.
fn what_is_set(line: &str) -> Option<String> {
    let line = line.trim();
    let (key, _) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
    let key = key.trim().to_lowercase();
    if ["nodename", "partitionname"].contains(&key.as_str()) {
        return Some(line.split_whitespace().next()?.to_lowercase());
    }
    Some(key)
}

/// A running Slurm cluster, made by [`Testbed::slurm`]. Its daemons are killed when this is dropped; what is left of
/// jobs then goes with the bed.
///
/// The methods panic when Slurm refuses or fails, unless they give a [`Ran`].
#[derive(Debug)]
pub struct Slurm {
    conf: PathBuf,
    controller: Host,
    compute: Vec<Host>,
    log: PathBuf,
    /// What slurmctld keeps on disk.
    state: PathBuf,
    /// slurmctld as [`CONTROLLER`], the slurmds by their hosts, and what accounting needs.
    daemons: Mutex<BTreeMap<String, Daemon>>,
}

impl Testbed {
    /// Starts a Slurm cluster on hosts of this bed, and waits until its nodes are idle.
    ///
    /// # Errors
    ///
    /// If Slurm or MUNGE is not installed, a file can't be written, or the daemons don't start or are not ready in time,
    /// with the ends of their logs.
    ///
    /// # Panics
    ///
    /// If the bed has not got a host that is named, or munged does not answer.
    pub fn slurm(&self, setup: SlurmSetup) -> Result<Slurm> {
        Slurm::start(self, setup)
    }
}

impl Slurm {
    fn start(bed: &Testbed, setup: SlurmSetup) -> Result<Slurm> {
        for program in ["slurmctld", "slurmd", "sbatch"] {
            ensure!(
                in_path(program),
                "{program} is not in PATH; install slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins"
            );
        }
        let (uid, gid) = users::ids_of(USER, "slurmctld")?;
        let (work, log) = (bed.dir().join("slurm"), bed.dir().join("log"));
        make_directory(&work, 0, 0, 0o755)?;
        make_directory(&work.join("state"), uid, gid, 0o700)?;
        make_directory(&work.join("spool"), 0, 0, 0o755)?;
        make_directory(&log, uid, gid, 0o755)?;

        let directory = slurm_directory_in(bed.dir());
        let lua = setup.job_submit.iter().map(|script| (script, "job_submit.lua".into()));
        let others = setup.files.iter().map(|file| (file, file.file_name().unwrap_or_default().to_owned()));
        for (file, name) in lua.chain(others) {
            let content = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            users::write_public(&directory.join(name), &content)?;
        }
        let conf = directory.join("slurm.conf");
        let text = setup.slurm_conf(&bed.munge()?, &work, &log);
        users::write_public(&conf, text.as_bytes())?;
        users::write_public(&directory.join("cgroup.conf"), CGROUP_CONF.as_bytes())?;

        let slurm = Slurm {
            conf,
            controller: bed.host(&setup.controller).clone(),
            compute: setup.compute.iter().map(|name| bed.host(name).clone()).collect(),
            log,
            state: work.join("state"),
            daemons: Mutex::default(),
        };
        if setup.accounting {
            accounting::start(&slurm, bed, &work)?;
        }
        slurm.launch_controller()?;
        // Not before: a slurmd that finds no slurmctld waits a while before it tries again.
        slurm.wait_for_controller()?;
        for host in &slurm.compute {
            slurm.launch_slurmd(host)?;
        }
        let names: Vec<&str> = slurm.compute.iter().map(Host::name).collect();
        slurm.wait_for_nodes(&names, |state| state == "idle")?;
        Ok(slurm)
    }

    /// slurm.conf, for the variable `SLURM_CONF`.
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// The host of slurmctld.
    pub fn controller(&self) -> &Host {
        &self.controller
    }

    /// The hosts that are nodes.
    pub fn compute(&self) -> &[Host] {
        &self.compute
    }

    /// What slurmctld has logged so far.
    pub fn controller_log(&self) -> String {
        read(&self.log.join("slurmctld.log"))
    }

    /// What the slurmd of this host, and the steps of jobs there, have logged so far.
    pub fn node_log(&self, host: &str) -> String {
        read(&self.log.join(format!("slurmd.{host}.log")))
    }

    /// Runs a client of Slurm as root on the controller's host.
    ///
    /// # Panics
    ///
    /// If slurmctld is down or `command_line` is empty.
    #[track_caller]
    pub fn client(&self, command_line: &[&str]) -> Ran {
        self.run(&self.controller, command_line, "")
    }

    /// Runs a client of Slurm, such as `srun`, as this user on the controller's host, in the user's home directory.
    ///
    /// # Panics
    ///
    /// If slurmctld is down or `command_line` is empty.
    #[track_caller]
    pub fn client_as(&self, user: &User, command_line: &[&str]) -> Ran {
        self.run(&self.controller.log_in(user), command_line, "")
    }

    /// Runs `scontrol` as root.
    ///
    /// # Panics
    ///
    /// If slurmctld is down.
    #[track_caller]
    pub fn scontrol(&self, arguments: &[&str]) -> Ran {
        let command_line: Vec<&str> = ["scontrol"].iter().chain(arguments).copied().collect();
        self.client(&command_line)
    }

    /// Submits a batch script as this user with real `sbatch`, from the controller's host and the user's home
    /// directory, and gives the job's id. The environment is that of [`Host::log_in`] with `SLURM_CONF`; output goes
    /// to `slurm-ID.out` there unless an option says otherwise.
    ///
    /// # Panics
    ///
    /// If the job is refused, with what the user is told, or if slurmctld is down.
    #[track_caller]
    pub fn submit(&self, user: &User, script: &str, options: &[&str]) -> u32 {
        let ran = self.try_submit(user, script, options);
        let id = ran.stdout.trim().split(';').next().and_then(|id| id.parse().ok());
        match id.filter(|_| ran.success()) {
            Some(id) => id,
            None => panic!("{}'s job is refused: {ran:#?}", user.name),
        }
    }

    /// Submits as [`submit`](Slurm::submit) does, and gives what `sbatch --parsable` did.
    ///
    /// # Panics
    ///
    /// If slurmctld is down.
    #[track_caller]
    pub fn try_submit(&self, user: &User, script: &str, options: &[&str]) -> Ran {
        let command_line: Vec<&str> = ["sbatch", "--parsable"].iter().chain(options).copied().collect();
        self.run(&self.controller.log_in(user), &command_line, script)
    }

    #[track_caller]
    fn run(&self, host: &Host, command_line: &[&str], stdin: &str) -> Ran {
        if let Err(why) = self.check_controller() {
            panic!("`{}` would hang: {why}", command_line.join(" "));
        }
        match self.run_anyway(host, command_line, stdin) {
            Ok(ran) => ran,
            Err(error) => panic!("cannot run `{}`: {error:#}", command_line.join(" ")),
        }
    }

    fn run_anyway(&self, host: &Host, command_line: &[&str], stdin: &str) -> Result<Ran> {
        let (program, arguments) = command_line.split_first().context("no program named")?;
        let mut command = host.bounded_command(program);
        command.args(arguments).env("SLURM_CONF", &self.conf);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            // A program that does not read it says why.
            let _ = pipe.write_all(stdin.as_bytes());
        }
        Ok(Ran::of(child.wait_with_output()?))
    }

    /// All that `scontrol show job` says of a job: `JobState`, `Reason`, `NodeList`, `Comment` and many others. What
    /// looks like `Key=value` after a blank within a value is taken for a field if there is no other of that name.
    ///
    /// # Panics
    ///
    /// If there is no such job.
    #[track_caller]
    pub fn job(&self, id: u32) -> BTreeMap<String, String> {
        let ran = self.scontrol(&["--oneliner", "show", "job", &id.to_string()]);
        assert!(ran.success(), "no job {id}: {ran:#?}");
        fields(&ran.stdout)
    }

    /// A job's state, such as PENDING, RUNNING, COMPLETING or COMPLETED.
    ///
    /// # Panics
    ///
    /// If there is no such job.
    #[track_caller]
    pub fn state(&self, id: u32) -> String {
        self.job(id).remove("JobState").unwrap_or_default()
    }

    /// Waits until a job is in this state, and gives all about it then.
    ///
    /// # Panics
    ///
    /// If it is not within `deadline`, or at once when the job has ended in another state, with all about it and the
    /// end of slurmctld's log.
    #[track_caller]
    pub fn wait_state(&self, id: u32, state: &str, deadline: Duration) -> BTreeMap<String, String> {
        self.wait_job(id, &format!("is {state}"), deadline, |job| {
            let found = &job["JobState"];
            if found != state && FINAL_STATES.contains(&found.as_str()) {
                panic!("job {id} ended as {found} and will not be {state}: {job:#?}\n{}", self.last_words());
            }
            found == state
        })
    }

    /// Waits until something is so of what [`job`](Slurm::job) gives, and gives all about the job then. `what` says
    /// what is waited for, as in "is held".
    ///
    /// # Panics
    ///
    /// If it is not so within `deadline`, with all about the job and the end of slurmctld's log.
    #[track_caller]
    pub fn wait_job(
        &self,
        id: u32,
        what: &str,
        deadline: Duration,
        mut is_so: impl FnMut(&BTreeMap<String, String>) -> bool,
    ) -> BTreeMap<String, String> {
        let start = Instant::now();
        loop {
            let looked = Instant::now();
            let job = self.job(id);
            if is_so(&job) {
                return job;
            }
            if start.elapsed() > deadline {
                panic!("not reached in {deadline:?}: job {id} {what}; {job:#?}\n{}", self.last_words());
            }
            nap(looked);
        }
    }

    fn last_words(&self) -> String {
        format!("slurmctld: {}", tail(&self.log.join("slurmctld.log")))
    }

    /// Cancels a job as root. It may take some seconds to end: wait for its state.
    ///
    /// # Panics
    ///
    /// If Slurm refuses.
    #[track_caller]
    pub fn cancel(&self, id: u32) {
        self.client(&["scancel", &id.to_string()]).assert_success();
    }

    /// Puts a running or finished job back into the queue. It does not start again before two minutes have passed.
    ///
    /// # Panics
    ///
    /// If Slurm refuses.
    #[track_caller]
    pub fn requeue(&self, id: u32) {
        self.scontrol(&["requeue", &id.to_string()]).assert_success();
    }

    /// Waits until slurmctld has written to its disk what it knows of a job. It does so within five seconds of a
    /// change; for it the job has a mark as its AdminComment, which is then put back.
    ///
    /// # Panics
    ///
    /// If Slurm refuses, or does not write.
    #[track_caller]
    pub fn wait_saved(&self, id: u32) {
        let comment = self.job(id).remove("AdminComment").unwrap_or_default();
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("saved-{}", since_epoch.as_nanos());
        let set = |comment: &str| {
            let ran = self.scontrol(&["update", &format!("JobId={id}"), &format!("AdminComment={comment}")]);
            ran.assert_success();
        };
        set(&mark);
        let saved = self.wait_for(CONTROLLER, "slurmctld saves its state", || {
            // The file is replaced as a whole; strings stand in it as they are.
            read(&self.state.join("job_state")).contains(&mark)
        });
        if let Err(error) = saved {
            panic!("{error:#}");
        }
        set(&comment);
    }

    /// Ends slurmctld by SIGKILL, and returns when it and its helper have ended. Jobs go on.
    ///
    /// It forgets what it has not yet saved: a job that started in the last five seconds is pending again at the next
    /// start although it runs, is killed when its nodes report it, and then starts once more, with the same restart count;
    /// on a node where it was killed it fails (`Job credential revoked`). If it starts before its nodes have reported, they
    /// are drained (`Duplicate jobid`) and it is requeued to be held. Use [`wait_saved`](Slurm::wait_saved) where that is
    /// not what is tested.
    ///
    /// # Panics
    ///
    /// If it is not running, or does not end.
    #[track_caller]
    pub fn kill_controller(&self) {
        self.kill_daemon(CONTROLLER);
        // slurmscriptd ends by itself when slurmctld has, in its own time.
        wait_until(KILL_DEADLINE, "slurmctld has ended", || {
            let processes = self.controller.processes();
            !processes.iter().any(|process| may_be(&process.command_line, &["slurmctld", "slurmscriptd"]))
        });
    }

    /// Starts slurmctld again, and returns when it answers and knows the jobs of before.
    ///
    /// # Panics
    ///
    /// If it is running, or does not start.
    #[track_caller]
    pub fn start_controller(&self) {
        if let Err(error) = self.launch_controller().and_then(|()| self.wait_for_controller()) {
            panic!("{error:#}");
        }
    }

    /// Starts slurmctld without what it knew: no job is known, and numbers are given again from the first one on.
    ///
    /// # Panics
    ///
    /// If it is running, or does not start.
    #[track_caller]
    pub fn start_controller_clean(&self) {
        let cleared = fs::read_dir(&self.state).and_then(|mut entries| {
            entries.try_for_each(|entry| {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    fs::remove_dir_all(entry.path())
                } else {
                    fs::remove_file(entry.path())
                }
            })
        });
        if let Err(error) = cleared {
            panic!("{}: {error}", self.state.display());
        }
        self.start_controller();
        let names: Vec<&str> = self.compute.iter().map(Host::name).collect();
        if let Err(error) = self.wait_for_nodes(&names, |state| state == "idle") {
            panic!("{error:#}");
        }
    }

    /// Ends the slurmd of a host by SIGKILL. Its jobs go on: each step has a process of its own to watch it. A job
    /// that is RUNNING for Slurm but whose script has not begun is lost: wait for a sign of it before.
    ///
    /// # Panics
    ///
    /// If it is not running, or does not end.
    #[track_caller]
    pub fn kill_slurmd(&self, host: &str) {
        self.kill_daemon(host);
    }

    /// Starts the slurmd of a host again, after [`kill_slurmd`](Slurm::kill_slurmd) or a crash of the host, and returns
    /// when its node can be used; if slurmctld is down, when it listens.
    ///
    /// Of a host that crashed and is back before `SlurmdTimeout`, Slurm believes for minutes that the jobs go on. Set
    /// the node's state to `down` before the start to have them fail or be requeued at once.
    ///
    /// # Panics
    ///
    /// If it is running or does not start, or the host is no node.
    #[track_caller]
    pub fn start_slurmd(&self, host: &str) {
        let Some(host) = self.compute.iter().find(|node| node.name() == host) else {
            panic!("{host} is no node of this cluster")
        };
        if let Err(error) = self.launch_slurmd(host).and_then(|()| self.wait_for_slurmd(host)) {
            panic!("{error:#}");
        }
    }

    fn launch_controller(&self) -> Result<()> {
        self.launch(CONTROLLER, &self.controller, "slurmctld", "slurmctld.out")
    }

    fn launch_slurmd(&self, host: &Host) -> Result<()> {
        self.launch(host.name(), host, "slurmd", &format!("slurmd.{}.out", host.name()))
    }

    fn launch(&self, key: &str, host: &Host, program: &str, log: &str) -> Result<()> {
        let mut daemons = self.daemons();
        ensure!(
            daemons.get(key).is_none_or(|daemon| !daemon.is_running()),
            "{program} runs on {} already",
            host.name()
        );
        let mut command = host.as_root().command(program);
        // In the foreground, with nothing of the test's environment: it would reach the jobs.
        command.arg("-D").env_clear().env("SLURM_CONF", &self.conf).current_dir("/");
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        let daemon = host.spawn_daemon(command, &self.log.join(log))?;
        daemons.insert(key.to_owned(), daemon);
        Ok(())
    }

    fn keep(&self, key: &str, daemon: Daemon) {
        self.daemons().insert(key.to_owned(), daemon);
    }

    #[track_caller]
    fn kill_daemon(&self, key: &str) {
        let mut daemons = self.daemons();
        let Some(mut daemon) = daemons.remove(key).filter(Daemon::is_running) else {
            panic!("no daemon of Slurm runs on {key}");
        };
        daemon.kill(Signal::KILL);
        assert!(daemon.wait(KILL_DEADLINE).is_some(), "the daemon of {key} does not end");
    }

    fn wait_for_controller(&self) -> Result<()> {
        // No client before it listens, see the head of this file.
        self.wait_for(CONTROLLER, "slurmctld listens", || listens(&self.controller, CONTROLLER_PORT))?;
        self.wait_for(CONTROLLER, "slurmctld answers", || {
            self.run_anyway(&self.controller, &["scontrol", "ping"], "").is_ok_and(|ran| ran.success())
        })
    }

    fn wait_for_slurmd(&self, host: &Host) -> Result<()> {
        self.wait_for(host.name(), "slurmd listens", || listens(host, NODE_PORT))?;
        if self.check_controller().is_err() {
            return Ok(());
        }
        // An asterisk stands for a node that does not answer.
        self.wait_for_nodes(&[host.name()], |state| {
            ["idle", "mixed", "allocated", "completing"].contains(&state)
        })
    }

    /// Waits until `is_ready` of the states of all these nodes, as `sinfo` has them.
    fn wait_for_nodes(&self, nodes: &[&str], is_ready: impl Fn(&str) -> bool) -> Result<()> {
        let command_line = ["sinfo", "--noheader", "--Node", "--format=%N %T", "--nodes", &nodes.join(",")];
        self.wait_for(CONTROLLER, "the nodes are ready", || {
            // A node is there once for each partition.
            let Ok(Ran { stdout: table, .. }) = self.run_anyway(&self.controller, &command_line, "") else {
                return false;
            };
            let ready = table.lines().filter_map(|line| line.split_once(' '));
            let ready: BTreeSet<&str> =
                ready.filter(|(_, state)| is_ready(state.trim())).map(|(node, _)| node).collect();
            ready.len() == nodes.len()
        })
    }

    /// Waits for a state that the daemon of `key` brings about, as long as it runs.
    fn wait_for(&self, key: &str, what: &str, mut is_reached: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let looked = Instant::now();
            if is_reached() {
                return Ok(());
            }
            let is_running = self.daemons().get(key).is_some_and(Daemon::is_running);
            if !is_running || start.elapsed() > READY_DEADLINE {
                let ended = if is_running { "" } else { ": the daemon has ended" };
                bail!("not reached in {:?}: {what}{ended}\n{}", start.elapsed(), self.all_last_words());
            }
            nap(looked);
        }
    }

    /// The ends of all logs.
    fn all_last_words(&self) -> String {
        let entries = fs::read_dir(&self.log).into_iter().flatten().flatten();
        entries.map(|entry| format!("{}: {}\n", entry.path().display(), tail(&entry.path()))).collect()
    }

    /// Why a client should not be run now.
    fn check_controller(&self) -> Result<(), String> {
        match self.daemons().get(CONTROLLER).is_some_and(Daemon::is_running) {
            true => Ok(()),
            false => Err(format!("slurmctld is down; {}", self.last_words())),
        }
    }

    fn daemons(&self) -> MutexGuard<'_, BTreeMap<String, Daemon>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // All at once; then each is waited for as it is dropped.
        for daemon in self.daemons().values() {
            daemon.kill(Signal::KILL);
        }
    }
}

fn listens(host: &Host, port: u16) -> bool {
    host.listening().iter().any(|socket| socket.port() == port)
}

/// Whether a command line may be that of one of these programs; slurmctld renames its helper. A process that is about
/// to end has none any more.
fn may_be(command_line: &[String], names: &[&str]) -> bool {
    let program = command_line.first().map(|program| program.trim_end_matches(':'));
    program.and_then(|program| program.rsplit('/').next()).is_none_or(|name| names.contains(&name))
}

fn read(log: &Path) -> String {
    String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
}

/// The fields of one line of `scontrol --oneliner`. A word without a field's name belongs to the value before it.
fn fields(line: &str) -> BTreeMap<String, String> {
    let is_name = |name: &str| {
        name.starts_with(|letter: char| letter.is_ascii_uppercase())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "/:_".contains(letter))
    };
    let mut fields: Vec<(&str, String)> = Vec::new();
    for word in line.trim_end().split(' ') {
        let field = word.split_once('=').filter(|(name, _)| is_name(name));
        let is_new = |name: &str| !fields.iter().any(|(known, _)| *known == name);
        match (field.filter(|(name, _)| is_new(name)), fields.last_mut()) {
            (Some((name, value)), _) => fields.push((name, value.to_owned())),
            (None, Some((_, value))) => {
                value.push(' ');
                value.push_str(word);
            }
            (None, None) => {}
        }
    }
    fields.into_iter().map(|(name, value)| (name.to_owned(), value.trim_end().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_blanks_and_equal_signs() {
        let line = "JobId=7 JobName=a b UserId=alice(20001) TRES=cpu=4,node=2 Socks/Node=* \
            ReqB:S:C:T=0:0:*:* Comment=x=1 JobId=9 Power= \n";
        let fields = fields(line);
        assert_eq!(fields["JobId"], "7");
        assert_eq!(fields["JobName"], "a b");
        assert_eq!(fields["TRES"], "cpu=4,node=2");
        assert_eq!(fields["ReqB:S:C:T"], "0:0:*:*");
        assert_eq!(fields["Comment"], "x=1 JobId=9");
        assert_eq!(fields["Power"], "");
    }

    #[test]
    fn a_line_of_the_setup_takes_the_place_of_the_usual_one() {
        let mut setup = SlurmSetup::new("ctl", ["c1", "c2"]);
        setup.conf =
            "# KillWait=1\nprologflags = Alloc,Contain\nNodeName=c2 CPUs=1\nPartitionName=a Nodes=c2"
                .to_owned();
        let text = setup.slurm_conf(Path::new("/socket"), Path::new("/work"), Path::new("/log"));
        assert!(!text.contains("PrologFlags="));
        assert!(text.contains("\nKillWait=3\n"));
        assert!(text.contains("\nNodeName=c1 CPUs=4 ") && !text.contains("\nNodeName=c2 CPUs=4 "));
        assert!(text.contains("\nPartitionName=main ") && text.ends_with("\nPartitionName=a Nodes=c2\n"));
    }
}
