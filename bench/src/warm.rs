//! Memory that the host of a virtual machine has to give again.
//!
//! A virtual machine may report to its host what is free (*free page reporting*, of virtio_balloon). The host takes that, and gives it
//! again page by page when it is used: where this was seen, 3 GiB took 5.7 s after a pause, and 0.3 s at once (`ondeck-bench warm
//! 3221225472`). Then whoever runs first after a pause pays for it, whatever it does, and figures tell of the host. So before
//! each run as much memory as it will take is used and freed: within the two seconds until the next report, it is there.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::interrupt;
use crate::machine::memory;
use ondeck_bench::size::GIB;

/// virtio_balloon, by its number, and its feature to be told what is free.
const BALLOON: &str = "0x0005";
const REPORTING: usize = 5;

/// Whether this machine reports to a host what is free. What /sys does not show is no device that does.
pub fn is_reported() -> bool {
    let devices = fs::read_dir("/sys/bus/virtio/devices").into_iter().flatten().flatten();
    devices.map(|device| device.path()).any(|device| {
        let read = |name: &str| fs::read_to_string(device.join(name)).unwrap_or_default();
        read("device").trim() == BALLOON && read("features").as_bytes().get(REPORTING) == Some(&b'1')
    })
}

/// Has so many bytes of free memory be there, if they might not be: by a process of its own, as
/// [`measure_in_child`](crate::memcpy::measure_in_child) does.
pub fn warm(bytes: u64) -> Result<()> {
    if bytes == 0 || !is_reported() {
        return Ok(());
    }
    interrupt::check()?;
    // Nobody is to be pushed out of memory for it.
    let bytes = bytes.min(memory("MemFree").saturating_sub(GIB / 2));
    let warmed = Command::new(std::env::current_exe().context("cannot find this program")?)
        .args(["warm", &bytes.to_string()])
        .status()
        .context("cannot start what uses memory")?;
    interrupt::check()?;
    if !warmed.success() {
        bail!("memory could not be used: {warmed}");
    }
    Ok(())
}

/// Uses so many bytes of memory, which are free again when this process has ended.
pub fn use_memory(bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let length = usize::try_from(bytes).context("too much memory")?;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let start = unsafe {
        mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }
    .context("cannot map memory")?;
    for advice in [Advice::LinuxHugepage, Advice::LinuxPopulateWrite] {
        // SAFETY: the range is exactly the mapping made above, which nobody else knows of and which lives until this
        // process ends; populating it writes zeros.
        match unsafe { madvise(start, length, advice) } {
            // Where there are no huge pages, small ones are used.
            Err(_) if advice == Advice::LinuxHugepage => {}
            used => used.context("cannot use memory")?,
        }
    }
    Ok(())
}
