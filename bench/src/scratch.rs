//! Where a run works: a directory on disk and a filesystem in RAM, both gone afterwards.
//!
//! As root the RAM is a tmpfs of the bench's own, mounted `huge=within_size` as Ondeck mounts its
//! RAM disks, in a mount namespace of the bench's own: even a bench that is killed outright leaves
//! no mount and no memory behind, only its directory on disk. An ordinary user gets a directory in
//! /dev/shm, and the page says so.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use crate::machine;
use ondeck_bench::size::{GIB, show};

/// The most memory that files in RAM may take at once.
pub const RAM_LIMIT: u64 = 12 * GIB;

/// Disks go on for a moment (discards, their own cache) after the kernel is done with them.
const SETTLE: Duration = Duration::from_millis(200);

pub struct Scratch {
    /// Directory on disk, the bench's own.
    pub disk: PathBuf,
    /// Directory in RAM, the bench's own.
    pub ram: PathBuf,
    /// What the RAM is, for the page.
    pub ram_label: String,
    mounted: bool,
}

impl Scratch {
    /// Makes the two directories below `parent` and in RAM.
    pub fn new(parent: &Path) -> Result<Self> {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let parent = parent.canonicalize().with_context(|| format!("cannot find {}", parent.display()))?;
        let name = format!("ondeck-bench.{}", std::process::id());
        let disk = parent.join(&name);
        // Open to all whatever the umask: one measurement runs as an ordinary user.
        fs::create_dir(&disk)
            .and_then(|()| fs::set_permissions(&disk, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot make {}", disk.display()))?;
        let mut scratch = Self { ram: disk.join("ram"), disk, ram_label: String::new(), mounted: false };
        if machine::is_root() {
            scratch.mount_ram()?;
        } else {
            scratch.ram = Path::new("/dev/shm").join(&name);
            fs::create_dir(&scratch.ram).with_context(|| format!("cannot make {}", scratch.ram.display()))?;
            scratch.ram_label = format!("{}, because not root", machine::filesystem("/dev/shm"));
        }
        Ok(scratch)
    }

    fn mount_ram(&mut self) -> Result<()> {
        // SAFETY: takes no pointers; it changes which mounts this process and its children see.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } == -1 {
            return Err(std::io::Error::last_os_error())
                .context("cannot make a mount namespace, though root");
        }
        // Otherwise the mount would spread to the namespace we just left.
        rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .context("cannot make the mounts private")?;
        fs::create_dir(&self.ram).with_context(|| format!("cannot make {}", self.ram.display()))?;
        let options = CString::new(format!("size={RAM_LIMIT},mode=0755,huge=within_size"))?;
        rustix::mount::mount("ondeck-bench", &self.ram, "tmpfs", MountFlags::empty(), options.as_c_str())
            .with_context(|| format!("cannot mount a tmpfs on {}", self.ram.display()))?;
        self.mounted = true;
        self.ram_label = machine::filesystem(&self.ram);
        Ok(())
    }

    /// Refuses a case that would not fit, before hours are spent or a disk is filled.
    ///
    /// The source, one target and the dirty pages of one target may be in memory at once.
    pub fn check_space(&self, name: &str, bytes: u64) -> Result<()> {
        if bytes > RAM_LIMIT {
            bail!("case {name} needs {} in RAM; the limit is {}", show(bytes), show(RAM_LIMIT));
        }
        let needed = bytes * 2 + GIB;
        let available = machine::memory("MemAvailable");
        if available < needed {
            bail!(
                "case {name} needs {} of free memory, and only {} are free; use --quick or --case",
                show(needed),
                show(available)
            );
        }
        let needed = bytes + bytes / 4 + GIB;
        let free = free_space(&self.disk)?;
        if free < needed {
            bail!(
                "case {name} needs {} free where {} is, and only {} are; name another place with \
                 --disk",
                show(needed),
                self.disk.display(),
                show(free)
            );
        }
        Ok(())
    }

    /// Leaves the disk nothing of an earlier run to write. What others write at the same time is
    /// not waited for: it would not end, and the spread shows it.
    pub fn settle(&self) -> Result<()> {
        sync_filesystem(&self.disk)?;
        std::thread::sleep(SETTLE);
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = rustix::mount::unmount(&self.ram, UnmountFlags::DETACH)
        {
            eprintln!("cannot unmount {}: {error}", self.ram.display());
            // Removing below would only empty the tmpfs file by file; that frees it as well.
        }
        for directory in [&self.ram, &self.disk] {
            if let Err(error) = remove(directory) {
                eprintln!("cannot remove {}: {error:#}", directory.display());
            }
        }
    }
}

fn free_space(path: &Path) -> Result<u64> {
    let statistics = rustix::fs::statvfs(path)
        .with_context(|| format!("cannot ask for the free space of {}", path.display()))?;
    Ok(statistics.f_bavail * statistics.f_frsize)
}

/// Writes everything of the filesystem that `path` is on.
pub fn sync_filesystem(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| Ok(rustix::fs::syncfs(&directory)?))
        .with_context(|| format!("cannot sync the filesystem of {}", path.display()))
}

/// Removes a file or a tree; one that is not there is fine.
pub fn remove(path: &Path) -> Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    result.with_context(|| format!("cannot remove {}", path.display()))
}
