//! The kernel tells which files of a filesystem are opened, and which were written when they are closed (fanotify).
//!
//! No call waits for whoever listens, no file is opened for it, and a write is no event: a program that writes a file a million times
//! causes two. Files are told by their handles, so that the filesystem is not asked anything either.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ondeck_transfer::identity::FileHandle;
use rustix::io::Errno;

use super::writers::{Event, FileKey};

/// As many bytes as are read at once: about a thousand events.
const BUFFER: usize = 64 << 10;

/// The lengths of the kernel's structures: of an event, and of what tells the file that it is about.
const METADATA: usize = size_of::<libc::fanotify_event_metadata>();
const INFO: usize = size_of::<libc::fanotify_event_info_fid>();

/// Listens to the kernel; it stops when this is dropped.
pub struct Listener {
    fd: OwnedFd,
    buffer: Vec<MaybeUninit<u8>>,
}

/// What came at once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// In their order.
    pub events: Vec<Event>,
    /// Whether some were thrown away, as nobody had read those before.
    pub has_lost: bool,
}

impl Listener {
    /// Listens to nothing yet.
    ///
    /// # Errors
    /// The kernel's: it has no fanotify, or this user may not use it.
    pub fn new() -> io::Result<Listener> {
        let flags = libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_FID | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        // SAFETY: a system call without pointers.
        let fd = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Listener { fd, buffer: vec![MaybeUninit::uninit(); BUFFER] })
    }

    /// Listens to all files of the filesystem that is mounted there, whichever mount they are reached by. Its number in what is told.
    ///
    /// # Errors
    /// The kernel's; `ENODEV` or `EOPNOTSUPP` for filesystems that have no numbers or handles, as FUSE.
    pub fn add(&self, mount_point: &Path) -> io::Result<u64> {
        let filesystem = rustix::fs::statvfs(mount_point)?.f_fsid;
        let path = CString::new(mount_point.as_os_str().as_bytes())?;
        let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
        let events = libc::FAN_OPEN | libc::FAN_CLOSE_WRITE;
        // SAFETY: the path ends with a zero, and outlives the call.
        let failed =
            unsafe { libc::fanotify_mark(self.fd.as_raw_fd(), flags, events, libc::AT_FDCWD, path.as_ptr()) };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(filesystem)
    }

    /// What has come since; nothing if nothing has.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&mut self) -> io::Result<Option<Batch>> {
        match rustix::io::read(&self.fd, &mut self.buffer[..]) {
            Ok((events, _)) => Ok(Some(parse(events))),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Events as the kernel writes them. What is not understood is left out.
fn parse(mut bytes: &[u8]) -> Batch {
    let mut batch = Batch::default();
    while let Some(length) = number(bytes, 0).map(|length| length as usize) {
        if length < METADATA || length > bytes.len() {
            break;
        }
        let (event, rest) = bytes.split_at(length);
        bytes = rest;
        let mask = event[8..16].try_into().map(u64::from_ne_bytes).unwrap_or(0);
        batch.has_lost |= mask & libc::FAN_Q_OVERFLOW != 0;
        let start = usize::from(u16::from_ne_bytes([event[6], event[7]]));
        let process = number(event, 20).unwrap_or(0);
        if let Some(file) = event.get(start..).and_then(file_of) {
            batch.events.push(Event { process, file, written: mask & libc::FAN_CLOSE_WRITE != 0 });
        }
    }
    batch
}

/// The file that an event is about.
fn file_of(info: &[u8]) -> Option<FileKey> {
    if *info.first()? != libc::FAN_EVENT_INFO_TYPE_FID {
        return None;
    }
    let filesystem = u64::from(number(info, 4)?) | u64::from(number(info, 8)?) << 32;
    let (length, kind) = (number(info, INFO)? as usize, number(info, INFO + 4)?.cast_signed());
    let bytes = info.get(INFO + 8..INFO + 8 + length)?;
    Some(FileKey { filesystem, handle: FileHandle::new(kind, bytes) })
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
