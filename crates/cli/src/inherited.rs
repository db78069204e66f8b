//! What a process has inherited from whoever started it.

use std::collections::HashSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Closes all descriptors but the standard streams. Whoever starts a daemon by hand may have left files open; what the
/// daemon starts, users' scripts included, would have them, too. Nothing passes descriptors to these commands on purpose.
///
/// To be called before the process has opened anything itself.
pub fn close_descriptors() {
    const FIRST: libc::c_int = 3;
    // SAFETY: nothing of this process's own is open yet, so nobody uses what is closed.
    unsafe {
        if libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) == 0 {
            return;
        }
    }
    // Before Linux 5.9.
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<libc::c_int> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for descriptor in open.into_iter().filter(|descriptor| *descriptor >= FIRST) {
        // SAFETY: as above; the directory itself, which is among them, has been closed already.
        unsafe { libc::close(descriptor) };
    }
}

/// Whether this process has pipes of others: those of which it has inherited both ends. Of a pipe that was made for it, whoever made
/// it has kept the other end, and has closed that in the process which it made.
///
/// # Errors
///
/// If that can't be told.
pub fn has_pipes_of_others() -> io::Result<bool> {
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // What reads the directory is among them, and is no pipe.
        let target = std::fs::read_link(entry.path())?;
        if !target.as_os_str().as_bytes().starts_with(b"pipe:") {
            continue;
        }
        let mut info = Path::new("/proc/self/fdinfo").to_owned();
        info.push(entry.file_name());
        let info = std::fs::read_to_string(info)?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        let flags =
            flags.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no flags of a descriptor"))?;
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => read.insert(target),
            _ => written.insert(target),
        };
    }
    Ok(!read.is_disjoint(&written))
}
