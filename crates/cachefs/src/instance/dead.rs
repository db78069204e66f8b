//! Whether the server of a mount is dead.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ondeck_ramdisk::mounts::{self, Mount};
use rustix::io::Errno;

/// Whether nobody serves a mount of a cache any more. One that is served, and does not answer, is waited for.
///
/// # Errors
/// The kernel's, if that can't be seen.
pub fn is_dead(mount: &Mount) -> io::Result<bool> {
    let root = mounts::open_plainly(&mount.at)?;
    if let Some(dead) = ask(root.as_fd())? {
        return Ok(dead);
    }
    // It is a user's, and lets in nobody else, not even root: the kernel answers without asking the server.
    let (uid, gid) = owner(mount)?;
    let asked = std::thread::scope(|scope| {
        let ask = || {
            become_user(uid, gid)?;
            ask(root.as_fd())
        };
        scope.spawn(ask).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    asked?.ok_or_else(|| io::Error::other("the kernel does not ask its server"))
}

/// Whether the server is dead; `None` if the kernel did not ask it. Attributes are kept by the kernel; this it asks for.
fn ask(root: BorrowedFd<'_>) -> io::Result<Option<bool>> {
    match rustix::fs::fstatfs(root) {
        // No filesystem has blocks of no bytes.
        Ok(found) => Ok((found.f_bsize != 0).then_some(false)),
        Err(Errno::NOTCONN) => Ok(Some(true)),
        // It answers, though with an error.
        Err(_) => Ok(Some(false)),
    }
}

/// Whom a mount lets in: user and group, as its options have it (mount.fuse(8)).
fn owner(mount: &Mount) -> io::Result<(u32, u32)> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let id = mount.id.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&id));
    let options = line.and_then(|line| line.rsplit(' ').next()).ok_or(Errno::NOENT)?;
    let number = |name: &str| {
        let value = options.split(',').find_map(|option| option.strip_prefix(name));
        value.and_then(|value| value.parse().ok()).ok_or(io::Error::from(Errno::INVAL))
    };
    Ok((number("user_id=")?, number("group_id=")?))
}

/// Makes the calling thread, and no other, a user's in every respect, which is what the kernel lets in. The user could signal the
/// thread, and with it this process, which serves nothing yet.
fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    for (call, id) in [(libc::SYS_setresgid, gid), (libc::SYS_setresuid, uid)] {
        // SAFETY: a system call with numbers. Not the C library's, which would change all threads: it concerns the calling one alone.
        if unsafe { libc::syscall(call, id, id, id) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
