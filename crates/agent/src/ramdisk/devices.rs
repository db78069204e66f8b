//! The devices that this node's server stores on.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_core::Bytes;
use ondeck_ramdisk::engine::{DATA_DEVICE, METADATA_DEVICE, device_sizes};
use ondeck_ramdisk::{Build, Device, EngineError, RuntimeDir, device, engine, mounts};

use super::RamDisk;
use crate::capacity::Capacity;
use crate::record::RamDiskRecord;

/// How long a device may be busy after its users have ended.
const RELEASING: Duration = Duration::from_secs(10);

impl RamDisk {
    pub(super) fn prepare(&self, build: &Build, capacity: &Capacity) -> Result<(), EngineError> {
        let (_, server) = build.server()?;
        let sizes = device_sizes(engine(build.layout.engine), build.layout, server.share);
        for (index, (device, size)) in sizes.into_iter().enumerate() {
            let name = [DATA_DEVICE, METADATA_DEVICE][index];
            if self.mounts_at(&self.runtime_dir.path(name))?.is_empty() {
                let inodes = engine(build.layout.engine).inodes(device::files(size));
                capacity.device(device)?.prepare(&self.runtime_dir, name, size, inodes, build.until)?;
            }
        }
        Ok(())
    }
}

pub(super) fn free_devices(
    runtime_dir: &RuntimeDir,
    record: &RamDiskRecord,
    capacity: &Capacity,
) -> Result<(), EngineError> {
    for (name, device) in [
        (DATA_DEVICE, Some(&record.layout.device)),
        (METADATA_DEVICE, record.layout.metadata_device.as_ref()),
    ] {
        let at = runtime_dir.path(name);
        empty(&at);
        // The processes are gone, but the kernel closes a dead process's files a moment after its memory is freed. Once
        // this unmount succeeds, the bytes are free.
        let until = Instant::now() + RELEASING;
        let mut nap = Duration::from_micros(500);
        loop {
            match mounts::unmount_unless_busy(&at) {
                Ok(true) => break,
                Ok(false) if Instant::now() < until => {
                    std::thread::sleep(nap);
                    nap = (nap * 2).min(Duration::from_millis(20));
                }
                Ok(false) => {
                    return Err(EngineError::Deadline {
                        what: format!("the device {} to be given back", at.display()),
                        waited: RELEASING,
                    });
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
                Err(error) => return Err(EngineError::io("unmount", &at, error)),
            }
        }
        let fallback = Device::Ram { preallocate: false };
        // A device that the configuration no longer has leaves an image, which the next start of the agent names.
        let device = device.and_then(|name| capacity.device(name).ok()).unwrap_or(&fallback);
        device.remove(runtime_dir, name)?;
    }
    Ok(())
}

/// Removes what is on a device. Another mount namespace may have a copy of its mount, which would keep the bytes for as
/// long as it lives.
fn empty(device: &Path) {
    if !mounts::mounted_below(device).is_ok_and(|mounts| mounts.iter().any(|mount| mount.at == device)) {
        return;
    }
    for entry in fs::read_dir(device).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        // What can't be removed goes with the unmount.
        let _ = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

/// What a device is used for at a moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceUse {
    /// What is stored on it.
    pub used: Bytes,
    /// Whether less than a hundredth of it is left, in bytes or in files.
    pub is_all_but_full: bool,
}

/// Whether less than a hundredth is left. A program that met the end has often removed its last file, or written a smaller one,
/// by the time somebody looks; and what does not fit as a whole leaves a little.
pub(super) fn is_all_but_full(of: u64, left: u64) -> bool {
    of > 0 && left < of / 100
}

/// What is stored on a device; nothing if it is not mounted.
pub(super) fn device_use(device: &Path) -> Result<Option<DeviceUse>, EngineError> {
    let mounts = mounts::mounted_below(device)
        .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
    if mounts.is_empty() {
        return Ok(None);
    }
    // Devices are served by this kernel and never hang.
    match rustix::fs::statvfs(device) {
        Ok(stat) => Ok(Some(DeviceUse {
            used: Bytes((stat.f_blocks - stat.f_bfree) * stat.f_frsize),
            is_all_but_full: is_all_but_full(stat.f_blocks, stat.f_bavail)
                || is_all_but_full(stat.f_files, stat.f_favail),
        })),
        // It was removed meanwhile.
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(EngineError::io("look at", device, error)),
    }
}
