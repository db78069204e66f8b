//! What the benchmark has a host do on a mounted RAM disk: a process of its own inside the host, as
//! a job's would be, that tells how long each part took and what processor time it used.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Subcommand;
use ondeck_bench::size::{KIB, MIB};
use rustix::fs::{Advice, fadvise};
use serde_json::json;

/// How much is written or read at once.
pub const BLOCK: usize = MIB as usize;

/// The hidden subcommand.
#[derive(Subcommand)]
pub enum LoadCommand {
    /// Write a file; one that exists is written over in place
    Write {
        path: PathBuf,
        #[arg(long)]
        bytes: u64,
        /// Until it is on the servers, whatever the client has in its cache
        #[arg(long)]
        sync: bool,
    },
    /// Read a file that no cache of this machine holds
    Read { path: PathBuf },
    /// Make a directory of files
    Files {
        directory: PathBuf,
        #[arg(long)]
        count: usize,
        #[arg(long)]
        bytes: usize,
    },
    /// Create, look at and remove files of 1 KiB
    Metadata {
        directory: PathBuf,
        #[arg(long)]
        count: usize,
    },
}

/// What a load took.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// The parts, with the seconds that each took.
    pub parts: Vec<(String, f64)>,
    /// User and system time of the process, from its first part to its last.
    pub cpu_s: f64,
}

impl Load {
    pub fn seconds(&self) -> f64 {
        self.parts.iter().map(|(_, seconds)| seconds).sum()
    }

    pub fn parse(text: &str) -> Result<Self> {
        let value: serde_json::Value = serde_json::from_str(text).context("a load did not print JSON")?;
        let parts = value["parts"].as_array().context("a load without parts")?;
        let parts = parts
            .iter()
            .map(|part| {
                let name = part[0].as_str().context("a part without a name")?;
                Ok((name.to_owned(), part[1].as_f64().context("a part without time")?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { parts, cpu_s: value["cpu_s"].as_f64().context("a load without processor time")? })
    }
}

/// Does it, and prints a line for [`Load::parse`].
pub fn print(action: &LoadCommand) -> Result<()> {
    let mut parts = Vec::new();
    let mut cpu_s = 0.0;
    let mut part = |name: &str, work: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let (began, cpu) = (Instant::now(), own_cpu_s());
        work()?;
        parts.push((name.to_owned(), began.elapsed().as_secs_f64()));
        cpu_s += own_cpu_s() - cpu;
        Ok(())
    };
    match action {
        LoadCommand::Write { path, bytes, sync } => {
            let block = block();
            part("write", &mut || write(path, *bytes, *sync, &block))?;
        }
        LoadCommand::Read { path } => {
            let mut block = block();
            let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            fadvise(&file, 0, None, Advice::DontNeed).context("cannot empty the cache")?;
            part("read", &mut || {
                while file.read(&mut block)? > 0 {}
                Ok(())
            })?;
        }
        LoadCommand::Files { directory, count, bytes } => {
            let content = vec![0x5a; *bytes];
            part("create", &mut || {
                fs::create_dir(directory)?;
                (0..*count).try_for_each(|number| Ok(fs::write(directory.join(name(number)), &content)?))
            })?;
        }
        LoadCommand::Metadata { directory, count } => {
            fs::create_dir(directory)?;
            let content = vec![0x5a; KIB as usize];
            let paths: Vec<PathBuf> = (0..*count).map(|number| directory.join(name(number))).collect();
            part("create", &mut || each(&paths, |path| fs::write(path, &content)))?;
            part("stat", &mut || each(&paths, |path| fs::metadata(path).map(drop)))?;
            part("unlink", &mut || each(&paths, |path| fs::remove_file(path)))?;
        }
    }
    println!("{}", json!({ "parts": parts, "cpu_s": cpu_s }));
    Ok(())
}

/// Not zeroes, and touched.
fn block() -> Vec<u8> {
    vec![0x5a; BLOCK]
}

fn name(number: usize) -> String {
    format!("f{number:06}")
}

fn each(paths: &[PathBuf], action: impl Fn(&Path) -> std::io::Result<()>) -> Result<()> {
    paths.iter().try_for_each(|path| action(path).with_context(|| path.display().to_string()))
}

/// With the close, which hands the last of a client's buffers to the servers.
fn write(path: &Path, bytes: u64, sync: bool, block: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut left = bytes;
    while left > 0 {
        let now = left.min(block.len() as u64);
        file.write_all(&block[..now as usize])?;
        left -= now;
    }
    if sync {
        file.sync_all().with_context(|| format!("cannot sync {}", path.display()))?;
    }
    // Unlike a drop, this tells when the close fails.
    // SAFETY: the descriptor is the file's own, which is given up here.
    if unsafe { libc::close(file.into_raw_fd()) } == -1 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("cannot flush {}", path.display()));
    }
    Ok(())
}

fn own_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_tells_its_parts() {
        let load = Load::parse(r#"{"parts":[["create",1.5],["stat",0.5]],"cpu_s":0.25}"#).unwrap();
        assert_eq!(load.seconds(), 2.0);
        assert_eq!(load.cpu_s, 0.25);
        assert!(Load::parse("no").is_err());
    }

    #[test]
    fn a_file_is_written_whole_and_over_in_place() {
        let path = std::env::temp_dir().join(format!("ondeck-bench-load-{}", std::process::id()));
        write(&path, 2_500_000, false, &block()).unwrap();
        write(&path, 1_000_000, true, &block()).unwrap();
        let length = fs::metadata(&path).unwrap().len();
        fs::remove_file(&path).unwrap();
        assert_eq!(length, 2_500_000);
    }
}
