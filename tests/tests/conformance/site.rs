//! A site: hosts with an agent each, and what the tests do there.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ondeck_testbed::{Daemon, Host, Process, Ran, Signal, Testbed, wait_until};
use serde_json::Value;

use crate::binary::ondeck_binary;

/// For states that are reached at once on a machine that is not out of breath.
pub const DEADLINE: Duration = Duration::from_secs(20);
/// The owner of most RAM disks here.
pub const OWNER: u32 = 20_001;
pub const STRANGER: u32 = 20_002;
/// The port of the agents.
pub const PORT: u16 = 7272;

/// Where the agents keep their state; a hyphen and the host's name follow.
pub const STATE: &str = "/run/ondeck/agent";

/// Beds at the same time: the machine has two cores.
const BEDS: usize = 2;

/// An engine with the nodes that suit it.
#[derive(Debug)]
pub struct Case {
    pub engine: &'static str,
    pub servers: &'static [&'static str],
    /// Where it is shown: hosts and names of directories, each seen by a client of its own where the engine has clients.
    pub views: &'static [(&'static str, &'static str)],
    /// The engine's stated time after which a client sees what another one did.
    pub seen_after: Duration,
    /// Checks of `ondeck-probe posix` that the engine does not promise.
    pub without: &'static [&'static str],
}

pub const TMPFS: Case = Case {
    engine: "tmpfs",
    servers: &["n1"],
    views: &[("n1", "a"), ("n1", "b"), ("n1", "c"), ("n1", "d")],
    seen_after: Duration::ZERO,
    without: &[],
};

pub const GLUSTER: Case = Case {
    engine: "gluster",
    servers: &["n1", "n2"],
    // The last two are on the servers themselves.
    views: &[("n3", "a"), ("n4", "b"), ("n1", "c"), ("n2", "d")],
    seen_after: Duration::from_secs(1),
    without: &["a file without a name is made (O_TMPFILE)"],
};

pub const CEPH: Case = Case {
    engine: "ceph",
    servers: &["n1", "n2"],
    views: &[("n3", "a"), ("n4", "b"), ("n1", "c"), ("n2", "d")],
    seen_after: Duration::ZERO,
    without: &[
        "a file without a name is made (O_TMPFILE)",
        // It does not count blocks.
        "a hole takes no blocks",
        // Once somebody has set it by hand.
        "a new name moves the mtime of a directory",
    ],
};

/// Makes one test of each sentence for each engine: `gluster::the_sentence`.
#[macro_export]
macro_rules! for_engines {
    ($($module:ident = $case:ident: [$($sentence:ident),* $(,)?])*) => { $(
        mod $module {
            $(
                #[test]
                fn $sentence() {
                    if $crate::site::ready(&$crate::site::$case) {
                        super::$sentence(&$crate::site::$case);
                    }
                }
            )*
        }
    )* };
}

/// Whether the tests of an engine can run here; if not, says why.
pub fn ready(_case: &Case) -> bool {
    ondeck_testbed::available()
}

/// A turn at having a bed.
struct Turn;

static BEDS_IN_USE: Mutex<usize> = Mutex::new(0);
static BED_GIVEN_BACK: Condvar = Condvar::new();

impl Turn {
    fn wait() -> Turn {
        let mut used = BEDS_IN_USE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while *used >= BEDS {
            used = BED_GIVEN_BACK.wait(used).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        *used += 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *BEDS_IN_USE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) -= 1;
        BED_GIVEN_BACK.notify_one();
    }
}

/// What a site's configuration has beside the usual.
#[derive(Default)]
pub struct Setup {
    /// Lines for the part `[agent]`. `BED` in them is the bed's directory.
    pub agent: String,
    /// Further parts. `BED` in them is the bed's directory.
    pub parts: String,
    /// The size that each node lends; 3 GiB if empty.
    pub lends: &'static str,
    /// Hosts on which the agents' PATH begins with `BED/fake-HOST`.
    pub fake_path: &'static [&'static str],
}

/// Five hosts: ctl from which everything is ordered, and n1 to n4 with an agent each.
pub struct Site {
    agents: Mutex<BTreeMap<String, Daemon>>,
    pub bed: Testbed,
    pub config: PathBuf,
    pub munge: PathBuf,
    pub ondeck: PathBuf,
    pub probe: PathBuf,
    setup: Setup,
    began: Instant,
    _turn: Turn,
}

/// A RAM disk as it is shown in one place.
#[derive(Clone, Debug)]
pub struct View {
    pub host: Host,
    /// For programs in the host.
    pub path: PathBuf,
    /// For the test process.
    pub outside: PathBuf,
}

impl View {
    pub fn text(&self) -> String {
        self.path.display().to_string()
    }
}

pub const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];

impl Site {
    pub fn new() -> Site {
        Site::with(Setup::default())
    }

    pub fn with(setup: Setup) -> Site {
        let binary = ondeck_binary();
        let turn = Turn::wait();
        let began = Instant::now();
        let bed = Testbed::builder()
            .host("ctl")
            .hosts("n", 4)
            .private_directory("mnt")
            .binary(env!("CARGO_BIN_EXE_ondeck-testbed"))
            .build()
            .unwrap();
        let dir = bed.dir();
        // Copies, so that other users reach them wherever the target directory is.
        let (ondeck, probe) = (dir.join("ondeck"), dir.join("ondeck-probe"));
        fs::copy(binary, &ondeck).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_ondeck-probe"), &probe).unwrap();
        fs::create_dir(dir.join("ssd")).unwrap();
        let munge = bed.munge().unwrap();
        let config = dir.join("ondeck.toml");
        let lends = if setup.lends.is_empty() { "3GiB" } else { setup.lends };
        let text = format!(
            "nodes = [\"n1\", \"n2\", \"n3\", \"n4\"]\nmunge_socket = \"{}\"\n[agent]\nlisten = \"auto\"\nSTATE\n\
             administrators = [\"root@ctl\"]\n{}\n[agent.device.ram]\nkind = \"ram\"\ncapacity = \"{lends}\"\n{}\n",
            munge.display(),
            setup.agent.replace("BED", &dir.display().to_string()),
            setup.parts.replace("BED", &dir.display().to_string()),
        );
        fs::write(&config, text.replace("STATE", "")).unwrap();
        for host in NODES {
            // The hosts have one process-id namespace: an agent that looks for what it left must not find another's.
            let state = format!("state = \"{STATE}-{host}\"");
            fs::write(dir.join(format!("{host}.toml")), text.replace("STATE", &state)).unwrap();
        }
        let site =
            Site { agents: Mutex::default(), config, munge, ondeck, probe, setup, began, bed, _turn: turn };
        for host in site.setup.fake_path {
            fs::create_dir(site.fake(host)).unwrap();
        }
        for host in NODES {
            fs::create_dir(site.bed.dir().join(format!("disk-{host}"))).unwrap();
            site.mount_ssd(host);
            site.begin_agent(host);
        }
        for host in NODES {
            site.await_agent(host);
        }
        site
    }

    pub fn host(&self, name: &str) -> &Host {
        self.bed.host(name)
    }

    /// The directory in which the agent of a host looks for programs first.
    pub fn fake(&self, host: &str) -> PathBuf {
        self.bed.dir().join(format!("fake-{host}"))
    }

    /// Where each host has an SSD of its own.
    pub fn ssd(&self) -> PathBuf {
        self.bed.dir().join("ssd")
    }

    /// Gives a host its directory on the disk.
    pub fn mount_ssd(&self, host: &str) {
        let own = self.bed.dir().join(format!("disk-{host}"));
        self.host(host).ok(&["mount", "--bind", &own.to_string_lossy(), &self.ssd().to_string_lossy()]);
    }

    pub fn agent_log(&self, host: &str) -> PathBuf {
        self.bed.dir().join(format!("agent-{host}.log"))
    }

    fn begin_agent(&self, name: &str) {
        self.begin_agent_after(name, "");
    }

    fn begin_agent_after(&self, name: &str, script: &str) {
        let host = self.host(name);
        let mut command = host.command("sh");
        command.args(["-c", &format!("{script}\nexec \"$@\""), "sh"]).arg(&self.ondeck);
        command.arg("agent").arg("--config").arg(self.bed.dir().join(format!("{name}.toml")));
        if self.setup.fake_path.contains(&name) {
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", self.fake(name).display()));
        }
        let agent = host.spawn_daemon(command, &self.agent_log(name)).unwrap();
        self.agents().insert(name.to_owned(), agent);
    }

    fn await_agent(&self, name: &str) {
        let address = SocketAddr::new(self.host(name).address().into(), PORT);
        wait_until(DEADLINE, "the agent listens", || {
            let agents = self.agents();
            assert!(agents[name].is_running(), "the agent of {name} ended: {}", agents[name].log());
            self.host(name).listening().contains(&address)
        });
    }

    /// Starts the agent of a host again after [`Site::kill_agent`].
    pub fn start_agent(&self, name: &str) {
        self.begin_agent(name);
        self.await_agent(name);
    }

    /// The same, by a shell that does something before.
    pub fn start_agent_after(&self, name: &str, script: &str) {
        self.begin_agent_after(name, script);
        self.await_agent(name);
    }

    /// Starts the agent of a host, which refuses to; returns what it said.
    pub fn start_agent_in_vain(&self, name: &str) -> String {
        let mut command = self.host(name).command("timeout");
        command.args(["-k", "5", "20"]).arg(&self.ondeck).args(["agent", "--config"]);
        let ran = command.arg(self.bed.dir().join(format!("{name}.toml"))).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(1), "the agent of {name}: {said}");
        said
    }

    /// Kills the agent of a host with SIGKILL.
    pub fn kill_agent(&self, name: &str) {
        let mut agent = self.agents().remove(name).expect("an agent runs there");
        agent.kill(Signal::KILL);
        agent.wait(DEADLINE).expect("SIGKILL ends it");
    }

    /// For a host that has crashed.
    pub fn forget_agent(&self, name: &str) {
        self.agents().remove(name);
    }

    pub fn agent_pid(&self, name: &str) -> i32 {
        self.agents()[name].pid().as_raw_nonzero().get()
    }

    fn agents(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Daemon>> {
        self.agents.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Runs `ondeck ramdisk ...` on ctl.
    #[track_caller]
    pub fn ramdisk(&self, arguments: &[&str]) -> Ran {
        self.ramdisk_on(self.host("ctl"), arguments)
    }

    /// Runs `ondeck ramdisk ...` on a host, as its user.
    #[track_caller]
    pub fn ramdisk_on(&self, host: &Host, arguments: &[&str]) -> Ran {
        let config = self.config.to_string_lossy();
        let ondeck = self.ondeck.to_string_lossy();
        let mut line = vec![&*ondeck, "ramdisk", "--config", &config];
        line.extend(arguments);
        host.run(&line)
    }

    /// Begins `ondeck ramdisk ...` on ctl.
    pub fn begin_ramdisk(&self, arguments: &[&str]) -> Child {
        let mut command = self.host("ctl").command(&self.ondeck);
        command.arg("ramdisk").arg("--config").arg(&self.config).args(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Where a RAM disk is shown under a name on a host.
    pub fn view(&self, host: &str, name: &str) -> View {
        let path = self.bed.dir().join("mnt").join(name);
        let host = self.host(host).clone();
        View { outside: host.path_from_outside(&path), path, host }
    }

    /// The arguments of `create` for the first `views` places of a case.
    pub fn arguments(&self, case: &Case, name: &str, size: &str, views: usize) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["create", name, "--size", size, "--engine", case.engine, "--user", "20001:20001", "--nodes"]
                .map(str::to_owned)
                .into();
        arguments.push(case.servers.join(","));
        for (host, directory) in &case.views[..views] {
            let view = self.view(host, &format!("{name}-{directory}"));
            arguments.extend(["--mount".to_owned(), format!("{host}:{}", view.text())]);
        }
        arguments
    }

    pub fn views(&self, case: &Case, name: &str, views: usize) -> Vec<View> {
        let places = case.views[..views].iter();
        places.map(|(host, directory)| self.view(host, &format!("{name}-{directory}"))).collect()
    }

    /// Builds a RAM disk of [`OWNER`]'s, shown in the first `views` places of the case.
    #[track_caller]
    pub fn build(&self, case: &Case, name: &str, size: &str, views: usize) -> Vec<View> {
        self.build_with(case, name, size, views, &[]);
        self.views(case, name, views)
    }

    /// The same with further arguments; gives what `--json` printed.
    #[track_caller]
    pub fn build_with(&self, case: &Case, name: &str, size: &str, views: usize, more: &[&str]) -> Value {
        let arguments = self.arguments(case, name, size, views);
        let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        words.extend(more);
        words.push("--json");
        let ran = self.ramdisk(&words);
        ran.assert_success();
        serde_json::from_str(&ran.stdout).unwrap()
    }

    #[track_caller]
    pub fn destroy(&self, name: &str) -> Ran {
        let ran = self.ramdisk(&["destroy", name]);
        ran.assert_success();
        ran
    }

    /// `ondeck ramdisk status`.
    #[track_caller]
    pub fn status(&self, name: &str) -> Ran {
        self.ramdisk(&["status", name])
    }

    /// Asks for the status until it says that the RAM disk is not whole and names `what`, and gives the time until then.
    #[track_caller]
    pub fn status_tells(&self, name: &str, what: &str, since: Instant) -> Duration {
        wait_until(DEADLINE, &format!("the status tells of {what}"), || {
            let ran = self.status(name);
            let faults = ran.stdout.lines().filter(|line| line.trim_start().starts_with('!'));
            let said = faults.chain(ran.stderr.lines()).any(|line| line.contains(what));
            (ran.code() == Some(1) && said).then(|| since.elapsed())
        })
    }

    /// The devices of a node as `ondeck ramdisk nodes` shows them.
    #[track_caller]
    pub fn devices(&self, node: &str) -> Value {
        let ran = self.ramdisk(&["nodes", "--nodes", node, "--json"]);
        let reports: Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
        reports[0]["devices"].clone()
    }

    /// The directory in which the agent of a host keeps its RAM disks, for the test process.
    pub fn runtime_dirs(&self, host: &str) -> PathBuf {
        self.host(host).path_from_outside(format!("{STATE}-{host}/ramdisks"))
    }

    /// The directory in which the agent of a host keeps a RAM disk, for the test process.
    pub fn runtime_dir(&self, host: &str, name: &str) -> PathBuf {
        self.runtime_dirs(host).join(name)
    }

    /// The one process of a program on a host.
    #[track_caller]
    pub fn process(&self, host: &str, program: &str) -> Process {
        let found = self.processes(host, program);
        assert_eq!(found.len(), 1, "{program} on {host}: {found:#?}");
        found[0].clone()
    }

    pub fn processes(&self, host: &str, program: &str) -> Vec<Process> {
        let mut found = self.host(host).processes();
        found.retain(|process| is_program(process, program));
        found
    }

    /// What is left in the hosts beside the agents and munged; empty if nothing is.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        for process in self.bed.processes() {
            let own = process.command_line.get(1).is_some_and(|word| word == "agent")
                || is_program(&process, "munged")
                // It has ended, and its parent is about to ask how.
                || process.command_line.is_empty();
            if !own {
                left.push(format!("process {:?}", process.command_line));
            }
        }
        for host in self.bed.hosts() {
            let name = host.name();
            let mounts = host.new_mounts().into_iter().filter(|mount| mount.target != self.ssd());
            left.extend(mounts.map(|mount| format!("{name}: mount {}", mount.target.display())));
            let agent = SocketAddr::new(host.address().into(), PORT);
            left.extend(
                host.listening()
                    .into_iter()
                    .filter(|socket| *socket != agent)
                    .map(|socket| format!("{name}: listening on {socket}")),
            );
            let outside = |path| host.path_from_outside(path);
            for directory in
                [self.runtime_dirs(name), outside(self.bed.dir().join("mnt")), outside(self.ssd())]
            {
                let entries = fs::read_dir(directory).into_iter().flatten().flatten();
                left.extend(entries.map(|entry| format!("{name}: {}", entry.path().display())));
            }
        }
        for entry in fs::read_dir("/sys/block").unwrap().flatten() {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if Path::new(&backing).starts_with(self.bed.dir()) {
                left.push(format!("loop device of {}", backing.trim()));
            }
        }
        left
    }

    /// Fails unless every host is as it was before the first RAM disk: no process, mount, listening socket, directory,
    /// image or loop device is left, and nothing is promised. A process that was just killed may take a moment to go.
    #[track_caller]
    pub fn assert_nothing_is_left(&self) {
        self.assert_nothing_is_left_within(Duration::from_secs(2));
    }

    #[track_caller]
    pub fn assert_nothing_is_left_within(&self, patience: Duration) {
        let began = Instant::now();
        loop {
            let left = self.leftovers();
            if left.is_empty() {
                break;
            }
            assert!(
                began.elapsed() < patience,
                "left after {patience:?}: {:#?}",
                &left[..left.len().min(20)]
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        for host in NODES {
            let log = fs::read_to_string(self.agent_log(host)).unwrap();
            let defects = ["panicked", "defect", "poisoned"];
            let line = log.lines().find(|line| defects.iter().any(|word| line.contains(word)));
            assert_eq!(line, None, "in the log of {host}'s agent");
        }
        let ran = self.ramdisk(&["nodes", "--json"]);
        let reports: Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
        for report in reports.as_array().unwrap() {
            for (device, found) in report["devices"].as_object().unwrap() {
                assert_eq!(found["promised"], 0, "{device} of {}", report["node"]);
            }
            assert_eq!(report["ramdisks"], 0, "{}", report["node"]);
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in NODES {
                let log = fs::read_to_string(self.agent_log(host)).unwrap_or_default();
                eprintln!("--- the agent of {host}:\n{}", last_lines(&log, 12));
            }
        }
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        eprintln!("{:6.1} s  {test}", self.began.elapsed().as_secs_f64());
    }
}

fn is_program(process: &Process, program: &str) -> bool {
    process
        .command_line
        .first()
        .is_some_and(|word| Path::new(word).file_name().is_some_and(|name| name == program))
}

/// The end of a text, for a message.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(count)..].join("\n");
    // A line may be as long as it likes.
    let from = end.char_indices().rev().nth(4000).map_or(0, |(index, _)| index);
    end[from..].to_owned()
}

/// Sends a signal to a process of a bed.
pub fn signal(process: &Process, signal: Signal) {
    // It may have ended.
    let _ = rustix::process::kill_process(process.pid, signal);
}

/// Bytes that tell their offset: no two blocks are alike, and none is like another seed's. Slices of one table, as a
/// test is not optimised.
pub fn pattern(offset: u64, length: usize, seed: u64) -> Vec<u8> {
    /// A prime, so that it repeats at no block size that a test uses.
    const PERIOD: usize = 1_048_573;
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mixed = |word: u64| {
            let mixed = word.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            mixed ^ (mixed >> 29)
        };
        let mut bytes: Vec<u8> =
            (0..PERIOD as u64 / 8 + 1).flat_map(|word| mixed(word).to_le_bytes()).collect();
        bytes.truncate(PERIOD);
        bytes
    });
    let mut bytes = Vec::with_capacity(length);
    let mut at = ((offset + seed * 99_991) % PERIOD as u64) as usize;
    while bytes.len() < length {
        let part = (length - bytes.len()).min(PERIOD - at);
        bytes.extend_from_slice(&table[at..at + part]);
        at = 0;
    }
    bytes
}

/// Writes a file of [`pattern`] bytes.
pub fn write_pattern(path: &Path, length: u64, seed: u64) {
    use std::io::Write;
    let mut file = fs::File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut offset = 0;
    while offset < length {
        let part = (length - offset).min(1 << 20) as usize;
        file.write_all(&pattern(offset, part, seed)).unwrap();
        offset += part as u64;
    }
    file.sync_all().unwrap();
}

/// Where a file first differs from [`pattern`] bytes.
pub fn difference(path: &Path, length: u64, seed: u64) -> Option<String> {
    use std::io::Read;
    let mut file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) => return Some(format!("{}: {error}", path.display())),
    };
    let size = file.metadata().unwrap().len();
    if size != length {
        return Some(format!("{} has {size} bytes, not {length}", path.display()));
    }
    let mut offset = 0;
    while offset < length {
        let part = (length - offset).min(1 << 20) as usize;
        let mut found = vec![0; part];
        if let Err(error) = file.read_exact(&mut found) {
            return Some(format!("{} at {offset}: {error}", path.display()));
        }
        let wanted = pattern(offset, part, seed);
        if found != wanted {
            let at = found.iter().zip(&wanted).position(|(a, b)| a != b).unwrap();
            let wrong = found.iter().zip(&wanted).filter(|(a, b)| a != b).count();
            return Some(format!(
                "{} differs first at byte {}: {} instead of {} ({wrong} bytes of this MiB differ)",
                path.display(),
                offset + at as u64,
                found[at],
                wanted[at]
            ));
        }
        offset += part as u64;
    }
    None
}
