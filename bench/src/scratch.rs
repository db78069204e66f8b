//! Where a run works: a disk and a filesystem in RAM, both the bench's own and gone afterwards.
//!
//! As root the RAM is a tmpfs, mounted `huge=within_size` as Ondeck mounts its RAM disks, and the
//! disk is a new ext4 on a loop device over a file. A directory of the machine's own filesystem
//! would do (`--plain-disk`), and is what an ordinary user gets, but it measures that filesystem's
//! history too: where it is mounted with `discard`, removing 200,000 files between two runs takes
//! minutes, and where it has no journal, ext4 searches past every inode that was freed in the last
//! minute, which makes each run slower the more the run before it has made.
//!
//! The mounts are in a mount namespace of the bench's own, and the loop device detaches with its
//! mount: even a bench that is killed outright leaves only its directory behind.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ondeck_bench::size::{GIB, MIB, show};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use crate::interrupt;
use crate::machine::{self, find_program};

/// The most memory that files in RAM may take at once.
pub const RAM_LIMIT: u64 = 12 * GIB;

/// Disks go on for a moment (discards, their own cache) after the kernel is done with them.
const SETTLE: Duration = Duration::from_millis(200);

pub struct Scratch {
    /// Directory on the disk that is measured.
    pub disk: PathBuf,
    /// Directory in RAM.
    pub ram: PathBuf,
    /// What they are, for the page.
    pub disk_label: String,
    pub ram_label: String,
    /// Directory of the machine's filesystem that holds the rest.
    pub base: PathBuf,
    mounted: Vec<PathBuf>,
}

impl Scratch {
    /// Makes the disk, with room for `disk_space` bytes of files, and the RAM.
    pub fn new(parent: &Path, plain_disk: bool, disk_space: u64) -> Result<Self> {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let parent = parent.canonicalize().with_context(|| format!("cannot find {}", parent.display()))?;
        let name = format!("ondeck-bench.{}", std::process::id());
        let base = parent.join(&name);
        make_directory(&base)?;
        let mut scratch = Self {
            disk: base.join("disk"),
            ram: base.join("ram"),
            disk_label: machine::filesystem(&base),
            ram_label: String::new(),
            base,
            mounted: Vec::new(),
        };
        if machine::is_root() {
            own_mounts()?;
            scratch.mount_ram()?;
        } else {
            scratch.ram = Path::new("/dev/shm").join(&name);
            make_directory(&scratch.ram)?;
            scratch.ram_label = format!("{}, because not root", machine::filesystem("/dev/shm"));
        }
        make_directory(&scratch.disk)?;
        if machine::is_root() && !plain_disk {
            scratch.mount_disk(disk_space)?;
        }
        Ok(scratch)
    }

    fn mount_ram(&mut self) -> Result<()> {
        make_directory(&self.ram)?;
        let options = format!("size={RAM_LIMIT},mode=0755,huge=within_size");
        self.mount("ondeck-bench", &self.ram.clone(), "tmpfs", &options)?;
        self.ram_label = machine::filesystem(&self.ram);
        Ok(())
    }

    fn mount_disk(&mut self, space: u64) -> Result<()> {
        let size = space + space / 4 + GIB;
        require_free(&self.base, size + GIB)?;
        let image = self.base.join("disk.img");
        eprintln!("making a disk of {}", show(size));
        write_image(&image, size).with_context(|| format!("cannot make {}", image.display()))?;

        let device = output_of("losetup", &["--find", "--show", "--direct-io=on"], &image)?;
        let device = Path::new(device.trim());
        // Whatever can be put off would land in somebody's time. Twice the usual inodes, because
        // the tree has many small files.
        let options = ["-q", "-i", "8192", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"];
        let mounted = output_of("mkfs.ext4", &options, device)
            .and_then(|_| self.mount(&device.to_string_lossy(), &self.disk.clone(), "ext4", ""));
        // On a device in use this means: once it is unmounted.
        output_of("losetup", &["--detach"], device)?;
        mounted?;
        let below = std::mem::take(&mut self.disk_label);
        self.disk_label = format!("{}, on a loop device over {below}", machine::filesystem(&self.disk));
        Ok(())
    }

    fn mount(&mut self, source: &str, target: &Path, kind: &str, options: &str) -> Result<()> {
        let options = CString::new(options)?;
        rustix::mount::mount(source, target, kind, MountFlags::empty(), options.as_c_str())
            .with_context(|| format!("cannot mount {kind} on {}", target.display()))?;
        self.mounted.push(target.to_owned());
        Ok(())
    }

    /// Refuses a case that would not fit, before hours are spent or a disk is filled.
    ///
    /// The source and one target are in memory at once, beside the buffers of [`crate::memcpy`].
    pub fn check_space(&self, name: &str, bytes: u64) -> Result<()> {
        if bytes > RAM_LIMIT {
            bail!("case {name} needs {} in RAM; the limit is {}", show(bytes), show(RAM_LIMIT));
        }
        let needed = bytes * 2 + 3 * GIB;
        let available = machine::memory("MemAvailable");
        if available < needed {
            bail!(
                "case {name} needs {} of free memory, and only {} are free; use --quick or --case",
                show(needed),
                show(available)
            );
        }
        require_free(&self.disk, bytes + bytes / 8 + MIB)
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
        for mount in self.mounted.iter().rev() {
            if let Err(error) = rustix::mount::unmount(mount, UnmountFlags::DETACH) {
                // Removing below then empties it file by file, which frees it as well.
                eprintln!("cannot unmount {}: {error}", mount.display());
            }
        }
        for directory in [&self.ram, &self.base] {
            if let Err(error) = remove(directory) {
                eprintln!("cannot remove {}: {error:#}", directory.display());
            }
        }
    }
}

/// Open to all whatever the umask: one measurement runs as an ordinary user.
pub fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot make {}", path.display()))
}

/// Leaves the mount namespace that the rest of the machine sees.
pub fn own_mounts() -> Result<()> {
    // SAFETY: takes no pointers; it changes which mounts this process and its children see.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } == -1 {
        return Err(std::io::Error::last_os_error()).context("cannot make a mount namespace, though root");
    }
    // Otherwise our mounts would spread to the namespace we just left.
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")
}

/// A file that is written once, so that no run pays for the first touch of its blocks, and then
/// leaves the page cache, which the loop device goes past.
fn write_image(path: &Path, size: u64) -> Result<()> {
    let mut file = File::create_new(path)?;
    fallocate(&file, FallocateFlags::empty(), 0, size)?;
    let block = vec![0; MIB as usize];
    for _ in 0..size.div_ceil(MIB) {
        interrupt::check()?;
        file.write_all(&block)?;
    }
    file.sync_all()?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// What a program of the system prints, given some options and one path.
pub fn output_of(name: &str, options: &[&str], path: &Path) -> Result<String> {
    // An administrator's PATH may lack these when the bench is started by sudo or cron.
    let program = find_program(name, &["/usr/sbin".into(), "/sbin".into()])
        .with_context(|| format!("{name} is not installed; --plain-disk does without"))?;
    let output = Command::new(program)
        .args(options)
        .arg(path)
        .output()
        .with_context(|| format!("cannot start {name}"))?;
    // The terminal's Ctrl-C reaches it as well, and is then why it failed.
    interrupt::check()?;
    if !output.status.success() {
        bail!(
            "{name} failed: {}; --plain-disk does without it",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

pub fn require_free(path: &Path, needed: u64) -> Result<()> {
    let statistics = rustix::fs::statvfs(path)
        .with_context(|| format!("cannot ask for the free space of {}", path.display()))?;
    let free = statistics.f_bavail * statistics.f_frsize;
    if free < needed {
        bail!(
            "this needs {} free where {} is, and only {} are; name another place with --disk, or \
             choose less with --case or --quick",
            show(needed),
            path.display(),
            show(free)
        );
    }
    Ok(())
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
