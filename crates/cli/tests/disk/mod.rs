//! A filesystem of a test's own, on a loop device.

#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use crate::cached::sh;

/// One that is mounted; it goes with the test, and its device does.
pub struct Disk {
    pub image: PathBuf,
    pub at: PathBuf,
}

impl Disk {
    /// Makes one in a new image by a command such as `mkfs.ext4 -q`, and mounts it.
    pub fn new(make: &str, size: &str, image: &Path, at: &Path, options: &str) -> Disk {
        sh(Path::new("/"), &format!("truncate -s {size} {0}; {make} {0} >&2", image.display()));
        Disk::of(image, at, options)
    }

    /// Mounts the one that an image has.
    pub fn of(image: &Path, at: &Path, options: &str) -> Disk {
        let options = if options.is_empty() { "loop".to_owned() } else { format!("loop,{options}") };
        sh(Path::new("/"), &format!("mount -o {options} {} {}", image.display(), at.display()));
        Disk { image: image.to_owned(), at: at.to_owned() }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a test that has failed may have left something open there.
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}
