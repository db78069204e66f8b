//! A program that believes what it wrote: `ondeck-writer DIRECTORY STOP REPORT`.
//!
//! Every 10 ms it appends to a file, replaces its checkpoint by a rename, makes a file and removes an older one, and
//! verifies that all of this is as it left it the last time. It ends when the file STOP exists. REPORT then says `ok ROUNDS`,
//! or what was not as it had left it.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Files of so many rounds are there at a time.
const KEPT: u64 = 3;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(directory), Some(stop), Some(report)) = (arguments.next(), arguments.next(), arguments.next())
    else {
        eprintln!("usage: ondeck-writer DIRECTORY STOP REPORT");
        return ExitCode::from(2);
    };
    let mut rounds = 0;
    let said = loop {
        if stop.exists() {
            break format!("ok {rounds}");
        }
        rounds += 1;
        if let Err(why) = round(&directory, rounds) {
            break format!("mixed in round {rounds}: {why}");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let good = said.starts_with("ok");
    // Other ranks have reports of nearly the same name.
    let mut partial = report.clone().into_os_string();
    partial.push(".partial");
    let written = fs::write(&partial, &said).and_then(|()| fs::rename(&partial, &report));
    if written.is_ok() && good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn round(directory: &Path, now: u64) -> Result<(), String> {
    let words =
        |what: &str, path: &Path, error: std::io::Error| format!("{what} {}: {error}", path.display());
    let last = now - 1;
    let (checkpoint, log) = (directory.join("checkpoint"), directory.join("log"));
    let numbered = |number: u64| directory.join(format!("part-{number}"));
    if last > 0 {
        let found = fs::read_to_string(&checkpoint).map_err(|error| words("read", &checkpoint, error))?;
        if found != last.to_string() {
            return Err(format!("the checkpoint says {found}"));
        }
        let found = fs::read_to_string(&log).map_err(|error| words("read", &log, error))?;
        let wanted: String = (1..=last).map(|number| format!("{number}\n")).collect();
        if found != wanted {
            return Err(format!(
                "the log has {} lines and ends in {:?}",
                found.lines().count(),
                found.lines().last()
            ));
        }
    }
    let mut found: Vec<u64> = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| words("list", directory, error))? {
        let entry = entry.map_err(|error| words("list", directory, error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        match name.strip_prefix("part-").map(str::parse) {
            Some(Ok(number)) => found.push(number),
            _ if name == "checkpoint" || name == "log" => {}
            _ => return Err(format!("there is {name}")),
        }
    }
    found.sort_unstable();
    let wanted: Vec<u64> = (last.saturating_sub(KEPT - 1).max(1)..=last).collect();
    if found != wanted {
        return Err(format!("there are the parts {found:?}, not {wanted:?}"));
    }
    let new = directory.join("checkpoint.new");
    fs::write(&new, now.to_string()).map_err(|error| words("write", &new, error))?;
    fs::rename(&new, &checkpoint).map_err(|error| words("rename", &new, error))?;
    let mut open = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&log)
        .map_err(|error| words("open", &log, error))?;
    open.write_all(format!("{now}\n").as_bytes()).map_err(|error| words("append to", &log, error))?;
    drop(open);
    let part = numbered(now);
    fs::write(&part, now.to_string()).map_err(|error| words("write", &part, error))?;
    if now > KEPT {
        let old = numbered(now - KEPT);
        fs::remove_file(&old).map_err(|error| words("remove", &old, error))?;
    }
    Ok(())
}
