//! CephFS: one monitor and one metadata server on the first node, an OSD on every node, ceph-fuse on the clients.
//!
//! Files are striped over all nodes in objects of 4 MiB, so one large file written by everybody uses all of them. On a
//! RAM device the OSDs keep their objects in their own memory (memstore); on a directory's device they use BlueStore
//! on a file of it. With a metadata device of its own each node has two OSDs, and the pools are told apart by rules.
//!
//! Nothing is asked of a cluster that is there already: fsid, keys and maps follow from the RAM disk's secret, so every
//! node can write its own part without being told. All daemons keep to the RAM disk's runtime directory and to its ports.

use std::path::Path;
use std::process::Command;

use base64::Engine as _;
use ondeck_core::{Bytes, EngineKind, Layout};

use super::{Build, DATA_DEVICE, Engine, METADATA_DEVICE, On, Phase, View, listens};
use crate::device::RAM;
use crate::secret::uuid_text;
use crate::{EngineError, Secret};

pub(super) struct Ceph;

/// What sets the cluster up: one process with one connection, where each call of `ceph` would start anew.
const SET_UP: &str = include_str!("ceph_set_up.py");

const PYTHON: &str = "/usr/bin/python3";

/// An OSD listens on one port for clients, one for other OSDs and two for heartbeats.
const PORTS_OF_OSD: usize = 4;

/// The monitor's and the metadata server's.
const PORTS_OF_FIRST: usize = 2;

/// Measured: docs/engines.md, "What an engine needs".
const OSD_MEMORY: Bytes = Bytes(96 << 20);
const MONITOR_AND_MDS_MEMORY: Bytes = Bytes(512 << 20);

/// RAM that a store in memory takes for its data, in percent of its share: objects are not spread evenly, what is stored
/// takes more than its bytes, and what was deleted is given back late and in pieces. The store itself knows no limit; the
/// filesystem's quota is the limit. Clients write through (`client_oc_max_dirty = 0`): gathered writes are counted late,
/// and a store keeps several times their bytes. `ondeck-bench ramdisk --part memory` compares.
const MEMORY_PERCENT: u64 = 240;

/// Room on a directory's device, in percent of the share. BlueStore must never be full: it would stop all.
const DEVICE_PERCENT: u64 = 140;

/// The directory of the cluster's filesystem that clients mount: it carries the quota, and is not the root, on which a
/// quota would not be kept.
const ROOT: &str = "/ramdisk";

/// The name of the filesystem in the cluster.
const FILESYSTEM: &str = "ondeck";

impl Engine for Ceph {
    fn kind(&self) -> EngineKind {
        EngineKind::Ceph
    }

    fn programs(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("ceph-mon", "ceph-mon"),
            ("ceph-osd", "ceph-osd"),
            ("ceph-mds", "ceph-mds"),
            ("ceph-fuse", "ceph-fuse"),
            ("osdmaptool", "ceph-common"),
            (PYTHON, "python3-cephfs"),
        ]
    }

    fn accepts(&self, layout: &Layout) -> Result<(), EngineError> {
        if layout.replicas != 1 {
            return Err(EngineError::Refused(
                "the ceph engine keeps one copy; for two use --engine gluster --replicas 2".into(),
            ));
        }
        if layout.metadata_device.as_deref() == Some(layout.device.as_str()) {
            return Err(EngineError::Refused("data and metadata are on the same device anyway".into()));
        }
        Ok(())
    }

    fn smallest_share(&self) -> Bytes {
        Bytes(128 << 20)
    }

    fn device_size(&self, share: Bytes) -> Bytes {
        Bytes(share.0 / 100 * DEVICE_PERCENT + BLUESTORE_OWN)
    }

    fn metadata_size(&self, layout: &Layout, share: Bytes) -> Bytes {
        match layout.metadata_device.as_deref() {
            // Its store holds it in its own memory.
            Some(RAM) | None => Bytes::ZERO,
            Some(_) => Bytes(metadata_bytes(share) + BLUESTORE_OWN),
        }
    }

    fn uses_device(&self, layout: &Layout) -> bool {
        layout.device != RAM
    }

    fn process_memory(&self, layout: &Layout, server: usize, share: Bytes) -> Bytes {
        let mut sum = OSD_MEMORY.0;
        if layout.device == RAM {
            sum += share.0 / 100 * MEMORY_PERCENT;
        } else {
            sum += BLUESTORE_MEMORY;
        }
        match layout.metadata_device.as_deref() {
            Some(RAM) => sum += OSD_MEMORY.0 + metadata_bytes(share),
            Some(_) => sum += OSD_MEMORY.0 + BLUESTORE_MEMORY,
            None => {}
        }
        if server == 0 {
            sum += MONITOR_AND_MDS_MEMORY.0;
        }
        Bytes(sum)
    }

    fn ports(&self, layout: &Layout, server: usize) -> usize {
        stores(layout).len() * PORTS_OF_OSD + if server == 0 { PORTS_OF_FIRST } else { 0 }
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase { name: "monitor and stores", on: On::Every }, Phase { name: "filesystem", on: On::First }]
    }

    fn start(&self, phase: usize, build: &Build) -> Result<(), EngineError> {
        let (me, server) = build.server()?;
        if phase == 1 {
            return set_up(build);
        }
        if build.runtime_dir.running(&format!("osd.{}", osd_id(build.layout, me, 0))).is_some() {
            return Ok(());
        }
        write_configuration(build)?;
        if me == 0 {
            start_monitor(build)?;
        }
        for (index, store) in stores(build.layout).iter().enumerate() {
            let id = osd_id(build.layout, me, index);
            let first = if me == 0 { PORTS_OF_FIRST } else { 0 } + index * PORTS_OF_OSD;
            start_osd(build, id, store, &server.ports[first..first + PORTS_OF_OSD])?;
        }
        Ok(())
    }

    fn serves(&self, phase: usize, build: &Build) -> Result<bool, EngineError> {
        let (me, server) = build.server()?;
        for index in 0..stores(build.layout).len() {
            build.runtime_dir.must_run(&format!("osd.{}", osd_id(build.layout, me, index)))?;
        }
        if me == 0 {
            build.runtime_dir.must_run("mon")?;
            if phase == 1 {
                // Its set-up has waited for it.
                build.runtime_dir.must_run("mds")?;
            }
            return listens(server.address, server.ports[0]);
        }
        Ok(true)
    }

    fn mount(&self, build: &Build, at: &Path) -> Result<(), EngineError> {
        if build.me.is_none() {
            write_configuration(build)?;
        }
        let mut command = Command::new("ceph-fuse");
        command
            .args(["-f", "-n", "client.job", "--client_fs", FILESYSTEM, "-r", ROOT])
            .arg("-c")
            .arg(conf(build));
        command.arg("-o").arg(format!("nosuid,nodev,allow_other,fsname=ondeck:{}", build.layout.id));
        command.arg(at);
        build.runtime_dir.start("client", command)?;
        build.runtime_dir.wait(build.until, "ceph-fuse to mount", || {
            build.runtime_dir.must_run("client")?;
            let mounted = crate::mounts::mounted()
                .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?;
            Ok(mounted.iter().any(|mount| mount.at == at).then_some(()))
        })
    }

    fn looks_before_lost(&self) -> u32 {
        // Some four seconds: it is asked over the network, and Ceph hides nothing meanwhile, it only waits.
        7
    }

    fn view(&self, build: &Build) -> Result<View, EngineError> {
        // A client has no connection to a server that it did not need lately, so the servers are asked. Without the
        // monitor or one store everything that needs it waits for ever.
        let mut view = View::default();
        let answers: Vec<Result<bool, EngineError>> = std::thread::scope(|scope| {
            let asked: Vec<_> = build
                .layout
                .servers
                .iter()
                .enumerate()
                .map(|(index, server)| {
                    scope.spawn(move || {
                        let osd = if index == 0 { PORTS_OF_FIRST } else { 0 };
                        let first = if index == 0 { &server.ports[..1] } else { &[] };
                        for port in first.iter().chain(&server.ports[osd..=osd]) {
                            if !listens(server.address, *port)? {
                                return Ok(false);
                            }
                        }
                        Ok(true)
                    })
                })
                .collect();
            let panicked = || EngineError::Check("a look at the servers: its thread panicked".into());
            asked.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
        });
        for (server, answers) in build.layout.servers.iter().zip(answers) {
            if !answers? {
                view.lost.push(server.node.clone());
            }
        }
        Ok(view)
    }
}

/// Space that BlueStore takes for itself: its log, its database, its allocation units. With less, an OSD of a small share
/// starts nearly full, and does not come up.
const BLUESTORE_OWN: u64 = 1 << 30;

/// RAM that an OSD with BlueStore takes for its caches.
const BLUESTORE_MEMORY: u64 = 512 << 20;

/// Room for metadata: a sixteenth of the data, for some kilobytes a file.
fn metadata_bytes(share: Bytes) -> u64 {
    (share.0 / 16).max(256 << 20)
}

/// One OSD of a node.
struct Store<'a> {
    device: &'a str,
    /// The name of its device in the runtime directory.
    device_name: &'static str,
    metadata: bool,
}

/// The OSDs of every node, in the order in which they are counted.
fn stores(layout: &Layout) -> Vec<Store<'_>> {
    let mut stores = vec![Store { device: &layout.device, device_name: DATA_DEVICE, metadata: false }];
    if let Some(device) = &layout.metadata_device {
        // Where the data lies in memory, the metadata's is the only device that the node was given.
        let device_name = if layout.device == RAM { DATA_DEVICE } else { METADATA_DEVICE };
        stores.push(Store { device, device_name, metadata: true });
    }
    stores
}

/// First all data stores, then all metadata stores, so that rules can name them by number.
fn osd_id(layout: &Layout, server: usize, store: usize) -> usize {
    store * layout.servers.len() + server
}

fn conf(build: &Build) -> std::path::PathBuf {
    build.runtime_dir.path("ceph.conf")
}

/// A cephx key: type 1 (AES), the time of its making, the length, 16 bytes; in base64.
fn cephx_key(secret: &Secret, entity: &str) -> String {
    let random = secret.derive(&format!("cephx {entity}"));
    let mut key = vec![1, 0];
    key.extend([0; 8]);
    key.extend([16, 0]);
    key.extend(&random[..16]);
    base64::engine::general_purpose::STANDARD.encode(key)
}

const MON_CAPS: &[(&str, &str)] = &[("mon", "allow *")];
const ADMIN_CAPS: &[(&str, &str)] =
    &[("mon", "allow *"), ("osd", "allow *"), ("mds", "allow *"), ("mgr", "allow *")];
const MDS_CAPS: &[(&str, &str)] =
    &[("mon", "allow profile mds"), ("osd", "allow *"), ("mds", "allow *"), ("mgr", "allow profile mds")];
const OSD_CAPS: &[(&str, &str)] =
    &[("mon", "allow profile osd"), ("osd", "allow *"), ("mgr", "allow profile osd")];
const JOB_CAPS: &[(&str, &str)] =
    &[("mon", "allow r"), ("mds", "allow rwp path=/ramdisk"), ("osd", "allow rw tag cephfs data=ondeck")];

fn keyring(secret: &Secret, entity: &str) -> String {
    format!("[{entity}]\n\tkey = {}\n", cephx_key(secret, entity))
}

fn keyring_with_caps(secret: &Secret, entity: &str, caps: &[(&str, &str)]) -> String {
    let caps: String = caps.iter().map(|(kind, caps)| format!("\tcaps {kind} = \"{caps}\"\n")).collect();
    keyring(secret, entity) + &caps
}

/// Writes ceph.conf and this node's keys.
fn write_configuration(build: &Build) -> Result<(), EngineError> {
    build.runtime_dir.subdirectory("keys")?;
    build.runtime_dir.subdirectory("run")?;
    let client = build.client_secret();
    build.runtime_dir.write_private("keys/client.job", keyring(&client, "client.job").as_bytes())?;
    if let Some(me) = build.me {
        for index in 0..stores(build.layout).len() {
            let entity = format!("osd.{}", osd_id(build.layout, me, index));
            let ring = keyring(build.secret, &entity);
            build.runtime_dir.write_private(&format!("keys/{entity}"), ring.as_bytes())?;
        }
        if me == 0 {
            for entity in ["mon.", "client.admin", "mds.a"] {
                let ring = keyring(build.secret, entity);
                build.runtime_dir.write_private(&format!("keys/{entity}"), ring.as_bytes())?;
            }
        }
    }
    build.runtime_dir.write_private("ceph.conf", configuration(build).as_bytes())?;
    Ok(())
}

fn configuration(build: &Build) -> String {
    let dir = build.runtime_dir.dir().display();
    let first = &build.layout.servers[0];
    let own = build.me.map_or(String::new(), |me| {
        let address = build.layout.servers[me].address;
        format!("public_addr = {address}\ncluster_addr = {address}\n")
    });
    let v6 = first.address.is_ipv6();
    let monitor = if v6 { format!("[{}]", first.address) } else { first.address.to_string() };
    // The debug levels are for memory and time: by default every daemon gathers detailed logs to dump in a crash.
    let quiet: String = [
        "mon",
        "osd",
        "mds",
        "ms",
        "auth",
        "paxos",
        "rocksdb",
        "monc",
        "mgr",
        "bluestore",
        "bdev",
        "bluefs",
        "client",
        "objecter",
        "objectcacher",
        "filestore",
        "mds_balancer",
        "mds_log",
        "journaler",
        "tp",
        "finisher",
        "heartbeatmap",
        "perfcounter",
        "asok",
        "crush",
        "context",
        "optracker",
        "throttle",
        "timer",
    ]
    .iter()
    .map(|part| format!("debug_{part} = 0/0\n"))
    .collect();
    format!(
        "[global]
fsid = {fsid}
mon_host = [v2:{monitor}:{port}/0]
mon_initial_members = a
{own}ms_bind_msgr1 = false
ms_bind_msgr2 = true
ms_bind_ipv4 = {v4}
ms_bind_ipv6 = {v6}
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
ms_mon_cluster_mode = crc
ms_mon_service_mode = crc
ms_mon_client_mode = crc
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {dir}/keys/$name
run_dir = {dir}/run
crash_dir = {dir}/run
admin_socket =
pid_file =
log_file =
log_to_file = false
log_to_stderr = false
err_to_stderr = true
clog_to_monitors = false
mon_cluster_log_file =
mon_cluster_log_to_file = false
log_max_recent = 100
debug_none = 0/0
{quiet}osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
osd_crush_chooseleaf_type = 0
[mon]
mon_data = {dir}/mon
paxos_propose_interval = 0.02
paxos_min_wait = 0.005
mon_tick_interval = 1
mon_osd_min_down_reporters = 1
mon_osd_reporter_subtree_level = osd
mon_osd_adjust_heartbeat_grace = false
mon_osd_down_out_interval = 0
mon_osd_report_timeout = 30
osd_heartbeat_grace = 4
mds_beacon_grace = 6
mon_warn_on_pool_no_redundancy = false
mon_data_avail_crit = 0
mon_data_avail_warn = 0
mgr_initial_modules =
mon_mgr_mkfs_grace = 1000000
[osd]
osd_crush_update_on_start = false
osd_class_update_on_start = false
osd_heartbeat_interval = 1
osd_heartbeat_grace = 4
osd_mon_heartbeat_interval = 5
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 2
osd_max_markdown_count = 1000
osd_failsafe_full_ratio = 10
bluestore_block_db_create = false
bluestore_block_wal_create = false
bluestore_bluefs_buffered_io = true
[mds]
mds_data = {dir}/mds.$id
admin_socket = mds.asok
mds_beacon_interval = 1
mds_beacon_grace = 6
mds_cache_memory_limit = 268435456
[client]
client_mount_timeout = 10
client_oc_max_dirty = 0
client_oc_target_dirty = 0
client_oc_size = 67108864
rados_mon_op_timeout = 10
client_try_dentry_invalidate = true
",
        fsid = uuid_text(build.client_secret().uuid("ceph fsid")),
        port = first.ports[0],
        v4 = !v6,
    )
}

fn start_monitor(build: &Build) -> Result<(), EngineError> {
    let server = &build.layout.servers[0];
    let mut ring = String::new();
    for (entity, caps) in [("mon.", MON_CAPS), ("client.admin", ADMIN_CAPS), ("mds.a", MDS_CAPS)] {
        ring += &keyring_with_caps(build.secret, entity, caps);
    }
    let osds = build.layout.servers.len() * stores(build.layout).len();
    for id in 0..osds {
        ring += &keyring_with_caps(build.secret, &format!("osd.{id}"), OSD_CAPS);
    }
    ring += &keyring_with_caps(&build.client_secret(), "client.job", JOB_CAPS);
    let ring = build.runtime_dir.write_private("mon.keyring", ring.as_bytes())?;
    build.runtime_dir.subdirectory("mon")?;
    build.runtime_dir.subdirectory("mds.a")?;

    // With a map that has all OSDs from the start, none has to be asked for.
    let map = build.runtime_dir.path("osdmap");
    let mut tool = Command::new("osdmaptool");
    tool.arg("-c").arg(conf(build)).args(["--createsimple", &osds.to_string()]).arg(&map);
    build.runtime_dir.run("osdmaptool", tool, build.until)?;
    let address = std::net::SocketAddr::new(server.address, server.ports[0]).to_string();
    let mon = |more: &[&str]| {
        let mut command = Command::new("ceph-mon");
        command.arg("-c").arg(conf(build)).args(["-i", "a", "--public-addr", &address]).args(more);
        command
    };
    let mut mkfs = mon(&["--mkfs"]);
    mkfs.arg("--keyring").arg(ring).arg("--osdmap").arg(&map);
    build.runtime_dir.run("mon mkfs", mkfs, build.until)?;
    build.runtime_dir.start("mon", mon(&["-f"]))?;

    let mut mds = Command::new("ceph-mds");
    let port = server.ports[1].to_string();
    // In the runtime directory, for its socket: the path of one may not be long.
    mds.args(["-f", "-i", "a", "-c"]).arg(conf(build)).current_dir(build.runtime_dir.dir());
    mds.args(["--ms-bind-port-min", &port, "--ms-bind-port-max", &port]);
    build.runtime_dir.start("mds", mds)?;
    Ok(())
}

fn start_osd(build: &Build, id: usize, store: &Store, ports: &[u16]) -> Result<(), EngineError> {
    let (_, server) = build.server()?;
    let role = format!("osd.{id}");
    let name = id.to_string();
    let bytes =
        if store.metadata { metadata_bytes(server.share) } else { server.share.0 / 100 * DEVICE_PERCENT };
    let data = if store.device == RAM {
        build.runtime_dir.subdirectory(&role)?
    } else {
        build.runtime_dir.subdirectory(&format!("{}/{role}", store.device_name))?
    };
    let osd = |more: &[&str]| {
        let mut command = Command::new("ceph-osd");
        command.arg("-c").arg(conf(build)).args(["-i", &name]).arg("--osd-data").arg(&data);
        if store.device == RAM {
            // Far from full: a full OSD would stop all writers, and whoever deletes.
            let most = (8 * bytes).to_string();
            command.args(["--osd-objectstore", "memstore", "--memstore-device-bytes", &most]);
        } else {
            command.args(["--osd-objectstore", "bluestore", "--bluestore-block-size"]);
            command.arg((bytes + BLUESTORE_OWN / 4 * 3).to_string());
            command.args(["--osd-memory-target", &BLUESTORE_MEMORY.max(896 << 20).to_string()]);
        }
        command.args(more);
        command
    };
    let uuid = uuid_text(build.secret.uuid(&format!("ceph osd {id}")));
    build.runtime_dir.run(&format!("{role} mkfs"), osd(&["--mkfs", "--osd-uuid", &uuid]), build.until)?;
    let (first, last) = (ports[0].to_string(), ports[ports.len() - 1].to_string());
    // Without a socket it would not answer `ceph tell` either, which shows its counters.
    let socket = format!("{role}.asok");
    let mut started = osd(&["-f", "--admin-socket", &socket]);
    started.args(["--ms-bind-port-min", &first, "--ms-bind-port-max", &last]);
    started.current_dir(build.runtime_dir.dir());
    build.runtime_dir.start(&role, started)?;
    Ok(())
}

/// Makes the pools and the filesystem, and waits until the metadata server serves it.
fn set_up(build: &Build) -> Result<(), EngineError> {
    let script = build.runtime_dir.write_private("set_up.py", SET_UP.as_bytes())?;
    let layout = build.layout;
    let nodes = layout.servers.len();
    // The one that the distribution built librados for, whatever PATH has.
    let mut command = Command::new(PYTHON);
    command.args(["-I"]).arg(script).arg(conf(build));
    command.args(["--filesystem", FILESYSTEM, "--nodes", &nodes.to_string(), "--root", ROOT]);
    // A little more than was asked for: the agents' check file lies there too.
    command.args(["--quota", &(layout.capacity().0 + (4 << 20)).to_string()]);
    // Small files take several times their bytes in the stores, which the quota on bytes does not count.
    command.args(["--files", &crate::device::files(layout.capacity()).to_string()]);
    if layout.metadata_device.is_some() {
        command.arg("--metadata-stores");
    }
    // It is told to end a little before it would be ended, so that it can say what it has waited for.
    let left = build.until.saturating_duration_since(std::time::Instant::now());
    command.args(["--seconds", &left.as_secs().saturating_sub(2).max(1).to_string()]);
    build.runtime_dir.run_beside(&["mon", "mds"], "set-up", command, build.until)?;
    Ok(())
}
