//! The layout of a directory, as the user that this process runs as: what it is, and another one for its new files.
//!
//! The directory is given by descriptor, so that nothing is set anywhere else if a name is exchanged meanwhile. Tools are started with
//! it as their working directory and are told `.`: no path ever reaches them, and nothing reaches a shell.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ondeck_api::wire::{FormerLayout, FormerValue};
use ondeck_core::Incarnation;
use ondeck_core::text::{self, plain};
use ondeck_layout::beegfs::{BeegfsError, StripePattern, Version};
use ondeck_layout::ceph::{self, CephError, DirLayout};
use ondeck_layout::lfs::{GetstripeError, OptionError, Setstripe, getstripe, setstripe};
use ondeck_layout::{Layout, Placement, StripeCount, Tool};
use rustix::fs::{Mode, OFlags, XattrFlags};
use rustix::io::Errno;

/// The attribute in which a directory keeps what we have set: then the next step of a job may set something else.
const MARK: &str = "user.ondeck.layout";

/// The attribute that says for which job we have set it, and what the directory is called there: a job may know it by another name.
const SET_FOR: &str = "user.ondeck.layout.job";

/// A directory of a filesystem that stripes files.
pub struct StripedDirectory {
    directory: OwnedFd,
    path: PathBuf,
    tool: Tool,
    /// What it has, once it was asked, until we set something: asking may take long.
    asked: RefCell<Option<Option<Native>>>,
}

/// What a directory has.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// The layout of its new files; nothing: what its parent or its filesystem has.
    pub layout: Option<Layout>,
    /// The same in the words of its filesystem.
    pub native: String,
}

/// Whether a directory's layout may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is the layout that is wanted.
    Has,
    /// Somebody has chosen another one for it.
    Chosen,
    /// It has what is above it, or what we have set.
    Free,
}

/// Why a layout could not be read or set. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum StripingError {
    /// The directory can't be used.
    #[error("{}: {error}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Nothing to stripe with.
    #[error("{}: its filesystem stripes no files: there are layouts on Lustre, CephFS and BeeGFS", path.display())]
    NotStriped {
        /// The directory.
        path: PathBuf,
    },
    /// The tool could not be started.
    #[error("{}: can't start `{tool}`, which shows and sets layouts there: {error}", path.display())]
    NoTool {
        /// The directory.
        path: PathBuf,
        /// The tool.
        tool: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The tool has failed.
    #[error("{}: `{command}` failed: {said}", path.display())]
    Tool {
        /// The directory.
        path: PathBuf,
        /// What was started.
        command: String,
        /// What it said.
        said: String,
    },
    /// CephFS does not take the pool.
    #[error(
        "{}: CephFS does not take `{pool}` as a pool for files; `ceph fs ls` shows those that it takes, `ceph fs add_data_pool` adds one",
        path.display()
    )]
    NoPool {
        /// The directory.
        path: PathBuf,
        /// The pool.
        pool: String,
    },
    /// The number of targets is not known.
    #[error(
        "{}: a layout over all targets needs their number on this filesystem: give the site's file, or say a number",
        path.display()
    )]
    HowMany {
        /// The directory.
        path: PathBuf,
    },
    /// What was set is not what the directory has now.
    #[error("{}: set to `{set}`, but it has `{found}`", path.display())]
    Differs {
        /// The directory.
        path: PathBuf,
        /// What was set.
        set: String,
        /// What is there.
        found: String,
    },
    /// What Lustre shows is not understood.
    #[error("{}: {error}", path.display())]
    Lustre {
        /// The directory.
        path: PathBuf,
        /// What is not.
        error: GetstripeError,
    },
    /// Lustre has no such layout.
    #[error("{}: {error}", path.display())]
    Options {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: OptionError,
    },
    /// CephFS has no such layout.
    #[error("{}: {error}", path.display())]
    Ceph {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: CephError,
    },
    /// BeeGFS has no such layout.
    #[error("{}: {error}", path.display())]
    Beegfs {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: BeegfsError,
    },
    /// What it had before is not understood.
    #[error("{}: its former layout `{}` is not understood: {error}", path.display(), plain(text, 200))]
    Former {
        /// The directory.
        path: PathBuf,
        /// What was kept.
        text: String,
        /// Why.
        error: OptionError,
    },
}

/// A layout as a filesystem has it.
#[derive(Clone)]
enum Native {
    Lustre(Layout),
    Ceph(DirLayout),
    Beegfs(StripePattern),
}

impl Native {
    /// Whether `found` is what was wanted: a pool that was not named is the one that is there.
    fn is_met_by(&self, found: &Native) -> bool {
        match (self, found) {
            (Native::Lustre(wanted), Native::Lustre(found)) => wanted == found,
            (Native::Ceph(wanted), Native::Ceph(found)) => {
                let pool = wanted.pool.clone().or_else(|| found.pool.clone());
                *found == DirLayout { pool, ..wanted.clone() }
            }
            (Native::Beegfs(wanted), Native::Beegfs(found)) => {
                let pool = wanted.pool.clone().or_else(|| found.pool.clone());
                *found == StripePattern { pool, ..wanted.clone() }
            }
            _ => false,
        }
    }
}

impl StripedDirectory {
    /// A directory, known in messages by `path`, that is told its layouts by `tool`; without one, its filesystem says which.
    ///
    /// # Errors
    /// The directory can't be asked, or its filesystem has no layouts.
    pub fn of(directory: OwnedFd, path: &Path, tool: Option<Tool>) -> Result<Self, StripingError> {
        let tool = match tool {
            Some(tool) => tool,
            None => find_tool(&directory, path)?,
        };
        Ok(Self { directory, path: path.to_owned(), tool, asked: RefCell::default() })
    }

    /// What it is, whatever it is called: the same as long as it is there.
    ///
    /// # Errors
    /// It can't be asked.
    pub fn inode(&self) -> Result<u64, StripingError> {
        let stat = rustix::fs::fstat(&self.directory).map_err(|error| self.directory_error(error))?;
        Ok(stat.st_ino)
    }

    /// What it is told its layouts by.
    pub fn tool(&self) -> Tool {
        self.tool
    }

    /// The layout that it has.
    ///
    /// # Errors
    /// It can't be read, or is none that can be set here.
    pub fn show(&self) -> Result<Shown, StripingError> {
        match self.found()? {
            Some(found) => self.shown(&found),
            None => Ok(Shown { layout: None, native: format!("no {}", ceph::ATTRIBUTE) }),
        }
    }

    /// Whether new files have this layout already, as far as the filesystem can have it.
    ///
    /// # Errors
    /// It can't be read, or the filesystem has nothing like this layout.
    pub fn has(&self, layout: &Layout, targets: Option<u32>) -> Result<bool, StripingError> {
        let wanted = self.native(layout, targets)?;
        Ok(self.found()?.is_some_and(|found| wanted.is_met_by(&found)))
    }

    /// Gives new files this layout, and looks whether they will have it. `targets` is how many targets there are, where that is
    /// known; CephFS and BeeGFS must be told a number.
    ///
    /// # Errors
    /// It can't be set, or the filesystem has made something else of it.
    pub fn set(&self, layout: &Layout, targets: Option<u32>) -> Result<Shown, StripingError> {
        self.set_native(&self.native(layout, targets)?)
    }

    fn set_native(&self, wanted: &Native) -> Result<Shown, StripingError> {
        self.asked.take();
        match wanted {
            Native::Lustre(layout) => {
                let options = setstripe::options(layout);
                // What the tool would refuse is not even begun.
                Setstripe::parse(&options.join(" "))
                    .map_err(|error| StripingError::Options { path: self.path.clone(), error })?;
                let options = options.iter().map(String::as_str);
                self.run("lfs", &["setstripe"].into_iter().chain(options).collect::<Vec<_>>())?;
            }
            Native::Ceph(layout) => {
                let (name, value) = (ceph::ATTRIBUTE, layout.to_string());
                rustix::fs::fsetxattr(&self.directory, name, value.as_bytes(), XattrFlags::empty()).map_err(
                    |error| match (error, &layout.pool) {
                        (Errno::INVAL | Errno::NOENT, Some(pool)) => {
                            StripingError::NoPool { path: self.path.clone(), pool: pool.clone() }
                        }
                        _ => self.directory_error(error),
                    },
                )?;
            }
            Native::Beegfs(pattern) => {
                let (tool, version) = self.beegfs_tool();
                let words = pattern.arguments(version).map_err(|error| self.beegfs(error))?;
                self.run(tool, &words.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
        }
        match self.found()? {
            Some(found) if wanted.is_met_by(&found) => self.shown(&found),
            found => {
                let words = |native: &Native| {
                    self.shown(native).map_or_else(|error| error.to_string(), |it| it.native)
                };
                let found = found.as_ref().map_or("nothing of its own".to_owned(), words);
                Err(StripingError::Differs { path: self.path.clone(), set: words(wanted), found })
            }
        }
    }

    /// What the filesystem has to be told so that new files have this layout.
    fn native(&self, layout: &Layout, targets: Option<u32>) -> Result<Native, StripingError> {
        let among = || match (targets, &layout.last().placement) {
            (Some(targets), _) => Ok(targets),
            // It is as many, and there are enough, or the filesystem says so.
            (None, Placement::Striped { count: StripeCount::Of(count), .. }) => Ok(u32::from(*count)),
            _ => Err(StripingError::HowMany { path: self.path.clone() }),
        };
        Ok(match self.tool {
            Tool::Lustre => Native::Lustre(layout.clone()),
            Tool::Cephfs => Native::Ceph(DirLayout::of(layout, among()?).map_err(|error| self.ceph(error))?),
            Tool::Beegfs7 | Tool::Beegfs8 => {
                Native::Beegfs(StripePattern::of(layout, among()?).map_err(|error| self.beegfs(error))?)
            }
        })
    }

    /// What the directory has; nothing: what is above it.
    fn found(&self) -> Result<Option<Native>, StripingError> {
        if let Some(found) = &*self.asked.borrow() {
            return Ok(found.clone());
        }
        let found = self.ask()?;
        self.asked.replace(Some(found.clone()));
        Ok(found)
    }

    fn ask(&self) -> Result<Option<Native>, StripingError> {
        match self.tool {
            Tool::Lustre => {
                let text = self.run("lfs", &["getstripe", "--yaml", "-d"])?;
                let layout = getstripe::parse(&text)
                    .map_err(|error| StripingError::Lustre { path: self.path.clone(), error })?;
                Ok(Some(Native::Lustre(layout)))
            }
            Tool::Cephfs => Ok(self.ceph_layout()?.map(Native::Ceph)),
            Tool::Beegfs7 | Tool::Beegfs8 => {
                let (tool, version) = self.beegfs_tool();
                let text = self.run(tool, StripePattern::question(version))?;
                let pattern = StripePattern::parse(&text).map_err(|error| self.beegfs(error))?;
                Ok(Some(Native::Beegfs(pattern)))
            }
        }
    }

    fn shown(&self, native: &Native) -> Result<Shown, StripingError> {
        Ok(match native {
            Native::Lustre(layout) => {
                let native = format!("lfs setstripe {}", setstripe::options(layout).join(" "));
                Shown { layout: Some(layout.clone()), native }
            }
            Native::Ceph(found) => {
                let layout = found.layout().map_err(|error| self.ceph(error))?;
                Shown { layout: Some(layout), native: format!("{}={found}", ceph::ATTRIBUTE) }
            }
            Native::Beegfs(pattern) => {
                let layout = pattern.layout().map_err(|error| self.beegfs(error))?;
                let (tool, version) = self.beegfs_tool();
                let words = pattern.arguments(version).map_err(|error| self.beegfs(error))?;
                Shown { layout: Some(layout), native: format!("{tool} {}", words.join(" ")) }
            }
        })
    }

    /// Whether somebody has chosen the layout that it has: another one than the directory above it has.
    ///
    /// # Errors
    /// One of the two can't be read.
    pub fn has_its_own(&self) -> Result<bool, StripingError> {
        if self.tool == Tool::Cephfs {
            let Some(own) = self.ceph_layout()? else { return Ok(false) };
            // What is not set is what the nearest one above has.
            let mut above = self.parent()?;
            while let Some(directory) = above {
                if let Some(found) = directory.ceph_layout()? {
                    return Ok(found != own);
                }
                above = directory.parent()?;
            }
            return Ok(true);
        }
        match self.parent()? {
            Some(parent) => Ok(self.show()?.native != parent.show()?.native),
            None => Ok(true),
        }
    }

    /// Whether its layout may be replaced by another one.
    ///
    /// # Errors
    /// What it has can't be read, or the filesystem has nothing like this layout.
    pub fn standing(&self, layout: &Layout, targets: Option<u32>) -> Result<Standing, StripingError> {
        if self.has(layout, targets)? {
            return Ok(Standing::Has);
        }
        Ok(if self.has_its_own()? && !self.is_marked()? { Standing::Chosen } else { Standing::Free })
    }

    /// What it has now, to be set again later.
    ///
    /// # Errors
    /// It can't be read, or is none that can be set here.
    pub fn former(&self) -> Result<FormerLayout, StripingError> {
        let layout = match self.found()? {
            None => FormerValue::Inherited,
            Some(Native::Ceph(found)) => FormerValue::Cephfs(found.to_string()),
            Some(Native::Lustre(layout)) => FormerValue::Options(setstripe::options(&layout).join(" ")),
            Some(Native::Beegfs(pattern)) => {
                let layout = pattern.layout().map_err(|error| self.beegfs(error))?;
                FormerValue::Options(setstripe::options(&layout).join(" "))
            }
        };
        Ok(FormerLayout { layout, mark: self.read_mark()?, inode: Some(self.inode()?) })
    }

    /// Gives it back what it had, and the note of what was set then, if there was one. Returns what it has now.
    ///
    /// # Errors
    /// It can't be set.
    pub fn restore(&self, former: &FormerLayout, targets: Option<u32>) -> Result<Shown, StripingError> {
        let shown = match &former.layout {
            FormerValue::Inherited => {
                self.asked.take();
                self.remove(ceph::ATTRIBUTE)?;
                self.show()?
            }
            FormerValue::Cephfs(text) => {
                let layout: DirLayout = text.parse().map_err(|error| self.ceph(error))?;
                self.set_native(&Native::Ceph(layout))?
            }
            FormerValue::Options(options) => {
                let layout = Setstripe::parse_of_any(options).and_then(|setstripe| setstripe.layout());
                let layout = layout.map_err(|error| StripingError::Former {
                    path: self.path.clone(),
                    text: options.clone(),
                    error,
                })?;
                self.set(&layout, targets)?
            }
        };
        match &former.mark {
            Some(mark) => rustix::fs::fsetxattr(&self.directory, MARK, mark.as_bytes(), XattrFlags::empty())
                .map_err(|error| self.directory_error(error))?,
            None => self.remove(MARK)?,
        }
        self.remove(SET_FOR)?;
        Ok(shown)
    }

    /// Takes an attribute away, if it is there.
    fn remove(&self, attribute: &str) -> Result<(), StripingError> {
        match rustix::fs::fremovexattr(&self.directory, attribute) {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(self.directory_error(error)),
        }
    }

    /// Notes that what it has now was set by us.
    ///
    /// # Errors
    /// The filesystem keeps no such note.
    pub fn mark(&self) -> Result<(), StripingError> {
        let native = self.show()?.native;
        rustix::fs::fsetxattr(&self.directory, MARK, native.as_bytes(), XattrFlags::empty())
            .map_err(|error| self.directory_error(error))
    }

    /// Notes for which job that was.
    ///
    /// # Errors
    /// The filesystem keeps no such note.
    pub fn mark_for(&self, job: Incarnation, path: &Path) -> Result<(), StripingError> {
        let note = [job.key().as_bytes(), b" ", path.as_os_str().as_bytes()].concat();
        rustix::fs::fsetxattr(&self.directory, SET_FOR, &note, XattrFlags::empty())
            .map_err(|error| self.directory_error(error))
    }

    /// The job for which it has what it has now, and what it is called there; nothing if nobody has noted that. Its owner may
    /// write anything.
    ///
    /// # Errors
    /// It can't be read.
    pub fn set_for(&self) -> Result<Option<(Incarnation, PathBuf)>, StripingError> {
        let mut value = [0; 8192];
        let note = match rustix::fs::fgetxattr(&self.directory, SET_FOR, &mut value[..]) {
            Ok(length) => &value[..length],
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => return Ok(None),
            Err(error) => return Err(self.directory_error(error)),
        };
        if !self.is_marked()? {
            return Ok(None);
        }
        let blank = note.iter().position(|byte| *byte == b' ').unwrap_or(note.len());
        let job = std::str::from_utf8(&note[..blank]).ok().and_then(|key| key.parse().ok());
        let path = PathBuf::from(OsStr::from_bytes(note.get(blank + 1..).unwrap_or_default()));
        Ok(job.map(|job| (job, path)))
    }

    /// Whether what it has now is what we have set.
    ///
    /// # Errors
    /// It can't be read.
    pub fn is_marked(&self) -> Result<bool, StripingError> {
        match self.read_mark()? {
            Some(mark) => Ok(mark == self.show()?.native),
            None => Ok(false),
        }
    }

    /// The note of what was set by us, if there is one; what is no text is none of ours.
    fn read_mark(&self) -> Result<Option<String>, StripingError> {
        let mut value = [0; 4096];
        match rustix::fs::fgetxattr(&self.directory, MARK, &mut value[..]) {
            Ok(length) => Ok(std::str::from_utf8(&value[..length]).ok().map(str::to_owned)),
            // Longer than any that is set here.
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(None),
            Err(error) => Err(self.directory_error(error)),
        }
    }

    /// The directory above it; nothing if that is on another filesystem.
    fn parent(&self) -> Result<Option<Self>, StripingError> {
        let failed = |error| self.directory_error(error);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.directory, "..", flags, Mode::empty()).map_err(failed)?;
        let own = rustix::fs::fstat(&self.directory).map_err(failed)?;
        let above = rustix::fs::fstat(&directory).map_err(failed)?;
        if own.st_dev != above.st_dev || own.st_ino == above.st_ino {
            return Ok(None);
        }
        Self::of(directory, &self.path.join(".."), Some(self.tool)).map(Some)
    }

    fn beegfs_tool(&self) -> (&'static str, Version) {
        match self.tool {
            Tool::Beegfs8 => ("beegfs", Version::Eight),
            _ => ("beegfs-ctl", Version::Seven),
        }
    }

    fn ceph_layout(&self) -> Result<Option<DirLayout>, StripingError> {
        let mut value = [0; 1024];
        match rustix::fs::fgetxattr(&self.directory, ceph::ATTRIBUTE, &mut value[..]) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&value[..length]);
                text.trim_end_matches('\0').parse().map(Some).map_err(|error| self.ceph(error))
            }
            Err(Errno::NODATA) => Ok(None),
            Err(error) => Err(self.directory_error(error)),
        }
    }

    /// Starts a tool in the directory; returns what it prints.
    fn run(&self, tool: &'static str, words: &[&str]) -> Result<String, StripingError> {
        let directory = self.directory.as_raw_fd();
        let mut command = Command::new(tool);
        // By its descriptor: what works as a user of what root has started can't look into its own /proc/self/fd.
        // SAFETY: two system calls between fork and exec, one on a descriptor that is open until the tool has ended.
        unsafe {
            command.pre_exec(move || {
                // If nobody waits any more for a filesystem that hangs, the tool does not either.
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                Ok(rustix::process::fchdir(BorrowedFd::borrow_raw(directory))?)
            });
        }
        let child = command
            .args(words)
            .arg(".")
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .env("LC_ALL", OsStr::new("C"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let no_tool = |error| StripingError::NoTool { path: self.path.clone(), tool, error };
        let output = child.and_then(output_of).map_err(no_tool)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = match said.trim() {
            "" => output.status.to_string(),
            said => plain(said, text::MESSAGE),
        };
        let command = format!("{tool} {}", words.join(" "));
        Err(StripingError::Tool { path: self.path.clone(), command, said })
    }

    fn directory_error(&self, error: Errno) -> StripingError {
        StripingError::Directory { path: self.path.clone(), error: error.into() }
    }

    fn ceph(&self, error: CephError) -> StripingError {
        StripingError::Ceph { path: self.path.clone(), error }
    }

    fn beegfs(&self, error: BeegfsError) -> StripingError {
        StripingError::Beegfs { path: self.path.clone(), error }
    }
}

/// By what the filesystem of a directory is told its layouts.
fn find_tool(directory: &OwnedFd, path: &Path) -> Result<Tool, StripingError> {
    // As statfs(2) has them in f_type.
    const LUSTRE: u64 = 0x0BD0_0BD0;
    const CEPH: u64 = 0x00C3_6400;
    const BEEGFS: u64 = 0x1983_0326;
    const FUSE: u64 = 0x6573_5546;
    let failed = |error: Errno| StripingError::Directory { path: path.to_owned(), error: error.into() };
    match rustix::fs::fstatfs(directory).map_err(failed)?.f_type as u64 {
        LUSTRE => Ok(Tool::Lustre),
        CEPH => Ok(Tool::Cephfs),
        // The newer one has another name.
        BEEGFS => Ok(if is_in_path("beegfs") { Tool::Beegfs8 } else { Tool::Beegfs7 }),
        // ceph-fuse: every directory of CephFS says how many entries it has.
        FUSE => match rustix::fs::fgetxattr(directory, "ceph.dir.entries", &mut [0u8; 64][..]) {
            Ok(_) => Ok(Tool::Cephfs),
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => {
                Err(StripingError::NotStriped { path: path.to_owned() })
            }
            Err(error) => Err(failed(error)),
        },
        _ => Err(StripingError::NotStriped { path: path.to_owned() }),
    }
}

fn is_in_path(tool: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(tool).is_file()))
}

/// The most that a tool is listened to: it may be another process of the user's that speaks for it.
const MOST_SAID: u64 = 1 << 20;

/// What a tool says until it ends, or has said too much: then it finds nobody who listens any more.
fn output_of(mut child: Child) -> io::Result<Output> {
    let (said, complained) = (child.stdout.take(), child.stderr.take());
    let complaints = std::thread::spawn(move || listen(complained));
    let stdout = listen(said)?;
    let stderr = complaints.join().unwrap_or_else(|_| Err(io::Error::other("its messages can't be read")))?;
    Ok(Output { status: child.wait()?, stdout, stderr })
}

fn listen(pipe: Option<impl Read>) -> io::Result<Vec<u8>> {
    let mut said = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(MOST_SAID).read_to_end(&mut said)?;
    }
    Ok(said)
}
