//! `ondeck-bench layouts`: what it gains that a file lies on two disks, on a real CephFS whose disks are slow: OSDs that are held
//! to a tenth of a processor each. Beside it, OSDs that have all that they want, where the machine itself is what is slow.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ondeck_bench::size::{GIB, MIB};
use ondeck_testbed::{CephServers, CpuLimit, Daemon, Host, processor};
use rustix::fs::XattrFlags;

use crate::goals::Judged;
use crate::page::{Table, heading, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, CLIENT, Recipe, text};
use crate::{command_line, interrupt, machine};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds that count, after one that does not
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Also write the page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Of the time that the same bytes take in one object.
const GOAL: f64 = 0.7;
/// What a slow OSD has of a processor, in percent.
const SLOW: u64 = 10;
/// Enough that what a client does beside it does not matter.
const BYTES: u64 = 64 * MIB;
/// Who reads has not written: what a client has written is in its cache.
const READER: &str = "n3";
/// Files that are made until one lies where it shall.
const TRIES: usize = 64;

/// Of both, stripes of 1 MiB.
const ONE: &str = "stripe_unit=1048576 stripe_count=1 object_size=67108864";
const TWO: &str = "stripe_unit=1048576 stripe_count=2 object_size=33554432";

/// A file, and how long it took.
struct Subject {
    name: &'static str,
    layout: &'static str,
    file: String,
    write: Samples,
    read: Samples,
    /// Of the first subject's time in the same round.
    write_ratio: Samples,
    read_ratio: Samples,
}

/// A CephFS, mounted where it is written and where it is read.
struct Lake<'a> {
    testbed: &'a AgentTestbed,
    servers: CephServers,
    writer: &'a Host,
    reader: &'a Host,
    at: PathBuf,
    _clients: Vec<Daemon>,
}

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the CephFS is in a testbed of namespaces and mounts: run it as root");
    }
    processor::check()?;
    interrupt::install()?;
    let testbed = AgentTestbed::new()?;
    let built = testbed.create(Recipe::new("ceph", 2), GIB)?;
    let lake = Lake::mount(&testbed)?;
    let mut slow = lake.subjects("slow")?;
    let mut fast = lake.subjects("fast")?;
    let rounds = usize::from(options.rounds);
    let limits = limits(&testbed)?;
    lake.measure(&mut slow, rounds)?;
    let waited = limits.iter().map(CpuLimit::periods_waited).collect::<Result<Vec<_>>>()?;
    drop(limits);
    ensure!(!waited.contains(&0), "an OSD had all the time that it wanted: it was not slow");
    lake.measure(&mut fast, rounds)?;
    lake.unmount()?;
    testbed.destroy(built)?;

    let page = render(rounds, &slow, &fast);
    let page = crate::without_paths(page, testbed.dir());
    drop(testbed);
    print!("{page}");
    if let Some(file) = &options.markdown {
        fs::write(file, &page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// Holds all OSDs to a tenth of a processor.
fn limits(testbed: &AgentTestbed) -> Result<Vec<CpuLimit>> {
    let osds: Vec<_> =
        testbed.marked().into_iter().filter(|marked| marked.role.starts_with("osd.")).collect();
    ensure!(osds.len() == 2, "there are {} OSDs, not 2", osds.len());
    osds.iter().map(|osd| testbed.limit_cpu(osd.process.pid, SLOW)).collect()
}

impl<'a> Lake<'a> {
    fn mount(testbed: &'a AgentTestbed) -> Result<Lake<'a>> {
        let servers = CephServers::new(testbed.host("n1"), AgentTestbed::runtime_dir("n1"));
        let at = testbed.dir().join("site");
        fs::create_dir(&at)?;
        let (writer, reader) = (testbed.host(CLIENT), testbed.host(READER));
        let clients = servers.mount(&[writer, reader], testbed.dir(), &at)?;
        Ok(Lake { testbed, servers, writer, reader, at, _clients: clients })
    }

    fn unmount(self) -> Result<()> {
        for host in [self.writer, self.reader] {
            self.testbed.run(host, &["umount".to_owned(), text(&self.at)])?;
        }
        Ok(())
    }

    /// Files of which it is known where they lie.
    fn subjects(&self, prefix: &str) -> Result<[Subject; 3]> {
        let one = self.directory(&format!("{prefix}-one"), ONE)?;
        let two = self.directory(&format!("{prefix}-two"), TWO)?;
        let subject = |name, layout, file| Subject {
            name,
            layout,
            file,
            write: Samples::default(),
            read: Samples::default(),
            write_ratio: Samples::default(),
            read_ratio: Samples::default(),
        };
        Ok([
            subject("one object", ONE, self.file(&one, |_| true)?),
            subject("two objects, on two OSDs", TWO, self.file(&two, |osds| osds[0] != osds[1])?),
            subject("two objects, on one OSD", TWO, self.file(&two, |osds| osds[0] == osds[1])?),
        ])
    }

    fn directory(&self, name: &str, layout: &str) -> Result<PathBuf> {
        let path = self.at.join(name);
        let outside = self.writer.path_from_outside(&path);
        fs::create_dir(&outside)?;
        rustix::fs::setxattr(&outside, "ceph.dir.layout", layout.as_bytes(), XattrFlags::empty())
            .with_context(|| format!("cannot set the layout {layout}"))?;
        Ok(path)
    }

    /// Makes files until there is one whose first two objects lie so.
    fn file(&self, directory: &Path, lies: impl Fn([u64; 2]) -> bool) -> Result<String> {
        for number in 0..TRIES {
            let path = directory.join(format!("file-{number}"));
            let outside = self.writer.path_from_outside(&path);
            if outside.exists() {
                continue;
            }
            let ino = File::create(&outside)?.metadata()?.ino();
            let mut pool = [0; 256];
            let length = rustix::fs::getxattr(&outside, "ceph.file.layout.pool", &mut pool[..])
                .context("a file of CephFS without a pool")?;
            let pool = String::from_utf8_lossy(&pool[..length]).into_owned();
            if lies([self.servers.osd_of(&pool, ino, 0)?, self.servers.osd_of(&pool, ino, 1)?]) {
                return Ok(text(&path));
            }
        }
        bail!("of {TRIES} files none lies as it shall")
    }

    /// Writes each file over in place and reads it where it was not written, in rounds of rotated order.
    fn measure(&self, subjects: &mut [Subject; 3], rounds: usize) -> Result<()> {
        for round in 0..=rounds {
            let mut seconds = [(0.0, 0.0); 3];
            for position in 0..subjects.len() {
                let which = (position + round) % subjects.len();
                let file = &subjects[which].file;
                let bytes = BYTES.to_string();
                let write = self.testbed.load(self.writer, &["write", file, "--bytes", &bytes, "--sync"])?;
                let read = self.testbed.load(self.reader, &["read", file])?;
                seconds[which] = (write.seconds(), read.seconds());
            }
            if round > 0 {
                let first = seconds[0];
                for (subject, (write, read)) in subjects.iter_mut().zip(seconds) {
                    subject.write.add(write * 1000.0);
                    subject.read.add(read * 1000.0);
                    subject.write_ratio.add(write / first.0);
                    subject.read_ratio.add(read / first.1);
                }
            }
        }
        Ok(())
    }
}

fn render(rounds: usize, slow: &[Subject; 3], fast: &[Subject; 3]) -> String {
    let mut page = String::from("# Benchmarks of layouts\n\n");
    paragraph(
        &mut page,
        &format!(
            "A file of {} MiB in one object of a CephFS, beside the same bytes in two, made by `{}`. Two OSDs that keep their objects in RAM, \
             `ceph-fuse` with its usual cache; all of it on one machine. Files are made until there is one whose objects lie as they shall (`ceph osd map`). Each is written over in place and synced, and read by \
             another client, in {rounds} rounds of rotated order, after one that is dropped. Ratios are those within a round.",
            BYTES / MIB,
            command_line()
        ),
    );
    let mut goals = Table::new(&["goal", "case", "measured", "verdict"]);
    for (what, samples) in [("written", &slow[1].write_ratio), ("read", &slow[1].read_ratio)] {
        let [median, min, max] = samples.cells(2);
        let verdict = if samples.median() <= GOAL { "met" } else { "**missed**" };
        let judged = Judged {
            goal: format!("on two OSDs at most {GOAL} of the time on one"),
            case: format!("{what}, OSDs with {SLOW} % of a processor each"),
            figure: format!("{median}, in rounds {min} to {max}"),
            verdict: verdict.into(),
        };
        goals.add([judged.goal, judged.case, judged.figure, judged.verdict]);
    }
    heading(&mut page, "Goals");
    goals.write(&mut page);
    for (title, subjects) in [
        (format!("OSDs that have {SLOW} % of a processor each"), slow),
        ("OSDs that have what they want".to_owned(), fast),
    ] {
        heading(&mut page, &title);
        table(&mut page, "written", subjects, |subject| (&subject.write_ratio, &subject.write));
        table(&mut page, "read", subjects, |subject| (&subject.read_ratio, &subject.read));
    }
    heading(&mut page, "The machine");
    paragraph(
        &mut page,
        &format!("{}; {}.", machine::summary(), machine::first_line("ceph", &["--version"])),
    );
    page
}

fn table(
    page: &mut String,
    what: &str,
    subjects: &[Subject; 3],
    of: impl Fn(&Subject) -> (&Samples, &Samples),
) {
    let mut table = Table::new(&[
        &format!("{what}: of one object"),
        "min",
        "max",
        "file",
        "layout",
        "median ms",
        "min",
        "max",
        "MB/s",
    ]);
    for subject in subjects {
        let (ratio, ms) = of(subject);
        let mut cells = ratio.cells(2).to_vec();
        cells.extend([subject.name.to_owned(), format!("`{}`", subject.layout)]);
        cells.extend(ms.cells(1));
        cells.push(number(BYTES as f64 / 1e3 / ms.median(), 0));
        table.add(cells);
    }
    table.write(page);
}
