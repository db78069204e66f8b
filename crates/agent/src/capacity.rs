//! What can be promised: the same bytes to nobody twice, and none that the machine does not have.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ondeck_api::config::{AgentConfig, DeviceConfig};
use ondeck_api::wire::DeviceReport;
use ondeck_core::{Bytes, Layout};
use ondeck_ramdisk::device::{self, RAM};
use ondeck_ramdisk::engine::device_sizes;
use ondeck_ramdisk::memory::free_ram;
use ondeck_ramdisk::{Device, EngineError, engine};

/// RAM that stays with the operating system and the agent if the configuration names no other reserve: a sixteenth of
/// the machine, at least this much.
const LEAST_RESERVE: Bytes = Bytes(512 << 20);

/// The devices of a node.
pub struct Capacity {
    devices: BTreeMap<String, (Device, Bytes)>,
    reserve: Bytes,
}

impl Capacity {
    /// The devices of the configuration; RAM is always one of them.
    ///
    /// # Errors
    /// If the machine's RAM is not known, or a directory can't be used.
    pub fn new(config: &AgentConfig) -> std::io::Result<Capacity> {
        let total = machine_ram()?;
        let reserve = config.reserve.unwrap_or(LEAST_RESERVE.max(Bytes(total.0 / 16)));
        let lendable = total.saturating_sub(reserve);
        let mut devices = BTreeMap::new();
        devices.insert(RAM.to_owned(), (Device::Ram { preallocate: false }, lendable));
        for (name, device) in &config.device {
            let made = match device {
                DeviceConfig::Ram { capacity, preallocate } => (
                    Device::Ram { preallocate: *preallocate },
                    capacity.map_or(lendable, |capacity| capacity.min(lendable)),
                ),
                DeviceConfig::Dir { path, capacity } => {
                    if !path.is_dir() {
                        let why = format!("the device `{name}`: {} is not a directory", path.display());
                        return Err(std::io::Error::new(std::io::ErrorKind::NotADirectory, why));
                    }
                    (Device::Dir { path: path.clone() }, *capacity)
                }
            };
            devices.insert(name.clone(), made);
        }
        Ok(Capacity { devices, reserve })
    }

    /// The device of this name.
    ///
    /// # Errors
    /// [`EngineError::Refused`] if this node has none.
    pub fn device(&self, name: &str) -> Result<&Device, EngineError> {
        self.devices.get(name).map(|(device, _)| device).ok_or_else(|| {
            let known: Vec<&str> = self.devices.keys().map(String::as_str).collect();
            EngineError::Refused(format!("this node has no device `{name}`; it has: {}", known.join(", ")))
        })
    }

    /// The directories of all devices that are one.
    pub fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.devices.values().filter_map(|(device, _)| match device {
            Device::Dir { path } => Some(path),
            Device::Ram { .. } => None,
        })
    }

    /// What a server with this number needs of each device of its node.
    ///
    /// # Errors
    /// [`EngineError::Refused`] if the node has no such device.
    pub fn needs(
        &self,
        layout: &Layout,
        server: usize,
        share: Bytes,
    ) -> Result<BTreeMap<String, Bytes>, EngineError> {
        let engine = engine(layout.engine);
        let mut needs = BTreeMap::new();
        let mut add = |device: &str, bytes: Bytes| {
            let sum: &mut Bytes = needs.entry(device.to_owned()).or_default();
            *sum = sum.saturating_add(bytes);
        };
        add(RAM, engine.process_memory(layout, server, share));
        for (name, size) in device_sizes(engine, layout, share) {
            match self.device(name)? {
                ram @ Device::Ram { .. } => add(RAM, ram.ram(size)),
                Device::Dir { .. } => add(name, device::image_bytes(size)),
            }
        }
        Ok(needs)
    }

    /// What can be promised of each device, given what was promised and how much of that is in use already.
    ///
    /// # Errors
    /// If the free RAM is not known.
    pub fn report(&self, promises: &[Promise]) -> std::io::Result<BTreeMap<String, DeviceReport>> {
        let available = free_ram()?.usable();
        let sum = |of: &dyn Fn(&Promise) -> Bytes| {
            promises.iter().fold(Bytes::ZERO, |sum, promise| sum.saturating_add(of(promise)))
        };
        let mut reports = BTreeMap::new();
        for (name, (device, capacity)) in &self.devices {
            let of_device = |promise: &Promise| promise.promised.get(name).copied().unwrap_or_default();
            let promised = sum(&of_device);
            let (kind, there) = match device {
                Device::Ram { .. } => {
                    // What was promised and not used yet still looks free to the kernel.
                    let unfilled = sum(&|promise| of_device(promise).saturating_sub(promise.ram_used));
                    ("ram", available.saturating_sub(unfilled).saturating_sub(self.reserve))
                }
                Device::Dir { path } => {
                    // Images are allocated when they are made, so they no longer count as free.
                    let unmade =
                        sum(&|promise| if promise.devices_made { Bytes::ZERO } else { of_device(promise) });
                    ("dir", free_bytes(path).saturating_sub(unmade))
                }
            };
            let free = capacity.saturating_sub(promised).min(there);
            let report = DeviceReport { kind: kind.to_owned(), capacity: *capacity, promised, free };
            reports.insert(name.clone(), report);
        }
        Ok(reports)
    }
}

/// What a RAM disk was promised, and what it uses.
#[derive(Clone, Debug, Default)]
pub struct Promise {
    /// The bytes of each device.
    pub promised: BTreeMap<String, Bytes>,
    /// RAM in its devices and processes.
    pub ram_used: Bytes,
    /// Whether its devices have been made.
    pub devices_made: bool,
}

/// The machine's RAM.
///
/// # Errors
/// If /proc/meminfo can't be read.
pub fn machine_ram() -> std::io::Result<Bytes> {
    let info = rustix::system::sysinfo();
    Ok(Bytes(info.totalram.saturating_mul(u64::from(info.mem_unit.max(1)))))
}

fn free_bytes(path: &std::path::Path) -> Bytes {
    rustix::fs::statvfs(path).map_or(Bytes::ZERO, |stat| Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity(text: &str) -> Capacity {
        let config = ondeck_api::Config::parse(text, std::path::Path::new("test")).unwrap();
        Capacity::new(&config.agent).unwrap()
    }

    #[test]
    fn what_was_promised_is_not_free_whether_it_is_used_or_not() {
        let capacity =
            capacity("[agent]\nreserve = \"1MiB\"\n[agent.device.ram]\nkind = \"ram\"\ncapacity = \"64MiB\"");
        let free = |promises: &[Promise]| capacity.report(promises).unwrap()["ram"].free;
        assert_eq!(free(&[]), Bytes(64 << 20));
        let mut promise = Promise::default();
        promise.promised.insert("ram".into(), Bytes(60 << 20));
        assert_eq!(free(std::slice::from_ref(&promise)), Bytes(4 << 20));
        promise.ram_used = Bytes(60 << 20);
        assert_eq!(free(&[promise.clone(), promise]), Bytes::ZERO);
    }

    #[test]
    fn ram_that_the_machine_does_not_have_is_not_lent_whatever_the_configuration_says() {
        let capacity = capacity("[agent.device.ram]\nkind = \"ram\"\ncapacity = \"1000T\"");
        let report = &capacity.report(&[]).unwrap()["ram"];
        assert!(report.free < machine_ram().unwrap() && report.capacity < machine_ram().unwrap());
    }

    #[test]
    fn a_directory_that_is_missing_is_refused() {
        let config = "[agent.device.ssd]\nkind = \"dir\"\npath = \"/no/such\"\ncapacity = \"1G\"";
        let config = ondeck_api::Config::parse(config, std::path::Path::new("test")).unwrap();
        assert!(Capacity::new(&config.agent).err().unwrap().to_string().contains("/no/such"));
    }
}
