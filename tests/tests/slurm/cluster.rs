//! A cluster with a scheduler, and what the tests do there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use ondeck_testbed::{Daemon, Host, Ran, Signal, Slurm, SlurmSetup, Testbed, User, wait_until};
use serde_json::Value;

use crate::binary::ondeck_binary;

/// For states that are reached at once on a machine that is not out of breath.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// How many clusters there are at a time: more than ONDECK_CLUSTERS (3) are waited for.
static CLUSTERS: LazyLock<usize> = LazyLock::new(|| {
    let wanted = std::env::var("ONDECK_CLUSTERS").ok();
    wanted.map_or(3, |wanted| wanted.parse().expect("ONDECK_CLUSTERS is a number"))
});
static IN_USE: Mutex<usize> = Mutex::new(0);
static GIVEN_BACK: Condvar = Condvar::new();

/// A turn at having a cluster: the machine has two cores, and a cluster mostly waits.
pub struct Turn;

impl Turn {
    pub fn wait() -> Turn {
        let mut used = IN_USE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while *used >= *CLUSTERS {
            used = GIVEN_BACK.wait(used).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        *used += 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *IN_USE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) -= 1;
        GIVEN_BACK.notify_one();
    }
}

/// What differs from the usual cluster.
pub struct Setup {
    pub rsa_nodes: usize,
    pub compute_nodes: usize,
    /// Lines for the part `[scheduler]`.
    pub scheduler: String,
    /// Lines for the part `[scheduler.limits]`.
    pub limits: String,
    /// Whether RAM disks are shown where other jobs run.
    pub shared_nodes: bool,
    /// After which an RSA node is taken for lost.
    pub node_timeout: &'static str,
    /// The pause before something is tried again.
    pub backoff: &'static str,
    /// Lines for the part `[agent]`.
    pub agent: String,
    /// What each RSA node lends.
    pub lends: &'static str,
    /// Lines of slurm.conf.
    pub slurm: String,
    /// Whether Slurm has accounts and qualities of service.
    pub accounting: bool,
    /// Whether Slurm takes jobs with `#RSA_` lines for jobs with burst buffers.
    pub burst_buffers: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            rsa_nodes: 4,
            compute_nodes: 4,
            scheduler: String::new(),
            limits: String::new(),
            shared_nodes: true,
            node_timeout: "6s",
            backoff: "1s",
            agent: String::new(),
            lends: "256MiB",
            slurm: String::new(),
            accounting: false,
            burst_buffers: false,
        }
    }
}

/// ctl with the scheduler and slurmctld, r1 to r4 that lend RAM, c1 to c4 that compute.
pub struct Cluster {
    daemons: Mutex<BTreeMap<String, Daemon>>,
    pub slurm: Slurm,
    pub bed: Testbed,
    pub ondeck: PathBuf,
    rsa: Vec<String>,
    _turn: Turn,
}

impl Drop for Cluster {
    /// What a scenario that failed leaves to read: the scheduler's last words, and all logs below the target directory.
    fn drop(&mut self) {
        const LAST: usize = 80;
        if !std::thread::panicking() {
            return;
        }
        let text = self.log_text("scheduler");
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST)..].join("\n");
        let name = std::thread::current().name().unwrap_or("unnamed").replace("::", ".");
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("failed").join(name);
        let log = self.bed.dir().join("log");
        let copied = fs::create_dir_all(&kept).is_ok()
            && std::process::Command::new("cp").arg("-rT").args([&log, &kept]).status().is_ok();
        let logs =
            if copied { format!("all logs: {}", kept.display()) } else { "the logs can't be kept".into() };
        println!("the scheduler's last words:\n{last}\n{logs}");
    }
}

impl Cluster {
    pub fn new() -> Cluster {
        Cluster::with(Setup::default())
    }

    pub fn with(setup: Setup) -> Cluster {
        let binary = ondeck_binary();
        let turn = Turn::wait();
        let bed = Testbed::builder()
            .host("ctl")
            .hosts("r", setup.rsa_nodes)
            .hosts("c", setup.compute_nodes)
            .binary(env!("CARGO_BIN_EXE_ondeck-testbed"))
            .build()
            .unwrap();
        let dir = bed.dir().to_owned();
        let ondeck = dir.join("ondeck");
        fs::copy(binary, &ondeck).unwrap();
        let names = |prefix: &str, count| (1..=count).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>();
        let (rsa, compute) = (names("r", setup.rsa_nodes), names("c", setup.compute_nodes));
        let munge = bed.munge().unwrap();
        let quoted: Vec<String> = rsa.iter().map(|name| format!("\"{name}\"")).collect();
        let text = format!(
            "munge_socket = \"{munge}\"\n\
             [agent]\nlisten = \"auto\"\nSTATE\nadministrators = [\"root@ctl\"]\n\
             mount_prefixes = [\"{scratch}\"]\n{agent}\n\
             [agent.device.ram]\nkind = \"ram\"\ncapacity = \"{lends}\"\n\
             [scheduler]\nhost = \"ctl\"\nlisten = \"auto\"\nstate = \"{dir}/scheduler\"\n\
             shared_nodes = {shared_nodes}\ndebounce = \"300ms\"\nbackoff = \"{backoff}\"\n\
             node_timeout = \"{node_timeout}\"\n{scheduler}\n[scheduler.limits]\n{limits}\n\
             [scheduler.pool.default]\nnodes = [{nodes}]\n\
             [slurm]\ninterval = \"500ms\"\n",
            munge = munge.display(),
            scratch = dir.join("scratch").display(),
            agent = setup.agent,
            lends = setup.lends,
            dir = dir.display(),
            scheduler = setup.scheduler,
            limits = setup.limits,
            shared_nodes = setup.shared_nodes,
            node_timeout = setup.node_timeout,
            backoff = setup.backoff,
            nodes = quoted.join(", "),
        );
        fs::write(dir.join("ondeck.toml"), text.replace("STATE\n", "")).unwrap();
        for host in rsa.iter().chain(&compute) {
            // The hosts have one process-id namespace: an agent that looks for what it left must not find another's.
            let state = format!("state = \"/run/ondeck/agent-{host}\"\n");
            fs::write(dir.join(format!("{host}.toml")), text.replace("STATE\n", &state)).unwrap();
        }
        let hook = |name: &str| {
            let path = dir.join(format!("slurm-{name}"));
            let line = format!(
                "#!/bin/sh\nexec {} {name} --config {}/ondeck.toml >> {}/log/{name}.log 2>&1\n",
                ondeck.display(),
                dir.display(),
                dir.display()
            );
            fs::write(&path, line).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let (prolog, epilog) = (hook("prolog"), hook("epilog"));
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let lua = root.join("slurm/job_submit.lua");
        // Users run it, who perhaps can't get to where this is built.
        let task_prolog = dir.join("task_prolog");
        fs::copy(root.join("slurm/task_prolog"), &task_prolog).unwrap();
        let (mut conf, mut files) = (setup.slurm, Vec::new());
        if setup.burst_buffers {
            let file = |name: &str, text: String| {
                let path = dir.join(name);
                fs::write(&path, text).unwrap();
                path
            };
            let settings =
                format!("ONDECK={}\nONDECK_CONFIG={}/ondeck.toml\n", ondeck.display(), dir.display());
            let limits = "Directive=RSA\nStageInTimeout=172800\nStageOutTimeout=172800\nOtherTimeout=300\n";
            files = vec![
                root.join("slurm/burst_buffer.lua"),
                file("burst_buffer.conf", limits.to_owned()),
                file("ondeck.env", settings),
            ];
            conf += "\nBurstBufferType=burst_buffer/lua\nDebugFlags=BurstBuffer\nSlurmctldDebug=verbose\n";
        }
        let slurm = bed
            .slurm(SlurmSetup {
                prolog: Some(prolog),
                epilog: Some(epilog),
                job_submit: Some(lua),
                files,
                accounting: setup.accounting,
                conf: format!("TaskProlog={}\n{conf}", task_prolog.display()),
                ..SlurmSetup::new("ctl", compute.clone())
            })
            .unwrap();
        let cluster = Cluster { daemons: Mutex::default(), slurm, bed, ondeck, rsa, _turn: turn };
        for host in cluster.rsa.iter().chain(&compute) {
            cluster.start_agent(host);
        }
        cluster.start_scheduler();
        for host in cluster.rsa.iter().chain(&compute) {
            let address = std::net::SocketAddr::new(cluster.host(host).address().into(), 7272);
            wait_until(DEADLINE, "an agent listens", || cluster.host(host).listening().contains(&address));
        }
        let nodes = cluster.rsa.len();
        wait_until(DEADLINE, "the scheduler knows the nodes", || {
            let status = cluster.status();
            let up = status["nodes"].as_array().unwrap().iter().filter(|node| node["state"] == "up").count();
            up == nodes
        });
        cluster
    }

    pub fn host(&self, name: &str) -> &Host {
        self.bed.host(name)
    }

    pub fn user(&self, name: &str) -> &User {
        self.bed.user(name)
    }

    fn daemons(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Daemon>> {
        self.daemons.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.bed.dir().join("log").join(format!("{name}.log"))
    }

    pub fn start_agent(&self, name: &str) {
        let mut command = self.host(name).command(&self.ondeck);
        command.arg("agent").arg("--config").arg(self.bed.dir().join(format!("{name}.toml")));
        let daemon = self.host(name).spawn_daemon(command, &self.log(&format!("agent-{name}"))).unwrap();
        self.daemons().insert(name.to_owned(), daemon);
    }

    pub fn start_scheduler(&self) {
        self.start_scheduler_with(&[]);
    }

    /// Starts the scheduler in the place of another journal's, or of a later state of its own, and waits until it knows
    /// the nodes that answer.
    pub fn take_over(&self) {
        self.start_scheduler_with(&["--take-over", "--yes"]);
    }

    fn start_scheduler_with(&self, arguments: &[&str]) {
        let mut command = self.host("ctl").command(&self.ondeck);
        command.arg("serve").args(arguments).arg("--config").arg(self.bed.dir().join("ondeck.toml"));
        let daemon = self.host("ctl").spawn_daemon(command, &self.log("scheduler")).unwrap();
        self.daemons().insert("scheduler".to_owned(), daemon);
        wait_until(DEADLINE, "the scheduler answers", || {
            let daemons = self.daemons();
            assert!(daemons["scheduler"].is_running(), "{}", daemons["scheduler"].log());
            drop(daemons);
            self.ondeck(&["status", "--json"]).success()
        });
    }

    /// Has the RSA nodes lend to jobs that come from now on, or not.
    #[track_caller]
    pub fn lend(&self, lends: bool) {
        let status = self.status();
        for node in status["nodes"].as_array().unwrap() {
            let name = node["node"].as_str().unwrap();
            let ran = match lends {
                true => self.ondeck(&["node", "resume", name]),
                false => self.ondeck(&["node", "drain", name, "--reason", "a test"]),
            };
            ran.assert_success();
        }
    }

    /// Kills a daemon with SIGKILL: an agent by its host's name, or `scheduler`.
    pub fn kill(&self, name: &str) {
        let mut daemon = self.daemons().remove(name).expect("it runs");
        daemon.kill(Signal::KILL);
        daemon.wait(DEADLINE).expect("SIGKILL ends it");
    }

    /// Sends a daemon a signal.
    pub fn signal(&self, name: &str, signal: Signal) {
        self.daemons()[name].kill(signal);
    }

    pub fn is_running(&self, name: &str) -> bool {
        self.daemons().get(name).is_some_and(Daemon::is_running)
    }

    /// Waits until a daemon has ended by itself; gives its exit code.
    #[track_caller]
    pub fn wait_ended(&self, name: &str) -> Option<i32> {
        let mut daemon = self.daemons().remove(name).expect("it runs");
        daemon.wait(DEADLINE).expect("it ends by itself").code()
    }

    /// What a daemon has logged.
    pub fn log_text(&self, name: &str) -> String {
        fs::read_to_string(self.log(name)).unwrap_or_default()
    }

    /// Forgets a daemon whose host has crashed.
    pub fn forget(&self, name: &str) {
        self.daemons().remove(name);
    }

    /// Runs `ondeck` on ctl as root.
    pub fn ondeck(&self, arguments: &[&str]) -> Ran {
        self.ondeck_on(self.host("ctl"), arguments)
    }

    /// Runs `ondeck` on a host as its user.
    pub fn ondeck_on(&self, host: &Host, arguments: &[&str]) -> Ran {
        let ondeck = self.ondeck.to_string_lossy();
        let config = self.bed.dir().join("ondeck.toml");
        let mut line = vec![&*ondeck];
        line.extend(arguments);
        let config = config.to_string_lossy();
        line.extend(["--config", &config]);
        host.run(&line)
    }

    pub fn status(&self) -> Value {
        let ran = self.ondeck(&["status", "--json"]);
        ran.assert_success();
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// A job's line of the status.
    pub fn job(&self, id: u32) -> Option<Value> {
        let status = self.status();
        status["jobs"].as_array().unwrap().iter().find(|job| life(job) == id.to_string()).cloned()
    }

    /// The whole name of the newest job with a number.
    pub fn key(&self, id: u32) -> String {
        self.story(id)["job"]["id"].as_str().unwrap().to_owned()
    }

    /// What stands in the names of files of a job that are put beside others.
    pub fn label(&self, id: u32) -> String {
        self.key(id).replace('@', "-")
    }

    pub fn story(&self, id: u32) -> Value {
        let ran = self.ondeck(&["job", "show", &id.to_string(), "--json"]);
        ran.assert_success();
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// The RSA states that a job has been through.
    pub fn states(&self, id: u32) -> Vec<String> {
        let story = self.story(id);
        let mut states: Vec<String> = Vec::new();
        for line in story["log"].as_array().unwrap() {
            if let Some(state) = line["states"][1].as_str()
                && states.last().is_none_or(|last| last != state)
            {
                states.push(state.to_owned());
            }
        }
        states
    }

    #[track_caller]
    pub fn wait_rsa(&self, id: u32, state: &str) {
        // Output is covered while the job runs, which is tried again after 10 s and a minute if the machine is busy.
        let deadline = if state == "INUSE_OUT" { Duration::from_secs(120) } else { DEADLINE };
        wait_until(deadline, &format!("job {id} becomes {state}"), || {
            let Some(job) = self.job(id) else { return false };
            assert!(
                state == "INELIGIBLE" || job["rsa_state"] != "INELIGIBLE",
                "job {id} has become ineligible: {}",
                self.ondeck(&["job", "show", &id.to_string()]).stdout
            );
            job["rsa_state"] == state
        });
    }

    /// Waits until nothing of a job is to be done any more.
    #[track_caller]
    pub fn wait_done(&self, id: u32) {
        let ran = self.ondeck(&["wait", &id.to_string(), "--timeout", "60s"]);
        assert!(ran.success(), "{}{}", ran.stderr, self.ondeck(&["job", "show", &id.to_string()]).stdout);
    }

    /// Occupies all compute nodes, so that the next job has to wait for resources; gives the job's number.
    #[track_caller]
    pub fn block(&self, nodes: usize) -> u32 {
        let script = "#!/bin/sh\nwhile :; do sleep 0.1; done\n";
        let job = self.slurm.submit(
            self.user("bob"),
            script,
            &[&format!("--nodes={nodes}"), "--exclusive", "--output=/dev/null"],
        );
        self.slurm.wait_state(job, "RUNNING", DEADLINE);
        job
    }

    /// All RSA nodes are free.
    #[track_caller]
    pub fn assert_nothing_lent(&self) {
        for node in self.status()["nodes"].as_array().unwrap() {
            assert_eq!(node["free"], node["capacity"], "{node}");
        }
    }

    /// Neither Prolog nor Epilog has had anything to say.
    #[track_caller]
    pub fn assert_quiet(&self) {
        for hook in ["prolog", "epilog"] {
            let said = fs::read_to_string(self.log(hook)).unwrap_or_default();
            assert!(said.is_empty(), "the {hook} said: {said}");
        }
    }

    /// Nothing of any job is left: no rows, no RAM, no mounts, no processes.
    #[track_caller]
    pub fn assert_clean(&self) {
        wait_until(DEADLINE, "all jobs are done", || self.status()["jobs"].as_array().unwrap().is_empty());
        self.assert_nothing_lent();
        for host in self.bed.hosts() {
            let mounts: Vec<_> =
                host.new_mounts().into_iter().filter(|m| is_ours(&m.source, &m.kind)).collect();
            assert!(mounts.is_empty(), "on {}: {mounts:?}", host.name());
        }
        let left: Vec<String> = self
            .bed
            .processes()
            .into_iter()
            .map(|process| process.command_line.join(" "))
            .filter(|command| command.contains("gluster") || command.contains("task-runner"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// A job's name without the time of its submission, as people write it: `42`, or `42.1`.
pub fn life(job: &Value) -> String {
    let (number, rest) = job["id"].as_str().unwrap().split_once('@').unwrap();
    let restarts = rest.split_once('.').map(|(_, restarts)| format!(".{restarts}")).unwrap_or_default();
    format!("{number}{restarts}")
}

fn is_ours(source: &str, kind: &str) -> bool {
    source.contains("ondeck") || kind.contains("glusterfs") || source.contains("job-")
}

/// What a directory holds: names with content. While results come home names come and go: then it is read once more.
pub fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match tree_as_it_is(dir) {
            Ok(found) => return found,
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound
                    && dir.is_dir()
                    && Instant::now() < deadline => {}
            Err(error) => panic!("{}: {error}", dir.display()),
        }
    }
}

fn tree_as_it_is(dir: &Path) -> std::io::Result<BTreeMap<String, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![dir.to_owned()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next)? {
            let path = entry?.path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                let name = path.strip_prefix(dir).unwrap().to_string_lossy().into_owned();
                found.insert(name, fs::read(&path)?);
            }
        }
    }
    Ok(found)
}
