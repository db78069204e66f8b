//! Runs of this user: listing them, and giving up what one still holds.

use std::io::{BufRead, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ondeck_core::exit;

use super::front;
use super::message::Order;
use crate::state;

/// `ondeck run --list`.
pub fn list() -> Result<u8> {
    let base = state::runs()?;
    let mut any = false;
    for entry in std::fs::read_dir(&base)? {
        let entry = entry?;
        let id = entry.file_name().to_string_lossy().into_owned();
        if !entry.path().is_dir() {
            continue;
        }
        any = true;
        let text = std::fs::read_to_string(entry.path().join("state")).unwrap_or_default();
        let alive = match UnixStream::connect(entry.path().join("control")) {
            Ok(_) => true,
            Err(error) if is_nobody(&error) => false,
            // Its results may be held: nothing of it is removed because it can't be asked.
            Err(error) => {
                println!("{id}  can't be asked: {error}");
                continue;
            }
        };
        // A run that is just beginning does not answer yet. One that was made later than now was made by another clock.
        let young = entry
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|made| made.elapsed().map_or(true, |age| age < std::time::Duration::from_secs(60)));
        if !alive && young {
            println!("{id}  starting, or just ended");
            continue;
        }
        let state =
            if alive { text.trim() } else { "its keeper is gone; nothing of it can be saved any more" };
        println!("{id}  {state}");
        if !alive {
            remove_dead(&entry.path());
        }
    }
    if !any {
        println!("no runs");
    }
    Ok(exit::OK)
}

/// Whether nobody listens on a run's socket any more, or not yet.
fn is_nobody(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused)
}

/// Removes the directory of a run whose keeper is gone (killed with the whole machine or cgroup).
fn remove_dead(dir: &Path) {
    // Only what a run makes there: never anything recursive in a directory that something could be mounted in.
    for name in ["control", "state", "log"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    if let Ok(entries) = std::fs::read_dir(dir) {
        for entry in
            entries.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "manifest"))
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let _ = std::fs::remove_dir(dir.join("ramdisk"));
    let _ = std::fs::remove_dir(dir);
}

/// `ondeck run --abandon ID`.
pub fn abandon(id: &str, yes: bool, json: bool, quiet: bool) -> Result<u8> {
    if !yes {
        if !std::io::stdin().is_terminal() {
            bail!("giving up the results of run {id} must be confirmed; add --yes");
        }
        if !confirmed(&format!("Give up the results of run {id} that are not on disk? Type `abandon`: "))? {
            println!("nothing was given up");
            return Ok(exit::OK);
        }
    }
    front::attach(id, Order::Abandon, json, quiet)
}

/// Asks on the terminal.
pub fn confirmed(question: &str) -> Result<bool> {
    let terminal = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/tty")
        .context("there is no terminal to ask on")?;
    write!(&terminal, "{question}")?;
    let mut answer = String::new();
    std::io::BufReader::new(&terminal).read_line(&mut answer)?;
    Ok(answer.trim() == "abandon")
}
