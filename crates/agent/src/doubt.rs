//! RAM disks that were completed here and, because their builder was killed in that moment, perhaps not elsewhere: whoever
//! is left in doubt when the lease is over asks the servers.

use std::sync::Arc;
use std::time::Duration;

use ondeck_api::host::since_boot_ms;
use ondeck_api::wire::Presence;
use ondeck_fleet::Fleet;

use crate::node::Node;
use crate::ramdisk::RamDisk;

/// How often it looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// How much later than here the lease may be over elsewhere.
const LATER: Duration = Duration::from_secs(2);

/// Looks again and again.
pub async fn look_after(node: Arc<Node>, fleet: Fleet) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        for ramdisk in node.ramdisks() {
            let over = ramdisk.record().lease_until_ms + LATER.as_millis() as u64;
            if ramdisk.is_in_doubt() && since_boot_ms() > over {
                ask(&node, &fleet, ramdisk).await;
            }
        }
    }
}

/// One of its servers that has nothing of it is enough; if all have all of it, it is whole. Whoever does not answer, or has
/// not come to an end with it, is asked again.
async fn ask(node: &Arc<Node>, fleet: &Fleet, ramdisk: Arc<RamDisk>) {
    let record = ramdisk.record();
    let others =
        record.layout.servers.iter().map(|server| &server.node).filter(|other| *other != node.name());
    let mut whole = true;
    for other in others {
        match fleet.has(ramdisk.id(), other).await {
            Ok(Presence::All) => {}
            Ok(Presence::Unfinished) => whole = false,
            Ok(Presence::Nothing) => {
                let (node, ramdisk, other) = (Arc::clone(node), Arc::clone(&ramdisk), other.clone());
                let removed = tokio::task::spawn_blocking(move || node.remove_part(&ramdisk, &other)).await;
                if let Err(error) = removed {
                    tracing::error!(%error, "the daemon has a defect");
                }
                return;
            }
            Err(error) => {
                tracing::debug!(ramdisk = %ramdisk.id(), %other, %error, "it is not known whether it was completed there");
                whole = false;
            }
        }
    }
    if whole && let Err(error) = ramdisk.note(|record| record.settled = true) {
        tracing::error!(ramdisk = %ramdisk.id(), %error, "can't keep that it is complete on all of its nodes");
    }
}
