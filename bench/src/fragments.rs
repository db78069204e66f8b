//! Memory in small pieces, as on a machine that has run for a while.
//!
//! Free memory is taken in huge pages by a file of a tmpfs, and given back but for every eighth page: then free blocks
//! are small, and whoever wants a large one has to wait until the kernel has moved pages out of its way (*direct
//! compaction*). The kernel joins them again by itself, so it does not last. What stays taken can be moved, like a page
//! cache, and is an eighth of what was free.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ondeck_bench::size::{GIB, KIB, MIB};
use rustix::fs::{FallocateFlags, fallocate};

use crate::interrupt;
use crate::machine::memory;

/// Of every so many bytes, one page stays.
const SPACING: u64 = 32 * KIB;
const PAGE: u64 = 4 * KIB;
/// Taken whole before most of it is given back.
const STEP: u64 = 256 * MIB;
/// What may stay taken.
const MOST_HELD: u64 = 3 * GIB;
/// Free memory in blocks larger than [`SPACING`] that is as good as none, as a share of what is free.
const FEW: f64 = 0.02;

pub struct Fragments {
    file: File,
    path: PathBuf,
    length: u64,
}

impl Fragments {
    /// In a directory of a tmpfs that takes huge pages.
    pub fn new(ram: &Path) -> Result<Self> {
        let path = ram.join("fragments");
        let file = File::create_new(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { file, path, length: 0 })
    }

    /// Gives back what is held.
    pub fn end(self) -> Result<()> {
        fs::remove_file(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }

    fn held(&self) -> u64 {
        self.length / SPACING * PAGE
    }

    /// Breaks up what is free in large blocks.
    pub fn renew(&mut self) -> Result<()> {
        let block = vec![0; (2 * MIB) as usize];
        // The kernel puts free memory together again, all the time; after some rounds, all of it is begun anew.
        if self.held() >= MOST_HELD / 2 {
            self.file.set_len(0).context("cannot free memory")?;
            self.length = 0;
        }
        while share_in_large_blocks() > FEW && self.held() < MOST_HELD {
            let start = self.length;
            while self.length < start + STEP {
                interrupt::check()?;
                rustix::io::pwrite(&self.file, &block, self.length).context("cannot take memory")?;
                self.length += block.len() as u64;
            }
            for piece in (start..self.length).step_by(SPACING as usize) {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&self.file, flags, piece + PAGE, SPACING - PAGE).context("cannot free memory")?;
            }
        }
        Ok(())
    }
}

/// How much of the free memory lies in blocks of [`SPACING`] or more.
pub fn share_in_large_blocks() -> f64 {
    let text = fs::read_to_string("/proc/buddyinfo").unwrap_or_default();
    large_blocks(&text) as f64 / memory("MemFree").max(1) as f64
}

/// In all zones but the first 16 MiB, which are kept for devices.
fn large_blocks(buddyinfo: &str) -> u64 {
    let zones = buddyinfo.lines().filter_map(|line| line.split_once("Normal").or(line.split_once("DMA32")));
    zones
        .flat_map(|(_, counts)| counts.split_whitespace().enumerate())
        .filter_map(|(order, count)| Some((PAGE << order, count.parse::<u64>().ok()?)))
        .filter(|(size, _)| *size >= SPACING)
        .map(|(size, count)| size * count)
        .sum()
}

/// How often someone had to wait for direct compaction since the machine was started.
pub fn stalls() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("compact_stall ")?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_eight_pages_and_more_are_large() {
        let text = "Node 0, zone      DMA      2      2      4      2 \n\
                    Node 0, zone    DMA32      0      0      0      1 \n\
                    Node 0, zone   Normal      9      9      9      2      1 \n";
        assert_eq!(large_blocks(text), 3 * 32 * KIB + 64 * KIB);
    }
}
