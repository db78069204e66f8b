//! `ondeck burst-buffer`: what Slurm's burst-buffer plugin, `burst_buffer.lua`, calls on the controller, as the user that
//! slurmctld runs as. It asks the scheduler again and again, and says in one line what came of it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use ondeck_api::scheduler::{BurstBufferAnswer, BurstBufferQuestion, BurstBufferVerdict};
use ondeck_api::wire::RefusalCode;
use ondeck_api::{CallError, Config};
use ondeck_core::{JobId, Request, WaitPolicy, exit};

use super::{Scheduler, explain, shown};
use crate::inherited;

/// How long one question waits for its answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a question with `--poll` waits for its answer, beside [`MARGIN`]: Slurm asks again.
const POLL: Duration = Duration::from_secs(2);

/// How long the scheduler has to answer beyond that.
const MARGIN: Duration = Duration::from_secs(5);

/// How long a start waits for the next scheduler, when the one is lost that was asked what the job's nodes are to show.
const NEXT_SCHEDULER: Duration = Duration::from_secs(60);

/// At least so long lies between two questions.
const PAUSE: Duration = Duration::from_secs(1);

/// What Slurm's burst-buffer plugin calls for a job: returns when that is done, or when the job needs not wait for it
///
/// The last line says what came of it, for the plugin: `done`, `on disk`, `kept`, `failed` or `later`, and what the user should
/// know. If the scheduler does not answer, a job that may start without its input is not kept waiting.
#[derive(Args)]
pub struct BurstBufferArgs {
    /// What Slurm asks
    #[arg(value_name = "CALL")]
    call: Call,

    /// The job's number
    #[arg(value_name = "JOB")]
    job: u32,

    /// How many seconds it may take
    #[arg(long, value_name = "SECONDS", default_value_t = 240)]
    limit: u64,

    /// The job's script, which says whether the job may start without its input
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,

    /// Slurm does not wait for results any more
    #[arg(long)]
    hurry: bool,

    /// Ask once, and say `later` if it is not over: Slurm asks again
    #[arg(long)]
    poll: bool,

    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Call {
    Setup,
    DataIn,
    PreRun,
    PostRun,
    DataOut,
    Teardown,
}

impl Call {
    /// As the route has it.
    fn word(self) -> &'static str {
        match self {
            Call::Setup => "setup",
            Call::DataIn => "data_in",
            Call::PreRun => "pre_run",
            Call::PostRun => "post_run",
            Call::DataOut => "data_out",
            Call::Teardown => "teardown",
        }
    }
}

pub fn burst_buffer(args: &BurstBufferArgs) -> ExitCode {
    // Slurm 22.05 makes the pipe by which it hears of a call's end, and then a process, from many threads: one that another
    // thread makes meanwhile has the pipe as well, and Slurm does not notice the end before that process has ended, too. A call
    // may wait until the job of that other one has started. If it can't be told, it is as if it were so.
    let in_the_way = !args.poll && inherited::has_pipes_of_others().unwrap_or(true);
    let (word, message) = match ask(args, in_the_way) {
        Ok(BurstBufferAnswer { verdict, message }) => (word(verdict), message),
        Err(error) => unheard(args, &error),
    };
    // One line, whatever is in the message.
    println!("ondeck: {word}: {}", shown(&message).replace('\n', " "));
    ExitCode::from(exit::OK)
}

fn word(verdict: BurstBufferVerdict) -> &'static str {
    match verdict {
        BurstBufferVerdict::Done => "done",
        BurstBufferVerdict::OnDisk => "on disk",
        BurstBufferVerdict::Later => "later",
        BurstBufferVerdict::Kept => "kept",
        BurstBufferVerdict::Failed => "failed",
    }
}

/// What follows if the scheduler can't be asked: the job never fails for that, and no results count as home.
fn unheard(args: &BurstBufferArgs, error: &anyhow::Error) -> (&'static str, String) {
    let why = match error.downcast_ref::<CallError>() {
        Some(call) => explain(call),
        None => format!("{error:#}"),
    };
    match args.call {
        Call::DataIn if must_have_its_input(args) => ("later", why),
        // Slurm puts it back into its queue.
        Call::PreRun if must_have_what_its_script_makes(args) => (
            "failed",
            format!("{why}; the job must not start without its input: `scontrol release` lets it try again"),
        ),
        Call::Setup | Call::DataIn | Call::PreRun => ("on disk", format!("{why}; the job works on disk")),
        Call::PostRun | Call::DataOut | Call::Teardown => ("later", why),
    }
}

/// Whether a job must not start without its input, by its script; also if that can't be read, and so can't be told.
fn must_have_its_input(args: &BurstBufferArgs) -> bool {
    may_say(args, |request| request.wait_policy() == WaitPolicy::Hold)
}

/// Whether a job must not start without what its stage-in script makes, which is nowhere else; also if its script can't be read.
fn must_have_what_its_script_makes(args: &BurstBufferArgs) -> bool {
    may_say(args, |request| request.stage_in.is_some() && request.wait_policy() == WaitPolicy::Hold)
}

/// Whether a job's script asks for something, or can't be read.
fn may_say(args: &BurstBufferArgs, asks: impl FnOnce(&Request) -> bool) -> bool {
    let Some(script) = &args.script else { return false };
    let Ok(text) = std::fs::read(script) else { return true };
    ondeck_directive::parse(&text).is_ok_and(|parsed| asks(&parsed.request))
}

/// Asks until there is an answer that is no matter of time.
fn ask(args: &BurstBufferArgs, in_the_way: bool) -> Result<BurstBufferAnswer> {
    let config = Config::load(args.config.as_deref())?;
    let called = Instant::now();
    let until = called + Duration::from_secs(args.limit);
    let waits_for_us = args.call == Call::DataOut || args.call == Call::DataIn && must_have_its_input(args);
    // It waits for a scheduler that shows it its input.
    let mut mounts = args.call == Call::PreRun && must_have_its_input(args);
    if args.poll {
        return ask_once(&config, args, in_the_way, POLL + MARGIN);
    }
    loop {
        let began = Instant::now();
        let left = until.saturating_duration_since(began);
        let asked = ask_once(&config, args, in_the_way, left);
        let is_over = left <= MARGIN;
        match asked {
            // It may have been answered at once.
            Ok(answer) if answer.verdict == BurstBufferVerdict::Later && !is_over => {
                std::thread::sleep(PAUSE.saturating_sub(began.elapsed()));
            }
            Ok(answer) => return Ok(answer),
            Err(error) => {
                let may_come_back = !matches!(
                    error.downcast_ref::<CallError>(),
                    Some(CallError::Refused { refusal, .. }) if refusal.code != RefusalCode::Failed
                );
                // What is being mounted before the start is there, or taken away, when the next scheduler has found it.
                let was_lost = matches!(
                    error.downcast_ref::<CallError>(),
                    Some(CallError::Unreachable { cut_off: true, .. } | CallError::Silent { .. })
                );
                mounts |= was_lost && args.call == Call::PreRun;
                let waits = waits_for_us || mounts && called.elapsed() < NEXT_SCHEDULER;
                if is_over || !waits || !may_come_back {
                    return Err(error);
                }
                std::thread::sleep(PAUSE);
            }
        }
    }
}

fn ask_once(
    config: &Config,
    args: &BurstBufferArgs,
    in_the_way: bool,
    left: Duration,
) -> Result<BurstBufferAnswer> {
    let patience = PATIENCE.min(left.saturating_sub(MARGIN));
    let last = !args.poll && left <= PATIENCE + MARGIN + MARGIN;
    let question = BurstBufferQuestion {
        last,
        hurry: args.hurry,
        in_the_way,
        job: JobId(args.job),
        patience_ms: patience.as_millis().try_into().unwrap_or(0),
    };
    let path = format!("burst-buffer/{}", args.call.word());
    let scheduler = Scheduler::find(config).context("no scheduler")?;
    Ok(scheduler.ask("POST", &path, Some(&question), Some(patience + MARGIN))?)
}
