//! Gluster's own brick and client processes on generated volfiles, without its management daemon.
//!
//! Files are distributed over the bricks by name, each whole on one of them; `replicas=2` keeps each on two. Clients
//! gather writes (write-behind) and nothing else: Gluster's caches cost more than they gain on RAM, and sharding is
//! wrong with several writers. The password of the volume is the only way in; there is no list of addresses.

use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ondeck_core::{Bytes, EngineKind, Layout, Server};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{Build, DATA_DEVICE, Engine, On, Phase, View, listens};
use crate::secret::uuid_text;
use crate::{EngineError, memory, tcp};

pub(super) struct Gluster;

/// Brick processes with their buffers; measured: docs/engines.md, "What an engine needs".
const BRICK_MEMORY: Bytes = Bytes(96 << 20);

/// How much write-behind gathers into one write. Of a write that a full brick took in part it has forgotten where in its buffer of
/// 128 KiB the rest begins, and what it appends then goes beyond the end: the client crashed, or hung. What a page holds does
/// not (docs/decisions/0047-a-full-gluster-says-so.md).
const GATHERED: &str = "4KB";

/// Memory of its own, mapped and never used, that a brick has when it has just started: the stacks of its threads.
const BRICK_MAPPED: u64 = 128 << 20;

/// The least that a brick may take beside that: the buffers of a few dozen clients that write as fast as they can.
const BRICK_LEAST: u64 = 256 << 20;

/// The most: a brick buffers up to 1 GiB for whoever connects and announces a message of that size, before it asks for the
/// secret, and so often as somebody connects.
const BRICK_MOST: u64 = 1 << 30;

/// How long the kernel of a client believes a name or an attribute that it was told.
const BELIEVED: Duration = Duration::from_secs(1);

impl Engine for Gluster {
    fn kind(&self) -> EngineKind {
        EngineKind::Gluster
    }

    fn programs(&self) -> &'static [(&'static str, &'static str)] {
        &[("glusterfsd", "glusterfs-server"), ("glusterfs", "glusterfs-client")]
    }

    fn accepts(&self, layout: &Layout) -> Result<(), EngineError> {
        let refuse = |text: String| Err(EngineError::Refused(text));
        if !(1..=2).contains(&layout.replicas) {
            return refuse(format!("gluster keeps 1 or 2 copies, not {}", layout.replicas));
        }
        if !layout.servers.len().is_multiple_of(layout.replicas as usize) {
            return refuse(format!(
                "{} nodes can't be paired for 2 copies; name an even number",
                layout.servers.len()
            ));
        }
        if layout.metadata_device.is_some() {
            return refuse(
                "gluster keeps metadata with the data; use --engine ceph for a metadata device".into(),
            );
        }
        Ok(())
    }

    fn smallest_share(&self) -> Bytes {
        Bytes(16 << 20)
    }

    fn inodes(&self, files: u64) -> u64 {
        // A name and a hard link by id for each file, and the directories of those links: at most 256 * 256.
        2 * files + files.min(1 << 16) + super::OWN_INODES
    }

    fn process_memory(&self, _layout: &Layout, _server: usize, _share: Bytes) -> Bytes {
        BRICK_MEMORY
    }

    fn ports(&self, _layout: &Layout, _server: usize) -> usize {
        1
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase { name: "bricks", on: On::Every }]
    }

    fn start(&self, _phase: usize, build: &Build) -> Result<(), EngineError> {
        let (_, server) = build.server()?;
        if build.runtime_dir.running("brick").is_some() {
            return Ok(());
        }
        let brick = build.runtime_dir.path(DATA_DEVICE);
        let internal = brick.join(".glusterfs");
        std::fs::create_dir_all(&internal).map_err(|error| EngineError::io("make", &internal, error))?;
        let volume = volume_id(build);
        rustix::fs::setxattr(&brick, "trusted.glusterfs.volume-id", &volume, rustix::fs::XattrFlags::empty())
            .map_err(|error| EngineError::io("set trusted.glusterfs.volume-id on", &brick, error))?;
        let volfile =
            build.runtime_dir.write_private("brick.vol", server_volfile(build, server, &brick).as_bytes())?;
        let mut command = Command::new("glusterfsd");
        // At a lower level than ERROR it would write the volfile, and the password in it, into its log.
        command.args(["--no-daemon", "--log-level=ERROR", "--log-file=/dev/stderr"]);
        command.arg("--volfile").arg(volfile);
        let most = most_memory(memory::total_ram().map_err(|error| {
            EngineError::io("tell the RAM of this machine by", Path::new("/proc/meminfo"), error)
        })?);
        // SAFETY: a system call only, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                let limit = Rlimit { current: Some(most), maximum: Some(most) };
                Ok(setrlimit(Resource::Data, limit)?)
            });
        }
        build.runtime_dir.start("brick", command)?;
        Ok(())
    }

    fn serves(&self, _phase: usize, build: &Build) -> Result<bool, EngineError> {
        build.runtime_dir.must_run("brick")?;
        let (_, server) = build.server()?;
        listens(server.address, server.ports[0])
    }

    fn out_of_date(&self) -> Duration {
        BELIEVED
    }

    fn mount(&self, build: &Build, at: &Path) -> Result<(), EngineError> {
        let volfile = build.runtime_dir.write_private("client.vol", client_volfile(build).as_bytes())?;
        let mut command = Command::new("glusterfs");
        command.args(["--no-daemon", "--log-level=ERROR", "--log-file=/dev/stderr"]);
        // Without auto-invalidation a client never sees that another one has rewritten a file in the same size.
        command.arg("--auto-invalidation=on");
        command.arg(format!("--attribute-timeout={}", BELIEVED.as_secs()));
        command.arg(format!("--entry-timeout={}", BELIEVED.as_secs()));
        // Without default_permissions the kernel would walk names that it has cached for one user on behalf of another.
        command.args(["--acl", "--fuse-mountopts=nosuid,nodev,default_permissions"]);
        command.arg(format!("--volfile-id={}", build.layout.id));
        command.arg(format!("--fs-display-name=ondeck:{}", build.layout.id));
        command.arg("--volfile").arg(volfile).arg(at);
        build.runtime_dir.start("client", command)?;
        let mut silence = Silence::default();
        build.runtime_dir.wait(build.until, "the Gluster client to mount", || {
            build.runtime_dir.must_run("client")?;
            let mounted = crate::mounts::mounted()
                .map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))?
                .iter()
                .any(|mount| mount.at == at);
            let connections = connections(build)?;
            let missing = |(server, inode): (_, &Option<u64>)| inode.is_none().then_some(server);
            let missing: Vec<&Server> =
                build.layout.servers.iter().zip(&connections).filter_map(missing).collect();
            silence.must_end(&missing)?;
            // Without every brick it would mount too, and show a part of the files.
            Ok((mounted && missing.is_empty()).then_some(()))
        })
    }

    fn view(&self, build: &Build) -> Result<View, EngineError> {
        let connections = connections(build)?;
        let copies = build.layout.replicas.max(1) as usize;
        let mut view = View::default();
        for (set, servers) in build.layout.servers.chunks(copies).enumerate() {
            let of_set = &connections[set * copies..(set * copies + servers.len())];
            let all_gone = of_set.iter().all(Option::is_none);
            for (server, connection) in servers.iter().zip(of_set) {
                match connection {
                    None if all_gone => view.lost.push(server.node.clone()),
                    None => view.degraded.push(server.node.clone()),
                    Some(_) => {}
                }
            }
        }
        if copies == 1 {
            // A connection that broke and came back hid files meanwhile. With copies, the other one was asked.
            let inodes: Vec<String> =
                connections.iter().map(|inode| inode.map_or("-".into(), |inode| inode.to_string())).collect();
            view.connections = inodes.join(" ");
        }
        Ok(view)
    }
}

/// The limit of a brick's own memory (`RLIMIT_DATA`), by the RAM of its node. What it stores is not in it: that is in files.
/// With no more to be had it refuses the connection whose message it is, and serves the others.
///
/// A quarter of what an agent leaves to the node, so that it takes more than a few bricks to take that, and they have not taken
/// what is lent.
fn most_memory(ram: Bytes) -> u64 {
    BRICK_MAPPED + (ram.0 / 64).clamp(BRICK_LEAST, BRICK_MOST)
}

/// How long nobody has answered at a brick that a new client waits for. A brick that has ended is never started again, so waiting
/// until the time is over would be in vain.
#[derive(Default)]
struct Silence {
    looked: Option<Instant>,
    /// Looks in a row at which one of them did not answer.
    looks: u32,
}

impl Silence {
    /// Between two looks, and before the first: a client connects within milliseconds.
    const PAUSE: Duration = Duration::from_secs(1);

    /// So many looks in a row make a server lost: one can miss it by a lost packet.
    const LOOKS: u32 = 3;

    /// Looks, if it is time, whether the bricks that the client has no connection to answer at all.
    ///
    /// # Errors
    /// One has not answered for several looks.
    fn must_end(&mut self, missing: &[&Server]) -> Result<(), EngineError> {
        if self.looked.get_or_insert_with(Instant::now).elapsed() < Self::PAUSE {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let mut silent = Vec::new();
        for server in missing {
            if !listens(server.address, server.ports[0])? {
                silent.push(server.node.as_str());
            }
        }
        self.looks = if silent.is_empty() { 0 } else { self.looks + 1 };
        if self.looks < Self::LOOKS {
            return Ok(());
        }
        let nodes = silent.join(", ");
        Err(EngineError::Check(format!("the client can't connect: the server on {nodes} does not answer")))
    }
}

/// For each server, the socket of the client's connection to its brick.
fn connections(build: &Build) -> Result<Vec<Option<u64>>, EngineError> {
    let servers = &build.layout.servers;
    let Some(pid) = build.runtime_dir.running("client") else { return Ok(vec![None; servers.len()]) };
    let established = tcp::established(pid).map_err(|error| {
        EngineError::io("read the connections of", Path::new(&format!("/proc/{pid}")), error)
    })?;
    let of = |server: &Server| established.get(&(server.address, server.ports[0]).into()).copied();
    Ok(servers.iter().map(of).collect())
}

fn volume_name(layout: &Layout) -> String {
    format!("/{}.{}", layout.id.name, layout.id.epoch)
}

fn volume_id(build: &Build) -> [u8; 16] {
    build.client_secret().uuid("gluster volume id")
}

fn credentials(build: &Build) -> (String, String) {
    let secret = build.client_secret();
    // The name is as secret as the password, and cheaper to be refused by.
    (secret.password("gluster user")[..32].to_owned(), secret.password("gluster password"))
}

/// Writes the volumes of a volfile, each on top of the ones before it.
struct Volfile(String);

impl Volfile {
    fn volume(&mut self, name: &str, kind: &str, options: &[(&str, &str)], below: &[&str]) {
        self.0 += &format!("volume {name}\n  type {kind}\n");
        for (key, value) in options {
            self.0 += &format!("  option {key} {value}\n");
        }
        if !below.is_empty() {
            self.0 += &format!("  subvolumes {}\n", below.join(" "));
        }
        self.0 += "end-volume\n";
    }
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv6() { "inet6" } else { "inet" }
}

fn server_volfile(build: &Build, server: &Server, brick: &Path) -> String {
    let uuid = uuid_text(volume_id(build));
    let name = volume_name(build.layout);
    let (user, password) = credentials(build);
    let (address, port) = (server.address.to_string(), server.ports[0].to_string());
    let directory = brick.display().to_string();
    let mut file = Volfile(String::new());
    file.volume(
        "posix",
        "storage/posix",
        &[
            ("directory", &directory),
            ("volume-id", &uuid),
            // The agent looks after the brick; all of the device is the job's.
            ("health-check-interval", "0"),
            ("reserve", "0"),
        ],
        &[],
    );
    file.volume("acl", "features/access-control", &[], &["posix"]);
    file.volume("locks", "features/locks", &[], &["acl"]);
    let mut top = "locks";
    if build.layout.replicas > 1 {
        // Notes what one copy missed, so that the other one heals it.
        let base = brick.join(".glusterfs/indices").display().to_string();
        let options = [
            ("index-base", base.as_str()),
            ("xattrop-dirty-watchlist", "trusted.afr.dirty"),
            ("xattrop-pending-watchlist", "trusted.afr.ondeck-"),
        ];
        file.volume("index", "features/index", &options, &[top]);
        top = "index";
    }
    file.volume("io-threads", "performance/io-threads", &[("thread-count", "8")], &[top]);
    file.volume(&name, "debug/io-stats", &[], &["io-threads"]);
    file.volume(
        "server",
        "protocol/server",
        &[
            ("transport-type", "tcp"),
            ("transport.address-family", family(server.address)),
            ("transport.socket.bind-address", &address),
            ("transport.socket.listen-port", &port),
            (&format!("auth.login.{name}.allow"), &user),
            (&format!("auth.login.{user}.password"), &password),
        ],
        &[&name],
    );
    file.0
}

fn client_volfile(build: &Build) -> String {
    let name = volume_name(build.layout);
    let (user, password) = credentials(build);
    let mut file = Volfile(String::new());
    let mut bricks = Vec::new();
    for (index, server) in build.layout.servers.iter().enumerate() {
        let brick = format!("brick-{index}");
        file.volume(
            &brick,
            "protocol/client",
            &[
                ("transport-type", "tcp"),
                ("transport.address-family", family(server.address)),
                ("remote-host", &server.address.to_string()),
                ("remote-port", &server.ports[0].to_string()),
                ("remote-subvolume", &name),
                ("username", &user),
                ("password", &password),
                ("ping-timeout", "10"),
                ("send-gids", "true"),
            ],
            &[],
        );
        bricks.push(brick);
    }
    let copies = build.layout.replicas.max(1) as usize;
    if copies > 1 {
        let mut sets = Vec::new();
        for (index, pair) in bricks.chunks(copies).enumerate() {
            let set = format!("pair-{index}");
            let below: Vec<&str> = pair.iter().map(String::as_str).collect();
            let pending: Vec<String> =
                (0..pair.len()).map(|copy| format!("ondeck-client-{}", index * copies + copy)).collect();
            let (pending, volume) = (pending.join(","), uuid_text(volume_id(build)));
            let options = [
                ("afr-pending-xattr", pending.as_str()),
                ("data-self-heal", "on"),
                ("metadata-self-heal", "on"),
                ("entry-self-heal", "on"),
                // One of two is enough to go on with: the agents never start a lost brick again.
                ("quorum-type", "none"),
                ("volume-id", &volume),
            ];
            file.volume(&set, "cluster/replicate", &options, &below);
            sets.push(set);
        }
        bricks = sets;
    }
    let below: Vec<&str> = bricks.iter().map(String::as_str).collect();
    file.volume("distribute", "cluster/distribute", &[("lookup-optimize", "on")], &below);
    file.volume(
        "write-behind",
        "performance/write-behind",
        &[
            // So much of a file may be told as written that is not: what a full brick refuses is told that late.
            ("cache-size", "512KB"),
            ("aggregate-size", GATHERED),
            // close(2) waits for what was written, and returns its error: without that a file that found no room was short, or
            // empty, and nobody was told.
            ("flush-behind", "off"),
        ],
        &["distribute"],
    );
    file.0
}
