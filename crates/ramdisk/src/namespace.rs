//! Private namespaces, made once and entered by every later helper process.
//!
//! The maker of the namespaces stays outside of them: it holds descriptors of the namespaces and of the RAM disk's
//! root, and so can copy into and out of the RAM disk with its own identity, all its groups included, long after the
//! processes inside have ended. What must happen inside (mounting, running the program) happens in a child that
//! joins them.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ondeck_core::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::tmpfs::{self, Features};

/// The namespaces of one run, and the RAM disk that is mounted in them.
pub struct Namespaces {
    /// `None` for root, who needs none.
    user: Option<OwnedFd>,
    mount: OwnedFd,
    /// The root directory of the RAM disk. As long as it is open the RAM disk exists.
    pub ram_disk: OwnedFd,
    /// What the kernel allowed.
    pub features: Features,
}

/// Which step of building the namespaces failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct BuildError {
    /// What was tried.
    pub step: &'static str,
    /// The kernel's answer.
    pub source: io::Error,
}

/// The steps, in order; a failing helper reports the number of its step.
const STEPS: [&str; 6] = [
    "starting a helper process",
    "making private namespaces",
    "mapping your user and group into the user namespace",
    "keeping the mounts private",
    "mounting the RAM disk",
    "handing over the RAM disk",
];

impl Namespaces {
    /// Makes the namespaces and mounts a RAM disk of `size` at `mount_point` in them; outside of them the directory
    /// stays empty. The calling process must have one thread only, because a copy of it does the work.
    ///
    /// # Errors
    /// [`BuildError`], with the step that failed; nothing is left of the others.
    pub fn build(mount_point: &Path, size: Bytes) -> Result<Namespaces, BuildError> {
        let failed = |step: usize, source: io::Error| BuildError { step: STEPS[step], source };
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|error| failed(0, error.into()))?;
        let uid = rustix::process::geteuid();
        let gid = rustix::process::getegid();
        // SAFETY: the caller has one thread only, so the child's copy of this process is complete and consistent;
        // the child leaves by _exit and runs no destructor of its parent.
        let child = unsafe { libc::fork() };
        match child {
            -1 => Err(failed(0, io::Error::last_os_error())),
            0 => {
                let result = build_inside(mount_point, size, uid.as_raw(), gid.as_raw());
                report(&theirs, result);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) }
            }
            _ => {
                drop(theirs);
                let received = receive(&ours, uid.is_root());
                wait_for(child);
                received.map_err(|(step, source)| failed(step, source))
            }
        }
    }

    /// Sends all that is needed to act as this process does, through a socket of packets. It waits there if nobody
    /// receives it, and keeps the RAM disk alive.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hand_over(&self, socket: &OwnedFd) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = [Some(&self.mount), Some(&self.ram_disk), self.user.as_ref()]
            .into_iter()
            .flatten()
            .map(|fd| fd.as_fd())
            .collect();
        send_built(socket, &fds, self.features)
    }

    /// Receives what [`Namespaces::hand_over`] has sent.
    ///
    /// # Errors
    /// The kernel's; also if nothing was sent.
    pub fn received(socket: &OwnedFd) -> io::Result<Namespaces> {
        receive(socket, rustix::process::geteuid().is_root()).map_err(|(_, error)| error)
    }

    /// Moves the calling process, which must have one thread only, into the namespaces.
    ///
    /// It makes two system calls and nothing else, so it may be called between fork and exec.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join(&self) -> io::Result<()> {
        if let Some(user) = &self.user {
            move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))?;
        }
        move_into_link_name_space(self.mount.as_fd(), Some(LinkNameSpaceType::Mount))?;
        Ok(())
    }

    /// Runs `work` in a child process inside the namespaces and waits for it.
    ///
    /// # Errors
    /// What `work` returned (as far as it is a system call's error), or why the child could not be run.
    pub fn inside(&self, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        // SAFETY: the child is a copy with one thread, the caller's. glibc makes its allocator usable after a fork
        // whatever the other threads were doing, and `work` takes no other lock; the child leaves by _exit.
        let child = unsafe { libc::fork() };
        match child {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let code = match self.join().and_then(|()| work()) {
                    Ok(()) => 0,
                    // An errno is 1 to 133; whatever else went wrong is told as an I/O error.
                    Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
                };
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(code) }
            }
            _ => match wait_for(child) {
                Some(0) => Ok(()),
                Some(code) => Err(io::Error::from_raw_os_error(code)),
                None => Err(io::Error::other("the helper process was killed")),
            },
        }
    }
}

/// The exit code of a child, `None` if a signal ended it.
fn wait_for(child: libc::pid_t) -> Option<i32> {
    let mut status = 0;
    loop {
        // SAFETY: waits for a child of this process by its pid.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        if waited == child {
            return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

struct NewNamespaces {
    user: Option<OwnedFd>,
    mount: OwnedFd,
    ram_disk: OwnedFd,
    features: Features,
}

/// In the child: everything up to the mounted RAM disk. The error carries the index of its step.
fn build_inside(
    mount_point: &Path,
    size: Bytes,
    uid: u32,
    gid: u32,
) -> Result<NewNamespaces, (usize, io::Error)> {
    let at = |step: usize| move |error: io::Error| (step, error);
    let root = uid == 0;
    let mut flags = UnshareFlags::NEWNS;
    if !root {
        flags |= UnshareFlags::NEWUSER;
    }
    // SAFETY: this process has one thread, and no one relies on its sharing mounts with its parent.
    unsafe { unshare_unsafe(flags) }.map_err(|error| at(1)(error.into()))?;
    if !root {
        // The identity mapping: the program sees its own uid and gid. Groups can only be mapped once setgroups is
        // given up for good.
        fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).map_err(at(2))?;
        fs::write("/proc/self/setgroups", "deny").map_err(at(2))?;
        fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).map_err(at(2))?;
    }
    // Mounts that the machine makes later still come in; ours never go out.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(|error| at(3)(error.into()))?;
    let features = tmpfs::mount_tmpfs(mount_point, size, uid, gid).map_err(at(4))?;
    let open = |path: &Path, flags: OFlags| -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
    };
    let directory = OFlags::RDONLY | OFlags::DIRECTORY;
    Ok(NewNamespaces {
        user: if root {
            None
        } else {
            Some(open(Path::new("/proc/self/ns/user"), OFlags::RDONLY).map_err(at(5))?)
        },
        mount: open(Path::new("/proc/self/ns/mnt"), OFlags::RDONLY).map_err(at(5))?,
        ram_disk: open(mount_point, directory).map_err(at(5))?,
        features,
    })
}

/// Sends the result: a byte for the step (0: success) and the errno or the features, and the descriptors.
fn report(socket: &OwnedFd, result: Result<NewNamespaces, (usize, io::Error)>) {
    // If the parent is gone, nobody needs the answer.
    let _ = match &result {
        Ok(built) => {
            let fds: Vec<BorrowedFd<'_>> = [Some(&built.mount), Some(&built.ram_disk), built.user.as_ref()]
                .into_iter()
                .flatten()
                .map(|fd| fd.as_fd())
                .collect();
            send_built(socket, &fds, built.features)
        }
        Err((step, error)) => {
            send(socket, [*step as u8, error.raw_os_error().unwrap_or(libc::EIO) as u8, 0], &[])
        }
    };
}

/// Leaves a descriptor in a socket of packets, where it stays open as long as somebody has the other end.
///
/// # Errors
/// The kernel's.
pub fn deposit(socket: &OwnedFd, what: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, [0; 3], &[what])
}

fn send_built(socket: &OwnedFd, fds: &[BorrowedFd<'_>], features: Features) -> io::Result<()> {
    send(socket, [0, u8::from(features.huge_pages), u8::from(features.no_swap)], fds)
}

fn send(socket: &OwnedFd, message: [u8; 3], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: &OwnedFd, root: bool) -> Result<Namespaces, (usize, io::Error)> {
    let mut message = [0_u8; 3];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let lost = || (5, io::Error::other("the helper process ended without an answer"));
    let received = loop {
        match rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut message)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(|error| (5, error.into()))?,
        }
    };
    if received.bytes != message.len() {
        return Err(lost());
    }
    if message[0] != 0 {
        return Err((usize::from(message[0]), io::Error::from_raw_os_error(i32::from(message[1]))));
    }
    let mut fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten();
    let (mount, ram_disk) = fds.next().zip(fds.next()).ok_or_else(lost)?;
    let user = if root { None } else { Some(fds.next().ok_or_else(lost)?) };
    let features = Features { huge_pages: message[1] == 1, no_swap: message[2] == 1 };
    Ok(Namespaces { user, mount, ram_disk, features })
}

/// Descriptor numbers, for those who are told where to look: `/proc/PID/fd/N`.
impl Namespaces {
    /// The number of the RAM disk's descriptor in this process.
    pub fn ram_disk_number(&self) -> i32 {
        self.ram_disk.as_raw_fd()
    }

    /// The number of the mount namespace's descriptor in this process, by which another one of root's can join it.
    pub fn mount_number(&self) -> i32 {
        self.mount.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    // `build` must be called by a process with one thread, which a test is not: what it does is tested through the
    // command, as root and as an ordinary user (tests/run.rs). Forking from a test thread works for these as well,
    // because the child calls nothing that another thread could have locked.
    #[test]
    fn a_ram_disk_is_seen_inside_its_namespaces_and_by_descriptor_only() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = match Namespaces::build(dir.path(), Bytes(8 << 20)) {
            Ok(namespaces) => namespaces,
            Err(error) => panic!("{error}"),
        };
        let path = dir.path().to_owned();
        namespaces.inside(|| fs::write(path.join("x"), "inside")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "outside the directory stays empty");
        let seen = rustix::fs::statat(&namespaces.ram_disk, "x", rustix::fs::AtFlags::empty()).unwrap();
        assert_eq!(seen.st_size, 6);
        assert_ne!(seen.st_dev, fs::metadata(dir.path()).unwrap().dev());
        let error = namespaces.inside(|| fs::write("/nowhere/at/all", "")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
