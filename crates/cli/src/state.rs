//! Where manifests are kept between two copies of the same tree, and where runs keep their state.

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

/// Where this user's runs keep their state: `$ONDECK_STATE_DIR`, or `/dev/shm/ondeck-UID` (`/tmp/ondeck-UID` where there
/// is no /dev/shm). It is made if it is missing, and must be the user's alone.
///
/// Like the runs themselves it lives in this machine's RAM. It is not `$XDG_RUNTIME_DIR`, which is removed when the
/// user logs out while a run may go on.
pub fn runs() -> Result<PathBuf> {
    let uid = rustix::process::geteuid();
    let base = match std::env::var_os("ONDECK_STATE_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir),
        Some(dir) => anyhow::bail!("ONDECK_STATE_DIR={} is not an absolute path", Path::new(&dir).display()),
        None => {
            let parent = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
            Path::new(parent).join(format!("ondeck-{}", uid.as_raw()))
        }
    };
    match std::fs::DirBuilder::new().mode(0o700).create(&base) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| {
                format!(
                    "can't make {} for the run's state; name another directory with ONDECK_STATE_DIR",
                    base.display()
                )
            });
        }
        _ => {}
    }
    let stat = rustix::fs::lstat(&base)?;
    // In /dev/shm and /tmp anybody could have made it first.
    if stat.st_mode & 0o170_077 != 0o040_000 || stat.st_uid != uid.as_raw() {
        anyhow::bail!(
            "{} is not a directory of yours alone (mode 0700); remove it or name another with ONDECK_STATE_DIR",
            base.display()
        );
    }
    Ok(base)
}
