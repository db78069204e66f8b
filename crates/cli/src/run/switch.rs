//! The switch from input to output (the thesis, section 3.2.2).

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_ramdisk::mounts;
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::Slot;
use ondeck_staging::merge_back::{Before, Mechanism, clock_of};

use super::plan::Plan;
use super::shared::{Shared, lock};

/// The thesis's switch: after the delay the input is unmounted, the RAM disk emptied, and the output mounted.
pub struct Switch {
    at: Option<Instant>,
    unmounted: Vec<usize>,
}

impl Switch {
    /// Armed if the plan has a switch.
    pub fn new(plan: &Plan) -> Switch {
        Switch {
            at: plan.delay.filter(|_| plan.switches()).map(|delay| Instant::now() + delay),
            unmounted: Vec::new(),
        }
    }

    /// Does what is due. Returns the outputs that are in RAM from now on, or why they will not be.
    pub fn advance(
        &mut self,
        shared: &Shared,
        namespaces: &Namespaces,
    ) -> Option<Result<Vec<(usize, Mechanism)>, String>> {
        if Instant::now() < self.at? {
            return None;
        }
        for (index, directory) in shared.plan.directories.iter().enumerate().rev() {
            if !directory.input || directory.output || self.unmounted.contains(&index) {
                continue;
            }
            let done = namespaces.inside(|| match mounts::unmount_unless_busy(&directory.path) {
                Ok(true) => Ok(()),
                Ok(false) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
                Err(error) => Err(error),
            });
            match done {
                Ok(()) => self.unmounted.push(index),
                // Files are open: the switch waits (the thesis, section 3.2.2).
                Err(_) => {
                    self.at = Some(Instant::now() + Duration::from_secs(1));
                    return None;
                }
            }
        }
        self.at = None;
        Some(self.switch(shared, namespaces))
    }

    fn switch(&self, shared: &Shared, namespaces: &Namespaces) -> Result<Vec<(usize, Mechanism)>, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            format!(
                "the switch after the delay did not take place ({what}: {error}); the program goes on writing to disk"
            )
        };
        let ram_disk = shared.dir.join("ramdisk");
        for index in &self.unmounted {
            let slot = ram_disk.join(Slot::of_run(*index).name());
            namespaces
                .inside(|| {
                    // The read-only mount of the input over itself goes first.
                    mounts::detach(&slot)?;
                    fs::remove_dir_all(&slot)
                })
                .map_err(|error| failed("emptying the RAM disk", &error))?;
        }
        let mut switched = Vec::new();
        for (index, directory) in shared.plan.directories.iter().enumerate() {
            if !directory.output || directory.input {
                continue;
            }
            let since =
                clock_of(directory.disk.as_fd()).map_err(|error| failed("looking at the target", &error))?;
            // The program has written to it since the start. If it removes something at this moment, what was there at
            // the start has to do: it tells the program's doing from others' less exactly, and loses nothing.
            let before = match Before::of(directory.disk.as_fd(), &directory.nested) {
                Ok(before) => Arc::new(before),
                Err(_) => directory.before.clone(),
            };
            let output = shared
                .prepare_output(namespaces, index, Mechanism::Overlay, since, before)
                .map_err(|error| failed("preparing the output", &error))?;
            shared
                .mount_one(namespaces, index, Mechanism::Overlay)
                .map_err(|error| failed("mounting the output", &error))?;
            lock(&shared.outputs).push(Arc::new(output));
            switched.push((index, Mechanism::Overlay));
        }
        Ok(switched)
    }
}
