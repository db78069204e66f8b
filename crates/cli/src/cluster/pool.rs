//! `ondeck pool`: the pools of RSA nodes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use ondeck_api::scheduler::Status;
use ondeck_core::schedule::NodeState;
use ondeck_core::{Bytes, exit};
use serde::Serialize;

use super::{Scheduler, end, load};

/// Look at the pools of RSA nodes
#[derive(Args)]
pub struct PoolArgs {
    /// The configuration [default: $ONDECK_CONFIG, else /etc/ondeck/ondeck.toml]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Subcommand)]
enum PoolCommand {
    /// List the pools: how many nodes each has, how many lend, what is free
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A pool in a line.
#[derive(Default, Serialize)]
struct Pool {
    nodes: u32,
    up: u32,
    free_nodes: u32,
    capacity: Bytes,
    free: Bytes,
}

pub fn pool(args: &PoolArgs) -> ExitCode {
    end("pool", try_pool(args))
}

fn try_pool(args: &PoolArgs) -> Result<u8> {
    let PoolCommand::List { json } = args.command;
    let scheduler = Scheduler::find(&load(args.config.as_deref())?)?;
    let status: Status = scheduler.ask("GET", "jobs", None::<&()>, None)?;
    let mut pools: BTreeMap<String, Pool> = BTreeMap::new();
    for node in status.nodes {
        let pool = pools.entry(node.pool).or_default();
        pool.nodes += 1;
        pool.up += u32::from(node.state == NodeState::Up);
        pool.free_nodes += u32::from(node.free == node.capacity && node.free > Bytes::ZERO);
        pool.capacity = pool.capacity.saturating_add(node.capacity);
        pool.free = pool.free.saturating_add(node.free);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&pools)?);
        return Ok(exit::OK);
    }
    println!("{:<12} {:>6} {:>6} {:>6} {:>12} {:>12}", "POOL", "NODES", "UP", "FREE", "CAPACITY", "FREE");
    for (name, pool) in pools {
        println!(
            "{name:<12} {:>6} {:>6} {:>6} {:>12} {:>12}",
            pool.nodes,
            pool.up,
            pool.free_nodes,
            pool.capacity.to_string(),
            pool.free.to_string()
        );
    }
    Ok(exit::OK)
}
