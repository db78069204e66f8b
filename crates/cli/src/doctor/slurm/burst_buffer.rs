//! Slurm's burst buffers, if the site has Slurm itself keep jobs waiting: whether its plugin is ours, and set as it must be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use ondeck_api::Config;

use super::{Finding, State, ask, finding, setting};

/// What the plugin's limits in burst_buffer.lua need of Slurm's own: a call that Slurm cuts off has done nothing.
const LEAST: [(&str, Duration); 3] = [
    ("StageInTimeout", Duration::from_secs(172_800)),
    ("StageOutTimeout", Duration::from_secs(172_800)),
    ("OtherTimeout", Duration::from_secs(300)),
];

/// Slurm's burst buffers, and whether it has some of jobs that have ended.
pub(super) async fn look(config: &Config, settings: &BTreeMap<String, String>) -> Vec<Finding> {
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
    if let Err(why) = &queue {
        findings.push(finding("burst buffers", State::Missing, format!("squeue: {why}"), None));
    }
    findings
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
    let mut findings = vec![plugin(directory), directive(directory), program(directory)];
    match shown {
        Ok(shown) => findings.extend(slurms_own(shown, has_ended)),
        Err(why) => {
            findings.push(finding(WHAT, State::Missing, format!("scontrol show burstbuffer: {why}"), None))
        }
    }
    findings
}

fn plugin(directory: &Path) -> Finding {
    let path = directory.join("burst_buffer.lua");
    let shown = path.display().to_string();
    match fs::read_to_string(&path) {
        Ok(text) if text.contains("burst-buffer") => finding("burst_buffer.lua", State::Ok, shown, None),
        Ok(_) => {
            let remedy = "copy slurm/burst_buffer.lua beside slurm.conf";
            finding("burst_buffer.lua", State::Missing, format!("{shown} is not ours"), Some(remedy))
        }
        Err(error) => {
            let remedy = "copy slurm/burst_buffer.lua beside slurm.conf";
            finding("burst_buffer.lua", State::Missing, format!("{shown}: {error}"), Some(remedy))
        }
    }
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

/// The program that the plugin runs, as the user of slurmctld.
fn program(directory: &Path) -> Finding {
    const WHAT: &str = "burst buffers' program";
    let path = directory.join("ondeck.env");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return finding(WHAT, State::Missing, format!("{}: {error}", path.display()), None),
    };
    let set = text.lines().filter_map(|line| line.trim().strip_prefix("ONDECK="));
    let program =
        set.map(|value| value.trim_matches(['"', '\''])).next_back().unwrap_or("/usr/local/bin/ondeck");
    let remedy = "name the binary by ONDECK in ondeck.env beside slurm.conf";
    match fs::metadata(program) {
        Ok(found) if found.permissions().mode() & 0o001 == 0 => {
            let detail = format!("{program} can't be executed by others, as the user of slurmctld is");
            finding(WHAT, State::Missing, detail, Some(&format!("chmod 755 {program}")))
        }
        Ok(_) => finding(WHAT, State::Ok, program, None),
        Err(error) => finding(WHAT, State::Missing, format!("{program}: {error}"), Some(remedy)),
    }
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
    let jobs = shown
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("JobID=")?.split('_').next()?.parse().ok());
    let left: Vec<u32> = jobs.filter(|job| has_ended(*job)).collect();
    if !left.is_empty() {
        let first: Vec<String> = left.iter().take(SHOWN_JOBS).map(u32::to_string).collect();
        let more = if left.len() > SHOWN_JOBS { ", ..." } else { "" };
        let detail = format!(
            "Slurm still has those of {} jobs that have ended: {}{more}",
            left.len(),
            first.join(", ")
        );
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
    }

    #[test]
    fn files_beside_slurm_conf_are_judged() {
        let dir = tempfile::tempdir().unwrap();
        let settings = |kind: &str| {
            let conf = dir.path().join("slurm.conf").display().to_string();
            [("burstbuffertype", kind.to_owned()), ("slurm_conf", conf)]
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
            ["burst_buffer.lua", "burst_buffer.conf", "burst buffers' program"]
        );
        fs::write(dir.path().join("burst_buffer.lua"), "-- ondeck burst-buffer").unwrap();
        fs::write(dir.path().join("burst_buffer.conf"), "Directive=BB_LUA # RSA\n").unwrap();
        fs::write(dir.path().join("ondeck.env"), "ONDECK=\"/bin/sh\"\n").unwrap();
        assert_eq!(wrong("burst_buffer/lua"), ["burst_buffer.conf"]);
        fs::write(dir.path().join("burst_buffer.conf"), "directive = RSA\n").unwrap();
        assert_eq!(wrong("burst_buffer/lua"), [""; 0]);
    }
}
