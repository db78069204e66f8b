//! `ondeck layout history` and `ondeck layout forget`: what earlier runs have left, as the scheduler remembers it.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{ArgGroup, Args};
use ondeck_api::in_query;
use ondeck_api::scheduler::{Forgotten, LayoutRun};
use ondeck_core::text::plain;
use ondeck_layout::history::{Recollection, Run, recall};

use crate::cluster::{Scheduler, explain, load};

/// The longest name of a program or a directory in the list.
const LONGEST: usize = 200;

/// Show what your earlier jobs have left in the directories whose layouts they asked for
///
/// It is what `#RSA_LAYOUT=auto` goes by. It has names of files with `#` in place of numbers, sizes and counts; users see their own,
/// root sees all.
#[derive(Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    which: Which,

    /// Print JSON, with the kinds of files of each run
    #[arg(long)]
    json: bool,
}

/// Forget what your earlier jobs have left: layouts are not chosen by it any more
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["program", "directory", "all"]))]
pub struct ForgetArgs {
    #[command(flatten)]
    which: Which,

    /// All of it
    #[arg(long, conflicts_with_all = ["program", "directory"])]
    all: bool,
}

/// Which runs.
#[derive(Args)]
struct Which {
    /// Of this program alone: what the job's script starts by srun or mpirun, else the job's name
    #[arg(long, value_name = "NAME")]
    program: Option<String>,

    /// In this directory alone, and in those whose names differ from its in numbers only
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,

    /// Of this user alone (root)
    #[arg(long, value_name = "UID")]
    user: Option<u32>,

    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The route, with what is meant.
fn route(program: Option<&str>, directory: Option<&Path>, user: Option<u32>) -> Result<String> {
    let directory = directory.map(std::path::absolute).transpose()?;
    let directory = match &directory {
        Some(directory) => Some(directory.to_str().context("the history knows no names that are not UTF-8")?),
        None => None,
    };
    let fields = [
        program.map(|program| format!("program={}", in_query(program))),
        directory.map(|directory| format!("directory={}", in_query(directory))),
        user.map(|user| format!("uid={user}")),
    ];
    let fields: Vec<String> = fields.into_iter().flatten().collect();
    Ok(format!("layouts/history?{}", fields.join("&")))
}

impl Which {
    fn route(&self) -> Result<String> {
        route(self.program.as_deref(), self.directory.as_deref(), self.user)
    }

    fn scheduler(&self) -> Result<Scheduler> {
        Scheduler::find(&load(self.config.as_deref())?)
    }
}

/// Shows it.
pub fn history(args: &HistoryArgs) -> Result<()> {
    let route = args.which.route()?;
    let runs: Vec<LayoutRun> = ask(&args.which.scheduler()?, "GET", &route)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&runs)?);
        return Ok(());
    }
    if runs.is_empty() {
        println!(
            "no runs are known: a job that asks for layouts (#RSA_LAYOUT) is looked at when it has ended"
        );
        return Ok(());
    }
    let is_anothers = runs.iter().any(|run| run.uid != rustix::process::geteuid().as_raw());
    let mut shown: Vec<(u32, &str, &str)> = Vec::new();
    for first in &runs {
        let key = (first.uid, first.program.as_str(), first.directory.as_str());
        if shown.contains(&key) {
            continue;
        }
        shown.push(key);
        let user = if is_anothers { format!(", user {}", first.uid) } else { String::new() };
        println!("{} in {}{user}", plain(key.1, LONGEST), plain(key.2, LONGEST));
        let of_key: Vec<&LayoutRun> = runs
            .iter()
            .filter(|run| (run.uid, run.program.as_str(), run.directory.as_str()) == key)
            .collect();
        let known: Vec<Run> = of_key.iter().map(|run| run.run.clone()).collect();
        if let Some(told) = recall(&known, now_ms()) {
            println!("  by now: {told}");
        }
        for LayoutRun { job, used, run: Run { shape, tally, .. }, .. } in of_key {
            let counts = format!(
                "{} nodes, {} tasks, {} files, {}",
                shape.nodes, shape.tasks, tally.files, tally.bytes
            );
            println!("  job {job}: {counts}: {used}");
        }
    }
    Ok(())
}

/// Has it forgotten.
pub fn forget(args: &ForgetArgs) -> Result<()> {
    let which = &args.which;
    let Forgotten { runs } = ask(&which.scheduler()?, "DELETE", &which.route()?)?;
    println!("{} forgotten", if runs == 1 { "1 run is".to_owned() } else { format!("{runs} runs are") });
    Ok(())
}

fn ask<A: serde::de::DeserializeOwned>(scheduler: &Scheduler, method: &str, route: &str) -> Result<A> {
    scheduler.ask(method, route, None::<&()>, None).map_err(|error| anyhow::anyhow!(explain(&error)))
}

/// What earlier runs of a program say, in a directory or wherever it was; nothing if there are none.
pub fn recall_of(
    config: Option<&Path>,
    program: &str,
    directory: Option<&Path>,
) -> Result<Option<Recollection>> {
    let scheduler = Scheduler::find(&load(config)?)?;
    // Root sees all; advice is by one's own runs.
    let own = rustix::process::geteuid().as_raw();
    let runs: Vec<LayoutRun> = ask(&scheduler, "GET", &route(Some(program), directory, Some(own))?)?;
    let runs: Vec<Run> = runs.into_iter().map(|run| run.run).collect();
    Ok(recall(&runs, now_ms()))
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
