//! Ctrl-C, SIGTERM and SIGHUP as an ordinary error.
//!
//! A benchmark that is stopped halfway must still unmount its tmpfs and remove gigabytes of test
//! data. The handler therefore only writes a byte to a pipe; whoever waits for a command polls the
//! pipe too, long loops call [`check`], and the error then unwinds through the `Drop`s that clean
//! up. A second signal does not cut that short.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::{Context, Result};
use rustix::pipe::{PipeFlags, pipe_with};

static SIGNAL: AtomicI32 = AtomicI32::new(0);
static WRITE_END: AtomicI32 = AtomicI32::new(-1);
static PIPE: OnceLock<(OwnedFd, OwnedFd)> = OnceLock::new();

/// The bench was told to stop. The process then exits with 128 + the signal, like a shell.
#[derive(Clone, Copy, Debug)]
pub struct Interrupted {
    pub signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by signal {}", self.signal)
    }
}

impl std::error::Error for Interrupted {}

extern "C" fn on_signal(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::SeqCst);
    let byte = 1u8;
    // SAFETY: write(2) is async-signal-safe, the descriptor is never closed once installed, and
    // one byte is read from a live local. A full pipe is as good as one more byte in it, so the
    // result does not matter; errno is restored because the interrupted code may be about to read
    // it.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(WRITE_END.load(Ordering::SeqCst), (&raw const byte).cast(), 1);
        *libc::__errno_location() = errno;
    }
}

/// Catches the signals from here on, but for those that whoever started the bench chose to ignore,
/// as nohup and a shell's `&` do. Commands that are started get the default action back on
/// exec, because handlers do not survive it.
pub fn install() -> Result<()> {
    let ends = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).context("cannot make a pipe")?;
    let (_, write_end) = PIPE.get_or_init(|| ends);
    WRITE_END.store(write_end.as_raw_fd(), Ordering::SeqCst);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the structures are fully initialised (zeroes are valid: no flags, empty mask),
        // and the handler does only what a handler may.
        let result = unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            match libc::sigaction(signal, std::ptr::null(), &raw mut before) {
                0 if before.sa_sigaction == libc::SIG_IGN => 0,
                0 => libc::sigaction(signal, &raw const action, std::ptr::null_mut()),
                error => error,
            }
        };
        if result == -1 {
            return Err(std::io::Error::last_os_error()).context("cannot catch signals");
        }
    }
    Ok(())
}

/// Fails once a signal has come.
pub fn check() -> Result<(), Interrupted> {
    match SIGNAL.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Interrupted { signal }),
    }
}

/// Readable once a signal has come; nothing where [`install`] was not called (tests).
pub fn readable() -> Option<BorrowedFd<'static>> {
    use std::os::fd::AsFd;
    PIPE.get().map(|(read_end, _)| read_end.as_fd())
}
