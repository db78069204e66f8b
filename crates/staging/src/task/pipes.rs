//! What the worker and the init that watches it share.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::AtomicBool;

use ondeck_transfer::Progress;

/// What the worker and the init see at the same time.
#[repr(C)]
pub struct Shared {
    /// The counters of the copies.
    pub progress: Progress,
    /// Whether a script runs.
    pub in_script: AtomicBool,
}

/// The worker's ends of its pipes.
pub struct Pipes {
    /// For [`Line`](super::order::Line)s.
    pub lines: OwnedFd,
    /// For what a script prints.
    pub log: OwnedFd,
    /// Where a script asks for its limits, with [`ask_for_limits`].
    pub limits: OwnedFd,
}

/// Has the init limit the calling process, which is to become a script; says whether its memory is limited. Makes system
/// calls only.
pub fn ask_for_limits(limits: RawFd) -> bool {
    // SAFETY: system calls with buffers that live until they have returned.
    unsafe {
        let pid = libc::getpid().to_ne_bytes();
        let mut is_grouped = 0_u8;
        libc::send(limits, pid.as_ptr().cast(), pid.len(), libc::MSG_NOSIGNAL) == pid.len() as isize
            && libc::recv(limits, (&raw mut is_grouped).cast(), 1, 0) == 1
            && is_grouped == 1
    }
}
