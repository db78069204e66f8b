//! How fast one thread copies memory: what no copy into RAM by one thread can exceed.
//!
//! Buffers are larger than the last cache, faulted in beforehand, and copied several times; the
//! best counts. They are tried with small and with huge pages, since the fairest limit for a
//! tmpfs with huge pages is the faster of the two.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::interrupt;
use crate::machine::largest_cache;
use ondeck_bench::size::{GIB, MIB};

const SIZES: [u64; 4] = [4 * MIB, 64 * MIB, 256 * MIB, GIB];

/// Bytes moved per size: enough repetitions to meet an undisturbed one.
const VOLUME: u64 = 2 * GIB;

/// The best rate seen for each size of buffer and kind of page, in bytes per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates(BTreeMap<(u64, bool), f64>);

impl Rates {
    pub fn add(&mut self, more: Self) {
        for (key, rate) in more.0 {
            let best = self.0.entry(key).or_insert(rate);
            *best = best.max(rate);
        }
    }

    /// Buffer size, whether on huge pages, rate, and whether it counts as memory's speed.
    pub fn rows(&self) -> impl Iterator<Item = (u64, bool, f64, bool)> {
        let cache = largest_cache();
        self.0.iter().map(move |(&(size, huge), &rate)| (size, huge, rate, size > cache))
    }

    /// The best rate with buffers that no cache holds.
    pub fn best(&self) -> Option<f64> {
        self.rows().filter(|(.., counts)| *counts).map(|(_, _, rate, _)| rate).max_by(f64::total_cmp)
    }
}

/// Runs [`print`] in a process of its own, so that its gigabytes do not become the least memory
/// that any later command can be seen to use (see [`crate::timed::Finished::peak_memory`]).
pub fn measure_in_child() -> Result<Rates> {
    interrupt::check()?;
    let output = Command::new(std::env::current_exe().context("cannot find this program")?)
        .arg("memcpy")
        .output()
        .context("cannot start the memcpy measurement")?;
    interrupt::check()?;
    if !output.status.success() {
        bail!("the memcpy measurement failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(text: &str) -> Result<Rates> {
    let mut rates = Rates::default();
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut next = || words.next().context("a line is too short");
        let key = (next()?.parse()?, next()? == "huge");
        let rate = next()?.parse()?;
        rates.0.insert(key, rate);
    }
    Ok(rates)
}

/// Measures, and prints a line for each size and kind of page: `BYTES small|huge RATE`.
pub fn print() -> Result<()> {
    for huge in [false, true] {
        let largest = SIZES.into_iter().max().unwrap_or(0) as usize;
        let mut source = Buffer::new(largest, huge)?;
        let mut target = Buffer::new(largest, huge)?;
        // Not zeroes: the kernel may back untouched or zeroed memory by one page.
        source.bytes().fill(0x5a);
        target.bytes().fill(0xa5);
        for size in SIZES {
            let kind = if huge { "huge" } else { "small" };
            let rate = best_rate(source.bytes(), target.bytes(), size);
            println!("{size} {kind} {rate:.0}");
        }
    }
    Ok(())
}

fn best_rate(source: &[u8], target: &mut [u8], size: u64) -> f64 {
    let length = size as usize;
    let repetitions = (VOLUME / size).max(3);
    let mut best_s = f64::INFINITY;
    for _ in 0..repetitions {
        let start = Instant::now();
        target[..length].copy_from_slice(&source[..length]);
        std::hint::black_box(&mut *target);
        best_s = best_s.min(start.elapsed().as_secs_f64());
    }
    size as f64 / best_s
}

/// Anonymous memory, on huge pages when asked and when the kernel grants them.
struct Buffer {
    start: *mut std::ffi::c_void,
    length: usize,
}

impl Buffer {
    fn new(length: usize, huge: bool) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .context("cannot map memory")?;
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is exactly the mapping made above; the advice changes no contents.
        // A kernel without huge pages refuses it, and small pages are then what there is.
        let _ = unsafe { madvise(start, length, advice) };
        Ok(Self { start, length })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `length` bytes, readable, writable and zeroed by the kernel, lives
        // as long as `self`, and is reached only through this exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no borrow of it can be alive here.
        let _ = unsafe { munmap(self.start, self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_several_measurements_is_kept() {
        let mut rates = parse("1073741824 huge 5000\n1073741824 small 3000\n").unwrap();
        rates.add(parse("1073741824 huge 4000\n1073741824 small 3500\n").unwrap());
        assert_eq!(rates, parse("1073741824 huge 5000\n1073741824 small 3500\n").unwrap());
        assert_eq!(rates.best(), Some(5000.0));
    }

    #[test]
    fn a_line_that_is_cut_off_is_an_error() {
        assert!(parse("1024 huge\n").is_err());
    }
}
