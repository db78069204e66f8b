//! The demo's program: reads its input, then writes a checkpoint, one file per simulated rank.
//!
//! It behaves like a small MPI code that was written for a parallel filesystem, and knows nothing
//! about Ondeck: the same command line runs on a disk and on a RAM disk. What it writes follows
//! from what it read, so two runs over the same input must leave the same bytes.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use ondeck_bench::random::Random;
use ondeck_bench::size;
use rustix::process::{Signal, set_parent_process_death_signal};

/// Read every file of a directory, then write one file per simulated rank.
#[derive(Parser)]
#[command(name = "checkpoint-writer", version)]
struct Options {
    /// Processes that write; each writes its share of the ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    processes: u32,
    /// Ranks, one file each
    #[arg(long, default_value_t = 2048)]
    files: u32,
    /// Size of each rank's file
    #[arg(long, default_value = "512KiB", value_parser = size::parse)]
    size: u64,
    /// Directory whose files are read
    #[arg(long)]
    input: PathBuf,
    /// Directory for rank-0000.dat and so on; made if missing
    #[arg(long)]
    output: PathBuf,
    /// fsync each file before closing it
    #[arg(long)]
    fsync: bool,
}

struct Input {
    files: u64,
    bytes: u64,
    sum: u64,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("checkpoint-writer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let input = read_input(&options.input)?;
    println!(
        "read {} files {} bytes in {:.3} s, sum {:016x}",
        input.files,
        input.bytes,
        start.elapsed().as_secs_f64(),
        input.sum
    );

    let start = Instant::now();
    fs::create_dir_all(&options.output)
        .with_context(|| format!("cannot make {}", options.output.display()))?;
    write_in_processes(options, input.sum)?;
    println!(
        "wrote {} files {} bytes in {:.3} s",
        options.files,
        u64::from(options.files) * options.size,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Reads the files in the order of their names, so that the sum does not depend on the order in
/// which a filesystem lists them.
fn read_input(directory: &Path) -> Result<Input> {
    let list = || -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path())).collect()
    };
    let mut paths = list().with_context(|| format!("cannot list {}", directory.display()))?;
    paths.sort();

    let mut input = Input { files: 0, bytes: 0, sum: 0 };
    let mut buffer = vec![0; size::MIB as usize];
    for path in paths.iter().filter(|path| path.is_file()) {
        add_file(path, &mut buffer, &mut input).with_context(|| format!("cannot read {}", path.display()))?;
    }
    if input.files == 0 {
        bail!("{} has no files to read", directory.display());
    }
    Ok(input)
}

fn add_file(path: &Path, buffer: &mut [u8], input: &mut Input) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    input.files += 1;
    loop {
        let length = match file.read(buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        input.bytes += length as u64;
        for word in buffer[..length].chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            input.sum = input.sum.rotate_left(1).wrapping_add(u64::from_le_bytes(padded));
        }
    }
}

/// Forks the writers and waits for all of them; fails when one of them failed.
fn write_in_processes(options: &Options, seed: u64) -> Result<()> {
    let mut workers = Vec::new();
    for worker in 0..options.processes {
        // SAFETY: this process has one thread, so the child inherits no lock that another thread
        // holds, and may allocate and write files like any program.
        match unsafe { libc::fork() } {
            -1 => {
                // The workers that did start are waited for below; the missing share is an error.
                let error = std::io::Error::last_os_error();
                wait_for(&workers)?;
                return Err(error).context("cannot fork a worker");
            }
            0 => {
                // Ranks end with the job that started them.
                let _ = set_parent_process_death_signal(Some(Signal::TERM));
                let code = match write_share(options, worker, seed) {
                    Ok(()) => 0,
                    Err(error) => {
                        eprintln!("checkpoint-writer: worker {worker}: {error:#}");
                        1
                    }
                };
                // SAFETY: ends the child at once. Its copy of the parent's standard output must
                // not be flushed a second time, which `std::process::exit` would do.
                unsafe { libc::_exit(code) }
            }
            pid => workers.push(pid),
        }
    }
    wait_for(&workers)
}

fn wait_for(workers: &[libc::pid_t]) -> Result<()> {
    let mut failed = 0;
    for &pid in workers {
        let mut status = 0;
        // SAFETY: `status` outlives the call, and `pid` is a child nobody else waits for.
        while unsafe { libc::waitpid(pid, &raw mut status, 0) } == -1 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error).context("cannot wait for a worker");
            }
        }
        if !(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0) {
            failed += 1;
        }
    }
    if failed > 0 {
        bail!("{failed} of {} workers failed", workers.len());
    }
    Ok(())
}

/// Ranks are dealt out in turn, as a job's ranks are over its nodes.
fn write_share(options: &Options, worker: u32, seed: u64) -> Result<()> {
    let mut contents = vec![0; usize::try_from(options.size)?];
    for rank in (worker..options.files).step_by(options.processes as usize) {
        Random::new(seed ^ u64::from(rank)).fill(&mut contents);
        let path = options.output.join(format!("rank-{rank:04}.dat"));
        write_file(&path, &contents, options.fsync)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn write_file(path: &Path, contents: &[u8], fsync: bool) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(contents)?;
    if fsync {
        file.sync_all()?;
    }
    Ok(())
}
