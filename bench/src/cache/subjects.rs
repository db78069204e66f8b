//! What is measured: each is a directory that shows another one of the slow disk, and keeps in RAM what it can.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ondeck_bench::size::MIB;
use ondeck_core::exit;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::machine;
use crate::scratch::make_directory;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// RAM alone, without a disk behind it: what a cache could reach.
    Tmpfs,
    /// `ondeck cache`.
    Ondeck,
    /// The same, where the kernel writes to files by itself.
    OndeckPassthrough,
    /// The disk as it is, with the kernel's page cache.
    PageCache,
    /// overlayfs: changes go to a tmpfs, to be brought home by rsync.
    Overlay,
    /// mergerfs: new files go to a tmpfs, to be moved by a script.
    Mergerfs,
    /// `rclone mount --vfs-cache-mode full`, with its cache on a tmpfs.
    Rclone,
}

impl Subject {
    pub const ALL: [Subject; 7] = [
        Subject::Tmpfs,
        Subject::Ondeck,
        Subject::OndeckPassthrough,
        Subject::PageCache,
        Subject::Overlay,
        Subject::Mergerfs,
        Subject::Rclone,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Subject::Tmpfs => "tmpfs",
            Subject::Ondeck => "ondeck cache",
            Subject::OndeckPassthrough => "ondeck cache --writes passthrough",
            Subject::PageCache => "page cache",
            Subject::Overlay => "overlayfs",
            Subject::Mergerfs => "mergerfs",
            Subject::Rclone => "rclone",
        }
    }

    /// The name of its directories.
    pub fn directory(self) -> String {
        self.name().replace(' ', "-")
    }

    /// Whether it is `ondeck cache`.
    pub fn is_ours(self) -> bool {
        matches!(self, Subject::Ondeck | Subject::OndeckPassthrough)
    }

    /// The program that it needs, if that is not there.
    pub fn lacks(self) -> Option<&'static str> {
        let program = match self {
            Subject::Mergerfs => "mergerfs",
            Subject::Rclone => "rclone",
            _ => return None,
        };
        machine::find_program(program, &[]).is_none().then_some(program)
    }
}

/// Where things are.
pub struct Site<'a> {
    /// The binary under test.
    pub ondeck: &'a Path,
    /// A directory for mount points, on no disk that is measured.
    pub base: &'a Path,
    /// A directory of the slow disk.
    pub disk: &'a Path,
    /// Of each cache.
    pub capacity: u64,
}

/// One of them, mounted; gone at the end.
pub struct Mounted<'a> {
    site: &'a Site<'a>,
    pub subject: Subject,
    /// Where programs work.
    pub dir: PathBuf,
    /// What is behind it.
    pub backing: PathBuf,
    tmpfs: Option<PathBuf>,
}

impl<'a> Mounted<'a> {
    /// Mounts it over a directory of the disk, which is made if it is not there.
    ///
    /// # Errors
    /// Whatever failed.
    pub fn new(site: &'a Site<'a>, subject: Subject) -> Result<Mounted<'a>> {
        let name = subject.directory();
        let own = site.base.join(&name);
        let backing = site.disk.join(&name);
        let dir = own.join("mounted");
        for directory in [&own, &backing, &dir] {
            fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let mut mounted = Mounted { site, subject, dir, backing, tmpfs: None };
        mounted.mount(&own).with_context(|| format!("cannot mount {}", subject.name()))?;
        Ok(mounted)
    }

    fn mount(&mut self, own: &Path) -> Result<()> {
        let ram = own.join("ram");
        if matches!(self.subject, Subject::Overlay | Subject::Mergerfs | Subject::Rclone) {
            make_directory(&ram)?;
            tmpfs(&ram, self.site.capacity)?;
            self.tmpfs = Some(ram.clone());
        }
        let (dir, backing) = (self.dir.clone(), self.backing.clone());
        match self.subject {
            Subject::Tmpfs => tmpfs(&dir, self.site.capacity),
            Subject::Ondeck | Subject::OndeckPassthrough => {
                let capacity = format!("{}MiB", self.site.capacity / MIB);
                // Nothing is written back because it is old.
                let writes =
                    if self.subject == Subject::OndeckPassthrough { "passthrough" } else { "server" };
                let options = ["--capacity", &capacity, "--age", "1h", "--writes", writes];
                self.ondeck(
                    &[&["mount", "--backing", text(&backing)?], &options[..], &[text(&dir)?]].concat(),
                )
            }
            Subject::PageCache => {
                rustix::mount::mount_bind(&backing, &dir)?;
                Ok(())
            }
            Subject::Overlay => {
                let (upper, work) = (ram.join("upper"), ram.join("work"));
                make_directory(&upper)?;
                make_directory(&work)?;
                let options = format!(
                    "lowerdir={},upperdir={},workdir={}",
                    backing.display(),
                    upper.display(),
                    work.display()
                );
                let options = CString::new(options)?;
                rustix::mount::mount("overlay", &dir, "overlay", MountFlags::empty(), options.as_c_str())?;
                Ok(())
            }
            Subject::Mergerfs => {
                let branches = format!("{}=RW:{}=RW", ram.display(), backing.display());
                let options = "category.create=ff,cache.files=off,minfreespace=0";
                self.daemon(Command::new("mergerfs").args(["-o", options, &branches]).arg(&dir))
            }
            Subject::Rclone => {
                let mut command = Command::new("rclone");
                command.args(["mount", "--config", "/dev/null", "--vfs-cache-mode", "full"]);
                command.args(["--vfs-write-back", "1h", "--dir-cache-time", "1h", "--cache-dir"]).arg(&ram);
                command.arg("--daemon").arg(format!(":local:{}", backing.display())).arg(&dir);
                self.daemon(&mut command)
            }
        }
    }

    /// Runs a command that mounts something on the directory, and waits until it is there.
    fn daemon(&self, command: &mut Command) -> Result<()> {
        let name = self.subject.name();
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        if !status.success() {
            bail!("{name}: {status}");
        }
        let until = Instant::now() + Duration::from_secs(10);
        while !is_mounted(&self.dir)? {
            if Instant::now() > until {
                bail!("{name} shows nothing after 10 s");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// A command of `ondeck cache`.
    ///
    /// # Errors
    /// It failed.
    pub fn ondeck(&self, arguments: &[&str]) -> Result<()> {
        self.ondeck_ends(arguments, exit::OK)
    }

    fn ondeck_ends(&self, arguments: &[&str], code: u8) -> Result<()> {
        let mut command = Command::new(self.site.ondeck);
        command.env("ONDECK_STATE_DIR", self.site.base.join("state")).arg("cache").args(arguments);
        let output = command.stdin(Stdio::null()).output().context("cannot run ondeck")?;
        if output.status.code() != Some(code.into()) {
            let told = String::from_utf8_lossy(&output.stderr);
            bail!("ondeck cache {arguments:?}: {}, {told}", output.status);
        }
        Ok(())
    }

    /// Brings all changes to the disk, as one would of each.
    ///
    /// # Errors
    /// They can't be brought.
    pub fn flush(&self) -> Result<()> {
        match self.subject {
            Subject::Ondeck | Subject::OndeckPassthrough => self.ondeck(&["flush", text(&self.dir)?]),
            _ => crate::scratch::sync_filesystem(&self.backing),
        }
    }

    /// Gives up what is in RAM of the backing directory's files.
    ///
    /// # Errors
    /// It can't be.
    pub fn forget(&self) -> Result<()> {
        if self.subject.is_ours() {
            self.ondeck(&["evict", text(&self.dir)?])?;
        }
        crate::evict::evict(&self.backing)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let said = |result: Result<()>| {
            if let Err(error) = result {
                eprintln!("{}: {error:#}", self.subject.name());
            }
        };
        if self.subject.is_ours() {
            let lose = |dir| self.ondeck_ends(&["unmount", "--force-lose", "--yes", dir], exit::ABANDONED);
            said(text(&self.dir).and_then(lose));
        } else {
            said(unmount(&self.dir));
        }
        if let Some(ram) = &self.tmpfs {
            said(unmount(ram));
        }
        said(fs::remove_dir_all(&self.backing).map_err(Into::into));
        if let Some(own) = self.dir.parent() {
            said(fs::remove_dir_all(own).map_err(Into::into));
        }
    }
}

fn tmpfs(at: &Path, size: u64) -> Result<()> {
    // As the cache's store.
    let options = CString::new(format!("size={size},huge=never"))?;
    rustix::mount::mount("ondeck-bench", at, "tmpfs", MountFlags::empty(), options.as_c_str())?;
    Ok(())
}

fn unmount(at: &Path) -> Result<()> {
    if is_mounted(at)? {
        rustix::mount::unmount(at, UnmountFlags::DETACH)?;
    }
    Ok(())
}

fn is_mounted(at: &Path) -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(1) == at.to_str()))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}
