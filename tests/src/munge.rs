//! The authentication daemon that Slurm needs, one for all hosts: its socket is a path, and the hosts share the disk.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::daemon::Daemon;
use crate::host::Host;
use crate::inside::in_path;
use crate::users;
use crate::wait::wait_until;

/// As many as Debian's own unit starts.
const THREADS: u32 = 2;
const KEY_BYTES: usize = 1024;
const READY_DEADLINE: Duration = Duration::from_secs(20);

/// munged, and where it listens.
#[derive(Debug)]
pub(crate) struct Munge {
    pub(crate) socket: PathBuf,
    _munged: Daemon,
}

impl Munge {
    /// Starts munged as the user munge with all its files in `directory`, and waits until it answers.
    pub(crate) fn start(host: &Host, directory: &Path) -> Result<Munge> {
        ensure!(in_path("munged") && in_path("munge"), "munged is not in PATH; install the package munge");
        let (uid, gid) = users::ids_of("munge", "munge")?;
        // munged wants the key readable by its user alone, and every directory above its files writable by nobody but
        // its user and root, sticky ones excepted; clients of all users must get at the socket.
        fs::create_dir(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
        chown(directory, Some(uid), Some(gid))?;
        let mut key = [0; KEY_BYTES];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        let key_file = directory.join("munge.key");
        fs::write(&key_file, key)?;
        fs::set_permissions(&key_file, fs::Permissions::from_mode(0o400))?;
        chown(&key_file, Some(uid), Some(gid))?;

        let socket = directory.join("munge.socket.2");
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let mut command = host.as_user(uid, gid).command("munged");
        command
            .arg("--foreground")
            .arg(option("key-file", key_file))
            .arg(option("socket", socket.clone()))
            .arg(option("pid-file", directory.join("munged.pid")))
            .arg(option("log-file", directory.join("munged.log")))
            .arg(option("seed-file", directory.join("munged.seed")))
            .arg(format!("--num-threads={THREADS}"));
        let munged = host.spawn_daemon(command, &directory.join("munged.out"))?;
        let ask = ["munge", "--no-input", "--socket", &socket.to_string_lossy()].map(str::to_owned);
        wait_until(READY_DEADLINE, "munged answers", || {
            assert!(munged.is_running(), "munged ended: {}", munged.log());
            socket.exists() && host.run(&ask).success()
        });
        Ok(Munge { socket, _munged: munged })
    }
}
