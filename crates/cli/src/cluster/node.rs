//! `ondeck node`: the RSA nodes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use ondeck_api::scheduler::{Drain, Status};
use ondeck_core::{NodeName, exit};

use super::{Scheduler, end, load, status};

/// Look at the RSA nodes, drain them, let them lend again
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct NodeArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: NodeCommand,
}

const EXAMPLES: &str = "Examples:
  ondeck node list
  ondeck node drain r3 --reason 'memory is replaced on Monday'
  ondeck node resume r3
  ondeck node give-up r3        it is gone for good; jobs that started before the scheduler's journal began wait for it

A node that is drained lends nothing new; the jobs that have it keep it until they are done.";

#[derive(Subcommand)]
enum NodeCommand {
    /// List the RSA nodes: what they lend, and to which jobs
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Lend nothing new of a node (administrators)
    Drain {
        /// Which
        node: NodeName,
        /// Why, for whoever looks at it
        #[arg(long, default_value = "by hand")]
        reason: String,
    },
    /// Wait no longer for a node that has not answered since the scheduler's journal began (administrators)
    ///
    /// It may have the RAM disk of a job that had started before, so such jobs get no new one until it has answered, or is
    /// given up. What it has is kept, and found if it comes back.
    GiveUp {
        /// Which
        node: NodeName,
    },
    /// Let a node lend again (administrators)
    Resume {
        /// Which
        node: NodeName,
    },
}

pub fn node(args: &NodeArgs) -> ExitCode {
    end("node", try_node(args))
}

fn try_node(args: &NodeArgs) -> Result<u8> {
    let scheduler = Scheduler::find(&load(args.config.as_deref())?)?;
    match &args.command {
        NodeCommand::List { json } => {
            let status: Status = scheduler.ask("GET", "jobs", None::<&()>, None)?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&status.nodes)?);
            } else {
                print!("{}", status::nodes(&status));
            }
        }
        NodeCommand::Drain { node, reason } => {
            let body = Drain { why: reason.clone() };
            let _: Status = scheduler.ask("POST", &format!("nodes/{node}/drain"), Some(&body), None)?;
            println!("{node} lends nothing new; `ondeck node resume {node}` undoes it");
        }
        NodeCommand::GiveUp { node } => {
            let _: Status = scheduler.ask("POST", &format!("nodes/{node}/give-up"), None::<&()>, None)?;
            println!("{node} is given up; what it has is kept, and found if it comes back");
        }
        NodeCommand::Resume { node } => {
            let _: Status = scheduler.ask("POST", &format!("nodes/{node}/resume"), None::<&()>, None)?;
            println!("{node} lends again");
        }
    }
    Ok(exit::OK)
}
