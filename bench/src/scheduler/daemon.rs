//! `ondeck serve` beside a queue of 10,000 jobs. Its RAM disks are pretended (`simulate`), and so is
//! Slurm: a script prints lines as squeue does, so that nothing but the daemon is measured.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ondeck_bench::size::{MIB, show};
use rustix::process::{Pid, Signal, kill_process};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::Samples;
use crate::scheduler::pass::{NEXT, NODES, PENDING, RUNNING};
use crate::scheduler::{Options, Part};
use crate::tools::Programs;
use crate::{interrupt, machine, scratch};

/// Resident memory of the daemon.
const MEMORY: u64 = 200 * MIB;
/// From the start until everything was seen once.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often the figures are looked at.
const GLANCE: Duration = Duration::from_millis(500);

/// What the jobs of the queue are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueShape {
    Usual,
    AllOnDeck,
}

impl QueueShape {
    fn title(self) -> String {
        match self {
            QueueShape::Usual => format!("{NEXT} jobs on deck, {RUNNING} run, the rest waits"),
            QueueShape::AllOnDeck => format!("all on deck, {RUNNING} run"),
        }
    }

    fn next(self) -> u32 {
        if self == QueueShape::Usual { NEXT } else { PENDING }
    }
}

/// A daemon with its directory; both go when this is dropped.
struct Daemon {
    dir: PathBuf,
    process: Option<Child>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It is not asked: nothing of it is kept.
            let _ = process.kill();
            let _ = process.wait();
        }
        if let Err(error) = scratch::remove(&self.dir) {
            eprintln!("{error:#}");
        }
    }
}

impl Daemon {
    fn start(ondeck: &Path, queue: QueueShape) -> Result<Daemon> {
        // In the machine's temporary directory, where the journal is as on a real disk.
        let dir = std::env::temp_dir().join(format!("ondeck-bench-serve.{}", std::process::id()));
        scratch::remove(&dir)?;
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut daemon = Daemon { dir, process: None };
        let dir = &daemon.dir;
        let ondeck_here = dir.join("ondeck");
        fs::copy(ondeck, &ondeck_here)?;
        write_stand_in(dir, queue)?;
        let nodes: Vec<String> = (1..=NODES).map(|n| format!("\"r{n}\"")).collect();
        let config = format!(
            "[scheduler]\nsocket = {:?}\nstate = {:?}\nsimulate = \"10ms\"\nsharing = \"any\"\n\
             [scheduler.pool.default]\nnodes = [{}]\n[slurm]\nbin_dir = {:?}\n",
            dir.join("socket"),
            dir.join("state"),
            nodes.join(", "),
            dir.join("bin"),
        );
        fs::write(dir.join("ondeck.toml"), config)?;
        let log = fs::File::create(dir.join("log"))?;
        let mut command = Command::new(&ondeck_here);
        command.arg("serve").arg("--config").arg(dir.join("ondeck.toml"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        daemon.process = Some(command.spawn().context("cannot start ondeck serve")?);
        Ok(daemon)
    }

    fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map(Pid::from_child)
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// What `GET /v1/metrics` says, by name (with labels).
    fn figures(&self) -> Option<BTreeMap<String, f64>> {
        let mut stream = UnixStream::connect(self.dir.join("socket")).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        stream.write_all(b"GET /v1/metrics HTTP/1.1\r\nHost: ondeck\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (_, body) = text.split_once("\r\n\r\n")?;
        let lines = body.lines().filter(|line| !line.starts_with('#'));
        Some(
            lines
                .filter_map(|line| {
                    line.rsplit_once(' ')
                        .map(|(name, value)| (name.to_owned(), value.parse().unwrap_or(f64::NAN)))
                })
                .collect(),
        )
    }

    /// Waits until it has seen all jobs and given nodes to those that get some; tells how long that took.
    fn settle(&self, queue: QueueShape) -> Result<f64> {
        let began = Instant::now();
        let busy = ["ASSIGNED", "BOOTING", "BOOTED", "STAGING_IN", "MOUNTING"];
        let known = f64::from(queue.next() + RUNNING);
        loop {
            interrupt::check()?;
            if let Some(pid) = self.pid()
                && !Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
            {
                bail!("ondeck serve ended: {}", self.log());
            }
            if let Some(figures) = self.figures() {
                let of = |state: &str| {
                    figures.get(&format!("ondeck_jobs{{state=\"{state}\"}}")).copied().unwrap_or(0.0)
                };
                let all: f64 =
                    figures.iter().filter(|(name, _)| name.starts_with("ondeck_jobs{")).map(|(_, n)| n).sum();
                if all >= known && busy.iter().all(|state| of(state) == 0.0) {
                    return Ok(began.elapsed().as_secs_f64());
                }
            }
            ensure!(began.elapsed() < PATIENCE, "ondeck serve has not seen all jobs: {}", self.log());
            std::thread::sleep(GLANCE);
        }
    }

    /// Processor seconds so far: its own, and those of commands that it ran.
    fn cpu(&self) -> Result<(f64, f64)> {
        let pid = self.pid().context("it runs")?.as_raw_nonzero();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("ondeck serve has ended")?;
        let fields: Vec<f64> = stat
            .rsplit_once(") ")
            .map(|(_, rest)| rest.split(' ').map(|field| field.parse().unwrap_or(0.0)).collect())
            .unwrap_or_default();
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let sum = |from: usize| fields.iter().skip(from).take(2).sum::<f64>() / ticks;
        // utime is the 14th field of proc(5), the 12th of these.
        Ok((sum(11), sum(13)))
    }

    fn memory(&self, field: &str) -> u64 {
        let pid = self.pid().map_or(0, |pid| pid.as_raw_nonzero().get());
        machine::process_memory(pid, field)
    }
}

/// `squeue` and `scontrol` as scripts, and what they print.
fn write_stand_in(dir: &Path, queue: QueueShape) -> Result<()> {
    let mut lines = String::new();
    for number in 1..=RUNNING + PENDING {
        let pending = number.checked_sub(RUNNING + 1);
        let user = number % 200;
        // As recorded from Slurm 22.05.8; `|` becomes the separator that the daemon asks for.
        let (state, reason, nodes, scheduled, start, end, used) = match pending {
            None => (
                "RUNNING",
                "None",
                format!("c{number}"),
                "(null)".into(),
                "1795320391",
                "1826856394",
                "1:00:07",
            ),
            Some(n) if n < queue.next() => (
                "PENDING",
                "Resources",
                String::new(),
                format!("c{number}"),
                "1826856394",
                "1826856574",
                "0:00",
            ),
            Some(_) => ("PENDING", "Priority", String::new(), "(null)".into(), "N/A", "N/A", "0:00"),
        };
        let count = if pending.is_some() { 4 } else { 1 };
        writeln!(
            lines,
            "{number}|N/A|0|{}|100|{state}|{reason}|{count}|{nodes}|{scheduled}|{start}|{end}|{used}|{}|{}|(null)|(null)|{number}|(null)|N/A|(null)|(null)|N/A|account{}|run|",
            1000 + user,
            1_795_310_000 + number,
            4_294_900_000 - number,
            user % 20,
        )?;
    }
    fs::write(dir.join("queue"), lines)?;
    let bin = dir.join("bin");
    fs::create_dir(&bin)?;
    let dir = dir.display();
    let squeue = format!(
        "#!/bin/sh\n# SQUEUE_FORMAT2=NAME:SEPARATOR,... squeue --noheader --all --states=all [-j ID]\njob=\n\
         while [ $# -gt 1 ]; do [ \"$1\" = -j ] && job=$2; shift; done\n\
         separator=${{SQUEUE_FORMAT2%%,*}}; separator=${{separator#*:}}\n\
         if [ -n \"$job\" ]; then echo \"$job|PENDING|0|/gpfs/run-$job|/gpfs/run-$job/log|(null)|(null)|/gpfs/run-$job/log|1|run|\"; else cat {dir}/queue; fi |\n\
         exec sed \"s/|/$separator/g\"\n"
    );
    let scontrol = "#!/bin/sh\n# scontrol write batch_script ID - | show config\n\
         [ \"$1\" = write ] || { echo 'ClusterName = bench'; exit 0; }\n\
         printf '#!/bin/sh\\n#RSA_DATA_OUT=/gpfs/run-%s/out\\nsrun program\\n' \"$3\"\n";
    for (name, script) in [("squeue", squeue.as_str()), ("scontrol", scontrol)] {
        let path = bin.join(name);
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

pub fn measure(options: &Options, part: &mut Part) -> Result<()> {
    let programs = Programs::find()?;
    let ondeck =
        programs.ondeck().context("ondeck is not built; run cargo build --release, or set ONDECK")?;
    let watched = Duration::from_secs(if options.quick { 4 } else { 30 });
    let queues: &[QueueShape] =
        if options.quick { &[QueueShape::Usual] } else { &[QueueShape::Usual, QueueShape::AllOnDeck] };
    paragraph(
        &mut part.text,
        &format!(
            "**The daemon**: `ondeck serve` with `simulate`, so that its RAM disks are pretended, and with {NODES} RSA \
             nodes. **The queue is a stand-in**: a script in `[slurm] bin_dir` prints {} lines as Slurm 22.05.8's squeue \
             does, every second (`[slurm] interval`), so the time of a look has the script's own in it, and none of a \
             slurmctld's. Processor shares are of one core, over {} s in which nothing changes.",
            PENDING + RUNNING,
            watched.as_secs()
        ),
    );
    let mut table = Table::new(&[
        "of the goal",
        "queue",
        "resident",
        "peak",
        "a look, median s",
        "min",
        "max",
        "squeue alone s",
        "CPU of the daemon",
        "CPU of squeue",
        "all seen after s",
    ]);
    let mut missing = Vec::new();
    for &queue in queues {
        eprintln!("the daemon: {}", queue.title());
        let daemon = Daemon::start(ondeck, queue)?;
        let seen = match daemon.settle(queue) {
            Ok(seen) => seen,
            Err(error) => {
                interrupt::check()?;
                missing.push(format!("Not measured: {}: {error:#}.", queue.title()));
                continue;
            }
        };
        // What the start had to do is over by then.
        std::thread::sleep(2 * GLANCE);
        let (began, before) = (Instant::now(), daemon.cpu()?);
        let mut looks = Samples::default();
        while began.elapsed() < watched {
            interrupt::check()?;
            std::thread::sleep(GLANCE);
            let figures = daemon.figures().context("ondeck serve does not answer")?;
            ensure!(figures.get("ondeck_queue_up") == Some(&1.0), "the queue is not seen: {}", daemon.log());
            looks.add(figures.get("ondeck_queue_seconds").copied().unwrap_or(f64::NAN));
        }
        let (after, seconds) = (daemon.cpu()?, began.elapsed().as_secs_f64());
        let (own, of_squeue) = ((after.0 - before.0) / seconds, (after.1 - before.1) / seconds);
        let (resident, peak) = (daemon.memory("VmRSS"), daemon.memory("VmHWM"));
        let alone = squeue_alone(&daemon.dir)?;
        part.goal(
            &format!("less than {} of memory", show(MEMORY)),
            &format!("the daemon: {}", queue.title()),
            format!("{}, at most {}", show(resident), show(peak)),
            peak < MEMORY,
        );
        let [median, min, max] = looks.cells(3);
        table.add([
            format!("{:.2}", peak as f64 / MEMORY as f64),
            queue.title(),
            show(resident),
            show(peak),
            median,
            min,
            max,
            format!("{alone:.3}"),
            format!("{:.1} %", own * 100.0),
            format!("{:.1} %", of_squeue * 100.0),
            format!("{seen:.1}"),
        ]);
        if let Some(pid) = daemon.pid() {
            // As an administrator would: it must end by itself.
            kill_process(pid, Signal::TERM).context("cannot end ondeck serve")?;
        }
    }
    table.write(&mut part.text);
    if !missing.is_empty() {
        paragraph(&mut part.text, &missing.join(" "));
    }
    Ok(())
}

/// How long the stand-in takes by itself, in the median.
fn squeue_alone(dir: &Path) -> Result<f64> {
    let mut samples = Samples::default();
    for _ in 0..10 {
        let began = Instant::now();
        let ran = Command::new(dir.join("bin/squeue"))
            .env("SQUEUE_FORMAT2", "JobID:\u{1f}abcdef,State:\u{1f}abcdef")
            .output()?;
        ensure!(ran.status.success() && !ran.stdout.is_empty(), "the stand-in for squeue fails");
        samples.add(began.elapsed().as_secs_f64());
    }
    Ok(samples.median())
}
