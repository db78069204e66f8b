//! What fits on the nodes of a RAM disk.

use ondeck_api::wire::NodeReport;
use ondeck_core::allocation::largest_share;
use ondeck_core::{Bytes, Layout};
use ondeck_ramdisk::device::RAM;
use ondeck_ramdisk::engine::{self, device_sizes};

/// Why a RAM disk does not fit on its nodes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoFit(String);

/// What a server of this layout needs of a device, as its node counts it.
fn need(layout: &Layout, report: &NodeReport, index: usize, device: &str, share: Bytes) -> Bytes {
    let engine = engine::engine(layout.engine);
    let mut need = Bytes::ZERO;
    if device == RAM {
        need = need.saturating_add(engine.process_memory(layout, index, share));
    }
    for (name, size) in device_sizes(engine, layout, share) {
        let kind = report.devices.get(name).map(|device| device.kind.as_str());
        match kind {
            Some("ram") if device == RAM => {
                let ram = ondeck_ramdisk::Device::Ram { preallocate: false };
                need = need.saturating_add(ram.ram(size));
            }
            Some("dir") if device == name => {
                need = need.saturating_add(ondeck_ramdisk::device::image_bytes(size));
            }
            _ => {}
        }
    }
    need
}

/// The devices that a layout uses.
fn used_devices(layout: &Layout) -> Vec<&str> {
    let mut used = vec![RAM, layout.device.as_str()];
    used.extend(layout.metadata_device.as_deref());
    used.sort_unstable();
    used.dedup();
    used
}

/// The largest share that every node can give, each out of no more than `promise`.
pub(crate) fn largest(layout: &Layout, reports: &[NodeReport], promise: Bytes) -> Result<Bytes, NoFit> {
    let mut least = Bytes(u64::MAX);
    for (index, report) in reports.iter().enumerate() {
        for device in used_devices(layout) {
            let free = report.devices.get(device).map(|device| device.free).unwrap_or_default().min(promise);
            // A device that takes none of the data does not limit the share.
            let limit = Bytes(1 << 62);
            let share = if need(layout, report, index, device, limit) <= free {
                limit
            } else {
                largest_share_of(layout, report, index, device, free)
            };
            least = least.min(share);
        }
    }
    if least < engine::engine(layout.engine).smallest_share().max(Bytes(1)) {
        let within =
            if promise < Bytes(u64::MAX) { format!(" in {promise} of each node") } else { String::new() };
        return Err(NoFit(format!(
            "nothing fits{within}: {}",
            reports.iter().map(|report| free_text(report, layout)).collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(least)
}

fn largest_share_of(layout: &Layout, report: &NodeReport, index: usize, device: &str, free: Bytes) -> Bytes {
    // The search is bounded by `free`; a need that grows slower than the share would allow more, which is no loss.
    largest_share(free, |share| need(layout, report, index, device, share))
}

fn free_text(report: &NodeReport, layout: &Layout) -> String {
    let devices: Vec<String> = used_devices(layout)
        .iter()
        .filter_map(|name| Some(format!("{} of {name}", report.devices.get(*name)?.free)))
        .collect();
    format!("{} has {} free", report.node, devices.join(" and "))
}

/// Refuses what does not fit, before anything is begun, and says what would.
pub(crate) fn fits(layout: &Layout, reports: &[NodeReport], share: Bytes) -> Result<(), NoFit> {
    for (index, report) in reports.iter().enumerate() {
        for device in used_devices(layout) {
            let Some(found) = report.devices.get(device) else {
                let known: Vec<&str> = report.devices.keys().map(String::as_str).collect();
                return Err(NoFit(format!(
                    "{} has no device `{device}`; it has: {}",
                    report.node,
                    known.join(", ")
                )));
            };
            let needed = need(layout, report, index, device, share);
            if needed > found.free {
                let most = largest(layout, reports, Bytes(u64::MAX)).map(|share| {
                    let raw = u128::from(share.0) * layout.servers.len() as u128
                        / u128::from(layout.replicas.max(1));
                    format!(
                        "; at most {} fit on these nodes: --size {}MiB, or --size max",
                        Bytes(raw as u64),
                        raw >> 20
                    )
                });
                return Err(NoFit(format!(
                    "{} has {} of {device} free, and its share of {share} needs {needed} with what the engine takes{}",
                    report.node,
                    found.free,
                    most.unwrap_or_default()
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ondeck_core::allocation::{promise_for, share_within};
    use ondeck_core::{EngineKind, Owner, Server};

    /// The scheduler counts with this, and knows no engine.
    #[test]
    fn what_is_promised_for_a_share_is_enough_for_the_engine() {
        let report = serde_json::json!({
            "node": "r1", "version": "", "storage_address": "10.0.0.1", "missing": {}, "ramdisks": 0, "newest_epoch": 0,
            "memory": { "total": 0, "available": 0 },
            "devices": {
                "ram": { "kind": "ram", "capacity": 0, "promised": 0, "free": 0 },
                "ssd": { "kind": "dir", "capacity": 0, "promised": 0, "free": 0 },
            },
        });
        let report: NodeReport = serde_json::from_value(report).unwrap();
        for kind in [EngineKind::Gluster, EngineKind::Ceph, EngineKind::Tmpfs, EngineKind::Simulated] {
            let least = share_within(kind, promise_for(kind, Bytes::ZERO));
            assert!(least >= engine::engine(kind).smallest_share(), "{kind}: {least}");
            for (device, servers) in [("ram", 1), ("ram", 3), ("ssd", 2)] {
                for mib in [1, 16, 100, 1000, 10_000, 100_000, 10_000_000] {
                    // Its stores on a directory keep a GiB for themselves.
                    if kind == EngineKind::Ceph && device == "ssd" && mib < 1000 {
                        continue;
                    }
                    let share = Bytes(mib << 20).max(engine::engine(kind).smallest_share());
                    let server = Server {
                        node: report.node.clone(),
                        address: report.storage_address,
                        ports: Vec::new(),
                        share,
                    };
                    let layout = Layout {
                        id: "a@1".parse().unwrap(),
                        engine: kind,
                        owner: Owner { uid: 1, gid: 1 },
                        replicas: 1,
                        device: device.into(),
                        metadata_device: None,
                        servers: vec![server; servers],
                        clients: Vec::new(),
                        simulation: None,
                        number: 1,
                        job: None,
                    };
                    for index in 0..servers {
                        let needed = need(&layout, &report, index, device, share);
                        let promised = promise_for(kind, share);
                        assert!(needed <= promised, "{kind} on {device}, {share}: {needed} of {promised}");
                    }
                }
            }
        }
    }
}
