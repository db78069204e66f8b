//! What a process has inherited from whoever started it.

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
