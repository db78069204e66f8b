//! The same filesystem built by hand: Gluster's processes on volfiles as an administrator would
//! write them without Ondeck, to tell what Ondeck's own additions cost.
//!
//! It has no password, only a list of addresses, and no access control on the bricks.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ondeck_testbed::{Daemon, Host, Pid};

use crate::interrupt;
use crate::ramdisk::testbed::{AgentTestbed, CLIENT, text};

/// How long it may take until all bricks answer.
const STARTING: Duration = Duration::from_secs(20);
/// Names enough that each of two bricks holds some.
const TRIES: usize = 24;
const VOLUME_ID: [u8; 16] = *b"ondeck-bench-id.";
const NODES: [&str; 2] = ["n1", "n2"];

/// In what the stacks by hand differ from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flavour {
    /// Distinguishes directories and ports.
    pub number: u16,
    /// The options of the client that Ondeck sets for correctness.
    pub correct_client: bool,
    /// Bricks on a tmpfs with huge=within_size, as Ondeck mounts its own.
    pub huge: bool,
}

/// A running stack of two bricks and a client.
pub struct ByHand<'a> {
    testbed: &'a AgentTestbed,
    mounts: Vec<(&'a Host, PathBuf)>,
    daemons: Vec<Daemon>,
    pub client: &'a Host,
    pub mount: PathBuf,
}

impl<'a> ByHand<'a> {
    pub fn start(testbed: &'a AgentTestbed, flavour: Flavour, brick_bytes: u64) -> Result<Self> {
        let dir = testbed.dir().join(format!("hand-{}", flavour.number));
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mount = dir.join("mnt");
        fs::create_dir(&mount)?;
        let mut stack =
            Self { testbed, mounts: Vec::new(), daemons: Vec::new(), client: testbed.host(CLIENT), mount };
        let port = 30_000 + flavour.number;
        for name in NODES {
            stack.start_brick(&dir, name, port, flavour.huge, brick_bytes)?;
        }
        stack.start_client(&dir, port, flavour.correct_client)?;
        Ok(stack)
    }

    pub fn processes(&self) -> Vec<Pid> {
        self.daemons.iter().map(Daemon::pid).collect()
    }

    fn start_brick(&mut self, dir: &Path, name: &str, port: u16, huge: bool, bytes: u64) -> Result<()> {
        let host = self.testbed.host(name);
        let brick = dir.join(name);
        fs::create_dir(&brick)?;
        let options = format!("size={bytes}{}", if huge { ",huge=within_size" } else { "" });
        let words = ["mount", "-t", "tmpfs", "-o", &options, "brick", &text(&brick)].map(String::from);
        self.testbed.run(host, &words)?;
        self.mounts.push((host, brick.clone()));
        let outside = host.path_from_outside(&brick);
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&outside, "trusted.glusterfs.volume-id", &VOLUME_ID, flags)
            .context("cannot mark a brick")?;
        fs::create_dir(outside.join(".glusterfs"))?;
        let volfile = dir.join(format!("{name}.vol"));
        fs::write(&volfile, server_volfile(&brick, &host.address().to_string(), port))?;
        let mut brick = host.command("glusterfsd");
        brick.arg("-N").arg("-f").arg(&volfile).arg("-l").arg(dir.join(format!("{name}.log")));
        self.daemons.push(host.spawn_daemon(brick, &dir.join(format!("{name}.out")))?);
        self.wait("a brick does not listen", || host.listening().iter().any(|socket| socket.port() == port))
    }

    fn start_client(&mut self, dir: &Path, port: u16, correct: bool) -> Result<()> {
        let volfile = dir.join("client.vol");
        let addresses = NODES.map(|name| self.testbed.host(name).address().to_string());
        fs::write(&volfile, client_volfile(&addresses, port))?;
        let mut client = self.client.command("glusterfs");
        client.arg("-N").arg("-f").arg(&volfile).arg("--volfile-id=rsa");
        client.arg("-l").arg(dir.join("client.log"));
        client.args(["--attribute-timeout=1", "--entry-timeout=1"]);
        if correct {
            client.args(["--auto-invalidation=on", "--acl"]);
        }
        client.arg(&self.mount);
        self.daemons.push(self.client.spawn_daemon(client, &dir.join("client.out"))?);
        let (host, mount) = (self.client, self.mount.clone());
        self.wait("the client does not mount", || {
            host.new_mounts().iter().any(|mounted| mounted.target == mount)
        })?;
        self.mounts.push((self.client, self.mount.clone()));
        // A name whose brick is not connected yet can't be made.
        let outside = self.client.path_from_outside(&self.mount);
        self.wait("not all bricks are connected", || {
            (0..TRIES).all(|number| fs::write(outside.join(format!("try-{number}")), "").is_ok())
        })
    }

    fn wait(&self, complaint: &str, reached: impl Fn() -> bool) -> Result<()> {
        let began = Instant::now();
        while !reached() {
            interrupt::check()?;
            let ended = self.daemons.iter().find(|daemon| !daemon.is_running());
            ensure!(ended.is_none(), "gluster by hand ended: {}", ended.map_or(String::new(), Daemon::log));
            ensure!(began.elapsed() < STARTING, "gluster by hand: {complaint}");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for ByHand<'_> {
    fn drop(&mut self) {
        for (host, mount) in self.mounts.drain(..).rev() {
            // What stays mounted goes with the bed.
            host.run(&["umount", "--lazy", &text(&mount)]);
        }
    }
}

fn server_volfile(brick: &Path, address: &str, port: u16) -> String {
    let id: Vec<String> = VOLUME_ID.iter().map(|byte| format!("{byte:02x}")).collect();
    let id = id.concat();
    let id = format!("{}-{}-{}-{}-{}", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]);
    format!(
        "volume posix
  type storage/posix
  option directory {brick}
  option volume-id {id}
  option health-check-interval 0
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume iot
  type performance/io-threads
  option thread-count 8
  subvolumes locks
end-volume
volume /brick
  type debug/io-stats
  subvolumes iot
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.listen-port {port}
  option transport.socket.bind-address {address}
  option auth.addr./brick.allow 10.77.0.*
  subvolumes /brick
end-volume
",
        brick = brick.display()
    )
}

fn client_volfile(addresses: &[String], port: u16) -> String {
    let mut file = String::new();
    let mut names = Vec::new();
    for (number, address) in addresses.iter().enumerate() {
        file += &format!(
            "volume c{number}
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume /brick
  option ping-timeout 10
  option send-gids true
end-volume
"
        );
        names.push(format!("c{number}"));
    }
    file += &format!(
        "volume dht
  type cluster/distribute
  option lookup-optimize on
  subvolumes {}
end-volume
volume wb
  type performance/write-behind
  option cache-size 16MB
  option aggregate-size 1MB
  subvolumes dht
end-volume
",
        names.join(" ")
    );
    file
}
