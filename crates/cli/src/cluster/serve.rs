//! `ondeck serve`: the scheduler.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use ondeck_api::Config;
use ondeck_core::exit;
use ondeck_scheduler::ServeError;
use ondeck_scheduler::charge::Conflict;

use crate::agent::{LogFormat, log_to_stderr};

/// Run the scheduler: it watches the workload manager's queue and lends RSA nodes to jobs
///
/// It runs as root beside the workload manager's controller, on one machine of the cluster. Everything it decides is kept
/// in its journal first: one that is started again goes on where the former one ended, however that was. At SIGHUP it reads
/// its configuration again; the log says what is taken over, and what needs a new start.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// How its log is written to standard error; ONDECK_LOG sets what is logged (error, warn, info, debug)
    #[arg(long, value_enum, default_value = "human")]
    log: LogFormat,

    /// Read the configuration, say what it means, and end
    #[arg(long)]
    check: bool,

    /// Take the place of another journal's scheduler, or go on with an older copy of the journal, if the agents refuse
    ///
    /// For a journal that is lost for good. The agents are claimed, also those that come back later; the other scheduler's
    /// orders are refused from then on. RAM disks that the journal does not know are found: a job that runs goes on with its
    /// own, all other results are HELD until `ondeck job retry` or `ondeck job abandon`. It asks before. If no agent refuses,
    /// it says so and ends.
    #[arg(long)]
    take_over: bool,

    /// With --take-over: do not ask
    #[arg(long, requires = "take_over")]
    yes: bool,

    /// Print the description of its API (OpenAPI 3.1, JSON), and end
    #[arg(long)]
    openapi: bool,
}

impl ServeArgs {
    /// Whether it ends when it has told what it was asked for.
    pub fn only_tells(&self) -> bool {
        self.check || self.openapi
    }
}

const EXAMPLES: &str = "Examples:
  ondeck serve                     with /etc/ondeck/ondeck.toml
  ondeck serve --check             is the configuration right?
  kill -HUP PID                    read it again
  ondeck serve --openapi           what programs can ask it
  ondeck serve --take-over         the journal is lost, or an older copy of it was put back

With simulate = \"2s\" in the part [scheduler] it decides and logs, but lends nothing.
docs/admin.md sets a site up.";

/// Has all threads allocate from a few arenas. Every event is handled on a thread of its own, one at a time; with an arena
/// each, every one of them would keep as much as the largest event has ever needed.
fn share_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes a number of the allocator's, and there is one thread yet. If it is refused, nothing has changed.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Asks a person whether another scheduler is replaced.
fn confirmed(conflict: &Conflict) -> bool {
    use std::io::{BufRead, IsTerminal, Write};
    eprint!("{}", conflict.in_words());
    if !std::io::stdin().is_terminal() {
        eprintln!("ondeck serve: this takes the other scheduler's place for good; say so with --yes");
        return false;
    }
    eprint!("This takes the other scheduler's place for good. Write `take over` to go on: ");
    let mut line = String::new();
    let asked = std::io::stderr().flush().and_then(|()| std::io::stdin().lock().read_line(&mut line));
    asked.is_ok() && line.trim() == "take over"
}

pub fn serve(args: &ServeArgs) -> ExitCode {
    if args.openapi {
        print!("{}", ondeck_scheduler::openapi::text());
        return ExitCode::from(exit::OK);
    }
    let config = match Config::load(args.config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("ondeck serve: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    let site = match config.scheduler.site(&config.nodes) {
        Ok(site) => site,
        Err(error) => {
            eprintln!("ondeck serve: the configuration: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    if args.check {
        for (name, pool) in config.scheduler.pools(&config.nodes) {
            let nodes: Vec<&str> = pool.nodes.iter().map(ondeck_core::NodeName::as_str).collect();
            let default = if name == site.pool { " (the default)" } else { "" };
            println!("pool {name}{default}: {} of {}", pool.device, nodes.join(", "));
        }
        println!(
            "engine {}; one RSA node for {} compute nodes; switch from input to output after {} s",
            site.engine,
            site.proportion,
            site.delay.as_secs()
        );
        return ExitCode::from(exit::OK);
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("ondeck serve: agents take orders from root of this machine only; run it as root");
        return ExitCode::from(exit::USAGE);
    }
    log_to_stderr(args.log);
    share_memory();
    let confirm = |conflict: &Conflict| args.yes || confirmed(conflict);
    let take_over: Option<&dyn Fn(&Conflict) -> bool> = if args.take_over { Some(&confirm) } else { None };
    let file = args.config.clone();
    let read_again = Arc::new(move || Config::read_again(file.as_deref()));
    match ondeck_scheduler::serve(&config, read_again, take_over) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            eprintln!("ondeck serve: {error}");
            let is_needless = matches!(&error, ServeError::NothingToTakeOver(nothing) if nothing.is_known());
            ExitCode::from(if is_needless { exit::USAGE } else { exit::FAILED })
        }
    }
}
