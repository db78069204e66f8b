//! `ondeck-bench observer`: what watching who writes costs a program, whose files lie in memory: nothing is faster than that, so it costs most there.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ondeck_agent::observer::Observer;
use ondeck_core::{Incarnation, JobId, NodeName};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::scheduler::{Options, Part, word};
use crate::{interrupt, machine};

/// Of a program that writes.
const WRITES_COST: f64 = 10.0;
/// Its writes, each of so many bytes.
const WRITES: u32 = 300_000;
const BYTES: usize = 1024;
/// Files of a program that opens one for each of its writes.
const FILES: u32 = 30_000;

/// A program that writes files: all into one, or each into one of its own.
#[derive(clap::Args)]
pub struct Opener {
    directory: PathBuf,
    files: u32,
    /// Into each of them
    writes: u32,
}

impl Opener {
    pub fn run(&self) -> Result<()> {
        let block = vec![0u8; BYTES];
        for number in 0..self.files {
            let path = self.directory.join(number.to_string());
            let mut file = File::create(&path).with_context(|| path.display().to_string())?;
            for _ in 0..self.writes {
                file.write_all(&block)?;
            }
        }
        Ok(())
    }
}

/// A directory in memory, which is removed in the end.
struct InMemory(PathBuf);

impl InMemory {
    fn new() -> Result<InMemory> {
        let path = PathBuf::from(format!("/dev/shm/ondeck-bench.{}", std::process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(InMemory(path))
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Seconds of a run of the program, as a process of the job.
fn run_once(directory: &Path, files: u32, writes: u32, node: &NodeName) -> Result<f64> {
    fs::create_dir(directory)?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["opener", &word(directory), &files.to_string(), &writes.to_string()]);
    command.env("SLURM_JOB_ID", "1").env("SLURMD_NODENAME", node.as_str()).env("SLURM_PROCID", "0");
    let began = Instant::now();
    let status = command.status()?;
    let took = began.elapsed().as_secs_f64();
    ensure!(status.success(), "the program that writes failed");
    fs::remove_dir_all(directory)?;
    Ok(took)
}

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("only root can watch a filesystem: run it as root");
    }
    interrupt::install()?;
    let mut part = Part::new("observer", "Watching who writes");
    part.introduction = "The observer of `ondeck agent`, on a tmpfs; no Slurm. What is compared alternates, and the first round is dropped.".into();
    costs(options, &mut part)?;
    part.publish(options)
}

fn costs(options: &Options, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(3, 30);
    let folder = InMemory::new()?;
    let node: NodeName = "n1".parse()?;
    let job = Incarnation { job: JobId(1), submitted: 1, restarts: 0 };
    let programs = [("300,000 writes to a file", 1, WRITES), ("30,000 files, a write each", FILES, 1)];
    let mut seconds: [[Samples; 2]; 2] = Default::default();
    for round in 0..=rounds {
        interrupt::check()?;
        for (program, (_, files, writes)) in programs.iter().enumerate() {
            for way in (0..2).map(|turn| (turn + round) % 2) {
                let observer = Observer::default();
                if way == 1 {
                    let longest = Duration::from_secs(600);
                    let by = Instant::now() + longest;
                    observer.begin((job, None), &node, std::slice::from_ref(&folder.0), (by, longest))?;
                }
                let took = run_once(&folder.0.join("files"), *files, *writes, &node)?;
                if way == 1 {
                    observer.end(job, &[])?;
                }
                if round > 0 {
                    seconds[program][way].add(took);
                }
            }
        }
    }
    let more = |of: &[Samples; 2]| (of[1].median() / of[0].median() - 1.0) * 100.0;
    part.goal(
        &format!("watching costs a program of 300,000 writes at most {WRITES_COST} %"),
        "1 KiB each, to one file in memory",
        format!("{:+.1} %", more(&seconds[0])),
        more(&seconds[0]) <= WRITES_COST,
    );
    paragraph(
        &mut part.text,
        &format!(
            "**Watching**: seconds of a program whose writes of 1 KiB go to a tmpfs, without the agent that watches the filesystem \
             (`watch_nodes`), and with it. What is written to an open file is not told, and each file that is opened and closed is: the second \
             program is the worst that there can be. {rounds} rounds."
        ),
    );
    let mut table = Table::new(&["/ not watched", "program", "watched", "median s", "min", "max"]);
    for ((name, ..), of) in programs.iter().zip(&seconds) {
        for (samples, watched) in of.iter().zip(["no", "yes"]) {
            let [median, min, max] = samples.cells(3);
            let ratio = number(samples.median() / of[0].median(), 2);
            table.add([ratio, (*name).to_owned(), watched.to_owned(), median, min, max]);
        }
    }
    table.write(&mut part.text);
    Ok(())
}
