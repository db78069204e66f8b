//! How large the copy engine's buffer should be.
//!
//! The engine itself is run, in this process, with one size of buffer after the other: on memory as the machine has it
//! and on memory in small pieces, without and with checksums. The size of a write decides how large a block of memory a
//! tmpfs asks the kernel for, and a block that is not free is waited for.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ondeck_bench::size::{KIB, MIB, show};
use ondeck_transfer::{Checksum, Monitor, Progress};

use crate::copies::median;
use crate::data::{ONE_FILE, Shape};
use crate::fragments::{self, Fragments};
use crate::page::{Table, heading, paragraph};
use crate::scratch::{Scratch, remove};
use crate::{interrupt, machine};

const SIZES: [u64; 6] = [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB];
const CHECKSUMS: [(Checksum, &str); 2] = [(Checksum::None, "no checksum"), (Checksum::Xxh3, "xxh3")];

#[derive(Args)]
pub struct Options {
    /// Directory on the disk that is measured
    #[arg(long, default_value = "/var/tmp")]
    disk: PathBuf,
    /// Rounds that count, after one that does not
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// MiB of each copy: as files of 1 MiB, and as one file
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=4096))]
    size: u64,
    /// Only this way (may be repeated)
    #[arg(long = "way", value_name = "WAY")]
    ways: Vec<Way>,
    /// Also write the page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// RAM to RAM
    Ram,
    /// Disk to RAM
    In,
    /// RAM to disk
    Out,
}

impl Way {
    fn title(self) -> &'static str {
        match self {
            Self::Ram => "tmpfs to tmpfs",
            Self::In => "disk to tmpfs",
            Self::Out => "tmpfs to disk",
        }
    }
}

/// The runs of one size of buffer, one checksum and one state of memory.
#[derive(Clone, Debug, Default)]
struct Runs {
    seconds: Vec<f64>,
    cpu: Vec<f64>,
    stalls: Vec<f64>,
}

impl Runs {
    /// Median and slowest in milliseconds, the median of the processors' time, and how often a run stalled in the median.
    fn shown(mut self, with_stalls: bool) -> String {
        self.seconds.sort_by(f64::total_cmp);
        self.cpu.sort_by(f64::total_cmp);
        self.stalls.sort_by(f64::total_cmp);
        let slowest = self.seconds.last().copied().unwrap_or(f64::NAN);
        let middle = median(&self.seconds);
        let mark = if slowest > 2.0 * middle { "!" } else { "" };
        let mut text =
            format!("{:.0} to {:.0}{mark}, {:.0}", middle * 1e3, slowest * 1e3, median(&self.cpu) * 1e3);
        if with_stalls {
            let _ = write!(text, ", {:.0}", median(&self.stalls));
        }
        text
    }
}

pub fn run(options: &Options) -> Result<()> {
    interrupt::install()?;
    let ways = if options.ways.is_empty() { Way::value_variants() } else { &options.ways };
    let shapes = [Shape::Flat(options.size, MIB), Shape::OneFile(options.size * MIB)];
    let scratch = Scratch::new(&options.disk, false, options.size * 2 * MIB)?;
    let mut page = String::new();
    heading(&mut page, "The copy engine's buffer");
    paragraph(
        &mut page,
        &format!(
            "Milliseconds: the median and the slowest of {} runs in turn (`!` where the slowest took more than twice \
             the median), then the median of the processors' time, which others on the machine disturb less. *In pieces* is \
             memory that was broken up before each round, so that few free blocks are large, with the waits for direct \
             compaction (compact_stall of /proc/vmstat, of the whole machine) in the median run as the last number. The \
             engine alone, without process, manifest and sync.",
            options.rounds
        ),
    );
    let facts: Vec<String> =
        machine::facts(&scratch.disk_label, &scratch.ram_label).into_iter().map(|f| f.1).collect();
    paragraph(&mut page, &facts.join("; "));
    for way in ways {
        for shape in shapes {
            let mut part = String::new();
            compare(&scratch, *way, shape, options.rounds.into(), &mut part)?;
            eprint!("{part}");
            page += &part;
        }
    }
    print!("{page}");
    if let Some(file) = &options.markdown {
        fs::write(file, &page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn compare(scratch: &Scratch, way: Way, shape: Shape, rounds: usize, page: &mut String) -> Result<()> {
    let (from, to) = match way {
        Way::Ram => (&scratch.ram, &scratch.ram),
        Way::In => (&scratch.disk, &scratch.ram),
        Way::Out => (&scratch.ram, &scratch.disk),
    };
    let (source, target) = (from.join("source"), to.join("target"));
    shape.create(&source)?;
    let title = format!("{}, {}", shape.title(), way.title());
    // Memory state, then buffer, then checksum.
    let mut all = vec![vec![vec![Runs::default(); CHECKSUMS.len()]; SIZES.len()]; 2];
    for (in_pieces, all) in all.iter_mut().enumerate() {
        let mut fragments = (in_pieces == 1).then(|| Fragments::new(&scratch.ram)).transpose()?;
        for round in 0..=rounds {
            if let Some(fragments) = &mut fragments {
                remove(&target)?;
                fragments.renew()?;
            }
            for position in 0..SIZES.len() {
                let which = (position + round) % SIZES.len();
                for (checksum, runs) in CHECKSUMS.iter().zip(&mut all[which]) {
                    remove(&target)?;
                    if way == Way::Out {
                        scratch.settle()?;
                    }
                    let before = fragments::stalls();
                    let cpu = cpu_seconds();
                    let seconds = copy(&source, &target, shape, SIZES[which], checksum.0)?;
                    // The first warms up.
                    if round > 0 {
                        runs.seconds.push(seconds);
                        runs.cpu.push(cpu_seconds() - cpu);
                        runs.stalls.push((fragments::stalls() - before) as f64);
                    }
                }
            }
        }
        remove(&scratch.ram.join("fragments"))?;
        eprintln!("{title}: {} done", ["as it is", "in pieces"][in_pieces]);
    }
    remove(&source)?;
    remove(&target)?;

    heading(page, &title);
    let mut columns = vec!["buffer".to_owned()];
    for state in ["", ", in pieces"] {
        columns.extend(CHECKSUMS.map(|(_, name)| format!("{name}{state}")));
    }
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut table = Table::new(&columns);
    for (which, size) in SIZES.into_iter().enumerate() {
        let mut cells = vec![show(size)];
        for (in_pieces, all) in all.iter().enumerate() {
            cells.extend(all[which].iter().map(|runs| runs.clone().shown(in_pieces == 1)));
        }
        table.add(cells);
    }
    table.write(page);
    Ok(())
}

/// One copy by the engine, and its seconds.
fn copy(source: &Path, target: &Path, shape: Shape, buffer: u64, checksum: Checksum) -> Result<f64> {
    interrupt::check()?;
    let options = ondeck_transfer::Options {
        checksum,
        buffer: usize::try_from(buffer)?,
        sync: false,
        ..ondeck_transfer::Options::default()
    };
    let (source, target) = match shape {
        Shape::OneFile(_) => {
            fs::create_dir(target)?;
            (source.join(ONE_FILE), target.join(ONE_FILE))
        }
        _ => (source.to_owned(), target.to_owned()),
    };
    let progress = Progress::new();
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    let summary = ondeck_transfer::stage(&source, &target, &options, &monitor)?;
    if summary.errors > 0 {
        bail!("{} entries could not be copied", summary.errors);
    }
    Ok(summary.copying.as_secs_f64())
}

/// What this process has used of the processors, in seconds.
fn cpu_seconds() -> f64 {
    // SAFETY: all zeroes is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
