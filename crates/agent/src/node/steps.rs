//! Building: a step of a RAM disk that is known, or the beginning of one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_api::host::since_boot_ms;
use ondeck_api::wire::{Allocated, Refusal, RefusalCode, Step, StepDone, StepRequest};
use ondeck_core::{Bytes, Epoch, Layout, NodeName, RamDiskId};
use ondeck_ramdisk::device::RAM;
use ondeck_ramdisk::{EngineError, RuntimeDir, Secret, engine};

use super::ending::way_out;
use super::{LONGEST, Node, RamDiskTable, failed, fenced, refusal};
use crate::ramdisk::{self, RamDisk};
use crate::record::{self, RamDiskRecord};

impl Node {
    /// Does one step of building a RAM disk.
    ///
    /// # Errors
    /// [`Refusal`], in words for whoever builds it.
    pub fn step(
        &self,
        id: &RamDiskId,
        request: StepRequest,
        secret: Option<Secret>,
    ) -> Result<StepDone, Refusal> {
        let began = Instant::now();
        let until = began + Duration::from_millis(request.deadline_ms).min(LONGEST);
        if request.layout.id != *id {
            return Err(refusal(RefusalCode::Malformed, "the request's path and body name two RAM disks"));
        }
        let found = match request.step {
            Step::Allocate | Step::Mount => self.find_or_begin(&request, secret)?,
            _ => self.find(id)?,
        };
        let known = found.record().layout.number;
        if known != request.layout.number && known != 0 && request.layout.number != 0 {
            let message =
                format!("there is another RAM disk {id} on {}, which somebody else has built", self.name);
            return Err(refusal(RefusalCode::Conflict, message));
        }
        if matches!(request.step, Step::Mount | Step::Start(_)) {
            // Now the addresses and ports of all servers are known.
            let learned = |record: &mut RamDiskRecord| {
                let known = std::mem::replace(&mut record.layout, request.layout);
                if record.layout.number == 0 {
                    // A scheduler's journal may have kept it in the format of the former version.
                    (record.layout.number, record.layout.job) = (known.number, known.job);
                }
            };
            found.note(learned).map_err(|error| failed(&error))?;
        }
        let rules = self.rules();
        found
            .step(&request.step, &self.name, &rules.capacity, &rules.overmounts, until)
            .map_err(|error| failed(&error))?;
        if request.step == Step::Unmount && !found.record().server {
            self.leave(&found)?;
        }
        let allocated = matches!(request.step, Step::Allocate)
            .then(|| Allocated { address: self.storage_address, ports: found.record().ports });
        let stopped_ms = matches!(request.step, Step::Thaw)
            .then(|| found.stopped_for().map_or(0, |stopped| stopped.as_millis() as u64));
        Ok(StepDone { seconds: began.elapsed().as_secs_f64(), allocated, stopped_ms })
    }

    /// Forgets a RAM disk of which this node had the client alone, so that it may come back: a later step may mount it
    /// again, which is refused after destroying it.
    pub(super) fn leave(&self, found: &Arc<RamDisk>) -> Result<(), Refusal> {
        self.remove(found)?;
        let mut known = self.known();
        let id = found.id();
        if known.epochs.get(&id.name) == Some(&id.epoch) {
            // Earlier ones stay refused.
            known.epochs.insert(id.name.clone(), Epoch(id.epoch.0.saturating_sub(1)));
            self.save_epochs(&mut known);
        }
        Ok(())
    }

    /// Begins a new RAM disk here, or a new part in one that is known, and promises what it needs.
    fn find_or_begin(&self, request: &StepRequest, secret: Option<Secret>) -> Result<Arc<RamDisk>, Refusal> {
        let layout = &request.layout;
        check_layout(layout)?;
        let id = &layout.id;
        let allocate = request.step == Step::Allocate;
        let me = layout.server_on(&self.name);
        if allocate && me.is_none() {
            let message = format!("{} is not among the servers of {id}", self.name);
            return Err(refusal(RefusalCode::Malformed, message));
        }
        // From here on nobody else is promised anything.
        let mut known = self.known();
        if let Some(found) = known.ramdisks.get(&id.name) {
            return match found.id().epoch {
                epoch if epoch == id.epoch => Ok(Arc::clone(found)),
                epoch if epoch > id.epoch => Err(fenced(id, epoch)),
                epoch if found.record().guarded => Err(refusal(
                    RefusalCode::Conflict,
                    format!(
                        "there is a RAM disk {} on {} already (epoch {epoch}), which may hold results; {}",
                        id.name,
                        self.name,
                        way_out(&found.record().layout)
                    ),
                )),
                epoch => Err(refusal(
                    RefusalCode::Conflict,
                    format!(
                        "there is a RAM disk {} on {} already (epoch {epoch}); destroy it first, or take another name",
                        id.name, self.name
                    ),
                )),
            };
        }
        if let Some(newest) = known.epochs.get(&id.name)
            && *newest >= id.epoch
        {
            return Err(fenced(id, *newest));
        }
        let secret = secret.ok_or_else(|| {
            refusal(RefusalCode::Malformed, "the request brings no secret for the RAM disk")
        })?;
        let (mut promised, mut ports) = (BTreeMap::new(), Vec::new());
        if allocate && let Some(me) = me {
            promised = self.promise(&known, layout, me).map_err(|error| failed(&error))?;
            ports = self.reserve_ports(&mut known, engine(layout.engine).ports(layout, me))?;
        }
        let runtime_dir = RuntimeDir::open(&self.state, id.clone()).map_err(|error| {
            failed(&EngineError::io("make", &self.state.join("ramdisks").join(id.name.as_str()), error))
        })?;
        let record = RamDiskRecord {
            version: record::VERSION,
            layout: layout.clone(),
            server: allocate,
            promised,
            ports,
            shown: Vec::new(),
            overmounts: Vec::new(),
            whole: false,
            ran_full: false,
            complete: false,
            settled: false,
            guarded: false,
            first_view: None,
            lease_until_ms: since_boot_ms() + request.lease_ms.min(LONGEST.as_millis() as u64),
        };
        ramdisk::found(&runtime_dir, &record, &secret).map_err(|error| {
            // Nothing is mounted in it yet.
            let _ = std::fs::remove_dir_all(runtime_dir.dir());
            failed(&error)
        })?;
        known.epochs.insert(id.name.clone(), id.epoch);
        self.save_epochs(&mut known);
        let begun = Arc::new(RamDisk::new(runtime_dir, record, secret));
        begun.hold_ports(self.storage_address);
        known.ramdisks.insert(id.name.clone(), Arc::clone(&begun));
        Ok(begun)
    }

    fn promise(
        &self,
        known: &RamDiskTable,
        layout: &Layout,
        me: usize,
    ) -> Result<BTreeMap<String, Bytes>, EngineError> {
        let share = layout.servers[me].share;
        let rules = self.rules();
        let needs = rules.capacity.needs(layout, me, share)?;
        let promises: Vec<_> = known.ramdisks.values().map(|ramdisk| ramdisk.promise()).collect();
        let devices = rules
            .capacity
            .report(&promises)
            .map_err(|error| EngineError::io("read", Path::new("/proc/meminfo"), error))?;
        for (device, needed) in &needs {
            let free = devices.get(device).map(|report| report.free).unwrap_or_default();
            if *needed > free {
                let device = if device == RAM { "RAM".to_owned() } else { format!("the device `{device}`") };
                return Err(EngineError::TooLarge { device, share, needed: *needed, free });
            }
        }
        Ok(needs)
    }

    /// Ports in a row that nobody listens on. They go round, so that a port that was given back is not given away at
    /// once.
    fn reserve_ports(&self, known: &mut RamDiskTable, count: usize) -> Result<Vec<u16>, Refusal> {
        let (first, last) = (*self.ports.start(), *self.ports.end());
        let taken: BTreeSet<u16> =
            known.ramdisks.values().flat_map(|ramdisk| ramdisk.record().ports).collect();
        let is_free =
            |port: u16| !taken.contains(&port) && TcpListener::bind((self.storage_address, port)).is_ok();
        let mut row: Vec<u16> = Vec::new();
        // Once round, and so far beyond that a row over the end of the last look is found.
        for _ in 0..self.ports.len() + count {
            if row.len() == count {
                break;
            }
            let port = known.next_port;
            known.next_port = if port == last { first } else { port + 1 };
            if port == first || !is_free(port) {
                row.clear();
            }
            if is_free(port) {
                row.push(port);
            }
        }
        if row.len() < count {
            return Err(refusal(
                // Any user may listen there: that is no failure of the node.
                RefusalCode::Conflict,
                format!(
                    "no {count} free TCP ports in a row on {} between {first} and {last}; see server_ports in the \
                     configuration",
                    self.storage_address
                ),
            ));
        }
        Ok(row)
    }
}

fn check_layout(layout: &Layout) -> Result<(), Refusal> {
    let malformed = |message: String| Err(refusal(RefusalCode::Malformed, message));
    if layout.servers.is_empty() {
        return malformed(format!("{} has no servers", layout.id));
    }
    let names: BTreeSet<&NodeName> = layout.servers.iter().map(|server| &server.node).collect();
    if names.len() != layout.servers.len() {
        return malformed(format!("{} names a server twice", layout.id));
    }
    if layout.servers.iter().any(|server| server.share == Bytes::ZERO) {
        return malformed(format!("{} has a server without a byte", layout.id));
    }
    engine(layout.engine).accepts(layout).map_err(|error| failed(&error))
}
