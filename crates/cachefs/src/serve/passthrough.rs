//! Files that the kernel reads by itself.
//!
//! The kernel knows a file of the store by an identity that it gives on request, and wants the same one for all open handles
//! of a file. So they share it, and it is given back with the last.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use fuser::BackingId;

use crate::message::{Handle, Ino};

/// The files that are open so.
#[derive(Default)]
pub struct PassthroughFiles(Mutex<Open>);

#[derive(Default)]
struct Open {
    files: HashMap<Ino, OpenFile>,
    /// Whose a handle is, and whether it is writable.
    handles: HashMap<Handle, (Ino, bool)>,
}

struct OpenFile {
    id: Arc<BackingId>,
    handles: usize,
    writable: usize,
}

impl PassthroughFiles {
    /// Counts a handle of the file; `make` makes the identity if it has none.
    ///
    /// # Errors
    /// What `make` says.
    pub fn open(
        &self,
        ino: Ino,
        handle: Handle,
        writable: bool,
        make: impl FnOnce() -> io::Result<BackingId>,
    ) -> io::Result<Arc<BackingId>> {
        let open = &mut *self.lock();
        let file = match open.files.entry(ino) {
            std::collections::hash_map::Entry::Occupied(file) => file.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(OpenFile { id: Arc::new(make()?), handles: 0, writable: 0 })
            }
        };
        file.handles += 1;
        file.writable += usize::from(writable);
        open.handles.insert(handle, (ino, writable));
        Ok(Arc::clone(&file.id))
    }

    /// Forgets a handle; fine if it is none of these. Returns whether the file could be written to through it.
    pub fn release(&self, handle: Handle) -> bool {
        let open = &mut *self.lock();
        let Some((ino, writable)) = open.handles.remove(&handle) else { return false };
        if let Some(file) = open.files.get_mut(&ino) {
            file.handles -= 1;
            file.writable -= usize::from(writable);
            if file.handles == 0 {
                open.files.remove(&ino);
            }
        }
        writable
    }

    /// Whether programs may change the file through maps, which nobody tells the kernel's record of its times.
    pub fn is_writable(&self, ino: Ino) -> bool {
        let open = self.lock();
        open.files.get(&ino).is_some_and(|file| file.writable > 0)
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        // The counts of a file and its handles change together, and nothing in between panics.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Gives an identity back that was asked for without a file's being opened.
pub fn close_backing(device: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    // _IOW(229, 2, uint32_t): FUSE_DEV_IOC_BACKING_CLOSE of <linux/fuse.h>.
    const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;
    // SAFETY: the kernel reads one number at an address that is valid for the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE as _, &raw const id) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
