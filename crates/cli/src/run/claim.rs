//! Whether a process of a run lives: its directory is locked for as long.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use rustix::fs::FlockOperation;

/// The file in a run's directory that its processes have locked.
pub const LOCK: &str = "lock";

/// Claims the directory of a run for this process, and those that it forks, until the last of them has ended.
pub fn claim(dir: &Path) -> std::io::Result<File> {
    let lock = File::options().create(true).truncate(false).write(true).open(dir.join(LOCK))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

/// Whether a process of the run lives.
pub fn is_claimed(dir: &Path) -> std::io::Result<bool> {
    let lock = match File::options().write(true).open(dir.join(LOCK)) {
        // It is made at once after the directory. One that was made later than now was made by another clock.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let made = std::fs::metadata(dir)?.modified()?;
            return Ok(made.elapsed().map_or(true, |age| age < Duration::from_secs(60)));
        }
        other => other?,
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}
