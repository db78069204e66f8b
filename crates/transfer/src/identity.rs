//! What a file is to its filesystem, whatever it is called: its file handle, as the kernel also names files to those that watch
//! them. A name that is used again is another file with another handle.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::str::FromStr;

/// The most bytes of a handle (`MAX_HANDLE_SZ`).
const MOST: usize = 128;

/// Asks for a handle that need not open the file again, as fanotify has them (Linux 6.5, `AT_HANDLE_FID`).
const HANDLE_FID: libc::c_int = 0x200;

/// A file's handle; the same file has the same on all clients of a filesystem in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileHandle {
    kind: i32,
    bytes: Vec<u8>,
}

/// As the kernel writes it: `struct file_handle`.
#[repr(C)]
struct Raw {
    length: libc::c_uint,
    kind: libc::c_int,
    bytes: [u8; MOST],
}

impl FileHandle {
    /// Of its parts, as events have them.
    pub fn new(kind: i32, bytes: &[u8]) -> FileHandle {
        FileHandle { kind, bytes: bytes.to_vec() }
    }

    /// That of a file in a directory, which is not opened. A symlink's is its own.
    ///
    /// # Errors
    /// The kernel's; `EOPNOTSUPP` where the filesystem has none.
    pub fn of(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<FileHandle> {
        match FileHandle::ask(directory, name, HANDLE_FID) {
            // An older kernel has one kind of them alone.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => FileHandle::ask(directory, name, 0),
            asked => asked,
        }
    }

    fn ask(directory: BorrowedFd<'_>, name: &CStr, flags: libc::c_int) -> io::Result<FileHandle> {
        let mut raw = Raw { length: MOST as libc::c_uint, kind: 0, bytes: [0; MOST] };
        let mut mount: libc::c_int = 0;
        // SAFETY: `raw` is laid out as the kernel's structure, and says how many bytes there is room for behind it; the name ends
        // with a zero; all of them outlive the call.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                directory.as_raw_fd(),
                name.as_ptr(),
                &raw mut raw,
                &raw mut mount,
                flags,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(FileHandle::new(raw.kind, &raw.bytes[..MOST.min(raw.length as usize)]))
    }

    /// A number that is the same wherever it is asked for: of many files, those with the smallest are a sample.
    pub fn rank(&self) -> u64 {
        let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        let hash = self.bytes.iter().fold(0xcbf2_9ce4_8422_2325, hash);
        // FNV leaves the upper bits of short keys alike.
        let hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        hash ^ (hash >> 32)
    }
}

/// As `1:08405100290054c5`: its kind, and its bytes.
impl fmt::Display for FileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.kind)?;
        self.bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What is no handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a file handle is a number, a colon and pairs of hexadecimal digits")]
pub struct NoHandle;

impl FromStr for FileHandle {
    type Err = NoHandle;

    fn from_str(text: &str) -> Result<FileHandle, NoHandle> {
        let (kind, bytes) = text.split_once(':').ok_or(NoHandle)?;
        if bytes.len() % 2 != 0 || bytes.len() > 2 * MOST {
            return Err(NoHandle);
        }
        let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(NoHandle);
        let byte = |pair: &[u8]| Ok((digit(pair[0])? * 16 + digit(pair[1])?) as u8);
        let bytes: Result<Vec<u8>, NoHandle> = bytes.as_bytes().chunks_exact(2).map(byte).collect();
        Ok(FileHandle { kind: kind.parse().map_err(|_| NoHandle)?, bytes: bytes? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_handle_is_the_files_whatever_it_is_called_and_an_other_ones_if_it_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let of = |name: &CStr| FileHandle::of(directory.as_fd(), name);
        fs::write(folder.path().join("a"), "one").unwrap();
        let first = of(c"a").unwrap();
        fs::write(folder.path().join("a"), "longer than before").unwrap();
        fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
        fs::hard_link(folder.path().join("b"), folder.path().join("c")).unwrap();
        assert_eq!((of(c"b").unwrap(), of(c"c").unwrap()), (first.clone(), first.clone()));
        fs::write(folder.path().join("a"), "another").unwrap();
        let second = of(c"a").unwrap();
        assert_ne!(second, first);
        assert_ne!((second.rank(), second.to_string()), (first.rank(), first.to_string()));
        assert!(of(c"none").is_err());
        assert_eq!(FileHandle::new(1, &[8, 0x40, 0xff]).to_string(), "1:0840ff");
        assert_eq!(first.to_string().parse(), Ok(first));
        for wrong in ["", "1", "1:0", "x:00", "1:0g", "1:+1", "1:\u{e4}"] {
            assert_eq!(wrong.parse::<FileHandle>(), Err(NoHandle), "{wrong}");
        }
    }

    #[test]
    fn ranks_of_handles_that_count_up_are_spread_evenly() {
        let below = (0..10_000u32).filter(|inode| {
            let bytes: Vec<u8> = inode.to_le_bytes().into_iter().chain([7, 0, 0, 0]).collect();
            FileHandle::new(1, &bytes).rank() < u64::MAX / 4
        });
        assert!((2_200..2_800).contains(&below.count()));
    }
}
