//! What reaches the disk, and when: first reads, more than fits, and what must not reach it at all.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ondeck_bench::size::MIB;

use super::subjects::Mounted;
use super::work;
use crate::scratch::sync_filesystem;

/// A window of a stream of writes, over which its rate is taken.
const WINDOW: Duration = Duration::from_secs(5);

/// Reads a file that only the disk has; gives MB/s.
///
/// # Errors
/// It can't be read.
pub fn first_read(mounted: &Mounted, bytes: u64) -> Result<f64> {
    mounted.flush()?;
    mounted.forget()?;
    work::read(&mounted.dir.join(work::INPUT), bytes)
}

/// A stream of writes of more than fits.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Until everything was on the disk, synced.
    pub seconds: f64,
    /// MB/s in the slowest window after so much was written as fits.
    pub slowest_window: f64,
}

/// Writes a file of `bytes`, and has it brought to the disk.
///
/// # Errors
/// It can't be.
pub fn stream(mounted: &Mounted, bytes: u64, fits: u64) -> Result<Stream> {
    let path = mounted.dir.join("stream");
    let content = vec![0x5a; MIB as usize];
    let began = Instant::now();
    let mut marks: Vec<(Instant, u64)> = Vec::new();
    {
        let mut file = File::create_new(&path).with_context(|| format!("cannot write {}", path.display()))?;
        for written in 1..=bytes / MIB {
            file.write_all(&content)?;
            if written * MIB > fits {
                marks.push((Instant::now(), written * MIB));
            }
        }
    }
    mounted.flush()?;
    let seconds = began.elapsed().as_secs_f64();
    fs::remove_file(path)?;
    mounted.flush()?;
    Ok(Stream { seconds, slowest_window: slowest(&marks) })
}

/// Not a number if the stream was shorter than a window.
fn slowest(marks: &[(Instant, u64)]) -> f64 {
    let mut slowest = f64::NAN;
    let mut first = 0;
    for (at, bytes) in marks {
        while marks[first + 1..].first().is_some_and(|(next, _)| *at - *next >= WINDOW) {
            first += 1;
        }
        let (begin, before) = marks[first];
        if *at - begin >= WINDOW {
            slowest = slowest.min((bytes - before) as f64 / 1e6 / (*at - begin).as_secs_f64());
        }
    }
    slowest
}

/// Bytes that a device has read and written so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    pub read: u64,
    pub written: u64,
}

/// Of the device below a directory.
///
/// # Errors
/// The kernel's.
pub fn moved(dir: &Path) -> Result<Moved> {
    let device = fs::metadata(dir)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let fields: Vec<u64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
    match fields[..] {
        // Sectors of 512 bytes.
        [_, _, read, _, _, _, written, ..] => Ok(Moved { read: read * 512, written: written * 512 }),
        _ => bail!("{path} has {text}"),
    }
}

/// Waits until a device has had nothing to do for a while: its journal has settled.
///
/// # Errors
/// It has not after a minute.
pub fn settle(dir: &Path) -> Result<Moved> {
    sync_filesystem(dir)?;
    let until = Instant::now() + Duration::from_secs(60);
    let mut last = moved(dir)?;
    while Instant::now() < until {
        // A journal is written after five seconds.
        std::thread::sleep(Duration::from_secs(7));
        let now = moved(dir)?;
        if now == last {
            return Ok(now);
        }
        last = now;
    }
    bail!("the disk of {} does not come to rest", dir.display())
}

/// Does something and gives what the device moved for it, of which the journal may be late.
///
/// # Errors
/// As of doing it.
pub fn moved_by(dir: &Path, act: impl FnOnce() -> Result<()>) -> Result<Moved> {
    let before = settle(dir)?;
    act()?;
    std::thread::sleep(Duration::from_secs(7));
    let after = moved(dir)?;
    Ok(Moved { read: after.read - before.read, written: after.written - before.written })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_window_is_found_and_short_streams_have_none() {
        let begin = Instant::now();
        let at = |seconds: u64, megabytes: u64| (begin + Duration::from_secs(seconds), megabytes * 1_000_000);
        assert!(slowest(&[at(0, 0), at(1, 100)]).is_nan());
        let marks = [at(0, 0), at(5, 500), at(10, 600), at(15, 1600)];
        assert!((slowest(&marks) - 20.0).abs() < 0.1, "{}", slowest(&marks));
    }
}
