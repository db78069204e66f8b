//! A scene for a test: directories of its own, the `ondeck` command, and an ordinary user beside root.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Who runs the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Whoever runs the tests.
    Me,
    /// An ordinary user: uid and gid 20001 with the further group 20002 if root runs the tests, else the same as `Me`.
    User,
}

pub const UID: u32 = 20_001;
pub const SECOND_GROUP: u32 = 20_002;

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Both kinds of caller, as far as they can be had.
pub fn everyone() -> Vec<Who> {
    if is_root() {
        vec![Who::Me, Who::User]
    } else {
        ondeck_skip::skipped("the half of it that root sees needs root");
        vec![Who::User]
    }
}

pub struct Scene {
    pub dir: TempDir,
    pub who: Who,
    binary: PathBuf,
}

/// A directory with a name by which `make clean-testbed` knows whose it was.
pub fn tempdir_in(parent: &Path) -> TempDir {
    let prefix = format!("ondeck-test.{}.", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir_in(parent).unwrap()
}

impl Scene {
    pub fn new(who: Who) -> Scene {
        let dir = tempdir_in(&std::env::temp_dir());
        // The build directory may lie where an ordinary user can't reach it.
        let binary = dir.path().join("ondeck");
        if fs::hard_link(env!("CARGO_BIN_EXE_ondeck"), &binary).is_err() {
            fs::copy(env!("CARGO_BIN_EXE_ondeck"), &binary).unwrap();
        }
        let scene = Scene { dir, who, binary };
        scene.own(scene.dir.path());
        fs::set_permissions(scene.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn own(&self, path: &Path) {
        if self.who == Who::User && is_root() {
            std::os::unix::fs::chown(path, Some(UID), Some(UID)).unwrap();
        }
    }

    /// Makes a directory of the caller.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        self.own(&path);
        path
    }

    /// Makes a file of the caller.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        self.own(&path);
        path
    }

    /// Makes a script of the caller.
    pub fn script(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        // Not by this process: a child that another test forks meanwhile would have it open for writing, and nobody could run it.
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&path).arg(content);
        assert!(writer.status().unwrap().success());
        self.own(&path);
        path
    }

    /// The command, in the scene's directory, with its state kept there.
    pub fn ondeck(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        // A group of its own. Some tests stop processes, and some kill a keeper, whose program is in the group of the command:
        // the kernel sends SIGHUP to all of a group that has lost its parents so while one of its processes is stopped. Who
        // runs the tests may be of such a group.
        command.process_group(0);
        command.env("ONDECK_STATE_DIR", self.path("state")).env("HOME", self.dir.path());
        // SAFETY: a system call only, in the child before exec. Whoever runs the tests in the background or under
        // nohup has some signals ignored, which children inherit.
        unsafe {
            command.pre_exec(|| {
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        command.env_remove("SLURM_JOB_ID").env_remove("SLURM_JOB_END_TIME").env_remove("XDG_STATE_HOME");
        if self.who == Who::User && is_root() {
            // SAFETY: system calls only, in the child before exec.
            unsafe {
                command.pre_exec(|| {
                    let groups = [UID, SECOND_GROUP];
                    if libc::setgroups(2, groups.as_ptr()) != 0
                        || libc::setgid(UID) != 0
                        || libc::setuid(UID) != 0
                    {
                        return Err(std::io::Error::last_os_error());
                    }
                    Ok(())
                });
            }
        }
        command
    }

    /// Runs it to its end.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.ondeck(arguments).output().unwrap())
    }

    /// The same with a umask.
    pub fn run_with_umask(&self, umask: u32, arguments: &[&str]) -> Ran {
        let mut command = self.ondeck(arguments);
        // SAFETY: a system call only, in the child before exec.
        unsafe {
            command.pre_exec(move || {
                libc::umask(umask);
                Ok(())
            });
        }
        Ran::of(command.output().unwrap())
    }

    /// The permissions of an entry, in octal.
    pub fn mode(&self, name: &str) -> String {
        format!("{:o}", fs::symlink_metadata(self.path(name)).unwrap().mode() & 0o7777)
    }

    /// Runs `ondeck run … -- sh -c SCRIPT`.
    pub fn run_shell(&self, options: &[&str], script: &str) -> Ran {
        self.run(&[&["run"], options, &["--", "sh", "-c", script]].concat())
    }

    /// Starts it and lets it run.
    pub fn start(&self, arguments: &[&str]) -> Child {
        self.ondeck(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// The state directory's entries: runs that are not over, and reports of orphaned ones; not the place of caches.
    pub fn state(&self) -> Vec<PathBuf> {
        fs::read_dir(self.path("state"))
            .map(|dir| {
                dir.map(|entry| entry.unwrap().path()).filter(|path| !path.ends_with("cache")).collect()
            })
            .unwrap_or_default()
    }

    /// Waits until no run of this scene is alive.
    pub fn wait_for_end(&self) {
        // A keeper whose front was killed at once may not have made its directory yet, so processes are asked first.
        wait_until("the keeper's end", || {
            !self.has_process() && self.state().iter().all(|path| !path.is_dir())
        });
    }

    /// Whether a process runs this scene's command, or is forked from one that did.
    fn has_process(&self) -> bool {
        let ours = self.binary.to_str().unwrap();
        let all = fs::read_dir("/proc").unwrap();
        all.flatten().any(|entry| {
            // A zombie has none.
            fs::read(entry.path().join("cmdline")).is_ok_and(|line| line.starts_with(ours.as_bytes()))
        })
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// The names in a directory, sorted.
    pub fn list(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path(name))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    pub fn report(&self, name: &str) -> serde_json::Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    /// That nothing is left: no run's state, no mount, no process of ours.
    pub fn assert_clean(&self) {
        assert_eq!(self.state(), Vec::<PathBuf>::new());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.dir.path().to_str().unwrap()), "a mount is left");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // A failed test may leave a keeper that holds results: give them up.
        for path in self.state() {
            if let Some(id) = path.file_name().filter(|_| path.is_dir()) {
                let _ = self.ondeck(&["run", "--yes", "--abandon", &id.to_string_lossy()]).output();
            }
        }
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn of(output: Output) -> Ran {
        Ran {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub fn assert_code(&self, code: i32) -> &Ran {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    #[track_caller]
    pub fn assert_says(&self, text: &str) -> &Ran {
        assert!(self.err.contains(text), "no `{text}` in {self:#?}");
        self
    }
}

/// Waits for a state, with a deadline.
#[track_caller]
pub fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < deadline, "not reached in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A mount that goes with the test.
pub struct Mounted(PathBuf);

impl Mounted {
    pub fn tmpfs(path: &Path, options: &str) -> Mounted {
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("t", path, "tmpfs", rustix::mount::MountFlags::empty(), &*options).unwrap();
        Mounted(path.to_owned())
    }

    pub fn remount(&self, read_only: bool, options: &str) {
        let flags =
            if read_only { rustix::mount::MountFlags::RDONLY } else { rustix::mount::MountFlags::empty() };
        rustix::mount::mount_remount(&self.0, flags, options).unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

pub fn mode_of(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}
