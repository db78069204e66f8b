//! What a node does by itself about the RAM disks of jobs, whatever became of the scheduler: nothing of an ended job may
//! stay in the way of the next one.

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ondeck_agent::started::{self, job_of};
use ondeck_api::Config;
use ondeck_api::host_name;
use ondeck_api::wire::LocalReport;
use ondeck_core::JobId;
use ondeck_fleet::Fleet;
use ondeck_ramdisk::processes::environment_of;

/// How long it may take to see whether a job still has a process here.
const LOOKING: Duration = Duration::from_secs(1);

/// Takes away what this node still shows of a job's RAM disks. The job has ended here: its Epilog runs. `uid` is its
/// user. Servers and their data stay.
///
/// # Errors
/// If this node's agent does not answer in time.
pub fn take_away(config: &Config, job: JobId, uid: u32, limit: Duration) -> Result<()> {
    let is_its = |local: &LocalReport| {
        let shows = !(local.shown.is_empty() && local.overmounts.is_empty() && local.dead_mounts.is_empty());
        // A client that shows nothing any more is in nobody's way, but nobody may come to remove it.
        (shows || !local.server) && local.layout.owner.uid == uid && job_of(&local.layout) == Some(job)
    };
    hide(config, limit, "epilog", is_its)
}

/// What a job sees from now on, which nobody has told: all or nothing. What all of its nodes show, it keeps if it may,
/// and that is told; anything else is taken away here, and nothing is shown to it later. `uid` is its user.
///
/// # Errors
/// If it can't be noted, or this node's agent does not do it in time; what was noted it sees when it does again.
pub fn settle(config: &Config, job: JobId, uid: u32, may_keep: bool, limit: Duration) -> Result<bool> {
    let notes = started::directory(&config.agent);
    // First: what the agent does at this moment, it looks at after it.
    started::note(&notes, job).with_context(|| format!("can't note it in {}", notes.display()))?;
    if !config.agent.socket.exists() {
        return Ok(false);
    }
    let (fleet, node, until) = (Fleet::new(config), host_name()?, Instant::now() + limit);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let work = async {
        let found = fleet.ramdisks_of(&node).await.map_err(|error| anyhow::anyhow!("{error}"))?;
        let mut keeps = false;
        let its = |local: &&LocalReport| local.layout.owner.uid == uid && job_of(&local.layout) == Some(job);
        for local in found.iter().filter(its) {
            let left = until.saturating_duration_since(Instant::now());
            let id = &local.layout.id;
            let mut shown = fleet.begins_here(id, left).await.map_err(|error| anyhow::anyhow!("{error}"))?;
            if shown && !may_keep {
                fleet.hide_here(id, left).await.map_err(|error| anyhow::anyhow!("{error}"))?;
                shown = false;
            }
            keeps |= shown;
        }
        Ok::<bool, anyhow::Error>(keeps)
    };
    let keeps = runtime.block_on(async {
        tokio::time::timeout(limit, work).await.context("this node's agent does not answer")?
    })?;
    if keeps {
        forget(config, job)?;
    }
    Ok(keeps)
}

/// Forgets what [`settle`] has noted of a job: it has ended here, or begins anew.
///
/// # Errors
/// The kernel's.
pub fn forget(config: &Config, job: JobId) -> Result<()> {
    started::forget(&started::directory(&config.agent), job).context("can't forget that it had started here")
}

/// Takes away mounts whose client has ended and whose jobs are not on this node any more: every access to them fails, for
/// all later jobs. A job that is still here keeps its own: the directory below would show it other files than before.
///
/// # Errors
/// If this node's agent does not answer in time.
pub fn remove_dead_mounts(config: &Config, own: JobId, limit: Duration) -> Result<()> {
    let is_left = |local: &LocalReport| {
        // What becomes of the RAM disk of the job that starts here is its scheduler's to say.
        let left = job_of(&local.layout).filter(|job| *job != own && !local.dead_mounts.is_empty());
        let Some(job) = left else { return false };
        let uid = local.layout.owner.uid;
        let (sender, receiver) = sync_channel(1);
        // What a process says of itself is in its memory, and the kernel waits for the lock of that. Of files that are mapped
        // there it gives nothing (Linux 4.17), so no server of a user's is waited for.
        std::thread::spawn(move || sender.send(is_on_this_node(job, uid)));
        match receiver.recv_timeout(LOOKING) {
            Ok(Ok(there)) => !there,
            Err(error) => {
                eprintln!("ondeck prolog: can't tell whether job {job} is still on this node: {error}");
                false
            }
            Ok(Err(error)) => {
                eprintln!("ondeck prolog: can't tell whether job {job} is still on this node: {error}");
                false
            }
        }
    };
    hide(config, limit, "prolog", is_left)
}

/// Has this node's agent take those RAM disks away from everywhere that are chosen.
fn hide(config: &Config, limit: Duration, hook: &str, chosen: impl Fn(&LocalReport) -> bool) -> Result<()> {
    if !config.agent.socket.exists() {
        // A node without an agent shows nothing.
        return Ok(());
    }
    let (fleet, node, until) = (Fleet::new(config), host_name()?, Instant::now() + limit);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let work = async {
        let found = fleet.ramdisks_of(&node).await.map_err(|error| anyhow::anyhow!("{error}"))?;
        for local in found.iter().filter(|local| chosen(local)) {
            let left = until.saturating_duration_since(Instant::now());
            match fleet.hide_here(&local.layout.id, left).await {
                Ok(()) => eprintln!("ondeck {hook}: took {} away from this node", local.layout.id),
                Err(error) => eprintln!("ondeck {hook}: {error}"),
            }
        }
        Ok(())
    };
    runtime.block_on(async {
        tokio::time::timeout(limit, work).await.context("this node's agent does not answer")?
    })
}

/// Whether a job of a user may still have a process on this node. In doubt it has: a process of that user counts unless it
/// says itself that it belongs to another job.
fn is_on_this_node(job: JobId, uid: u32) -> std::io::Result<bool> {
    let step = format!("slurmstepd: [{job}.");
    let variable = format!("SLURM_JOB_ID={job}");
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let process = entry.path();
        let read = |name: &str| match std::fs::read(process.join(name)) {
            Ok(text) => Ok(Some(text)),
            // It has ended meanwhile.
            Err(error) if has_ended(&process, &error) => Ok(None),
            Err(error) => Err(error),
        };
        let Some(status) = read("status")? else { continue };
        // Only of root's processes it is believed that they watch a step.
        if is_roots(&status) {
            let Some(command) = read("cmdline")? else { continue };
            if command.starts_with(step.as_bytes()) {
                return Ok(true);
            }
        }
        if !is_of(&status, uid) || has_left(&status) {
            continue;
        }
        let environment = match environment_of(pid) {
            Ok(environment) => environment,
            Err(error) if has_ended(&process, &error) => continue,
            // Of a process that may not be looked into it is not known what it says of itself.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Vec::new(),
            Err(error) => return Err(error),
        };
        let mut variables = environment.split(|byte| *byte == 0);
        match variables.find(|text| text.starts_with(b"SLURM_JOB_ID=")) {
            Some(found) if found == variable.as_bytes() => return Ok(true),
            Some(_) => {}
            // Of root's many processes only those count that say so.
            None if uid == 0 => {}
            None => return Ok(true),
        }
    }
    Ok(false)
}

/// A process that has ended has no files any more, or they can't be read.
fn has_ended(process: &Path, error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
        || error.kind() == std::io::ErrorKind::NotFound && !process.exists()
}

/// Whether a process is root's, whomever it acts as for the moment.
fn is_roots(status: &[u8]) -> bool {
    let text = String::from_utf8_lossy(status);
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    ids.split_whitespace().next() == Some("0")
}

/// Whether one of the user ids of a process is this one, as /proc/PID/status has them.
fn is_of(status: &[u8], uid: u32) -> bool {
    let text = String::from_utf8_lossy(status);
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    ids.split_whitespace().any(|id| id.parse() == Ok(uid))
}

/// Whether a process has ended, and is only not yet forgotten: it uses nothing any more.
fn has_left(status: &[u8]) -> bool {
    String::from_utf8_lossy(status).lines().any(|line| line.starts_with("State:\tZ"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_here_as_long_as_one_of_its_processes_is() {
        let uid = rustix::process::getuid().as_raw();
        let sleeper = |variable: Option<&str>| {
            let mut command = std::process::Command::new("sleep");
            command.arg("60").env_remove("SLURM_JOB_ID");
            if let Some(value) = variable {
                command.env("SLURM_JOB_ID", value);
            }
            command.spawn().unwrap()
        };
        const JOB: JobId = JobId(3_999_999_999);
        let before = is_on_this_node(JOB, uid).unwrap();
        // Whoever is no root has other processes here, which may be of any job.
        assert_eq!(before, uid != 0);
        let mut other = sleeper(Some("7"));
        assert_eq!(is_on_this_node(JOB, uid).unwrap(), before);
        let mut own = sleeper(Some("3999999999"));
        assert!(is_on_this_node(JOB, uid).unwrap());
        for child in [&mut other, &mut own] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(is_on_this_node(JOB, uid).unwrap(), before);
        assert!(is_of(b"Name:\tx\nUid:\t0\t7\t0\t0\n", 7) && !is_of(b"Uid:\t0\t0\t0\t0\nGid:\t7\n", 7));
    }
}
