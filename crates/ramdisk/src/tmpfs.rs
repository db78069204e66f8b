//! The RAM disk of one machine: a sized tmpfs.
//!
//! `huge=within_size` lets large files use huge pages, which doubles the bandwidth, without making small ones cost
//! 2 MiB each; `huge=always` would make creating files a hundred times slower. `noswap` (Linux 6.4, root only) keeps
//! the pages in RAM. Both are left out where the kernel refuses them.

use std::ffi::CString;
use std::io;
use std::path::Path;

use ondeck_core::Bytes;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

/// What a mounted RAM disk turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Large files use huge pages.
    pub huge_pages: bool,
    /// Its pages are never swapped out.
    pub no_swap: bool,
}

/// Mounts a tmpfs of `size` over the directory `at`, owned by the caller alone (mode 0700), nosuid and nodev.
///
/// # Errors
/// The kernel's, if even the plain mount is refused.
pub fn mount_tmpfs(at: &Path, size: Bytes, uid: u32, gid: u32) -> io::Result<Features> {
    // nr_inodes=0: no limit on the number of files beside the size itself; each costs about 1 KiB of kernel memory.
    mount_with("ondeck", at, format!("size={},nr_inodes=0,mode=0700,uid={uid},gid={gid}", size.0))
}

/// The same for root, under a name of its own in the table of mounts, and with a limit on the number of files: what an agent lends must not grow beyond what it promised.
///
/// # Errors
/// As [`mount_tmpfs`].
pub fn mount_limited(name: &str, at: &Path, size: Bytes, inodes: u64) -> io::Result<Features> {
    mount_with(name, at, format!("size={},nr_inodes={inodes},mode=0700", size.0))
}

fn mount_with(name: &str, at: &Path, plain: String) -> io::Result<Features> {
    let mut last = Errno::INVAL;
    for (huge_pages, no_swap) in [(true, true), (true, false), (false, false)] {
        let mut options = plain.clone();
        if huge_pages {
            options.push_str(",huge=within_size");
        }
        if no_swap {
            options.push_str(",noswap");
        }
        let options = CString::new(options)?;
        match mount(name, at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, &*options) {
            Ok(()) => return Ok(Features { huge_pages, no_swap }),
            Err(error) => last = error,
        }
    }
    Err(last.into())
}
