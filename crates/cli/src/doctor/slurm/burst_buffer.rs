//! Slurm's burst buffers, if the site has Slurm itself keep jobs waiting: whether its plugin is ours, and set as it must be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use ondeck_api::Config;
use ondeck_core::JobId;
use ondeck_wlm::jobs_with_burst_buffers;

use super::{Finding, State, ask, finding, one_line, setting};

/// What the plugin's limits in burst_buffer.lua need of Slurm's own: a call that Slurm cuts off has done nothing.
const LEAST: [(&str, Duration); 3] = [
    ("StageInTimeout", Duration::from_secs(172_800)),
    ("StageOutTimeout", Duration::from_secs(172_800)),
    ("OtherTimeout", Duration::from_secs(300)),
];

/// Slurm's burst buffers, and whether it has some of jobs that have ended.
pub(super) async fn look(config: &Config, settings: &BTreeMap<String, String>) -> Vec<Finding> {
    let before = staging_in(config).await;
    let shown = ask(config, "scontrol", &["show", "burstbuffer"]).await;
    let queue = ask(config, "squeue", &["--noheader", "--all", "--states=all", "--format=%A %T"]).await;
    let live: BTreeSet<u32> = queue.as_deref().map_or_else(
        |_| BTreeSet::new(),
        |queue| {
            let ended =
                ["CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"];
            let jobs = queue.lines().filter_map(|line| line.trim().split_once(' '));
            let live = jobs.filter(|(_, state)| !ended.contains(state));
            live.filter_map(|(number, _)| number.parse().ok()).collect()
        },
    );
    // Without a queue nothing is known of any job.
    let has_ended = |job: u32| queue.is_ok() && !live.contains(&job);
    let mut findings = examine(settings, shown.as_deref().map_err(String::as_str), has_ended);
    // Before and after: Slurm tells of jobs and of burst buffers one after the other.
    if let (Ok(shown), Ok(before)) = (&shown, &before)
        && !findings.is_empty()
        && let Ok(have) = jobs_with_burst_buffers(shown)
        && before.iter().any(|job| !have.contains(job))
        && let Ok(after) = staging_in(config).await
    {
        let lack = before.intersection(&after).filter(|job| !have.contains(job)).copied();
        findings.extend(lost(&lack.collect::<Vec<JobId>>()));
    }
    if let Err(why) = &queue {
        findings.push(finding("burst buffers", State::Missing, format!("squeue: {why}"), None));
    }
    findings
}

/// The jobs of which Slurm says that it stages in for them.
async fn staging_in(config: &Config) -> Result<BTreeSet<JobId>, String> {
    let words = [
        "--noheader",
        "--all",
        "--states=PENDING",
        "--array-unique",
        "--Format=JobID:20,BurstBufferState:20",
    ];
    let shown = ask(config, "squeue", &words).await?;
    let jobs = shown.lines().filter_map(|line| line.trim().split_once(' '));
    let jobs = jobs.filter(|(_, state)| state.trim() == "staging-in");
    let number = |job: &str| job.parse().map(JobId).map_err(|_| format!("no job's number: `{job}`"));
    jobs.map(|(job, _)| number(job)).collect()
}

/// Jobs that wait for a burst buffer that slurmctld has lost.
fn lost(jobs: &[JobId]) -> Option<Finding> {
    if jobs.is_empty() {
        return None;
    }
    let detail = format!(
        "slurmctld was killed before it had saved those of {} jobs that wait, and never starts these: {}",
        jobs.len(),
        some_of(jobs)
    );
    let remedy = "their users must cancel them and submit them anew (`scancel JOB`; or `scancel JOB`, wait until it has ended, and \
                  `scontrol requeue JOB`, if the job may be requeued and no other depends on it)";
    Some(finding("lost burst buffers", State::Missing, detail, Some(remedy)))
}

/// The first of some jobs.
fn some_of(jobs: &[JobId]) -> String {
    let first: Vec<String> = jobs.iter().take(SHOWN_JOBS).map(ToString::to_string).collect();
    let more = if jobs.len() > SHOWN_JOBS { ", ..." } else { "" };
    format!("{}{more}", first.join(", "))
}

/// Looks at what `scontrol show config` and `scontrol show burstbuffer` print, and at the files beside slurm.conf. Nothing if the
/// site does not use Slurm's plugin. `ended`: the jobs that have ended for good, or are not known.
fn examine(
    settings: &BTreeMap<String, String>,
    shown: Result<&str, &str>,
    has_ended: impl Fn(u32) -> bool,
) -> Vec<Finding> {
    const WHAT: &str = "burst buffers";
    if setting(settings, "burstbuffertype") != "burst_buffer/lua" {
        return Vec::new();
    }
    let directory = Path::new(setting(settings, "slurm_conf")).parent().unwrap_or(Path::new("/etc/slurm"));
    let user = setting(settings, "slurmuser");
    let mut findings =
        vec![plugin(directory, user), check(directory, user), directive(directory), program(directory, user)];
    findings.extend(configuration(directory, user));
    match shown {
        Ok(shown) => findings.extend(slurms_own(shown, has_ended)),
        Err(why) => {
            findings.push(finding(WHAT, State::Missing, format!("scontrol show burstbuffer: {why}"), None))
        }
    }
    findings
}

fn plugin(directory: &Path, user: &str) -> Finding {
    const WHAT: &str = "burst_buffer.lua";
    let path = directory.join(WHAT);
    let shown = path.display().to_string();
    let remedy = "copy slurm/burst_buffer.lua beside slurm.conf";
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => return finding(WHAT, State::Missing, format!("{shown}: {error}"), Some(remedy)),
    };
    if let Some(found) = unreadable(WHAT, &path, user) {
        return found;
    }
    if let Some(why) = does_not_compile(&path) {
        let remedy = "no job with a burst buffer starts: copy slurm/burst_buffer.lua beside slurm.conf anew";
        return finding(WHAT, State::Missing, why, Some(remedy));
    }
    if is_written_by_others(&path, user) {
        let detail =
            format!("{shown} can be written by others than root, who run as the user of slurmctld then");
        let remedy = format!("chown root:root {shown}; chmod 644 {shown}");
        return finding(WHAT, State::Missing, detail, Some(&remedy));
    }
    if text.contains("burst-buffer") {
        finding(WHAT, State::Ok, shown, None)
    } else {
        finding(WHAT, State::Missing, format!("{shown} is not ours"), Some(remedy))
    }
}

/// What understands the `#RSA_` lines for the plugin, under one of two names.
fn check(directory: &Path, user: &str) -> Finding {
    const WHAT: &str = "burst buffers' job_submit.lua";
    let remedy = "copy slurm/job_submit.lua beside slurm.conf, beside one of your own as ondeck_job_submit.lua: without it lines that \
                  can't be obeyed are accepted, and burst_buffer.lua can only guess which jobs must wait for their input";
    let mut why = String::new();
    for name in ["ondeck_job_submit.lua", "job_submit.lua"] {
        let path = directory.join(name);
        let shown = path.display();
        match fs::read_to_string(&path) {
            Ok(text) if text.contains("ondeck") => {
                return unreadable(WHAT, &path, user)
                    .unwrap_or_else(|| finding(WHAT, State::Ok, shown.to_string(), None));
            }
            Ok(_) => why = format!("{shown} is not ours"),
            Err(error) => why = format!("{shown}: {error}"),
        }
    }
    finding(WHAT, State::Missing, why, Some(remedy))
}

/// The number of a user, as `scontrol show config` has it: `slurm(64030)`.
fn uid(user: &str) -> Option<u32> {
    user.strip_suffix(')')?.rsplit_once('(')?.1.parse().ok()
}

/// A file that the user of slurmctld can't read, by its owner and mode. In which groups that user is, is not known: but not in root's.
fn unreadable(what: &'static str, path: &Path, user: &str) -> Option<Finding> {
    let (reader, found) = (uid(user)?, fs::metadata(path).ok()?);
    let mode = found.mode();
    let by_owner = found.uid() == reader && mode & 0o400 != 0;
    let by_group = found.gid() != 0 && mode & 0o040 != 0;
    if reader == 0 || by_owner || by_group || mode & 0o004 != 0 {
        return None;
    }
    let shown = path.display();
    let detail = format!("{shown} can't be read by {user}, the user of slurmctld");
    Some(finding(what, State::Missing, detail, Some(&format!("chmod 644 {shown}"))))
}

/// Whether somebody may write a file who is neither root nor the user of slurmctld.
fn is_written_by_others(path: &Path, user: &str) -> bool {
    let Ok(found) = fs::metadata(path) else { return false };
    let is_stranger = found.uid() != 0 && uid(user) != Some(found.uid());
    is_stranger || found.mode() & 0o002 != 0 || found.gid() != 0 && found.mode() & 0o020 != 0
}

/// What a Lua compiler has against a script; nothing without one.
fn does_not_compile(path: &Path) -> Option<String> {
    const COMPILERS: [&str; 5] = ["luac", "luac5.1", "luac5.3", "luac5.4", "luac5.2"];
    let compile = |compiler: &str| {
        Command::new(compiler).arg("-p").arg("--").arg(path).stdin(Stdio::null()).output().ok()
    };
    let ran = COMPILERS.into_iter().find_map(compile)?;
    (!ran.status.success()).then(|| one_line(&String::from_utf8_lossy(&ran.stderr)))
}

/// Lines of burst_buffer.conf that set something, without what follows a `#`.
fn directive(directory: &Path) -> Finding {
    const WHAT: &str = "burst_buffer.conf";
    let path = directory.join("burst_buffer.conf");
    let remedy = "write Directive=RSA in burst_buffer.conf, and start slurmctld anew: otherwise no job has a burst buffer";
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            return finding(WHAT, State::Missing, format!("{}: {error}", path.display()), Some(remedy));
        }
    };
    let set = text.lines().filter_map(|line| line.split('#').next()?.split_once('='));
    let found = set
        .filter(|(key, _)| key.trim().eq_ignore_ascii_case("directive"))
        .map(|(_, value)| value.trim())
        .next_back();
    match found {
        Some("RSA") => finding(WHAT, State::Ok, "Directive=RSA", None),
        Some(other) => finding(WHAT, State::Missing, format!("Directive={other}"), Some(remedy)),
        None => finding(WHAT, State::Missing, "it has no Directive", Some(remedy)),
    }
}

/// What ondeck.env beside slurm.conf says of a key.
fn set(directory: &Path, key: &str) -> std::io::Result<Option<String>> {
    let text = match fs::read_to_string(directory.join("ondeck.env")) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let values = text.lines().filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='));
    Ok(values.map(|value| value.trim_matches(['"', '\'']).to_owned()).next_back())
}

/// The program that the plugin runs, as the user of slurmctld.
fn program(directory: &Path, user: &str) -> Finding {
    const WHAT: &str = "burst buffers' program";
    let path = directory.join("ondeck.env");
    if let Some(found) = unreadable(WHAT, &path, user) {
        return found;
    }
    let program = match set(directory, "ONDECK") {
        Ok(program) => program.unwrap_or_else(|| "/usr/local/bin/ondeck".to_owned()),
        Err(error) => return finding(WHAT, State::Missing, format!("{}: {error}", path.display()), None),
    };
    let remedy = "name the binary by ONDECK in ondeck.env beside slurm.conf";
    match fs::metadata(&program) {
        Ok(found) if found.permissions().mode() & 0o001 == 0 => {
            let detail = format!("{program} can't be executed by others, as the user of slurmctld is");
            finding(WHAT, State::Missing, detail, Some(&format!("chmod 755 {program}")))
        }
        Ok(_) => finding(WHAT, State::Ok, program, None),
        Err(error) => finding(WHAT, State::Missing, format!("{program}: {error}"), Some(remedy)),
    }
}

/// The configuration that the program reads, if the user of slurmctld can't.
fn configuration(directory: &Path, user: &str) -> Option<Finding> {
    let named = set(directory, "ONDECK_CONFIG").ok()?;
    let path = named.map_or_else(|| PathBuf::from("/etc/ondeck/ondeck.toml"), PathBuf::from);
    unreadable("burst buffers' configuration", &path, user)
}

/// So many jobs are named at most.
const SHOWN_JOBS: usize = 20;

/// What Slurm says of its plugin.
fn slurms_own(shown: &str, has_ended: impl Fn(u32) -> bool) -> Vec<Finding> {
    let words: BTreeMap<&str, &str> =
        shown.split_whitespace().filter_map(|word| word.split_once('=')).collect();
    let mut findings = Vec::new();
    if words.get("Flags").is_some_and(|flags| flags.split(',').any(|flag| flag == "TeardownFailure")) {
        let remedy = "remove TeardownFailure from Flags in burst_buffer.conf: a job whose results somebody must decide on would \
                      leave the queue";
        findings.push(finding("TeardownFailure", State::Missing, "it is set", Some(remedy)));
    }
    for (name, least) in LEAST {
        let seconds: Option<u64> = words.get(name).and_then(|value| value.parse().ok());
        if seconds.is_some_and(|seconds| seconds < least.as_secs()) {
            let detail =
                format!("{} s, and burst_buffer.lua waits for nearly {} s", words[name], least.as_secs());
            let remedy = format!(
                "write {name}={} in burst_buffer.conf, or lower the limit in burst_buffer.lua",
                least.as_secs()
            );
            findings.push(finding(name, State::Missing, detail, Some(&remedy)));
        }
    }
    let left: Vec<JobId> = match jobs_with_burst_buffers(shown) {
        Ok(jobs) => jobs.into_iter().filter(|job| has_ended(job.0)).collect(),
        Err(error) => {
            findings.push(finding("burst buffers", State::Missing, error.to_string(), None));
            Vec::new()
        }
    };
    if !left.is_empty() {
        let detail =
            format!("Slurm still has those of {} jobs that have ended: {}", left.len(), some_of(&left));
        // Of a job that is requeued, Slurm begins anew; one that is held then has no burst buffer yet.
        let remedy = "they take nothing of an RSA node. They go when slurmctld is started anew; or, of a JOB that may be requeued, \
                      by `scontrol requeuehold JOB && scancel JOB`";
        findings.push(finding("burst buffers", State::Limited, detail, Some(remedy)));
    }
    findings
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SHOWN: &str = "Name=lua DefaultPool=(null) Granularity=1 TotalSpace=0 FreeSpace=0 UsedSpace=0\n  \
        Flags=DisablePersistent\n  StageInTimeout=172800 StageOutTimeout=172800 ValidateTimeout=5 OtherTimeout=300\n  \
        Allocated Buffers:\n    JobID=2 CreateTime=2026-11-25T03:10:06 Pool=(null) Size=0 State=allocated UserID=a(1)\n";

    fn said(shown: &str, ended: bool) -> Vec<&'static str> {
        slurms_own(shown, |_| ended).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn what_slurm_shows_of_its_burst_buffers_is_judged() {
        assert_eq!(said(SHOWN, false), [""; 0]);
        assert_eq!(said(SHOWN, true), ["burst buffers"]);
        let short = SHOWN.replace("StageOutTimeout=172800", "StageOutTimeout=60");
        assert_eq!(said(&short, false), ["StageOutTimeout"]);
        let tears = SHOWN.replace("DisablePersistent", "DisablePersistent,TeardownFailure");
        assert_eq!(said(&tears, false), ["TeardownFailure"]);
        let of_an_array = SHOWN.replace("JobID=2", "JobID=7_1(9)");
        assert_eq!(said(&of_an_array, true), ["burst buffers"]);
        let lost = lost(&[JobId(5), JobId(6)]).unwrap();
        assert!(
            lost.state == State::Missing && lost.detail.ends_with("never starts these: 5, 6"),
            "{}",
            lost.detail
        );
    }

    #[test]
    fn files_beside_slurm_conf_are_judged() {
        let dir = tempfile::tempdir().unwrap();
        let settings = |kind: &str| {
            let conf = dir.path().join("slurm.conf").display().to_string();
            let user = format!("slurm({})", rustix::process::geteuid().as_raw());
            [("burstbuffertype", kind.to_owned()), ("slurm_conf", conf), ("slurmuser", user)]
                .map(|(key, value)| (key.to_owned(), value))
                .into()
        };
        let wrong = |kind: &str| -> Vec<&'static str> {
            let found = examine(&settings(kind), Ok(""), |_| false);
            found.into_iter().filter(|found| found.state != State::Ok).map(|found| found.what).collect()
        };
        assert_eq!(wrong(""), [""; 0]);
        assert_eq!(
            wrong("burst_buffer/lua"),
            [
                "burst_buffer.lua",
                "burst buffers' job_submit.lua",
                "burst_buffer.conf",
                "burst buffers' program"
            ]
        );
        fs::write(dir.path().join("job_submit.lua"), "-- a site's own").unwrap();
        assert!(wrong("burst_buffer/lua").contains(&"burst buffers' job_submit.lua"));
        fs::write(dir.path().join("ondeck_job_submit.lua"), "ondeck = M").unwrap();
        fs::write(dir.path().join("burst_buffer.lua"), "-- ondeck burst-buffer").unwrap();
        fs::write(dir.path().join("burst_buffer.conf"), "Directive=BB_LUA # RSA\n").unwrap();
        fs::write(dir.path().join("ondeck.env"), "ONDECK=\"/bin/sh\"\n").unwrap();
        assert_eq!(wrong("burst_buffer/lua"), ["burst_buffer.conf"]);
        fs::write(dir.path().join("burst_buffer.conf"), "directive = RSA\n").unwrap();
        assert_eq!(wrong("burst_buffer/lua"), [""; 0]);
    }

    #[test]
    fn files_that_the_user_of_slurmctld_can_not_read_and_others_can_write_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            path
        };
        let toml = file("ondeck.toml", "");
        let env = file("ondeck.env", &format!("ONDECK=/bin/sh\nONDECK_CONFIG='{}'\n", toml.display()));
        let lua = file("burst_buffer.lua", "-- ondeck burst-buffer\nlocal a = 1\n");
        let me = rustix::process::geteuid().as_raw();
        let reader = format!("slurm({})", me + 1);
        let of_lua = |user: &str| plugin(dir.path(), user).detail;
        // Who runs this owns the file, and may be another than root.
        let owner = format!("me({me})");
        assert!(plugin(dir.path(), &owner).state == State::Ok, "{}", of_lua(&owner));
        assert!(program(dir.path(), &reader).state == State::Ok);
        assert!(configuration(dir.path(), &reader).is_none());
        for (path, what) in [(&lua, 0), (&env, 1), (&toml, 2)] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
            let found = [
                Some(plugin(dir.path(), &reader)),
                Some(program(dir.path(), &reader)),
                configuration(dir.path(), &reader),
            ];
            let said = found[what].as_ref().unwrap();
            assert!(
                said.state == State::Missing && said.detail.contains("can't be read by slurm("),
                "{}",
                said.detail
            );
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        assert_eq!(uid("root(0)"), Some(0));
        assert!(unreadable("", &lua, "(null)").is_none(), "nobody is known");
        fs::set_permissions(&lua, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(of_lua(&owner).contains("can be written by others than root"), "{}", of_lua(&owner));
        let lua = file("burst_buffer.lua", "-- ondeck burst-buffer\nlocal = 1\n");
        match does_not_compile(&lua) {
            Some(why) => assert!(why.contains("burst_buffer.lua:2"), "{why}"),
            None => ondeck_skip::skipped("there is no Lua compiler; install lua5.3"),
        }
    }
}
