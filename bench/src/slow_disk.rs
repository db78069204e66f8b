//! A disk that is as slow as the share of a parallel filesystem that one job gets: an ext4 on a loop
//! device, held to [`RATE`] each way by cgroup v1's blkio, as bench/demo.sh does it.
//!
//! The mount is in a mount namespace of this process (and of the testbed, which is built later), and
//! the loop device detaches with it. What would outlive a process that is killed outright is the
//! image and the limit of that one device.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ondeck_bench::size::MIB;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::machine;
use crate::scratch::{self, make_directory, output_of, own_mounts, require_free};

/// Bytes per second, each way.
pub const RATE: u64 = 50_000_000;
/// What may wait in the page cache: a client of a parallel filesystem holds back some tens of megabytes.
pub const WRITE_BACK: u64 = 32 * MIB;

pub struct SlowDisk {
    base: PathBuf,
    pub path: PathBuf,
    mounted: bool,
    /// Files of the kernel, and what to write to each at the end.
    undo: Vec<(PathBuf, String)>,
    /// Whether writes wait for it, or may stay in the page cache (Linux before 6.2).
    pub write_back_limited: bool,
}

impl SlowDisk {
    /// Makes it in a directory on disk.
    pub fn new(parent: &Path, size: u64) -> Result<SlowDisk> {
        require_free(parent, size)?;
        let base = parent.join(format!("ondeck-bench-slow.{}", std::process::id()));
        make_directory(&base)?;
        let path = base.join("disk");
        let mut disk = SlowDisk { base, path, mounted: false, undo: Vec::new(), write_back_limited: false };
        make_directory(&disk.path)?;
        own_mounts()?;
        let image = disk.base.join("disk.img");
        File::create_new(&image)?.set_len(size)?;
        let device = output_of("losetup", &["--find", "--show", "--direct-io=on"], &image)?;
        let device = Path::new(device.trim());
        let mounted = disk.mount(device);
        // On a device in use this means: once it is unmounted.
        output_of("losetup", &["--detach"], device)?;
        disk.throttle(&mounted?)?;
        Ok(disk)
    }

    /// Gives the device's number.
    fn mount(&mut self, device: &Path) -> Result<String> {
        let options = ["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"];
        output_of("mkfs.ext4", &options, device)?;
        let none = CString::default();
        rustix::mount::mount(device, &self.path, "ext4", MountFlags::empty(), none.as_c_str())
            .context("cannot mount the slow disk")?;
        self.mounted = true;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o755))?;
        let name = device.file_name().context("a device without a name")?.to_string_lossy();
        let number = fs::read_to_string(format!("/sys/class/block/{name}/dev"))?;
        Ok(number.trim().to_owned())
    }

    /// Version 1 counts what the kernel writes back for nobody but the root group: the limit is that
    /// group's, on this one device, and this process goes there, with all that it starts.
    fn throttle(&mut self, number: &str) -> Result<()> {
        let mounts = fs::read_to_string("/proc/mounts")?;
        let root = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let blkio =
                fields.get(2) == Some(&"cgroup") && fields.get(3)?.split(',').any(|word| word == "blkio");
            blkio.then(|| PathBuf::from(fields[1]))
        });
        let root = root.context("the disk can't be slowed: there is no cgroup v1 with blkio here")?;
        let write = |file: &Path, text: &str| {
            fs::write(file, text).with_context(|| format!("cannot write to {}", file.display()))
        };
        write(&root.join("cgroup.procs"), &std::process::id().to_string())?;
        for way in ["read", "write"] {
            let file = root.join(format!("blkio.throttle.{way}_bps_device"));
            write(&file, &format!("{number} {RATE}"))?;
            self.undo.push((file, format!("{number} 0")));
        }
        let bdi = Path::new("/sys/class/bdi").join(number);
        let (strict, ratio) = (bdi.join("strict_limit"), bdi.join("max_ratio_fine"));
        if let (Ok(strict_before), Ok(ratio_before)) =
            (fs::read_to_string(&strict), fs::read_to_string(&ratio))
        {
            // The loop device outlives this process, and so would its limits.
            self.undo.push((strict.clone(), strict_before));
            self.undo.push((ratio, ratio_before));
            write(&strict, "1")?;
            write(&bdi.join("max_bytes"), &WRITE_BACK.to_string())?;
            self.write_back_limited = true;
        }
        Ok(())
    }

    pub fn label(&self) -> String {
        let limit = if self.write_back_limited {
            format!("at most {} of it wait in the page cache", ondeck_bench::size::show(WRITE_BACK))
        } else {
            "its write-back cache is not limited (Linux before 6.2)".to_owned()
        };
        format!(
            "{} on a loop device that cgroup v1 blkio holds to {} MB/s each way; {limit}",
            machine::filesystem(&self.path),
            RATE / 1_000_000
        )
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // Fast again first: what is left to write is written at the end of the mount.
        for (file, text) in self.undo.iter().rev() {
            if let Err(error) = fs::write(file, text) {
                eprintln!("cannot write to {}: {error}", file.display());
            }
        }
        if self.mounted
            && let Err(error) = rustix::mount::unmount(&self.path, UnmountFlags::DETACH)
        {
            eprintln!("cannot unmount {}: {error}", self.path.display());
        }
        if let Err(error) = scratch::remove(&self.base) {
            eprintln!("{error:#}");
        }
    }
}
