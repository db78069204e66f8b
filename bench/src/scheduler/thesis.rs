//! `ondeck-bench thesis`: tables 5.1 to 5.4 of the thesis, in our form. The same program writes the
//! same output straight to a slow disk, to a RAM disk by itself, and as a job with `#RSA_DATA_OUT`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ondeck_bench::size::{GIB, KIB, MIB, show};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::scheduler::cluster::{Cluster, Integration, NODES, Setup, wait};
use crate::scheduler::writer::Took;
use crate::scheduler::{Options, Part, word};
use crate::slow_disk::{RATE, SlowDisk};
use crate::{interrupt, machine, scratch};

/// The output's time in a job beside that on the bare RAM disk.
const OF_BARE: f64 = 1.1;
/// The stage-out's time beside what the disk needs for the bytes.
const OF_LIMIT: f64 = 1.1;
/// Processes of a job on all nodes.
const PROCESSES: usize = 8;
const FILES: u64 = 2048;

/// What the job writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// Table 5.1.
    OneProcess,
    /// Tables 5.2 and 5.4.
    FilePerProcess,
    /// Table 5.3.
    SharedFile,
}

impl Pattern {
    const ALL: [Pattern; 3] = [Pattern::OneProcess, Pattern::FilePerProcess, Pattern::SharedFile];

    fn processes(self) -> usize {
        if self == Pattern::OneProcess { 1 } else { PROCESSES }
    }

    fn nodes(self) -> usize {
        if self == Pattern::OneProcess { 1 } else { NODES }
    }

    fn engine(self) -> &'static str {
        if self == Pattern::SharedFile { "ceph" } else { "gluster" }
    }

    fn lenders(self) -> usize {
        match self {
            Pattern::OneProcess => 1,
            Pattern::FilePerProcess => 4,
            Pattern::SharedFile => 2,
        }
    }

    fn title(self, bytes: u64, files: u64) -> String {
        match self {
            Pattern::OneProcess => format!("one process writes one file of {}", show(bytes)),
            Pattern::FilePerProcess => format!(
                "{PROCESSES} processes on {NODES} nodes write {files} files of {}",
                show(bytes / files)
            ),
            Pattern::SharedFile => {
                format!("{PROCESSES} processes on {NODES} nodes write one file of {} together", show(bytes))
            }
        }
    }

    /// The thesis's table and what stands in it.
    fn thesis(self) -> [&'static str; 2] {
        match self {
            Pattern::OneProcess => ["5.1 (2 GB)", "no RSA 46.88 s; with RSA output 41.30 s, stage-out 52 s"],
            Pattern::FilePerProcess => [
                "5.2 (2048 processes on 1024 nodes, a file each)",
                "no RSA 1109.86 s; with RSA output 35.87 s, stage-out 224 s (rsync), 179 s (tar)",
            ],
            Pattern::SharedFile => {
                ["5.3 (2048 processes on 1024 nodes, MPI-IO)", "no RSA 49.93 s; with RSA not possible there"]
            }
        }
    }
}

/// Where the output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Straight to the slow disk.
    Direct,
    /// To a RAM disk of the same engine and nodes that `ondeck ramdisk create` made and mounted.
    Bare,
    /// To the job's RAM disk; staged out as files, or packed.
    Rsa { pack: bool },
}

impl Way {
    const ALL: [Way; 4] = [Way::Direct, Way::Bare, Way::Rsa { pack: false }, Way::Rsa { pack: true }];

    fn title(self) -> &'static str {
        match self {
            Way::Direct => "no RSA: straight to the disk",
            Way::Bare => "bare RAM disk",
            Way::Rsa { pack: false } => "RSA, default stage-out",
            Way::Rsa { pack: true } => "RSA, `#RSA_PACK=tar`",
        }
    }
}

/// What one way took, in all rounds.
#[derive(Default)]
struct Times {
    output: Samples,
    open: Samples,
    write: Samples,
    close: Samples,
    read: Samples,
    read_open: Samples,
    stage_out: Samples,
}

struct Bench<'a> {
    cluster: &'a Cluster,
    disk: &'a SlowDisk,
    /// The user's, on the slow disk.
    home: PathBuf,
    bytes: u64,
    /// Of the pattern with many.
    files: u64,
    /// Seconds from the start of a step until its processes begin: until then they are all there.
    gather: u64,
}

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the cluster is a testbed of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let began = Instant::now();
    let bytes = if options.quick { 64 * MIB } else { 512 * MIB };
    let disk = SlowDisk::new(Path::new("/var/tmp"), 4 * GIB)?;
    // After the disk, which its hosts shall see, and before it at the end.
    let cluster = Cluster::new(&Setup {
        lends: "6GiB",
        disk: Some(&disk.path),
        scheduler: "debounce = \"200ms\"\n[scheduler.limits]\nprolog = \"30s\"\nepilog = \"30s\"",
        integration: Integration::Outside,
        slurm: "",
    })?;
    let home = disk.path.join("alice");
    fs::create_dir(&home)?;
    own(&home, &cluster)?;
    let (files, gather) = if options.quick { (FILES / 4, 1) } else { (FILES, 2) };
    let bench = Bench { cluster: &cluster, disk: &disk, home, bytes, files, gather };
    let mut part = Part::new("thesis", "The thesis's tables 5.1 to 5.4, in our form");
    part.introduction = format!(
        "One program writes {} in all, as a real Slurm job of an ordinary user; each process tells when it began and \
         ended and how long opening, writing and closing took it. The disk: {}. The cluster of {NODES} compute nodes and \
         {NODES} RSA nodes is made of namespaces of one machine, so its RAM disks and its network are that machine's \
         memory; the disk has no clients that wait for each other's locks, which made the thesis's 1109 s. A job with RSA was on deck, and its RAM disk READY, before it started. The thesis's figures are of other \
         machines and sizes: compare ratios.",
        show(bytes),
        disk.label()
    );
    // A quick run has no time for a round that does not count.
    let (first, rounds) = if options.quick { (1, options.rounds(1, 1)) } else { (0, options.rounds(1, 3)) };
    paragraph(
        &mut part.text,
        &format!(
            "{rounds} rounds{}, the ways in rotated order; medians. *Output* lasts from the first process that begins to \
             the last that ends; *open*, *write*, *close* are sums of the slowest process. *Stage-out* is the job's time in \
             STAGING_OUT, after its compute nodes were free, and the disk's limit is the bytes at {} MB/s. *Bare* is the same \
             job without RSA on a RAM disk of the same engine and nodes by `ondeck ramdisk create`.",
            if first == 0 { " after one that is dropped" } else { "" },
            RATE / 1_000_000,
        ),
    );
    for pattern in Pattern::ALL {
        let measured = bench.measure(pattern, options, first, rounds);
        match measured {
            Ok(times) => bench.report(pattern, &times, &mut part),
            Err(error) => {
                // One table that fails is no reason to lose the others.
                interrupt::check()?;
                eprintln!("{pattern:?}: {error:#}");
                let title = bench.title(pattern);
                paragraph(&mut part.text, &format!("**Not measured**: {title}: {error:#}."));
            }
        }
    }
    part.text = crate::without_paths(part.text.clone(), cluster.dir());
    drop(bench);
    drop(cluster);
    drop(disk);
    eprintln!("took {:.0} s", began.elapsed().as_secs_f64());
    part.publish(options)
}

fn own(path: &Path, cluster: &Cluster) -> Result<()> {
    let user = cluster.user();
    chown(path, Some(user.uid), Some(user.gid))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

impl Bench<'_> {
    fn files(&self, pattern: Pattern) -> u64 {
        if pattern == Pattern::FilePerProcess { self.files } else { 1 }
    }

    fn title(&self, pattern: Pattern) -> String {
        pattern.title(self.bytes, self.files)
    }

    fn measure(
        &self,
        pattern: Pattern,
        options: &Options,
        first: usize,
        rounds: usize,
    ) -> Result<Vec<(Way, Times)>> {
        let mut ways = Way::ALL.to_vec();
        if options.quick && pattern != Pattern::FilePerProcess {
            ways.retain(|way| *way != Way::Rsa { pack: true });
        }
        let mut times: Vec<(Way, Times)> = ways.into_iter().map(|way| (way, Times::default())).collect();
        for round in first..=rounds {
            for turn in 0..times.len() {
                let (way, of_way) = {
                    let at = (turn + round) % times.len();
                    &mut times[at]
                };
                eprintln!("{}: {}, round {round} of {rounds}", self.title(pattern), way.title());
                let (wrote, read, stage_out) = self.once(pattern, *way, round)?;
                if round == 0 {
                    continue;
                }
                of_way.output.add(wrote.seconds);
                of_way.open.add(wrote.open);
                of_way.write.add(wrote.transfer);
                of_way.close.add(wrote.close);
                of_way.read.add(read.seconds);
                of_way.read_open.add(read.open);
                if let Some(seconds) = stage_out {
                    of_way.stage_out.add(seconds);
                }
            }
        }
        Ok(times)
    }

    /// One job; what its processes took to write and to read, and the stage-out.
    fn once(&self, pattern: Pattern, way: Way, round: usize) -> Result<(Took, Took, Option<f64>)> {
        let cluster = self.cluster;
        let name = format!("{pattern:?}-{round}");
        // Nothing of the job before may be left for the disk to write.
        scratch::sync_filesystem(&self.disk.path)?;
        let record = cluster.user().home.join("record");
        scratch::remove(&record)?;
        fs::create_dir(&record)?;
        own(&record, cluster)?;
        let done = match way {
            Way::Direct => {
                let directory = self.directory(&name)?;
                let job = self.submit(pattern, &directory, &record, "")?;
                cluster.wait_completed(job)?;
                self.check(&directory, pattern, false)?;
                None
            }
            Way::Bare => {
                let bare = BareDisk::new(cluster, pattern, self.bytes)?;
                let job = self.submit(pattern, &bare.directory, &record, "")?;
                let ended = cluster.wait_completed(job);
                bare.destroy()?;
                ended?;
                None
            }
            Way::Rsa { pack } => {
                let directory = self.directory(&name)?;
                let mut lines = format!(
                    "#RSA_DATA_OUT={}\n#RSA_NODES={}\n#RSA_ENGINE={}\n",
                    word(&directory),
                    pattern.lenders(),
                    pattern.engine()
                );
                if pack {
                    lines += "#RSA_PACK=tar\n";
                }
                let blocker = cluster.block()?;
                let job = self.submit(pattern, &directory, &record, &lines)?;
                cluster.wait_ready(job)?;
                cluster.cancel(blocker)?;
                cluster.wait_completed(job)?;
                cluster.wait_idle()?;
                let story = cluster.story(job)?;
                ensure!(story.was("INUSE_OUT"), "job {job} did not get its RAM disk: {}", story.message());
                self.check(&directory, pattern, pack)?;
                Some(story.seconds("STAGING_OUT"))
            }
        };
        let took = |step| Took::read(&record, step, pattern.processes());
        let took = (took("write")?, took("read")?, done);
        scratch::remove(&self.home.join(&name))?;
        Ok(took)
    }

    /// A new directory of the user's on the slow disk.
    fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.home.join(name);
        scratch::remove(&path)?;
        fs::create_dir(&path)?;
        own(&path, self.cluster)?;
        Ok(path)
    }

    /// Submits the job that writes and reads.
    fn submit(&self, pattern: Pattern, directory: &Path, record: &Path, lines: &str) -> Result<u32> {
        let (nodes, tasks) = (pattern.nodes(), pattern.processes());
        let step = |action: &str| {
            format!(
                "srun --ntasks={tasks} {own} writer {action} --directory {directory} --bytes {bytes} --files {files} \
                 --record {record} --start $(($(date +%s) + {gather})) || exit 1\n",
                own = word(&self.cluster.own),
                directory = word(directory),
                bytes = self.bytes,
                files = self.files(pattern),
                record = word(record),
                gather = self.gather,
            )
        };
        let script = format!("#!/bin/sh\n{lines}{}{}", step("write"), step("read"));
        let (nodes, tasks) = (format!("--nodes={nodes}"), format!("--ntasks={tasks}"));
        let log = format!("--output={}", word(&self.cluster.user().home.join("job.out")));
        self.cluster.submit(&script, &[&nodes, &tasks, "--exclusive", "--chdir=/", &log])
    }

    /// All of the output is on the disk.
    fn check(&self, directory: &Path, pattern: Pattern, packed: bool) -> Result<()> {
        let (mut files, mut bytes) = (0, 0);
        for entry in fs::read_dir(directory)? {
            let metadata = entry?.metadata()?;
            if metadata.is_file() {
                (files, bytes) = (files + 1, bytes + metadata.len());
            }
        }
        let whole = if packed {
            files >= 1 && bytes >= self.bytes
        } else {
            files == self.files(pattern) && bytes == self.bytes
        };
        ensure!(whole, "the output is not whole: {files} files of {} in all", show(bytes));
        Ok(())
    }

    fn report(&self, pattern: Pattern, times: &[(Way, Times)], part: &mut Part) {
        let of = |wanted: Way| times.iter().find(|(way, _)| *way == wanted).map(|(_, times)| times);
        let bare = of(Way::Bare).map_or(f64::NAN, |times| times.output.median());
        let direct = of(Way::Direct).map_or(f64::NAN, |times| times.output.median());
        let limit = self.bytes as f64 / RATE as f64;
        let [table_name, thesis] = pattern.thesis();
        paragraph(
            &mut part.text,
            &format!(
                "**{}**, {} on {} RSA nodes. The disk's limit is {limit:.2} s. Thesis, table {table_name}: {thesis}.",
                self.title(pattern),
                pattern.engine(),
                pattern.lenders()
            ),
        );
        let mut table = Table::new(&[
            "output: direct / it",
            "it / bare",
            "stage-out / limit",
            "way",
            "output s",
            "min",
            "max",
            "open s",
            "write s",
            "close s",
            "stage-out s",
            "min",
            "max",
        ]);
        for (way, times) in times {
            let output = times.output.median();
            let mut row = vec![
                number(direct / output, 2),
                number(output / bare, 2),
                number(times.stage_out.median() / limit, 2),
                way.title().to_owned(),
            ];
            row.extend(times.output.cells(2));
            row.extend([&times.open, &times.write, &times.close].map(|samples| number(samples.median(), 2)));
            row.extend(times.stage_out.cells(2));
            table.add(row);
            if let Way::Rsa { .. } = way {
                let case = format!("{}, {}", self.title(pattern), way.title());
                let ratio = output / bare;
                part.goal(
                    &format!("output at most {OF_BARE} times that of the bare RAM disk"),
                    &case,
                    format!("{ratio:.2}"),
                    ratio <= OF_BARE,
                );
                let ratio = times.stage_out.median() / limit;
                part.goal(
                    &format!("stage-out at most {OF_LIMIT} times the disk's limit"),
                    &case,
                    format!("{ratio:.2}"),
                    ratio <= OF_LIMIT,
                );
            }
        }
        table.write(&mut part.text);
        if pattern == Pattern::FilePerProcess {
            self.report_ior(times, part);
        }
    }

    /// Table 5.4: the same runs, with the output read back past the page cache.
    fn report_ior(&self, times: &[(Way, Times)], part: &mut Part) {
        paragraph(
            &mut part.text,
            "**Written and read back** (the thesis's IOR run, table 5.4), from the same jobs; reading goes past the \
             client's page cache. MB are 10^6 bytes. The thesis has, for RSA and for GPFS: write 204.16 s and 573.28 s, \
             opening 0.43 s and 83.27 s, read 187.48 s and 289.12 s, 100.31 and 36.18 MB/s written, 109.24 and 70.89 MB/s \
             read.",
        );
        let mut table = Table::new(&[
            "way",
            "write s",
            "open delay s",
            "read s",
            "open to read s",
            "write MB/s",
            "read MB/s",
        ]);
        for (way, times) in times {
            let rate = |seconds: f64| number(self.bytes as f64 / seconds / 1e6, 0);
            let (wrote, read) = (times.output.median(), times.read.median());
            table.add([
                way.title().to_owned(),
                number(wrote, 2),
                number(times.open.median(), 2),
                number(read, 2),
                number(times.read_open.median(), 2),
                rate(wrote),
                rate(read),
            ]);
        }
        table.write(&mut part.text);
    }
}

/// A RAM disk by hand, mounted on all nodes of a job.
struct BareDisk<'a> {
    cluster: &'a Cluster,
    servers: String,
    directory: PathBuf,
}

impl<'a> BareDisk<'a> {
    fn new(cluster: &'a Cluster, pattern: Pattern, bytes: u64) -> Result<BareDisk<'a>> {
        let servers = (1..=pattern.lenders()).map(|n| format!("r{n}")).collect::<Vec<_>>().join(",");
        let clients = (1..=NODES).map(|n| format!("c{n}")).collect::<Vec<_>>().join(",");
        let mount = cluster.dir().join("bare");
        fs::create_dir_all(&mount)?;
        // As one of the user's own would have: twice the data, and room for many files.
        let size = format!("{}MiB", (bytes * 2 + FILES * 16 * KIB).max(512 * MIB) / MIB);
        let shown = format!("{clients}:{}", word(&mount));
        let user = cluster.user();
        let owner = format!("{}:{}", user.uid, user.gid);
        let arguments = [
            "ramdisk",
            "create",
            "bare",
            "--nodes",
            &servers,
            "--engine",
            pattern.engine(),
            "--size",
            &size,
            "--mount",
            &shown,
            "--user",
            &owner,
        ];
        cluster.ondeck(&arguments)?;
        let bare = BareDisk { cluster, servers, directory: mount.join("output") };
        let made = cluster.host("c1").log_in(user).run(&["mkdir", &word(&bare.directory)]);
        if !made.success() {
            let why = made.stderr.trim().to_owned();
            bare.destroy()?;
            bail!("the user can't write to the bare RAM disk: {why}");
        }
        // Seen by the others, too, before the job begins.
        wait("all nodes show the bare RAM disk", || {
            let shown = (1..=NODES).all(|n| {
                let path = bare.directory.clone();
                cluster.host(&format!("c{n}")).path_from_outside(path).is_dir()
            });
            Ok(shown.then_some(()))
        })?;
        Ok(bare)
    }

    fn destroy(self) -> Result<()> {
        self.cluster
            .ondeck(&["ramdisk", "destroy", "bare", "--nodes", &self.servers])
            .map(drop)
            .context("the bare RAM disk stays")
    }
}
