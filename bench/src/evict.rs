//! Makes files cold: out of the page cache, so that the next to read them finds the disk.
//!
//! An advice for each file needs no root and disturbs nobody else, unlike dropping every cache of
//! the machine. It passes over pages that are not yet written, so these are written first.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{Advice, fadvise};

/// The files right in a directory; directories below it are left alone.
pub fn evict(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", directory.display()))?;
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let path = entry.path();
            evict_file(&path).with_context(|| format!("cannot evict {}", path.display()))?;
        }
    }
    Ok(())
}

fn evict_file(path: &Path) -> std::io::Result<()> {
    let file = File::open(path)?;
    file.sync_data()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}
