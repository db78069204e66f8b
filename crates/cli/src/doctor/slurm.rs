//! `ondeck doctor --slurm`: what the scheduler needs from Slurm, its own configuration and the agents.
//!
//! - `burst_buffer`: Slurm's burst buffers, if jobs have them
//! - `hooks`: what the hooks of compute nodes are

mod burst_buffer;
mod hooks;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use ondeck_api::host_name;
use ondeck_api::scheduler::{Status, WarningKind};
use ondeck_api::wire::{NodeReport, NodeSettings, RefusalCode};
use ondeck_api::{CallError, Config};
use ondeck_core::schedule::LockIn;
use ondeck_core::{Bytes, EngineKind, Epoch, NodeName, RamDiskId};
use ondeck_fleet::Fleet;
use tokio::process::Command;
use tokio::task::JoinSet;

use super::{Finding, State, finding};
use crate::cluster::status::places_lost;
use crate::cluster::{Scheduler, explain};

/// The Slurm that this version was tried with.
const TRIED: &str = "22.05";

/// So many agents are asked at the same time.
const ASKED_AT_ONCE: usize = 64;

/// So many nodes are named in a finding.
const NAMED: usize = 5;

/// How much longer than its limit a hook may take: a start, and `timeout` around it.
const HOOK_MARGIN: Duration = Duration::from_secs(10);

/// Scripts that a Prolog calls are looked into this deep.
const DEPTH: u32 = 2;

/// A script is no longer than this.
const LONGEST_SCRIPT: u64 = 1 << 20;

/// Looks at everything.
pub fn examine(path: Option<&Path>) -> Vec<Finding> {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(error) => {
            let remedy = "slurm/ondeck.toml.example explains the keys";
            return vec![finding("configuration", State::Missing, error.to_string(), Some(remedy))];
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return vec![finding("runtime", State::Missing, error.to_string(), None)],
    };
    let mut findings = of_the_configuration(&config);
    findings.push(super::privileged_ports());
    let status = ask_scheduler(&config);
    findings.extend(runtime.block_on(of_slurm(&config, path, status.as_ref().ok())));
    findings.extend(scheduler(&config, status));
    findings
}

// ---- the configuration

fn of_the_configuration(config: &Config) -> Vec<Finding> {
    let site = &config.scheduler;
    let mut findings = Vec::new();
    findings.push(match site.site(&config.nodes) {
        Ok(_) => {
            let pools = site.pools(&config.nodes);
            let pools: Vec<String> =
                pools.iter().map(|(name, pool)| format!("{name} of {} nodes", pool.nodes.len())).collect();
            finding("pools", State::Ok, pools.join(", "), None)
        }
        Err(why) => {
            let remedy = "mend it, and check it with `ondeck serve --check`";
            finding("pools", State::Missing, why, Some(remedy))
        }
    });
    findings.push(match (&site.host, site.listen) {
        (None, _) => finding(
            "scheduler's host",
            State::Missing,
            "the configuration names none: Prologs look for the scheduler on their own node",
            Some("name the host of `ondeck serve`: host = \"...\" in the part [scheduler]"),
        ),
        (Some(host), None) => finding(
            "scheduler's host",
            State::Missing,
            format!("{host}, where only its own processes reach the scheduler"),
            Some("let it listen for the nodes: listen = \"auto\" in the part [scheduler]"),
        ),
        (Some(host), Some(_)) => {
            finding("scheduler's host", State::Ok, format!("{host} port {}", site.port), None)
        }
    });
    let prefixes: Vec<String> =
        config.agent.mount_prefixes.iter().map(|path| path.display().to_string()).collect();
    findings.push(if prefixes.is_empty() {
        finding(
            "mount_prefixes",
            State::Missing,
            "none: no RAM disk may be shown over a job's directories",
            Some("name the directories of the jobs' data in the part [agent], like mount_prefixes = [\"/scratch\"]"),
        )
    } else {
        finding("mount_prefixes", State::Ok, prefixes.join(", "), None)
    });
    findings
}

fn ask_scheduler(config: &Config) -> Result<Status, Finding> {
    let scheduler = Scheduler::find(config)
        .map_err(|error| finding("scheduler", State::Missing, format!("{error:#}"), None))?;
    scheduler.ask::<Status>("GET", "jobs", None::<&()>, None).map_err(|error| {
        let remedy = "start `ondeck serve` as root on its host (slurm/ondeck-serve.service)";
        finding("scheduler", State::Missing, explain(&error), Some(remedy))
    })
}

/// The scheduler, and what it knows of compute nodes.
fn scheduler(config: &Config, status: Result<Status, Finding>) -> Vec<Finding> {
    let status = match status {
        Ok(status) => status,
        Err(finding) => return vec![finding],
    };
    let mut findings = vec![of_the_scheduler(config, &status)];
    if status.places_lost > 0 {
        let remedy = "start slurmctld anew: jobs that wait begin a minute later for it, and none is lost";
        let detail = places_lost(status.places_lost);
        findings.push(finding("burst buffers' places", State::Limited, detail, Some(remedy)));
    }
    let remedy = "mend it: docs/layout.md explains the site's file, and `ondeck doctor` says more where the scheduler runs";
    if let Some(fault) = &status.site_file {
        findings.push(finding("site file", State::Limited, one_line(fault), Some(remedy)));
    }
    for filesystem in status.filesystems.iter().filter(|filesystem| !filesystem.fault.is_empty()) {
        let detail = format!("the load of {}: {}", filesystem.path.display(), one_line(&filesystem.fault));
        findings.push(finding("site file", State::Limited, detail, Some(remedy)));
    }
    for warning in status.warnings {
        let (what, remedy) = match warning.kind {
            WarningKind::NoProlog => {
                ("Prologs that ask", "its log in slurmd's, or `ondeck prolog` by hand, says why not")
            }
            WarningKind::LeftOver => {
                ("left-over RAM disks", "start `ondeck agent` there; if nothing helps, reboot the node")
            }
            // The agents were asked just now.
            WarningKind::SilentAgent => continue,
        };
        findings.push(finding(what, State::Missing, one_line(&warning.text), Some(remedy)));
    }
    findings
}

fn of_the_scheduler(config: &Config, status: &Status) -> Finding {
    if let Some(fault) = &status.journal {
        let state = config.scheduler.state.display();
        let detail = format!("it can't write its journal in {state}, and decides nothing: {fault}");
        let remedy = "make room there, or mend the disk; it goes on by itself";
        return finding("scheduler", State::Missing, detail, Some(remedy));
    }
    if let Some(fault) = &status.workload_manager {
        let remedy = "it goes on with what it knew; its log says more";
        return finding(
            "scheduler",
            State::Missing,
            format!("it can't see Slurm's queue: {fault}"),
            Some(remedy),
        );
    }
    if status.simulated {
        let remedy = "remove `simulate` from the part [scheduler] and start it again to lend something";
        return finding("scheduler", State::Limited, "it pretends: nothing is lent", Some(remedy));
    }
    let up = status.nodes.iter().filter(|node| node.state == ondeck_core::schedule::NodeState::Up);
    let detail = format!("answers; {} of {} RSA nodes are up", up.count(), status.nodes.len());
    finding("scheduler", State::Ok, detail, None)
}

// ---- Slurm

async fn of_slurm(config: &Config, path: Option<&Path>, status: Option<&Status>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // A command that finds no controller hangs, so the others are not even tried then.
    let ping = ask(config, "scontrol", &["ping"]).await;
    let up = ping.as_ref().is_ok_and(|text| text.lines().any(|line| line.ends_with(" is UP")));
    if !up {
        let why = ping.unwrap_or_else(|why| why);
        let remedy =
            "start slurmctld; on a machine without /etc/slurm/slurm.conf, name it: conf in the part [slurm]";
        findings.push(finding("Slurm", State::Missing, one_line(&why), Some(remedy)));
        findings.extend(of_the_agents(config, path, (&[], &BTreeMap::new()), status).await);
        return findings;
    }
    let settings = match ask(config, "scontrol", &["show", "config"]).await {
        Ok(text) => parse(&text),
        Err(why) => {
            findings.push(finding("Slurm", State::Missing, format!("scontrol show config: {why}"), None));
            return findings;
        }
    };
    findings.push(version(&settings));
    findings.push(hook("Prolog", &settings));
    findings.push(hook("Epilog", &settings));
    findings.push(task_prolog(&settings));
    findings.push(prolog_flags(&settings));
    findings.push(process_tracking(&settings));
    findings.extend(time_for_hooks(config, &settings));
    findings.push(job_submit(&settings));
    findings.push(lock_in(config, &settings));
    if setting(&settings, "burstbuffertype") == "burst_buffer/lua" {
        findings.extend(burst_buffer::look(config, &settings).await);
    }
    let compute: Vec<NodeName> = match ask(config, "sinfo", &["--noheader", "--Node", "--format=%N"]).await {
        Ok(text) => {
            let mut names: Vec<NodeName> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
            names.sort();
            names.dedup();
            names
        }
        Err(why) => {
            findings.push(finding("Slurm's nodes", State::Missing, why, None));
            Vec::new()
        }
    };
    findings.extend(of_the_agents(config, path, (&compute, &settings), status).await);
    findings
}

/// Runs a command of Slurm; what it wrote, or why there is nothing.
async fn ask(config: &Config, program: &str, arguments: &[&str]) -> Result<String, String> {
    let slurm = &config.slurm;
    let path = slurm.bin_dir.as_ref().map_or_else(|| PathBuf::from(program), |dir| dir.join(program));
    let mut command = Command::new(path);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    if let Some(conf) = &slurm.conf {
        command.env("SLURM_CONF", conf);
    }
    let output = match tokio::time::timeout(slurm.timeout, command.output()).await {
        Err(_) => return Err(format!("{program} took longer than {} s", slurm.timeout.as_secs())),
        Ok(Err(error)) => return Err(format!("can't run {program}: {error}")),
        Ok(Ok(output)) => output,
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(one_line(&format!("{} {}", text.trim(), said.trim())))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The settings that `scontrol show config` prints, by lower-case name. Lists are joined: `Prolog[0]` is `prolog`.
fn parse(text: &str) -> BTreeMap<String, String> {
    let mut settings: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
        let name = name.trim().to_lowercase();
        let name = name.split('[').next().unwrap_or_default().to_owned();
        let value = value.trim();
        let value = if value == "(null)" { "" } else { value };
        let known = settings.entry(name).or_default();
        if !known.is_empty() && !value.is_empty() {
            known.push(',');
        }
        known.push_str(value);
    }
    settings
}

fn setting<'a>(settings: &'a BTreeMap<String, String>, name: &str) -> &'a str {
    settings.get(name).map_or("", String::as_str)
}

fn version(settings: &BTreeMap<String, String>) -> Finding {
    let version = setting(settings, "slurm_version");
    let host = setting(settings, "slurmctldhost");
    let detail = format!("{version}, its controller is {host}");
    if version.starts_with(&format!("{TRIED}.")) {
        return finding("Slurm", State::Ok, detail, None);
    }
    let number = |text: &str| -> Option<(u32, u32)> {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        Some((parts.next()??, parts.next()??))
    };
    let age = if number(version) < number(TRIED) { "older" } else { "newer" };
    let remedy = format!(
        "it is {age} than {TRIED}, the one that was tried: with `simulate` in the part [scheduler], see first whether \
         `ondeck status` shows what squeue does"
    );
    finding("Slurm", State::Limited, detail, Some(&remedy))
}

/// Prolog or Epilog: is it there, can it be run, does it call us?
fn hook(what: &'static str, settings: &BTreeMap<String, String>) -> Finding {
    let command = what.to_lowercase();
    let scripts = setting(settings, &command);
    let install =
        format!("copy slurm/{command} beside slurm.conf, and write there: {what}=/etc/slurm/{command}");
    if scripts.is_empty() {
        return finding(what, State::Missing, "none is set", Some(&install));
    }
    let files: Vec<PathBuf> = scripts.split(',').flat_map(|script| files(Path::new(script.trim()))).collect();
    if files.is_empty() {
        let remedy = format!("put it there on every compute node, or {install}");
        return finding(what, State::Missing, format!("{scripts} is not on this machine"), Some(&remedy));
    }
    for file in &files {
        let mode = fs::metadata(file).map(|found| found.permissions().mode());
        if mode.is_ok_and(|mode| mode & 0o100 == 0) {
            let detail = format!("{} can't be executed: jobs fail and nodes are drained", file.display());
            let remedy = format!("chmod 755 {}", file.display());
            return finding(what, State::Missing, detail, Some(&remedy));
        }
    }
    if files.iter().any(|file| calls(file, &command, DEPTH)) {
        return finding(what, State::Ok, format!("{scripts} calls `ondeck {command}`"), None);
    }
    let remedy =
        format!("call slurm/{command} from it, or `ondeck {command}`, and end with 0 whatever it says");
    finding(what, State::Missing, format!("{scripts} does not call `ondeck {command}`"), Some(&remedy))
}

/// It tells a job's user what became of the RAM disk; nothing depends on it.
fn task_prolog(settings: &BTreeMap<String, String>) -> Finding {
    const WHAT: &str = "TaskProlog";
    let script = setting(settings, "taskprolog");
    let remedy = "copy slurm/task_prolog beside slurm.conf and write TaskProlog=/etc/slurm/task_prolog: otherwise a job's \
                  output does not say whether its data was in RAM";
    if script.is_empty() {
        return finding(WHAT, State::Limited, "none is set", Some(remedy));
    }
    match fs::read_to_string(script) {
        Ok(text) if text.contains("ondeck") => finding(WHAT, State::Ok, script, None),
        Ok(_) => finding(WHAT, State::Limited, format!("{script} is not ours"), Some(remedy)),
        Err(error) => finding(WHAT, State::Limited, format!("{script}: {error}"), Some(remedy)),
    }
}

/// The files that a path of slurm.conf means: Slurm allows a pattern for the name of the file.
fn files(path: &Path) -> Vec<PathBuf> {
    let pattern = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if !pattern.contains(['*', '?', '[']) {
        return if path.is_file() { vec![path.to_owned()] } else { Vec::new() };
    }
    let entries = fs::read_dir(path.parent().unwrap_or(path)).into_iter().flatten().flatten();
    let (before, after) = (pattern.split(['*', '?', '[']).next(), pattern.rsplit(['*', '?', ']']).next());
    let fits = |name: &str| {
        name.starts_with(before.unwrap_or_default()) && name.ends_with(after.unwrap_or_default())
    };
    let found = entries.filter(|entry| fits(&entry.file_name().to_string_lossy())).map(|entry| entry.path());
    found.filter(|path| path.is_file()).collect()
}

/// Whether a script calls `ondeck COMMAND`, itself or through scripts that it names.
fn calls(script: &Path, command: &str, depth: u32) -> bool {
    let short = fs::metadata(script).is_ok_and(|found| found.is_file() && found.len() <= LONGEST_SCRIPT);
    let Some(text) = short.then(|| fs::read_to_string(script).ok()).flatten() else { return false };
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let words = || code.iter().flat_map(|line| line.split([' ', '\t', '"', '\'', ';', '=', '`', '(', ')']));
    let is_named = words().any(|word| word.to_lowercase().contains("ondeck"));
    if is_named && words().any(|word| word == command) {
        return true;
    }
    let named = words().filter(|word| word.starts_with('/')).map(Path::new);
    let mut called = named.flat_map(|path| if path.is_dir() { files(&path.join("*")) } else { files(path) });
    depth > 0 && called.any(|path| path != script && calls(&path, command, depth - 1))
}

fn prolog_flags(settings: &BTreeMap<String, String>) -> Finding {
    let flags = setting(settings, "prologflags");
    let has = |flag: &str| flags.split(',').any(|found| found.trim().eq_ignore_ascii_case(flag));
    if has("Alloc") || has("Contain") {
        return finding("PrologFlags", State::Ok, flags, None);
    }
    finding(
        "PrologFlags",
        State::Missing,
        format!("without Alloc ({})", if flags.is_empty() { "none" } else { flags }),
        Some(
            "write PrologFlags=Alloc: otherwise the Prolog of a node runs at a job's first step there, too late",
        ),
    )
}

/// Output of jobs that run is covered while their processes are stopped, which needs their control groups, and mounts that
/// appear in them.
fn process_tracking(settings: &BTreeMap<String, String>) -> Finding {
    const WHAT: &str = "late covering";
    let (tracking, container) = (setting(settings, "proctracktype"), setting(settings, "jobcontainertype"));
    if tracking != "proctrack/cgroup" {
        let remedy =
            "set ProctrackType=proctrack/cgroup; or have jobs wait for their RAM disk with #RSA_WAIT=hold";
        let detail = format!("with {tracking}, jobs that start before their RAM disk is ready work on disk");
        return finding(WHAT, State::Limited, detail, Some(remedy));
    }
    if container.contains("tmpfs") {
        let remedy = "have jobs wait for their RAM disk with #RSA_WAIT=hold";
        let detail = format!("with {container}, jobs that start before their RAM disk is ready work on disk");
        return finding(WHAT, State::Limited, detail, Some(remedy));
    }
    finding(WHAT, State::Ok, tracking, None)
}

/// Slurm must not end a hook that is within its own limit: that drains the node.
fn time_for_hooks(config: &Config, settings: &BTreeMap<String, String>) -> Vec<Finding> {
    let limits = &config.scheduler.limits;
    let longest = limits.prolog.max(limits.epilog);
    // As `30 sec`, or a number that means none.
    let seconds = |name: &str| {
        let number = setting(settings, name).split_whitespace().next()?.parse::<u64>().ok()?;
        (number != u64::from(u16::MAX) && number != u64::from(u16::MAX) - 1).then_some(number)
    };
    let wanted = (longest + HOOK_MARGIN).as_secs();
    let mut findings = vec![match seconds("prologepilogtimeout") {
        Some(limit) if Duration::from_secs(limit) <= longest => {
            let detail = format!("{limit} s, and ours may take {} s", longest.as_secs());
            let remedy = format!(
                "write PrologEpilogTimeout={wanted}, or lower prolog and epilog in [scheduler.limits]: a hook that Slurm \
                 ends drains its node"
            );
            finding("PrologEpilogTimeout", State::Missing, detail, Some(&remedy))
        }
        Some(limit) => finding("PrologEpilogTimeout", State::Ok, format!("{limit} s"), None),
        None => finding("PrologEpilogTimeout", State::Ok, "none", None),
    }];
    if let Some(start) = seconds("batchstarttimeout") {
        findings.push(if Duration::from_secs(start) < limits.prolog {
            let detail = format!("{start} s, and a Prolog may take {} s", limits.prolog.as_secs());
            let wanted = (limits.prolog + HOOK_MARGIN).as_secs();
            let remedy = format!(
                "write BatchStartTimeout={wanted}: a job that has not begun by then is taken for lost"
            );
            finding("BatchStartTimeout", State::Limited, detail, Some(&remedy))
        } else {
            finding("BatchStartTimeout", State::Ok, format!("{start} s"), None)
        });
    }
    findings
}

fn job_submit(settings: &BTreeMap<String, String>) -> Finding {
    const WHAT: &str = "JobSubmitPlugins";
    const LOST: &str = "a malformed #RSA_ line is not refused at sbatch, and jobs are held for their input only when they \
                        are next";
    let plugins = setting(settings, "jobsubmitplugins");
    if !plugins.split(',').any(|plugin| plugin.trim().trim_start_matches("job_submit/") == "lua") {
        let remedy =
            format!("copy slurm/job_submit.lua beside slurm.conf and write JobSubmitPlugins=lua: {LOST}");
        return finding(WHAT, State::Limited, "without lua", Some(&remedy));
    }
    let conf = Path::new(setting(settings, "slurm_conf"));
    let script = conf.with_file_name("job_submit.lua");
    match fs::read_to_string(&script) {
        Ok(text) if text.contains("ondeck") => {
            finding(WHAT, State::Ok, format!("lua, with {}", script.display()), None)
        }
        Ok(_) => {
            let remedy = format!("load slurm/job_submit.lua from it, as its head shows: {LOST}");
            finding(WHAT, State::Limited, format!("{} is not ours", script.display()), Some(&remedy))
        }
        Err(error) => {
            let remedy = "it must be on the machine of slurmctld: run this there";
            finding(WHAT, State::Limited, format!("lua; {}: {error}", script.display()), Some(remedy))
        }
    }
}

fn lock_in(config: &Config, settings: &BTreeMap<String, String>) -> Finding {
    let lock_in = config.scheduler.lock_in;
    let storage = setting(settings, "accountingstoragetype");
    if lock_in == LockIn::Qos && storage != "accounting_storage/slurmdbd" {
        let detail = format!("qos, and Slurm has no accounting database ({storage})");
        let remedy = "use lock_in = \"priority\": without accounting Slurm accepts a quality of service and ignores it";
        return finding("lock_in", State::Missing, detail, Some(remedy));
    }
    finding("lock_in", State::Ok, lock_in.word(), None)
}

// ---- agents

/// What the agent of a node said.
struct Answer {
    node: NodeName,
    report: Result<NodeReport, CallError>,
    /// Whether it refuses orders from here.
    refuses: bool,
    /// Where it shows what is lost.
    dead: Result<Vec<PathBuf>, CallError>,
}

async fn of_the_agents(
    config: &Config,
    path: Option<&Path>,
    (compute, settings): (&[NodeName], &BTreeMap<String, String>),
    status: Option<&Status>,
) -> Vec<Finding> {
    let site = &config.scheduler;
    let pools = site.pools(&config.nodes);
    let rsa: Vec<NodeName> = pools.values().flat_map(|pool| pool.nodes.clone()).collect();
    // Only there is it known what the scheduler may do.
    let from_scheduler = rustix::process::geteuid().is_root()
        && host_name().is_ok_and(|own| site.host.as_ref().is_none_or(|host| *host == own));
    let mut all: Vec<NodeName> = rsa.iter().chain(compute).cloned().collect();
    all.sort();
    all.dedup();
    let answers = ask_agents(config, all, from_scheduler).await;
    let among = |nodes: &[NodeName]| -> Vec<&Answer> {
        answers.iter().filter(|answer| nodes.contains(&answer.node)).collect()
    };
    let mut findings = Vec::new();
    if !rsa.is_empty() {
        findings.push(agents("agents of RSA nodes", &among(&rsa)));
    }
    if !compute.is_empty() {
        findings.push(agents("agents of Slurm's nodes", &among(compute)));
    }
    findings.extend(what_is_lent(config, &answers));
    findings.extend(what_differs(config, &among(compute)));
    let seen: Vec<hooks::NodeHooks> = among(compute)
        .into_iter()
        .filter_map(|answer| Some((&answer.node, answer.report.as_ref().ok()?.hooks.as_ref()?)))
        .collect();
    findings.extend(hooks::compare(&hooks::ThisMachine::new(config, Config::path(path), settings), &seen));
    findings.extend(what_is_dead(&answers));
    findings.extend(status.and_then(|status| who_is_obeyed(status, &answers)));
    let versions: Vec<&str> =
        answers.iter().filter_map(|answer| Some(answer.report.as_ref().ok()?.version.as_str())).collect();
    let other: Vec<&&str> =
        versions.iter().filter(|version| **version != env!("CARGO_PKG_VERSION")).collect();
    if let Some(version) = other.first() {
        let detail =
            format!("{} agents have another than {}, like {version}", other.len(), env!("CARGO_PKG_VERSION"));
        let remedy = "install the same on all nodes and start their agents again; RAM disks stay";
        findings.push(finding("versions", State::Limited, detail, Some(remedy)));
    }
    findings
}

async fn ask_agents(config: &Config, nodes: Vec<NodeName>, try_order: bool) -> Vec<Answer> {
    let fleet = Arc::new(Fleet::new(config));
    // One that can't be: whoever may ask is told that there is none.
    let nothing = "doctor".parse().ok().map(|name| RamDiskId { name, epoch: Epoch(0) });
    let mut answers = Vec::new();
    let mut set: JoinSet<Answer> = JoinSet::new();
    for node in nodes {
        if set.len() >= ASKED_AT_ONCE {
            answers.extend(set.join_next().await.and_then(Result::ok));
        }
        let (fleet, nothing) = (Arc::clone(&fleet), nothing.clone());
        set.spawn(async move {
            let report = fleet.node(Some(&node)).await;
            let refuses = match nothing {
                Some(nothing) if try_order && report.is_ok() => {
                    let tried = fleet.task(&node, &nothing, "none", Duration::ZERO).await;
                    tried.is_err_and(|error| error.code() == Some(RefusalCode::Forbidden))
                }
                _ => false,
            };
            let dead = match &report {
                Ok(_) => dead_mounts(&fleet, &node).await,
                Err(_) => Ok(Vec::new()),
            };
            Answer { node, report, refuses, dead }
        });
    }
    while let Some(answer) = set.join_next().await {
        answers.extend(answer.ok());
    }
    answers.sort_by(|a, b| a.node.cmp(&b.node));
    answers
}

/// Where a node still shows RAM disks that are lost there. Only administrators see those of all users.
async fn dead_mounts(fleet: &Fleet, node: &NodeName) -> Result<Vec<PathBuf>, CallError> {
    let found = fleet.ramdisks_of(node).await?;
    Ok(found.into_iter().flat_map(|local| local.dead_mounts).collect())
}

/// Whether compute nodes have another configuration than this machine where it must be the same.
fn what_differs(config: &Config, answers: &[&Answer]) -> Vec<Finding> {
    let ours = NodeSettings::new(config);
    let theirs = || {
        answers
            .iter()
            .filter_map(|answer| Some((&answer.node, answer.report.as_ref().ok()?.settings.as_ref()?)))
    };
    let mut findings = Vec::new();
    let mut compare = |what, here: String, told: &dyn Fn(&NodeSettings) -> String, then: &str| {
        let other: Vec<(&NodeName, String)> = theirs()
            .map(|(node, settings)| (node, told(settings)))
            .filter(|(_, told)| *told != here)
            .collect();
        let Some((_, told)) = other.first() else { return };
        let nodes: Vec<&NodeName> = other.iter().map(|(node, _)| *node).collect();
        let detail = format!("{} have another than {here}: {}, like {told}", other.len(), list(&nodes));
        let remedy =
            format!("{then}; copy this machine's ondeck.toml there, and have the agents read it: kill -HUP");
        findings.push(finding(what, State::Missing, one_line(&detail), Some(&remedy)));
    };
    let prefixes = |settings: &NodeSettings| {
        let paths: BTreeSet<String> = settings
            .mount_prefixes
            .iter()
            .map(|path| path.components().collect::<PathBuf>().display().to_string())
            .collect();
        let paths: Vec<String> = paths.into_iter().collect();
        if paths.is_empty() { "none".to_owned() } else { paths.join(" and ") }
    };
    let host = |settings: &NodeSettings| match &settings.scheduler {
        Some(host) => format!("{host} port {}", settings.scheduler_port),
        None => "none, which is the node itself".to_owned(),
    };
    // That there are none here is told already.
    if !ours.mount_prefixes.is_empty() {
        compare(
            "nodes' mount_prefixes",
            prefixes(&ours),
            &prefixes,
            "jobs' directories are not covered there",
        );
    }
    if ours.scheduler.is_some() {
        compare("nodes' scheduler", host(&ours), &host, "their hooks ask elsewhere, and jobs work on disk");
    }
    findings
}

/// Whether nodes show RAM disks that are lost: every job that looks there gets errors.
fn what_is_dead(answers: &[Answer]) -> Option<Finding> {
    let mut nodes: Vec<&NodeName> = Vec::new();
    let (mut detail, mut state) = (Vec::new(), State::Ok);
    for answer in answers {
        match &answer.dead {
            Ok(dead) if dead.is_empty() => {}
            Ok(dead) => {
                state = State::Missing;
                nodes.push(&answer.node);
                detail.extend(dead.iter().map(|path| format!("{} on {}", path.display(), answer.node)));
            }
            Err(error) => {
                state = State::Missing;
                detail.push(format!("not known of {}: {error}", answer.node));
            }
        }
    }
    if state == State::Ok {
        return None;
    }
    let remedy = if nodes.is_empty() {
        "see what keeps the agents there from telling".to_owned()
    } else {
        format!(
            "every access there fails; the Epilog of the RAM disk's job, or the Prolog of the next one, takes them away: \
             see that Slurm calls both on {}",
            list(&nodes)
        )
    };
    Some(finding("dead mounts", state, one_line(&detail.join(", ")), Some(&remedy)))
}

/// Whether agents obey another scheduler than the one that answers. Those that obey nobody, or a journal that it has
/// replaced, are claimed before it orders anything of them.
fn who_is_obeyed(status: &Status, answers: &[Answer]) -> Option<Finding> {
    let is_foreign = |answer: &&Answer| {
        let obeyed = answer.report.as_ref().ok().and_then(|report| report.authority.as_ref());
        obeyed.is_some_and(|obeyed| {
            obeyed.journal != status.journal_name && !status.replaced_journals.contains(&obeyed.journal)
        })
    };
    let others: Vec<&NodeName> = answers.iter().filter(is_foreign).map(|answer| &answer.node).collect();
    // One that pretends commands nobody, and one of a former version does not say which journal it has.
    if others.is_empty() || status.simulated || status.journal_name.is_empty() {
        return None;
    }
    let detail = format!("{} obey another journal: {}", others.len(), list(&others));
    let remedy = "if another scheduler runs that uses these nodes, end one of the two; if its journal is lost, end this one, \
                  and run `ondeck serve --take-over` by hand";
    Some(finding("whom agents obey", State::Missing, detail, Some(remedy)))
}

fn agents(what: &'static str, answers: &[&Answer]) -> Finding {
    let silent: Vec<(&NodeName, &CallError)> =
        answers.iter().filter_map(|answer| Some((&answer.node, answer.report.as_ref().err()?))).collect();
    if let Some((_, why)) = silent.first() {
        let names: Vec<&NodeName> = silent.iter().map(|(name, _)| *name).collect();
        let detail = format!("{} of {} do not answer: {}: {why}", silent.len(), answers.len(), list(&names));
        let remedy = "run `ondeck agent` there as root (slurm/ondeck-agent.service), with listen = \"auto\" in [agent]";
        return finding(what, State::Missing, one_line(&detail), Some(remedy));
    }
    let refusing: Vec<&NodeName> =
        answers.iter().filter(|answer| answer.refuses).map(|answer| &answer.node).collect();
    if !refusing.is_empty() {
        let host = host_name().map_or_else(|_| "HOST".to_owned(), |name| name.to_string());
        let detail = format!("{} take no orders from the scheduler: {}", refusing.len(), list(&refusing));
        let remedy = format!(
            "write administrators = [\"root@{host}\"] in the part [agent] there, and start them again"
        );
        return finding(what, State::Missing, detail, Some(&remedy));
    }
    finding(what, State::Ok, format!("{} answer", answers.len()), None)
}

/// Whether the RSA nodes lend what their pools say, and have the engine.
fn what_is_lent(config: &Config, answers: &[Answer]) -> Vec<Finding> {
    let site = &config.scheduler;
    let mut lend_nothing: Vec<&NodeName> = Vec::new();
    let mut cannot: Vec<&NodeName> = Vec::new();
    let (mut lent, mut missing) = (Bytes::ZERO, Vec::new());
    let pools = site.pools(&config.nodes);
    for answer in answers {
        let Ok(report) = &answer.report else { continue };
        let pool = pools.values().find(|pool| pool.nodes.contains(&answer.node));
        if site.engine != EngineKind::Simulated
            && let Some(programs) = report.missing.get(&site.engine).filter(|programs| !programs.is_empty())
        {
            cannot.push(&answer.node);
            missing.clone_from(programs);
        }
        let Some(pool) = pool else { continue };
        let capacity = report.devices.get(&pool.device).map_or(Bytes::ZERO, |device| device.capacity);
        lent = lent.saturating_add(capacity);
        if capacity == Bytes::ZERO {
            lend_nothing.push(&answer.node);
        }
    }
    let mut findings = Vec::new();
    if !lend_nothing.is_empty() {
        let detail = format!("{} lend nothing: {}", lend_nothing.len(), list(&lend_nothing));
        let remedy = "name the pool's device in the part [agent.device.NAME] there";
        findings.push(finding("what is lent", State::Missing, detail, Some(remedy)));
    } else if lent > Bytes::ZERO {
        findings.push(finding("what is lent", State::Ok, lent.to_string(), None));
    }
    if !cannot.is_empty() {
        let detail =
            format!("{} is not complete on {}: no {}", site.engine, list(&cannot), missing.join(", "));
        let remedy = "`ondeck doctor` there names the packages";
        findings.push(finding("engine", State::Missing, detail, Some(remedy)));
    } else if lent > Bytes::ZERO {
        findings.push(finding("engine", State::Ok, format!("{}, installed on all nodes", site.engine), None));
    }
    findings
}

fn list(names: &[&NodeName]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMED).map(|name| name.as_str()).collect();
    let more = names.len().saturating_sub(NAMED);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_slurm_prints_them() {
        let settings = parse(
            "Configuration data as of 2026-01-01\nEpilog                  = (null)\nPrologFlags             = \
             Alloc,Contain\nProlog[0]                  = /a\nProlog[1]                  = /b\nSLURM_CONF = /etc/slurm/slurm.conf\n",
        );
        assert_eq!(setting(&settings, "epilog"), "");
        assert_eq!(setting(&settings, "prolog"), "/a,/b");
        assert_eq!(setting(&settings, "slurm_conf"), "/etc/slurm/slurm.conf");
    }

    #[test]
    fn a_call_is_found_in_scripts_that_a_script_names_and_not_in_comments() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let ours = write("d/ours", "#!/bin/sh\nexec timeout 30 \"$ondeck\" prolog\n".into());
        let comment = write("comment", "#!/bin/sh\n# ondeck prolog\nexit 0\n".into());
        let through = write("through", format!("#!/bin/sh\nrun-parts {}\n", dir.path().join("d").display()));
        assert!(calls(&ours, "prolog", DEPTH));
        assert!(!calls(&ours, "epilog", DEPTH));
        assert!(!calls(&comment, "prolog", DEPTH));
        assert!(calls(&through, "prolog", DEPTH));
        assert_eq!(files(&dir.path().join("d/*")), [ours]);
    }
}
