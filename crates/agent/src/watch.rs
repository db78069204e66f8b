//! What an agent does unasked: it removes RAM disks that were never completed, says when a server has ended, and cuts
//! off clients that no longer see all files.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ondeck_core::RamDiskId;

use ondeck_api::host::since_boot_ms;

use crate::node::Node;
use crate::story;

/// How often it looks. A lost server must be seen within five seconds; a look costs less than a millisecond.
const INTERVAL: Duration = Duration::from_millis(500);

/// Looks again and again until it is told to stop.
pub fn watch(node: &Node, stop: &AtomicBool) {
    let mut said: BTreeMap<RamDiskId, Vec<String>> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let ramdisks = node.ramdisks();
        said.retain(|id, _| ramdisks.iter().any(|known| known.id() == id));
        // First what protects data, which does not wait for a filesystem; then what may take a second for each.
        for ramdisk in &ramdisks {
            let _of_job = story::of(ramdisk.id()).entered();
            ramdisk.guard(node.name());
            ramdisk.tidy(node.name());
        }
        for ramdisk in &ramdisks {
            let _of_job = story::of(ramdisk.id()).entered();
            let record = ramdisk.record();
            if !record.complete {
                if since_boot_ms() > record.lease_until_ms {
                    node.expire(ramdisk);
                }
                continue;
            }
            let faults = ramdisk.report(node.name()).faults;
            if ramdisk.is_ending() {
                continue;
            }
            let before = said.entry(ramdisk.id().clone()).or_default();
            for fault in faults.iter().filter(|fault| !before.contains(fault)) {
                tracing::error!(ramdisk = %ramdisk.id(), fault, "RAM disk is not whole");
            }
            *before = faults;
        }
        std::thread::sleep(INTERVAL);
    }
}
