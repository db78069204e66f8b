//! What `ondeck cache` costs and saves, beside what else keeps a directory's data in RAM: the page
//! docs/cache-benchmarks.md.
//!
//! What is compared takes turns in rounds of rotated order, of which the first is dropped.
//!
//! # Layout
//!
//! | module | decides |
//! |---|---|
//! | [`subjects`] | what is compared, and how it is mounted |
//! | [`work`] | what programs do in it |
//! | [`disk`] | what reaches the disk behind it |

mod disk;
mod subjects;
mod work;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use ondeck_bench::size::{GIB, MIB, show};

use crate::goals::Judged;
use crate::page::{Table, heading, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::slow_disk::{RATE, SlowDisk};
use crate::tools::Programs;
use crate::{command_line, interrupt, machine, warm};
use disk::{Moved, Stream};
use subjects::{Mounted, Site, Subject};
use work::{Amount, Work};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds that count, after one that does not [default: 3, or 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
    /// Less data and one round: a first look in two minutes
    #[arg(long)]
    quick: bool,
    /// Also write the page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Of the rate of a native tmpfs: what is to be reached, by whom, and for which work.
const OF_TMPFS: [(Subject, Work, f64); 11] = [
    (Subject::Ondeck, Work::Read, 0.95),
    (Subject::Ondeck, Work::Write { writers: 1, kib: 1024 }, 0.3),
    (Subject::Ondeck, Work::Write { writers: 1, kib: 128 }, 0.3),
    (Subject::Ondeck, Work::Write { writers: 4, kib: 128 }, 0.35),
    (Subject::Ondeck, Work::Files, 0.35),
    (Subject::Ondeck, Work::Create, 0.06),
    (Subject::Ondeck, Work::Stat, 0.08),
    (Subject::OndeckPassthrough, Work::Write { writers: 1, kib: 1024 }, 0.95),
    (Subject::OndeckPassthrough, Work::Write { writers: 1, kib: 128 }, 0.95),
    (Subject::OndeckPassthrough, Work::Write { writers: 4, kib: 128 }, 0.95),
    (Subject::OndeckPassthrough, Work::RandomWrite, 0.85),
];
/// A first read, of the rate of the backing directory.
const FIRST_READ: f64 = 0.95;
/// More than fits: of the time of the backing directory, and its rate in each window.
const STREAM_TIME: f64 = 1.1;
const STREAM_WINDOW: f64 = 0.8;

/// One work, done by one subject.
struct Cell {
    work: Work,
    subject: Subject,
    rates: Samples,
}

struct Found {
    cells: Vec<Cell>,
    reads: Vec<(Subject, Samples)>,
    streams: Vec<(Subject, Samples, Samples)>,
    second_read: Moved,
    burst: Moved,
}

/// Runs the command.
///
/// # Errors
/// It is not root's, or something can't be measured.
pub fn run(options: &Options) -> Result<()> {
    interrupt::install()?;
    ensure!(machine::is_root(), "caches are mounted by root");
    let mut programs = Programs::find()?;
    let page = measure(options, &mut programs)?;
    print!("{page}");
    match &options.markdown {
        Some(file) => fs::write(file, &page).with_context(|| format!("cannot write {}", file.display())),
        None => Ok(()),
    }
}

fn measure(options: &Options, programs: &mut Programs) -> Result<String> {
    let rounds = options.rounds.map_or(if options.quick { 1 } else { 3 }, usize::from);
    let disk = SlowDisk::new(Path::new("/var/tmp"), 4 * GIB)?;
    let base = PathBuf::from(format!("/run/ondeck-bench-cache.{}", std::process::id()));
    crate::scratch::make_directory(&base)?;
    let base = Removed(base);
    programs.copy_ondeck_to(&base.0)?;
    let ondeck = programs.ondeck().context("ondeck is not built: cargo build --release, or set ONDECK")?;
    let amount = match options.quick {
        true => Amount { bytes: 64 * MIB, places: 5_000, files: 128, names: 1_000 },
        false => Amount { bytes: 512 * MIB, places: 100_000, files: 2048, names: 10_000 },
    };
    let (capacity, small) = if options.quick { (GIB, 32 * MIB) } else { (6 * GIB, 256 * MIB) };
    let there: Vec<Subject> = Subject::ALL.into_iter().filter(|subject| is_there(*subject)).collect();

    let site = Site { ondeck, base: &base.0, disk: &disk.path, capacity };
    let cells = resident(&site, &there, rounds, &amount)?;
    // What it reads from the disk is read in the same way however it writes.
    let is_behind = |subject: &Subject| !matches!(subject, Subject::Tmpfs | Subject::OndeckPassthrough);
    let behind: Vec<Subject> = there.iter().copied().filter(is_behind).collect();
    let reads = first_reads(&site, &behind, rounds, amount.bytes / 2)?;
    let (second_read, burst) = quiet(&site, amount.bytes / 2)?;
    let site = Site { capacity: small, ..site };
    let streams = streams(&site, rounds)?;
    let found = Found { cells, reads, streams, second_read, burst };
    Ok(render(options, rounds, &there, &amount, &site, &disk, &found))
}

/// A directory that goes with the benchmark.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

fn is_there(subject: Subject) -> bool {
    match subject.lacks() {
        Some(program) => {
            eprintln!("{program} is not installed: its rows are skipped; bench/setup.sh installs it");
            false
        }
        None => true,
    }
}

/// Whether a work is measured: what a disk is slow at is left out.
fn makes_sense(work: Work, subject: Subject) -> bool {
    subject != Subject::PageCache
        || !(work.is_large() || matches!(work, Work::Write { .. } | Work::RandomWrite))
}

fn resident(site: &Site, there: &[Subject], rounds: usize, amount: &Amount) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for round in 0..=rounds {
        for turn in 0..there.len() {
            let subject = there[(turn + round) % there.len()];
            eprintln!("round {round} of {rounds}: {}", subject.name());
            let mounted = Mounted::new(site, subject)?;
            work::prepare(&mounted.dir, amount.bytes)?;
            // It is in RAM, and on the disk where that is another place.
            mounted.flush()?;
            for work in Work::ALL.into_iter().filter(|work| makes_sense(*work, subject)) {
                interrupt::check()?;
                warm::warm(work.takes(amount))?;
                let rate = work.run(&mounted.dir, amount);
                let rate = rate.with_context(|| format!("{}: {}", subject.name(), work.title()))?;
                if round == 0 {
                    cells.push(Cell { work, subject, rates: Samples::default() });
                } else if let Some(cell) =
                    cells.iter_mut().find(|cell| cell.work == work && cell.subject == subject)
                {
                    cell.rates.add(rate);
                }
            }
        }
    }
    Ok(cells)
}

fn first_reads(site: &Site, there: &[Subject], rounds: usize, bytes: u64) -> Result<Vec<(Subject, Samples)>> {
    let mut reads: Vec<(Subject, Samples)> =
        there.iter().map(|subject| (*subject, Samples::default())).collect();
    for round in 0..=rounds {
        for turn in 0..there.len() {
            let (subject, samples) = &mut reads[(turn + round) % there.len()];
            interrupt::check()?;
            eprintln!("first reads, round {round} of {rounds}: {}", subject.name());
            // The file is the disk's before anything is mounted.
            let backing = site.disk.join(subject.directory());
            crate::scratch::make_directory(&backing)?;
            work::prepare(&backing, bytes)?;
            crate::scratch::sync_filesystem(&backing)?;
            let mounted = Mounted::new(site, *subject)?;
            warm::warm(2 * bytes)?;
            let rate = disk::first_read(&mounted, bytes)?;
            if round > 0 {
                samples.add(rate);
            }
        }
    }
    Ok(reads)
}

/// What a second read, and a burst of writes, move on the disk.
fn quiet(site: &Site, bytes: u64) -> Result<(Moved, Moved)> {
    eprintln!("what reaches the disk that should not");
    let mounted = Mounted::new(site, Subject::Ondeck)?;
    work::prepare(&mounted.dir, bytes)?;
    mounted.flush()?;
    mounted.forget()?;
    work::read(&mounted.dir.join(work::INPUT), bytes)?;
    let again = || work::read(&mounted.dir.join(work::INPUT), bytes).map(drop);
    let second_read = disk::moved_by(&mounted.backing, again)?;
    let amount = Amount { bytes, places: 0, files: 64, names: 0 };
    let write = || {
        Work::Write { writers: 4, kib: 128 }.run(&mounted.dir, &amount)?;
        Work::Files.run(&mounted.dir, &amount).map(drop)
    };
    let burst = disk::moved_by(&mounted.backing, write)?;
    Ok((second_read, burst))
}

fn streams(site: &Site, rounds: usize) -> Result<Vec<(Subject, Samples, Samples)>> {
    let there = [Subject::Ondeck, Subject::PageCache];
    let mut found: Vec<_> =
        there.iter().map(|subject| (*subject, Samples::default(), Samples::default())).collect();
    for round in 0..=rounds {
        for turn in 0..there.len() {
            let (subject, seconds, windows) = &mut found[(turn + round) % there.len()];
            interrupt::check()?;
            eprintln!("more than fits, round {round} of {rounds}: {}", subject.name());
            let mounted = Mounted::new(site, *subject)?;
            warm::warm(4 * site.capacity)?;
            let Stream { seconds: took, slowest_window } =
                disk::stream(&mounted, 3 * site.capacity, site.capacity)?;
            if round > 0 {
                seconds.add(took);
                windows.add(slowest_window);
            }
        }
    }
    Ok(found)
}

impl Found {
    fn rate(&self, work: Work, subject: Subject) -> Option<&Samples> {
        self.cells.iter().find(|cell| cell.work == work && cell.subject == subject).map(|cell| &cell.rates)
    }

    fn goals(&self) -> Vec<Judged> {
        let mut goals = Vec::new();
        let mut goal = |goal: String, case: String, figure: String, met: bool| {
            let verdict = if met { "met" } else { "**missed**" };
            goals.push(Judged { goal, case, figure, verdict: verdict.to_owned() });
        };
        for (subject, work, least) in OF_TMPFS {
            let rates = (self.rate(work, subject), self.rate(work, Subject::Tmpfs));
            let (Some(ours), Some(tmpfs)) = rates else { continue };
            let ratio = ours.median() / tmpfs.median();
            let figure = format!("{ratio:.2}, {:.0} {}", ours.median(), work.unit());
            let case = match subject {
                Subject::OndeckPassthrough => format!("{}, `--writes passthrough`", work.title()),
                _ => work.title(),
            };
            goal(format!("at least {least} of a native tmpfs"), case, figure, ratio >= least);
        }
        let read =
            |wanted| self.reads.iter().find(|(subject, _)| *subject == wanted).map(|(_, s)| s.median());
        if let (Some(ours), Some(disk)) = (read(Subject::Ondeck), read(Subject::PageCache)) {
            let ratio = ours / disk;
            goal(
                format!("at least {FIRST_READ} of the backing directory"),
                "a first read".into(),
                format!("{ratio:.2}, {ours:.0} MB/s"),
                ratio >= FIRST_READ,
            );
        }
        if let [(_, ours, windows), (_, disk, _)] = &self.streams[..] {
            let ratio = ours.median() / disk.median();
            goal(
                format!("at most {STREAM_TIME} of the backing directory's time"),
                "three times what fits".into(),
                format!("{ratio:.2}, {:.1} s", ours.median()),
                ratio <= STREAM_TIME,
            );
            let least = windows.min() / (RATE as f64 / 1e6);
            // A short stream has no window.
            if least.is_finite() {
                goal(
                    format!("in each 5 s at least {STREAM_WINDOW} of the disk's rate, once full"),
                    "three times what fits".into(),
                    format!("{least:.2}, {:.0} MB/s", windows.min()),
                    least >= STREAM_WINDOW,
                );
            }
        }
        for (case, moved) in [("a second read", self.second_read), ("a burst of writes", self.burst)] {
            let figure = format!("{} read, {} written", show(moved.read), show(moved.written));
            goal(
                "moves nothing on the disk".into(),
                case.into(),
                figure,
                moved == Moved { read: 0, written: 0 },
            );
        }
        goals
    }
}

fn render(
    options: &Options,
    rounds: usize,
    there: &[Subject],
    amount: &Amount,
    small: &Site,
    slow: &SlowDisk,
    found: &Found,
) -> String {
    let mut page = String::from("# Benchmarks of the cache\n\n");
    paragraph(
        &mut page,
        &format!(
            "`ondeck cache` beside what else keeps a directory's data in RAM, made by `{}`. The disk is {}. What is compared \
             takes turns in {rounds} rounds of rotated order, after one to warm up, which is dropped; figures are medians, and \
             the spread is (largest - smallest) / median. MB are 10^6 bytes.",
            command_line(),
            slow.label()
        ),
    );
    if warm::is_reported() {
        paragraph(
            &mut page,
            "This virtual machine reports to its host what memory is free, and gets it again slowly. So before each work as much memory \
             as it takes was used and freed.",
        );
    }
    if options.quick {
        paragraph(
            &mut page,
            "**Quick set**: less than the goals are stated for. The verdicts are a first look only.",
        );
    }
    heading(&mut page, "Goals");
    let mut table = Table::new(&["goal", "case", "measured", "verdict"]);
    for Judged { goal, case, figure, verdict } in found.goals() {
        table.add([goal, case, figure, verdict]);
    }
    table.write(&mut page);

    heading(&mut page, "In RAM");
    paragraph(
        &mut page,
        &format!(
            "A file of {} is read, and as much is written; {} files of 1 MiB and {} empty ones are made. Nothing has to wait for \
             the disk. tmpfs has no disk: it is what a cache could reach. What a disk of {} MB/s would be measured at is left \
             out of the row of the page cache.",
            show(amount.bytes),
            amount.files,
            amount.names,
            RATE / 1_000_000
        ),
    );
    for work in Work::ALL {
        let mut table = Table::new(&["of tmpfs", &work.title(), work.unit(), "spread"]);
        let tmpfs = found.rate(work, Subject::Tmpfs).map_or(f64::NAN, Samples::median);
        for subject in there {
            let Some(rates) = found.rate(work, *subject) else { continue };
            let median = rates.median();
            table.add([
                number(median / tmpfs, 2),
                subject.name().to_owned(),
                number(median, 0),
                format!("{:.0} %", (rates.max() - rates.min()) / median * 100.0),
            ]);
        }
        table.write(&mut page);
    }

    heading(&mut page, "From the disk, and to it");
    paragraph(&mut page, "A first read of a file that only the disk has:");
    let mut table = Table::new(&["of the disk", "by", "MB/s", "least", "most"]);
    let disk = found.reads.iter().find(|(subject, _)| *subject == Subject::PageCache);
    let disk = disk.map_or(f64::NAN, |(_, samples)| samples.median());
    for (subject, samples) in &found.reads {
        let [median, least, most] = samples.cells(1);
        table.add([number(samples.median() / disk, 2), subject.name().to_owned(), median, least, most]);
    }
    table.write(&mut page);
    paragraph(
        &mut page,
        &format!(
            "A stream of {} into a cache of {}, until all of it is on the disk; the slowest 5 s once the cache was full:",
            show(3 * small.capacity),
            show(small.capacity)
        ),
    );
    let mut table = Table::new(&["of the disk", "by", "s", "least", "most", "slowest 5 s, MB/s"]);
    let disk = found.streams.last().map_or(f64::NAN, |(_, seconds, _)| seconds.median());
    for (subject, seconds, windows) in &found.streams {
        let [median, least, most] = seconds.cells(1);
        let slowest = number(windows.min(), 0);
        table.add([
            number(seconds.median() / disk, 2),
            subject.name().to_owned(),
            median,
            least,
            most,
            slowest,
        ]);
    }
    table.write(&mut page);
    paragraph(&mut page, &format!("Measured on: {}.", machine::summary()));
    page
}
