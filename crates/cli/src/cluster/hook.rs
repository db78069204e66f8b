//! `ondeck prolog` and `ondeck epilog`: what Slurm calls on a node of a job. They end within a bound, and with 0: a job
//! never fails because of them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use ondeck_agent::hooks;
use ondeck_api::host_name;
use ondeck_api::scheduler::{Hook, HookAnswer};
use ondeck_api::wire::{HookKind, RefusalCode};
use ondeck_api::{CallError, Config};
use ondeck_core::{Incarnation, JobId, NodeName, exit};

use super::{Scheduler, explain, here};

/// Notes for the output of jobs, one file a job.
const NOTES: &str = "/run/ondeck/notes";

/// How long a Prolog may take to remove dead mounts of jobs that have ended.
const HOUSEKEEPING: Duration = Duration::from_secs(2);

/// How long a Prolog that was told nothing may take to settle with its node's agent what the job sees.
const SETTLING: Duration = Duration::from_secs(2);

/// How long a Prolog waits before it asks again.
const PAUSE: Duration = Duration::from_millis(200);

/// What a hook's own work takes beside the waiting.
const MARGIN: Duration = Duration::from_secs(2);

/// What Slurm's Prolog calls on each node of a job: returns when the job's RAM disk is mounted, or will not be
///
/// It reads the job from Slurm's environment (SLURM_JOB_ID, SLURM_RESTART_COUNT). Before that it has this node's agent take
/// away dead mounts: those of jobs that have left this node, whose RAM disk or client is lost. A scheduler that is lost
/// while it waits is asked again within the limit. A job that is told that it works on disk has no RAM disk appear later:
/// what not all of its nodes show is taken away before it starts. It ends within the configuration's limits.prolog and always
/// with 0: whatever goes wrong, the job starts, on disk.
#[derive(Args)]
pub struct PrologArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What Slurm's Epilog calls on each node of a job: returns when the job's RAM disk is unmounted
///
/// If the scheduler does not answer, or does not know the job, this node's agent takes the RAM disk away from this node all
/// the same; its data stays where it is. It ends within the configuration's limits.epilog and always with 0.
#[derive(Args)]
pub struct EpilogArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub fn prolog(args: &PrologArgs) -> ExitCode {
    let note = match try_prolog(args) {
        Ok(HookAnswer { mounted: true, .. }) => "its data is in a RAM disk".to_owned(),
        Ok(answer) => answer.message,
        Err(error) => {
            let note = format!("{error:#}; the job works on disk");
            eprintln!("ondeck prolog: {note}");
            note
        }
    };
    if !note.is_empty()
        && let Err(error) = leave_note(&note)
    {
        eprintln!("ondeck prolog: can't leave a note for the job: {error}");
    }
    ExitCode::from(exit::OK)
}

/// Where a job's TaskProlog finds what to print into the job's output.
fn note_path() -> Result<PathBuf> {
    Ok(Path::new(NOTES).join(job()?.job.to_string()))
}

fn leave_note(note: &str) -> Result<()> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chown};
    // Paths of the job stand in it: it is for its user alone.
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(NOTES)?;
    let path = note_path()?;
    let uid: u32 = std::env::var("SLURM_JOB_UID").context("there is no SLURM_JOB_UID")?.parse()?;
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o400).open(&path)?;
    chown(&path, Some(uid), None)?;
    // One line: TaskProlog obeys lines of other kinds.
    let line = note.lines().collect::<Vec<_>>().join(" ");
    std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes())?;
    Ok(())
}

/// Reads the configuration, and notes which one it was: `ondeck doctor --slurm` compares what the nodes' hooks are.
fn load(kind: HookKind, path: Option<&Path>) -> Result<Config> {
    let config = Config::load(path);
    if let Err(error) = hooks::note(kind, path, &config) {
        let command = kind.setting().to_lowercase();
        eprintln!("ondeck {command}: can't note in {} what this hook is: {error}", hooks::NOTED);
    }
    Ok(config?)
}

fn try_prolog(args: &PrologArgs) -> Result<HookAnswer> {
    let config = load(HookKind::Prolog, args.config.as_deref())?;
    let (began, limit) = (Instant::now(), config.scheduler.limits.prolog);
    // First: what an ended job has left would keep the RAM disk of this one away.
    if let Err(error) = here::remove_dead_mounts(&config, job()?.job, HOUSEKEEPING.min(limit / 4)) {
        eprintln!("ondeck prolog: {error:#}");
    }
    let id = job()?.job;
    if let Err(error) = here::forget(&config, id) {
        eprintln!("ondeck prolog: {error:#}");
    }
    let settling = SETTLING.min(limit / 4);
    let asked = ask_again(&config, limit.saturating_sub(began.elapsed()).saturating_sub(settling));
    // Nothing is ever mounted for a job of which the scheduler has nothing to say.
    if asked.as_ref().is_ok_and(|answer| answer.mounted || answer.message.is_empty()) {
        return asked;
    }
    let uid: u32 = std::env::var("SLURM_JOB_UID").context("there is no SLURM_JOB_UID")?.parse()?;
    let left = limit.saturating_sub(began.elapsed()).max(settling);
    let may_keep = asked.as_ref().map_or(true, |answer| answer.undecided);
    match here::settle(&config, id, uid, may_keep, left) {
        Ok(true) => Ok(HookAnswer { mounted: true, message: String::new(), undecided: false }),
        Ok(false) => asked,
        Err(error) => {
            eprintln!("ondeck prolog: {error:#}");
            asked
        }
    }
}

/// Asks the scheduler; one that is lost while it is waited for is asked again, as the next one may have mounted the RAM
/// disk. One that is not there at all is not waited for.
fn ask_again(config: &Config, limit: Duration) -> Result<HookAnswer> {
    let until = Instant::now() + limit;
    let mut lost = false;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let asked = ask(config, "prolog", left);
        let call = asked.as_ref().err().and_then(|error| error.downcast_ref::<CallError>());
        lost |= matches!(call, Some(CallError::Unreachable { cut_off: true, .. }));
        let again = match call {
            Some(CallError::Refused { refusal, .. }) => lost && refusal.code == RefusalCode::Failed,
            Some(_) => lost,
            None => false,
        };
        if !again || left <= MARGIN {
            return asked.map_err(said);
        }
        std::thread::sleep(PAUSE);
    }
}

/// The error of a question, for people.
fn said(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<CallError>() {
        Some(call) => anyhow::anyhow!("{}", explain(call)),
        None => error,
    }
}

pub fn epilog(args: &EpilogArgs) -> ExitCode {
    if let Ok(path) = note_path() {
        // There need not be one.
        let _ = std::fs::remove_file(path);
    }
    if let Err(error) = try_epilog(args) {
        eprintln!("ondeck epilog: {error:#}");
    }
    ExitCode::from(exit::OK)
}

fn try_epilog(args: &EpilogArgs) -> Result<()> {
    let config = load(HookKind::Epilog, args.config.as_deref())?;
    let limit = config.scheduler.limits.epilog;
    let began = Instant::now();
    let asked = ask(&config, "epilog", limit / 2).map_err(said);
    match &asked {
        Ok(answer) if !answer.mounted => {}
        Ok(answer) => eprintln!("ondeck epilog: {}", answer.message),
        Err(error) => eprintln!("ondeck epilog: {error:#}; unmounting on this node"),
    }
    // Whatever was answered: a scheduler that has lost its journal does not know what is here.
    let left = limit.saturating_sub(began.elapsed()).max(MARGIN);
    let uid: u32 = std::env::var("SLURM_JOB_UID").context("there is no SLURM_JOB_UID")?.parse()?;
    let taken_away = here::take_away(&config, job()?.job, uid, left);
    here::forget(&config, job()?.job)?;
    taken_away
}

fn ask(config: &Config, hook: &str, limit: Duration) -> Result<HookAnswer> {
    let waits = limit.saturating_sub(MARGIN).max(Duration::from_millis(500));
    let question =
        Hook { job: job()?, node: node()?, nodes: String::new(), patience_ms: waits.as_millis() as u64 };
    let scheduler = Scheduler::find(config)?;
    Ok(scheduler.ask("POST", &format!("hooks/{hook}"), Some(&question), Some(limit))?)
}

/// The job, as Slurm names it to Prolog and Epilog.
fn job() -> Result<Incarnation> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let job =
        number("SLURM_JOB_ID").context("there is no SLURM_JOB_ID; this is for Slurm's Prolog and Epilog")?;
    let restarts = number("SLURM_JOB_RESTART_COUNT").or(number("SLURM_RESTART_COUNT")).unwrap_or(0);
    // Slurm does not tell its hooks when the job was submitted; the scheduler knows.
    Ok(Incarnation { job: JobId(job), submitted: 0, restarts })
}

fn node() -> Result<NodeName> {
    Ok(host_name()?)
}
