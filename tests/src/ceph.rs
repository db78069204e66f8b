//! A CephFS as a site has it: the servers are those of a RAM disk of the engine ceph, which a client of its own mounts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::host::Host;
use crate::wait::wait_until;

/// For a client to mount it.
const MOUNTING: Duration = Duration::from_secs(20);

/// The servers of a RAM disk, as their administrator reaches them.
#[derive(Clone, Debug)]
pub struct CephServers {
    first: Host,
    directory: PathBuf,
}

impl CephServers {
    /// Of the RAM disk whose first node is `first`, where the agent keeps it in `directory`.
    pub fn new(first: &Host, directory: impl Into<PathBuf>) -> CephServers {
        CephServers { first: first.clone(), directory: directory.into() }
    }

    /// Runs `ceph` or `rados` as the cluster's administrator; gives what it prints.
    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let conf = self.directory.join("ceph.conf").display().to_string();
        let line = ["timeout", "-s", "KILL", "60", program, "-c", &conf, "--name", "client.admin"];
        let ran = self.first.run(&[&line[..], words].concat());
        ensure!(ran.success(), "{program} {}: {}: {}", words.join(" "), ran.status, ran.stderr);
        Ok(ran.stdout)
    }

    /// What the cluster answers its administrator.
    ///
    /// # Errors
    ///
    /// If it does not answer, or not in JSON.
    pub fn ask(&self, question: &[&str]) -> Result<Value> {
        let said = self.run("ceph", &[&["--format", "json"], question].concat())?;
        serde_json::from_str(&said).with_context(|| format!("ceph {}", question.join(" ")))
    }

    /// The OSD that an object of a file is on.
    ///
    /// # Errors
    ///
    /// If the cluster does not answer.
    pub fn osd_of(&self, pool: &str, ino: u64, object: u32) -> Result<u64> {
        let answer = self.ask(&["osd", "map", pool, &object_name(ino, object)])?;
        answer["acting_primary"].as_u64().context("ceph names no OSD")
    }

    /// The bytes that are in an object of a file.
    ///
    /// # Errors
    ///
    /// If the cluster does not answer, or there is no such object.
    pub fn object_bytes(&self, pool: &str, ino: u64, object: u32) -> Result<u64> {
        let said = self.run("rados", &["-p", pool, "stat", &object_name(ino, object)])?;
        let bytes = said.trim_end().rsplit_once("size ").and_then(|(_, bytes)| bytes.parse().ok());
        bytes.with_context(|| format!("rados tells no size: {said}"))
    }

    /// Mounts the filesystem in hosts, with the cache that a client of Ceph has unless it is told otherwise; that of a RAM disk writes
    /// through. What the clients need is kept in `directory`, which all hosts have at the same path.
    ///
    /// # Errors
    ///
    /// If a client can't be started, or does not mount in time.
    ///
    /// # Panics
    ///
    /// If one ends before it has mounted.
    pub fn mount(&self, hosts: &[&Host], directory: &Path, at: &Path) -> Result<Vec<Daemon>> {
        let outside = self.first.path_from_outside(&self.directory);
        let keyring = directory.join("client.keyring");
        fs::copy(outside.join("keys/client.job"), &keyring).context("cannot copy the client's key")?;
        let conf = fs::read_to_string(outside.join("ceph.conf")).context("cannot read the configuration")?;
        let conf_file = directory.join("client.conf");
        fs::write(&conf_file, client_configuration(&conf, &keyring))?;
        let start = |host: &&Host| {
            let mut command = host.command("ceph-fuse");
            command.args(["-f", "-n", "client.job", "--client_fs", "ondeck", "-r", "/ramdisk", "-c"]);
            command.arg(&conf_file).args(["-o", "nosuid,nodev,allow_other,fsname=site"]).arg(at);
            host.spawn_daemon(command, &directory.join(format!("client-{}.log", host.name())))
        };
        let clients = hosts.iter().map(start).collect::<Result<Vec<Daemon>>>()?;
        for (host, client) in hosts.iter().zip(&clients) {
            wait_until(MOUNTING, "the CephFS is mounted", || {
                assert!(client.is_running(), "{}", client.log());
                host.new_mounts().iter().any(|mount| mount.target == at)
            });
        }
        Ok(clients)
    }
}

/// How CephFS calls an object of a file.
fn object_name(ino: u64, object: u32) -> String {
    format!("{ino:x}.{object:08x}")
}

/// A client's own configuration, made of a server's.
fn client_configuration(of_server: &str, keyring: &Path) -> String {
    const SERVERS_OWN: [&str; 6] =
        ["public_addr", "cluster_addr", "keyring", "run_dir", "crash_dir", "client_oc_"];
    let others = |line: &&str| !SERVERS_OWN.iter().any(|key| line.starts_with(key));
    let lines: Vec<&str> = of_server.lines().filter(others).collect();
    let with_key = format!("[global]\nkeyring = {}\n", keyring.display());
    (lines.join("\n") + "\n").replacen("[global]\n", &with_key, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_its_own_key_and_the_usual_cache() {
        let server = "[global]\nfsid = x\npublic_addr = 10.0.0.1\nkeyring = /a/$name\n[client]\nclient_oc_size = 1\n\
                      client_mount_timeout = 10\n";
        let client = client_configuration(server, Path::new("/b"));
        assert_eq!(client, "[global]\nkeyring = /b\nfsid = x\n[client]\nclient_mount_timeout = 10\n");
    }
}
