//! `ondeck agent`: the agent of a node.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use ondeck_api::Config;
use ondeck_core::exit;

/// Run the agent of this node: it lends RAM, starts the servers of RAM disks and mounts them
///
/// It must run as root on every RSA node and on every node that mounts RAM disks. RAM disks outlive it: an agent that
/// starts again finds what is running, goes on with what was complete and removes what was not. At SIGHUP it reads its
/// configuration again; the log says what is taken over, and what needs a new start.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct AgentArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// How its log is written to standard error; ONDECK_LOG sets what is logged (error, warn, info, debug)
    #[arg(long, value_enum, default_value = "human")]
    log: LogFormat,

    /// Read the configuration, say what would be lent, and end
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, ValueEnum)]
/// How a log is written.
pub enum LogFormat {
    Human,
    Json,
}

const EXAMPLES: &str = "Examples:
  ondeck agent                          reached by root on this machine, through /run/ondeck/agent.sock
  ondeck agent --config site.toml       with `listen` in its part [agent]: reached from other nodes, too
  ondeck agent --check                  is the configuration right?
  kill -HUP PID                         read it again

docs/engines.md explains the configuration.";

impl AgentArgs {
    /// Whether it ends when it has told what it was asked for.
    pub fn only_checks(&self) -> bool {
        self.check
    }
}

pub fn agent(args: &AgentArgs) -> ExitCode {
    let config = match Config::load(args.config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("ondeck agent: {error}");
            return ExitCode::from(exit::USAGE);
        }
    };
    if !rustix::process::geteuid().is_root() {
        eprintln!(
            "ondeck agent: only root can mount for others; for a RAM disk of your own use `ondeck run`"
        );
        return ExitCode::from(exit::USAGE);
    }
    if args.check {
        return check(&config);
    }
    log_to_stderr(args.log);
    let file = args.config.clone();
    match ondeck_agent::server::serve(&config, Arc::new(move || Config::read_again(file.as_deref()))) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            eprintln!("ondeck agent: {error}");
            ExitCode::from(exit::FAILED)
        }
    }
}

fn check(config: &Config) -> ExitCode {
    let report =
        ondeck_agent::capacity::Capacity::new(&config.agent).and_then(|capacity| capacity.report(&[]));
    match report {
        Ok(devices) => {
            for (name, device) in devices {
                println!(
                    "device {name}: lends at most {}, of which {} are free now",
                    device.capacity, device.free
                );
            }
            ExitCode::from(exit::OK)
        }
        Err(error) => {
            eprintln!("ondeck agent: {error}");
            ExitCode::from(exit::FAILED)
        }
    }
}

/// Sets up the log of a daemon.
pub fn log_to_stderr(format: LogFormat) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("ONDECK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // What can't be written, because the log's disk is full, is lost: to say so on the same standard error would end the thread.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    match format {
        LogFormat::Human => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).with_target(false).init();
        }
        LogFormat::Json => builder.json().init(),
    }
}
