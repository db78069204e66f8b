//! `ondeck job` and `ondeck wait`: one job.

use std::io::{BufRead, IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use ondeck_api::scheduler::{JobStory, Waited};
use ondeck_core::{JobSelector, NodeName, duration, exit};

use super::{Scheduler, end, load, shown, status};

/// How long one question after a job waits.
const ONE_WAIT: Duration = Duration::from_secs(20);

/// Look at a job, and decide about results that could not be staged out
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct JobArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: JobCommand,
}

const EXAMPLES: &str = "Examples:
  ondeck job show 42           the whole story, with the seconds of each phase; 42.1 is its life after a requeue
  ondeck job show 42@1795381275
                               not the newest job that had this number, but the one that was submitted then; what
                               others there are, `ondeck job show 42` says
  ondeck job retry 42          try once more, after the reason for the failure is mended: to stage its results out, or
                               the input of a job that stays held
  ondeck job retry --salvage 42
                               an RSA node is lost: save what the others have, and give up what it had
  ondeck job abandon 42        give its results up: they are lost, and its RSA nodes are free
  ondeck job log               all jobs, in the form of the thesis (administrators)";

#[derive(Subcommand)]
enum JobCommand {
    /// All that is known of a job, also after its end
    Show {
        /// Its number; NUMBER.RESTARTS for one life of it, NUMBER@SUBMITTED for one of several jobs that had the number,
        /// NUMBER@SUBMITTED.RESTARTS for one life of that
        job: JobSelector,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Try again what has failed: to stage its results out, or its input in
    Retry {
        /// Its number; NUMBER.RESTARTS for one life of it, NUMBER@SUBMITTED for one of several jobs that had the number,
        /// NUMBER@SUBMITTED.RESTARTS for one life of that
        job: JobSelector,
        /// For a job that is LOST: save what the RSA nodes that are left have, and give up what the others had
        #[arg(long)]
        salvage: bool,
        /// With --salvage: do not ask
        #[arg(long, requires = "salvage")]
        yes: bool,
    },
    /// Give up its results: they are lost
    Abandon {
        /// Its number; NUMBER.RESTARTS for one life of it, NUMBER@SUBMITTED for one of several jobs that had the number,
        /// NUMBER@SUBMITTED.RESTARTS for one life of that
        job: JobSelector,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// What happened to all jobs, one event a line: seconds since 1970 and a sentence (administrators)
    Log,
}

/// Wait until a job's results are on disk
///
/// It ends with 0 then, or if there are none; with 1 if its results are held or lost, its stage-in script has failed and
/// it stays held, or the time is over; with 2 if nobody knows the job. A job that is still in the queue is waited for,
/// too, and so is one that was requeued, until it has run again.
#[derive(Args)]
pub struct WaitArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// How long to wait, like 30m [default: for ever]
    #[arg(long, value_parser = parse_time, value_name = "TIME")]
    timeout: Option<Duration>,

    /// Its number; NUMBER.0 is what it did before it was requeued, NUMBER.1 what it does then, and so on; with
    /// NUMBER@SUBMITTED or NUMBER@SUBMITTED.RESTARTS one of several jobs that had the number
    job: JobSelector,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    duration::parse(text, 1).map_err(|error| error.to_string())
}

pub fn job(args: &JobArgs) -> ExitCode {
    end("job", try_job(args))
}

fn try_job(args: &JobArgs) -> Result<u8> {
    let scheduler = Scheduler::find(&load(args.config.as_deref())?)?;
    match &args.command {
        JobCommand::Show { job, json } => {
            let story: JobStory = scheduler.ask("GET", &format!("jobs/{job}"), None::<&()>, None)?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&story)?);
            } else {
                show(&story);
            }
        }
        JobCommand::Retry { job, salvage: true, yes } => {
            if !yes && !confirmed(&scheduler, *job, "gives up what the lost RSA nodes had of the results")? {
                bail!("nothing was changed");
            }
            let path = format!("jobs/{job}/retry?salvage=true");
            let story: JobStory = scheduler.ask("POST", &path, None::<&()>, None)?;
            let name = name_of(&story);
            println!(
                "job {name}: what is left of its results is saved; `ondeck wait {name}` waits for its end"
            );
        }
        JobCommand::Retry { job, .. } => {
            let story: JobStory = scheduler.ask("POST", &format!("jobs/{job}/retry"), None::<&()>, None)?;
            let name = name_of(&story);
            println!("job {name}: it is tried again; `ondeck wait {name}` waits for its end");
        }
        JobCommand::Abandon { job, yes } => {
            if !yes && !confirmed(&scheduler, *job, "loses the results")? {
                bail!("nothing was changed");
            }
            let story: JobStory = scheduler.ask("POST", &format!("jobs/{job}/abandon"), None::<&()>, None)?;
            println!("job {}: its results are given up", name_of(&story));
        }
        JobCommand::Log => {
            for line in scheduler.ask_text("log")?.lines() {
                println!("{}", shown(line));
            }
        }
    }
    Ok(exit::OK)
}

/// Whether somebody at the terminal wants it. Of a job that is not known, nobody is asked.
fn confirmed(scheduler: &Scheduler, job: JobSelector, what: &str) -> Result<bool> {
    let _: JobStory = scheduler.ask("GET", &format!("jobs/{job}"), None::<&()>, None)?;
    if !std::io::stdin().is_terminal() {
        bail!("this {what} of job {job} for good; say so with --yes");
    }
    print!("This {what} of job {job} for good. Write its number to go on: ");
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim() == job.to_string())
}

/// What to call a job so that no other one of its number is meant.
fn name_of(story: &JobStory) -> JobSelector {
    let (id, others) = (story.job.id, &story.others);
    JobSelector {
        job: id.job,
        submitted: others.iter().any(|other| !other.id.is_same_job(id)).then_some(id.submitted),
        restarts: others.iter().any(|other| other.id.is_same_job(id)).then_some(id.restarts),
    }
}

/// How long ago that was, for people.
fn since(ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(ms);
    let seconds = SystemTime::now().duration_since(then).unwrap_or_default().as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

fn show(story: &JobStory) {
    let job = &story.job;
    let done = if story.done { ", all done" } else { "" };
    println!("job {} of user {}: {}, {}{done}", name_of(story), job.owner.uid, job.job_state, job.rsa_state);
    for other in &story.others {
        let done = if other.done { ", all done" } else { "" };
        let name = JobSelector::from(other.id);
        println!("  also    {name}: {}, {}{done}", other.job_state, other.rsa_state);
    }
    for path in &job.request.data_in {
        println!("  input   {}", shown(&path.to_string_lossy()));
    }
    for path in &job.request.data_out {
        println!("  output  {}", shown(&path.to_string_lossy()));
    }
    if let Some(allocation) = &job.allocation {
        let nodes: Vec<&str> = allocation.nodes.iter().map(NodeName::as_str).collect();
        println!("  RSA     {} of {}", allocation.promise, nodes.join(", "));
    }
    if !job.io_nodes.is_empty() {
        let nodes: Vec<&str> = job.io_nodes.iter().map(NodeName::as_str).collect();
        println!("  nodes   {}", nodes.join(", "));
    }
    if let Some(transfer) = &story.transfer {
        let said = status::transfer(transfer);
        println!("  copying {}", if said.is_empty() { "nothing yet" } else { &said });
    }
    if !job.waits_for.is_empty() {
        println!("  waits   {}", shown(&job.waits_for));
    }
    if !job.message.is_empty() {
        println!("  note    {}", shown(&job.message));
    }
    if let Some(delay) = &story.delay {
        println!("  delay   {}", shown(&delay.text));
        if delay.ended_ms.is_some() {
            println!("          {}: {}", shown(&delay.filesystem.to_string_lossy()), shown(&delay.reason));
        }
    }
    for layout in &story.layouts {
        let chosen = match (&layout.options, layout.bandwidth) {
            (Some(options), Some(bandwidth)) => format!("{options}, for at most {bandwidth}; "),
            (Some(options), None) => format!("{options}; "),
            (None, _) => String::new(),
        };
        println!("  layout  {}: {chosen}{}", shown(&layout.directory.to_string_lossy()), shown(&layout.text));
        if !layout.from.is_empty() {
            let why: Vec<&str> = std::iter::once(layout.from.as_str())
                .chain(layout.reasons.iter().map(String::as_str))
                .collect();
            println!("          from {}", shown(&why.join("; ")));
        }
    }
    for part in &story.lost {
        let ago = since(part.seen_ms);
        println!("\nLOST WITH {}: {} files of {}, as seen {ago} ago", part.node, part.files, part.bytes);
        for name in &part.names {
            println!("  {}", shown(name));
        }
        let more = part.files.saturating_sub(part.names.len() as u64);
        if more > 0 {
            println!("  and {more} more");
        }
    }
    println!("\n{:>20}  SECONDS", "RSA_STATE");
    for (state, seconds) in &story.phases {
        println!("{:>20}  {seconds:.3}", state);
    }
    println!("\n{:>12}  {:<10} {:<20} WHAT", "SECOND", "JOB_STATE", "RSA_STATE");
    let began = story.log.first().map_or(0, |line| line.at_ms);
    for line in &story.log {
        let (job_state, rsa_state) =
            line.states.map(|(job, rsa)| (job.word(), rsa.word())).unwrap_or_default();
        let second = line.at_ms.saturating_sub(began) as f64 / 1000.0;
        println!("{second:>12.3}  {job_state:<10} {rsa_state:<20} {}", shown(&line.text));
    }
}

pub fn wait(args: &WaitArgs) -> ExitCode {
    end("wait", try_wait(args))
}

fn try_wait(args: &WaitArgs) -> Result<u8> {
    let scheduler = Scheduler::find(&load(args.config.as_deref())?)?;
    let until = args.timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let wait = left.map_or(ONE_WAIT, |left| left.min(ONE_WAIT));
        let path = format!("jobs/{}/wait?ms={}", args.job, wait.as_millis());
        let patience = Some(wait + Duration::from_secs(10));
        let waited: Waited = scheduler.ask("GET", &path, None::<&()>, patience)?;
        if waited.abandoned {
            bail!("the results of job {} were abandoned: {}", args.job, shown(&waited.message));
        }
        if waited.done {
            if waited.ran_full {
                eprintln!(
                    "ondeck wait: the RAM disk of job {} was full: its programs may not have written all that they should; \
                     `ondeck job show {}` says more",
                    args.job, args.job
                );
            }
            return Ok(exit::OK);
        }
        if waited.stuck {
            bail!("job {}: {}", args.job, shown(&waited.message));
        }
        if left.is_some_and(|left| left.is_zero()) {
            bail!("job {} is {}: the time is over", args.job, shown(&waited.state));
        }
    }
}
