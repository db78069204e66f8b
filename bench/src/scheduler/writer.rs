//! The program that the thesis's jobs run: each process writes its part of the output, or reads it
//! back, and tells how long opening, moving and closing took. It knows nothing of Ondeck.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use ondeck_bench::size::MIB;
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};

/// How much is written or read at once.
const BLOCK: usize = MIB as usize;

#[derive(Args)]
pub struct Writer {
    #[command(subcommand)]
    action: WriterCommand,
    /// The directory of the output
    #[arg(long, global = true, default_value = ".")]
    directory: PathBuf,
    /// Bytes that all processes write together
    #[arg(long, global = true, default_value_t = 0)]
    bytes: u64,
    /// Files that all processes write together; one is shared by all
    #[arg(long, global = true, default_value_t = 1)]
    files: u64,
    /// Where each process writes what it took, to a file of its own
    #[arg(long, global = true, default_value = ".")]
    record: PathBuf,
    /// When all begin, in seconds since 1970
    #[arg(long, global = true, default_value_t = 0)]
    start: u64,
}

#[derive(Clone, Copy, Subcommand, PartialEq, Eq)]
enum WriterCommand {
    /// Write the output
    Write,
    /// Read it, past this host's page cache
    Read,
}

/// What the processes of one step took together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Took {
    /// From the first that began until the last that ended.
    pub seconds: f64,
    /// Of the slowest process each.
    pub open: f64,
    pub transfer: f64,
    pub close: f64,
}

impl Took {
    /// From the records of one step.
    pub fn read(record: &Path, step: &str, processes: usize) -> Result<Took> {
        let records = (0..processes).map(|rank| -> Result<Value> {
            let path = record.join(format!("{step}-{rank}.json"));
            let text = std::fs::read(&path).with_context(|| format!("no record {}", path.display()))?;
            Ok(serde_json::from_slice(&text)?)
        });
        let records: Vec<Value> = records.collect::<Result<_>>()?;
        let greatest = |name: &str| records.iter().filter_map(|r| r[name].as_f64()).fold(0.0, f64::max);
        let began =
            records.iter().filter_map(|record| record["began"].as_f64()).fold(f64::INFINITY, f64::min);
        Ok(Took {
            seconds: greatest("ended") - began,
            open: greatest("open"),
            transfer: greatest("transfer"),
            close: greatest("close"),
        })
    }
}

/// One file of a process, or its range of the shared one.
struct Piece {
    path: PathBuf,
    from: u64,
    bytes: u64,
}

impl Writer {
    fn pieces(&self, rank: u64, processes: u64) -> Vec<Piece> {
        if self.files == 1 {
            let bytes = self.bytes / processes;
            return vec![Piece { path: self.directory.join("output"), from: rank * bytes, bytes }];
        }
        let mine = (rank..self.files).step_by(processes as usize);
        mine.map(|number| Piece {
            path: self.directory.join(format!("rank-{number:05}")),
            from: 0,
            bytes: self.bytes / self.files,
        })
        .collect()
    }

    pub fn run(&self) -> Result<()> {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let (rank, processes) = (number("SLURM_PROCID").unwrap_or(0), number("SLURM_NTASKS").unwrap_or(1));
        let pieces = self.pieces(rank, processes);
        let mut block = vec![0x5a; BLOCK];
        if self.action == WriterCommand::Read {
            // The disk shall be read, not what this host still has of the output.
            for piece in &pieces {
                let file = open(&piece.path, false)?;
                file.sync_data()?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
            }
        }
        let start = UNIX_EPOCH + Duration::from_secs(self.start);
        if let Ok(left) = start.duration_since(SystemTime::now()) {
            std::thread::sleep(left);
        }
        let began = seconds_since_1970();
        let [mut opening, mut moving, mut closing] = [0.0; 3];
        for piece in &pieces {
            let now = Instant::now();
            let mut file = open(&piece.path, self.action == WriterCommand::Write)?;
            opening += now.elapsed().as_secs_f64();
            let now = Instant::now();
            transfer(&mut file, piece, self.action, &mut block)
                .with_context(|| format!("cannot use {}", piece.path.display()))?;
            moving += now.elapsed().as_secs_f64();
            let now = Instant::now();
            // SAFETY: the descriptor is the file's own, which is given up here.
            if unsafe { libc::close(file.into_raw_fd()) } == -1 {
                return Err(std::io::Error::last_os_error())
                    .with_context(|| format!("cannot close {}", piece.path.display()));
            }
            closing += now.elapsed().as_secs_f64();
        }
        let ended = seconds_since_1970();
        let step = if self.action == WriterCommand::Write { "write" } else { "read" };
        let record =
            json!({ "began": began, "ended": ended, "open": opening, "transfer": moving, "close": closing });
        let path = self.record.join(format!("{step}-{rank}.json"));
        std::fs::write(&path, record.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn open(path: &Path, write: bool) -> Result<File> {
    let mut options = OpenOptions::new();
    if write {
        options.write(true).create(true).truncate(false)
    } else {
        options.read(true)
    };
    options.open(path).with_context(|| format!("cannot open {}", path.display()))
}

fn transfer(file: &mut File, piece: &Piece, action: WriterCommand, block: &mut [u8]) -> Result<()> {
    file.seek(SeekFrom::Start(piece.from))?;
    let mut left = piece.bytes;
    while left > 0 {
        let now = left.min(block.len() as u64) as usize;
        match action {
            WriterCommand::Write => file.write_all(&block[..now])?,
            WriterCommand::Read => file.read_exact(&mut block[..now])?,
        }
        left -= now as u64;
    }
    Ok(())
}

fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_the_output_without_gap_or_overlap() {
        let writer = |files| Writer {
            action: WriterCommand::Write,
            directory: "/out".into(),
            bytes: 4096,
            files,
            record: ".".into(),
            start: 0,
        };
        let all: Vec<Piece> = (0..4).flat_map(|rank| writer(1).pieces(rank, 4)).collect();
        let ranges: Vec<_> = all.iter().map(|piece| (piece.from, piece.bytes)).collect();
        assert_eq!(ranges, [(0, 1024), (1024, 1024), (2048, 1024), (3072, 1024)]);
        let mut names: Vec<_> = (0..3)
            .flat_map(|rank| writer(8).pieces(rank, 3))
            .map(|piece| (piece.path, piece.bytes))
            .collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 8);
        assert!(names.iter().all(|(_, bytes)| *bytes == 512));
    }
}
