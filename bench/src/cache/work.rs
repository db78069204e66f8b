//! What programs do in a directory, timed: in this process, so that starting one is not in the figures.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ondeck_bench::size::{KIB, MIB};

/// Something that is done again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Read a file from its begin to its end, 1 MiB at a time.
    Read,
    /// Read blocks of 4 KiB anywhere in that file.
    RandomRead,
    /// Write blocks of 4 KiB anywhere in it.
    RandomWrite,
    /// Write new files, so many at a time, with so many KiB at a time.
    Write { writers: usize, kib: u64 },
    /// Make new files of 1 MiB.
    Files,
    /// Make empty files.
    Create,
    /// Ask for the attributes of those, which the kernel has forgotten.
    Stat,
    /// List them, and ask for the attributes of each, as `ls -l` does; the kernel has forgotten them.
    Walk,
    /// Remove them.
    Unlink,
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Bytes that are read, and that are written by all writers together.
    pub bytes: u64,
    /// Reads, and writes, at random places.
    pub places: usize,
    /// Files of 1 MiB.
    pub files: usize,
    /// Files without content.
    pub names: usize,
}

/// The file that is read.
pub const INPUT: &str = "input";

impl Work {
    pub const ALL: [Work; 12] = [
        Work::Read,
        Work::RandomRead,
        Work::RandomWrite,
        Work::Write { writers: 1, kib: 1024 },
        Work::Write { writers: 1, kib: 128 },
        Work::Write { writers: 4, kib: 128 },
        Work::Write { writers: 1, kib: 4 },
        Work::Files,
        Work::Create,
        Work::Stat,
        Work::Walk,
        Work::Unlink,
    ];

    pub fn title(self) -> String {
        match self {
            Work::Read => "read, 1 MiB at a time".into(),
            Work::RandomRead => "read 4 KiB at random".into(),
            Work::RandomWrite => "write 4 KiB at random".into(),
            Work::Write { writers: 1, kib } => format!("write a new file, {kib} KiB at a time"),
            Work::Write { writers, kib } => format!("{writers} writers, {kib} KiB at a time"),
            Work::Files => "new files of 1 MiB".into(),
            Work::Create => "create empty files".into(),
            Work::Stat => "stat, forgotten by the kernel".into(),
            Work::Walk => "list with attributes, forgotten by the kernel".into(),
            Work::Unlink => "unlink".into(),
        }
    }

    /// What is counted a second.
    pub fn unit(self) -> &'static str {
        match self {
            Work::Read | Work::Write { .. } | Work::Files => "MB/s",
            Work::RandomRead => "reads/s",
            Work::RandomWrite => "writes/s",
            Work::Create | Work::Stat | Work::Walk | Work::Unlink => "files/s",
        }
    }

    /// Whether it moves so much data that a disk would be measured for minutes.
    pub fn is_large(self) -> bool {
        matches!(self, Work::Files)
    }

    /// The memory that it takes, where what it writes is kept twice: as a cache's data, and by the kernel for its disk.
    pub fn takes(self, amount: &Amount) -> u64 {
        match self {
            Work::Write { .. } => 2 * amount.bytes,
            Work::Files => 2 * amount.files as u64 * MIB,
            Work::Read
            | Work::RandomRead
            | Work::RandomWrite
            | Work::Create
            | Work::Stat
            | Work::Walk
            | Work::Unlink => 0,
        }
    }

    /// Does it in a directory that [`prepare`] has prepared; gives how much a second, in [`unit`](Work::unit).
    ///
    /// # Errors
    /// Whatever failed, with its path.
    pub fn run(self, dir: &Path, amount: &Amount) -> Result<f64> {
        match self {
            Work::Read => read(&dir.join(INPUT), amount.bytes),
            Work::RandomRead => {
                let path = dir.join(INPUT);
                let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
                at_random(amount, |buffer, place| file.read_exact_at(buffer, place))
            }
            Work::RandomWrite => {
                let path = dir.join(INPUT);
                let file = File::options().write(true).open(&path);
                let file = file.with_context(|| format!("cannot open {}", path.display()))?;
                at_random(amount, |buffer, place| file.write_all_at(buffer, place))
            }
            Work::Write { writers, kib } => write(dir, writers, kib * KIB, amount.bytes),
            Work::Files => files(dir, amount.files),
            Work::Create => {
                let dir = dir.join("names");
                fs::create_dir(&dir)?;
                each(&dir, amount.names, |path| File::create_new(path).map(drop))
            }
            Work::Stat => {
                forget_names()?;
                each(&dir.join("names"), amount.names, |path| fs::symlink_metadata(path).map(drop))
            }
            Work::Walk => {
                forget_names()?;
                walk(&dir.join("names"), amount.names)
            }
            Work::Unlink => {
                let dir = dir.join("names");
                let rate = each(&dir, amount.names, fs::remove_file)?;
                fs::remove_dir(dir)?;
                Ok(rate)
            }
        }
    }
}

/// Writes the file that is to be read.
///
/// # Errors
/// As of writing it.
pub fn prepare(dir: &Path, bytes: u64) -> Result<()> {
    let path = dir.join(INPUT);
    fill(&path, bytes, MIB).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a file that has so many bytes; gives MB/s.
///
/// # Errors
/// It can't be read, or has another size.
pub fn read(path: &Path, bytes: u64) -> Result<f64> {
    let mut buffer = vec![1; MIB as usize];
    let began = Instant::now();
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut total = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            length => total += length as u64,
        }
    }
    let rate = mega(total, began);
    ensure!(total == bytes, "{} has {total} bytes", path.display());
    Ok(rate)
}

fn at_random(amount: &Amount, mut act: impl FnMut(&mut [u8], u64) -> std::io::Result<()>) -> Result<f64> {
    let blocks = amount.bytes / (4 * KIB);
    let mut buffer = [0; 4096];
    let mut place = 88_172_645_463_325_252_u64;
    let began = Instant::now();
    for _ in 0..amount.places {
        place ^= place << 13;
        place ^= place >> 7;
        place ^= place << 17;
        act(&mut buffer, place % blocks * 4 * KIB)?;
    }
    Ok(amount.places as f64 / began.elapsed().as_secs_f64())
}

fn fill(path: &Path, bytes: u64, block: u64) -> std::io::Result<()> {
    let content = vec![0x5a; block as usize];
    let mut file = File::create_new(path)?;
    let mut left = bytes;
    while left > 0 {
        let now = left.min(block);
        file.write_all(&content[..now as usize])?;
        left -= now;
    }
    Ok(())
}

fn write(dir: &Path, writers: usize, block: u64, bytes: u64) -> Result<f64> {
    let paths: Vec<PathBuf> = (0..writers).map(|writer| dir.join(format!("output-{writer}"))).collect();
    let each = bytes / writers as u64;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let started: Vec<_> = paths.iter().map(|path| scope.spawn(move || fill(path, each, block))).collect();
        started
            .into_iter()
            .try_for_each(|writer| writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
    .with_context(|| format!("cannot write to {}", dir.display()))?;
    let rate = mega(each * writers as u64, began);
    for path in paths {
        fs::remove_file(path)?;
    }
    Ok(rate)
}

fn files(dir: &Path, count: usize) -> Result<f64> {
    let dir = dir.join("files");
    fs::create_dir(&dir)?;
    let content = vec![0x5a; MIB as usize];
    let began = Instant::now();
    for number in 0..count {
        fs::write(dir.join(number.to_string()), &content)
            .with_context(|| format!("cannot write to {}", dir.display()))?;
    }
    let rate = mega(count as u64 * MIB, began);
    fs::remove_dir_all(dir)?;
    Ok(rate)
}

fn each(dir: &Path, count: usize, act: impl Fn(PathBuf) -> std::io::Result<()>) -> Result<f64> {
    let paths: Vec<PathBuf> = (0..count).map(|number| dir.join(format!("f{number:06}"))).collect();
    let began = Instant::now();
    for path in paths {
        act(path).with_context(|| format!("in {}", dir.display()))?;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// Has the kernel forget names and attributes, and no data.
fn forget_names() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "2").context("cannot have the kernel forget names")
}

fn walk(dir: &Path, count: usize) -> Result<f64> {
    let began = Instant::now();
    let mut found = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        entry?.metadata()?;
        found += 1;
    }
    ensure!(found == count, "{} has {found} entries", dir.display());
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// MB/s, in 10^6 bytes.
pub fn mega(bytes: u64, began: Instant) -> f64 {
    bytes as f64 / 1e6 / began.elapsed().as_secs_f64()
}
