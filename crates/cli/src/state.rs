//! Where manifests are kept between two copies of the same tree, and where runs and caches keep their state.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use twox_hash::XxHash3_128;

/// The manifest of copies to `target`, in the user's state directory: `$XDG_STATE_HOME/ondeck/manifests`, by default
/// `~/.local/state/ondeck/manifests`. `home` overrides the home directory of the environment.
///
/// Its name follows from the target alone, so that the same command finds it again.
pub fn manifest_for(target: &Path, home: Option<&Path>) -> Result<PathBuf> {
    let base = match (home, std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME")) {
        (Some(home), _, _) => home.join(".local/state"),
        (None, Some(state), _) if Path::new(&state).is_absolute() => PathBuf::from(state),
        (None, _, Some(home)) if !home.is_empty() => Path::new(&home).join(".local/state"),
        _ => {
            anyhow::bail!("there is no home directory to keep the manifest in; name one with --manifest FILE")
        }
    };
    let dir = base.join("ondeck/manifests");
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).with_context(|| {
        format!("can't make {} for the manifest; name one with --manifest FILE", dir.display())
    })?;
    let absolute = target.canonicalize().or_else(|_| {
        // A target that does not exist yet: its parent's real path, and its name.
        let clean: PathBuf = target.components().collect();
        let name = clean.file_name().map(ToOwned::to_owned).unwrap_or_default();
        let parent = clean.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        parent.canonicalize().map(|parent| parent.join(name))
    });
    let absolute = absolute.unwrap_or_else(|_| target.to_owned());
    let hash = XxHash3_128::oneshot(absolute.as_os_str().as_bytes()) as u64;
    let name: String = absolute
        .file_name()
        .map(|name| {
            name.to_string_lossy()
                .chars()
                .filter(|c| c.is_alphanumeric() || "-_.".contains(*c))
                .take(60)
                .collect()
        })
        .unwrap_or_default();
    Ok(dir.join(format!("{name}-{hash:016x}.manifest")))
}

/// Where a new run of this user keeps its state: `$ONDECK_STATE_DIR`, or `/dev/shm/ondeck-UID` (`/tmp/ondeck-UID` where
/// there is no /dev/shm). It is made if it is missing, and is the user's alone: if somebody else has taken that name, it
/// is `ondeck-UID-` and a random number, which nobody can take first.
///
/// Like the runs themselves it lives in this machine's RAM. It is not `$XDG_RUNTIME_DIR`, which is removed when the
/// user logs out while a run may go on.
pub fn runs() -> Result<PathBuf> {
    let (base, is_named) = match named()? {
        Some(named) => (named, true),
        None => (usual(), false),
    };
    let cannot_make = |path: &Path| {
        format!(
            "can't make {} for the run's state; name another directory with ONDECK_STATE_DIR",
            path.display()
        )
    };
    let make = |path: &Path| match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| cannot_make(path))
        }
        made => Ok(made.is_ok()),
    };
    make(&base)?;
    if is_ours_alone(&base)? {
        return Ok(base);
    }
    if is_named {
        anyhow::bail!(
            "{} is not a directory of yours alone (mode 0700); name another with ONDECK_STATE_DIR",
            base.display()
        );
    }
    if let Some(other) = others(&base)?.into_iter().next() {
        return Ok(other);
    }
    loop {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let mut name = base.clone().into_os_string();
        name.push(format!("-{:016x}", u64::from_ne_bytes(random)));
        let other = PathBuf::from(name);
        if make(&other)? {
            return Ok(other);
        }
    }
}

/// All directories in which runs of this user may keep their state.
pub fn all_runs() -> Result<Vec<PathBuf>> {
    if let Some(named) = named()? {
        let is_there = named.try_exists().with_context(|| format!("can't look for {}", named.display()))?;
        return Ok(if is_there { vec![runs()?] } else { Vec::new() });
    }
    let usual = usual();
    let mut all = others(&usual)?;
    if is_ours_alone(&usual)? {
        all.insert(0, usual);
    }
    Ok(all)
}

/// Where the caches of this machine are: `$ONDECK_STATE_DIR/cache`, or `/run/ondeck/cache`. It need not exist.
pub fn caches() -> Result<PathBuf> {
    Ok(match named()? {
        Some(named) => named.join("cache"),
        None => PathBuf::from(ondeck_cachefs::instance::USUAL_BASE),
    })
}

fn named() -> Result<Option<PathBuf>> {
    // An empty one is as good as none, as for other programs' directories.
    match std::env::var_os("ONDECK_STATE_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) if Path::new(&dir).is_absolute() => Ok(Some(PathBuf::from(dir))),
        Some(dir) => anyhow::bail!("ONDECK_STATE_DIR={} is not an absolute path", Path::new(&dir).display()),
        None => Ok(None),
    }
}

fn usual() -> PathBuf {
    let parent = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    Path::new(parent).join(format!("ondeck-{}", rustix::process::geteuid().as_raw()))
}

/// The directories of this user's alone that have the usual name with something behind it, in order.
fn others(usual: &Path) -> Result<Vec<PathBuf>> {
    let (Some(parent), Some(name)) = (usual.parent(), usual.file_name()) else { return Ok(Vec::new()) };
    let start = [name.as_bytes(), b"-"].concat();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(parent).with_context(|| format!("can't read {}", parent.display()))? {
        let entry = entry?;
        if entry.file_name().as_bytes().starts_with(&start) && is_ours_alone(&entry.path())? {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Whether this is a directory that nobody but this user can have put anything into. In /dev/shm and /tmp anybody could
/// have made one first; what is this user's there, nobody else can replace (they are sticky).
fn is_ours_alone(path: &Path) -> Result<bool> {
    match rustix::fs::lstat(path) {
        Ok(stat) => {
            let is_private_directory = stat.st_mode & 0o170_077 == 0o040_000;
            Ok(is_private_directory && stat.st_uid == rustix::process::geteuid().as_raw())
        }
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("can't look at {}", path.display())),
    }
}
